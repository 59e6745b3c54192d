"""Coroutines that advance while the driver waits, on an event loop of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


class Background:
    """Runs coroutines while somebody waits, and raises the errors of those nobody awaits."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._unawaited: set[asyncio.Task[None]] = set()

    def beside(
        self, coroutine: Coroutine[Any, Any, Value] | asyncio.Task[Value]
    ) -> asyncio.Task[Value]:
        """Begin a coroutine. Whoever holds the task looks at its value or error, or forgets it."""
        return asyncio.ensure_future(coroutine, loop=self._loop)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a coroutine that nobody needs to look at: `check` raises its error."""
        self._unawaited.add(task := self.beside(coroutine))
        return task

    def check(self) -> None:
        """Raise the error of a started coroutine that has failed."""
        for task in [task for task in self._unawaited if task.done()]:
            self._unawaited.remove(task)
            if not task.cancelled():
                task.result()

    def advance(self, task: asyncio.Task[Any], seconds: float) -> bool:
        """Run all coroutines until the task has ended, at most so long; True if it has."""
        self._loop.run_until_complete(asyncio.wait([task], timeout=seconds))
        return task.done()

    def forget(self, task: asyncio.Task[Any]) -> None:
        """End a task, and raise no error of it."""
        self._unawaited.discard(task)
        forget(task)

    def close(self) -> None:
        """End all coroutines."""
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
