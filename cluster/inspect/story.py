"""`python -m cluster.story out=DIR`: a run on one picture, from its metrics.jsonl and events.jsonl.

    what happened     deaths, restarts, rewinds and changes of size, as marks with labels
    members           of each pool (filled: those that are starting), and nodes alive
    share of time     that the learner waited for groups, and that workers had no credit
    groups            where they were: at the policy, in their environments, at teachers, finished
    tokens/s          trained tokens per second

A kind of event that the run did not write is left out. Without events the picture is of the
metrics alone, their steps one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
from rich.console import Console

from cluster.command import run_command
from cluster.inspect.plots import COLOURS, figure_class
from cluster.jsonl_log import read_lines
from distill.errors import ConfigError, DataError

BLUE, GREEN, VERMILION, PURPLE, ORANGE, SKY = COLOURS
_POOL_COLOURS = {"policy": BLUE, "teacher": GREEN, "rollout": VERMILION}
_OTHER_POOLS = (PURPLE, ORANGE, SKY)
# Lanes of marks from the top: kind, title, marker, colour. The shape tells them apart as well.
_LANES = (
    ("death", "deaths", "X", VERMILION),
    ("restart", "restarts", "^", GREEN),
    ("rewind", "rewinds", "<", PURPLE),
    ("scale", "scaling", "D", BLUE),
)
# Of windows: field, label, colour. Shares of time first, then groups by where they are.
_SHARES = (
    ("learner_wait", "learner waits for groups", VERMILION),
    ("credit_starved", "workers lack credit", BLUE),
)
_GROUPS = (
    ("sampling", "at the policy", BLUE),
    ("environment", "in environments", VERMILION),
    ("scoring", "at teachers", GREEN),
    ("queue_depth", "finished", "0.8"),
)
_WINDOW = [name for name, *_ in (*_SHARES, *_GROUPS)]
_SIZE = (12.0, 8.5)
# About the width of a letter of a label, as a share of the picture's.
_LETTER = 0.0043
# The longest that is likely to come behind a label that stands for several marks.
_MORE = ", +99"


@chz.chz
class StoryConfig:
    """Draws the story of a run, finished or not."""

    out: str = chz.field(doc="the run's directory")
    picture: str | None = chz.field(default=None, doc="the PNG; out/story.png without it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """`values[i]` from `times[i]` on; seconds since the story began."""

    times: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Event at one moment, in seconds since the story began."""

    time: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Data of the picture. Series and kinds of marks that the run lacks are absent.

    ready, starting: members, by pool.
    windows: by the name of their field: see `_WINDOW`.
    tokens_per_s: of each step, from its end on.
    marks: by their kind: death, restart, rewind, scale.
    """

    seconds: float
    ready: Mapping[str, Series]
    starting: Mapping[str, Series]
    nodes: Series | None
    windows: Mapping[str, Series]
    tokens_per_s: Series | None
    marks: Mapping[str, Sequence[Mark]]


def read_story(out: Path) -> Story:
    """The story of the run in `out`.

    Raises:
        ConfigError: there is no such directory.
        DataError: it has no events and no metrics, or a line of them cannot be read.
    """
    if not out.is_dir():
        raise ConfigError(f"out={out} is not a directory; give a run's directory")
    events = read_lines(out / "events.jsonl", {"t", "event"})
    metrics = read_lines(out / "metrics.jsonl", {"step"})
    if not events and not metrics:
        raise DataError(
            f"out={out} holds neither events.jsonl nor metrics.jsonl with anything in it; give the "
            "directory of a run that has made a step"
        )
    events = sorted(_with_metrics(events, metrics), key=lambda event: event["t"])
    start = events[0]["t"]
    events = [{**event, "t": event["t"] - start} for event in events]
    of_kind = {
        kind: list(found)
        for kind, found in itertools.groupby(
            sorted(events, key=lambda event: event["event"]), key=lambda event: event["event"]
        )
    }
    sizes = {
        pool: [event for event in of_kind.get("size", []) if event["pool"] == pool]
        for pool in dict.fromkeys(event["pool"] for event in of_kind.get("size", []))
    }
    # Without windows, each step's own metrics say how long the learner waited.
    windows = of_kind.get("window", of_kind.get("step", []))
    return Story(
        seconds=events[-1]["t"],
        ready={pool: s for pool, found in sizes.items() if (s := _series(found, "ready"))},
        starting={pool: s for pool, found in sizes.items() if (s := _series(found, "starting"))},
        nodes=_series(of_kind.get("nodes", []), "alive"),
        windows={name: s for name in _WINDOW if (s := _series(windows, name))},
        tokens_per_s=_series(of_kind.get("step", []), "tokens_per_s"),
        marks={
            kind: [Mark(time=event["t"], label=_label(event)) for event in of_kind[kind]]
            for kind, *_ in _LANES
            if kind in of_kind
        },
    )


def _with_metrics(
    events: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The events; steps with what their metrics say besides, or made of metrics alone."""
    if not any(event["event"] == "step" for event in events):
        now = events[0]["t"] if events else 0.0
        ends = itertools.accumulate((row.get("time/step", 1.0) for row in metrics), initial=now)
        made = [
            {"t": end, "event": "step", **_fields(row)}
            for row, end in zip(metrics, list(ends)[1:], strict=True)
        ]
        return [*events, *made]
    by_step = {int(row["step"]): row for row in metrics}
    filled = []
    # Of a step that was done again after a rewind, the metrics are the last one's.
    for event in reversed(events):
        row = by_step.pop(event.get("step", -1), {}) if event["event"] == "step" else {}
        filled.append(_fields(row) | event)
    return filled[::-1]


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics in the words of a `step` event."""
    found = {name: row[name] for name in ("step", "tokens_per_s") if name in row}
    if "time/wait" in row and row.get("time/step"):
        found["learner_wait"] = row["time/wait"] / row["time/step"]
    return found


def _series(events: Iterable[Mapping[str, Any]], name: str) -> Series | None:
    points = [(event["t"], event[name]) for event in events if event.get(name) is not None]
    if not points:
        return None
    times, values = zip(*points, strict=True)
    return Series(times=times, values=values)


def _label(event: Mapping[str, Any]) -> str:
    match event["event"]:
        case "death":
            return str(event.get("who", ""))
        case "restart":
            seconds = event.get("seconds")
            return str(event.get("who", "")) + ("" if seconds is None else f" ({seconds:.0f} s)")
        case "rewind":
            return f"to step {event.get('step', '?')}"
        case _:
            was, now = event.get("from", "?"), event.get("to", "?")
            return f"{event.get('pool', '')} {was} \N{RIGHTWARDS ARROW} {now}"


def draw_story(story: Story) -> Any:
    """The picture, as a matplotlib Figure. Panels of which the story has nothing are left out.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    lanes = [lane for lane in _LANES if lane[0] in story.marks]
    panels = [
        (0.6 * len(lanes), lambda axis: _draw_marks(axis, story, lanes), bool(lanes)),
        (2.2, lambda axis: _draw_members(axis, story), bool(story.ready or story.nodes)),
        (1.6, lambda axis: _draw_shares(axis, story), _has(story, _SHARES)),
        (1.6, lambda axis: _draw_groups(axis, story), _has(story, _GROUPS)),
        (1.4, lambda axis: _draw_tokens(axis, story), bool(story.tokens_per_s)),
    ]
    panels = [(height, draw) for height, draw, wanted in panels if wanted]
    if not panels:
        raise DataError("nothing in events.jsonl and metrics.jsonl can be drawn")
    figure = figure_class()(figsize=_SIZE, layout="constrained")
    axes = figure.subplots(
        len(panels),
        1,
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [height for height, _ in panels]},
    )[:, 0]
    for axis, (_, draw) in zip(axes, panels, strict=True):
        draw(axis)
        axis.spines[["top", "right"]].set_visible(False)
        for mark in [*story.marks.get("death", ()), *story.marks.get("rewind", ())]:
            axis.axvline(mark.time / _unit(story)[0], color="0.8", lw=0.7, zorder=0)
    _label_time(axes[-1], story)
    figure.align_ylabels(axes)
    return figure


