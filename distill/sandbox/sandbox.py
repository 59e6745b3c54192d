"""Sandbox for untrusted Python, such as a model's output: an isolated process with limits.

    result = await run_python("print(6 * 7)", limits=SandboxLimits(wall_s=5))

With `isolation="namespaces"` (Linux), the program has

- no network, not even 127.0.0.1, and no sockets of other programs;
- a root directory of its own: the system's /usr and /lib, this interpreter and its packages, all
  read-only, and its own /tmp, which is removed afterwards. Homes, the run's files, /proc, /sys,
  most of /etc and the rest of /dev do not exist;
- none of the caller's environment variables and open files; it sees only its own processes, has no
  root privileges, and runs as another user (nobody) if the caller is root;
- on x86_64 and aarch64, no system calls that computing does not need (`distill.sandbox.seccomp`):
  no memory outside the limits (memfd, System V), no kernel keys, only local and internet sockets
  (without a network), no io_uring, tracing, mounts or new namespaces;
- limits: of time, and, enforced by the kernel, of CPU time, memory, files and processes. CPU time
  and memory are limited per process, so all `processes` together can use that many times as much:
  16 GiB by default, plus `files_mb`. All of them have ended when `run_python` returns, is
  cancelled, or dies.

The sandbox protects neither from kernel vulnerabilities behind the remaining calls nor from side
channels of the machine. The program can read the interpreter's own directories: keep no secrets
there. The sandbox needs Linux 5.14 and user namespaces. Without them, `isolation="process"`
provides only the empty environment, the filter and the limits: the program can use the network,
read and write the caller's files, and end any process of the caller's user (for root: any process).
Its processes are counted together with all others of that user, and not at all for root; a program
can deliberately outlive its termination.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from distill.errors import ConfigError
from distill.lookup import known_names
from distill.sandbox.guard import guarded, lifeline
from distill.sandbox.seccomp import filter_program

Isolation = Literal["namespaces", "process"]
# error: the program ended with another exit code than 0
Outcome = Literal["ok", "error", "time", "memory", "output"]

_ISOLATIONS = ("namespaces", "process")
_LAUNCHER = str(Path(__file__).with_name("sandbox_child.py"))
_CHUNK = 1 << 16
# A killed process ends immediately; this limit only prevents an endless wait.
_END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Resource limits of a program.

    CPU time (whole seconds) and memory (address space, which exceeds the memory in use) are limited
    per process; `files_mb` covers all of /tmp; output is limited per stream; threads count as
    processes.

    Raises:
        ConfigError: a field is out of range; the message names it.
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
                raise ConfigError(f"sandbox {name} must be positive, got {value}", field=name)
        if self.memory_mb < 64:
            raise ConfigError(
                f"sandbox memory_mb must be at least 64, which Python needs, got {self.memory_mb}",
                field="memory_mb",
            )
        if self.isolation not in _ISOLATIONS:
            raise ConfigError(
                f"unknown sandbox isolation {self.isolation!r}; "
                f"{known_names(self.isolation, _ISOLATIONS)}",
                field="isolation",
            )

    def message_for(self, outcome: Literal["time", "memory", "output"]) -> str:
        """Message for the program's author: the limit that the program exceeded."""
        if outcome == "time":
            return f"the program took too long: {self.wall_s:g} s, {self.cpu_s} s of computing"
        if outcome == "memory":
            return f"the program needed more than {self.memory_mb} MB of memory"
        return f"the program printed more than {self.output_bytes} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """Outcome of a program.

    `exit_code` is minus the signal if one ended the program, and None if the sandbox ended it.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    outcome: Outcome


async def run_python(
    source: str, *, stdin: str = "", limits: SandboxLimits | None = None
) -> SandboxResult:
    """Run a program in a new interpreter until it ends or exceeds a limit; return its output.

    Cancellation ends the program. `wall_s` includes the start, some hundredths of a second.

    Raises:
        ConfigError: the sandbox cannot be created on this machine.
    """
    limits = limits or SandboxLimits()
    with _prepared(source, limits) as (spec, report, report_end):
        process = await asyncio.create_subprocess_exec(
            *_command(spec, report_end, limits),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            **_process_options(report_end, limits),
        )
        run = _SandboxedProgram(process, limits)
        try:
            await run.wait_until_end(spec + stdin.encode("utf-8", "replace"))
        finally:
            await run.end()
        os.set_blocking(report, False)
        return run.result(_read_report(report))


def require_sandbox(isolation: Isolation = "namespaces") -> None:
    """Check, once per process, that the sandbox can be created; takes a tenth of a second.

    Raises:
        ConfigError: the sandbox cannot be created; the message has the remedy.
    """
    failure = _failure(isolation)
    if failure is not None:
        raise ConfigError(failure)


