"""A learner worker's share of a step's rollouts: fetches trajectories, and builds rows from them.

Per-token data stays on the worker that trains it. Workers exchange sums for rows that depend on
other rows. They exchange whole arrays only if segments of one trajectory are assigned to several
workers, and the learner's model without its adapter is the reference.

The next step's rollouts are prefetched, and their rows built, while the learner computes:

    prefetch  waits for: groups that the next step would take     unblocked by: the workers' puts
    hold      waits for: the prefetch that is running

Prefetching does not change which groups a step takes. A prefetched trajectory is used only if it is
the same object that `hold` receives; others are discarded.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from distill.objective.advantages import on_actions
from distill.objective.batching import TrainingRow
from distill.objective.metrics import TokenTable, token_table
from distill.objective.objectives import reference_gap_sum
from distill.objective.rows import (
    AdvantageStats,
    RowSums,
    Score,
    advantage_stats,
    row_sums,
    segment_to_score,
    trajectory_rows,
    with_sums_of_others,
)
from distill.objective.settings import ObjectiveConfig
from distill.records import RowPlace, TrajectoryId, TrajectorySource
from distill.types import FloatArray, Segment, Trajectory
from learner.forward import shortest
from learner.process_group import WorkerGroup


class TrajectoryShare(NamedTuple):
    """A trajectory of which a worker trains at least one row.

    Attributes:
        advantage, coef: arguments of `trajectory_terms`.
        trained: indices of the segments that this worker trains; other workers train the rest.
        shared: other workers hold the trajectory as well.
        by_teacher: the teacher sampled the trajectory.
    """

    place: TrajectoryId
    teacher: str
    advantage: float
    coef: float
    trained: tuple[int, ...]
    shared: bool
    by_teacher: bool


class Shares(NamedTuple):
    """A worker's shares of a step, or of groups prefetched for the next step.

    Attributes:
        turn: number of the `hold` call of the step; for a prefetch, of the step before it, which is
            held during the prefetch.
    """

    turn: int
    shares: Sequence[TrajectoryShare]


class RowStats(NamedTuple):
    """Statistics of the rows that a worker has built.

    Attributes:
        advantages: statistics of the advantages of the policy's samples.
        mean_kl: the step's mean of log p_T - log ref_T; None without a reference term.
        trajectories: number of trajectories.
        prefetched: number of trajectories that were prefetched.
    """

    advantages: AdvantageStats | None
    mean_kl: float | None
    trajectories: int
    prefetched: int


class _Prefetched(NamedTuple):
    """A prefetched trajectory and its rows; no rows if they depend on the whole step."""

    share: TrajectoryShare
    trajectory: Trajectory
    rows: Sequence[TrainingRow]

    def rows_for(self, share: TrajectoryShare) -> Sequence[TrainingRow]:
        """The prefetched rows if they were built with the terms of `share`; otherwise empty."""
        mine = self.share
        alike = (mine.teacher, mine.advantage, mine.coef) == (
            share.teacher,
            share.advantage,
            share.coef,
        )
        return self.rows if alike else ()


class KeptRow(NamedTuple):
    """A row, and the segment that it was built from."""

    place: RowPlace
    segment: Segment
    row: TrainingRow


@dataclass(slots=True, eq=False)
class RolloutShare:
    """One worker's share of the rollouts of a step, from `hold` to the next `hold`.

    A method that scores is collective: each worker calls it with its own rows. The leader calls
    methods by name (`LearnerWorker.execute`), each with one argument.

    Trajectories that were prefetched for the next step are stored here as well.

    Attributes:
        score: log-probs of rows by the current weights.
        score_by_reference: log-probs of rows by the reference policy.
        heads: names of the teachers of which the learner has only the head.
    """

    source: TrajectorySource
    objective: ObjectiveConfig
    stop_event: tuple[int, ...]
    group: WorkerGroup
    score: Score
    score_by_reference: Score
    heads: Collection[str] = ()
    _shares: Sequence[TrajectoryShare] = field(init=False, default=())
    _trajectories: dict[TrajectoryId, Trajectory] = field(init=False, default_factory=dict)
    _rows: dict[RowPlace, TrainingRow] = field(init=False, default_factory=dict)
    _referred: dict[RowPlace, FloatArray] = field(init=False, default_factory=dict)
    _turn: int = field(init=False, default=0)
    # Prefetched trajectories.
    _for_this_step: Mapping[TrajectoryId, _Prefetched] = field(init=False, default_factory=dict)
    _for_next_step: dict[TrajectoryId, _Prefetched] = field(init=False, default_factory=dict)
    _fetching: threading.Lock = field(init=False, default_factory=threading.Lock)

    def hold(self, step: Shares) -> Mapping[int, str]:
        """Fetch the trajectories of a step, in place of the previous step's.

        Waits for a running prefetch. Returns the reasons of lost groups, by group id.
        """
        with self._fetching:
            self._turn, self._shares = step.turn, step.shares
            self._trajectories, self._rows = {}, {}
            found, lost = self.source.trajectories([share.place for share in step.shares])
            self._trajectories = dict(found)
            lost = dict(lost) | self._without_states()
            self._for_this_step = {
                place: each
                for place, each in self._for_next_step.items()
                if found.get(place) is each.trajectory
            }
            self._for_next_step = {}
        return lost

    def _without_states(self) -> dict[int, str]:
        """Groups that lack the hidden states for their teacher's head, such as groups read from
        disk."""
        lost = {}
        for share in self._shares:
            if share.by_teacher or share.teacher not in self.heads:
                continue
            held = self._trajectories.get(share.place)
            if held is not None and any(each.teacher_states is None for each in held.segments):
                lost[share.place.group_id] = "its teacher's hidden states are not kept on disk"
        return lost

    def prefetch(self, step: Shares) -> None:
        """Prefetch trajectories that the next step may train on, and build their rows.

        They are added to those of earlier calls. Runs in a thread, concurrently with other methods.
        No-op if the step of number `step.turn` is no longer held.
        """
        with self._fetching:
            if step.turn != self._turn:
                return
            found, _ = self.source.trajectories([share.place for share in step.shares], True)
            for share in step.shares:
                if (trajectory := found.get(share.place)) is not None:
                    self._for_next_step[share.place] = _Prefetched(
                        share, trajectory, self._prefetched_rows(share, trajectory)
                    )

    def _prefetched_rows(
        self, share: TrajectoryShare, trajectory: Trajectory
    ) -> Sequence[TrainingRow]:
        if self.objective.reference_kl_coef:  # every row depends on the mean of the whole step
            return ()
        return self._rows_of(share, trajectory, 0.0)

    def row(self, place: RowPlace) -> TrainingRow:
        """The row at `place`, after `build`."""
        return self._rows[place]

    def _scored(self, score: Score, rows_D: Sequence[TrainingRow]) -> Sequence[FloatArray]:
        """Log-probs of the rows. Collective: a worker without rows scores a short one.

        That has the T of a trajectory, because rows do not exist yet when the reference scores.
        Every worker holds one, if only to repeat another worker's micro-batch.
        """
        if rows_D:
            return score(rows_D)
        score([shortest(segment_to_score(next(iter(self._trajectories.values())).segments[0]))])
        return []

    def score_reference(self, _: None) -> dict[RowPlace, FloatArray]:
        """Score the segments that the policy sampled with the reference policy.

        Returns those log-probs that other workers need as well, for `add_reference`.
        """
        trained = self._trained()
        rows = [segment_to_score(self._segment(place)) for place in trained]
        self._referred = dict(
            zip(trained, self._scored(self.score_by_reference, rows), strict=True)
        )
        shared = {share.place for share in self._shares if share.shared}
        return {place: each for place, each in self._referred.items() if place.trajectory in shared}

    def add_reference(self, of_others: Mapping[RowPlace, FloatArray]) -> None:
        """Add the reference policy's log-probs to the segments that the policy sampled.

        Args:
            of_others: results of `score_reference` of all workers.
        """
        scored, self._referred = {**self._referred, **of_others}, {}
        for share in self._shares:
            if share.by_teacher:
                continue
            trajectory = self._trajectories[place := share.place]
            segments = tuple(
                replace(s, reference_logprobs_T=on_actions(s, scored[RowPlace(*place, number)]))
                for number, s in enumerate(trajectory.segments)
            )
            self._trajectories[place] = replace(trajectory, segments=segments)

    def build(self, _: None) -> RowStats:
        """Build the rows of the trajectories. Collective if there is a reference term."""
        mean_kl = None
        if self.objective.reference_kl_coef:
            segments = [self._segment(place) for place in self._trained()]
            tokens = self.group.sum_over_workers(float(sum(s.num_actions for s in segments)))
            gap = self.group.sum_over_workers(reference_gap_sum(segments))
            mean_kl = gap / tokens if tokens else None
        prefetched, self._for_this_step = self._for_this_step, {}
        for share in self._shares:
            trajectory = self._trajectories[share.place]
            made = prefetched[share.place].rows_for(share) if share.place in prefetched else ()
            for number, row in enumerate(made or self._rows_of(share, trajectory, mean_kl or 0.0)):
                self._rows[RowPlace(*share.place, number)] = row
        return RowStats(
            advantages=advantage_stats([self._rows[place] for place in self._trained()]),
            mean_kl=mean_kl,
            trajectories=len(self._shares),
            prefetched=sum(share.place in prefetched for share in self._shares),
        )

    def _rows_of(
        self, share: TrajectoryShare, trajectory: Trajectory, mean_kl: float
    ) -> list[TrainingRow]:
        return trajectory_rows(
            trajectory,
            self.objective,
            group_id=share.place.group_id,
            teacher=share.teacher,
            by_teacher=share.by_teacher,
            advantage=share.advantage,
            coef=share.coef,
            mean_kl=mean_kl,
            stop_event=self.stop_event,
        )

    def add_proximal(self, _: None) -> None:
        """Score the rows with the weights at the start of the step, for the ratios of updates."""
        trained = self._trained()
        rows = [self._rows[place] for place in trained]
        for place, row, logprobs_N in zip(
            trained, rows, self._scored(self.score, rows), strict=True
        ):
            proximal_T = np.zeros(len(row), np.float32)
            proximal_T[row.loss_mask_T] = logprobs_N
            self._rows[place] = replace(row, proximal_logprobs_T=proximal_T)

    def sums(self, places: Sequence[RowPlace]) -> dict[RowPlace, RowSums]:
        """Sums of these rows, for `join`."""
        rows = [self._rows[place] for place in places]
        return {
            place: row_sums(row, logprobs_N, self.objective)
            for place, row, logprobs_N in zip(
                places, rows, self._scored(self.score, rows), strict=True
            )
        }

    def join(self, sums: Mapping[RowPlace, RowSums]) -> None:
        """Add to each of these rows the sums of the other rows of its sequence.

        Args:
            sums: sums of all rows of an update's sequences, from all workers.
        """
        for place in self._rows.keys() & sums.keys():
            row, count = self._rows[place], len(self._trajectories[place.trajectory].segments)
            sequence = [sums[RowPlace(*place.trajectory, number)] for number in range(count)]
            self._rows[place] = with_sums_of_others(row, place.segment, sequence, self.objective)

    def kept(self, group_ids: Collection[int]) -> tuple[list[KeptRow], list[TokenTable | None]]:
        """Rows of these groups on this worker, and a table of the tokens of all its policy samples.

        The list of tables has one entry, or is empty if the worker has no policy samples.
        """
        trained = self._trained()
        kept = [
            KeptRow(
                place,
                replace(self._segment(place), teacher_states=None),
                replace(self._rows[place], teacher_states=None),
            )
            for place in [*trained, *self._trained(by_teacher=True)]
            if place.group_id in group_ids
        ]
        return kept, [token_table([self._segment(place) for place in trained])] if trained else []

    def _trained(self, by_teacher: bool = False) -> list[RowPlace]:
        """Places of the rows that this worker trains, of the policy's or the teacher's samples."""
        return [
            RowPlace(*share.place, n)
            for share in self._shares
            if share.by_teacher == by_teacher
            for n in share.trained
        ]

    def _segment(self, place: RowPlace) -> Segment:
        return self._trajectories[place.trajectory].segments[place.segment]
