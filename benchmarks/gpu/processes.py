"""Processes of checks: each check has a deadline; a check that hangs or crashes has failed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from io import RawIOBase
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.setting import Setting

REPOSITORY = Path(__file__).parents[2]
# A check is not started if less time than this is left.
LEAST_S = 20.0
# Longest time until the first check of a process begins: imports, from a cold disk.
IMPORTS_S = 60.0
# Time that a hung process gets to write the stacks of its threads.
_STACKS_S = 5.0

Record = Callable[[str, dict[str, Any]], None]


def run_in_process(
    names: Sequence[str], setting: Setting, out: Path, end: float, record: Record
) -> None:
    """Run the checks in one process; after a crash or a hang, the rest in a new one.

    Args:
        out: receives a log named after the first check of each process.
        end: time.monotonic() after which no check begins, and a running check is terminated.
        record: called with each check's name and outcome.
    """
    waiting = list(names)
    while waiting:
        if end - time.monotonic() < LEAST_S:
            for name in waiting:
                record(name, outcome("skipped", "budget_s= is used up", 0.0))
            return
        waiting = _run_until_one_fails_to_answer(waiting, setting, out, end, record)


def outcome(status: str, why: str, seconds: float) -> dict[str, Any]:
    """Outcome of a check that did not report one itself."""
    return {"status": status, "why": why, "numbers": {}, "seconds": seconds}


def _run_until_one_fails_to_answer(
    waiting: list[str], setting: Setting, out: Path, end: float, record: Record
) -> list[str]:
    """Run a process to its end; returns the names of checks that it did not reach."""
    log = out / f"{waiting[0]}.log"
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "benchmarks.gpu.child", str(writer), ",".join(waiting)]
    with open(log, "wb") as file, os.fdopen(reader, "rb", buffering=0) as answers:
        child = subprocess.Popen(
            [*command, json.dumps(asdict(setting))], cwd=REPOSITORY, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[writer],
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )  # fmt: skip
        os.close(writer)
        try:
            started, imports_s = time.monotonic(), IMPORTS_S
            for i, name in enumerate(waiting):
                deadline_s = min(CHECKS[name].deadline_s + imports_s, end - time.monotonic())
                line = _next_line(answers, deadline_s)
                seconds = time.monotonic() - started
                if line is None:
                    _write_stacks(child)
                    record(
                        name, outcome("fail", f"not done after {seconds:.0f} s; see {log}", seconds)
                    )
                    return waiting[i + 1 :]
                if not line:
                    why = f"its process ended with code {child.wait()}; see {log}"
                    record(name, outcome("fail", why, seconds))
                    return waiting[i + 1 :]
                record(name, json.loads(line))
                started, imports_s = time.monotonic(), 0.0
            return []
        finally:
            _end(child)


def _next_line(answers: RawIOBase, deadline_s: float) -> bytes | None:
    """Next outcome; empty if the process has ended, None if none arrives within the deadline."""
    poll = select.poll()  # select() refuses descriptors from 1,024 on
    poll.register(answers, select.POLLIN)
    return answers.readline() if poll.poll(1000 * max(0.0, deadline_s)) else None


def _write_stacks(child: subprocess.Popen[bytes]) -> None:
    """Terminate the process by SIGABRT, so that faulthandler writes its stacks to the log."""
    child.send_signal(signal.SIGABRT)
    try:
        child.wait(_STACKS_S)
    except subprocess.TimeoutExpired:
        return  # it hangs in a driver; `_end` kills it


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminate the process and all its descendants."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()
