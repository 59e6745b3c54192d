"""A run over time: what happened when, its pools, and where its time and its groups were.

    lanes     marks: stops, deaths, restarts, rewinds, findings, changes of size, evaluations,
              weight pushes
    charts    members of each pool and nodes alive; shares of time that the learner waited for
              groups and that workers had no credit; groups by where they were; tokens a second

It is read from events.jsonl. A kind of event that the run did not write is left out. Without steps
among the events, the steps of metrics.jsonl stand one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.inspect.report.data import line
from cluster.inspect.report.run_files import RunFiles

Row = Mapping[str, Any]

# Kinds of events that are marks, by lane, from the top.
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
# What a window of some seconds measured: field and label.
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
    """Lanes and charts over the seconds since the run's first event; None without anything."""
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
    """The events with times that never go back.

    Where a clock was set back, or that of the next host is behind, they go on from the last one.
    """
    shift, last = 0.0, -math.inf
    for event in events:
        shift = max(shift, last - event["t"])
        last = event["t"] + shift
        yield {**event, "t": last}


def _with_stops(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows, of which each beginning but the first says how long nothing ran, since when every
    pool had no members."""
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
    """The events and the pushes; steps with what their metrics say besides, or made of metrics."""
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
        # Of a step that was done again after a rewind, the metrics are the last one's.
        for event in reversed(events):
            row = by_step.pop(event.get("step", -1), {}) if event["event"] == "step" else {}
            filled.append({**_fields(row), **event})
        filled.reverse()
    # The push is the last thing that a step does.
    pushes = [
        {"t": row["t"], "event": "push", "who": f"step {row['step']}", "seconds": row["push"]}
        for row in filled
        if "push" in row
    ]
    return [*filled, *pushes]


def _fields(row: Row) -> dict[str, Any]:
    """A row of metrics in the words of a `step` event."""
    found = {name: row[name] for name in ("step", "tokens_per_s") if name in row}
    if "time/wait" in row and row.get("time/step"):
        found["learner_wait"] = row["time/wait"] / row["time/step"]
    if "push/overlapped" in row:  # else what the step waited for is the push
        found["push"] = row["time/push"]
    elif "push/seconds" in row:
        found["push"] = row["push/seconds"]
    return found


def _mark(row: Row) -> dict[str, Any]:
    """End, duration (0 if unknown) and text of a mark."""
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
    # Without windows, each step's own metrics say how long the learner waited.
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
    """Sizes of each pool, and with those that are starting; the last size holds to the end."""
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
