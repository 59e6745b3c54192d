"""A real Ray cluster on this machine whose worker nodes come and go with what is asked of it.

    with scaling_cluster({"worker": WorkerType(resources={"CPU": 1}, maximum=3)}) as cluster:
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}

Ray's own autoscaler (v2) runs on the head and starts a raylet for every node that it wants. All
nodes have a loopback address, and ports and a directory of their own, so several clusters live side
by side; every process of them is ended with the block, however it ends. (Ray's servers accept on
all interfaces unless the address is 127.0.0.1, which `ray start` does not keep.)
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
)
from ray.core.generated import gcs_pb2

REPOSITORY = Path(__file__).parents[2]
# 127.0.0.1 would be replaced by the machine's address.
LOOPBACK = "127.0.0.2"
HEAD_TYPE = FAKE_HEAD_NODE_TYPE
# Against hangs only.
DEADLINE_S = 120
# In the environment of every process of a cluster; its value names the cluster.
_MARK = "ISOTHERM_SCALING_CLUSTER"
_ALIVE = gcs_pb2.DESCRIPTOR.message_types_by_name["GcsNodeInfo"].enum_values_by_name["ALIVE"].number
_STORE_BYTES = 100 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class WorkerType:
    """What a node of a type has, "CPU" and "GPU" among it, and the most nodes of that type."""

    resources: Mapping[str, float]
    maximum: int


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A node that the cluster believes to be alive; `type` is `HEAD_TYPE` or a worker type."""

    node_id: str
    type: str
    resources: Mapping[str, float]


class ScalingCluster:
    """A running cluster. `address` is what RAY_ADDRESS wants to be."""

    def __init__(self, address: str, mark: str, directory: Path) -> None:
        self.address = address
        self.directory = directory
        self._mark = mark

    @cached_property
    def _gcs(self) -> GcsClient:
        return GcsClient(address=self.address)

    def nodes(self) -> list[ClusterNode]:
        """Nodes that are alive, the head's among them. Needs no `ray.init`."""
        return [
            ClusterNode(
                node_id=node_id.hex(),
                type=node.node_type_name or HEAD_TYPE,
                resources=dict(node.resources_total),
            )
            for node_id, node in self._gcs.get_all_node_info().items()
            if node.state == _ALIVE
        ]

    def workers(self) -> list[ClusterNode]:
        """Alive nodes without the head."""
        return [node for node in self.nodes() if node.type != HEAD_TYPE]

    def wait_for_workers(self, number: int) -> list[ClusterNode]:
        """The worker nodes, once there are exactly so many."""
        wait_until(lambda: len(self.workers()) == number, f"{number} worker nodes", self._state)
        return self.workers()

    def kill_a_worker_node(self, node_id: str | None = None) -> str:
        """`kill -9` to a worker node's raylet, which takes the node's processes with it; its id.

        Without `node_id`, the node that started first. The cluster notices within seconds.
        """
        raylets = self._worker_raylets()
        chosen = node_id or min(raylets, default="")
        assert chosen in raylets, f"no worker node {node_id or ''} to kill among {sorted(raylets)}"
        raylets[chosen].kill()
        return chosen

    def processes(self) -> list[psutil.Process]:
        """Every process of the cluster that is alive."""
        return _processes(self._mark)

    def _worker_raylets(self) -> dict[str, psutil.Process]:
        raylets = {}
        for process in self.processes():
            with suppress(psutil.Error):
                node_id = process.environ().get("RAY_OVERRIDE_NODE_ID_FOR_TESTING", "")
                if process.name() == "raylet" and node_id != FAKE_HEAD_NODE_ID:
                    raylets[node_id] = process
        return raylets

    def _state(self) -> str:
        log = self.directory / "session_latest/logs/monitor.log"
        tail = log.read_text()[-3000:] if log.exists() else "no log of the autoscaler"
        return f"alive: {self.nodes()}\n{tail}"


