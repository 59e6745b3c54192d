"""Simulated clock for a run's real parts: hours of a thousand actors in seconds, on one thread.

    SimulatedLoop    event loop; when it is idle, its time jumps to the next timer
    SimulatedActor   handle of a plain object on that loop; it may start slowly, freeze and die
    simulated_time   redirects `time` and waits for calls to the loop's clock

The driver's side waits as it does on Ray, and the loop runs meanwhile. Nothing depends on how fast
the machine is.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from cluster.handles import calls
from cluster.handles.local_actor import LocalActor, LocalReference
from cluster.queue.ledger import Ledger
from cluster.runtime.scaling import Scaling
from cluster.runtime.watchdog import Watchdog

# Classes whose clock is an argument with the real one as default.
_CLOCKED = (Ledger, Watchdog, Scaling)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Event loop with its own clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run at once: the clock must not jump while a thread works."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def close(self) -> None:
        """Do nothing: the loop belongs to `simulated_time`, not to a supervisor."""

    def let_pass(self, seconds: float) -> None:
        self.run_until_complete(asyncio.sleep(seconds))


class _Jump(selectors.DefaultSelector):
    """Selector that sets the clock forward instead of waiting."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if ready := super().select(0):
            return ready
        assert timeout is not None, "everybody waits for somebody else, without a deadline"
        self._loop.now += max(0.0, timeout)
        return []


class SimulatedActor(LocalActor):
    """Handle of a plain object that lives on the simulated loop."""

    def __init__(
        self,
        loop: SimulatedLoop,
        plain: Callable[..., Any],
        *arguments: Any,
        start_s: float = 0,
        **settings: Any,
    ) -> None:
        self._name = getattr(plain, "__name__", "an actor")
        self._object, self._ended, self._failure = None, False, None
        self._simulated, self._tasks = loop, set[asyncio.Task[None]]()
        self._awake, self._up = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self.asked = 0  # calls
        self._made = self._submit(lambda: self._make(plain, arguments, settings, start_s))

    async def _make(self, plain: Any, arguments: Any, settings: Any, start_s: float) -> None:
        try:
            await asyncio.sleep(start_s)
            self._object = plain(*arguments, **settings)
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._up.set()

    @property
    def plain(self) -> Any:
        return self._object

    def freeze(self) -> None:
        """Answer no call until the actor is ended."""
        self._awake.clear()

    def end(self) -> None:
        self._ended = True
        for task in list(self._tasks):
            task.cancel()

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        self.asked += 1

        async def once_up() -> Any:
            await self._up.wait()
            await self._awake.wait()
            made = function()
            return await made if asyncio.iscoroutine(made) else made

        return self._refusal() or self._submit(once_up)

    def _submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        async def run() -> None:
            try:
                future.set_result(await self._await(function))
            except Exception as error:
                future.set_exception(error)

        task = self._simulated.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._over(ended, future))
        return future

    def _over(self, task: asyncio.Task[None], future: Future[Any]) -> None:
        self._tasks.discard(task)
        if not future.done():  # cancelled before it began
            future.set_exception(self._death())


@contextmanager
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedLoop]:
    """Redirect the clock and the waits of everything in this process to the loop."""
    loop = SimulatedLoop()

    async def some_done(references: Sequence[LocalReference], number: int, timeout: Any) -> None:
        changed = asyncio.Event()
        for reference in references:
            reference.future.add_done_callback(lambda _: changed.set())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while sum(reference.future.done() for reference in references) < number:
                    changed.clear()
                    await changed.wait()

    def wait(
        references: Sequence[LocalReference], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        done = [reference for reference in references if reference.future.done()]
        if len(done) < min(num_returns, len(references)) and timeout != 0:
            loop.run_until_complete(some_done(references, num_returns, timeout))
            done = [reference for reference in references if reference.future.done()]
        return done, [reference for reference in references if not reference.future.done()]

    def get(reference: LocalReference, timeout: float | None = None) -> Any:
        if not wait([reference], timeout=timeout)[0]:
            raise GetTimeoutError(f"no answer within {timeout} s")
        return reference.future.result()

    def clock() -> float:
        return loop.now

    # By the test's own patches, not a context of ours: they are undone in reverse order, so that
    # what a test puts over one of these does not bring it back afterwards.
    monkeypatch.setattr(calls, "wait", wait)
    monkeypatch.setattr(calls, "get", get)
    monkeypatch.setattr(asyncio, "run", loop.run_until_complete)
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loop)  # of `Background`
    monkeypatch.setattr(time, "sleep", loop.let_pass)
    for kind in _CLOCKED:
        _set_clock(monkeypatch, kind, clock)
    monkeypatch.setattr(time, "monotonic", clock)
    try:
        asyncio.set_event_loop(loop)
        yield loop
    finally:
        loop.set_exception_handler(lambda _loop, _context: None)  # results that nobody awaits
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks))
        asyncio.set_event_loop(None)
        asyncio.SelectorEventLoop.close(loop)


def _set_clock(patched: pytest.MonkeyPatch, kind: type, clock: Callable[[], float]) -> None:
    """Replace default arguments of signatures that were bound to the real clock."""
    make: Any = kind.__init__
    defaults = tuple(clock if d is time.monotonic else d for d in make.__defaults__ or ())
    named = {k: clock if d is time.monotonic else d for k, d in (make.__kwdefaults__ or {}).items()}
    patched.setattr(make, "__defaults__", defaults or None)
    patched.setattr(make, "__kwdefaults__", named or None)
