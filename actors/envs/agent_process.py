"""Processes of agents, one per episode at a time, with limits of time, memory and output.

    a command          started for each episode; the problem on stdin, the result on stdout
    module:function    called in a process that is kept for later episodes (`agent_child`)

A guard (`distill.sandbox.guard`) ends the process of a command with all its children when the
process has answered, is late, or this process dies. A kept process is ended in the same way, except
that it continues after an answer. The guard creates the scratch folder, and removes it at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any, ClassVar, TypeVar

from distill.errors import ConfigError
from distill.json_values import loads
from distill.lookup import resolve_function
from distill.sandbox.bounded_calls import child_command
from distill.sandbox.guard import guarded, lifeline, search_path

_LARGEST_OUTPUT = 4 << 20
# Prefix of the names of scratch folders.
_SCRATCH = "isotherm-agent-"
_SHOWN = 300
# Seconds between two checks of the size of an agent's output.
_LOOK_S = 1.0
# Maximum number of idle kept processes of a program.
_MOST_IDLE = 64
# Limits the memory, in KiB, of a command and of each of its children.
_LIMITED = ("/bin/sh", "-c", 'ulimit -d "$0" && exec "$@"')


T = TypeVar("T")


class AgentFailed(Exception):
    """Raised if an agent gives no result; the message has the reason and the last output line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram:
    """An agent's program and its limits. Instances must be picklable.

    Attributes:
        command: a command line, or `module:function`.
        directory: working directory, on nodes that have it.
        time_s: time limit of an episode in seconds.
        memory_mb: data memory in MB that each process may use.
        may_give_feedback: True if the result, or the judge of the answer, may return feedback.
    """

    may_give_feedback: ClassVar[bool] = True

    command: str
    directory: str
    time_s: float
    memory_mb: int

    @property
    def working_directory(self) -> str:
        """`directory` if this node has it, else the working directory of this process."""
        return self.directory if os.path.isdir(self.directory) else os.getcwd()

    @property
    def is_function(self) -> bool:
        """True if the command is `module:function`."""
        module, colon, name = self.command.partition(":")
        return bool(colon) and all(part.isidentifier() for part in [*module.split("."), name])

    def kept_command(self) -> Sequence[str] | None:
        """Command of a process that is kept for later episodes; None: one process per episode."""
        if not self.is_function:
            return None
        return child_command("actors.envs.agent_child", self.command)

    def environment(self) -> dict[str, str]:
        """Environment of this process, with the run's interpreter first in PATH as `python`."""
        return {**os.environ, "PATH": search_path()}

    def guarded(self, command: Sequence[str], scratch: str) -> list[str]:
        """Wrap a command in the memory limit and in a guard, which removes `scratch`."""
        return guarded([*_LIMITED, str(self.memory_mb << 10), *command], scratch=scratch)

    def check(self) -> None:
        """Check that the program can be found.

        Raises:
            ConfigError: the program cannot be found.
        """
        if self.is_function:
            resolve_function("env.command", self.command, ())
            return
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(
                f"env.command={self.command!r} is not a command line: {error}"
            ) from error
        path = self.environment()["PATH"]
        if not words or not _found(words[0], path, self.working_directory):
            raise ConfigError(
                f"env.command={self.command!r} names a program that cannot be started; give a "
                "command line, such as 'python my_agent.py', or module:function",
            )

    async def run(self, problem: Mapping[str, Any], given: Mapping[str, str]) -> object:
        """Run one episode; return the JSON that the agent printed, or its function's result.

        Args:
            given: environment variables of the episode.

        Raises:
            AgentFailed: the agent crashed, was late, or gave no result.
        """
        if self.kept_command() is not None:
            return await self._called(problem, given)
        return await self._started(problem, given, _scratch())

    async def _started(
        self, problem: Mapping[str, Any], variables: Mapping[str, str], scratch: str
    ) -> object:
        # Files, not pipes: children of the agent may hold a pipe open.
        with TemporaryFile() as given, TemporaryFile() as printed, TemporaryFile() as stderr:
            given.write(_written(problem) + b"\n")
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                *self.guarded(shlex.split(self.command), scratch),
                stdin=given,
                stdout=printed,
                stderr=stderr,
                env=_environment(self, variables, scratch),
                cwd=self.working_directory,
                start_new_session=True,
                pass_fds=(lifeline(),),
            )
            try:
                await _until(process.wait(), self.time_s, printed, stderr)
            finally:
                with suppress(ProcessLookupError):  # the process has already been reaped
                    process.terminate()
                await process.wait()
            if process.returncode:
                words = _last_line(stderr) or _last_line(printed)
                raise AgentFailed(_with_last_line(_ending(process.returncode), words))
            line = _last_line(printed, _LARGEST_OUTPUT)
            if not line:
                raise AgentFailed(_with_last_line("printed nothing on stdout", _last_line(stderr)))
            try:
                return loads(line)
            except ValueError:
                raise AgentFailed(_with_last_line("its last line is not JSON", line)) from None

    async def _called(self, problem: Mapping[str, Any], variables: Mapping[str, str]) -> object:
        with _kept(self) as child:
            environment = {**variables, "TMPDIR": child.scratch}
            asked = _written({"problem": problem, "environment": environment})
            try:
                answer = await child.call(asked, self.time_s)
            finally:
                shutil.rmtree(child.scratch, ignore_errors=True)
        try:
            reply = loads(answer.decode())
        except ValueError as error:
            raise AgentFailed(f"returned no JSON: {error}") from None
        if "error" in reply:
            raise AgentFailed(f"raised {reply['error']}")
        return reply["result"]


