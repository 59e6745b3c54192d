"""Evaluations beside training: when one begins, and what becomes of it. Without Ray."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from cluster.runtime.admission import Pinned
from cluster.runtime.background_evaluation import (
    BackgroundEvaluation,
    EvaluationSchedule,
    Fate,
    Questions,
)
from cluster.runtime.evaluator_calls import PENDING, Ask
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


class Call:
    """A call of an evaluator: what each poll of it finds."""

    def __init__(self, answers: Any) -> None:
        self._answers = deque(answers)

    def poll(self) -> Any:
        answer = self._answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer


class House:
    """A background evaluation of two calls, its engines, and what it asked."""

    def __init__(self, **answers: list[Any]) -> None:
        self.serving = {"evaluation engine 0": "a", "evaluation engine 1": "b"}
        self.asked: list[str] = []
        self._answers = answers
        self.background: BackgroundEvaluation[list[Any]] = BackgroundEvaluation(
            self._begin, lambda: self.serving
        )

    def _begin(self, ask: Ask) -> Call:
        self.asked.append(ask.make())
        return Call(self._answers[ask.what])

    def start(self) -> None:
        self.background.begin(Pinned(7, dict(self.serving)), self._questions())

    def _questions(self) -> Questions[list[Any]]:
        first = yield Ask("first", lambda: f"of {sorted(self.background.engines)}")
        second = yield Ask("second", lambda: f"of {sorted(self.background.engines)}, {first}")
        return [first, second]


def test_calls_follow_one_another_and_end_with_a_value() -> None:
    house = House(first=[PENDING, "x"], second=[PENDING, PENDING, "y"])
    house.start()
    fates = []
    for _ in range(5):
        fates.append(house.background.fate)
        house.background.poll()
    assert fates == [Fate.RUNNING] * 5 and house.background.fate is Fate.DONE
    both = "of ['evaluation engine 0', 'evaluation engine 1']"
    assert house.asked == [both, f"{both}, x"]
    house.serving.clear()  # it is over: nobody needs them
    house.background.poll()
    assert house.background.collect() == ["x", "y"]
    house.start()
    assert house.background.fate is Fate.LOST


def test_it_goes_on_with_the_engines_that_are_left_and_is_lost_with_the_last() -> None:
    house = House(first=["x"], second=[PENDING, "y"])
    house.start()
    house.serving["evaluation engine 0"] = "restarted, with other weights"
    house.background.poll()
    assert house.asked[1] == "of ['evaluation engine 1'], x"
    del house.serving["evaluation engine 1"]
    house.background.poll()
    assert house.background.fate is Fate.LOST
    assert house.background.collect() is None


def test_an_error_is_raised_where_its_value_is_asked_for() -> None:
    house = House(first=[DataError("in the reward of problem 3")])
    house.start()
    house.background.poll()
    house.background.poll()
    assert house.background.fate is Fate.FAILED
    with refuses(DataError, None, names="problem 3"):
        house.background.collect()


def test_one_that_is_given_up_leaves_nothing_behind() -> None:
    house = House(first=["x"], second=["y"])
    house.start()
    house.background.give_up()
    house.background.poll()
    house.start()
    house.background.poll()
    house.background.poll()
    assert house.background.collect() == ["x", "y"] and len(house.asked) == 3
