"""An evaluation during training: pinned engines hold its weights, and no step waits for it.

begin -> calls of the evaluator, one after another -> its value
             |                   |
             |                   a call fails as it does in `EvaluatorCalls`: an error
             every pinned engine is gone: lost, and repeated with later weights
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeVar

from cluster.runtime.admission import Pinned
from cluster.runtime.evaluator_calls import PENDING, Ask

Value = TypeVar("Value")
# An evaluation: yields calls of the evaluator, is sent their values, and returns its own.
Questions = Generator[Ask, Any, Value]


class Fate(Enum):
    """Outcome of an evaluation."""

    RUNNING = auto()
    DONE = auto()
    LOST = auto()
    FAILED = auto()


class _Pending(Protocol):
    def poll(self) -> Any: ...


class EvaluationSchedule:
    """Schedule of the steps whose weights are evaluated. One evaluation runs at a time.

    Args:
        every: steps between two evaluations.
        steps: steps of the run; the evaluation after the last one is not scheduled here.
    """

    def __init__(self, every: int, steps: int) -> None:
        self._every, self._steps = every, steps
        self._owed: int | None = None  # a due step whose evaluation has not begun, or was lost
        self._newest = (0, 0)  # the due step, and the one whose weights were taken
        self.running: int | None = None

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0 and step < self._steps

    def wanted(self, step: int) -> bool:
        """True if an evaluation should begin after `step`: its own, or one that was lost."""
        if self.due(step):
            self._owed = step
        return self._owed is not None and step < self._steps

    def began(self, step: int) -> None:
        assert self.running is None and self._owed is not None
        self.running, self._newest, self._owed = step, (self._owed, step), None

    def done(self) -> None:
        self.running = None

    def lost(self) -> None:
        """Schedule the running evaluation again, with the weights of a later step."""
        self.running, self._owed = None, self._newest[0]

    def rewound(self, step: int) -> int | None:
        """Go back to `step`. Returns the step of the running evaluation if its weights are lost."""
        given_up = None
        due, taken = self._newest
        if taken > step:
            given_up, self.running = self.running, None
            self._owed, self._newest = due, (0, 0)
        if self._owed is not None and self._owed > step:
            self._owed = None  # it will be reached again
        return given_up


class BackgroundEvaluation(Generic[Value]):
    """The evaluation in progress, if any.

    Args:
        begin: begins a call of the evaluator.
        serving: returns the evaluation engines that serve now, by name.
    """

    def __init__(
        self, begin: Callable[[Ask], _Pending], serving: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._begin, self._serving = begin, serving
        self._pinned = Pinned(-1, {})
        self._questions: Questions[Value] | None = None
        self._call: _Pending | None = None
        self._value: Value | None = None
        self._error: Exception | None = None

    def begin(self, pinned: Pinned, questions: Questions[Value]) -> None:
        """Begin an evaluation of the weights that the pinned engines hold."""
        assert self._questions is None
        self._pinned, self._questions = pinned, questions
        self._value = self._error = None
        self._go_on(None)

    @property
    def engines(self) -> dict[str, Any]:
        """Engines that still hold the evaluation's weights; a restarted engine does not."""
        serving = self._serving()
        return {
            name: handle
            for name, handle in self._pinned.engines.items()
            if serving.get(name) == handle
        }

    @property
    def fate(self) -> Fate:
        if self._error is not None:
            return Fate.FAILED
        if self._call is None:
            return Fate.DONE
        return Fate.RUNNING if self.engines else Fate.LOST

    def poll(self) -> None:
        """Continue the evaluation without blocking. Its errors are raised by `collect`."""
        if self._call is None or self.fate is not Fate.RUNNING:
            return
        try:
            if (answer := self._call.poll()) is not PENDING:
                self._go_on(answer)
        except Exception as error:  # of the evaluation: raised by `collect`
            self._error = error

    def _go_on(self, answer: Any) -> None:
        assert self._questions is not None
        try:
            self._call = self._begin(self._questions.send(answer))
        except StopIteration as end:
            self._call, self._value = None, end.value

    def collect(self) -> Value | None:
        """End the evaluation; returns its value, or None if it was lost, or raises its error."""
        fate, value, error = self.fate, self._value, self._error
        self.give_up()
        if error is not None:
            raise error
        return value if fate is Fate.DONE else None

    def give_up(self) -> None:
        """Discard the evaluation, in any state."""
        self._questions = self._call = self._error = None
