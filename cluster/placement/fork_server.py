"""Processes of forked Ray workers: the stand-in, the parent's service, the guard and the worker.

    raylet -starts-> stand-in -requests fork-> parent -forks-> guard -forks-> Ray's worker

If Ray kills the stand-in, the guard kills the worker, even if the worker is stopped or stuck. When
the worker ends, its stand-in ends with the same exit code or signal. If no parent answers, the
stand-in starts a normal worker. `forked_workers` starts the parent.

This file is the stand-in's program, so it imports no slow modules.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # without the import of typing
    from collections.abc import Callable
    from typing import Any

_WORKER = os.path.join("ray", "_private", "workers", "default_worker.py")
_FORKED = b"f"
_FAILED = (1 << 8).to_bytes(4, "little")  # the wait status of exit code 1
_PR_SET_PDEATHSIG = 1


def _stand_in(address: str, arguments: list[str]) -> None:
    """Run as the stand-in of a forked Ray worker. Other programs are executed directly."""
    if arguments and arguments[0].endswith(_WORKER):
        channel = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            channel.connect(address)
            if _ask(channel, arguments):
                _end_as(channel)
    os.execv(sys.executable, [sys.executable, *arguments])


def _ask(channel: socket.socket, arguments: list[str]) -> bool:
    """Request a fork from the parent; return True if it was made."""
    import json

    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "niceness": os.nice(0),
    }
    body = json.dumps(request).encode()
    socket.send_fds(channel, [len(body).to_bytes(8, "little")], [0, 1, 2])
    channel.sendall(body)
    return channel.recv(1) == _FORKED


def _end_as(channel: socket.socket) -> None:
    """Wait until the worker ends, and end this process with its exit code or signal."""
    status = _FAILED
    with suppress(OSError):
        status = channel.recv(len(_FAILED)) or _FAILED  # empty: the guard was killed
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
    if code < 0:
        with suppress(OSError):  # SIGKILL and SIGSTOP have no handlers
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(listener: socket.socket, ended: int) -> None:
    """Run the parent: fork for each request, until the other end of the pipe `ended` is closed."""
    import select
    import shutil

    os.setsid()
    _close_all_but(listener.fileno(), ended)
    directory, modules = os.path.dirname(listener.getsockname()), _plain_path()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards are not waited for
    for ends in (signal.SIGTERM, signal.SIGHUP):  # the driver's handlers are not for its forks
        if signal.getsignal(ends) is not signal.SIG_IGN:
            signal.signal(ends, signal.SIG_DFL)
    while ended not in select.select([listener, ended], [], [])[0]:
        channel, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(ended)
            _guard(channel, modules)
        channel.close()
    shutil.rmtree(directory, ignore_errors=True)


def _close_all_but(*kept: int) -> None:
    """Close all other descriptors. A shell would wait for processes that keep its pipes open, so
    standard input and outputs are replaced by /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with suppress(OSError):
                os.close(number)


def _plain_path() -> list[str]:
    """`sys.path` of an interpreter that is started here, without its script and PYTHONPATH."""
    import json
    import subprocess

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import json, sys; print(json.dumps(sys.path[1:]))"
    return json.loads(subprocess.check_output([sys.executable, "-c", program], env=environment))


def _guard(channel: socket.socket, modules: list[str]) -> None:
    """Fork the requested worker, kill it when the stand-in ends, and report its exit status."""
    import json
    import threading

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, descriptors, _, _ = socket.recv_fds(channel, 8, 3)
    body = b""
    while len(body) < int.from_bytes(head, "little"):
        if not (part := channel.recv(1 << 20)):
            os._exit(1)  # the stand-in was killed before it had sent the whole request
        body += part
    if (worker := os.fork()) == 0:
        channel.close()
        end_after(lambda: _work(json.loads(body), descriptors, modules))
    channel.send(_FORKED)

    def kill_after() -> None:
        with suppress(OSError):  # reset: the stand-in was killed before it had read the answer
            channel.recv(1)
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    threading.Thread(target=kill_after, daemon=True).start()
    _, status = os.waitpid(worker, 0)
    with suppress(OSError):  # the stand-in was killed
        channel.send(status.to_bytes(len(_FAILED), "little"))
    os._exit(0)


def _work(request: dict[str, Any], descriptors: list[int], modules: list[str]) -> None:
    """Run the requested worker in this fork, with the state of a newly started Python."""
    import ctypes
    import random
    import runpy
    import tempfile

    import numpy as np
    import torch

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # when the guard dies
    os.setsid()
    for standard, passed in enumerate(descriptors):
        os.dup2(passed, standard)
        os.close(passed)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.__stdout__ = open(1, "w", 1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.nice(max(0, request["niceness"] - os.nice(0)))  # lowering it needs a privilege
    # A newly started process reads OMP_NUM_THREADS when it imports torch. Ray may set it to 1.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    tempfile.tempdir = None
    random.seed()
    np.random.seed()
    sys.argv = request["arguments"]
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.path.dirname(sys.argv[0]), *filter(None, named), *modules]
    runpy.run_path(sys.argv[0], run_name="__main__")


def end_after(run: Callable[[], None]) -> None:
    """Call `run`, and end this process like Python does. Never returns to the forked code."""
    import atexit
    import threading
    import traceback

    code: object = None
    try:
        run()
    except SystemExit as asked:
        code = asked.code
    except BaseException:  # like an uncaught exception in Python
        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - as multiprocessing does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    _stand_in(sys.argv[1], sys.argv[2:])
