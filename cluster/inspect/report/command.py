"""`python -m cluster.report out=DIR`: a run's curves, its events and its rollouts, on one page.

The page, out/report.html, is a file to open, keep or send: nothing else belongs to it. It shows

    the run         what was run, how it ended, and its evaluations
    the curves      of metrics.jsonl, each with a read-out
    the timeline    of events.jsonl: deaths, restarts, pool sizes, waits, pushes, evaluations
    the rollouts    that the run kept (keep_rollouts_every): what was observed and what was
                    sampled, each token coloured by how far student and teacher are apart on it, or
                    by its advantage, log-prob, bonus or weight version
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chz
from rich.console import Console

from cluster.command import run_command
from cluster.inspect.report.data import report_data
from cluster.inspect.report.page import report_page
from cluster.inspect.report.run_files import read_run
from cluster.inspect.report.timeline import timeline
from distill.errors import ConfigError


@chz.chz
class ReportConfig:
    """Writes the report of a run, finished or not."""

    out: str = chz.field(doc="the run's directory")
    html: str | None = chz.field(default=None, doc="the page; out/report.html without it")
    groups: int = chz.field(
        default=20, doc="kept groups that are shown, spread evenly over the run"
    )

    @chz.validate
    def _in_range(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"groups={self.groups} must be at least 1")


def report(config: ReportConfig, console: Console) -> None:
    """Reads the run and writes the page."""
    out = Path(config.out)
    run = read_run(out)
    data: dict[str, Any] = {**report_data(run, config.groups), "timeline": timeline(run)}
    page = Path(config.html) if config.html else out / "report.html"
    try:
        page.write_text(report_page(data), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"html={page} cannot be written: {error}") from error
    shown = len(data["groups"])
    kept = f"{shown} of {data['kept']} kept groups" if data["kept"] else "no kept rollouts"
    console.print(f"the report of {out} is in {page}: {kept}", highlight=False, markup=False)
    if data["note"]:
        console.print(data["note"], highlight=False, markup=False)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(ReportConfig, report, argv)
