"""What `make opd-vs-rl` says of its curves, and that it draws them; its runs are not started."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import chz
import pytest
from rich.console import Console

from cluster.config.demos import OpdVsRlConfig
from cluster.config.on_policy import RolloutConfig
from cluster.demos.curves import Curve, Row, ranked, row_of, steps_to_target, table_of, verdict
from cluster.demos.demo import Data
from cluster.demos.opd_vs_rl import CONTENDERS, STARTS, Race, Start, count_runs, measure
from cluster.demos.plots import Line, Panel, check_plots, draw_accuracy
from cluster.opd_vs_rl import main
from distill.errors import ConfigError

TARGET = 0.9


def curve(*accuracy: float, seed: int = 0, lr: float = 1e-3) -> Curve:
    """A run that was evaluated after every second step."""
    return Curve(
        start="easy",
        contender="GRPO",
        settings={"lr": lr, "scale_by_std": True},
        seed=seed,
        steps=tuple(range(0, 2 * len(accuracy), 2)),
        accuracy=accuracy,
        informative_groups=0.5,
    )


def row(*steps_by_seed: float, contender: str = "OPD, full", budget: int = 60) -> Row:
    return Row(
        start="hard",
        contender=contender,
        settings={"lr": 1e-3},
        steps_by_seed=steps_by_seed,
        budget=budget,
        last_accuracy=0.97,
    )


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        ((0.1, 0.9, 0.9, 0.9), 2),  # at the target is reached, and the last three count
        ((0.1, 0.95, 0.95, 0.89, 0.95, 0.95, 0.95, 0.1), 8),  # a dip starts the count again
        ((0.1, 0.2, 0.95, 0.95), math.inf),  # too late to be held
        ((0.95, 0.95, 0.95), 0),  # before any training
        ((), math.inf),
    ],
)
def test_a_target_is_reached_once_it_is_held(accuracy: Sequence[float], expected: float) -> None:
    steps = range(0, 2 * len(accuracy), 2)
    assert steps_to_target(steps, accuracy, TARGET) == expected


def test_how_long_a_target_is_held_is_a_choice() -> None:
    assert steps_to_target((0, 1, 2), (0.1, 0.95, 0.1), TARGET, hold=1) == 1


def test_the_best_need_the_fewest_steps_and_of_those_that_never_arrive_the_higher() -> None:
    soon, late = curve(0.1, 0.9, 0.9, 0.9), curve(0.1, 0.8, 0.99, 0.99, 0.99)
    low, high = curve(0.8, 0.8, 0.8, 0.5, 0.5, 0.6), curve(0.1, 0.1, 0.1, 0.6, 0.6, 0.5)
    assert ranked([low, late, high, soon], TARGET) == [soon, late, high, low]


def test_a_row_has_every_seed_and_their_median() -> None:
    curves = [
        curve(0.1, 0.9, 0.9, 0.9),
        curve(0.1, 0.2, 0.3, 0.4, seed=1),
        curve(0.95, 0.95, 0.95, 0.8, seed=2),
    ]
    made = row_of(curves, TARGET)
    assert (made.steps_by_seed, made.median, made.budget) == ((2, math.inf, 0), 2, 6)
    assert made.last_accuracy == pytest.approx((0.9 + 0.4 + 0.8) / 3)


def test_the_table_shows_what_was_not_reached_as_more_than_the_budget() -> None:
    rows = [row_of([curve(0.1, 0.2), curve(0.1, 0.2, seed=1)], TARGET), row(7, 9, 8)]
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table_of(rows, "steps"))
    [grpo, opd] = [line for line in capture.get().splitlines() if "lr 0.001" in line]
    assert [cell.strip() for cell in grpo.split("│")[1:-1]] == [
        "easy", "GRPO", "lr 0.001, A / std", "> 2, > 2", "> 2", "20.0% after 2",
    ]  # fmt: skip
    assert [cell.strip() for cell in opd.split("│")[3:6]] == ["lr 0.001", "7, 9, 8", "8"]


@pytest.mark.parametrize(
    ("opd", "grpo", "says"),
    [
        ((5, 6, 7), (42, 40, 50), "42 against 6 steps, 7.0 times as many; a seventh is reached"),
        ((6,), (41,), "41 against 6 steps, 6.8 times as many; a seventh is NOT reached"),
        ((8,), (math.inf,), "more than 60 against 8 steps, over 7.5 times as many; a seventh is r"),
        ((20,), (math.inf,), "over 3.0 times as many; whether a seventh is reached, only a longer"),
        ((math.inf, 9, math.inf), (20,), "not at the target after 60 steps; a seventh is NOT"),
        ((0,), (20,), "before any training; nothing to compare"),
    ],
)
def test_the_verdict_says_whether_a_seventh_was_reached(
    opd: tuple[float, ...], grpo: tuple[float, ...], says: str
) -> None:
    said = verdict(row(*opd), row(*grpo, contender="GRPO"))
    assert said.startswith("hard start, GRPO against OPD, full: ")
    assert says in said


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.name)
def test_contenders_share_all_but_what_is_compared(start: Start, tmp_path: Path) -> None:
    data = Data(prompts=tmp_path / "p", held_out=tmp_path / "h", books={})
    race = Race(OpdVsRlConfig(out="o", temperature=0.6), tmp_path, data, Console())
    configs = [
        race.run_config(start, contender, settings, steps=24, seed=5)
        for contender in CONTENDERS
        for settings in contender.grid
    ]
    assert len({config.out for config in configs}) == len(configs)
    assert {config.recipe for config in configs} == {"opd", "rl"}
    own = {"out", "lr"}
    first, *others = [
        {name: getattr(config, name) for name in chz.chz_fields(RolloutConfig) if name not in own}
        for config in configs
    ]
    assert first["temperature"] == 0.6
    assert all(other == first for other in others)


def test_every_budget_ends_with_an_evaluation_in_step_with_the_others() -> None:
    for start in STARTS:
        for steps in (start.opd_steps, start.sweep_steps, start.rl_steps):
            assert steps % start.eval_every == 0


def test_runs_are_counted_over_both_starts() -> None:
    assert len(STARTS) == 2
    assert count_runs(3, seeds=2) == (3 + 2) + (2 + 2)


def test_too_few_steps_to_hold_a_target_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=5 must be at least 12"):
        measure(OpdVsRlConfig(out="o", steps=5), Console())
    with pytest.raises(ConfigError, match="seeds=0"):
        OpdVsRlConfig(out="o", seeds=0)


def test_a_directory_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main([f"out={tmp_path}"]) == 2
    assert "no opd_vs_rl made it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_curves_are_drawn_into_a_png(tmp_path: Path) -> None:
    line = Line(steps=(0, 2, 4), accuracy_by_seed=[(0.1, 0.5, 0.9), (0.2, 0.6, 1.0)])
    panel = Panel(title="easy", target=0.9, lines={"OPD": line})
    longer = replace(panel, lines={"OPD": line, "GRPO": replace(line, steps=(0, 100, 200))})
    draw_accuracy(tmp_path / "one.png", [panel])
    draw_accuracy(tmp_path / "two.png", [panel, longer])
    one, two = (tmp_path / "one.png").read_bytes(), (tmp_path / "two.png").read_bytes()
    assert one[:8] == two[:8] == b"\x89PNG\r\n\x1a\n"
    width_one, width_two = (int.from_bytes(png[16:20], "big") for png in (one, two))
    assert width_two == pytest.approx(2 * width_one, abs=2)


def test_without_matplotlib_nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'isotherm\[plots\]'"):
        check_plots()
    assert main([f"out={tmp_path / 'new'}"]) == 2
    assert not (tmp_path / "new").exists()
