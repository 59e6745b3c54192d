"""Learner workers other than the leader: their actors, and the leader's calls of them.

The driver creates them and watches each by heartbeats. Only the leader calls them, with one call at
a time in each lane (`ShardedModel.on_each`). A lane is a concurrency group of one thread, so its
calls run in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, get_args

from cluster.handles import calls, errors
from cluster.supervision.supervise import HEALTH_GROUP, WorkDone
from distill.models.loading import resolve_device
from distill.records import TrajectorySource
from learner.config import LearnerConfig
from learner.forward import LossFunction
from learner.policy_loss import policy_loss_of
from learner.process_group import Lane, Membership, WorkerGroup
from learner.worker import LearnerWorker

FOLLOWER_GROUPS = dict.fromkeys([HEALTH_GROUP, *get_args(Lane)], 1)


class LearnerFollower:
    """Hosts a follower: a worker that holds its shard of the model, and runs the leader's calls."""

    def __init__(
        self,
        config: LearnerConfig,
        build_losses: Callable[[WorkerGroup], Sequence[LossFunction]],
        membership: Membership,
        source: TrajectorySource | None,
    ) -> None:
        """`source`: where the worker reads rollouts; None if its learner trains on other data."""
        group = WorkerGroup(membership, resolve_device(config.device))
        losses = build_losses(group)
        self._worker = LearnerWorker(config, losses, group)
        if source is not None:
            self._worker.take_rollouts_from(source, policy_loss_of(losses))

    def progress(self) -> WorkDone:
        """See `LearnerActor.progress`."""
        return WorkDone(self._worker.progress.count)

    def execute(self, method: str, argument: Any) -> Any:
        """Run a method of the worker; call it in the group of its lane."""
        return self._worker.execute(method, argument)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorFollowers:
    """`Followers` that are actors.

    Attributes:
        actors: handles of `LearnerFollower`, by rank, from rank 1.
        timeout_s: longest time that the leader waits for a follower after its own part of a call.
    """

    actors: Sequence[Any]
    timeout_s: float
    _pending: dict[Lane, list[Any]] = field(default_factory=dict)
    _failed: set[Any] = field(default_factory=set)

    @contextmanager
    def __call__(
        self, method: str, arguments: Sequence[Any], lane: Lane
    ) -> Iterator[Callable[[], list[Any]]]:
        begun = [
            actor.execute.options(concurrency_group=lane).remote(method, argument)
            for actor, argument in zip(self.actors, arguments, strict=True)
        ]

        def results() -> list[Any]:
            try:
                return calls.get(begun, timeout=self.timeout_s)
            except errors.GetTimeoutError:
                raise TimeoutError(
                    f"a learner worker did not end {method} within {self.timeout_s:.0f} s of the "
                    "leader"
                ) from None

        self._pending[lane] = begun
        try:
            yield results
        finally:
            del self._pending[lane]

    def check(self) -> None:
        """Raise the error of a follower that failed in a call that the leader has not left.

        The leader may wait in a collective that this follower never joins. Each heartbeat calls
        this method, and it raises an error only if two calls in a row find it: a leader that does
        not wait for the follower reports the error itself meanwhile. The lane `ahead` has no
        collectives, and its errors are ignored. The follower's own heartbeat detects its death.
        """
        failed = {}
        begun = [some for lane, some in list(self._pending.items()) if lane != "ahead"]
        for call in calls.ended(chain(*begun)):
            try:
                calls.get(call)
            except errors.RayError as error:
                if not calls.is_death(error):
                    failed[call] = error
        lasting = self._failed & failed.keys()
        self._failed.clear()
        self._failed.update(failed)
        for call in lasting:
            raise failed[call]
