"""An evaluation during training: pinned engines hold its weights, and no step waits for it.

It is lost if every pinned engine is gone, and repeated with later weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from cluster.runtime.admission import Pinned
from cluster.runtime.driver import Driver, forget

Value = TypeVar("Value")


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
        serving: returns the evaluation engines that serve now, by name.
    """

    def __init__(self, driver: Driver, serving: Callable[[], Mapping[str, Any]]) -> None:
        self._driver, self._serving = driver, serving
        self._pinned = Pinned(-1, {})
        self._task: asyncio.Task[Value] | None = None

    def begin(self, pinned: Pinned, evaluation: Coroutine[Any, Any, Value]) -> None:
        """Begin an evaluation of the weights that the pinned engines hold."""
        assert self._task is None
        self._pinned, self._task = pinned, self._driver.beside(evaluation)

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
    def is_over(self) -> bool:
        """True if the evaluation has ended, or its engines are gone."""
        assert self._task is not None
        return self._task.done() or not self.engines

    def wait(self) -> None:
        """Wait a short while for the evaluation's end, polling."""
        assert self._task is not None
        self._driver.waited_for(self._task)

    def collect(self) -> Value | None:
        """End the evaluation; returns its value, or None if it was lost, or raises its error."""
        assert self._task is not None and self.is_over
        task, self._task = self._task, None
        forget(task)
        failed = not task.done() or task.exception() is not None
        return None if failed and not self.engines else task.result()

    def give_up(self) -> None:
        """Discard the evaluation, in any state."""
        if self._task is not None:
            forget(self._task)
        self._task = None
