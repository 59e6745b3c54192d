"""A learner worker's share of a step's rollouts: fetched where they are, and made into rows.

Everything per token is here, on the worker that trains it. What a row needs of others goes between
the workers as sums; whole arrays do only where segments of one trajectory are dealt to several
workers, and the learner itself is their reference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distill.objective.advantages import on_actions
from distill.objective.batching import TrainingRow
from distill.objective.metrics import TokenTable, token_table
from distill.objective.objectives import imitation_terms, reference_gap_sum, trajectory_terms
from distill.objective.rows import (
    AdvantageStats,
    advantage_stats,
    row_sums,
    segment_to_score,
    trajectory_rows,
    with_sums_of_others,
)
from distill.objective.settings import ObjectiveConfig
from distill.outlines import Place, RowPlace, TrajectorySource
from distill.types import FloatArray, Segment, Trajectory
from learner.process_group import WorkerGroup

# log p_T of each row's trained tokens. All workers ask together, each for rows of its own.
Score = Callable[[Sequence[TrainingRow]], Sequence[FloatArray]]


class TrajectoryShare(NamedTuple):
    """A trajectory some of whose rows a worker runs.

    Attributes:
        advantage, coef: as `trajectory_terms` takes them.
        trained: its segments whose rows count here; the others count on another worker.
        shared: another worker has it as well.
        by_teacher: the teacher sampled it.
    """

    place: Place
    teacher: str
    advantage: float
    coef: float
    trained: tuple[int, ...]
    shared: bool
    by_teacher: bool


class Shares(NamedTuple):
    """A worker's shares of a step, or of what may be the step after it.

    Attributes:
        turn: counts the steps that were held, and those held again: a step's own, or for what is
            fetched ahead that of the step which is held meanwhile.
    """

    turn: int
    shares: Sequence[TrajectoryShare]


class Built(NamedTuple):
    """Of the rows that a worker has made: advantages of what the policy sampled; the step's mean of
    log p_T - log ref_T, if there is a reference's term; of how many trajectories; and how many of
    those had been fetched ahead."""

    advantages: AdvantageStats | None
    mean_kl: float | None
    trajectories: int
    ahead: int


class _Ahead(NamedTuple):
    """What a worker has of a trajectory before its step; no rows if those need the whole step."""

    share: TrajectoryShare
    trajectory: Trajectory
    rows: Sequence[TrainingRow]

    def rows_for(self, share: TrajectoryShare) -> Sequence[TrainingRow]:
        """The rows, if they were made with these terms."""
        mine = self.share
        alike = (mine.teacher, mine.advantage, mine.coef) == (
            share.teacher,
            share.advantage,
            share.coef,
        )
        return self.rows if alike else ()


class KeptRow(NamedTuple):
    """A row, and the segment that it was made of."""

    place: RowPlace
    segment: Segment
    row: TrainingRow


class RolloutShare:
    """One worker's share of the rollouts of a step, from `hold` to the next `hold`; and, beside
    it, what was fetched ahead for the next, which counts only where it is what is then held."""

    def __init__(
        self,
        source: TrajectorySource,
        objective: ObjectiveConfig,
        stop_event: tuple[int, ...],
        group: WorkerGroup,
    ) -> None:
        self._source, self._objective, self._stop_event = source, objective, stop_event
        self._group = group
        self._shares: Sequence[TrajectoryShare] = ()
        self._trajectories: dict[Place, Trajectory] = {}
        self._rows: dict[RowPlace, TrainingRow] = {}
        self._turn = 0
        self._held_ahead: Mapping[Place, _Ahead] = {}  # of this step
        self._ahead: dict[Place, _Ahead] = {}  # of the next
        self._fetching = threading.Lock()

    def hold(self, step: Shares) -> Mapping[int, str]:
        """Fetches the trajectories, in place of those of the step before; returns what is lost.

        Waits for what is being fetched ahead.
        """
        with self._fetching:
            self._turn, self._shares = step.turn, step.shares
            self._trajectories, self._rows = {}, {}
            found, lost = self._source.trajectories([share.place for share in step.shares])
            self._trajectories = dict(found)
            self._held_ahead = {
                place: each
                for place, each in self._ahead.items()
                if found.get(place) is each.trajectory
            }
            self._ahead = {}
        return lost

    def fetch_ahead(self, step: Shares) -> None:
        """Fetches trajectories that the next step may train on, beside those of earlier calls, and
        makes their rows. In a thread, beside everything else; nothing if it comes too late."""
        with self._fetching:
            if step.turn != self._turn:
                return
            found, _ = self._source.trajectories([share.place for share in step.shares], True)
            for share in step.shares:
                if (trajectory := found.get(share.place)) is not None:
                    self._ahead[share.place] = _Ahead(
                        share, trajectory, self._rows_ahead(share, trajectory)
                    )

    def _rows_ahead(self, share: TrajectoryShare, trajectory: Trajectory) -> Sequence[TrainingRow]:
        if self._objective.reference_kl_coef:  # the mean of the whole step is in all of them
            return ()
        return self._rows_of(share, trajectory, 0.0)

    def row(self, place: RowPlace) -> TrainingRow:
        """A row that was built."""
        return self._rows[place]

    @property
    def any_row(self) -> TrainingRow:
        """One of them, to run in step with others."""
        return next(iter(self._rows.values()))

    def add_reference(self, score: Score) -> None:
        """Scores its segments that the policy sampled by the reference."""
        trained = self._trained()
        rows = [segment_to_score(self._segment(place)) for place in trained]
        scored: dict[RowPlace, FloatArray] = dict(zip(trained, score(rows), strict=True))
        shared = {share.place for share in self._shares if share.shared}
        offered = {place: each for place, each in scored.items() if place.trajectory in shared}
        for of_worker in self._group.gathered(offered):
            scored |= of_worker
        for share in self._shares:
            if share.by_teacher:
                continue
            trajectory = self._trajectories[place := share.place]
            segments = tuple(
                replace(s, reference_logprobs_T=on_actions(s, scored[RowPlace(*place, number)]))
                for number, s in enumerate(trajectory.segments)
            )
            self._trajectories[place] = replace(trajectory, segments=segments)

    def build(self) -> Built:
        """Makes the rows of its trajectories."""
        mean_kl = None
        if self._objective.reference_kl_coef:
            segments = [self._segment(place) for place in self._trained()]
            tokens = self._group.total(float(sum(s.num_actions for s in segments)))
            gap = self._group.total(reference_gap_sum(segments))
            mean_kl = gap / tokens if tokens else None
        ahead, self._held_ahead = self._held_ahead, {}
        for share in self._shares:
            trajectory = self._trajectories[share.place]
            made = ahead[share.place].rows_for(share) if share.place in ahead else ()
            for number, row in enumerate(made or self._rows_of(share, trajectory, mean_kl or 0.0)):
                self._rows[RowPlace(*share.place, number)] = row
        return Built(
            advantages=advantage_stats([self._rows[place] for place in self._trained()]),
            mean_kl=mean_kl,
            trajectories=len(self._shares),
            ahead=sum(share.place in ahead for share in self._shares),
        )

    def _rows_of(
        self, share: TrajectoryShare, trajectory: Trajectory, mean_kl: float
    ) -> list[TrainingRow]:
        terms = (
            imitation_terms(trajectory, share.coef)
            if share.by_teacher
            else trajectory_terms(
                trajectory,
                self._objective,
                advantage=share.advantage,
                coef=share.coef,
                mean_kl=mean_kl,
                stop_event=self._stop_event,
            )
        )
        return trajectory_rows(trajectory, terms, share.place.group_id, share.teacher)

    def add_proximal(self, score: Score) -> None:
        """Scores its rows by the weights that the step begins with, for the ratios of updates."""
        trained = self._trained()
        rows = [self._rows[place] for place in trained]
        for place, row, logprobs_N in zip(trained, rows, score(rows), strict=True):
            proximal_T = np.zeros(len(row), np.float32)
            proximal_T[row.loss_mask_T] = logprobs_N
            self._rows[place] = replace(row, proximal_logprobs_T=proximal_T)

    def join(self, places: Sequence[RowPlace], score: Score) -> None:
        """Tells rows that are sequences together what each needs of the others.

        Args:
            places: those of an update that it trains; their other rows are among other workers'.
        """
        rows = [self._rows[place] for place in places]
        sums = {
            place: row_sums(row, logprobs_N, self._objective)
            for place, row, logprobs_N in zip(places, rows, score(rows), strict=True)
        }
        everywhere = {
            place: each for one in self._group.gathered(sums) for place, each in one.items()
        }
        for place, row in zip(places, rows, strict=True):
            count = len(self._trajectories[place.trajectory].segments)
            sequence = [everywhere[RowPlace(*place.trajectory, number)] for number in range(count)]
            self._rows[place] = with_sums_of_others(row, place.segment, sequence, self._objective)

    def kept(self, group_ids: Collection[int]) -> tuple[list[KeptRow], list[TokenTable | None]]:
        """Its rows of these groups; and a table of the tokens of all that the policy sampled, if it
        has any."""
        trained = self._trained()
        kept = [
            KeptRow(place, self._segment(place), self._rows[place])
            for place in [*trained, *self._trained(by_teacher=True)]
            if place.group_id in group_ids
        ]
        return kept, [token_table([self._segment(place) for place in trained])] if trained else []

    def _trained(self, by_teacher: bool = False) -> list[RowPlace]:
        """The rows that count here, of the policy's samples or the teacher's, in order."""
        return [
            RowPlace(*share.place, n)
            for share in self._shares
            if share.by_teacher == by_teacher
            for n in share.trained
        ]

    def _segment(self, place: RowPlace) -> Segment:
        return self._trajectories[place.trajectory].segments[place.segment]
