"""Learner workers in processes of this machine, called through pipes.

For tests of `learner/` and for benchmarks, which start learners without Ray.

    store, seats = meet(size, context, timeout_s)      one seat a process; keep the store
    leader      Learner(..., group=WorkerGroup(seat.membership, device))
    follower    serve(LearnerWorker(...), seat)
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias, get_args

from learner.process_group import LOOPBACK, Lane, Membership, open_store
from learner.worker import LearnerWorker

# One end of each lane's pipe.
Ends: TypeAlias = Mapping[str, Connection]


class Seat(NamedTuple):
    """A worker's place in its group, and its ends of the pipes by which the leader calls it."""

    membership: Membership
    ends: Ends


def meet(size: int, context: Any, timeout_s: float, replicas: int = 1) -> tuple[Any, list[Seat]]:
    """Store at which the workers meet, which must be kept, and their seats by rank."""
    store = open_store(LOOPBACK, timeout_s)
    of_leader, of_followers = [], []
    for _ in range(1, size):
        pipes = {lane: context.Pipe() for lane in get_args(Lane)}
        of_leader.append({lane: ours for lane, (ours, _) in pipes.items()})
        of_followers.append({lane: theirs for lane, (_, theirs) in pipes.items()})
    member = Membership(
        address=LOOPBACK, port=store.port, rank=0, size=size, timeout_s=timeout_s, replicas=replicas
    )
    leads = replace(member, followers=PipedFollowers(of_leader))
    followers = [
        Seat(replace(member, rank=rank), ends) for rank, ends in enumerate(of_followers, 1)
    ]
    return store, [Seat(leads, {}), *followers]


@dataclass(frozen=True, slots=True)
class PipedFollowers:
    """`Followers` over the leader's ends of the pipes."""

    ends: Sequence[Ends]

    @contextmanager
    def __call__(
        self, method: str, arguments: Sequence[Any], lane: Lane
    ) -> Iterator[Callable[[], list[Any]]]:
        for ends, argument in zip(self.ends, arguments, strict=True):
            ends[lane].send((method, argument))
        yield lambda: [_result(ends[lane]) for ends in self.ends]


def _result(end: Connection) -> Any:
    problem, made = end.recv()
    if problem is not None:
        raise problem
    return made


def serve(worker: LearnerWorker, seat: Seat) -> None:
    """Execute the leader's calls, one thread per lane, until the leader ends."""
    threads = [threading.Thread(target=_serve, args=(worker, end)) for end in seat.ends.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(worker: LearnerWorker, end: Connection) -> None:
    while True:
        try:
            method, argument = end.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            made = None, worker.execute(method, argument)
        except Exception as error:
            made = error, None
        end.send(made)
