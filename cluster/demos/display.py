"""Progress of a demo's stages, live on a terminal or as lines in a log, and a plot.

teacher  learns to add    250/250 ━━━━━━━━━━━━ 0:00:00  nll 0.021  ▇▇▆▃▁▁▁▁
student  learns to add    312/400 ━━━━━━━━━╸━━ 0:00:04  nll 0.72   ▇▇▆▆▅▅▅▅
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from statistics import fmean

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

_LOG_INTERVAL_S = 10.0
_BLOCKS = " ▁▂▃▄▅▆▇█"
_SPARK_WIDTH, _PLOT_WIDTH, _PLOT_HEIGHT = 12, 60, 8


class StageDisplay:
    """Display of stages that run in sequence or in parallel, each with a curve of one metric."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=10),
            TimeRemainingColumn(), TextColumn("{task.fields[shown]}"), console=console,
        )  # fmt: skip
        self._stages: dict[str, _Stage] = {}
        self._printed = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the stages during the block; on a terminal, the display is updated in place."""
        if not self._console.is_terminal:
            yield
            return
        with self._progress:
            yield

    def add(self, name: str, what: str, steps: int, metric: str, label: str) -> None:
        """Add a stage that starts now; `metric` of its lines is drawn, with the label `label`."""
        task = self._progress.add_task(f"{name:8} {what:24}", total=steps, shown="starts")
        self._stages[name] = _Stage(name, task, steps, metric, label)

    def observe(self, name: str, lines: Sequence[Mapping[str, float]]) -> None:
        """Update a stage. `lines` are all of its lines of metrics.jsonl so far."""
        stage = self._stages[name]
        stage.reach(lines)
        self._progress.update(stage.task, completed=stage.step, shown=stage.shown())
        now = time.monotonic()
        if not self._console.is_terminal and now - self._printed >= _LOG_INTERVAL_S:
            self._printed = now
            going = (each.line() for each in self._stages.values() if each.step < each.steps)
            text = "  |  ".join(going)
            if text:
                self._console.print(f"{time.strftime('%H:%M:%S')}  {text}", highlight=False)


class _Stage:
    def __init__(self, name: str, task: TaskID, steps: int, metric: str, label: str) -> None:
        self.name, self.task, self.steps = name, task, steps
        self._metric, self._label = metric, label
        self._paced_from: tuple[int, float] | None = None  # the first step seen, and when
        self.lines: Sequence[Mapping[str, float]] = ()

    def reach(self, lines: Sequence[Mapping[str, float]]) -> None:
        self.lines = lines
        if self._paced_from is None and self.step:
            self._paced_from = self.step, time.monotonic()

    @property
    def step(self) -> int:
        return int(self.lines[-1]["step"]) if self.lines else 0

    def shown(self) -> str:
        """The curve and its last value, and the first and the last measured accuracy."""
        values = curve(self.lines, self._metric)
        parts = [f"{self._label} {values[-1]:.3f} {spark(values)}"] if values else []
        accuracy = curve(self.lines, "eval/accuracy")
        if accuracy:
            ends = accuracy[:1] + accuracy[1:][-1:]
            parts.append("accuracy " + " → ".join(f"{value:.0%}" for value in ends))
        return "  ".join(parts)

    def line(self) -> str:
        """Line for a log: `shown`, with the remaining time at the mean pace so far."""
        left = ""
        first, since = self._paced_from or (self.step, 0.0)
        if self.step > first:
            pace = (time.monotonic() - since) / (self.step - first)
            left = f"  {timedelta(seconds=round(pace * (self.steps - self.step)))} left"
        return f"{self.name} step {self.step}/{self.steps}  {self.shown()}{left}"


def curve(lines: Sequence[Mapping[str, float]], metric: str) -> list[float]:
    """Values of a metric in the lines that have it."""
    return [line[metric] for line in lines if metric in line]


def spark(values: Sequence[float]) -> str:
    """Sparkline, scaled from 0 to the largest value; each block is a mean."""
    means = _means(values, _SPARK_WIDTH)
    top = max(*means, 1e-9)
    return "".join(_BLOCKS[1 + round(max(mean, 0.0) / top * 7)] for mean in means)


def plot(values: Sequence[float], title: str) -> str:
    """Column chart over steps, scaled from 0 to the largest value, with the ends of both axes."""
    means = _means(values, _PLOT_WIDTH)
    top = max(*means, 1e-9)
    wide = _PLOT_WIDTH // len(means)
    rows = [title]
    for row in reversed(range(_PLOT_HEIGHT)):
        label = f"{top:6.2f}" if row == _PLOT_HEIGHT - 1 else f"{0:6.2f}" if row == 0 else " " * 6
        filled = (min(max(mean / top * _PLOT_HEIGHT - row, 0.0), 1.0) for mean in means)
        rows.append(f"{label} │" + "".join(_BLOCKS[round(8 * part)] * wide for part in filled))
    rows.append(f"{'':7}└" + "─" * wide * len(means))
    rows.append(f"{'':8}1" + f"step {len(values)}".rjust(wide * len(means) - 1))
    return "\n".join(rows)


def _means(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means of consecutive values."""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(edges)]