def _has(story: Story, fields: Iterable[tuple[str, str, str]]) -> bool:
    return any(name in story.windows for name, *_ in fields)


def _unit(story: Story) -> tuple[float, str]:
    """Seconds in the unit of the time axis, and its name."""
    if story.seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if story.seconds < 3 * 3600 else (3600.0, "hours")


def _label_time(axis: Any, story: Story) -> None:
    seconds, name = _unit(story)
    axis.set_xlim(0, max(story.seconds, 1.0) / seconds)
    axis.set_xlabel(f"{name} since the run began")


def _draw_marks(axis: Any, story: Story, lanes: Sequence[tuple[str, str, str, str]]) -> None:
    seconds, _ = _unit(story)
    span = max(story.seconds, 1.0)
    for i, (kind, _, marker, colour) in enumerate(lanes):
        marks = story.marks[kind]
        at = [mark.time / seconds for mark in marks]
        axis.plot(at, [i] * len(at), marker, color=colour, ms=6, ls="", label=kind, clip_on=False)
        for time, text in _placed(marks, span):
            # Towards the middle where there is no room to the right.
            left = time + len(text) * _LETTER * span > span
            axis.annotate(
                text,
                (time / seconds, i),
                xytext=(4 if left else -4, -6),
                textcoords="offset points",
                ha="right" if left else "left",
                va="top",
                fontsize=7,
            )
    axis.set_yticks(range(len(lanes)), [title for _, title, *_ in lanes])
    axis.set_ylim(len(lanes) - 0.2, -0.6)
    axis.tick_params(left=False)
    axis.spines["left"].set_visible(False)


