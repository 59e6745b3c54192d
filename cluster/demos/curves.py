"""Accuracy curves of runs: steps to a target, the best settings, a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rich.table import Table

# A target counts as reached when it is held for so many evaluations in a row.
HOLD = 3
# The claim: GRPO takes at least so many times OPD's steps.
CLAIMED_RATIO = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run: `accuracy[i]` was measured after `steps[i]` optimizer steps, the first before any.

    `informative_groups`: share of the first step's groups whose members earned different rewards.
    """

    start: str
    contender: str
    settings: Mapping[str, Any]
    seed: int
    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    informative_groups: float

    def steps_to(self, target: float) -> float:
        return steps_to_target(self.steps, self.accuracy, target)


def steps_to_target(
    steps: Sequence[int], accuracy: Sequence[float], target: float, hold: int = HOLD
) -> float:
    """The first step from which `hold` evaluations in a row are at `target` or above; inf: none.

    `accuracy[i]` was measured after `steps[i]` optimizer steps.
    """
    reached = [value >= target for value in accuracy]
    for i in range(len(reached) - hold + 1):
        if all(reached[i : i + hold]):
            return steps[i]
    return math.inf


def ranked(curves: Sequence[Curve], target: float) -> list[Curve]:
    """Fewest steps to the target first; among equals, the highest last `HOLD` evaluations."""
    return sorted(
        curves, key=lambda curve: (curve.steps_to(target), -fmean(curve.accuracy[-HOLD:]))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: a contender's best settings from one start, over all seeds."""

    start: str
    contender: str
    settings: Mapping[str, Any]
    steps_by_seed: tuple[float, ...]
    budget: int
    last_accuracy: float

    @property
    def median(self) -> float:
        """Median steps to the target; inf when half of the seeds, or more, never reach it."""
        return median(self.steps_by_seed)


def row_of(curves: Sequence[Curve], target: float) -> Row:
    """The row of one contender's runs, which differ in their seeds alone."""
    first = curves[0]
    return Row(
        start=first.start,
        contender=first.contender,
        settings=first.settings,
        steps_by_seed=tuple(curve.steps_to(target) for curve in curves),
        budget=first.steps[-1],
        last_accuracy=fmean(curve.accuracy[-1] for curve in curves),
    )


def verdict(opd: Row, rl: Row) -> str:
    """One sentence: how many times OPD's steps GRPO takes, and whether that is what is claimed."""
    who = f"{opd.start} start, {rl.contender} against {opd.contender}"
    if math.isinf(opd.median):
        return f"{who}: OPD is not at the target after {opd.budget} steps; a seventh is NOT reached"
    if opd.median == 0:
        return f"{who}: the student is at the target before any training; nothing to compare"
    never = math.isinf(rl.median)
    steps = rl.budget if never else rl.median
    ratio = steps / opd.median
    more, over = ("more than ", "over ") if never else ("", "")
    said = f"{who}: {more}{steps:g} against {opd.median:g} steps, {over}{ratio:.1f} times as many"
    if ratio >= CLAIMED_RATIO:
        return f"{said}; a seventh is reached"
    if never:
        return f"{said}; whether a seventh is reached, only a longer run of {rl.contender} can tell"
    return f"{said}; a seventh is NOT reached"


def table_of(rows: Sequence[Row], title: str) -> Table:
    """The rows as a table anyone can read."""
    table = Table(title=title)
    for header in ("start", "contender", "settings"):
        table.add_column(header)
    for header in ("steps, by seed", "median", "accuracy at the end"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row.start,
            row.contender,
            shown_settings(row.settings),
            ", ".join(shown_steps(steps, row.budget) for steps in row.steps_by_seed),
            shown_steps(row.median, row.budget),
            f"{row.last_accuracy:.1%} after {row.budget}",
        )
    return table


def shown_settings(settings: Mapping[str, Any]) -> str:
    """The learning rate, and what differs from the contender's other settings besides."""
    return f"lr {settings['lr']:g}{', A / std' if settings.get('scale_by_std') else ''}"


def shown_steps(steps: float, budget: int) -> str:
    """Steps to the target, or that `budget` of them were too few."""
    return f"> {budget}" if math.isinf(steps) else f"{steps:g}"
