"""Timeline of a run: its events, its pools, and where its time and its groups were spent.

    lanes     marks: stops, deaths, restarts, rewinds, findings, changes of size, evaluations,
              weight pushes
    charts    members of each pool and nodes alive; shares of time in which the learner waited for
              groups and in which workers had no credit; groups by state; tokens per second

The data comes from events.jsonl. Kinds of events that the run did not write are omitted. If there
are no step events, the steps of metrics.jsonl are placed one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.inspect.report.data import line
from cluster.inspect.report.run_files import RunFiles

Row = Mapping[str, Any]

# Titles of lanes, from the top, by the kind of event that is marked in them.
_LANES = {
    "begin": "not running",
    "death": "deaths",
    "restart": "restarts",
    "rewind": "rewinds",
    "finding": "findings",
    "scale": "scaling",
    "evaluation": "evaluations",
    "push": "weight pushes",
}
# Labels of fields that are measured in windows of some seconds.
_SHARES = {
    "learner_wait": "learner waits for groups",
    "credit_starved": "workers lack credit",
}
_GROUPS = {
    "sampling": "at the policy",
    "environment": "in environments",
    "scoring": "at teachers",
    "queue_depth": "finished",
}


def timeline(run: RunFiles) -> dict[str, Any] | None:
    """Lanes and charts over the seconds since the run's first event; None if both are empty."""
    events = list(_in_order(run.events))
    rows = sorted(_with_metrics(events, run.steps), key=lambda row: row["t"])
    if not rows:
        return None
    start = rows[0]["t"]
    rows = [{**row, "t": row["t"] - start} for row in _with_stops(rows)]
    seconds = rows[-1]["t"]
    lanes = [
        {"title": title, "marks": [_mark(row) for row in rows if row["event"] == kind]}
        for kind, title in _LANES.items()
    ]
    found = {
        "seconds": seconds,
        "lanes": [lane for lane in lanes if lane["marks"]],
        "charts": list(_charts(rows, seconds)),
    }
    return found if found["lanes"] or found["charts"] else None


def _in_order(events: Sequence[Row]) -> Iterator[Row]:
    """Events with times that never decrease.

    If a clock was set back, or the clock of the next host is behind, later times continue from the
    last one.
    """
    shift, last = 0.0, -math.inf
    for event in events:
        shift = max(shift, last - event["t"])
        last = event["t"] + shift
        yield {**event, "t": last}


def _with_stops(rows: Sequence[Row]) -> Iterator[Row]:
    """Add stops to the rows: each beginning except the first has the seconds since the last event.

    At the start of a stop, the size of every pool is set to 0.
    """
    pools: dict[str, None] = {}
    last = None
    for row in rows:
        if row["event"] == "size":
            pools[row["pool"]] = None
        if row["event"] != "begin":
            yield row
        elif last is not None:
            for pool in pools:
                yield {"t": last, "event": "size", "pool": pool, "ready": 0, "starting": 0}
            yield {
                "who": f"resumed at step {row.get('step', '?')}",
                **row,
                "seconds": row["t"] - last,
            }
        last = row["t"]


def _with_metrics(events: Sequence[Row], metrics: Sequence[Row]) -> list[Row]:
    """Events, with metrics added to steps, and with pushes; steps are created if there are none."""
    if not any(event["event"] == "step" for event in events):
        now = events[0]["t"] if events else 0.0
        ends = itertools.accumulate((row.get("time/step", 1.0) for row in metrics), initial=now)
        steps = [
            {"t": end, "event": "step", **_fields(row)}
            for row, end in zip(metrics, list(ends)[1:], strict=True)
        ]
        filled = [*events, *steps]
    else:
        by_step = {int(row["step"]): row for row in metrics}
        filled = []
        # If a step was repeated after a rewind, its metrics belong to the last repetition.
        for event in reversed(events):
            row = by_step.pop(event.get("step", -1), {}) if event["event"] == "step" else {}
            filled.append({**_fields(row), **event})
        filled.reverse()
    # A step ends with its push.
    pushes = [
        {"t": row["t"], "event": "push", "who": f"step {row['step']}", "seconds": row["push"]}
        for row in filled
        if "push" in row
    ]
    return [*filled, *pushes]


def _fields(row: Row) -> dict[str, Any]:
    """Convert a row of metrics to the fields of a `step` event."""
    found = {name: row[name] for name in ("step", "tokens_per_s") if name in row}
    if "time/wait" in row and row.get("time/step"):
        found["learner_wait"] = row["time/wait"] / row["time/step"]
    if "push/overlapped" in row:  # otherwise the step waited for the whole push
        found["push"] = row["time/push"]
    elif "push/seconds" in row:
        found["push"] = row["push/seconds"]
    return found


def _mark(row: Row) -> dict[str, Any]:
    """Convert an event to a mark: time of its end, duration (0 if unknown), text and reason."""
    seconds = row.get("seconds")
    match row["event"]:
        case "scale":
            was, now = row.get("from", "?"), row.get("to", "?")
            text = f"{row.get('pool', '')} {was} \N{RIGHTWARDS ARROW} {now}"
        case "rewind":
            text = f"to step {row.get('step', '?')}"
        case "finding":
            text = f"step {row.get('step', '?')}: {row.get('name', '')}"
        case _:
            text = str(row.get("who", ""))
    if seconds is not None:
        text += f" ({seconds:.2g} s)" if seconds < 10 else f" ({seconds:.0f} s)"
    why = row.get("why") or row.get("reason") or row.get("text") or ""
    return {"t": row["t"], "seconds": seconds or 0, "text": text, "why": str(why)}


def _charts(rows: Sequence[Row], seconds: float) -> Iterator[dict[str, Any]]:
    windows = [row for row in rows if row["event"] == "window"]
    steps = [row for row in rows if row["event"] == "step"]
    groups = [{**row, "all": sum(row.get(name) or 0 for name in _GROUPS)} for row in windows]
    # Without windows, the learner's wait comes from the metrics of each step.
    for title, stairs, lines in (
        ("Members", "after", list(_members(rows, seconds))),
        ("Share of time", "before", _lines(windows or steps, _SHARES)),
        ("Groups", "before", _lines(groups, _GROUPS | {"all": "in all"})),
        ("Trained tokens/s", None, _lines(steps, {"tokens_per_s": "trained"})),
    ):
        if lines:
            yield {"title": title, "stairs": stairs, "lines": lines}


def _lines(rows: Sequence[Row], labels: Mapping[str, str]) -> list[dict[str, Any]]:
    found = (line(rows, name, label, along="t") for name, label in labels.items())
    return [each for each in found if each]


def _members(rows: Sequence[Row], seconds: float) -> Iterator[dict[str, Any]]:
    """Lines of each pool's size, without and with starting members, up to the end."""
    sizes = [row for row in rows if row["event"] == "size"]
    for pool in dict.fromkeys(row["pool"] for row in sizes):
        found = [
            {**row, "whole": row["ready"] + row["starting"]} for row in sizes if row["pool"] == pool
        ]
        labels = {"ready": pool}
        if any(row["starting"] for row in found):
            labels["whole"] = f"{pool} and starting"
        yield from _lines([*found, {**found[-1], "t": seconds}], labels)
    nodes = [row for row in rows if row["event"] == "nodes"]
    yield from _lines(
        [*nodes, *({**row, "t": seconds} for row in nodes[-1:])], {"alive": "nodes alive"}
    )
