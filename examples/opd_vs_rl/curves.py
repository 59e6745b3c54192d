"""Accuracy curves of runs: steps and seconds to a target, and the ratio of RL's to OPD's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.table import Table

# A target counts as reached when this many consecutive evaluations hold it.
HOLD = 3
# The claim under test: RL takes at least this many times OPD's steps.
CLAIMED_RATIO = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Curve of one run: `accuracy[i]` was measured after `steps[i]` steps, `steps[0]` being 0.

    Attributes:
        length: tokens of an answer.
        steps: optimizer steps before each evaluation.
        seconds: duration of those steps, without evaluations.
        tokens: tokens that those steps trained on.
    """

    length: int
    method: str
    lr: float
    seed: int
    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]

    def steps_to(self, target: float) -> float:
        """First step from which `HOLD` consecutive evaluations reach the target; else inf."""
        i = self._reached(target)
        return math.inf if i is None else self.steps[i]

    def seconds_to(self, target: float) -> float:
        """Training seconds until that step; inf if the target is not reached."""
        i = self._reached(target)
        return math.inf if i is None else self.seconds[i]

    def _reached(self, target: float) -> int | None:
        there = [value >= target for value in self.accuracy]
        for i in range(len(there) - HOLD + 1):
            if all(there[i : i + HOLD]):
                return i
        return None


def ranked(curves: Sequence[Curve], target: float) -> list[Curve]:
    """Curves by steps to the target, fewest first; ties by the mean of the last `HOLD` values."""
    return sorted(
        curves, key=lambda curve: (curve.steps_to(target), -fmean(curve.accuracy[-HOLD:]))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """Row of the table: a method at one length with its best learning rate, over all seeds.

    `cap`: optimizer steps after which a run was stopped.
    """

    length: int
    method: str
    lr: float
    steps_by_seed: tuple[float, ...]
    seconds_by_seed: tuple[float, ...]
    cap: int
    last_accuracy: float

    @property
    def steps(self) -> float:
        """Median steps to the target; inf when half of the seeds, or more, never reach it."""
        return median(self.steps_by_seed)

    @property
    def seconds(self) -> float:
        return median(self.seconds_by_seed)


def row_of(curves: Sequence[Curve], target: float, cap: int) -> ResultRow:
    """Row of one method at one length, from runs that differ only in their seeds."""
    first = curves[0]
    return ResultRow(
        length=first.length,
        method=first.method,
        lr=first.lr,
        steps_by_seed=tuple(curve.steps_to(target) for curve in curves),
        seconds_by_seed=tuple(curve.seconds_to(target) for curve in curves),
        cap=cap,
        last_accuracy=fmean(curve.accuracy[-1] for curve in curves),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Ratio of an RL method's steps to OPD's; `bound`: the value is a lower bound."""

    length: int
    method: str
    value: float
    bound: bool

    def __str__(self) -> str:
        return f"{'> ' if self.bound else ''}{self.value:.1f}"

    @property
    def verdict(self) -> str:
        """Comparison with the claimed ratio, in words."""
        if self.value >= CLAIMED_RATIO:
            return "as claimed"
        return "not known: the runs were given up" if self.bound else "less than claimed"


def ratio_of(opd: ResultRow, rl: ResultRow) -> Ratio | None:
    """RL's median steps over OPD's; None if OPD never reached the target, or started at it."""
    if math.isinf(opd.steps) or opd.steps == 0:
        return None
    never = math.isinf(rl.steps)
    return Ratio(
        length=rl.length,
        method=rl.method,
        value=(rl.cap if never else rl.steps) / opd.steps,
        bound=never,
    )


def table_of(rows: Sequence[tuple[ResultRow, Ratio | None]], title: str) -> Table:
    """Table of the rows and their ratios, for the console."""
    table = Table(title=title)
    table.add_column("tokens", justify="right")
    table.add_column("method")
    for header in ("lr", "steps, by seed", "median", "seconds", "times OPD's", "right at the end"):
        table.add_column(header, justify="right")
    for row, ratio in rows:
        table.add_row(
            str(row.length),
            row.method,
            f"{row.lr:g}",
            ", ".join(shown_steps(steps, row.cap) for steps in row.steps_by_seed),
            shown_steps(row.steps, row.cap),
            "" if math.isinf(row.seconds) else f"{row.seconds:.0f}",
            "" if ratio is None else str(ratio),
            f"{row.last_accuracy:.1%}",
        )
    return table


def shown_steps(steps: float, cap: int) -> str:
    """Steps to the target as text; `> cap` if it was not reached."""
    return f"> {cap}" if math.isinf(steps) else f"{steps:g}"
