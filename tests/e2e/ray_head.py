"""Real Ray clusters on the loopback address: `ray start --head`, and its end by process group."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# Ray replaces 127.0.0.1 by the machine's own address; any other loopback address it keeps.
HOST = "127.0.0.2"
# The one type that Ray's provider of nodes on one machine takes for the head.
_HEAD = "ray.head.default"
# Against hangs only: a head is up in seconds.
_DEADLINE_S = 120.0
# Ray gives its own parts seconds to find each other, which a machine that stands still takes away.
_STARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A cluster of one node, up and answering."""

    gcs_port: int
    dashboard_port: int
    metrics_port: int
    pid: int
    log: Path
    environment: Mapping[str, str]

    @property
    def address(self) -> str:
        """What RAY_ADDRESS takes."""
        return f"{HOST}:{self.gcs_port}"

    @property
    def url(self) -> str:
        """What `ray job ... --address` takes."""
        return f"http://{HOST}:{self.dashboard_port}"


@contextmanager
def ray_head(
    *arguments: str,
    cpus: int = 8,
    dashboard: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Head]:
    """A head with ports, directory and processes of its own; other `arguments` go to `ray start`.

    This Python's directory comes first on its PATH, as on a node whose image has isotherm.
    """
    with ExitStack() as stack:
        # Unix sockets in it have paths of at most 107 bytes, so it is not below pytest's directory.
        root = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
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
            process = subprocess.Popen(
                _command(root, ports, cpus, dashboard, arguments),
                env=complete,
                stdout=log.open("wb"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
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
            gcs_port=gcs_port,
            dashboard_port=dashboard_port,
            metrics_port=metrics_port,
            pid=pid,
            log=log,
            environment=complete,
        )


def autoscaling(root: Path, *, workers: int, version: int = 2) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a head that adds nodes of one CPU on this machine as needed."""
    (root / "nodes_here.py").write_text(
        "from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider\n"
        "class Provider(FakeMultiNodeProvider):\n    pass\n"
    )
    head = "f" * 51 + "00000"  # as the provider calls it
    commands = ("initialization_commands", "setup_commands", "head_setup_commands",
        "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
        "cluster_synced_files", "rsync_exclude", "rsync_filter")  # fmt: skip
    config = {
        "cluster_name": "test", "max_workers": workers, "head_node_type": _HEAD,
        "idle_timeout_minutes": 0.1, "upscaling_speed": 1,
        "provider": {"type": "external", "module": "nodes_here.Provider", "launch_multiple": True,
            "head_node_id": head},
        "available_node_types": {
            _HEAD: {"resources": {"CPU": 1}, "max_workers": 0, "node_config": {}},
            "worker": {"resources": {"CPU": 1}, "max_workers": workers, "node_config": {}},
        },
        "auth": {}, "docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False,
    } | {name: [] for name in commands}  # fmt: skip
    file = root / "autoscaling.json"
    file.write_text(json.dumps(config))
    environment = {
        "PYTHONPATH": str(root), "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head, "RAY_enable_autoscaler_v2": str(version - 1),
    }  # fmt: skip
    if version == 2:
        environment |= {"RAY_CLOUD_INSTANCE_ID": head, "RAY_NODE_TYPE_NAME": _HEAD}
    return [f"--autoscaling-config={file}"], environment


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
    """Free now; all are held while they are chosen, so they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_until_up(process: subprocess.Popen[bytes], ports: Sequence[int], log: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not (all(map(_listens, ports)) and "Ray runtime started" in log.read_text()):
        assert process.poll() is None, f"the head ended:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"the head is not up:\n{log.read_text()}"
        time.sleep(0.1)


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the head's group; Ray's daemons live and die with the processes in it."""
    process.send_signal(signal.SIGTERM)  # `--block` ends what it started
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)
