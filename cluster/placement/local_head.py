"""Local Ray of a run, started by a separate process: the head.

    driver -starts-> head -starts-> GCS, raylet, Ray's workers

Ray starts while the driver imports torch. When the driver ends or is killed, the head's standard
input is closed, and the head shuts Ray down; a driver that has finished does not wait for this. The
head has its own session: timeout(1), shells and batch systems send signals to a whole process
group, and after a signal the driver still needs Ray to write a checkpoint.

The head's process runs `run_head`. No slow modules are imported at module level.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

from cluster.placement.forked_workers import forked_workers, parent_of_workers
from distill.errors import ConfigError

# Attempts to start Ray, whose processes must find each other within 30 s. A busy machine may need
# longer.
_STARTS = 3
# Time limits for Ray's start and shutdown, seconds. Afterwards the head is killed, and the kernel
# kills its children, raylet and GCS: Ray waits without a deadline for a stuck process.
START_S = 180
END_S = 30
# Additional time that the driver waits for a start, so that the head's own alarm comes first.
_ALARM_S = 10
# Time limit for a start after the driver has ended: without the parent of workers it may hang.
ABANDONED_S = 1

# `-m` would search modules in the working directory, which may not be on the driver's path.
_PROGRAM = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from {__name__} import run_head
run_head(int(sys.argv[2]))
"""

_running: LocalHead | None = None


class LocalHead:
    """A head process. `address` waits until Ray has started."""

    def __init__(self, cpus: int) -> None:
        self._workers = parent_of_workers()
        # By default, Ray gives workers a lower priority than all other processes, and reports every
        # actor call for its lists of tasks, which are not used here.
        defaults = {
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_task_events_report_interval_ms": "0",
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(cpus)],
                env={**defaults, **os.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            if self._workers is not None:
                self._workers.start()
        except BaseException:  # above all a signal, during the imports of `start`
            if self._workers is not None:
                self._workers.end()
            raise
        self._address: str | None = None

    def address(self) -> str:
        """HOST:PORT of the head. Waits until Ray has started.

        Raises:
            ConfigError: Ray cannot start here; the message has a remedy.
        """
        if self._address is None:
            self._address = self._read_address()
        return self._address

    def _read_address(self) -> str:
        assert self._process.stdout is not None
        late = {"error": f"not ready within {START_S} s, possibly because the machine is busy"}
        # The head's own alarm ends a head that is late, but not one that is stopped (SIGSTOP).
        if not select.select([self._process.stdout], [], [], START_S + _ALARM_S)[0]:
            answer = late
        elif line := self._process.stdout.readline():
            answer = json.loads(line)
        elif (code := self._process.wait(START_S)) == -signal.SIGALRM:
            answer = late
        else:
            answer = {"error": f"the process that starts it ended with {code}"}
        if "error" in answer:
            raise ConfigError(f"Ray cannot start on this machine: {answer['error']}")
        return answer["address"]

    def end(self) -> None:
        """Make the head shut Ray down, without waiting for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        if self._workers is not None:
            self._workers.end()


@contextmanager
def local_head(cpus: int) -> Iterator[LocalHead]:
    """Context manager with the head of this process: a running one, or a new one."""
    global _running
    if _running is not None:
        yield _running
        return
    _running = LocalHead(cpus)
    try:
        yield _running
    finally:
        _running.end()
        _running = None


def run_head(cpus: int) -> None:
    """Run the head's process: start Ray, print its address or error as JSON, and wait until
    standard input is closed."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray's own output goes to standard error
    signal.alarm(START_S)
    abandoned = Thread(target=_until_abandoned, daemon=True)
    abandoned.start()
    import ray

    try:
        reply = {"address": _start(cpus)}
    except Exception as error:  # Ray raises also bare Exceptions
        reply = {"error": f"{error}. {_remedy(error)}"}
    with suppress(BrokenPipeError):  # the driver has ended
        print(json.dumps(reply), file=stdout, flush=True)
        stdout.close()
    _print_nothing()  # otherwise a shell would wait for this process, too
    signal.alarm(0)
    abandoned.join()
    signal.alarm(END_S)
    ray.shutdown()


def _until_abandoned() -> None:
    """Wait until standard input is closed. Then limit the time of a start, and drop its output."""
    sys.stdin.read()
    signal.alarm(ABANDONED_S)
    _print_nothing()


def _print_nothing() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)


def _start(cpus: int) -> str:
    """Start Ray; return its address."""
    import ray

    suppress_token_notice()
    for start in range(1, _STARTS + 1):
        try:
            with forked_workers():
                # Without an address, Ray would join the cluster that was last started here.
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
            break
        except Exception as error:
            if start == _STARTS or "timed out during startup" not in str(error):
                raise
            print("Ray did not start in time on this machine; starting it again", file=sys.stderr)
            ray.shutdown()
    return ray.get_runtime_context().gcs_address


def suppress_token_notice() -> None:
    """Suppress Ray's message that token authentication is on, which needs no action."""
    setup = "ray._private.authentication.authentication_token_setup"
    on = "Token authentication is enabled"
    logging.getLogger(setup).addFilter(lambda record: not record.getMessage().startswith(on))


def _remedy(error: Exception) -> str:
    import resource

    from ray._common.utils import get_default_system_temp_dir

    directory = get_default_system_temp_dir()
    if isinstance(error, OSError):
        return (
            f"It writes to {directory} (set RAY_TMPDIR to change it) and, unless "
            "RAY_AUTH_MODE=disabled, to ~/.ray in HOME"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return f"Each of its processes may map at most {limit >> 20} MiB: lift ulimit -v"
    return f"Its logs are in {directory}/ray/session_latest/logs"
