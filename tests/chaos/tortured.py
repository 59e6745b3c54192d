"""Run of the real command, watched from outside: its files, its processes and its end."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from cluster.inspect.audit import audit
from cluster.jsonl_log import read_lines
from cluster.placement.forked_workers import SETTING
from tests.e2e.harness import REPOSITORY
from tests.e2e.impatient import NUMBERS
from tests.kept_journal import KeptInJournal
from tests.leftovers import described_process, is_alive

_LOOK_EVERY_S = 0.5
_POLL_S = 0.05
_SHOWN_LINES = 60
# Time for the last processes to end after the command.
_GONE_WITHIN_S = 120.0
# If their raylet was killed with the job, they retry their head for a minute before they end.
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
_SESSION = r"session_\d{4}-[\d_-]+"


class ChaosError(AssertionError):
    """The run did not survive, or did not end. The message has the run's output."""


class TorturedRun:
    """Run of `python -m tests.e2e.impatient` into one directory, job after job.

    Args:
        settings: the command's arguments, without `out`.
        numbers: of supervision, by argument (tests/e2e/impatient.py).
        environment: variables beside this process's own.
        deadline_s: longest time that anything is waited for; against hangs only.
    """

    def __init__(
        self,
        out: Path,
        settings: Mapping[str, object],
        *,
        numbers: Mapping[str, float] | None = None,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = 300,
    ) -> None:
        self.out, self._settings, self.deadline_s = out, dict(settings), deadline_s
        users = {name: value for name, value in os.environ.items() if name != SETTING}
        self._environment = {**users, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self._environment[NUMBERS] = json.dumps(dict(numbers or {}))
        self.log = out.with_name(f"{out.name}.log")
        self.process: subprocess.Popen[bytes] | None = None
        self._family: dict[int, psutil.Process] = {}
        self._sessions: set[str] = set()  # Ray's names for those that the jobs started themselves

    # jobs

    def start(self, **changes: object) -> None:
        """Start a job with these settings changed, and watch its processes."""
        self._settings |= changes
        arguments = [f"{name}={value}" for name, value in self._settings.items()]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.impatient", *arguments, f"out={self.out}"],
                cwd=REPOSITORY, env=self._environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._watch, args=(self.process,), daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Record descendants and actors, so that those that outlive the command are known."""
        while process.poll() is None:
            with suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    if child.pid not in self._family:
                        self._family[child.pid] = child
                        self._sessions |= set(re.findall(_SESSION, " ".join(child.cmdline())))
            for pid in self.pids().values():
                with suppress(psutil.Error):
                    self._family.setdefault(pid, psutil.Process(pid))
            time.sleep(_LOOK_EVERY_S)

    def signal(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def join(self) -> int:
        """Wait for the exit code of the job."""
        assert self.process is not None
        try:
            return self.process.wait(self.deadline_s)
        except subprocess.TimeoutExpired:
            raise self._error(f"the command did not end within {self.deadline_s:.0f} s") from None

    def close(self) -> None:
        """End the job and all of its processes."""
        processes = self.left_over(0.0)
        if self.process is not None and self.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                processes += psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def wait(self, ready: Callable[[], bool], what: str, deadline_s: float | None = None) -> None:
        """Wait for a condition of the running job; raise ChaosError if the job ends first."""
        assert self.process is not None
        limit = deadline_s or self.deadline_s
        deadline = time.monotonic() + limit
        while not ready():
            if (code := self.process.poll()) is not None:
                raise self._error(f"waiting for {what}, the run ended with {code}")
            if time.monotonic() > deadline:
                raise self._error(f"waited {limit:.0f} s for {what}")
            time.sleep(_POLL_S)

    def _error(self, what: str) -> ChaosError:
        lines = self.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        return ChaosError("\n".join([what, *lines]))

    # what it writes

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.out / "events.jsonl", {"event"})

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of every optimizer step."""
        return [
            line for line in read_lines(self.out / "metrics.jsonl", {"step"}) if "time/step" in line
        ]

    @property
    def step(self) -> int:
        """Newest step in metrics.jsonl; 0 before the first."""
        path = self.out / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 14)))
            whole = file.read().split(b"\n")[:-1]
        return int(json.loads(whole[-1])["step"]) if whole else 0

    def wait_for_steps(self, number: int) -> None:
        """Wait for this many more steps; a return to a checkpoint restarts the count."""
        start = self.step

        def done() -> bool:
            nonlocal start
            start = min(start, self.step)
            return self.step >= start + number

        self.wait(done, f"{number} more steps")

    @property
    def restarts(self) -> int:
        """Number of restarts of overdue groups so far."""
        return (self.out / "ledger.jsonl").read_bytes().count(b'"event":"begin_again"')

    def wait_for_a_restart(self) -> None:
        """Wait until a group has just restarted; some of the run's episodes hang."""
        before = self.restarts
        self.wait(lambda: self.restarts > before, "a group to restart")

    def pids(self) -> dict[str, int]:
        """Process id by name of each actor that has started and not died since."""
        found: dict[str, int] = {}
        for event in self.events:
            if event["event"] == "start":
                found[event["who"]] = event["pid"]
            elif event["event"] == "death":
                found.pop(event["who"], None)
        return {who: pid for who, pid in found.items() if psutil.pid_exists(pid)}

    # what must be true at the end

    def problems(self, steps: int, prompts_per_step: int) -> list[str]:
        """All problems of a run that should have finished after `steps` steps."""
        journal = self.out / "ledger.jsonl"
        found = [*audit(journal, steps=steps).problems, *KeptInJournal(journal).sampled_again]
        metrics = self.metrics
        if [int(step["step"]) for step in metrics] != list(range(1, steps + 1)):
            found.append(f"metrics.jsonl does not hold each of {steps} steps once, in order")
        groups = sum(int(step["train/groups"]) for step in metrics)
        if groups != steps * prompts_per_step:
            found.append(f"metrics.jsonl holds {groups} groups of {steps * prompts_per_step}")
        # Samples of a lost learner's weights would be newer than the weights that they train.
        early = [step["step"] for step in metrics if step["staleness/mean"] < 0]
        if early:
            found.append(f"steps {early} train samples of weights that were lost")
        for before, after in pairwise(metrics):
            if after["groups/watermark"] < before["groups/watermark"]:
                found.append(f"step {after['step']:.0f} trains groups of the step before it")
        summary = self.out / "summary.json"
        status = json.loads(summary.read_text())["status"] if summary.exists() else "none"
        if status != "finished":
            found.append(f"summary.json says {status}")
        left = self.left_over()
        return [*found, *(f"left behind: {described_process(process)}" for process in left)]

    def left_over(
        self, patience_s: float = _GONE_WITHIN_S, *, but_agents: bool = False
    ) -> list[psutil.Process]:
        """Processes of the jobs so far that are still alive after `patience_s`.

        Args:
            but_agents: leaves out Ray's own agents, which end late.
        """
        deadline = time.monotonic() + patience_s
        while True:
            alive = [process for process in self._relatives() if is_alive(process)]
            if but_agents:
                alive = [process for process in alive if _title(process) not in _AGENTS]
            if not alive or time.monotonic() >= deadline:
                return alive
            time.sleep(_LOOK_EVERY_S)

    def _relatives(self) -> list[psutil.Process]:
        """Known descendants, and processes that name the directory or a Ray session of a job."""
        marks = [str(self.out), *self._sessions]
        found = dict(self._family)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = [*process.cmdline(), *process.environ().values()]
                if process.pid != os.getpid() and any(m in word for m in marks for word in words):
                    found.setdefault(process.pid, process)
        return list(found.values())


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""
