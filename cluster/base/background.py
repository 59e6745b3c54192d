"""Coroutines that advance while the driver waits, on a separate event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


class Background:
    """Runs coroutines while the driver waits, and raises errors of coroutines without an owner."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._unawaited: set[asyncio.Task[None]] = set()

    def create_task(
        self, coroutine: Coroutine[Any, Any, Value] | asyncio.Task[Value]
    ) -> asyncio.Task[Value]:
        """Begin a coroutine. The caller reads the task's value or error, or calls `forget`."""
        return asyncio.ensure_future(coroutine, loop=self._loop)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a coroutine without an owner: `check` raises its error."""
        self._unawaited.add(task := self.create_task(coroutine))
        return task

    def check(self) -> None:
        """Raise the error of a coroutine of `start` that has failed."""
        for task in [task for task in self._unawaited if task.done()]:
            self._unawaited.remove(task)
            if not task.cancelled():
                task.result()

    def advance(self, task: asyncio.Task[Any], seconds: float) -> bool:
        """Run all coroutines until the task ends, for at most `seconds`; True if it has ended."""
        self._loop.run_until_complete(asyncio.wait([task], timeout=seconds))
        return task.done()

    def forget(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task and ignore its error."""
        self._unawaited.discard(task)
        forget(task)

    def close(self) -> None:
        """Cancel all coroutines."""
        for task in list(self._unawaited):
            self.forget(task)
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()


def forget(task: asyncio.Task[Any]) -> None:
    """End a task whose value or error nobody asks for; asyncio would report the error."""
    task.cancel()
    if task.done() and not task.cancelled():
        task.exception()
