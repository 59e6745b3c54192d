"""Progress of a running job: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from distill.handshake.comparison import CalibrationReport

# Metrics in progress lines with their labels, in this order, if a step has them.
_SHOWN = {
    "opd/reverse_kl": "reverse KL",
    "teacher_samples/nll": "teacher's nll",
    "train/nll": "nll",
    "train/loss": "loss",
    "reward_model/accuracy": "accuracy",
    "reward/mean": "reward",
    "rollout/response_length": "tokens",
    "rollout/eos_share": "ended",
    "train/grad_norm": "grad norm",
    "staleness/max": "stale",
    "time/step": "s/step",
    "time/wait": "s wait",
    "tokens_per_s": "tok/s",
}

# Metrics that are hidden by default, and shown by runs that have no others.
_OF_RESPONSES = ("rollout/response_length", "rollout/eos_share")

# Tiny models make dozens of steps per second; metrics.jsonl has all of them.
_LINE_INTERVAL_S = 1.0
# In a log the interval grows to this share of the run's time, up to a maximum in seconds.
_LOG_INTERVAL_SHARE, _LOG_INTERVAL_S = 1 / 30, 60.0


class Progression:
    """Reports steps: a bar and up to one line per second on a terminal, lines in a log.

    Lines in a log contain the time of day and the remaining time, and become less frequent during
    the run.

    Args:
        bar: False: print the lines of a log also on a terminal, so that a debugger's prompt stays
            readable.

    Attributes:
        hidden: metrics that are not shown, because they have no information in this run.
    """

    def __init__(self, console: Console, first_step: int, steps: int, *, bar: bool = True) -> None:
        self.hidden: set[str] = set(_OF_RESPONSES)
        self._console = console
        self._has_bar = bar and console.is_terminal
        self._steps = steps
        self._started = time.monotonic()
        self._paced_from: tuple[int, float] | None = None  # first step of this process, its end
        self._printed = -_LINE_INTERVAL_S
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=16),
            TimeRemainingColumn(), TextColumn("{task.description}"), console=console,
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=steps, completed=first_step)

    def __enter__(self) -> Progression:
        if self._has_bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_bar:
            self._bar.stop()

    def step(self, metrics: Mapping[str, float]) -> None:
        shown = [
            f"{label} {_number(metrics[name])}"
            for name, label in _SHOWN.items()
            if name in metrics and name not in self.hidden
        ]
        step = int(metrics["step"])
        if self._has_bar:
            self._bar.update(
                self._task, completed=step, description="  ".join([shown[0], *shown[-1:]])
            )
        now = time.monotonic()
        if step == self._steps or now - self._printed >= self._interval_s(now):
            self._printed = now
            line = f"step {step}/{self._steps}  " + "  ".join(shown)
            if not self._has_bar:
                line = f"{time.strftime('%H:%M:%S')}  {line}{self._left(step, now)}"
            self._console.print(line, highlight=False)

    def _interval_s(self, now: float) -> float:
        """Seconds between two printed lines."""
        if self._has_bar:
            return _LINE_INTERVAL_S
        grown = min((now - self._started) * _LOG_INTERVAL_SHARE, _LOG_INTERVAL_S)
        return max(_LINE_INTERVAL_S, grown)

    def _left(self, step: int, now: float) -> str:
        """Remaining time at the mean pace of this process, evaluations included."""
        if self._paced_from is None or step <= self._paced_from[0]:
            self._paced_from = step, now
            return ""
        first, since = self._paced_from
        left = (now - since) / (step - first) * (self._steps - step)
        return f"  {timedelta(seconds=round(left))} left"

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)


def measured_line(metrics: Mapping[str, float]) -> str:
    """Format an evaluation's metrics as one line, each interval after its value."""
    shown = []
    for name, value in metrics.items():
        low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
        bounds = "" if low is None or high is None else f" [{_number(low)}, {_number(high)}]"
        if name.removesuffix("_low").removesuffix("_high") in metrics.keys() - {name}:
            continue
        shown.append(f"{name.removeprefix('eval/')} {_number(value)}{bounds}")
    return "  ".join(shown)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def agreement_table(report: CalibrationReport) -> Table:
    """Format the results of the handshake as a table for users."""
    table = Table(title="log-prob agreement, nats")
    for header in ("party", "compared with"):
        table.add_column(header)
    for header in ("T", "tokens", "max gap", "mean gap", "allowed max, mean", "verdict"):
        table.add_column(header, justify="right")
    for c in report.comparisons:
        verdict = Text("agrees", "green") if c.agrees else Text("DISAGREES", "red")
        if c.must_differ:
            verdict = Text("differs", "green") if c.agrees else Text("THE SAME", "red")
        table.add_row(
            c.party, c.reference, f"{c.temperature:g}", str(c.num_tokens), f"{c.max_gap:.1e}",
            f"{c.mean_gap:.1e}",
            f"{'> ' if c.must_differ else ''}{c.tolerance:.2g}, {c.mean_tolerance:.2g}", verdict,
        )  # fmt: skip
    for difference in report.differences:
        table.add_row(difference, *[""] * 6, Text("DIFFERS", "red"))
    return table
