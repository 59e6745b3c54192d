"""Ray workers forked from one process that has imported what the actors of a run need.

Most of what a small run costs is importing: each of its six processes takes seconds of CPU for
torch and transformers before it does anything. Where a run starts Ray itself, on a machine without
GPUs, its workers are forks of one process that has imported them, the parent, which is a fork of
the driver from before it imports Ray. `fork_server` has the processes, and how they end.
ISOTHERM_FORK_WORKERS=off turns it all off; the path of a parent's socket takes that parent.
"""

from __future__ import annotations

import importlib
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.placement import fork_server
from cluster.process_memory import long_lived
from distill.gpu import no_gpu_here

SETTING = "ISOTHERM_FORK_WORKERS"
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


class Parent:
    """Parent of the Ray workers of this process, and of the processes that it starts.

    Its socket is there from the beginning, so that Ray can be started before `start`.
    """

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix="isotherm-fork-")
        address = os.environ[SETTING] = os.path.join(directory, "socket")
        stand_in = shlex.join([sys.executable, "-IS", fork_server.__file__, address])
        with open(_program(address), "w") as program:
            program.write(f'#!/bin/sh\nexec {stand_in} "$@"\n')
        os.chmod(_program(address), 0o700)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(128)
        self._ended, self._open = os.pipe()  # the parent ends when this process closes `_open`

    def start(self) -> None:
        """Imports what actors need, and forks. Where that is not safe workers are not forked."""
        with long_lived():  # and frozen, or collections would copy the pages that forks share
            for name in _MODULES:
                importlib.import_module(name)
        if _is_fork_safe() and os.fork() == 0:
            fork_server.end_after(lambda: fork_server.serve(self._listener, self._ended))
        self._listener.close()
        os.close(self._ended)

    def end(self) -> None:
        """Has the parent end, without waiting for it. Its workers end with their stand-ins."""
        os.environ.pop(SETTING)
        os.close(self._open)


def parent_of_workers() -> Parent | None:
    """A parent that is yet to be started; None if there is one already, or shall be none."""
    apart = sys.platform == "linux" and no_gpu_here()  # CUDA does not survive a fork
    return Parent() if apart and SETTING not in os.environ and "ray" not in sys.modules else None


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


def _is_fork_safe() -> bool:
    """True if no thread would be missing in a fork. OpenBLAS and pyarrow's allocator restart."""
    if (child := os.fork()) == 0:  # OpenBLAS ends its threads before a fork
        os._exit(0)
    os.waitpid(child, 0)
    names = set[str]()
    for task in set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        with open(f"/proc/self/task/{task}/comm") as file:
            names.add(file.read().strip())
    return names <= {"jemalloc_bg_thd"} and "ray" not in sys.modules
