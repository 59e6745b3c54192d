"""Process groups of a learner's workers: rendezvous, and orders from the leader to the others.

    leader     send (an order to each) -> does its own share -> collect (an answer of each)
    follower   receive (an order), do it, answer, receive ...      ends with its connection

What is computed together (FSDP's gathers and reductions) passes by the default process group;
orders and answers, which are Python objects, by two groups of their own in main memory; and what
threads do beside the orders by one for each such thread: a checkpoint from a copy, rollouts that
are fetched ahead.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - public
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distill.gloo import listen_towards
from distill.nccl import nccl_settings

# A follower waits for orders as long as the leader waits for rollouts, evaluations and people who
# look at a trace; a leader that is gone closes the connection at once.
ORDERS_DEADLINE = timedelta(days=7)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A worker's place in its group.

    Attributes:
        address, port: of the TCPStore at which the workers meet; see `open_store`.
        rank: 0 leads.
        timeout_s: longest that a worker waits for another within an order.
    """

    address: str
    port: int
    rank: int
    size: int
    timeout_s: float


class Order(NamedTuple):
    """A method of `LearnerWorker` by name, and its argument."""

    method: str
    argument: Any


class WorkerGroup:
    """One process's end of the group. Of size 1 it needs no process group, and has none."""

    def __init__(self, membership: Membership | None, device: str) -> None:
        """Returns when every worker has joined.

        Raises:
            DistError, RuntimeError: another did not join within the time-out.
        """
        self.rank = membership.rank if membership else 0
        self.size = membership.size if membership else 1
        self.mesh: DeviceMesh | None = None
        self.collectives: dist.ProcessGroup | None = None
        self.aside: dist.ProcessGroup | None = None  # for a thread beside the orders
        kind = device.partition(":")[0]
        if kind == "cuda":  # read once, with the first communicator: a push must find them so
            os.environ.update(nccl_settings())
        if membership is None or membership.size == 1:
            return
        listen_towards(membership.address)
        timeout = timedelta(seconds=membership.timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            store=TCPStore(membership.address, membership.port, timeout=timeout),
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
        )
        self._orders = _in_memory(ORDERS_DEADLINE)
        self.collectives = _in_memory(timeout)
        self.aside = _in_memory(timeout)
        self._ahead = _in_memory(ORDERS_DEADLINE)
        self.mesh = init_device_mesh(kind, (self.size,))

    def send(self, orders: Sequence[Order]) -> None:
        """An order to each worker, by rank; the leader keeps its own."""
        if self.size > 1:
            _scatter(orders, self._orders)

    def receive(self) -> Order:
        """The follower's next order."""
        return _scattered(self._orders)

    def send_ahead(self, shares: Sequence[Any]) -> None:
        """To each worker, by rank, what it is to fetch beside its orders. One call at a time."""
        if self.size > 1:
            _scatter(shares, self._ahead)

    def receive_ahead(self) -> Any:
        """The next of these, in a thread of a follower."""
        return _scattered(self._ahead)

    def collect(self, own: Any) -> list[Any]:
        """Every worker's answer, by rank, on the leader; its own, large as it may be, as it is."""
        if self.size == 1:
            return [own]
        answers: list[Any] = [None] * self.size
        dist.gather_object(None, answers, dst=0, group=self.collectives)
        return [own, *answers[1:]]

    def answer(self, value: Any) -> None:
        """Called by a follower: sends its answer to the leader."""
        dist.gather_object(value, None, dst=0, group=self.collectives)

    def total(self, value: float) -> float:
        """The sum of every worker's value; NaN and infinities spread to all."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.collectives)
        return total.item()

    def most(self, value: int) -> int:
        """The largest of every worker's values."""
        return max(self.gathered(value))

    def gathered(self, value: Any) -> list[Any]:
        """Every worker's value, by rank, on every worker."""
        values: list[Any] = [value]
        if self.size > 1:
            values *= self.size
            dist.all_gather_object(values, value, group=self.collectives)
        return values

    def agree(self, value: Any) -> Any:
        """The leader's value, on every worker."""
        return self._agree(value, self.collectives)

    def agree_aside(self, value: Any) -> Any:
        """The same, between threads that run beside the workers' orders."""
        return self._agree(value, self.aside)

    def _agree(self, value: Any, group: dist.ProcessGroup | None) -> Any:
        if self.size == 1:
            return value
        agreed = [value]
        dist.broadcast_object_list(agreed, src=0, group=group)
        return agreed[0]

    def share_here(self, device: str) -> float:
        """Fraction of a sharded model in one memory: a GPU's, or a host's for all of its workers.

        Collective on a CPU.
        """
        return (1 if device.startswith("cuda") else self.workers_here()) / self.size

    def workers_here(self) -> int:
        """Number of workers on this host."""
        return self.gathered(socket.gethostname()).count(socket.gethostname())


def _scatter(values: Sequence[Any], group: dist.ProcessGroup) -> None:
    """One to each worker; the leader's own is not sent."""
    dist.scatter_object_list([None], [None, *values[1:]], src=0, group=group)


def _scattered(group: dist.ProcessGroup) -> Any:
    received: list[Any] = [None]
    dist.scatter_object_list(received, None, src=0, group=group)
    return received[0]


def _in_memory(timeout: timedelta) -> dist.ProcessGroup:
    """A group of all workers that passes what is in main memory."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def open_store(address: str, timeout_s: float) -> TCPStore:
    """Rendezvous store of the workers. Listens on this address alone; torch itself would on all."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
