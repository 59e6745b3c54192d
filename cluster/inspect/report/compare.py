"""Comparison of two runs: each chart has the lines of both, and differing settings are listed.

Facts, timeline and rollouts of the page are those of the first run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.inspect.report.data import charts, evaluations, report_data, settings
from cluster.inspect.report.run_files import RunFiles

# Settings that differ between any two runs.
_PASSED_OVER = ("out",)


def compared_data(run: RunFiles, other: RunFiles, groups: int) -> dict[str, Any]:
    """Data of `report_data` for a run, with the curves and evaluations of another run added."""
    names = run_names(run.out, other.out)
    data = report_data(run, groups)
    return data | {
        "title": f"{run.record.recipe} {names[0]} against {names[1]}",
        "charts": _charts(names, (run, other)),
        "evaluations": _evaluations(names, (run, other)),
        "against": {"names": names, "differ": differing(run, other)},
    }


def run_names(one: Path, other: Path) -> tuple[str, str]:
    """Shortest names that distinguish two directories."""
    ours, theirs = one.resolve().parts, other.resolve().parts
    for length in range(1, min(len(ours), len(theirs))):
        if ours[-length:] != theirs[-length:]:
            return "/".join(ours[-length:]), "/".join(theirs[-length:])
    return str(one.resolve()), str(other.resolve())


def differing(run: RunFiles, other: RunFiles) -> list[tuple[str, str | None, str | None]]:
    """Settings and versions that differ between the runs, with both values; None: not set."""
    ours, theirs = ({"recipe": each.record.recipe} | dict(settings(each)) for each in (run, other))
    return [
        (name, ours.get(name), theirs.get(name))
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name) and name not in _PASSED_OVER
    ]


def _charts(names: Sequence[str], runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Combine the charts of both runs by title. Each line has its run's name and number (0, 1)."""
    by_title: dict[str, dict[str, Any]] = {}
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        for chart in charts(run):
            lines = [
                {**line, "label": f"{name}: {line['label']}", "run": number}
                for line in chart["lines"]
            ]
            by_title.setdefault(chart["title"], {**chart, "lines": []})["lines"] += lines
    return list(by_title.values())


def _evaluations(names: Sequence[str], runs: Sequence[RunFiles]) -> dict[str, Any] | None:
    """Combine the evaluation tables of both runs; column names begin with the run's name."""
    columns: list[str] = []
    cells: dict[str, dict[str, Any]] = {}
    for name, run in zip(names, runs, strict=True):
        table: Mapping[str, Any] = evaluations(run) or {"columns": [], "rows": []}
        own = [f"{name}: {column}" for column in table["columns"]]
        for metric, *row in table["rows"]:
            cells.setdefault(metric, {}).update(zip(own, row, strict=True))
        columns += own
    rows = [[metric, *(row.get(column) for column in columns)] for metric, row in cells.items()]
    return {"columns": columns, "rows": rows} if rows else None
