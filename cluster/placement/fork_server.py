"""Processes of forked Ray workers: the stand-in, the parent's service, the guard and the worker.

    raylet -starts-> stand-in -asks-> parent -forks-> guard -forks-> Ray's worker

If Ray kills the stand-in, the guard kills the worker, also one that is stopped or stuck. When the
worker ends, its stand-in ends in the same way. Where no parent answers, a worker starts as it would
without one. `forked_workers` starts the parent.

This file is the stand-in's program, so it imports nothing that takes time.
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
    """Stands for a fork if a Ray worker is to be started, else becomes what is."""
    if arguments and arguments[0].endswith(_WORKER):
        channel = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            channel.connect(address)
            if _ask(channel, arguments):
                _end_as(channel)
    os.execv(sys.executable, [sys.executable, *arguments])


def _ask(channel: socket.socket, arguments: list[str]) -> bool:
    """Asks for a fork; returns True if there is one."""
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
    """Waits for the fork's end, and ends this process as it did."""
    status = _FAILED
    with suppress(OSError):
        status = channel.recv(len(_FAILED)) or _FAILED  # nothing: the guard was killed
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
    if code < 0:
        with suppress(OSError):  # of signals that cannot be handled
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(listener: socket.socket, ended: int) -> None:
    """The parent: forks for each that asks, until the other end of the pipe `ended` is closed."""
    import select
    import shutil

    os.setsid()
    _close_all_but(listener.fileno(), ended)
    directory, modules = os.path.dirname(listener.getsockname()), _plain_path()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how guards ended
    while ended not in select.select([listener, ended], [], [])[0]:
        channel, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(ended)
            _guard(channel, modules)
        channel.close()
    shutil.rmtree(directory, ignore_errors=True)


def _close_all_but(*kept: int) -> None:
    """Closes descriptors, standard ones too: a shell would wait for whoever holds its pipes."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with suppress(OSError):
                os.close(number)


def _plain_path() -> list[str]:
    """Module path of an interpreter that is started here, without its script and PYTHONPATH."""
    import json
    import subprocess

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import json, sys; print(json.dumps(sys.path[1:]))"
    return json.loads(subprocess.check_output([sys.executable, "-c", program], env=environment))


def _guard(channel: socket.socket, modules: list[str]) -> None:
    """Forks the worker that is asked for; ends it when the stand-in ends, and tells of its end."""
    import json
    import threading

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, descriptors, _, _ = socket.recv_fds(channel, 8, 3)
    body = b""
    while len(body) < int.from_bytes(head, "little"):
        if not (part := channel.recv(1 << 20)):
            os._exit(1)  # the stand-in was killed before it had asked
        body += part
    if (worker := os.fork()) == 0:
        channel.close()
        end_after(lambda: _work(json.loads(body), descriptors, modules))
    channel.send(_FORKED)

    def kill_after() -> None:
        channel.recv(1)
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    threading.Thread(target=kill_after, daemon=True).start()
    _, status = os.waitpid(worker, 0)
    with suppress(OSError):  # the stand-in was killed
        channel.send(status.to_bytes(len(_FAILED), "little"))
    os._exit(0)


def _work(request: dict[str, Any], descriptors: list[int], modules: list[str]) -> None:
    """Becomes the worker that was asked for, as if Python had been started for it."""
    import ctypes
    import random
    import runpy
    import tempfile

    import numpy as np
    import torch

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with its guard
    os.setsid()
    for standard, passed in enumerate(descriptors):
        os.dup2(passed, standard)
        os.close(passed)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = sys.__stdout__ = open(1, "w", 1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.nice(max(0, request["niceness"] - os.nice(0)))  # less would take a privilege
    # In a process that is started torch reads this, which Ray may set for the actor first: to 1.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    tempfile.tempdir = None
    random.seed()
    np.random.seed()
    sys.argv = request["arguments"]
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.path.dirname(sys.argv[0]), *filter(None, named), *modules]
    runpy.run_path(sys.argv[0], run_name="__main__")


def end_after(run: Callable[[], None]) -> None:
    """Runs, and ends this process as Python ends, without returning to the code that was forked."""
    import atexit
    import threading
    import traceback

    code: object = None
    try:
        run()
    except SystemExit as asked:
        code = asked.code
    except BaseException:  # printed as Python does before it exits with 1
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
