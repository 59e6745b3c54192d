"""Worker group of a learner: the leader's calls of the other workers, and their collectives.

    leader     calls a method of each follower -> runs its own -> waits for the followers' results
    follower   runs the called methods, in order of submission within a lane

`Followers` makes the calls (actor calls on Ray), outside of this package. A method's collectives
run in the same sequence on all workers. FSDP's gathers and reductions use the default process group
(with replicas: one per replica). Exchanges in main memory use `collectives`. Writing a checkpoint,
which runs concurrently with other methods, uses `cpu_group`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - public
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distill.process_groups import listen_towards, nccl_settings

LOOPBACK = "127.0.0.1"
# Calls in different lanes run concurrently. Methods in `main` use collectives of the default group
# and of `collectives`, those in `checkpoint` collectives of `cpu_group`, those in `ahead` none.
Lane: TypeAlias = Literal["main", "ahead", "checkpoint"]


class Followers(Protocol):
    """Calls the other workers, for the leader."""

    def __call__(
        self, method: str, arguments: Sequence[Any], lane: Lane, /
    ) -> AbstractContextManager[Callable[[], list[Any]]]:
        """Begin a method of `LearnerWorker` on each follower, each with its own argument.

        The leader runs its own part in the context. Then it calls the context's function, which
        waits for the results and returns them by rank. The function raises the error of a follower,
        or another error if a follower died or does not answer in time.
        """
        ...


@contextmanager
def no_followers(
    _method: str, _arguments: Sequence[Any], _lane: Lane
) -> Iterator[Callable[[], list[Any]]]:
    """`Followers` of a learner with one worker."""
    yield list


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A worker's place in its group.

    Attributes:
        address, port: TCPStore for the rendezvous of the workers; see `open_store`.
        rank: rank of the worker; 0 is the leader.
        timeout_s: longest time that a worker waits for another in a collective, seconds.
        followers: calls the other workers; used on the leader.
        replicas: number of replicas of the model, each on `size / replicas` consecutive ranks.
    """

    address: str
    port: int
    rank: int
    size: int
    timeout_s: float
    followers: Followers = no_followers
    replicas: int = 1


class WorkerGroup:
    """Worker group, as seen by one worker. A group of size 1 has no process groups.

    Attributes:
        mesh: the workers that share this worker's replica of the model.
        same_shard: the workers that hold this worker's shard, one of each replica; None: there is
            one replica.
    """

    def __init__(self, membership: Membership | None, device: str) -> None:
        """Join the group, and wait until every worker has joined.

        Raises:
            DistError, RuntimeError: another worker did not join within the timeout.
        """
        self.rank = membership.rank if membership else 0
        self.size = membership.size if membership else 1
        self.followers = membership.followers if membership else no_followers
        self.replicas = membership.replicas if membership else 1
        self.mesh: DeviceMesh | None = None
        self.same_shard: dist.ProcessGroup | None = None
        self.collectives: dist.ProcessGroup | None = None
        self.cpu_group: dist.ProcessGroup | None = None
        kind = device.partition(":")[0]
        if kind == "cuda":  # NCCL reads these once, at the first communicator; a push needs them
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
        self.collectives = _in_memory(timeout)
        self.cpu_group = _in_memory(timeout)
        if self.replicas == 1:
            self.mesh = init_device_mesh(kind, (self.size,))
            return
        # A mesh of two dimensions would not pass the timeout to its groups.
        ranks = torch.arange(self.size).view(self.replicas, self.shards)
        groups: list[Any] = [
            dist.new_subgroups_by_enumeration(each.tolist(), timeout=timeout)[0]
            for each in (ranks, ranks.T)
        ]
        share, self.same_shard = groups
        self.mesh = DeviceMesh.from_group(share, kind)

    @property
    def shards(self) -> int:
        """Number of workers that share one replica of the model."""
        return self.size // self.replicas

    def sum_over_workers(self, value: float) -> float:
        """Sum of the values of all workers; NaN and infinities propagate."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def max_over_workers(self, value: float) -> float:
        """Maximum of the values of all workers."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def _reduced(self, value: float, by: Any) -> float:
        reduced = torch.tensor(value, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(reduced, by, group=self.collectives)
        return reduced.item()

    def broadcast(self, value: Any) -> Any:
        """Broadcast the leader's value. For the start, when the leader cannot call workers yet."""
        agreed = [value]
        if self.size > 1:
            dist.broadcast_object_list(agreed, src=0, group=self.collectives)
        return agreed[0]

    def sharers(self, device: str) -> int:
        """Number of workers that share this worker's memory: 1 on a GPU, else those on this host.

        Collective on a CPU.
        """
        return 1 if device.startswith("cuda") else self.workers_here()

    def workers_here(self) -> int:
        """Number of workers on this host. Collective."""
        here = socket.gethostname()
        hosts = [here] * self.size
        if self.size > 1:
            dist.all_gather_object(hosts, here, group=self.collectives)
        return hosts.count(here)


def _in_memory(timeout: timedelta) -> dist.ProcessGroup:
    """Process group of all workers for tensors in main memory."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def open_store(address: str, timeout_s: float) -> TCPStore:
    """Rendezvous store of the workers. By itself, torch would listen on all addresses."""
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
