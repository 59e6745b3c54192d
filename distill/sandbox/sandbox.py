"""Sandbox for untrusted Python, such as a model's: a process that can do little harm.

    result = await run_python("print(6 * 7)", limits=SandboxLimits(wall_s=5))

With `isolation="namespaces"`, of Linux, the program has

- no network, not even 127.0.0.1, and no sockets of other programs;
- a root directory of its own: the system's /usr and /lib, this interpreter and its packages, all
  read-only, and a /tmp of its own, gone afterwards. Homes, the run's files, /proc, /sys, most of
  /etc and the rest of /dev are not there;
- nothing of our environment, and none of our open files; it sees no process but its own, has no
  rights of root, and is another user (nobody) where we are root;
- on x86_64 and aarch64, no system calls that computing does not need (`distill.sandbox.seccomp`):
  no memory that escapes the limits (memfd, System V), no kernel keys, no sockets but of the machine
  and of the internet, of which there is none, no io_uring, tracing, mounts or namespaces of its
  own;
- limits: of time, and of CPU time, memory, files and processes by the kernel.
  CPU time and memory are counted by process, so that all of its `processes` together can use that
  many times as much: 16 GiB by default, and `files_mb` beside it. All of them are gone when
  `run_python` returns, is cancelled, or dies.

It does not protect from holes in the kernel behind the calls that are left, nor from what can be
learnt by measuring the machine, and whatever the interpreter's own directories hold can be read:
keep no secrets there. It needs Linux 5.14 and user namespaces; where there are none,
`isolation="process"` keeps the empty environment, the filter and the limits, and nothing else: the
program can use the network, read and write what we can, and end any process of ours (as root: any).
There, processes are counted together with all others of our user, and not at all for root; a
program that means to may outlive its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from distill.errors import ConfigError
from distill.lookup import known_names
from distill.sandbox.seccomp import filter_program

Isolation = Literal["namespaces", "process"]
# error: it ended with another exit code than 0
Outcome = Literal["ok", "error", "time", "memory", "output"]

_ISOLATIONS = ("namespaces", "process")
_LAUNCHER = str(Path(__file__).with_name("sandbox_child.py"))
_CHUNK = 1 << 16
# What is told to end ends at once; this only keeps us from waiting for ever.
_END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Resource limits of a program.

    CPU time (whole seconds) and memory (of addresses, which is more than what is in use) are by
    process; `files_mb` is all of /tmp; output is by stream; threads count as processes.

    Raises:
        ConfigError: names the field that is out of range.
    """

    cpu_s: int = 10
    wall_s: float = 20.0
    memory_mb: int = 1024
    output_bytes: int = 1 << 18
    files_mb: int = 64
    processes: int = 16
    isolation: Isolation = "namespaces"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "isolation" and not value > 0:
                raise ConfigError(f"sandbox {name} must be positive, got {value}")
        if self.memory_mb < 64:
            raise ConfigError(
                f"sandbox memory_mb must be at least 64, which Python itself needs, got "
                f"{self.memory_mb}"
            )
        if self.isolation not in _ISOLATIONS:
            raise ConfigError(
                f"unknown sandbox isolation {self.isolation!r}; "
                f"{known_names(self.isolation, _ISOLATIONS)}"
            )

    def said_of(self, outcome: Literal["time", "memory", "output"]) -> str:
        """Why we ended a program, for whoever wrote it."""
        if outcome == "time":
            return f"the program took too long: {self.wall_s:g} s, {self.cpu_s} s of computing"
        if outcome == "memory":
            return f"the program needed more than {self.memory_mb} MB of memory"
        return f"the program printed more than {self.output_bytes} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """Outcome of a program. `exit_code` is minus the signal, None where we ended it."""

    stdout: str
    stderr: str
    exit_code: int | None
    outcome: Outcome
    seconds: float


async def run_python(
    source: str, *, stdin: str = "", limits: SandboxLimits | None = None
) -> SandboxResult:
    """Runs the program in a fresh interpreter; what it wrote until its end, or until a limit.

    Cancelled, it ends the program. `wall_s` includes the start, some hundredths of a second.

    Raises:
        ConfigError: the sandbox cannot be made on this machine.
    """
    limits = limits or SandboxLimits()
    with _prepared(source, limits) as (spec, report, report_end):
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *_command(spec, report_end),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            **_surroundings(report_end),
        )
        run = _Run(process, limits)
        try:
            await run.until_its_end(spec + stdin.encode("utf-8", "replace"))
        finally:
            await run.end()
        os.set_blocking(report, False)
        return run.result(_told(report), time.monotonic() - began)


def require_sandbox(isolation: Isolation = "namespaces") -> None:
    """Makes the sandbox once per process, to know that it can be made: a tenth of a second.

    Raises:
        ConfigError: it cannot, and what would help.
    """
    failure = _failure(isolation)
    if failure is not None:
        raise ConfigError(failure)


@lru_cache
def _failure(isolation: Isolation) -> str | None:
    limits = SandboxLimits(isolation=isolation)
    with _prepared("", limits) as (spec, report, report_end):
        done = subprocess.run(
            _command(spec, report_end),
            input=spec,
            capture_output=True,
            timeout=60,
            **_surroundings(report_end),
        )
        os.set_blocking(report, False)
        try:
            told = _told(report)
        except ConfigError as error:
            return str(error)
    if told.get("exit_code") != 0:
        return _cannot_be_made(f"{told or done.returncode}: {done.stderr.decode()[-400:]}")
    return None


@contextmanager
def _prepared(source: str, limits: SandboxLimits) -> Iterator[tuple[bytes, int, int]]:
    """The launcher's input, and both ends of the pipe it reports through."""
    if sys.platform != "linux":
        raise ConfigError(f"the sandbox needs Linux; this is {sys.platform}")
    spec: dict[str, Any] = {**asdict(limits), "source": source, "python": sys.executable}
    spec["visible"] = _interpreter_directories()
    spec["filter"] = filter_program().hex()
    report, report_end = os.pipe()
    try:
        if limits.isolation == "namespaces":
            yield json.dumps(spec).encode(), report, report_end
        else:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
                spec["directory"] = directory
                yield json.dumps(spec).encode(), report, report_end
    finally:
        os.close(report)
        os.close(report_end)


