"""Bounded calls of untrusted code, or of code that may not end.

    in_child     in a child process, which is ended at its limit of time or memory, and can open no
                 socket
    in_thread    in a thread of this process, which cannot be ended, so it is abandoned at its limit

A child and a thread are kept for the next call, and replaced after a call that exceeded its time.

A child is a new interpreter (`child_command`) that imports modules by name. It is not started by
`multiprocessing`, whose "spawn" runs the user's script again in every child, and whose queues leave
named semaphores in /dev/shm if Ray kills the process group.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import queue
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from distill.errors import described
from distill.sandbox.guard import guarded, lifeline
from distill.sandbox.seccomp import filter_program, install

_MEMORY_BYTES = 4 << 30
# Time for the imports that calls need, such as sympy, on a machine whose cores are all busy.
_START_S = 300.0
# Maximum number of abandoned threads that still run: each may occupy a core.
_MAX_ABANDONED = 4


class OverLimit(Exception):
    """A call exceeded its limit of time or memory."""


def child_command(module: str, *arguments: str) -> list[str]:
    """Command of an interpreter that calls `main(*arguments)` of a module.

    The interpreter has the `sys.path` of this process. It does not run the user's script, which may
    lack `if __name__ == "__main__"`.
    """
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; "
    code += "main(*sys.argv[2:])"
    return [sys.executable, "-P", "-c", code, json.dumps(sys.path), *arguments]


def in_child(
    prepare: Callable[[], None], function: Callable[..., Any], *arguments: Any, timeout_s: float
) -> Any:
    """Call `function(*arguments)` in a child process, which dies with this process.

    Arguments and results are pickled. There is one child per `prepare`, a function that the child
    calls first, to import the modules that calls need. A call's time does not include it.

    Raises:
        OverLimit: the call exceeded a limit and the child was ended; the next call starts a new
            one.
    """
    return _child(prepare).call(function, arguments, timeout_s)


@lru_cache
def _child(prepare: Callable[[], None]) -> _Child:
    return _Child(prepare)


# A forked process would share the pipes to its parent's children, so it starts its own children.
os.register_at_fork(after_in_child=_child.cache_clear)


class _Child:
    """A process that executes one call at a time. A call starts it if it is not running."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def call(self, function: Callable[..., Any], arguments: tuple, timeout_s: float) -> Any:
        request = pickle.dumps((function, arguments))
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                result, error = self._answer_to(request, timeout_s)
            except BaseException:  # also an interrupt: else the next call would read this answer
                self._end()
                raise
        if isinstance(error, MemoryError):
            raise _over_limit(timeout_s, described(error)) from error
        if error is not None:
            raise error
        return result

    def _start(self) -> None:
        self._end()
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            # In a new session, so that Ctrl-C reaches only this process, which ends the child.
            self._process = subprocess.Popen(
                guarded(child_command(__name__, str(theirs.fileno()))),
                pass_fds=(theirs.fileno(), lifeline()),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            _, error = self._answer_to(pickle.dumps((_confine, (self._prepare,))), _START_S)
        except OverLimit as late:  # not of a call, so no response may be judged by it
            code = self._process.poll()
            raise RuntimeError(
                f"the child process for bounded calls did not start within {_START_S:g} s"
                + ("" if code is None else f"; it ended with exit code {code}")
            ) from late
        if error is not None:
            raise error

    def _answer_to(self, request: bytes, timeout_s: float) -> tuple[Any, BaseException | None]:
        """Return the result or the error of a call.

        Raises:
            OverLimit: the call is late, or the child has ended.
        """
        assert self._connection is not None
        try:
            self._connection.send_bytes(request)
            if not self._connection.poll(timeout_s):
                raise _over_limit(timeout_s, "late")
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise _over_limit(timeout_s, "its process has ended") from error

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _over_limit(timeout_s: float, why: str) -> OverLimit:
    return OverLimit(f"over {timeout_s:g} s or {_MEMORY_BYTES >> 30} GiB: {why}")


def main(descriptor: str) -> None:
    """Run the child: execute calls until the pipe is closed. Its standard output goes to stderr."""
    os.dup2(2, 1)
    connection = Connection(int(descriptor))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        connection.send_bytes(_answer(request))


def _answer(request: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(request)
        return pickle.dumps((function(*arguments), None))
    except BaseException as error:  # also SystemExit: it is raised in the caller
        try:
            answer = pickle.dumps((None, error))
            pickle.loads(answer)  # some errors cannot be created from their arguments
            return answer
        except Exception:  # of several types; pickling runs the error's own code
            return pickle.dumps((None, RuntimeError(described(error))))


def _confine(prepare: Callable[[], None]) -> None:
    prepare()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    install(filter_program(sockets=False))


def in_thread(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Call `function(*arguments)` in this process's single thread for such calls.

    For code that may keep state in this process. If the function holds the GIL (as Python's `re`
    does), its lateness is detected only when it releases it.

    Raises:
        OverLimit: the function is late: it continues, and its result is discarded. Or too many
            late calls still run.
        BaseException: raised by the function; also SystemExit.
    """
    return _caller.call(function, arguments, timeout_s)


class _Caller:
    """Executes calls in one thread, which it replaces if a call is late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _CallThread | None = None
        self._abandoned: list[_CallThread] = []

    def call(self, function: Callable[..., Any], arguments: tuple, timeout_s: float) -> Any:
        with self._lock:
            self._abandoned = [worker for worker in self._abandoned if worker.thread.is_alive()]
            if len(self._abandoned) >= _MAX_ABANDONED:
                raise OverLimit(
                    f"{_MAX_ABANDONED} earlier calls that exceeded their limit still run"
                )
            worker = self._worker = self._worker or _CallThread()
            worker.requests.put((function, arguments))
            try:
                result, error = worker.answers.get(timeout=timeout_s)
            except queue.Empty:
                worker.requests.put(None)
                self._abandoned.append(worker)
                self._worker = None
                raise OverLimit(f"over {timeout_s:g} s") from None
        if error is not None:
            raise error
        return result


class _CallThread:
    """A daemon thread that executes calls."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue = queue.SimpleQueue()
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="bounded", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (request := self.requests.get()) is not None:
            function, arguments = request
            try:
                answer = function(*arguments), None
            except BaseException as error:  # also SystemExit: it is raised in the caller
                answer = None, error
            self.answers.put(answer)


_caller = _Caller()
