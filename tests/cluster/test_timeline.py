"""The timeline of a run: its marks are the events, and its lines the metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.inspect.report.command import main as report
from cluster.inspect.report.run_files import read_run
from cluster.inspect.report.timeline import timeline
from distill.errors import DataError
from tests.refusals import refuses
from tests.rows import write_rows

START = 1_790_000_000.0
EVENTS = [
    {"t": 0, "event": "size", "pool": "policy", "ready": 0, "starting": 1, "draining": 0},
    {"t": 0, "event": "size", "pool": "rollout", "ready": 2, "starting": 0, "draining": 0},
    {"t": 1, "event": "nodes", "alive": 1},
    {"t": 20, "event": "size", "pool": "policy", "ready": 1, "starting": 0, "draining": 0},
    {"t": 45, "event": "evaluation", "who": "before", "seconds": 15.2},
    {"t": 60, "event": "step", "step": 1, "staleness": 0.0, "tokens_per_s": 100.0},
    {"t": 60, "event": "window", "learner_wait": 0.5, "credit_starved": 0.0, "queue_depth": 0,
     "sampling": 2.5, "environment": 1.0, "scoring": 0.0},
    {"t": 61, "event": "scale", "pool": "policy", "from": 1, "to": 2, "reason": "short"},
    {"t": 70, "event": "nodes", "alive": 2},
    {"t": 100, "event": "death", "who": "rollout-1", "why": "killed"},
    {"t": 112, "event": "restart", "who": "rollout-1", "seconds": 12.4},
    {"t": 118, "event": "step", "step": 2, "staleness": 1.0, "tokens_per_s": 200.0},
    {"t": 120, "event": "window", "learner_wait": 0.1, "credit_starved": 0.4, "queue_depth": 3,
     "sampling": 0.5, "environment": 3.0, "scoring": 0.0},
    {"t": 150, "event": "rewind", "step": 1},
    {"t": 180, "event": "step", "step": 2},
]  # fmt: skip
METRICS = [
    {"step": 0, "eval/accuracy": 0.5, "time/eval": 15.0},
    {"step": 1, "time/step": 50.0, "time/wait": 25.0, "tokens_per_s": 101.0, "push/seconds": 2.0},
    {"step": 2, "time/step": 40.0, "time/wait": 2.0, "tokens_per_s": 222.0, "push/seconds": 4.0},
]


def drawn(
    out: Path, events: Sequence[Any] = (), metrics: Sequence[Any] = ()
) -> Mapping[str, dict[str, Any]]:
    """The timeline of a run with these events and metrics."""
    out.mkdir(exist_ok=True)
    late = [{**event, "t": START + event["t"]} for event in events]
    for name, rows in (("events.jsonl", late), ("metrics.jsonl", metrics)):
        if rows:
            write_rows(out / name, *rows)
    found = timeline(read_run(out))
    assert found is not None
    return found


def marks(found: Mapping[str, Any]) -> dict[str, list[tuple[float, float, str, str]]]:
    return {
        lane["title"]: [(m["t"], m["seconds"], m["text"], m["why"]) for m in lane["marks"]]
        for lane in found["lanes"]
    }


def lines(found: Mapping[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line["label"]: (line["at"], line["values"])
        for chart in found["charts"]
        for line in chart["lines"]
    }


def test_each_event_has_a_mark(tmp_path: Path) -> None:
    assert marks(drawn(tmp_path, EVENTS, METRICS)) == {
        "deaths": [(100, 0, "rollout-1", "killed")],
        "restarts": [(112, 12.4, "rollout-1 (12 s)", "")],
        "rewinds": [(150, 0, "to step 1", "")],
        "scaling": [(61, 0, "policy 1 \N{RIGHTWARDS ARROW} 2", "short")],
        "evaluations": [(45, 15.2, "before (15 s)", "")],
        # The repeated step has the metrics of its last time.
        "weight pushes": [(60, 2, "step 1 (2 s)", ""), (180, 4, "step 2 (4 s)", "")],
    }


def test_the_lines_hold_the_numbers(tmp_path: Path) -> None:
    found = drawn(tmp_path, EVENTS, METRICS)
    assert found["seconds"] == 180
    assert lines(found) == {
        "policy": ([0, 20, 180], [0, 1, 1]),  # continued to the end
        "policy and starting": ([0, 20, 180], [1, 1, 1]),
        "rollout": ([0, 180], [2, 2]),
        "nodes alive": ([1, 70, 180], [1, 2, 2]),
        "learner waits for groups": ([60, 120], [0.5, 0.1]),  # of windows, not of metrics
        "workers lack credit": ([60, 120], [0.0, 0.4]),
        "at the policy": ([60, 120], [2.5, 0.5]),
        "in environments": ([60, 120], [1, 3]),
        "at teachers": ([60, 120], [0, 0]),
        "finished": ([60, 120], [0, 3]),
        "in all": ([60, 120], [3.5, 6.5]),
        # An event's own value is preferred to that of the metrics.
        "trained": ([60, 118, 180], [100, 200, 222]),
    }


def test_pools_are_empty_between_two_attempts(tmp_path: Path) -> None:
    size = {"event": "size", "pool": "policy", "starting": 0, "draining": 0}
    events = [
        {"t": 0, "event": "begin", "step": 0},
        {"t": 10, **size, "ready": 2},
        {"t": 30, "event": "step", "step": 1, "tokens_per_s": 5.0},
        {"t": 31, "event": "end", "status": "interrupted"},
        {"t": 131, "event": "begin", "step": 1},
        {"t": 140, **size, "ready": 1},
        {"t": 150, "event": "step", "step": 2, "tokens_per_s": 5.0},
    ]
    found = drawn(tmp_path, events)
    assert marks(found)["not running"] == [(131, 100, "resumed at step 1 (100 s)", "")]
    assert lines(found)["policy"] == ([10, 31, 140, 150], [2, 0, 1, 1])


def test_time_continues_after_a_clock_was_set_back(tmp_path: Path) -> None:
    """As on another host, where the run continues."""
    events = [
        {"t": 0, "event": "begin", "step": 0},
        {"t": 30, "event": "step", "step": 1, "tokens_per_s": 5.0},
        {"t": -3600, "event": "death", "who": "rollout-1", "why": "killed"},
        {"t": -3590, "event": "step", "step": 2, "tokens_per_s": 6.0},
    ]
    found = drawn(tmp_path, events)
    assert found["seconds"] == 40
    assert marks(found)["deaths"] == [(30, 0, "rollout-1", "killed")]
    assert lines(found)["trained"] == ([30, 40], [5.0, 6.0])


def test_without_events_steps_are_drawn_in_sequence(tmp_path: Path) -> None:
    found = drawn(tmp_path, metrics=METRICS)
    assert lines(found) == {
        "learner waits for groups": ([0, 40], [0.5, 0.05]),
        "trained": ([0, 40], [101, 222]),
    }
    assert [mark[0] for mark in marks(found)["weight pushes"]] == [0, 40]


def test_the_timeline_is_in_the_report(tmp_path: Path) -> None:
    drawn(tmp_path / "run", EVENTS, METRICS)
    (tmp_path / "run/events.jsonl").open("a").write('{"t": 179')  # a line under way
    assert report([f"out={tmp_path / 'run'}"]) == 0
    assert "weight pushes" in (tmp_path / "run/report.html").read_text()


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"t": 1,\n{"t": 2, "event": "nodes", "alive": 1}\n')
    with refuses(DataError, None, names="events.jsonl:1"):
        read_run(tmp_path)
