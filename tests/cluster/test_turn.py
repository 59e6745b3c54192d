"""The warning of a reverse KL that falls and rises again: said once, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cluster.runtime.turn import KlTurn


def said(
    kl: Callable[[int], float],
    gradient: Callable[[int], float] = lambda _: 1.0,
    entropy: Callable[[int], float] = lambda _: 3.0,
    steps: int = 120,
) -> list[tuple[int, str]]:
    noise = np.random.default_rng(0).normal(1, 0.1, steps + 1)
    watch, words = KlTurn(), []
    for step in range(1, steps + 1):
        metrics = {
            "step": step,
            "opd/reverse_kl": kl(step) * noise[step],
            "train/grad_norm": gradient(step) * noise[-step],
            "train/entropy": entropy(step),
        }
        if (word := watch.see(metrics)) is not None:
            words.append((step, word))
    return words


def falls(step: int) -> float:
    return 0.2 + 2 * 0.93**step


def turns(step: int) -> float:
    return falls(step) + max(0, step - 60) * 0.03


@pytest.mark.parametrize(
    "beside",
    [
        {"gradient": lambda step: 1 + 0.2 * max(0, step - 60)},
        {"entropy": lambda step: 3 + 0.03 * max(0, step - 60)},
        {"entropy": lambda step: 3 - 0.03 * max(0, step - 60)},
    ],
    ids=["gradient", "entropy rises", "entropy falls"],
)
def test_a_turn_is_said_once(beside: dict) -> None:
    [(step, words)] = said(turns, **beside)
    assert 60 < step < 110
    assert f"step {step}: the reverse KL has risen to" in words and "a third of the lr" in words


def test_a_kl_that_never_fell_is_said_too() -> None:
    [(step, words)] = said(lambda step: 1 + step / 50)
    assert 30 < step < 90 and "from 1" in words


@pytest.mark.parametrize(
    ("kl", "beside"),
    [
        (falls, {}),
        (falls, {"gradient": lambda step: step}),  # longer answers, say
        (turns, {}),  # other problems, say: nothing else has changed
        (lambda step: 2.0, {"gradient": lambda step: step}),
    ],
    ids=["falls", "falls, gradients grow", "rises alone", "stands"],
)
def test_of_other_curves_nothing(kl: Callable[[int], float], beside: dict) -> None:
    assert said(kl, **beside) == []


def test_of_a_run_without_a_teacher_nothing() -> None:
    assert KlTurn().see({"step": 1, "reward/mean": 1.0}) is None