@lru_cache
def _interpreter_directories() -> list[str]:
    """Directories of the interpreter and its packages, and each link on the way to it."""
    found = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    found |= {os.path.realpath(path) for path in found}
    path = sys.executable
    while True:
        found.add(os.path.dirname(path))
        if not os.path.islink(path):
            return sorted(found)
        path = os.path.join(os.path.dirname(path), os.readlink(path))


def _command(spec: bytes, report_end: int) -> list[str]:
    return [sys.executable, "-I", "-S", "-B", _LAUNCHER, str(len(spec)), str(report_end)]


def _surroundings(report_end: int) -> dict[str, Any]:
    return {"env": {}, "cwd": "/", "start_new_session": True, "pass_fds": (report_end,)}


def _told(report: int) -> dict[str, Any]:
    """The launcher's first line; empty where it was ended before.

    Raises:
        ConfigError: the sandbox could not be made.
    """
    try:
        line = os.read(report, _CHUNK).partition(b"\n")[0]
    except BlockingIOError:
        return {}
    told = json.loads(line)
    if "error" in told:
        raise ConfigError(_cannot_be_made(told["error"]))
    return told


def _cannot_be_made(why: str) -> str:
    return (
        f"the sandbox cannot be made on this machine: {why}. It needs Linux 5.14 and user "
        "namespaces: `sysctl user.max_user_namespaces` above 0, on Ubuntu "
        "kernel.apparmor_restrict_unprivileged_userns=0, in a container a seccomp profile that "
        'allows unshare and mount. Or accept with isolation="process" (tool `python:process`) '
        "that programs use your network and your files"
    )


class _Run:
    """One running program."""

    def __init__(self, process: asyncio.subprocess.Process, limits: SandboxLimits) -> None:
        self._process = process
        self._limits = limits
        self._outputs: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._ended: Outcome | None = None

    async def until_its_end(self, given: bytes) -> None:
        try:
            async with asyncio.timeout(self._limits.wall_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._feed(given))
                tasks.create_task(self._collect("stdout"))
                tasks.create_task(self._collect("stderr"))
                tasks.create_task(self._process.wait())
        except TimeoutError:
            self._ended = self._ended or "time"

    async def _feed(self, given: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        # The program need not read its input, and may be gone.
        with suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(given)
            await stdin.drain()
        stdin.close()

    async def _collect(self, name: Literal["stdout", "stderr"]) -> None:
        output, room = self._outputs[name], self._limits.output_bytes
        while chunk := await self._stream(name).read(_CHUNK):
            output += chunk[: room - len(output)]
            if len(output) == room and self._ended is None:
                self._ended = "output"
                self._signal()

    def _stream(self, name: Literal["stdout", "stderr"]) -> asyncio.StreamReader:
        stream = getattr(self._process, name)
        assert stream is not None
        return stream

    def _signal(self, strongest: bool = False) -> None:
        """Ends all of it: by the kernel, or by a launcher that knows its children."""
        with suppress(ProcessLookupError):
            if strongest or self._limits.isolation == "namespaces":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                os.kill(self._process.pid, signal.SIGTERM)

    async def end(self) -> None:
        """Whoever held the other end of the pipes is gone then."""
        if self._process.returncode is None:
            self._signal()
        try:
            async with asyncio.timeout(_END_S):
                for name in ("stdout", "stderr"):
                    while await self._stream(name).read(_CHUNK):
                        pass
                await self._process.wait()
        except TimeoutError:
            self._signal(strongest=True)

    def result(self, told: dict[str, Any], seconds: float) -> SandboxResult:
        texts = {name: bytes(out).decode(errors="replace") for name, out in self._outputs.items()}
        exit_code = None if self._ended else told.get("exit_code")
        return SandboxResult(
            **texts,
            exit_code=exit_code,
            outcome=self._ended or self._outcome(exit_code, told, texts["stderr"]),
            seconds=seconds,
        )

    def _outcome(self, exit_code: int | None, told: dict[str, Any], stderr: str) -> Outcome:
        if exit_code == 0:
            return "ok"
        killed = exit_code == -signal.SIGKILL
        if exit_code == -signal.SIGXCPU or (killed and told["cpu_s"] >= self._limits.cpu_s):
            return "time"
        lines = stderr.rstrip().rsplit("\n", 1)
        # Without an exit code, or by a signal that is not ours: the kernel had no memory left.
        if exit_code is None or killed or lines[-1].startswith("MemoryError"):
            return "memory"
        return "error"
