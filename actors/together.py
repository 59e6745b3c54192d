"""Concurrent coroutines; the first failure cancels the others and is raised directly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """`asyncio.TaskGroup` that raises the first failure itself, not in an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def together(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Run coroutines concurrently and return their results in order."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    async with task_group() as tasks:
        in_progress = [tasks.create_task(each) for each in coroutines]
    return [task.result() for task in in_progress]
