"""Connection to a Ray cluster or a local Ray. Addresses that cannot work are rejected early."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import grpc
import ray
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import (
    GcsClient,  # pyright: ignore[reportAttributeAccessIssue] - compiled
)
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.core.generated.gcs_service_pb2 import (
    CheckAliveRequest,  # pyright: ignore[reportAttributeAccessIssue] - made at import
)
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.exceptions import AuthenticationError

from cluster.base.signals import handler_kept
from cluster.handles.node import starts_here
from cluster.placement.local_head import LocalHead, local_head, suppress_token_notice
from distill.errors import ConfigError

# A running head answers in milliseconds; Ray itself would retry for more than a minute.
_ANSWER_S = 10.0
# An autoscaler writes its first report a few seconds after the head has started.
_REPORT_S = 20.0
_TOKEN = (
    "put the cluster's token into ~/.ray/auth_token (or RAY_AUTH_TOKEN, or a file that "
    "RAY_AUTH_TOKEN_PATH names) and set RAY_AUTH_MODE=token"
)


@contextmanager
def connect(namespace: str, local_cpus: int) -> Iterator[None]:
    """Context manager that connects to the cluster of RAY_ADDRESS, or to a Ray started here.

    If Ray is already initialised, it is used and not shut down. A Ray that is started here has
    `local_cpus` CPUs.

    Raises:
        ConfigError: the cluster of RAY_ADDRESS does not answer, or rejects this process; or Ray
            cannot start here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # the prefix of actors' lines
    if ray.is_initialized():
        yield
        return
    with ExitStack() as stack:
        if starts_here():
            head = stack.enter_context(local_head(local_cpus))
            stack.callback(ray.shutdown)
            join_local(head, namespace)
        else:
            stack.callback(ray.shutdown)
            _join(os.environ["RAY_ADDRESS"], namespace)
        yield


def cluster_gpus() -> float:
    """Number of GPUs of the running nodes, in the connected cluster or in that of RAY_ADDRESS.

    Raises:
        ConfigError: the cluster of RAY_ADDRESS does not answer, or rejects this process.
    """
    return get_cluster_status(head_address()).total_resources().get("GPU", 0.0)


def autoscales() -> bool:
    """True if the cluster has an autoscaler, which may add nodes.

    The monitor of every cluster reports the types of its nodes. With an autoscaler they are those
    of its configuration; without one each node has its own type, `node_<id>`. If the cluster has
    just started, wait a while for its first report.

    Raises:
        ConfigError: as `cluster_gpus`.
    """
    address = head_address()
    deadline = time.monotonic() + _REPORT_S
    while (types := _node_types(address)) is None and time.monotonic() < deadline:
        time.sleep(0.5)
    return any(not node_type.startswith("node_") for node_type in types or ())


def _node_types(address: str) -> list[str] | None:
    """Node types in the autoscaler's report, which is in different places in its two versions."""
    client = GcsClient(address)
    if is_autoscaler_v2(fetch_from_server=True, gcs_client=client):
        status = get_cluster_status(address)
        nodes = [*status.active_nodes, *status.idle_nodes]
        return [node.ray_node_type_name for node in nodes] or None
    written = client.internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode(), None)
    report = json.loads(written).get("autoscaler_report") if written else None
    return list(report["node_type_mapping"].values()) or None if report else None


def head_address() -> str:
    """Address of the head of the connected cluster, or of the cluster of RAY_ADDRESS.

    Raises:
        ConfigError: the head does not answer, or rejects this process.
    """
    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    address = os.environ["RAY_ADDRESS"]
    with _joining(address):
        return _named_head(address)


def join_local(head: LocalHead, namespace: str) -> None:
    """Connect this process to the Ray that was started on this machine.

    Raises:
        ConfigError: Ray cannot start here.
    """
    address = head.address()
    suppress_token_notice()
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    with handler_kept():
        ray.init(address=address, namespace=namespace, logging_level=logging.WARNING)


def _join(address: str, namespace: str) -> None:
    with _joining(address), handler_kept():
        _named_head(address)
        ray.init(namespace=namespace, log_to_driver=True)


@contextmanager
def _joining(address: str) -> Iterator[None]:
    """Context manager that converts Ray's errors to ConfigErrors."""
    try:
        yield
    except ConfigError:
        raise
    except AuthenticationError as error:
        raise ConfigError(
            f"RAY_AUTH_MODE=token, but there is no token for RAY_ADDRESS={address}; {_TOKEN}"
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        if "Version mismatch" in str(error):
            raise _other_version(address, " ".join(str(error).split())) from error
        raise ConfigError(
            f"RAY_ADDRESS={address} cannot be joined: {error}. The driver runs on a node of the "
            "cluster; leave RAY_ADDRESS out to start Ray here, or submit a job"
        ) from error


def _named_head(address: str) -> str:
    """Address of the head for a value of RAY_ADDRESS. A head given as HOST:PORT must answer."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address} is a Ray client's address, and a run's driver must be in the "
            "cluster: submit a job there (ray job submit --address http://HEAD:8265 --working-dir "
            ". -- python -m cluster.train ...), or on a node of it set RAY_ADDRESS=HEAD:6379"
        )
    if address == "auto":
        return canonicalize_bootstrap_address_or_die(address)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    _require_answer(address)
    return address


def _require_answer(address: str) -> None:
    """Raise ConfigError unless a Ray head of this version answers and accepts this process."""
    _, separator, port = address.rpartition(":")
    if "://" in address or not separator or not port.isdigit():
        raise ConfigError(
            f"RAY_ADDRESS={address} is not the address of a Ray head, HOST:PORT (port 6379 by "
            "default)"
        )
    try:
        with closing(init_grpc_channel(address)) as channel:
            reply = NodeInfoGcsServiceStub(channel).CheckAlive(
                CheckAliveRequest(), timeout=_ANSWER_S
            )
    except grpc.RpcError as error:
        code = error.code()  # pyright: ignore[reportAttributeAccessIssue] - every call's error has it
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise ConfigError(
                f"the Ray cluster of RAY_ADDRESS={address} refuses this process's token; {_TOKEN}",
                field="RAY_ADDRESS",
            ) from error
        details = error.details()  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            f"no Ray head answers at RAY_ADDRESS={address} ({code.name.lower()}: {details}). Start "
            "one there (ray start --head), correct the address, or leave RAY_ADDRESS out to start "
            "Ray on this machine",
            field="RAY_ADDRESS",
        ) from error
    if reply.ray_version != ray.__version__:
        raise _other_version(
            address, f"it runs Ray {reply.ray_version}, and this process Ray {ray.__version__}"
        )


def _other_version(address: str, what: str) -> ConfigError:
    return ConfigError(
        f"the Ray cluster of RAY_ADDRESS={address} has versions that differ from this process: "
        f"{what}. Install ray=={ray.__version__} on Python {platform.python_version()} on every "
        "node, or run with the cluster's versions (in its image, or as a submitted job)",
        field="RAY_ADDRESS",
    )