@contextmanager
def scaling_cluster(
    worker_types: Mapping[str, WorkerType],
    *,
    head_cpus: float = 1,
    head_resources: Mapping[str, float] | None = None,
    idle_s: float = 6,
) -> Iterator[ScalingCluster]:
    """Starts a head, no workers; ends every process of the cluster with the block.

    Args:
        worker_types: what the autoscaler may start, by name.
        head_cpus: CPUs of the head node.
        head_resources: custom resources of the head node.
        idle_s: a worker node is taken away after so many seconds without work.
    """
    mark = uuid.uuid4().hex
    # Under the shortest path there is: the name of a Unix socket has 107 characters at most.
    directory = Path(tempfile.mkdtemp(prefix="scaling-", dir="/tmp"))
    address = f"{LOOPBACK}:{_free_port()}"
    config = directory / "autoscaling.json"
    config.write_text(json.dumps(_config(worker_types, head_cpus, head_resources, idle_s, address)))
    head = None
    try:
        with (directory / "head.log").open("w") as log:
            head = subprocess.Popen(
                _head_command(address, config, directory, head_cpus, head_resources),
                env=os.environ | _head_environment(mark),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        cluster = ScalingCluster(address, mark, directory)
        _wait_for_head(cluster, head)
        yield cluster
    finally:
        _end(mark)
        if head is not None:
            head.wait(DEADLINE_S)
        shutil.rmtree(directory, ignore_errors=True)


def wait_until(
    ready: Callable[[], bool], what: str, state: Callable[[], str] = lambda: "", poll_s: float = 0.2
) -> None:
    """Returns once `ready()`; fails with `state()` if that takes longer than any machine needs."""
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline, (
            f"still waiting for {what} after {DEADLINE_S} s\n{state()}"
        )
        time.sleep(poll_s)


def _config(
    worker_types: Mapping[str, WorkerType],
    head_cpus: float,
    head_resources: Mapping[str, float] | None,
    idle_s: float,
    address: str,
) -> dict[str, object]:
    """What `ray start --autoscaling-config` reads."""
    workers = {
        name: {
            "resources": dict(worker.resources),
            "node_config": {},
            "min_workers": 0,
            "max_workers": worker.maximum,
        }
        for name, worker in worker_types.items()
    }
    head = {
        "resources": {"CPU": head_cpus, **(head_resources or {})},
        "node_config": {},
        "max_workers": 0,
    }
    return {
        "cluster_name": "scaling",
        "max_workers": sum(worker.maximum for worker in worker_types.values()),
        "idle_timeout_minutes": idle_s / 60,
        "provider": {
            "type": "external",
            "module": "tests.e2e.fake_nodes.LoopbackNodes",
            "gcs_address": address,
            "node_ip_address": LOOPBACK,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
        },
        "available_node_types": {HEAD_TYPE: head, **workers},
        "head_node_type": HEAD_TYPE,
        "auth": {},
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
        "file_mounts": {},
        "cluster_synced_files": [],
        "initialization_commands": [],
    }


def _head_command(
    address: str,
    config: Path,
    directory: Path,
    cpus: float,
    resources: Mapping[str, float] | None,
) -> list[str]:
    host, port = address.split(":")
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        f"--node-ip-address={host}", f"--port={port}", f"--num-cpus={cpus:g}", "--num-gpus=0",
        f"--resources={json.dumps(dict(resources or {}))}", f"--autoscaling-config={config}",
        f"--temp-dir={directory}", f"--object-store-memory={_STORE_BYTES}",
        "--include-dashboard=false", "--disable-usage-stats", "--min-worker-port=0",
        "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--dashboard-agent-grpc-port=0",
        "--metrics-export-port=0", f"--ray-client-server-port={_free_port()}",
    ]  # fmt: skip


def _head_environment(mark: str) -> dict[str, str]:
    return {
        _MARK: mark,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.getenv("PYTHONPATH")])),
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "RAY_NODE_TYPE_NAME": HEAD_TYPE,
        # A killed raylet refuses connections, so so many checks in a row fail at once.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "5",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def _wait_for_head(cluster: ScalingCluster, head: subprocess.Popen[bytes]) -> None:
    def printed() -> str:
        return (cluster.directory / "head.log").read_text()

    def is_up() -> bool:
        assert head.poll() is None, f"the head ended with {head.returncode}\n{printed()}"
        host, port = cluster.address.split(":")
        with socket.socket() as probe:  # a client of Ray's would wait for half a minute
            if probe.connect_ex((host, int(port))):
                return False
        return bool(cluster.nodes())

    wait_until(is_up, "the head", printed)


def _processes(mark: str) -> list[psutil.Process]:
    """Every process of the cluster: those that carry its mark, and what they started.

    Ray's workers overwrite their environment with their title, but raylets keep theirs.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                found |= {each.pid: each for each in [process, *process.children(recursive=True)]}
    found.pop(os.getpid(), None)
    return list(found.values())


def _end(mark: str) -> None:
    """Kills until nobody is left; what was being started by one that is killed comes next."""
    deadline = time.monotonic() + DEADLINE_S
    while processes := [process for process in _processes(mark) if is_alive(process)]:
        assert time.monotonic() < deadline, f"these do not die: {processes}"
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=1)


def is_alive(process: psutil.Process) -> bool:
    """Whether it still does anything: one that nobody has waited for is a zombie, not alive."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
