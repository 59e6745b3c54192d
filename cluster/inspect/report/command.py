"""`python -m cluster.report out=DIR`: a run's curves, its events and its rollouts, on one page.

The page, out/report.html, is a single file to open, keep or send. With serve=8080 the page is
served on this machine's loopback address instead, and follows a running run. It shows

    the run         settings, status, findings, evaluations, and the responses in them
    the curves      of metrics.jsonl, each with a read-out
    the timeline    of events.jsonl: deaths, restarts, pool sizes, waits, pushes, evaluations
    the comparison  against=DIR: another run's curves and evaluations next to this run's, and the
                    settings in which the two differ
    the rollouts    that the run kept (keep=): observed and sampled tokens, coloured by the gap of
                    student and teacher, or by advantage, log-prob, bonus or weight version
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import chz
from rich.console import Console

from cluster.command import run_command
from cluster.config.early_checks import READ, WRITTEN
from cluster.config.job_upload import refuse_upload
from cluster.inspect.report.compare import compared_data
from cluster.inspect.report.data import report_data
from cluster.inspect.report.page import report_page
from cluster.inspect.report.run_files import read_run, require_directory
from cluster.inspect.report.timeline import timeline
from distill.errors import ConfigError
from distill.rules import at_least, at_most, not_with, setting


@chz.chz
class ReportConfig:
    """Write or serve the report of a run, finished or not."""

    out: str = chz.field(doc="directory of the run", metadata=READ)
    against: str | None = chz.field(
        default=None,
        doc="directory of another run to compare with: shows its curves and evaluations next to "
        "this run's, and the settings that differ",
        metadata=READ,
    )
    html: str | None = setting(
        not_with("serve", why="a served page is not written to a file"),
        default=None,
        doc="HTML file to write; default: out/report.html",
        metadata=WRITTEN,
    )
    serve: int | None = setting(
        at_least(0),
        at_most(65535),
        default=None,
        doc="port on the loopback address at which to serve the live page; 0: any free port",
    )
    groups: int = setting(
        at_least(1),
        default=20,
        doc="number of kept groups to show, spread evenly over the run",
    )

    @chz.validate
    def _runs_differ(self) -> None:
        if self.against is not None and Path(self.against).resolve() == Path(self.out).resolve():
            raise ConfigError(f"against={self.against} is the same run as out=; give another run")


def report(config: ReportConfig, console: Console) -> None:
    """Read the run, and write or serve the page."""
    out = Path(config.out)
    if config.serve is not None:
        _serve(config, config.serve, console)
        return
    page = Path(config.html) if config.html else out / "report.html"
    refuse_upload("html", page)
    data = _data(config)
    try:
        page.write_text(report_page(data), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"html={page} cannot be written: {error}") from error
    shown = len(data["groups"])
    kept = f"{shown} of {data['kept']} kept groups" if data["kept"] else "no kept rollouts"
    console.print(f"wrote the report of {out} to {page}: {kept}", highlight=False)
    if data["note"]:
        console.print(data["note"], highlight=False)


def _data(config: ReportConfig) -> dict[str, Any]:
    run = read_run(Path(config.out))
    if config.against is None:
        data = report_data(run, config.groups)
    else:
        data = compared_data(run, read_run(Path(config.against), "against"), config.groups)
    return {**data, "timeline": timeline(run)}


def _serve(config: ReportConfig, port: int, console: Console) -> None:
    """Serve the page until Ctrl-C."""
    from cluster.inspect.report.serve import HOST, LiveReport  # aiohttp: not for --help

    def started(port: int) -> None:
        console.print(
            f"serving the report of {config.out} at http://{HOST}:{port}; press Ctrl-C to stop",
            highlight=False,
        )

    named = {"out": config.out, "against": config.against}
    directories = {name: Path(each) for name, each in named.items() if each is not None}
    for name, directory in directories.items():
        require_directory(directory, name)
    live = LiveReport(list(directories.values()), lambda: _data(config))
    with suppress(KeyboardInterrupt):
        asyncio.run(live.serve(port, started))


main = partial(run_command, ReportConfig, report)
