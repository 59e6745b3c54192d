"""Seconds by stage, and the trace of a block: its contents, and failures."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from learner import trace
from learner.trace import Stages, traced
from tests.full_disk import files_of_at_most

Event = Mapping[str, Any]


class Clock:
    """`perf_counter` with a given time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(trace.time, "perf_counter", lambda: self.now)


def multiply() -> None:
    torch.ones(64, 64, requires_grad=True).mm(torch.ones(64, 64)).sum().backward()


def events(path: Path) -> list[Event]:
    """Events with a duration."""
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def named(found: list[Event], name: str) -> list[Event]:
    return [event for event in found if event["name"] == name]


def within(inner: Event, outer: Event) -> bool:
    return (
        inner["tid"] == outer["tid"]
        and outer["ts"] <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    )


def test_seconds_add_up_by_label(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stages = Clock(monkeypatch), Stages()
    for seconds in (2.0, 3.0):
        with stages("learn"):
            clock.now += 1.0
            with stages("forward"):
                clock.now += seconds
            with stages("backward"):
                clock.now += 2 * seconds
    assert stages.seconds == {"learn": 17.0, "forward": 5.0, "backward": 10.0}
    assert stages.take() == {"time/learn": 17.0, "time/forward": 5.0, "time/backward": 10.0}
    assert stages.take() == {}


def test_only_a_gpu_is_waited_for_and_within_the_span(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = Clock(monkeypatch), []

    def synchronize(device: torch.device) -> None:
        waited.append(device)
        clock.now += 5.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with (on_cpu := Stages("cpu"))("forward"):
        pass
    with (on_gpu := Stages("cuda:1"))("forward"):
        clock.now += 1.0
    assert waited == [torch.device("cuda:1")]
    assert on_cpu.seconds == {"forward": 0.0} and on_gpu.seconds == {"forward": 6.0}


def test_the_trace_holds_the_stages_and_the_operators_in_them(tmp_path: Path) -> None:
    path, stages = tmp_path / "traces" / "step-3.json", Stages()
    with traced(path):
        with stages("wait"):
            time.sleep(0.02)
        with stages("learn"):
            for _ in range(2):
                with stages("forward"):
                    multiply()
            with stages("optimizer"):
                torch.zeros(10).add_(1)
    found = events(path)
    (wait,), (learn,), (optimizer,) = (named(found, n) for n in ("wait", "learn", "optimizer"))
    forwards = named(found, "forward")
    assert len(forwards) == 2 and all(within(inner, learn) for inner in (*forwards, optimizer))
    assert wait["ts"] + wait["dur"] <= learn["ts"]
    assert forwards[0]["ts"] + forwards[0]["dur"] <= forwards[1]["ts"]
    for forward in forwards:  # the product, and the one of its gradient
        assert len([op for op in named(found, "aten::mm") if within(op, forward)]) == 2
    assert any(within(op, optimizer) for op in named(found, "aten::add_"))
    # Microseconds there, seconds here: of the same spans, less what the profiler itself takes.
    for label in ("wait", "learn", "forward", "optimizer"):
        recorded = sum(event["dur"] for event in named(found, label)) / 1e6
        assert 0 < recorded <= stages.seconds[label]
    assert sum(event["dur"] for event in named(found, "wait")) / 1e6 >= 0.02
    assert [file.name for file in path.parent.iterdir()] == ["step-3.json"]


def test_a_second_trace_replaces_the_first_and_spans_end_with_it(tmp_path: Path) -> None:
    path, stages = tmp_path / "trace.json", Stages()
    for label in ("first", "second"):
        with traced(path), stages(label):
            multiply()
        with stages("between"):
            multiply()
    found = events(path)
    assert named(found, "second") and not named(found, "first") and not named(found, "between")


@pytest.mark.parametrize("where", ["file/trace.json", "trace.json"])
def test_a_trace_that_cannot_be_written_fails_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """The directory does not exist, or the disk is full."""
    (tmp_path / "file").write_text("")
    made = []
    with files_of_at_most(64), traced(tmp_path / where):
        multiply()
        made.append(where)
    assert made and str(tmp_path / where) in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