def _found(program: str, path: str, directory: str) -> bool:
    if "/" in program:
        return os.access(Path(directory, program), os.X_OK)
    return any(os.access(Path(folder, program), os.X_OK) for folder in path.split(os.pathsep))


def _environment(
    program: AgentProgram, variables: Mapping[str, str], scratch: str
) -> dict[str, str]:
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
    return {
        **program.environment(),
        "NO_PROXY": direct,
        "no_proxy": direct,
        "PWD": program.working_directory,
        "TMPDIR": scratch,
        **variables,
    }


def _scratch() -> str:
    """Path of a scratch folder, which the guard of an agent makes and removes."""
    return str(Path(gettempdir(), _SCRATCH + secrets.token_hex(8)))


def _written(value: object) -> bytes:
    return json.dumps(value, default=str).encode()


def _ending(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}"


async def _until(ended: Coroutine[Any, Any, T], time_s: float, *outputs: IO[bytes]) -> T:
    """Wait for the agent's end, and check the size of its outputs periodically.

    Raises:
        AgentFailed: the agent is late, or prints too much.
    """
    waiting = asyncio.ensure_future(ended)
    deadline = time.monotonic() + time_s
    try:
        while not waiting.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                words = next(filter(None, map(_last_line, reversed(outputs))), "")
                raise AgentFailed(_with_last_line(f"took longer than {time_s:g} s", words))
            await asyncio.wait({waiting}, timeout=min(left_s, _LOOK_S))
            if any(os.fstat(output.fileno()).st_size > _LARGEST_OUTPUT for output in outputs):
                raise AgentFailed(f"printed more than {_LARGEST_OUTPUT >> 20} MiB")
        return waiting.result()
    finally:
        waiting.cancel()


def _last_line(output: IO[bytes], most: int = 4096) -> str:
    """Last line that is not blank within the last `most` bytes of a file."""
    size = os.fstat(output.fileno()).st_size
    kept = os.pread(output.fileno(), most, max(0, size - most))
    lines = kept.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _with_last_line(what: str, words: str) -> str:
    return f"{what}; its last line: {words[:_SHOWN]}" if words else what


class _KeptProcess:
    """A process that calls the agent's function, for one episode at a time.

    Attributes:
        scratch: folder for temporary files, which is removed after each episode, and by the guard
            if this process dies during an episode.
    """

    def __init__(self, program: AgentProgram) -> None:
        command = program.kept_command()
        assert command is not None
        self.scratch = _scratch()
        self._calls, calls = socket.socketpair()
        # In append mode, because it is truncated before each episode. Closed by `end`.
        self._stderr = TemporaryFile("a+b")  # noqa: SIM115
        with calls:
            self.process = subprocess.Popen(
                program.guarded(command, self.scratch),
                stdin=calls.fileno(),
                stdout=calls.fileno(),
                stderr=self._stderr,
                env=_environment(program, {}, gettempdir()),
                cwd=program.working_directory,
                start_new_session=True,
                pass_fds=(lifeline(),),
            )

    async def call(self, asked: bytes, time_s: float) -> bytes:
        """Send a call as one line, and return the line of its answer.

        Raises:
            AgentFailed: the answer is late or too long, or the process has ended.
        """
        os.ftruncate(self._stderr.fileno(), 0)
        reader, writer = await asyncio.open_connection(
            sock=self._calls.dup(), limit=_LARGEST_OUTPUT
        )
        try:
            writer.write(asked + b"\n")
            answer = await _until(reader.readline(), time_s, self._stderr)
        except ConnectionError:  # the process ended before it had read the call
            answer = b""
        except ValueError:
            raise AgentFailed(f"returned more than {_LARGEST_OUTPUT >> 20} MiB") from None
        finally:
            writer.close()
        if not answer.endswith(b"\n"):
            with suppress(subprocess.TimeoutExpired):  # it may only have closed its socket
                await asyncio.to_thread(self.process.wait, 1.0)
            words = _last_line(self._stderr)
            self.end()
            raise AgentFailed(_with_last_line(_ending(self.process.returncode), words))
        return answer

    def end(self) -> None:
        """End the process and its children. May be called several times."""
        self.process.terminate()
        self.process.wait()
        self._calls.close()
        self._stderr.close()


_idle: dict[AgentProgram, list[_KeptProcess]] = {}
# A forked process would share the sockets of its parent's children, so it starts its own children.
os.register_at_fork(after_in_child=_idle.clear)


@contextmanager
def _kept(program: AgentProgram) -> Iterator[_KeptProcess]:
    """Context manager for one call of a child, which is kept after an answer, else ended."""
    idle = _idle.setdefault(program, [])
    child = None
    while idle and child is None:
        child = idle.pop()
        if child.process.poll() is not None:
            child.end()
            child = None
    child = child or _KeptProcess(program)
    try:
        yield child
    except BaseException:  # also if the episode is cancelled: a late answer would reach the next
        child.end()
        raise
    if len(idle) < _MOST_IDLE:
        idle.append(child)
    else:
        child.end()
