"""Evaluations beside training: when one begins, and what becomes of it. Without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.runtime.admission import Pinned
from cluster.runtime.background_evaluation import BackgroundEvaluation, EvaluationSchedule
from cluster.runtime.driver import Driver, Signals
from distill.errors import DataError
from tests.refusals import refuses


def begun(schedule: EvaluationSchedule, steps: range) -> list[int]:
    """Steps whose weights are evaluated where each evaluation is over at once."""
    taken = []
    for step in steps:
        if schedule.wanted(step):
            schedule.began(step)
            schedule.done()
            taken.append(step)
    return taken


def test_each_due_step_but_the_last_is_evaluated() -> None:
    assert begun(EvaluationSchedule(3, 9), range(1, 10)) == [3, 6]
    assert begun(EvaluationSchedule(0, 9), range(1, 10)) == []


def test_one_that_was_lost_begins_again_with_later_weights() -> None:
    schedule = EvaluationSchedule(4, 20)
    assert schedule.wanted(4)
    schedule.began(4)
    assert not schedule.wanted(5) and schedule.running == 4
    schedule.lost()
    assert schedule.wanted(6) and schedule.running is None
    assert schedule.wanted(7), "it was not begun: no engine was up"
    schedule.began(7)
    schedule.done()
    assert begun(schedule, range(8, 11)) == [8]


@pytest.mark.parametrize(
    ("back_at", "given_up", "again"),
    [(8, None, []), (5, None, []), (4, 5, [5, 8]), (3, 5, [4, 8])],
    ids=["after it", "at it", "its weights are lost", "its due step too"],
)
def test_a_learner_that_goes_back_takes_later_evaluations_with_it(
    back_at: int, given_up: int | None, again: list[int]
) -> None:
    schedule = EvaluationSchedule(4, 20)
    assert schedule.wanted(4)  # no engine is up; then there is
    assert schedule.wanted(5)
    schedule.began(5)
    assert schedule.rewound(back_at) == given_up
    if given_up is None:
        assert schedule.running == 5
    else:
        assert begun(schedule, range(back_at + 1, 9)) == again


def test_what_was_recorded_of_lost_weights_is_evaluated_again() -> None:
    schedule = EvaluationSchedule(4, 20)
    assert schedule.wanted(4)
    schedule.began(4)
    schedule.lost()
    assert begun(schedule, range(5, 6)) == [5]
    assert schedule.rewound(4) is None
    assert begun(schedule, range(5, 9)) == [5, 8]


class House:
    """A background evaluation of two calls, its engines, and what it asked."""

    def __init__(self) -> None:
        self.serving = {"evaluation engine 0": "a", "evaluation engine 1": "b"}
        self.asked: list[str] = []
        self.answers = {name: asyncio.Event() for name in ("first", "second")}
        self.error: Exception | None = None
        idle: Any = SimpleNamespace(tick=lambda: None)
        self.driver = Driver(supervisor=idle, signals=Signals(), deadline_s=60)
        self.background: BackgroundEvaluation[list[Any]] = BackgroundEvaluation(
            self.driver, lambda: self.serving
        )

    def start(self) -> None:
        self.background.begin(Pinned(7, dict(self.serving)), self._evaluation())
        self.driver.pause(0.05)

    def answer(self, name: str) -> None:
        self.answers[name].set()
        self.driver.pause(0.05)

    async def _evaluation(self) -> list[Any]:
        return [await self._call(name) for name in ("first", "second")]

    async def _call(self, name: str) -> str:
        self.asked.append(f"{name} of {sorted(self.background.engines)}")
        await self.answers[name].wait()
        if self.error is not None:
            raise self.error
        return name


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.driver.close()


def test_calls_follow_one_another_and_end_with_a_value(house: House) -> None:
    house.start()
    assert not house.background.is_over
    house.answer("first")
    assert not house.background.is_over
    both = "['evaluation engine 0', 'evaluation engine 1']"
    assert house.asked == [f"first of {both}", f"second of {both}"]
    house.answer("second")
    assert house.background.is_over
    house.serving.clear()  # it is over: nobody needs them
    assert house.background.collect() == ["first", "second"]


def test_it_goes_on_with_the_engines_that_are_left_and_is_lost_with_the_last(house: House) -> None:
    house.start()
    house.serving["evaluation engine 0"] = "restarted, with other weights"
    house.answer("first")
    assert house.asked[1] == "second of ['evaluation engine 1']"
    del house.serving["evaluation engine 1"]
    assert house.background.is_over
    assert house.background.collect() is None


@pytest.mark.parametrize("engines_are_left", [True, False])
def test_an_error_is_raised_where_its_value_is_asked_for(
    house: House, engines_are_left: bool
) -> None:
    house.start()
    house.error = DataError("in the reward of problem 3")
    house.answer("first")
    assert house.background.is_over
    if not engines_are_left:  # they may be its cause
        house.serving.clear()
        assert house.background.collect() is None
        return
    with refuses(DataError, None, names="problem 3"):
        house.background.collect()


def test_one_that_is_given_up_leaves_nothing_behind(house: House) -> None:
    house.start()
    house.background.give_up()
    house.answer("first")
    house.answer("second")
    assert len(house.asked) == 1
    house.start()
    assert house.background.collect() == ["first", "second"] and len(house.asked) == 3
