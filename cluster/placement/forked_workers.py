"""Ray workers forked from one process that has imported what the actors of a run need.

Most of what a small run costs is importing: each of its six processes takes seconds of CPU for
torch and transformers before it does anything. Where a run starts Ray itself, on a machine without
GPUs, a process of its own (the parent) imports them once, beside the driver's own imports. Ray
starts a small program (the stand-in) in place of each worker, and the parent forks for it:

    raylet -starts-> stand-in -asks-> parent -forks-> guard -forks-> Ray's worker

If Ray kills the stand-in, the guard kills the worker, also one that is stopped or stuck. When the
worker ends, its stand-in ends in the same way. Where no parent answers, a worker starts as it would
without one. ISOTHERM_FORK_WORKERS=off turns it all off; the path of a parent's socket takes that.

This file is the program of stand-in and parent too, so it imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # without the import of typing
    from collections.abc import Iterator
    from typing import Any

SETTING = "ISOTHERM_FORK_WORKERS"
_WORKER = os.path.join("ray", "_private", "workers", "default_worker.py")
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
# What actors import before they work. Each must leave the parent with one thread. Not Ray: it takes
# its settings, and whose worker it is, from the environment of its first import.
_MODULES = (
    "actors.embedded.engine",
    "actors.rollout.evaluator",
    "actors.rollout.worker",
    "actors.sglang.external",
    "distill.text.condense",
    "learner.worker",
    "peft",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
_FORKED = b"f"
_FAILED = (1 << 8).to_bytes(4, "little")  # the wait status of exit code 1
_PR_SET_PDEATHSIG = 1
_parents: list[Any] = []  # whose pipes must stay open


def start_parent() -> Any:
    """Starts the parent of the Ray workers of this process and of those that it starts.

    It ends when its standard input is closed: with this process, or earlier. Returns the process;
    None if there is a parent already, or shall be none.
    """
    import shlex
    import subprocess
    import tempfile

    from distill.gpu import no_gpu_here  # CUDA does not survive a fork

    if SETTING in os.environ or sys.platform != "linux" or not no_gpu_here():
        return None
    directory = tempfile.mkdtemp(prefix="isotherm-fork-")
    address = os.environ[SETTING] = os.path.join(directory, "socket")
    stand_in = shlex.join([sys.executable, "-IS", __file__, "stand-in", address])
    with open(_program(address), "w") as program:
        program.write(f'#!/bin/sh\nexec {stand_in} "$@"\n')
    os.chmod(_program(address), 0o700)
    process = subprocess.Popen(
        [sys.executable, __file__, "parent", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _parents.append(process)
    return process


def _program(address: str) -> str:
    return os.path.join(os.path.dirname(address), "python3")


@contextmanager
def forked_workers() -> Iterator[None]:
    """Context in which a Ray is started whose workers are forks, if there is a parent."""
    program, python = _program(os.environ.get(SETTING, "off")), sys.executable
    if os.access(program, os.X_OK):
        sys.executable = program  # of which Ray makes the command that starts a worker
    try:
        yield
    finally:
        sys.executable = python


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


def _serve(address: str) -> None:
    """The parent: imports, then forks for each that asks, until its standard input is closed."""
    import gc
    import importlib
    import select
    import shutil

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(128)  # whoever asks during the imports waits for their end
        sys.path[0] = _ROOT
        gc.disable()
        for name in _MODULES:
            importlib.import_module(name)
        gc.freeze()  # or collections would copy the pages that forks share
        gc.enable()
        _require_fork_safety()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how guards ended
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            channel, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _guard(channel)
            channel.close()
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)


def _require_fork_safety() -> None:
    """A fork has but the thread that forks. Those of OpenBLAS and pyarrow's allocator restart."""
    if (child := os.fork()) == 0:  # OpenBLAS ends its threads before a fork
        os._exit(0)
    os.waitpid(child, 0)
    names = set[str]()
    for task in set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        with open(f"/proc/self/task/{task}/comm") as file:
            names.add(file.read().strip())
    assert names <= {"jemalloc_bg_thd"} and "ray" not in sys.modules, names


def _guard(channel: socket.socket) -> None:
    """Forks the worker that is asked for; ends it when the stand-in ends, and tells of its end."""
    import json
    import threading

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, descriptors, _, _ = socket.recv_fds(channel, 8, 3)
    body = b""
    while len(body) < int.from_bytes(head, "little"):
        body += channel.recv(1 << 20)
    if (worker := os.fork()) == 0:
        channel.close()
        _work(json.loads(body), descriptors)
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


def _work(request: dict[str, Any], descriptors: list[int]) -> None:
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
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
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
    rest = [path for path in sys.path[1:] if path not in inherited]
    sys.path[:] = [os.path.dirname(sys.argv[0]), *filter(None, named), *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    _serve(sys.argv[2]) if sys.argv[1] == "parent" else _stand_in(sys.argv[2], sys.argv[3:])
