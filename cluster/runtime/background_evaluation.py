"""An evaluation beside training: pinned engines hold its weights, and no step waits for it.

begin -> calls of the evaluator, one after another -> its value
             |                   |
             |                   a call fails as it does in `EvaluatorCalls`: an error
             every pinned engine is gone: lost, to begin again with later weights
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
    """Steps whose weights are evaluated. With evaluations beside training, one at a time.

    Args:
        every: steps between two.
        steps: of the run; the last one's evaluation is another.
    """

    def __init__(self, every: int, steps: int) -> None:
        self._every, self._steps = every, steps
        self._owed: int | None = None  # a due step whose evaluation has not begun, or was lost
        self._newest = (0, 0)  # the due step, and the one whose weights were taken
        self.running: int | None = None

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0 and step < self._steps

    def wanted(self, step: int) -> bool:
        """After a step: its own evaluation is due, or one that was lost begins again."""
        if self.due(step):
            self._owed = step
        return self._owed is not None and step < self._steps

    def began(self, step: int) -> None:
        assert self.running is None and self._owed is not None
        self.running, self._newest, self._owed = step, (self._owed, step), None

    def done(self) -> None:
        self.running = None

    def lost(self) -> None:
        """The running one begins again, with the weights of a later step."""
        self.running, self._owed = None, self._newest[0]

    def rewound(self, step: int) -> int | None:
        """The learner is back at `step`. Returns the running one, if its weights are lost."""
        given_up = None
        due, taken = self._newest
        if taken > step:
            given_up, self.running = self.running, None
            self._owed, self._newest = due, (0, 0)
        if self._owed is not None and self._owed > step:
            self._owed = None  # it will be reached again
        return given_up


class BackgroundEvaluation(Generic[Value]):
    """The evaluation that is under way, if any.

    Args:
        begin: begins a call of the evaluator.
        serving: the engines for evaluations that serve now, by name.
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
        """Begins one with the weights that some engines hold."""
        assert self._questions is None
        self._pinned, self._questions = pinned, questions
        self._value = self._error = None
        self._go_on(None)

    @property
    def engines(self) -> dict[str, Any]:
        """Those that hold its weights; one that was restarted does not."""
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
        """Goes on as far as it can without waiting. Raises nothing: see `collect`."""
        if self._call is None or self.fate is not Fate.RUNNING:
            return
        try:
            if (answer := self._call.poll()) is not PENDING:
                self._go_on(answer)
        except Exception as error:  # of the evaluation: raised where somebody asks for its value
            self._error = error

    def _go_on(self, answer: Any) -> None:
        assert self._questions is not None
        try:
            self._call = self._begin(self._questions.send(answer))
        except StopIteration as end:
            self._call, self._value = None, end.value

    def collect(self) -> Value | None:
        """Ends it. Its value; None if it was lost; raises the error by which it failed."""
        fate, value, error = self.fate, self._value, self._error
        self.give_up()
        if error is not None:
            raise error
        return value if fate is Fate.DONE else None

    def give_up(self) -> None:
        """Forgets it, whatever became of it."""
        self._questions = self._call = self._error = None
