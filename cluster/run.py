"""The driver: starts Ray, drives the learner step by step, and tells the truth at the end.

prompts --> rollout workers --> policy engines         each group: sampled, scored, queued
                  |        \\--> teacher engines
                  v
            GroupQueue (bounded by credit)
                  |
                  v
driver --> learner.step: take -> loss -> optimizer -> publish to policy engines -> free slots
   |
   +--> metrics.jsonl, progress, W&B, checkpoints, evaluation

driver    waits for: the learner's step      unblocked by: groups (see cluster/queue.py)
          and watches every worker, so that a failure anywhere ends the wait
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.build import cpu_actors
from cluster.config import CommonConfig
from cluster.queue import QueueClosed
from distill.errors import IsothermError

# How often a wait looks at signals and workers, seconds.
_POLL_S = 0.5
# How long an actor may take to prove that it is alive when the run has failed, seconds.
_PING_S = 5.0


class RunFailed(RuntimeError):
    """The run ended early. The message says which part failed and what to do."""


class Interrupted(Exception):
    """The user (SIGINT) or the scheduler (SIGTERM) asked the run to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class Signals:
    """Remembers the first SIGINT or SIGTERM, for the driver to act on between waits."""

    def __init__(self) -> None:
        self.received: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install after `ray.init`, which takes SIGTERM itself. A second signal ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # handlers can be set in the main thread only; a test's thread goes without
            return
        previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signum


@contextmanager
def ray_cluster(config: CommonConfig) -> Iterator[None]:
    """Connects to the cluster that the environment names, or starts one here and ends it again."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    already = ray.is_initialized()
    if not already:
        namespace = f"isotherm-{os.getpid()}-{time.time_ns()}"
        if os.environ.get("RAY_ADDRESS"):
            ray.init(namespace=namespace, log_to_driver=True)
        else:
            # A machine of few cores still runs every actor; they share its cores.
            cpus = max(os.cpu_count() or 1, cpu_actors(config))
            ray.init(
                namespace=namespace,
                num_cpus=cpus,
                include_dashboard=False,
                logging_level=logging.WARNING,
            )
    try:
        yield
    finally:
        if not already:
            ray.shutdown()


@dataclass(kw_only=True)
class Driver:
    """Waits for actor calls while watching signals, workers, and every actor's life."""

    actors: Mapping[str, Any]
    signals: Signals
    background: dict[Any, str] = field(default_factory=dict)

    def watch(self, name: str, reference: Any) -> None:
        """A call that runs beside the others; if it fails, whatever is waited for fails with it."""
        self.background[reference] = name

    def call(self, what: str, reference: Any) -> Any:
        """The value of an actor call.

        Raises:
            Interrupted: a signal came in while waiting. The call goes on.
            RunFailed: an actor died. Errors a user can act on (IsothermError) come as they are.
        """
        while True:
            if self.signals.received is not None:
                raise Interrupted(self.signals.received)
            ready, _ = ray.wait([reference, *self.background], num_returns=1, timeout=_POLL_S)
            for done in ready:
                if done == reference:
                    return self.value(what, reference)
                self.value(self.background.pop(done), done)  # raises if it failed

    def run(self, what: str, coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """The value of a coroutine that awaits actor calls; raises as `call` does."""
        try:
            return asyncio.run(asyncio.wait_for(coroutine, timeout))
        except TimeoutError as error:
            raise RunFailed(f"{what} did not end within {timeout:.0f} s") from error
        except RayTaskError as error:
            raise self._explained(what, error) from error
        except RayActorError as error:
            raise RunFailed(_obituary(what, error, self._dead())) from error

    def value(self, what: str, reference: Any, timeout: float | None = None) -> Any:
        """The value of a finished call; see `call` for what it raises."""
        try:
            return ray.get(reference, timeout=timeout)
        except RayTaskError as error:
            raise self._explained(what, error) from error
        except RayActorError as error:
            raise RunFailed(_obituary(what, error, self._dead())) from error
        except GetTimeoutError as error:
            raise RunFailed(f"{what} did not answer within {timeout:.0f} s") from error

    def _explained(self, what: str, error: RayTaskError) -> Exception:
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, Exception):
            cause = cause.cause
        if isinstance(cause, IsothermError):
            return cause
        # What is left of a broken connection is explained by who is at its other end.
        dead = self._dead()
        if dead or isinstance(cause, RayError):
            return RunFailed(_obituary(what, cause, dead))
        return RunFailed(f"{what} failed: {type(cause).__name__}: {cause}")

    def _dead(self) -> list[str]:
        """Who does not answer any more. Actors that are merely busy are not dead."""
        pings = {actor.__ray_ready__.remote(): name for name, actor in self.actors.items()}
        answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_PING_S)
        return [pings[ping] for ping in answered if _failed(ping)]


def _obituary(what: str, error: BaseException, dead: Sequence[str]) -> str:
    who = ", ".join(dead) or "an actor"
    lines = [line for line in str(error).splitlines() if line.strip()]
    # A constructor's traceback ends with what went wrong; other deaths say it first.
    last = isinstance(error, RayActorError) and "creation task" in lines[0]
    reason = lines[-1 if last else 0].strip() if lines else type(error).__name__
    return f"{what} failed because {who} died ({reason})"


def _failed(reference: Any) -> bool:
    try:
        ray.get(reference, timeout=0)
    except RayError:
        return True
    return False


def drive(
    *,
    driver: Driver,
    learner: Any,
    first_step: int,
    steps: int,
    checkpoint_every: int,
    on_step: Callable[[dict[str, float]], None],
    end_waits: Callable[[], None],
) -> Any:
    """Runs the learner's steps and checkpoints; returns the last checkpoint.

    On a signal: ends the learner's waits, saves a checkpoint of the last whole step, and raises
    Interrupted.
    """
    step, saved = first_step, None
    pending = None
    try:
        while step < steps:
            pending = learner.step.remote()
            metrics = driver.call("the learner's step", pending)
            step, pending = int(metrics["step"]), None
            on_step(metrics)
            if step % checkpoint_every == 0 or step == steps:
                saved = driver.call("saving a checkpoint", learner.save.remote())
    except Interrupted:
        end_waits()
        if pending is not None and (metrics := _let_end(pending)):
            on_step(metrics)
        driver.value("saving a checkpoint", learner.save.remote(), timeout=600)
        raise
    return saved or driver.call("saving a checkpoint", learner.save.remote())


def _let_end(pending: Any) -> dict[str, float] | None:
    """Waits for an interrupted step. It trained, and counts; or it found no groups: None."""
    try:
        return ray.get(pending, timeout=600)
    except QueueClosed:
        return None
