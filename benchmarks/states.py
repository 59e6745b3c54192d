"""Hidden states of a teacher on one node, fetched by a process on another.

    python -m benchmarks.states [rows=32] [tokens=1024] [hidden_size=5120] [turns=5]

Two raylets on this machine stand in for the nodes. A learner's worker fetches all states of its
rows together from Ray's object store. This is compared with one object after another, and with a
plain TCP connection, the best that a stream of our own could reach. Both ends share the cores, so
CPU seconds per gigabyte, of both processes and both raylets, are more meaningful than megabytes per
second.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import median
from typing import Any

import chz
import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

from cluster.command import run_command
from cluster.handles import calls
from distill.states import HiddenStates

DEADLINE_S = 300.0


@chz.chz
class StatesConfig:
    """Transfer of hidden states between two nodes."""

    rows: int = chz.field(default=32, doc="rows of a step")
    tokens: int = chz.field(default=1024, doc="trained tokens of a row")
    hidden_size: int = chz.field(default=5120, doc="of a teacher in bfloat16; 32 B parameters have")
    turns: int = chz.field(default=5, doc="measurements of each way, by turns")

    @property
    def row_bytes(self) -> int:
        return self.tokens * self.hidden_size * 2

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class Teacher:
    """Owner of states in the store of its node; also sends the same bytes over TCP."""

    def __init__(self, config: StatesConfig) -> None:
        rng, shape = np.random.default_rng(0), (config.tokens, config.hidden_size)
        self._states = [
            HiddenStates(rng.integers(0, 1 << 16, shape, np.uint16), "bfloat16")
            for _ in range(config.rows)
        ]
        self._socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with closing(connection):
                for states in self._states:
                    connection.sendall(states.values_NH.data.cast("B"))

    def states(self) -> tuple[int, int, list[Any]]:
        """Id of this process, the port, and new references."""
        port = self._socket.getsockname()[1]
        return os.getpid(), port, [calls.put(states) for states in self._states]


def one_after_another(references: Sequence[Any], _port: int, _row_bytes: int) -> list[Any]:
    return [calls.get(reference, DEADLINE_S) for reference in references]


def all_at_once(references: Sequence[Any], port: int, row_bytes: int) -> list[Any]:
    """Fetch as `cluster.queue.payload.open_parts` does."""
    calls.wait(references, num_returns=len(references), timeout=DEADLINE_S)
    return one_after_another(references, port, row_bytes)


def by_tcp(references: Sequence[Any], port: int, row_bytes: int) -> list[Any]:
    received = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in references:
            values = np.empty(row_bytes, np.uint8)
            filled = 0
            while filled < row_bytes:
                filled += connection.recv_into(values.data[filled:])
            received.append(values)
    return received


WAYS: dict[str, Callable[[Sequence[Any], int, int], list[Any]]] = {
    "Ray's store, one after another": one_after_another,
    "Ray's store, all at once (what a run does)": all_at_once,
    "a TCP connection": by_tcp,
}


def measure(config: StatesConfig) -> dict[str, tuple[float, float]]:
    """Median megabytes per second, and CPU seconds per gigabyte, of each way."""
    room = max(3 * config.nbytes, 100 << 20)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        os.environ["RAY_TMPDIR"] = directory  # or others would find this cluster
        cluster = Cluster()
        cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=room)
        cluster.add_node(num_cpus=1, resources={"teacher": 1}, object_store_memory=room)
        cluster.connect()
        try:
            return _measured(config)
        finally:
            ray.shutdown()
            cluster.shutdown()


def _measured(config: StatesConfig) -> dict[str, tuple[float, float]]:
    teacher: Any = ray.remote(Teacher).options(resources={"teacher": 1}).remote(config)
    raylets = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
    made: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for turn in range(1 + config.turns):
        for name, way in WAYS.items():
            pid, port, references = ray.get(teacher.states.remote(), timeout=DEADLINE_S)
            processes = [*raylets, psutil.Process(pid), psutil.Process()]
            before, began = _processor_seconds(processes), time.perf_counter()
            way(references, port, config.row_bytes)
            seconds = time.perf_counter() - began
            used = _processor_seconds(processes) - before
            if turn:  # the first maps the stores' memory
                made[name].append((config.nbytes / seconds / 1e6, used / config.nbytes * 1e9))
    return {name: (median(r for r, _ in of), median(c for _, c in of)) for name, of in made.items()}


def _processor_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def states(config: StatesConfig, console: Console) -> None:
    """Measure, and print the table."""
    table = Table("way", title=f"{config.nbytes / 1e9:.2f} GB between two raylets")
    for header in ("MB/s", "processor s/GB"):
        table.add_column(header, justify="right")
    for name, (rate, seconds) in measure(config).items():
        table.add_row(name, f"{rate:.0f}", f"{seconds:.2f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(run_command(StatesConfig, states, None))
