"""Connection to a Ray cluster, or a local start; refuses what cannot work before anything waits."""

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

from cluster.handles.node import starts_here
from cluster.placement.local_head import LocalHead, hush_token_setup, local_head
from distill.errors import ConfigError

# A head that is there answers in milliseconds; Ray itself would try for more than a minute.
_ANSWER_S = 10.0
# An autoscaler writes its first report seconds after the head is up.
_REPORT_S = 20.0
_TOKEN = (
    "put the cluster's token into ~/.ray/auth_token (or RAY_AUTH_TOKEN, or a file that "
    "RAY_AUTH_TOKEN_PATH names) and set RAY_AUTH_MODE=token"
)


@contextmanager
def connect(namespace: str, local_cpus: int) -> Iterator[None]:
    """Ray, for as long as the context lasts: RAY_ADDRESS's cluster, or else one started here.

    A Ray that is already initialised is used as it is, and left so. One started here has
    `local_cpus` CPUs.

    Raises:
        ConfigError: RAY_ADDRESS names no cluster that answers, or one that refuses this process; or
            Ray cannot start here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # before the lines of actors
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
    """GPUs of the nodes that are up, in the cluster that is connected or that RAY_ADDRESS names.

    Raises:
        ConfigError: RAY_ADDRESS names no cluster that answers, or one that refuses this process.
    """
    return get_cluster_status(head_address()).total_resources().get("GPU", 0.0)


def autoscales() -> bool:
    """True if that cluster has an autoscaler, so that nodes may come that it lacks now.

    Every cluster's monitor reports its nodes' types: under an autoscaler they are those of its
    configuration, without one each node is a type of its own, called `node_<id>`. Waits a while for
    the first report of a cluster that has just come up.

    Raises:
        ConfigError: as `cluster_gpus`.
    """
    address = head_address()
    deadline = time.monotonic() + _REPORT_S
    while (types := _node_types(address)) is None and time.monotonic() < deadline:
        time.sleep(0.5)
    return any(not node_type.startswith("node_") for node_type in types or ())


def _node_types(address: str) -> list[str] | None:
    """Node types in the autoscaler's report, which its two generations keep in different places."""
    client = GcsClient(address)
    if is_autoscaler_v2(fetch_from_server=True, gcs_client=client):
        status = get_cluster_status(address)
        nodes = [*status.active_nodes, *status.idle_nodes]
        return [node.ray_node_type_name for node in nodes] or None
    written = client.internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode(), None)
    report = json.loads(written).get("autoscaler_report") if written else None
    return list(report["node_type_mapping"].values()) or None if report else None


def head_address() -> str:
    """Address of the connected cluster's head, or of the one that RAY_ADDRESS names, if it answers.

    Raises:
        ConfigError: it does not, or refuses this process.
    """
    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    address = os.environ["RAY_ADDRESS"]
    with _joining(address):
        return _named_head(address)


def join_local(head: LocalHead, namespace: str) -> None:
    """Connects this process to the Ray that was started on this machine.

    Raises:
        ConfigError: Ray cannot start here.
    """
    address = head.address()
    hush_token_setup()
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    ray.init(address=address, namespace=namespace, logging_level=logging.WARNING)


def _join(address: str, namespace: str) -> None:
    with _joining(address):
        _named_head(address)
        ray.init(namespace=namespace, log_to_driver=True)


@contextmanager
def _joining(address: str) -> Iterator[None]:
    """Turns what Ray raises meanwhile into ConfigErrors."""
    try:
        yield
    except ConfigError:
        raise
    except AuthenticationError as error:
        raise ConfigError(
            f"RAY_AUTH_MODE=token, and there is no token for RAY_ADDRESS={address}; {_TOKEN}",
            field="RAY_AUTH_MODE",
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        if "Version mismatch" in str(error):
            raise _other_version(address, " ".join(str(error).split())) from error
        raise ConfigError(
            f"RAY_ADDRESS={address} cannot be joined: {error}. The driver runs on a node of the "
            "cluster; leave RAY_ADDRESS out to start Ray here, or submit a job",
            field="RAY_ADDRESS",
        ) from error


def _named_head(address: str) -> str:
    """Address of the head that RAY_ADDRESS names; one that is named by host and port answers."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address} is a Ray client's address, and a run's driver must be in the "
            "cluster: submit a job there (ray job submit --address http://HEAD:8265 --working-dir "
            ". -- python -m cluster.train ...), or on a node of it set RAY_ADDRESS=HEAD:6379",
            field="RAY_ADDRESS",
        )
    if address == "auto":
        return canonicalize_bootstrap_address_or_die(address)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    _require_answer(address)
    return address


def _require_answer(address: str) -> None:
    """Raises ConfigError unless a Ray head of this version answers there, and lets us in."""
    _, separator, port = address.rpartition(":")
    if "://" in address or not separator or not port.isdigit():
        raise ConfigError(
            f"RAY_ADDRESS={address} is no address of a Ray head; it is HOST:PORT, 6379 by default",
            field="RAY_ADDRESS",
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
        f"the Ray cluster of RAY_ADDRESS={address} has other versions than this process: {what}. "
        f"Install ray=={ray.__version__} on Python {platform.python_version()} on every node, or "
        "run with the cluster's own (in its image, or as a submitted job)",
        field="RAY_ADDRESS",
    )
