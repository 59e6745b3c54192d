"""Curves of runs: steps and seconds to a target, and how many times as many RL takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.table import Table

# A target counts as reached when it is held for so many evaluations in a row.
HOLD = 3
# The claim: RL takes at least so many times OPD's steps.
CLAIMED_RATIO = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run: `accuracy[i]` was measured after `steps[i]` optimizer steps, the first before any.

    Attributes:
        length: tokens of an answer.
        seconds: that those steps took, evaluations left out; tokens: that they trained on.
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
        """The first step from which `HOLD` evaluations in a row are there; inf: none."""
        i = self._reached(target)
        return math.inf if i is None else self.steps[i]

    def seconds_to(self, target: float) -> float:
        """Seconds until then."""
        i = self._reached(target)
        return math.inf if i is None else self.seconds[i]

    def _reached(self, target: float) -> int | None:
        there = [value >= target for value in self.accuracy]
        for i in range(len(there) - HOLD + 1):
            if all(there[i : i + HOLD]):
                return i
        return None


def ranked(curves: Sequence[Curve], target: float) -> list[Curve]:
    """Fewest steps to the target first; among equals, the highest last `HOLD` evaluations."""
    return sorted(
        curves, key=lambda curve: (curve.steps_to(target), -fmean(curve.accuracy[-HOLD:]))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: a method at one length with its best learning rate, over all seeds.

    `cap`: optimizer steps after which a run was given up.
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


def row_of(curves: Sequence[Curve], target: float, cap: int) -> Row:
    """The row of one method's runs at one length, which differ in their seeds alone."""
    first = curves[0]
    return Row(
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
    """How many times OPD's steps a method of RL takes; `bound`: at least so many."""

    length: int
    method: str
    value: float
    bound: bool

    def __str__(self) -> str:
        return f"{'> ' if self.bound else ''}{self.value:.1f}"

    @property
    def verdict(self) -> str:
        """Whether that is what is claimed."""
        if self.value >= CLAIMED_RATIO:
            return "as claimed"
        return "not known: the runs were given up" if self.bound else "less than claimed"


def ratio_of(opd: Row, rl: Row) -> Ratio | None:
    """RL's median steps over OPD's; None where OPD is not at the target, or began there."""
    if math.isinf(opd.steps) or opd.steps == 0:
        return None
    never = math.isinf(rl.steps)
    return Ratio(
        length=rl.length,
        method=rl.method,
        value=(rl.cap if never else rl.steps) / opd.steps,
        bound=never,
    )


def table_of(rows: Sequence[tuple[Row, Ratio | None]], title: str) -> Table:
    """The rows and their ratios as a table anyone can read."""
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
    """Steps to the target, or that it was not reached in `cap` of them."""
    return f"> {cap}" if math.isinf(steps) else f"{steps:g}"
