"""Actors in this process, for runs without Ray in a notebook, a debugger or a test.

    LocalActor(RolloutActor, ...)     runs a plain class in a separate thread
    actor.method.remote(argument)     returns a `LocalReference`, for `await` or `calls.get`
                                      (cluster/handles/calls.py)

Driver, supervisor, queue, handshake and push are the same code as on a cluster. A thread cannot be
killed, so a call that hangs outlives its actor, and a crash ends the run.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from cluster.handles import errors

_CLOSE_S = 10.0


class LocalReference:
    """Reference to the future value of a call. As on Ray, cancelling an await keeps the call."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __await__(self) -> Generator[Any, None, Any]:
        call = asyncio.wrap_future(self.future)
        # Marks the exception as retrieved: otherwise asyncio prints the traceback of a call whose
        # await was cancelled.
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asyncio.shield(call).__await__()


class LocalActor:
    """Handle of a plain object that runs in a separate thread.

    The object is created in that thread, and its methods run there sequentially, or concurrently if
    the class has asynchronous methods. Calls in a concurrency group run in a second thread. Errors
    are raised in the same form as by Ray's actors.
    """

    _side_thread: ThreadPoolExecutor | None = None  # thread of all concurrency groups

    def __init__(self, plain: type, *arguments: Any, **settings: Any) -> None:
        self._name = plain.__name__
        self._object: Any = None
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._executor: ThreadPoolExecutor | None = None
        if inspect.getmembers(plain, inspect.iscoroutinefunction):
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=_serve, args=[self._loop], name=self._name, daemon=True
            )
            thread.start()
        else:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            self._side_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-aside")

        def make() -> None:
            try:
                self._object = plain(*arguments, **settings)
            except Exception as error:
                self._failure = error
                raise

        self._failure: Exception | None = None
        self._made = self._submit(make)

    def __getattr__(self, name: str) -> _Method:
        if name == "__ray_ready__":  # answers while a method is running, too
            return _Method(lambda: self._refusal() or self._made)
        if name == "__ray_call__":
            return _Method(lambda ask: self._call(lambda: ask(self._plain())))
        if name.startswith("__"):
            raise AttributeError(name)

        def by(call: Callable[[Callable[[], Any]], Future[Any]]) -> Callable[..., Future[Any]]:
            return lambda *given, **named: call(
                lambda: getattr(self._plain(), name)(*given, **named)
            )

        return _Method(by(self._call), by(self._call_aside))

    def _plain(self) -> Any:
        if self._failure is not None:
            raise self._failure
        return self._object

    def end(self) -> None:
        """Cancel the object's tasks and call its `close`; later calls are refused."""
        if self._ended:
            return
        self._ended = True
        if self._executor is not None and self._side_thread is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._side_thread.shutdown(wait=False, cancel_futures=True)
        elif self._loop is not None:
            with suppress(TimeoutError):  # if the loop hangs, its thread ends with the process
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_CLOSE_S)

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        return self._refusal() or self._submit(function)

    def _call_aside(self, function: Callable[[], Any]) -> Future[Any]:
        if self._side_thread is None:
            return self._call(function)

        def run_when_created() -> Any:
            wait([self._made])
            return function()

        return self._refusal() or self._side_thread.submit(self._run, run_when_created)

    def _refusal(self) -> Future[Any] | None:
        if not self._ended:
            return None
        refused: Future[Any] = Future()
        refused.set_exception(self._death())
        return refused

    def _death(self) -> errors.RayActorError:
        return errors.RayActorError(error_msg=f"{self._name} was ended")

    def _submit(self, function: Callable[[], Any]) -> Future[Any]:
        if self._executor is not None:
            return self._executor.submit(self._run, function)
        assert self._loop is not None
        call = self._await(function)
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError:  # the loop was closed after the check of `_refusal`
            call.close()
            if refused := self._refusal():
                return refused
            raise

    def _run(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            raise self._as_ray_error(error) from None

    async def _await(self, function: Callable[[], Any]) -> Any:
        try:
            made = function()
            return await made if inspect.isawaitable(made) else made
        except asyncio.CancelledError:
            raise self._death() from None
        except Exception as error:
            raise self._as_ray_error(error) from None

    def _as_ray_error(self, error: Exception) -> Exception:
        # Raised from nothing: a caller raises the error itself from this one (`Driver.value`). Were
        # it the cause of this one, their chain of causes would have no end.
        return errors.RayTaskError(self._name, traceback.format_exc(), error).as_instanceof_cause()

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if hasattr(self._object, "close"):
                closed = self._object.close()
                if inspect.isawaitable(closed):
                    await closed
        finally:
            loop.call_soon(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then close it to release its file descriptors."""
    try:
        loop.run_forever()
    finally:
        loop.close()


class _Method:
    """`handle.method`, with Ray's `remote` and `options`."""

    def __init__(
        self, call: Callable[..., Future[Any]], in_group: Callable[..., Future[Any]] | None = None
    ) -> None:
        self._call, self._in_group = call, in_group

    def options(self, *, concurrency_group: str = "") -> _Method:
        return _Method(self._in_group) if concurrency_group and self._in_group else self

    def remote(self, *given: Any, **named: Any) -> LocalReference:
        return LocalReference(self._call(*given, **named))
