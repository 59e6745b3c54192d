"""SGLang HTTP server process, owned by this process and never outliving it.

    start      spawn the launcher (actors/sglang/launch.py); return immediately
    ready      poll the server until it is ready; if it exits or takes too long, raise an error
               that ends with the last lines of its log
    stop       close the lifeline: the launcher kills the server and all its children

The lifeline is a pipe that the kernel closes however this process ends, `kill -9` included. Only
the owner connects to the server, so it listens on the loopback address.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from actors.sglang.installed import python_path, require_sglang
from distill.errors import EngineLost
from distill.gpu_turn import GpuTurn

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_TAIL_LINES = 40
# Seconds for the launcher to end after its lifeline is closed.
_STOP_S = 10.0
_EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)\b.*")
# Variables that users export for other programs and that would break the server.
_LEFT_OUT = {
    # Expandable segments work neither with CUDA IPC nor with the memory saver of sleeping engines.
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    # Log-probs of samples would be at T = 1.
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    # /health would answer while the scheduler hangs.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
    "SGLANG_DIAG_BYPASS_HEALTH_GENERATE",
    # A server on a GPU would use CPU kernels. Servers on a CPU get the variable explicitly.
    "SGLANG_USE_CPU_ENGINE",
}
# Otherwise SGLang waits 65 s for py-spy and CUDA coredumps after one of its processes has died.
_NO_DIAGNOSTICS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
_DEAD_PART = re.compile(r"Subprocess (\w+) \(pid=\d+\) crashed with exit code (-?\d+)")
_TAIL_BYTES = 64 * 1024
_POLL_S = 0.25
_TAKEN = ("address already in use", "port is already in use")


class SglangServer:
    """Server process with its URL and keys.

    Args:
        flags: command-line flags of SGLang, without host, port and keys.
        environment: variables added to the server's environment.
        log_path: file for the output of the server; None: an unnamed file that only this process
            can read.
        start_deadline_s: longest time in seconds until the server is ready.
        ready_path: URL path that returns status 200 when the server is ready.
        port_attempts: maximum number of starts. If the port is taken, the server is started again
            at another port.
        turn: turn on the server's GPUs, which this process and the launcher both hold.

    Raises:
        ConfigError: SGLang is not installed.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        start_deadline_s: float = 600.0,
        ready_path: str = "/ready",
        port_attempts: int = 3,
        turn: GpuTurn | None = None,
    ) -> None:
        require_sglang()
        self.turn = turn
        self._flags = list(flags)
        self._environment = dict(environment or {})
        self._start_deadline_s = start_deadline_s
        self._ready_path, self._port_attempts = ready_path, port_attempts
        self.api_key = secrets.token_urlsafe(24)
        self.admin_api_key = secrets.token_urlsafe(24)
        self._log_path = log_path
        self._log = _open_log(log_path)
        self._log_start = os.fstat(self._log.fileno()).st_size  # earlier servers may have written
        self._process = self._spawn()

    @property
    def url(self) -> str:
        """URL of the server. It changes if the server is restarted because its port was taken."""
        return f"http://{_HOST}:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._claim = claim_port(_HOST)
        self._port = self._claim.getsockname()[1]
        self._started = time.monotonic()
        flags = [*self._flags, "--host", _HOST, "--port", str(self._port)]
        # No new session, so that Ray kills the launcher with the actor's process group, too.
        process = subprocess.Popen(
            [sys.executable, "-m", "actors.sglang.launch"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[] if self.turn is None else [self.turn.file],
            env={
                **_NO_DIAGNOSTICS,
                **_inherited(),
                **self._environment,
                "PYTHONPATH": python_path(),
            },
        )
        order = {
            "flags": flags,
            "api_key": self.api_key,
            "admin_api_key": self.admin_api_key,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        return process

    async def ready(self) -> None:
        """Wait until the server accepts requests.

        Raises:
            EngineLost: the server exited, or was not ready in time. The message ends with the end
                of the server's log.
        """
        for attempt in range(1, self._port_attempts + 1):
            if await self._poll_until_ready():
                seconds = time.monotonic() - self._started
                logger.info("SGLang is ready at %s after %.1f s", self.url, seconds)
                return
            log = self._log_tail().lower()
            if attempt < self._port_attempts and any(taken in log for taken in _TAKEN):
                logger.warning("port %d was taken before the server could bind it", self._port)
                self._process = self._spawn()
                continue
            raise EngineLost(
                f"the SGLang server {self._state()} before it was ready. {self._log_excerpt()}"
            )

    async def _poll_until_ready(self) -> bool:
        """Return True when the server is ready, False if it has ended.

        Raises:
            EngineLost: the start deadline has passed.
        """
        import aiohttp  # imported here: embedded engines do not need it

        headers = {"Authorization": f"Bearer {self.api_key}"}
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while self.running:
                if time.monotonic() - self._started > self._start_deadline_s:
                    self.stop()
                    raise EngineLost(
                        f"the SGLang server was not ready within {self._start_deadline_s:.0f} s. "
                        + self._log_excerpt()
                    )
                try:
                    async with session.get(self.url + self._ready_path) as response:
                        if response.status == 200:
                            return True
                except (aiohttp.ClientError, TimeoutError):
                    pass  # not listening yet
                await asyncio.sleep(_POLL_S)
        return False

    def _log_tail(self) -> str:
        """Last lines of the log of this server and of its earlier starts at other ports."""
        return "\n".join(self._log_end().splitlines()[-_TAIL_LINES:])

    def _log_end(self) -> str:
        log = self._log.fileno()
        size = os.fstat(log).st_size
        # pread does not move the file position, at which the server continues to write.
        start = max(self._log_start, size - _TAIL_BYTES)
        return os.pread(log, _TAIL_BYTES, start).decode(errors="replace")

    def exit_report(self) -> str:
        """Message with the reason why the server has ended, and the end of its log."""
        return f"the SGLang server {self._state()}. {self._log_excerpt()}"

    def _state(self) -> str:
        code = self._process.poll()
        if code is None:
            return "still runs"
        if code == -signal.SIGKILL:
            return cause_of_kill(self._log_end())
        return f"ended with code {code}"

    def _log_excerpt(self) -> str:
        name = f" ({self._log_path})" if self._log_path else ""
        return f"The end of its log{name}:\n{self._log_tail()}"

    def stop(self) -> None:
        """Stop the server and all its children; return when the server has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel kills its children with it, as they requested
            self._process.wait()
        self._claim.close()
        if self.turn is not None:
            self.turn.close()

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.stdin is not None:
            process.stdin.close()


def _inherited() -> dict[str, str]:
    """Environment of this process without variables that would break a server."""
    left_out = sorted(_LEFT_OUT & os.environ.keys())
    if left_out:
        logger.warning("SGLang is started without %s", ", ".join(left_out))
    return {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}


def cause_of_kill(log: str) -> str:
    """Cause of the end of a killed server, from its log.

    After an error, the processes of a server kill each other, so the signal alone is no cause.
    """
    _, found, trace = log.rpartition("hit an exception: ")
    errors = [line for line in trace.splitlines() if _EXCEPTION_LINE.match(line)]
    if found and errors:
        return f"ended after an internal error, {errors[-1]}"
    killed = "was killed (by the kernel, out of memory?)"
    if dead := _DEAD_PART.search(log):
        part, code = dead.groups()
        how = killed if int(code) == -signal.SIGKILL else f"ended with code {code}"
        return f"ended because its {part} {how}"
    return killed


def claim_port(host: str, port: int = 0) -> socket.socket:
    """Reserve a port (0: any free port) by a socket that is bound but does not listen.

    While the socket is open, the kernel assigns the port to no other process, but the server can
    bind it, even minutes later: several sockets with SO_REUSEADDR may be bound to the same address
    as long as none of them listens.
    """
    claim = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    claim.bind((host, port))
    return claim


def _open_log(path: Path | None) -> IO[bytes]:
    """Open a log for appending and reading, with mode 0600 because it may contain prompts."""
    if path is None:
        return tempfile.TemporaryFile(buffering=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "a+b", buffering=0, opener=partial(os.open, mode=0o600))
