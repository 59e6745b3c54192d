"""`make opd-vs-rl`: the reading of its curves, and a short race with real runs."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from cluster.config.on_policy import RlConfig
from distill.rules import get
from distill.settings import fields_of
from examples.opd_vs_rl import race
from examples.opd_vs_rl.__main__ import main
from examples.opd_vs_rl.config import OpdVsRlConfig
from examples.opd_vs_rl.curves import Curve, ResultRow, ranked, ratio_of
from examples.opd_vs_rl.race import OPD, RL, Race

TARGET = 0.9


def curve(*accuracy: float, seed: int = 0, lr: float = 1e-3) -> Curve:
    """A run that was evaluated after every second step."""
    steps = tuple(range(0, 2 * len(accuracy), 2))
    return Curve(
        length=16, method="GRPO", lr=lr, seed=seed, steps=steps, accuracy=accuracy,
        seconds=tuple(0.5 * step for step in steps), tokens=tuple(100 * step for step in steps),
    )  # fmt: skip


def row(*steps_by_seed: float, method: str = "OPD", length: int = 16, cap: int = 60) -> ResultRow:
    return ResultRow(
        length=length, method=method, lr=1e-3, steps_by_seed=steps_by_seed,
        seconds_by_seed=tuple(2 * steps for steps in steps_by_seed), cap=cap, last_accuracy=0.97,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        ((0.1, 0.9, 0.9, 0.9), 2),  # three evaluations at the target
        ((0.1, 0.95, 0.95, 0.89, 0.95, 0.95, 0.95, 0.1), 8),  # a dip restarts the count
        ((0.1, 0.2, 0.95, 0.95), math.inf),  # only two evaluations
        ((0.95, 0.95, 0.95), 0),  # before any training
        ((), math.inf),
    ],
)
def test_a_target_counts_if_three_evaluations_hold_it(
    accuracy: Sequence[float], expected: float
) -> None:
    made = curve(*accuracy)
    assert (made.steps_to(TARGET), made.seconds_to(TARGET)) == (expected, expected / 2)


def test_curves_are_ranked_by_steps_and_then_by_accuracy() -> None:
    soon, late = curve(0.1, 0.9, 0.9, 0.9), curve(0.1, 0.8, 0.99, 0.99, 0.99)
    low, high = curve(0.8, 0.8, 0.8, 0.5, 0.5, 0.6), curve(0.1, 0.1, 0.1, 0.6, 0.6, 0.5)
    assert ranked([low, late, high, soon], TARGET) == [soon, late, high, low]


@pytest.mark.parametrize(
    ("opd", "rl", "shown", "verdict"),
    [
        (row(5, 6, 7), row(42, 40, 50), "7.0", "as claimed"),
        (row(6), row(41), "6.8", "less than claimed"),
        (row(5), row(math.inf, math.inf, 40), "> 12.0", "as claimed"),
        (row(20), row(math.inf), "> 3.0", "not known: the runs were given up"),
    ],
)
def test_a_ratio_with_runs_that_never_arrived_is_a_lower_bound(
    opd: ResultRow, rl: ResultRow, shown: str, verdict: str
) -> None:
    ratio = ratio_of(opd, rl)
    assert ratio is not None
    assert (str(ratio), ratio.verdict) == (shown, verdict)


def test_methods_differ_only_in_the_compared_settings(tmp_path: Path) -> None:
    race = Race(OpdVsRlConfig(out="o", temperature=0.6), tmp_path, Console())
    configs = [
        race.run_config(length, method, lr, seed, steps=24)
        for length in (4, 16)
        for method in (OPD, *RL)
        for lr in (1e-3, 5e-4)
        for seed in (0, 1)
    ]
    assert len({config.out for config in configs}) == len(configs)
    own = {"out", "learner.lr", "seed", "env", "eval.every", "eval.size", "sampling.max_new_tokens"}
    first, *others = [
        {
            name: get(config, name)
            for name in fields_of(RlConfig)
            if name not in own and not name.startswith("objective.")
        }
        for config in configs
    ]
    assert first["sampling.temperature"] == 0.6
    assert all(other == first for other in others)


@pytest.mark.slow
def test_a_race_runs_every_method_draws_its_curves_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(race, "FIRST_RATES", (1e-3,))
    arguments = [f"out={tmp_path}", "lengths=4", "sft_steps=2", "steps=6", "seeds=1"]
    assert main(arguments) == 0
    report = json.loads((tmp_path / "opd_vs_rl.json").read_text())
    assert [row["method"] for row in report["rows"]] == ["OPD", "GRPO, share of links"]
    for each in report["curves"]:
        assert each["steps"][:2] == [0, 2]
        assert each["tokens"][0] == 0 < each["tokens"][1] <= each["steps"][1] * 64 * 4
        assert all(0 <= share <= 1 for share in each["accuracy"])
    assert (tmp_path / "opd_vs_rl.png").read_bytes()[:4] == b"\x89PNG"
    runs = {path: path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")}
    assert len(runs) == 2
    capsys.readouterr()

    assert main(arguments) == 0
    assert {path: path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")} == runs
    assert json.loads((tmp_path / "opd_vs_rl.json").read_text()) == report
    assert "4 tokens, OPD, lr 0.001, seed 0" in capsys.readouterr().out
