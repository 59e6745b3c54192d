"""Bounded calls, of code that is not trusted or may not end: each has a limit.

    in_child     a child process: ended when it is late, and held to so much memory; no sockets
    in_thread    a thread of this process: nothing can end it, so it is given up

A child is kept for the next call; one more than a late call needs is made.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError
from functools import lru_cache
from multiprocessing import resource_tracker
from typing import Any

from pebble import ProcessExpired, ProcessPool

from distill.sandbox.seccomp import filter_program, install

_MEMORY_BYTES = 4 << 30
_PR_SET_PDEATHSIG = 1
_TRACKER = resource_tracker.__name__
# Threads that were given up and still run: each may hold a core.
_MAX_GIVEN_UP = 4
_starting = threading.Lock()


class OverLimit(Exception):
    """A call took longer, or more memory, than it may."""


def in_child(
    prepare: Callable[[], None], function: Callable[..., Any], *arguments: Any, timeout_s: float
) -> Any:
    """`function(*arguments)` in a child process, which dies with this one.

    What crosses is pickled. There is one child for each `prepare`, which imports what calls need:
    time is measured from there.

    Raises:
        OverLimit: it was ended; the next call has a fresh child.
    """
    with _starting:
        child = _child(prepare)
    try:
        return child.schedule(function, args=arguments, timeout=timeout_s).result()
    except (TimeoutError, ProcessExpired, MemoryError) as error:
        raise OverLimit(f"over {timeout_s:g} s or {_MEMORY_BYTES >> 30} GiB: {error!r}") from error


@lru_cache
def _child(prepare: Callable[[], None]) -> ProcessPool:
    _track_in_another_session()
    return ProcessPool(
        max_workers=1,
        initializer=_confine,
        initargs=(prepare,),
        context=multiprocessing.get_context("spawn"),
    )


@lru_cache
def _track_in_another_session() -> subprocess.Popen[bytes] | None:
    """Starts Python's resource tracker, which removes named semaphores after this process's end.

    Python would start it in this process's group, which Ray kills as a whole: the semaphores would
    stay. One that runs already is left as it is.
    """
    tracker: Any = resource_tracker._resource_tracker  # pyright: ignore[reportAttributeAccessIssue]
    if tracker._fd is not None:
        return None
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", f"from {_TRACKER} import main; main({reading})"],
        pass_fds=[reading],
        start_new_session=True,
    )
    os.close(reading)
    tracker._fd, tracker._pid = writing, process.pid
    return process


def die_with_parent() -> None:
    """This process is killed when the thread that started it ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _confine(prepare: Callable[[], None]) -> None:
    die_with_parent()
    prepare()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    install(filter_program(sockets=False))


def in_thread(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """`function(*arguments)`, in the one thread that this process has for such calls.

    For code that may keep state in this process. What holds the interpreter (Python's `re` does)
    is not seen to be late before it lets go.

    Raises:
        OverLimit: it goes on and will not be heard of; or too many such calls go on already.
        BaseException: what it raised, exits too.
    """
    return _caller.call(function, arguments, timeout_s)


class _Caller:
    """Calls in a thread, and in another one once that is late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hand: _Hand | None = None
        self._given_up: list[_Hand] = []

    def call(self, function: Callable[..., Any], arguments: tuple, timeout_s: float) -> Any:
        with self._lock:
            self._given_up = [hand for hand in self._given_up if hand.thread.is_alive()]
            if len(self._given_up) >= _MAX_GIVEN_UP:
                raise OverLimit(f"{_MAX_GIVEN_UP} earlier calls that were too late still run")
            hand = self._hand = self._hand or _Hand()
            hand.asked.put((function, arguments))
            try:
                result, error = hand.answered.get(timeout=timeout_s)
            except queue.Empty:
                hand.asked.put(None)
                self._given_up.append(hand)
                self._hand = None
                raise OverLimit(f"over {timeout_s:g} s") from None
        if error is not None:
            raise error
        return result


class _Hand:
    """A thread that keeps no process from its end."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue = queue.SimpleQueue()
        self.answered: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="bounded", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (asked := self.asked.get()) is not None:
            function, arguments = asked
            try:
                answer = function(*arguments), None
            except BaseException as error:  # it belongs to who asked, exits too
                answer = None, error
            self.answered.put(answer)


_caller = _Caller()
