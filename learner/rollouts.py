"""A step's rollouts at the leader: metadata, dealt to the workers, which do the rest.

    plan           the rows of each update, by their metadata, dealt to the workers
    hold           each worker fetches the trajectories of its rows: `learner.rollout_share`
    Foresight      they are fetched before, for the next step
    build          it makes them
    before_update  rows of one sequence hear of each other, wherever they are
    kept           what people will look at comes back

So all that passes the leader is metadata, sums and the numbers of rows; of tokens, those that it
trains itself.
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
from learner.rollout_share import Built, KeptRow, Shares, TrajectoryShare

logger = logging.getLogger(__name__)

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Who trains on what.

    Attributes:
        groups_P: those that the step trains on.
        updates: the parts of each optimizer update, dealt: what the policy sampled, and what the
            teacher did; empty: no group is left for it.
        shares: of the trajectories, by worker.
    """

    groups_P: Sequence[TrajectoryGroupMeta]
    updates: Sequence[Sequence[Part]]
    shares: Sequence[Sequence[TrajectoryShare]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRollouts:
    """Groups of a step with the rows that it trained on, one a segment, in order; and the tokens of
    the whole step."""

    groups_P: Sequence[TrajectoryGroup]
    rows_D: Sequence[TrainingRow]
    tables: Sequence[TokenTable | None]


class Rollouts:
    """Deals rollouts to a learner's workers, and has them make the rows."""

    def __init__(
        self,
        learner: Learner,
        source: TrajectorySource,
        loss: PolicyObjectiveLoss,
        teacher_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._learner, self._loss, self.teacher_weights = learner, loss, teacher_weights
        self._objective = loss.objective
        self.turn = 0  # of the step that is held, as `Shares` has it
        self._teacher_loss = TeacherSamplesLoss(normalisation=loss.objective.normalisation)
        learner.worker.take_rollouts_from(source, loss)  # the others were told at their start

    def plan(self, groups_P: Sequence[TrajectoryGroupMeta]) -> StepPlan:
        """Deals the rows of the groups, but for those that are filtered out."""
        objective = self._objective
        if objective.constant_groups == "drop":
            groups_P = [group for group in groups_P if group.constant_reward is None]
        updates = []
        for part_M in np.array_split(np.arange(len(groups_P)), objective.num_substeps):
            updates.append(self._parts([groups_P[p] for p in part_M]))
        return StepPlan(groups_P=groups_P, updates=updates, shares=self._shares(groups_P, updates))

    def _parts(self, groups_P: Sequence[TrajectoryGroupMeta]) -> list[Part]:
        """The parts of one update. Each has its own mean over tokens, and weighs as many of the
        update as groups of it: long samples of a teacher do not drown the policy's."""
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
        """Has each worker fetch its share; returns the groups that are lost, and why."""
        self.turn += 1
        return _united(self._learner.on_each("rollouts.hold", self._by_worker(plan, self.turn)))

    def fetch_ahead(self, groups_P: Sequence[TrajectoryGroupMeta], turn: int) -> None:
        """Has each worker fetch its share of groups that the step after `turn` may train on, and
        make rows of it, beside all else. Called in a thread.

        A worker alone may be told of them bit by bit; several are dealt a whole step.
        """
        shares = self._by_worker(self.plan(groups_P), turn)
        self._learner.on_each("rollouts.fetch_ahead", shares, "ahead")

    def _by_worker(self, plan: StepPlan, turn: int) -> list[Shares]:
        return [Shares(turn, shares) for shares in plan.shares]

    def add_reference(self) -> None:
        """Has them score their segments by the model without its adapter."""
        scored = _united(self._learner.on_all("rollouts.score_reference"))
        self._learner.on_all("rollouts.add_reference", scored)

    def build(self, plan: StepPlan) -> dict[str, float]:
        """Has them make the rows; returns metrics of the advantages, if there are any."""
        if not plan.groups_P:
            return {}
        built: list[Built] = self._learner.on_all("rollouts.build")
        if self._objective.correction != "none" and sum(map(bool, plan.updates)) > 1:
            self._learner.on_all("rollouts.add_proximal")
        metrics = advantage_metrics([each.advantages for each in built], self._objective)
        held = sum(each.trajectories for each in built)
        metrics["rollout/ahead_share"] = sum(each.ahead for each in built) / max(1, held)
        if (mean_kl := built[0].mean_kl) is not None:
            metrics["reference/kl"] = mean_kl
        return metrics

    def before_update(self, part: Part) -> None:
        """Has rows of one sequence told what the loss needs of each other, by the present weights;
        asked only where it joins their tokens."""
        if part.loss is not self._loss or not joins_tokens(self._objective):
            return
        assert part.dealt is not None
        places = [
            [
                row.place
                for rows_B, counted in batches
                for row in rows_B
                # Its sequence has other rows.
                if counted and (row.place.segment > 0 or not row.ends_sequence)
            ]
            for batches in part.dealt
        ]
        if any(places):
            sums = self._learner.on_each("rollouts.sums", [sorted(mine) for mine in places])
            self._learner.on_all("rollouts.join", _united(sums))

    def kept(self, plan: StepPlan, group_ids: Collection[int]) -> KeptRollouts:
        """Groups of the step as they were trained on."""
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


# Returns groups that the step after these weights would take if it were taken now. Waits briefly
# for groups besides those of the given ids; if True, for the whole step. None: the step was taken,
# or never will be.
Foresee: TypeAlias = Callable[
    [TrainedGroups, Collection[int], bool], Sequence[TrajectoryGroupMeta] | None
]


class Foresight:
    """Makes workers prefetch the next step's rollouts, in a thread, from `begin` to `end`."""

    def __init__(
        self,
        foresee: Foresee,
        fetch: Callable[[Sequence[TrajectoryGroupMeta], int], None],
        *,
        whole: bool,
    ) -> None:
        """
        Args:
            fetch: `Rollouts.fetch_ahead`.
            whole: prefetch only once the step may be taken; else groups as they come.
        """
        self._foresee, self._fetch, self._whole = foresee, fetch, whole
        self._over = threading.Event()
        self._telling = threading.Lock()

    def begin(self, trained: TrainedGroups, turn: int) -> None:
        """Start prefetching the step after weights that account for `trained`.

        `turn` is that of the step that is held.
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
                groups_P = self._foresee(trained, known, self._whole)
                if groups_P is None:
                    return
                known |= {group.group_id for group in groups_P}
                with self._telling:  # an earlier thread may still run
                    if groups_P and not over.is_set():
                        self._fetch(groups_P, turn)
        except Exception as error:  # whatever it is, `hold` meets it again, and raises
            logger.warning("the next step's rollouts are not fetched ahead: %s", error)


def _united(of_workers: Sequence[Mapping[Key, Value]]) -> dict[Key, Value]:
    return {key: value for one in of_workers for key, value in one.items()}
