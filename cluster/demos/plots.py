"""Curves over optimizer steps as a PNG: a line for the median of the seeds, a band for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from distill.errors import ConfigError

# Okabe and Ito's palette (2008), which colour-blind readers tell apart.
COLOURS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9")
_TICKS = (0, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
# Steps up to here are drawn at an even distance, later ones by their logarithm.
_EVEN_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`accuracy_by_seed[k][i]`, in [0, 1], was measured after `steps[i]` optimizer steps."""

    steps: Sequence[int]
    accuracy_by_seed: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture: lines by name, at most six, and the accuracy that all of them are after."""

    title: str
    target: float
    lines: Mapping[str, Line]


def check_plots() -> None:
    """Raises ConfigError if there is nothing to draw with; before anything starts."""
    figure_class()


def draw_accuracy(path: Path, panels: Sequence[Panel]) -> None:
    """Draws accuracy over optimizer steps, the panels side by side, and writes the PNG at `path`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_lines(axis, panel)
        _label(axis, panel)
    axes[0].set_ylabel("accuracy on held-out sums (greedy)")
    figure.savefig(path, dpi=130)


def _draw_lines(axis: Any, panel: Panel) -> None:
    assert len(panel.lines) <= len(COLOURS), panel.lines.keys()
    for (name, line), colour in zip(panel.lines.items(), COLOURS, strict=False):
        at_step = list(zip(*line.accuracy_by_seed, strict=True))
        middle = [median(values) for values in at_step]
        lowest, highest = [min(values) for values in at_step], [max(values) for values in at_step]
        axis.plot(line.steps, middle, color=colour, label=name, lw=1.8)
        axis.fill_between(line.steps, lowest, highest, color=colour, alpha=0.18, lw=0)
    axis.axhline(
        panel.target, color="black", ls="--", lw=1, label=f"target, {panel.target:.1%}", zorder=0
    )


def _label(axis: Any, panel: Panel) -> None:
    last = max(line.steps[-1] for line in panel.lines.values())
    axis.set_xscale("symlog", linthresh=_EVEN_STEPS)
    axis.set_xticks([tick for tick in _TICKS if tick <= last])
    axis.set_xticks([], minor=True)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlim(0, last)
    axis.set_xlabel(f"optimizer steps (logarithmic from {_EVEN_STEPS} on)")
    axis.set_ylim(0, 1.02)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_title(panel.title)
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right")


def figure_class() -> Any:
    """matplotlib's Figure, which writes files without a display."""
    try:
        from matplotlib.figure import Figure  # optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            "drawing needs the matplotlib package: pip install 'isotherm[plots]'"
        ) from error
    return Figure
