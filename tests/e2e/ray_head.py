"""Real Ray clusters on the loopback address: `ray start --head`, optionally with worker nodes.

Every process of a cluster ends with its block. (Ray's servers accept on all interfaces unless the
address is 127.0.0.1, which `ray start` does not keep.)
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
)
from ray.core.generated import gcs_pb2

from tests.waiting import until

# Ray replaces 127.0.0.1 by the machine's own address; any other loopback address it keeps.
HOST = "127.0.0.2"
_REPOSITORY = Path(__file__).parents[2]
_ALIVE = gcs_pb2.DESCRIPTOR.message_types_by_name["GcsNodeInfo"].enum_values_by_name["ALIVE"].number
_NODE_ID = "RAY_OVERRIDE_NODE_ID_FOR_TESTING"
# Ray gives its own parts seconds to find each other, which a machine that stands still takes away.
_STARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Running head of a cluster."""

    gcs_port: int
    dashboard_port: int
    metrics_port: int
    pid: int
    log: Path
    environment: Mapping[str, str]

    @property
    def address(self) -> str:
        """Value of RAY_ADDRESS."""
        return f"{HOST}:{self.gcs_port}"

    @property
    def url(self) -> str:
        """Value of `ray job ... --address`."""
        return f"http://{HOST}:{self.dashboard_port}"

    def workers(self) -> list[str]:
        """Ids of the living nodes except the head. Needs no `ray.init`."""
        nodes = GcsClient(address=self.address).get_all_node_info().items()
        alive = [node_id.hex() for node_id, node in nodes if node.state == _ALIVE]
        return [node_id for node_id in alive if node_id != FAKE_HEAD_NODE_ID]

    def kill_a_worker_node(self) -> None:
        """Send SIGKILL to the oldest worker node's raylet; the node's processes end with it."""
        raylets = {}
        for process in _processes(self.log.parent):
            with suppress(psutil.Error):
                node_id = process.environ().get(_NODE_ID, "")
                if process.name() == "raylet" and node_id != FAKE_HEAD_NODE_ID:
                    raylets[node_id] = process
        raylets[min(raylets)].kill()


@contextmanager
def ray_head(
    *,
    cpus: int = 8,
    dashboard: bool = True,
    workers: int = 0,
    idle_s: float = 6,
    autoscaler: int = 2,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Head]:
    """Start a head with its own ports, directory and processes.

    This Python's directory comes first on its PATH, as on a node whose image has isotherm.

    Args:
        workers: if not 0, Ray's own autoscaler starts nodes of one CPU on demand, at most so many.
        idle_s: seconds without work after which a worker node is removed.
        autoscaler: its version.
    """
    with ExitStack() as stack:
        # Unix sockets in it have paths of at most 107 bytes, so it is not below pytest's directory.
        root = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        stack.callback(_end_all, root)
        log = root / "head.log"
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        complete = {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "RAY_AUTH_MODE": "disabled",
            **(environment or {}),
        }
        gcs_port = dashboard_port = metrics_port = pid = 0
        for start in range(1, _STARTS + 1):
            ports = _free_ports(8)
            gcs_port, dashboard_port, metrics_port = ports[:3]
            arguments: list[str] = []
            if workers:
                file = root / "autoscaling.json"
                file.write_text(json.dumps(_scaling(f"{HOST}:{gcs_port}", cpus, workers, idle_s)))
                arguments = [f"--autoscaling-config={file}"]
                complete |= _scaling_environment(autoscaler)
            process = subprocess.Popen(
                _command(root, ports, cpus, dashboard, arguments), env=complete,
                stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            pid = process.pid
            stack.callback(_end, process)
            try:
                wanted = [gcs_port, dashboard_port] if dashboard else [gcs_port]
                _wait_until_up(process, wanted, log)
                break
            except AssertionError:
                _end(process)
                if start == _STARTS:
                    raise
        yield Head(
            gcs_port=gcs_port, dashboard_port=dashboard_port, metrics_port=metrics_port, pid=pid,
            log=log, environment=complete,
        )  # fmt: skip


def _scaling(address: str, cpus: int, workers: int, idle_s: float) -> dict[str, Any]:
    """Write the file for `ray start --autoscaling-config`."""
    commands = (
        "initialization_commands", "setup_commands", "head_setup_commands",
        "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
        "cluster_synced_files", "rsync_exclude", "rsync_filter",
    )  # fmt: skip
    return {
        "cluster_name": "test", "max_workers": workers, "head_node_type": FAKE_HEAD_NODE_TYPE,
        "idle_timeout_minutes": idle_s / 60, "upscaling_speed": 1,
        "provider": {
            "type": "external", "module": "tests.e2e.fake_nodes.LoopbackNodes",
            "gcs_address": address, "node_ip_address": HOST, "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
        },
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {
                "resources": {"CPU": cpus}, "max_workers": 0, "node_config": {},
            },
            "worker": {"resources": {"CPU": 1}, "max_workers": workers, "node_config": {}},
        },
        "auth": {}, "docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False,
    } | {name: [] for name in commands}  # fmt: skip


def _scaling_environment(version: int) -> dict[str, str]:
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_REPOSITORY), os.getenv("PYTHONPATH")])),
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": str(version - 1),
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        _NODE_ID: FAKE_HEAD_NODE_ID,
        # A killed raylet refuses connections, so so many checks in a row fail at once.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "5",
    }
    if version == 2:
        environment["RAY_CLOUD_INSTANCE_ID"] = FAKE_HEAD_NODE_ID
        environment["RAY_NODE_TYPE_NAME"] = FAKE_HEAD_NODE_TYPE
    return environment


def _command(
    root: Path, ports: Sequence[int], cpus: int, dashboard: bool, arguments: Sequence[str]
) -> list[str]:
    names = (
        "port", "dashboard-port", "metrics-export-port", "ray-client-server-port",
        "node-manager-port", "object-manager-port", "dashboard-agent-listen-port",
        "runtime-env-agent-port",
    )  # fmt: skip
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        f"--node-ip-address={HOST}", f"--dashboard-host={HOST}", f"--temp-dir={root / 't'}",
        f"--include-dashboard={dashboard}", f"--num-cpus={cpus}", "--disable-usage-stats",
        f"--object-store-memory={200 << 20}",
        *(f"--{name}={port}" for name, port in zip(names, ports, strict=True)),
        *arguments,
    ]  # fmt: skip


def _free_ports(count: int) -> list[int]:
    """Free ports; all are held while they are chosen, so they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_until_up(process: subprocess.Popen[bytes], ports: Sequence[int], log: Path) -> None:
    def up() -> bool:
        assert process.poll() is None, f"the head ended:\n{log.read_text()}"
        return all(map(_listens, ports)) and "Ray runtime started" in log.read_text()

    until(up, failing=f"the head is not up: see {log}")


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the head's process group; Ray's daemons end with it."""
    process.send_signal(signal.SIGTERM)  # `--block` ends what it started
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)


def _processes(root: Path) -> list[psutil.Process]:
    """Processes with the cluster's directory in their command line, also worker nodes' raylets."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(root) in word for word in process.cmdline()):
                found.append(process)
    return found


def _end_all(root: Path) -> None:
    """Kill until none is left, because a killed process may just have started another."""
    while processes := _processes(root):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=1)
