"""Evaluations during training: when one begins, and how it ends."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollout.evaluator import Evaluation
from cluster.base.background import Background
from cluster.config.opd import OpdConfig
from cluster.placement.roles import EVALUATION
from cluster.recipes.evaluations import Evaluations, EvaluationSchedule
from cluster.runtime.driver import Driver, Signals
from distill.errors import DataError
from tests.refusals import refuses


def begun(schedule: EvaluationSchedule, steps: range) -> list[int]:
    """Steps whose weights are evaluated if each evaluation ends at once."""
    taken = []
    for step in steps:
        if schedule.wanted(step):
            schedule.began(step)
            schedule.done()
            taken.append(step)
    return taken


@pytest.mark.parametrize(
    ("back_at", "abandoned", "again"),
    [(8, None, []), (5, None, []), (4, 5, [5, 8]), (3, 5, [4, 8])],
    ids=["after it", "at it", "its weights are lost", "its due step too"],
)
def test_a_rewind_drops_evaluations_of_later_weights(
    back_at: int, abandoned: int | None, again: list[int]
) -> None:
    schedule = EvaluationSchedule(4, 20)
    assert schedule.wanted(4)  # no engine is up; then there is
    assert schedule.wanted(5)
    schedule.began(5)
    assert schedule.rewound(back_at) == abandoned
    if abandoned is None:
        assert schedule.running == 5
    else:
        assert begun(schedule, range(back_at + 1, 9)) == again


def test_a_recorded_evaluation_of_lost_weights_is_repeated() -> None:
    schedule = EvaluationSchedule(4, 20)
    assert schedule.wanted(4)
    schedule.began(4)
    schedule.lost()
    assert begun(schedule, range(5, 6)) == [5]
    assert schedule.rewound(4) is None
    assert begun(schedule, range(5, 9)) == [5, 8]


class House:
    """Evaluations of every fifth step, in two calls each, on two engines."""

    def __init__(self, opd: Callable[..., OpdConfig]) -> None:
        self.serving = {"evaluation engine 0": "a", "evaluation engine 1": "b"}
        self.asked: list[list[str]] = []  # engines of each call
        self.answers: list[asyncio.Event] = []
        self.error: Exception | None = None
        self.events: list[tuple[str, int]] = []
        self.recorded: list[int] = []
        supervisor: Any = SimpleNamespace(
            background=Background(),
            serving=lambda role: self.serving if role == EVALUATION else {},
            hang_after_s=60,
        )  # fmt: skip
        self.driver = Driver(supervisor=supervisor, signals=Signals(), deadline_s=60)
        fleet: Any = SimpleNamespace(
            driver=self.driver, supervisor=supervisor, pool=lambda *_, **__: None,
            admission=SimpleNamespace(
                push_to_evaluators=lambda: (7, dict(self.serving)), admit_waiting=lambda: None
            ),
            evaluator_calls=SimpleNamespace(ask=self._ask),
        )  # fmt: skip
        context: Any = SimpleNamespace(
            directory=SimpleNamespace(
                append_event=lambda event, step=0, **_: self.events.append((event, step)),
                store=SimpleNamespace(release=lambda: None),
            ),
            progress=SimpleNamespace(note=lambda _line: None), summary={},
            record_late=lambda _metrics, step: self.recorded.append(step),
        )  # fmt: skip
        config = opd(eval_every=5, eval_engines=2, steps=20)
        self.evaluations = Evaluations(config, context, fleet)

    async def _ask(self, _what: str, make: Callable[[Any], Any]) -> Any:
        evaluator: Any = SimpleNamespace(
            evaluate=SimpleNamespace(remote=lambda engines, *_: (engines, None)),
            reverse_kl=SimpleNamespace(remote=lambda engines, *_, **__: (engines, {})),
        )
        engines, metrics = make(evaluator)
        self.asked.append(sorted(engines.each()))
        self.answers.append(asyncio.Event())
        await self.answers[-1].wait()
        if self.error is not None:
            raise self.error
        return Evaluation({}, []) if metrics is None else metrics

    def start(self) -> None:
        self.evaluations.after_step(5)
        self.driver.pause(0.05)

    def answer(self) -> None:
        self.answers[-1].set()
        self.driver.pause(0.05)


@pytest.fixture
def house(opd: Callable[..., OpdConfig]) -> Iterator[House]:
    made = House(opd)
    yield made
    made.driver.background.close()


BOTH = ["evaluation engine 0", "evaluation engine 1"]


def test_an_evaluation_makes_its_calls_in_sequence_and_is_recorded(house: House) -> None:
    house.start()
    house.evaluations.collect()
    house.answer()
    house.evaluations.collect()
    assert house.asked == [BOTH, BOTH] and not house.recorded
    house.answer()
    house.serving.clear()  # it has ended and needs no engines
    house.evaluations.collect()
    house.evaluations.collect()
    assert house.recorded == [5]


def test_an_evaluation_continues_on_the_engines_left_and_is_lost_with_the_last(
    house: House,
) -> None:
    house.start()
    house.serving["evaluation engine 0"] = "restarted, with other weights"
    house.answer()
    assert house.asked[1] == BOTH[1:]
    del house.serving["evaluation engine 1"]
    house.evaluations.collect()
    assert house.events[-1] == ("evaluation lost", 5) and not house.recorded
    house.evaluations.after_step(6)
    assert house.events[-1] == ("evaluation begins", 6)


@pytest.mark.parametrize("engines_are_left", [True, False])
def test_an_error_is_raised_unless_its_engines_are_gone(
    house: House, engines_are_left: bool
) -> None:
    house.start()
    house.error = DataError("in the reward of problem 3")
    house.answer()
    if not engines_are_left:  # their loss may be the cause
        house.serving.clear()
        house.evaluations.collect()
        assert house.events[-1] == ("evaluation lost", 5)
        return
    with refuses(DataError, None, names="problem 3"):
        house.evaluations.collect()


def test_after_an_evaluation_was_given_up_the_next_one_runs(house: House) -> None:
    house.start()
    house.evaluations.abandon("the run ends")
    house.answer()
    house.evaluations.collect()
    assert len(house.asked) == 1 and house.events[-1] == ("evaluation given up", 5)
    house.evaluations.after_step(10)
    house.driver.pause(0.05)
    house.answer()
    house.answer()
    house.evaluations.finish()
    assert house.recorded == [10]
