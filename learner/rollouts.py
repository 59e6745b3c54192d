"""A step's rollouts on the leader: metadata that is assigned to workers, which build the rows.

    plan           assigns the rows of each update to workers, by their metadata
    hold           makes each worker fetch the trajectories of its rows (`learner.rollout_share`)
    Prefetcher     prefetches the trajectories of the next step
    build          makes each worker build its rows
    before_update  exchanges sums between rows of one sequence that are on different workers
    kept           returns groups and their rows, for inspection

The leader handles only metadata, sums and the places of rows, and the tokens that it trains itself.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, TypeVar

import numpy as np

from distill.objective.batching import TrainingRow
from distill.objective.metrics import TokenTable
from distill.objective.objectives import advantages_of, teacher_coef
from distill.objective.rows import advantage_metrics, joins_tokens, row_metas
from distill.records import TrainedGroups, TrajectoryGroupMeta, TrajectoryId, TrajectorySource
from distill.types import TrajectoryGroup
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss, TeacherSamplesLoss
from learner.rollout_share import KeptRow, RowStats, Shares, TrajectoryShare

logger = logging.getLogger(__name__)

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Assignment of a step's groups to updates and workers.

    Attributes:
        groups_P: groups that the step trains on.
        updates: parts of each optimizer update, assigned to workers: rows that the policy sampled,
            and rows that the teacher sampled. Empty if no group is left for the update.
        shares: shares of trajectories, by worker.
    """

    groups_P: Sequence[TrajectoryGroupMeta]
    updates: Sequence[Sequence[Part]]
    shares: Sequence[Sequence[TrajectoryShare]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRollouts:
    """Groups of a step with their training rows, one per segment, and tables of all step tokens."""

    groups_P: Sequence[TrajectoryGroup]
    rows_D: Sequence[TrainingRow]
    tables: Sequence[TokenTable | None]


class Rollouts:
    """Assigns rollouts to a learner's workers, which build the rows."""

    def __init__(
        self,
        learner: Learner,
        source: TrajectorySource,
        loss: PolicyObjectiveLoss,
        teacher_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._learner, self._loss, self.teacher_weights = learner, loss, teacher_weights
        self._objective = loss.objective
        self.turn = 0  # `Shares.turn` of the step that is held
        self._teacher_loss = TeacherSamplesLoss(normalisation=loss.objective.normalisation)
        learner.worker.take_rollouts_from(source, loss)  # other workers got both at their start

    def plan(self, groups_P: Sequence[TrajectoryGroupMeta]) -> StepPlan:
        """Assign the rows of the groups, without groups that are filtered out."""
        objective = self._objective
        if objective.constant_groups == "drop":
            groups_P = [group for group in groups_P if group.constant_reward is None]
        updates = []
        for part_M in np.array_split(np.arange(len(groups_P)), objective.num_substeps):
            updates.append(self._parts([groups_P[p] for p in part_M]))
        return StepPlan(groups_P=groups_P, updates=updates, shares=self._shares(groups_P, updates))

    def _parts(self, groups_P: Sequence[TrajectoryGroupMeta]) -> list[Part]:
        """Parts of one update.

        Each part is a mean over its own tokens, weighted by its fraction of the groups. So long
        samples of a teacher do not outweigh the policy's samples.
        """
        losses = (False, self._loss), (True, self._teacher_loss)
        parts = []
        for by_teacher, loss in losses:
            own_P = [group for group in groups_P if group.by_teacher == by_teacher]
            if own_P:
                rows_D = [row for group in own_P for row in row_metas(group)]
                part = Part(rows_D=rows_D, loss=loss, coef=len(own_P) / len(groups_P))
                parts.append(self._learner.dealing.dealt(part))
        return parts

    def _shares(
        self, groups_P: Sequence[TrajectoryGroupMeta], updates: Sequence[Sequence[Part]]
    ) -> list[list[TrajectoryShare]]:
        trained: list[dict[TrajectoryId, list[int]]] = [{} for _ in range(self._learner.workers)]
        for part in chain.from_iterable(updates):
            assert part.dealt is not None
            for own, batches in zip(trained, part.dealt, strict=True):
                for rows_B, counted in batches:
                    for row in rows_B:
                        segments = own.setdefault(row.place.trajectory, [])
                        segments += [row.place.segment] if counted else []
        holders = Counter(place for own in trained for place in own)
        shares: list[list[TrajectoryShare]] = [[] for _ in trained]
        advantages_P = advantages_of(groups_P, self._objective)
        for group, advantages_G in zip(groups_P, advantages_P, strict=True):
            coef = teacher_coef(group.teacher, self._objective, self.teacher_weights)
            for place, advantage in zip(group.places, advantages_G, strict=True):
                for rank, own in enumerate(trained):
                    if place in own:
                        shares[rank].append(
                            TrajectoryShare(
                                place=place,
                                teacher=group.teacher,
                                advantage=float(advantage),
                                coef=coef,
                                trained=tuple(sorted(own[place])),
                                shared=holders[place] > 1,
                                by_teacher=group.by_teacher,
                            )
                        )
        return shares

    def hold(self, plan: StepPlan) -> dict[int, str]:
        """Make each worker fetch its share; return the reasons of lost groups, by group id."""
        self.turn += 1
        return _merged(self._learner.on_each("rollouts.hold", self._by_worker(plan, self.turn)))

    def prefetch(self, groups_P: Sequence[TrajectoryGroupMeta], turn: int) -> None:
        """Make each worker prefetch its share of groups for the step after `turn`, and build rows.

        Call in a thread; runs concurrently with other methods. With one worker, calls may pass some
        of the groups each. With several, one call passes all groups of the step, because their
        assignment depends on all of them.
        """
        shares = self._by_worker(self.plan(groups_P), turn)
        self._learner.on_each("rollouts.prefetch", shares, "ahead")

    def _by_worker(self, plan: StepPlan, turn: int) -> list[Shares]:
        return [Shares(turn, shares) for shares in plan.shares]

    def add_reference(self) -> None:
        """Make the workers score their segments with the model without its adapter."""
        scored = _merged(self._learner.on_all("rollouts.score_reference"))
        self._learner.on_all("rollouts.add_reference", scored)

    def build(self, plan: StepPlan) -> dict[str, float]:
        """Make the workers build the rows; return metrics of the advantages, if any."""
        if not plan.groups_P:
            return {}
        built: list[RowStats] = self._learner.on_all("rollouts.build")
        if self._objective.correction != "none" and sum(map(bool, plan.updates)) > 1:
            self._learner.on_all("rollouts.add_proximal")
        metrics = advantage_metrics([each.advantages for each in built], self._objective)
        held = sum(each.trajectories for each in built)
        metrics["rollout/ahead_share"] = sum(each.prefetched for each in built) / max(1, held)
        if (mean_kl := built[0].mean_kl) is not None:
            metrics["reference/kl"] = mean_kl
        return metrics

    def before_update(self, part: Part) -> None:
        """Exchange the sums that the loss needs between rows of one sequence.

        They are computed with the current weights. No-op if the loss has no terms across rows.
        """
        if part.loss is not self._loss or not joins_tokens(self._objective):
            return
        assert part.dealt is not None
        places = [
            [
                row.place
                for rows_B, counted in batches
                for row in rows_B
                # The row's sequence has other rows.
                if counted and (row.place.segment > 0 or not row.ends_sequence)
            ]
            for batches in part.dealt
        ]
        if any(places):
            sums = self._learner.on_each("rollouts.sums", [sorted(mine) for mine in places])
            self._learner.on_all("rollouts.join", _merged(sums))

    def kept(self, plan: StepPlan, group_ids: Collection[int]) -> KeptRollouts:
        """Groups of the step with the rows that were trained."""
        ids = frozenset(group_ids)
        rows: list[KeptRow] = []
        tables: list[TokenTable | None] = []
        for kept, of_worker in self._learner.on_all("rollouts.kept", ids):
            rows += kept
            tables += of_worker
        by_place = {each.place: each for each in rows}
        groups_P, rows_D = [], []
        for group in plan.groups_P:
            if group.group_id in ids:
                found = [by_place[row.place] for row in row_metas(group)]
                rows_D += [each.row for each in found]
                groups_P.append(group.group_of_segments(each.segment for each in found))
        return KeptRollouts(groups_P=groups_P, rows_D=rows_D, tables=tables)


# (trained groups, ids of known groups, whole) -> groups that the next step would take now. Waits
# briefly until there are groups besides the known ones or, if `whole`, until all groups of the
# step are available. None: the step was taken already, or will never be taken.
Peek: TypeAlias = Callable[
    [TrainedGroups, Collection[int], bool], Sequence[TrajectoryGroupMeta] | None
]


class Prefetcher:
    """Makes workers prefetch the next step's rollouts, in a thread, from `begin` to `end`."""

    def __init__(
        self,
        peek: Peek,
        fetch: Callable[[Sequence[TrajectoryGroupMeta], int], None],
        *,
        whole: bool,
    ) -> None:
        """
        Args:
            fetch: `Rollouts.prefetch`.
            whole: prefetch once all groups of the step are available; else as they arrive.
        """
        self._peek, self._fetch, self._whole = peek, fetch, whole
        self._over = threading.Event()
        self._fetching = threading.Lock()

    def begin(self, trained: TrainedGroups, turn: int) -> None:
        """Start prefetching the step after weights that account for `trained`.

        `turn`: `Rollouts.turn` of the step that is held now.
        """
        self._over = threading.Event()
        arguments = (trained, turn, self._over)
        threading.Thread(target=self._run, args=arguments, name="ahead", daemon=True).start()

    def end(self) -> None:
        """Stop prefetching, because the step is about to be taken."""
        self._over.set()

    def _run(self, trained: TrainedGroups, turn: int, over: threading.Event) -> None:
        known: set[int] = set()
        try:
            while not over.is_set() and not (self._whole and known):
                groups_P = self._peek(trained, known, self._whole)
                if groups_P is None:
                    return
                known |= {group.group_id for group in groups_P}
                with self._fetching:  # an earlier thread may still run
                    if groups_P and not over.is_set():
                        self._fetch(groups_P, turn)
        except Exception as error:  # not fatal: if the fault persists, `hold` raises it
            logger.warning("the next step's rollouts are not prefetched: %s", error)


def _merged(of_workers: Sequence[Mapping[Key, Value]]) -> dict[Key, Value]:
    return {key: value for one in of_workers for key, value in one.items()}
