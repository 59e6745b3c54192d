"""One SGLang HTTP server process, owned by this process and never outliving it.

    start      spawn the launcher (actors/sglang/launch.py); returns at once
    ready      polls the server until it is; a server that exits or takes too long is an error
               that ends with the last lines of its log
    stop       cuts the lifeline: the launcher kills the server and all it started

The lifeline is a pipe that the kernel closes however this process ends, `kill -9` included. Nothing
but its owner speaks to the server, so by default it listens on the loopback address only.
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

# Only the process that starts a server connects to it.
_HOST = "127.0.0.1"
_TAIL_LINES = 40
# Seconds that a server has to end by itself.
_STOP_S = 10.0
_EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)\b.*")
# Variables that people export for other systems, and that would break a server of ours.
_LEFT_OUT = {
    # Expandable segments: neither CUDA IPC nor the memory saver of engines that sleep can use them.
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    # Log-probs of samples at T = 1.
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    # /health would answer while the scheduler hangs.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
    "SGLANG_DIAG_BYPASS_HEALTH_GENERATE",
    # CPU kernels beside a GPU; servers on a CPU are given it.
    "SGLANG_USE_CPU_ENGINE",
}
# After a process of its own has died, SGLang would wait 65 s for py-spy and for CUDA's coredumps.
_NO_DIAGNOSTICS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
_DEAD_PART = re.compile(r"Subprocess (\w+) \(pid=\d+\) crashed with exit code (-?\d+)")
_TAIL_BYTES = 64 * 1024
_POLL_S = 0.25
_TAKEN = ("address already in use", "port is already in use")


class SglangServer:
    """A server process and the keys to it.

    Args:
        flags: SGLang's own command-line flags, without host, port and keys.
        environment: variables added to the server's environment.
        log_path: file for everything the server prints; None makes one without a name, which
            this process alone can read.
        start_deadline_s: longest the server may take to become ready.
        ready_path: what answers once it is.
        port_attempts: a server that finds its port taken is started anew, at another, until then.
        turn: on its GPUs, which it holds and its launcher holds beside this process.

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
        """Changes if the server finds its port taken."""
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
        # No session of its own: Ray then kills it with the actor's process group, too.
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
        """Returns once the server takes requests.

        Raises:
            EngineLost: it exited, or did not become ready in time; ends with its log's tail.
        """
        for attempt in range(1, self._port_attempts + 1):
            if await self._poll_until_ready():
                seconds = time.monotonic() - self._started
                logger.info("SGLang is ready at %s after %.1f s", self.url, seconds)
                return
            said = self._log_tail().lower()
            if attempt < self._port_attempts and any(taken in said for taken in _TAKEN):
                logger.warning("port %d was taken before the server could bind it", self._port)
                self._process = self._spawn()
                continue
            raise EngineLost(
                f"the SGLang server {self._state()} before it was ready. {self._last_words()}"
            )

    async def _poll_until_ready(self) -> bool:
        """False if the process has ended. Raises EngineLost at the deadline."""
        import aiohttp  # embedded engines do without

        headers = {"Authorization": f"Bearer {self.api_key}"}
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            while self.running:
                if time.monotonic() - self._started > self._start_deadline_s:
                    self.stop()
                    raise EngineLost(
                        f"the SGLang server was not ready within {self._start_deadline_s:.0f} s. "
                        + self._last_words()
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
        """The last lines of what the server, or one at another port before it, printed."""
        return "\n".join(self._log_end().splitlines()[-_TAIL_LINES:])

    def _log_end(self) -> str:
        log = self._log.fileno()
        size = os.fstat(log).st_size
        # At a position: where the server goes on writing is not moved.
        start = max(self._log_start, size - _TAIL_BYTES)
        return os.pread(log, _TAIL_BYTES, start).decode(errors="replace")

    def obituary(self) -> str:
        """Message on why a server that was running has ended."""
        return f"the SGLang server {self._state()}. {self._last_words()}"

    def _state(self) -> str:
        code = self._process.poll()
        if code is None:
            return "still runs"
        if code == -signal.SIGKILL:
            return cause_of_kill(self._log_end())
        return f"ended with code {code}"

    def _last_words(self) -> str:
        name = f" ({self._log_path})" if self._log_path else ""
        return f"The end of its log{name}:\n{self._log_tail()}"

    def stop(self) -> None:
        """Ends the server and every process it started; returns when it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its own children die with it: they asked the kernel to
            self._process.wait()
        self._claim.close()
        if self.turn is not None:
            self.turn.close()

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.stdin is not None:
            process.stdin.close()


def _inherited() -> dict[str, str]:
    """This process's environment, without what would break a server."""
    left_out = sorted(_LEFT_OUT & os.environ.keys())
    if left_out:
        logger.warning("SGLang is started without %s", ", ".join(left_out))
    return {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}


def cause_of_kill(log: str) -> str:
    """The end of a killed server, by its log: after an error its processes kill one another."""
    _, found, trace = log.rpartition("hit an exception: ")
    errors = [line for line in trace.splitlines() if _EXCEPTION_LINE.match(line)]
    if found and errors:
        return f"ended after an error of its own, {errors[-1]}"
    killed = "was killed (by the kernel, out of memory?)"
    if dead := _DEAD_PART.search(log):
        part, code = dead.groups()
        how = killed if int(code) == -signal.SIGKILL else f"ended with code {code}"
        return f"ended because its {part} {how}"
    return killed


def claim_port(host: str, port: int = 0) -> socket.socket:
    """A port, bound and not listened at, for as long as the socket lives; 0: any that is free.

    The kernel gives it to nobody else, and lets the server bind it, minutes later: of sockets with
    SO_REUSEADDR, several may be bound to an address as long as none of them listens.
    """
    claim = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    claim.bind((host, port))
    return claim


def _open_log(path: Path | None) -> IO[bytes]:
    """For appending and for reading, by the owner only: prompts may be printed."""
    if path is None:
        return tempfile.TemporaryFile(buffering=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "a+b", buffering=0, opener=partial(os.open, mode=0o600))
