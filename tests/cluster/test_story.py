"""The story of a made-up run: what is read of it, and what the picture's lines hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cluster.inspect.story import Mark, Series, draw_story, main, read_story
from distill.errors import ConfigError, DataError

START = 1_790_000_000.0
EVENTS = [
    {"t": 0, "event": "size", "pool": "policy", "ready": 0, "starting": 1, "draining": 0},
    {"t": 0, "event": "size", "pool": "rollout", "ready": 2, "starting": 0, "draining": 0},
    {"t": 1, "event": "nodes", "alive": 1},
    {"t": 20, "event": "size", "pool": "policy", "ready": 1, "starting": 0, "draining": 0},
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
    {"step": 1, "time/step": 50.0, "time/wait": 25.0, "tokens_per_s": 101.0},
    {"step": 2, "time/step": 40.0, "time/wait": 2.0, "tokens_per_s": 222.0},
]


def write(out: Path, events: Sequence[Any] = (), metrics: Sequence[Any] = ()) -> Path:
    out.mkdir(exist_ok=True)
    late = [{**event, "t": START + event["t"]} for event in events]
    for name, rows in (("events.jsonl", late), ("metrics.jsonl", metrics)):
        if rows:
            (out / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def test_a_story_is_what_the_run_wrote(tmp_path: Path) -> None:
    story = read_story(write(tmp_path, EVENTS, METRICS))
    assert story.seconds == 180
    assert story.ready["policy"] == Series(times=(0, 20), values=(0, 1))
    assert story.starting["policy"] == Series(times=(0, 20), values=(1, 0))
    assert story.ready["rollout"] == Series(times=(0,), values=(2,))
    assert story.nodes == Series(times=(1, 70), values=(1, 2))
    assert story.windows["queue_depth"] == Series(times=(60, 120), values=(0, 3))
    assert story.windows["learner_wait"].values == (0.5, 0.1)  # of windows, not of metrics
    # What the last event leaves out its metrics say; what an event says, it has seen itself.
    assert story.tokens_per_s == Series(times=(60, 118, 180), values=(100, 200, 222))
    assert story.marks == {
        "death": [Mark(time=100, label="rollout-1")],
        "restart": [Mark(time=112, label="rollout-1 (12 s)")],
        "rewind": [Mark(time=150, label="to step 1")],
        "scale": [Mark(time=61, label="policy 1 \N{RIGHTWARDS ARROW} 2")],
    }


def drawn(out: Path) -> Mapping[str, tuple[list[float], list[float]]]:
    """(x, y) of every line in the picture that has a name."""
    lines = [line for axis in draw_story(read_story(out)).axes for line in axis.lines]
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in lines
        if not line.get_label().startswith("_")
    }


def test_the_lines_hold_the_numbers(tmp_path: Path) -> None:
    lines = drawn(write(tmp_path, EVENTS, METRICS))
    assert lines == {
        "policy": ([0, 20, 180], [0, 1, 1]),  # kept to the end
        "rollout": ([0, 180], [2, 2]),
        "nodes alive": ([1, 70, 180], [1, 2, 2]),
        "learner waits for groups": ([60, 120], [0.5, 0.1]),
        "workers lack credit": ([60, 120], [0.0, 0.4]),
        "tokens/s": ([60, 118, 180], [100, 200, 222]),
        "death": ([100], [0]),
        "restart": ([112], [1]),
        "rewind": ([150], [2]),
        "scale": ([61], [3]),
    }


def test_groups_are_stacked_by_where_they_are(tmp_path: Path) -> None:
    axes = draw_story(read_story(write(tmp_path, EVENTS, METRICS))).axes
    [axis] = [axis for axis in axes if axis.get_ylabel() == "groups"]
    tops = {area.get_label(): area.get_datalim(axis.transData).y1 for area in axis.collections}
    assert tops == {"at the policy": 2.5, "in environments": 3.5, "finished": 6.5}  # no teachers


@pytest.mark.parametrize("kind", ["size", "nodes", "death", "restart", "scale", "rewind", "window"])
def test_what_is_missing_is_left_out(tmp_path: Path, kind: str) -> None:
    names = {
        "size": {"policy", "rollout"},
        "nodes": {"nodes alive"},
        "window": {"workers lack credit"},  # steps say how long they waited
    }
    everything = set(drawn(write(tmp_path / "all", EVENTS, METRICS)))
    some = [event for event in EVENTS if event["event"] != kind]
    assert everything - set(drawn(write(tmp_path / "some", some, METRICS))) == names.get(
        kind, {kind}
    )


def test_metrics_alone_are_drawn_one_step_after_the_other(tmp_path: Path) -> None:
    assert drawn(write(tmp_path, metrics=METRICS)) == {
        "learner waits for groups": ([0, 40], [0.5, 0.05]),
        "tokens/s": ([0, 40], [101, 222]),
    }


def test_many_deaths_at_once_share_a_label(tmp_path: Path) -> None:
    deaths = [{"t": 10 + i / 100, "event": "death", "who": f"rollout-{i}"} for i in range(9)]
    later = [
        {"t": 500, "event": "death", "who": "learner"},
        {"t": 1000, "event": "nodes", "alive": 1},
    ]
    figure = draw_story(read_story(write(tmp_path, [{"t": 0, "event": "x"}, *deaths, *later])))
    assert [text.get_text() for text in figure.axes[0].texts] == ["rollout-0, +8", "learner"]


def test_labels_do_not_overlap_however_many_there_are(tmp_path: Path) -> None:
    deaths = [{"t": 7 * i, "event": "death", "who": f"policy-{i % 4}"} for i in range(200)]
    figure = draw_story(read_story(write(tmp_path, deaths)))
    figure.savefig(tmp_path / "story.png")
    boxes = sorted(
        (text.get_window_extent().x0, text.get_window_extent().x1) for text in figure.axes[0].texts
    )
    assert len(boxes) > 3
    assert all(end <= begin for (_, end), (begin, _) in pairwise(boxes))


def test_the_command_writes_a_png(tmp_path: Path) -> None:
    out = write(tmp_path / "run", EVENTS, METRICS)
    (out / "events.jsonl").open("a").write('{"t": 179')  # the run still goes on
    assert main([f"out={out}"]) == main([f"out={out}", f"picture={tmp_path / 'one.png'}"]) == 0
    pictures = [(out / "story.png").read_bytes(), (tmp_path / "one.png").read_bytes()]
    assert all(picture[:8] == b"\x89PNG\r\n\x1a\n" for picture in pictures)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda out: None, "is not a directory"),
        (lambda out: out.mkdir(), "holds neither events.jsonl nor metrics.jsonl"),
        (lambda out: write(out, [{"t": 0, "event": "other"}]), "nothing in events.jsonl"),
        (lambda out: write(out, metrics=[{"loss": 1}]), "metrics.jsonl:1 is no object with step"),
        (lambda out: write(out, metrics=[[1], METRICS[0]]), "metrics.jsonl:1 is no object"),
    ],
)
def test_a_directory_without_a_story_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: Any, said: str
) -> None:
    out = tmp_path / "run"
    made(out)
    assert main([f"out={out}"]) == 2
    assert said in capsys.readouterr().err
    assert not (out / "story.png").exists()


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"t": 1,\n{"t": 2, "event": "nodes", "alive": 1}\n')
    with pytest.raises(DataError, match=r"events.jsonl:1 is no JSON"):
        read_story(tmp_path)


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    out = write(tmp_path / "run", EVENTS)
    assert main([f"out={out}", f"picture={tmp_path / 'no/such/one.png'}"]) == 2


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    story = read_story(write(tmp_path, EVENTS))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'isotherm\[plots\]'"):
        draw_story(story)