@lru_cache
def _failure(isolation: Isolation) -> str | None:
    limits = SandboxLimits(isolation=isolation)
    with _prepared("", limits) as (spec, report, report_end):
        done = subprocess.run(
            _command(spec, report_end, limits),
            input=spec,
            capture_output=True,
            timeout=60,
            **_process_options(report_end, limits),
        )
        os.set_blocking(report, False)
        try:
            outcome = _read_report(report)
        except ConfigError as error:
            return str(error)
    if outcome.get("exit_code") != 0:
        return _sandbox_error(f"{outcome or done.returncode}: {done.stderr.decode()[-400:]}")
    return None


@contextmanager
def _prepared(source: str, limits: SandboxLimits) -> Iterator[tuple[bytes, int, int]]:
    """Yield the launcher's input, and both ends of the pipe for its report."""
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
    """Directories of the interpreter and its packages, and of each link that leads to it."""
    found = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    found |= {os.path.realpath(path) for path in found}
    path = sys.executable
    while True:
        found.add(os.path.dirname(path))
        if not os.path.islink(path):
            return sorted(found)
        path = os.path.join(os.path.dirname(path), os.readlink(path))


def _command(spec: bytes, report_end: int, limits: SandboxLimits) -> list[str]:
    launcher = [sys.executable, "-I", "-S", "-B", _LAUNCHER, str(len(spec)), str(report_end)]
    return guarded(launcher) if limits.isolation == "process" else launcher


def _process_options(report_end: int, limits: SandboxLimits) -> dict[str, Any]:
    descriptors = (report_end, lifeline()) if limits.isolation == "process" else (report_end,)
    return {"env": {}, "cwd": "/", "start_new_session": True, "pass_fds": descriptors}


def _read_report(report: int) -> dict[str, Any]:
    """First line of the launcher's report; empty if the launcher was ended before.

    Raises:
        ConfigError: the sandbox could not be created.
    """
    try:
        line = os.read(report, _CHUNK).partition(b"\n")[0]
    except BlockingIOError:
        return {}
    outcome = json.loads(line)
    if "error" in outcome:
        raise ConfigError(_sandbox_error(outcome["error"]))
    return outcome


def _sandbox_error(why: str) -> str:
    return (
        f"the sandbox cannot be created on this machine: {why}. It needs Linux 5.14 and user "
        "namespaces: `sysctl user.max_user_namespaces` above 0, on Ubuntu "
        "kernel.apparmor_restrict_unprivileged_userns=0, in a container a seccomp profile that "
        'allows unshare and mount. With isolation="process" (tool `python:process`) programs '
        "run without it, with access to your network and files"
    )


class _SandboxedProgram:
    """One running program."""

    def __init__(self, process: asyncio.subprocess.Process, limits: SandboxLimits) -> None:
        self._process = process
        self._limits = limits
        self._outputs: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._ended: Outcome | None = None

    async def wait_until_end(self, given: bytes) -> None:
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
        # The program may have ended without reading its input.
        with suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(given)
            await stdin.drain()
        stdin.close()

    async def _collect(self, name: Literal["stdout", "stderr"]) -> None:
        output = self._outputs[name]
        while chunk := await self._stream(name).read(_CHUNK):
            room = self._limits.output_bytes - len(output)
            output += chunk[:room]
            if len(chunk) > room and self._ended is None:
                self._ended = "output"
                self._signal()

    def _stream(self, name: Literal["stdout", "stderr"]) -> asyncio.StreamReader:
        stream = getattr(self._process, name)
        assert stream is not None
        return stream

    def _signal(self, strongest: bool = False) -> None:
        """End the program and its descendants: by SIGKILL to the group, or through the guard."""
        with suppress(ProcessLookupError):
            if strongest or self._limits.isolation == "namespaces":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                os.kill(self._process.pid, signal.SIGTERM)

    async def end(self) -> None:
        """End the program, and wait until no process has the other ends of its pipes open."""
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

    def result(self, report: dict[str, Any]) -> SandboxResult:
        texts = {name: bytes(out).decode(errors="replace") for name, out in self._outputs.items()}
        exit_code = None if self._ended else report.get("exit_code")
        return SandboxResult(
            **texts,
            exit_code=exit_code,
            outcome=self._ended or self._outcome(exit_code, report, texts["stderr"]),
        )

    def _outcome(self, exit_code: int | None, report: dict[str, Any], stderr: str) -> Outcome:
        if exit_code == 0:
            return "ok"
        killed = exit_code == -signal.SIGKILL
        if exit_code == -signal.SIGXCPU or (killed and report["cpu_s"] >= self._limits.cpu_s):
            return "time"
        lines = stderr.rstrip().rsplit("\n", 1)
        # No exit code, or a signal that the sandbox did not send: the kernel was out of memory.
        if exit_code is None or killed or lines[-1].startswith("MemoryError"):
            return "memory"
        return "error"
