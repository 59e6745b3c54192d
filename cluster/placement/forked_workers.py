"""Ray workers forked from one process that has already imported the modules of a run's actors.

Imports take most of the time of a small run: each of its six processes needs seconds of CPU to
import torch and transformers. If a run starts Ray itself, on a machine without GPUs, its workers
are forks of one process with these imports, the parent. The parent is a fork of the driver, made
before the driver imports Ray. `fork_server` describes the processes and how they end.
ISOTHERM_FORK_WORKERS=off disables forked workers; the path of a parent's socket selects that
parent.
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.placement import fork_server
from cluster.process_memory import long_lived
from distill.gpu import no_gpu_here

SETTING = "ISOTHERM_FORK_WORKERS"
# Modules that actors import. No module may start a thread in the parent. Ray must not be imported:
# it reads its settings, and the identity of a worker, from the environment at its first import.
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

    The constructor creates its socket, so that Ray can be started before `start`.
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
        """Import the modules of actors, and fork the parent, unless forking is unsafe."""
        with long_lived():  # frozen, because garbage collection would copy pages shared with forks
            for name in _MODULES:
                importlib.import_module(name)
        if _is_fork_safe() and os.fork() == 0:
            fork_server.end_after(lambda: fork_server.serve(self._listener, self._ended))
        self._listener.close()
        os.close(self._ended)

    def end(self) -> None:
        """Make the parent end, without waiting for it. Its workers end with their stand-ins."""
        directory = os.path.dirname(os.environ.pop(SETTING))
        os.close(self._open)
        shutil.rmtree(directory, ignore_errors=True)  # there may be no parent that removes it


def parent_of_workers() -> Parent | None:
    """A parent that is not started yet; None if there is one already, or forking is disabled."""
    apart = sys.platform == "linux" and no_gpu_here()  # CUDA does not survive a fork
    return Parent() if apart and SETTING not in os.environ and "ray" not in sys.modules else None


def _program(address: str) -> str:
    return os.path.join(os.path.dirname(address), "python3")


@contextmanager
def forked_workers() -> Iterator[None]:
    """Context in which Ray is started such that its workers are forks, if there is a parent."""
    program, python = _program(os.environ.get(SETTING, "off")), sys.executable
    if os.access(program, os.X_OK):
        sys.executable = program  # Ray starts workers with this command
    try:
        yield
    finally:
        sys.executable = python


def _is_fork_safe() -> bool:
    """True if this process has no threads that a fork would need.

    OpenBLAS and pyarrow's allocator restart their threads in a fork.
    """
    if (child := os.fork()) == 0:  # makes OpenBLAS end its threads
        os._exit(0)
    os.waitpid(child, 0)
    names = set[str]()
    for task in set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        with open(f"/proc/self/task/{task}/comm") as file:
            names.add(file.read().strip())
    return names <= {"jemalloc_bg_thd"} and "ray" not in sys.modules
