"""A learner worker's share of a step's rollouts: fetched where they are, and made into rows.

Everything per token is here, on the worker that trains it. What a row needs of others goes between
the workers as sums; whole arrays do only where segments of one trajectory are dealt to several
workers, and the learner itself is their reference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distill.objective.advantages import on_actions
from distill.objective.batching import TrainingRow
from distill.objective.metrics import TokenTable, token_table
from distill.objective.objectives import reference_gap_sum, trajectory_terms
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
    """

    place: Place
    teacher: str
    advantage: float
    coef: float
    trained: tuple[int, ...]
    shared: bool


class Built(NamedTuple):
    """Of the rows that a worker has made: their advantages, and the step's mean of log p_T - log
    ref_T, if there is a reference's term."""

    advantages: AdvantageStats | None
    mean_kl: float | None


class KeptRow(NamedTuple):
    """A row, and the segment that it was made of."""

    place: RowPlace
    segment: Segment
    row: TrainingRow


class RolloutShare:
    """One worker's share of the rollouts of a step, from `hold` to the next `hold`."""

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

    def hold(self, shares: Sequence[TrajectoryShare]) -> Mapping[int, str]:
        """Fetches the trajectories, in place of those of the step before; returns what is lost."""
        self._shares, self._trajectories, self._rows = shares, {}, {}
        found, lost = self._source.trajectories([share.place for share in shares])
        self._trajectories = dict(found)
        return lost

    def row(self, place: RowPlace) -> TrainingRow:
        """A row that was built."""
        return self._rows[place]

    @property
    def any_row(self) -> TrainingRow:
        """One of them, to run in step with others."""
        return next(iter(self._rows.values()))

    def add_reference(self, score: Score) -> None:
        """Scores its segments by the reference."""
        trained = self._trained()
        rows = [segment_to_score(self._segment(place)) for place in trained]
        scored: dict[RowPlace, FloatArray] = dict(zip(trained, score(rows), strict=True))
        shared = {share.place for share in self._shares if share.shared}
        offered = {place: each for place, each in scored.items() if place.trajectory in shared}
        for of_worker in self._group.gathered(offered):
            scored |= of_worker
        for place, trajectory in self._trajectories.items():
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
            mean_kl = self._group.total(reference_gap_sum(segments)) / tokens
        for share in self._shares:
            trajectory = self._trajectories[share.place]
            terms = trajectory_terms(
                trajectory,
                self._objective,
                advantage=share.advantage,
                coef=share.coef,
                mean_kl=mean_kl or 0.0,
                stop_event=self._stop_event,
            )
            rows = trajectory_rows(trajectory, terms, share.place.group_id, share.teacher)
            for number, row in enumerate(rows):
                self._rows[RowPlace(*share.place, number)] = row
        return Built(advantage_stats([self._rows[place] for place in self._trained()]), mean_kl)

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
        """Its rows of these groups; and a table of the tokens of all its rows, if it has any."""
        trained = self._trained()
        kept = [
            KeptRow(place, self._segment(place), self._rows[place])
            for place in trained
            if place.group_id in group_ids
        ]
        return kept, [token_table([self._segment(place) for place in trained])] if trained else []

    def _trained(self) -> list[RowPlace]:
        """The rows that count here, in the step's order."""
        return [RowPlace(*share.place, n) for share in self._shares for n in share.trained]

    def _segment(self, place: RowPlace) -> Segment:
        return self._trajectories[place.trajectory].segments[place.segment]