def _placed(marks: Sequence[Mark], span: float) -> list[tuple[float, str]]:
    """(time, label) of marks so far apart that their labels do not touch.

    A mark that comes too soon for a label of its own is counted on the one before: "learner, +2".
    """
    labels: list[tuple[Mark, int]] = []
    free_from, letter = -span, _LETTER * span
    for mark in marks:
        width = (len(mark.label) + 1) * letter
        at_edge = mark.time + width > span  # there it grows towards the left
        begin = mark.time - width - len(_MORE) * letter if at_edge else mark.time
        if begin < free_from:
            first, more = labels.pop()
            labels.append((first, more + 1))
            free_from += 0 if more else len(_MORE) * letter
        else:
            labels.append((mark, 0))
            free_from = begin + width + (len(_MORE) * letter if at_edge else 0)
    return [(mark.time, mark.label + (f", +{more}" if more else "")) for mark, more in labels]


def _draw_members(axis: Any, story: Story) -> None:
    others = iter(_OTHER_POOLS)
    for i, (pool, ready) in enumerate(story.ready.items()):
        colour = _POOL_COLOURS.get(pool) or next(others, "0.5")
        times, working = _held(ready, story)
        width = max(4.5 - 1.4 * i, 1.6)  # of equal sizes, the first still shows beneath the next
        axis.plot(times, working, drawstyle="steps-post", color=colour, lw=width, label=pool)
        if pool in story.starting:
            coming = [
                w + s for w, s in zip(working, _held(story.starting[pool], story)[1], strict=True)
            ]
            axis.fill_between(times, working, coming, step="post", color=colour, alpha=0.25, lw=0)
    if story.nodes:
        times, alive = _held(story.nodes, story)
        axis.plot(
            times,
            alive,
            drawstyle="steps-post",
            color="black",
            lw=1.2,
            ls="--",
            label="nodes alive",
        )
    axis.set_ylim(bottom=0)
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel("members")
    _finish(axis)


def _held(series: Series, story: Story) -> tuple[list[float], list[float]]:
    """The series in the axis's unit, its last value kept up to the story's end."""
    seconds, _ = _unit(story)
    times = [time / seconds for time in (*series.times, story.seconds)]
    return times, [*series.values, series.values[-1]]


def _draw_shares(axis: Any, story: Story) -> None:
    for name, label, colour in _SHARES:
        if series := story.windows.get(name):
            axis.plot(
                *_of_windows(series, story),
                color=colour,
                lw=1.5,
                label=label,
                drawstyle="steps-pre",
            )
    axis.set_ylim(0, 1.02)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_ylabel("share of time")
    _finish(axis)


def _draw_groups(axis: Any, story: Story) -> None:
    """Stacked, the finished ones on top."""
    below: list[float] | None = None
    for name, label, colour in _GROUPS:
        series = story.windows.get(name)
        if series is None or not any(series.values):
            continue
        times, values = _of_windows(series, story)
        below = below or [0.0] * len(times)
        top = [low + value for low, value in zip(below, values, strict=True)]
        axis.fill_between(times, below, top, step="pre", color=colour, lw=0, label=label)
        below = top
    axis.set_ylim(bottom=0)
    axis.set_ylabel("groups")
    _finish(axis)


def _draw_tokens(axis: Any, story: Story) -> None:
    assert story.tokens_per_s is not None
    seconds, _ = _unit(story)
    times = [time / seconds for time in story.tokens_per_s.times]
    axis.plot(times, story.tokens_per_s.values, ".-", color=ORANGE, lw=1, ms=4, label="tokens/s")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("trained tokens/s")


def _of_windows(series: Series, story: Story) -> tuple[list[float], list[float]]:
    """Times in the axis's unit, and values. A window's are known at its end, and hold before it."""
    seconds, _ = _unit(story)
    return [time / seconds for time in series.times], list(series.values)


def _finish(axis: Any) -> None:
    axis.grid(alpha=0.25)
    found = axis.get_legend_handles_labels()[0]
    if found:
        axis.legend(
            handles=found,
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=len(found),
            frameon=False,
            borderaxespad=0.2,
        )


def tell(config: StoryConfig, console: Console) -> None:
    """Reads, draws and writes the picture."""
    figure_class()  # what is missing is said before anything is read
    out = Path(config.out)
    figure = draw_story(read_story(out))
    picture = Path(config.picture) if config.picture else out / "story.png"
    try:
        figure.savefig(picture, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"picture={picture} cannot be written: {error}") from error
    console.print(f"the story of {out} is in {picture}", highlight=False)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(StoryConfig, tell, argv)
