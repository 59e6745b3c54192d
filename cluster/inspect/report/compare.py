"""Two runs side by side: each chart with the lines of both, and the settings in which they differ.

Facts, timeline and rollouts of the page stay the first run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.inspect.report.data import charts, evaluations, report_data, settings
from cluster.inspect.report.run_files import Run

# Differ in any two runs, and say nothing.
_PASSED_OVER = ("out",)


def compared_data(run: Run, other: Run, groups: int) -> dict[str, Any]:
    """What `report_data` returns of a run, with another's curves and evaluations beside its own."""
    names = run_names(run.out, other.out)
    data = report_data(run, groups)
    return data | {
        "title": f"{run.recipe} {names[0]} against {names[1]}",
        "charts": _charts(names, (run, other)),
        "evaluations": _evaluations(names, (run, other)),
        "against": {"names": names, "differ": differing(run, other)},
    }


def run_names(one: Path, other: Path) -> tuple[str, str]:
    """Names of two directories, as short as tells them apart."""
    ours, theirs = one.resolve().parts, other.resolve().parts
    for length in range(1, min(len(ours), len(theirs))):
        if ours[-length:] != theirs[-length:]:
            return "/".join(ours[-length:]), "/".join(theirs[-length:])
    return str(one.resolve()), str(other.resolve())


def differing(run: Run, other: Run) -> list[tuple[str, str | None, str | None]]:
    """The settings, and versions, that are not the same in both; None: it is not set."""
    ours, theirs = ({"recipe": each.recipe} | dict(settings(each)) for each in (run, other))
    return [
        (name, ours.get(name), theirs.get(name))
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name) and name not in _PASSED_OVER
    ]


def _charts(names: Sequence[str], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The charts of both, by title; each line has the name of its run, and its number (0, 1)."""
    by_title: dict[str, list[dict[str, Any]]] = {}
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        for chart in charts(run):
            lines = [
                {**line, "label": f"{name}: {line['label']}", "run": number}
                for line in chart["lines"]
            ]
            by_title.setdefault(chart["title"], []).extend(lines)
    return [{"title": title, "lines": lines} for title, lines in by_title.items()]


def _evaluations(names: Sequence[str], runs: Sequence[Run]) -> dict[str, Any] | None:
    """The tables of both in one; a column is named by its run."""
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
