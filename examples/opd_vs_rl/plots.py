"""Steps to a target over the answer's length as a PNG, and the ratio of RL's to OPD's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.libraries import require_library
from examples.opd_vs_rl.curves import CLAIMED_RATIO, Ratio, ResultRow

# Okabe and Ito's palette (2008), which colour-blind readers tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def check_plots() -> None:
    """Raise ConfigError if matplotlib is missing, before anything starts."""
    figure_class()


def draw_ratios(path: Path, rows: Sequence[ResultRow], ratios: Sequence[Ratio]) -> None:
    """Draw steps and ratios over the answer's length, side by side, as a PNG at `path`.

    A target that was not reached is an upward arrow at the last step of the run.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(12.8, 4.8), layout="constrained")
    steps, times = figure.subplots(1, 2)
    methods = list(dict.fromkeys(row.method for row in rows))
    assert len(methods) <= len(COLOURS), methods
    colours = dict(zip(methods, COLOURS, strict=False))
    for method, colour in colours.items():
        own = [row for row in rows if row.method == method]
        middle = [row.cap if math.isinf(row.steps) else row.steps for row in own]
        bounds = [math.isinf(row.steps) for row in own]
        _draw_line(steps, method, colour, [row.length for row in own], middle, bounds)
        for row in own:
            reached = [each for each in row.steps_by_seed if not math.isinf(each)]
            steps.plot([row.length] * len(reached), reached, ".", color=colour, alpha=0.4)
        of = [ratio for ratio in ratios if ratio.method == method]
        if of:
            values = [ratio.value for ratio in of]
            bounds = [ratio.bound for ratio in of]
            _draw_line(times, method, colour, [ratio.length for ratio in of], values, bounds)
    times.axhline(CLAIMED_RATIO, color="black", ls="--", lw=1, label="claimed: 7 or more", zorder=0)
    times.axhline(1, color="grey", lw=1, zorder=0)
    lengths = sorted({row.length for row in rows})
    _label(steps, lengths, "optimizer steps to the target")
    _label(times, lengths, "times OPD's steps")
    figure.savefig(path, dpi=130)


def _draw_line(
    axis: Any,
    name: str,
    colour: str,
    lengths: Sequence[int],
    values: Sequence[float],
    bounds: Sequence[bool],
) -> None:
    axis.plot(lengths, values, "o-", color=colour, label=name, lw=1.8)
    for length, value, bound in zip(lengths, values, bounds, strict=True):
        if bound:
            axis.plot([length], [value * 1.12], "^", color=colour, ms=9)


def _label(axis: Any, lengths: Sequence[int], title: str) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel("tokens of an answer")
    axis.set_title(title)
    axis.grid(alpha=0.25, which="both")
    axis.legend(loc="upper left")


def figure_class() -> Any:
    """matplotlib's Figure, which writes files without a display."""
    require_library("matplotlib", "drawing", "isotherm[plots]")
    from matplotlib.figure import Figure  # slow to import

    return Figure
