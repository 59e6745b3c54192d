"""The steps of a run: one after the other, with a checkpoint now and then.

    before_step -> learner.step -> on_step -> checkpoint, if one is due -> before_step ...

A checkpoint that is due is copied by the learner between two steps, and written while the next ones
run (learner/checkpoint_writer.py). What a checkpoint accounts for is committed, and the best
evaluation's marked, once it is complete on disk: between two later steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from cluster.base.outcomes import Interrupted, LearnerLost, RunFailed
from cluster.handles import calls, errors
from cluster.queue.group_queue import QueueClosed
from cluster.runtime.driver import Driver
from distill.errors import CheckpointError, IsothermError
from learner.checkpoint import Checkpoint
from learner.checkpoint_writer import Written
from learner.digests import is_full

# A checkpoint that cannot be written is tried again between steps: so often, and later and later.
# On a full disk training then pauses, and the tries go on, for so long since the first of them.
_SAVE_TRIES = 10
SAVE_PAUSE_S, _LONGEST_PAUSE_S = 3.0, 30.0
FULL_S = 1800.0
# Longest that a run which ends waits for its last checkpoint: a signal's, and a failure's.
_LAST_S = 600.0
_RESCUE_S = 120.0


class Trainee(Protocol):
    """The run that `drive` drives."""

    @property
    def learner(self) -> Any:
        """The learner's actor, the present one."""
        ...

    def before_step(self) -> float:
        """Waits until a step has what it needs; returns the seconds it waited."""
        ...

    def on_step(self, metrics: dict[str, float]) -> None: ...

    def on_saving(self, step: int) -> None:
        """A checkpoint of the present weights is being written."""
        ...

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete on disk."""
        ...

    def on_unsaved(self, error: CheckpointError, *, again: bool) -> None:
        """A checkpoint could not be written; `again`: one is tried after the next step."""
        ...

    def recover(self, lost: LearnerLost) -> int:
        """Brings the learner back; returns the step at which it stands. Raises RunFailed if not."""
        ...

    def end_waits(self) -> None:
        """Ends what the learner waits for."""
        ...


def drive(
    run: Trainee,
    driver: Driver,
    *,
    first_step: int,
    steps: int,
    checkpoint_every: int,
    wanted: Callable[[], bool],
) -> Checkpoint:
    """Runs the learner's steps and checkpoints; returns the last checkpoint.

    A checkpoint is saved every so many steps, after each that is `wanted`, and after the last. Its
    metrics are in the next step's line: `time/checkpoint`, what that step waited, and
    `time/checkpoint_write`, what a thread took beside training.

    On a signal: ends the learner's waits, saves a checkpoint of the last whole step, and raises
    Interrupted. A lost learner is brought back, and the steps since its checkpoint are done again.
    """
    saving = _Saving(run, driver, checkpoint_every, steps, wanted)
    step, pending = first_step, None
    try:
        while True:
            try:
                while step < steps:
                    waited = run.before_step()
                    pending = run.learner.step.remote(waited)
                    metrics = driver.ask_learner("the learner's step", pending)
                    step, pending = int(metrics["step"]), None
                    run.on_step(metrics | saving.times())
                    saving.after(step)
                return saving.last()
            except LearnerLost as lost:
                pending = None
                saving.forget()
                step = _recovered(run, lost)
    except Interrupted:
        run.end_waits()
        if pending is not None and (metrics := _let_end(pending)):
            run.on_step(metrics | saving.times())
        saving.at_once()
        raise
    except Exception:
        saving.rescue()
        raise


def _recovered(run: Trainee, lost: LearnerLost) -> int:
    while True:
        try:
            return run.recover(lost)
        except LearnerLost as again:
            lost = again


class _Saving:
    """Checkpoints when they are due, one at a time. A disk that is full is given time."""

    def __init__(
        self, run: Trainee, driver: Driver, every: int, steps: int, wanted: Callable[[], bool]
    ) -> None:
        self._run, self._driver, self._every, self._steps = run, driver, every, steps
        self._wanted = wanted
        self._writing: int | None = None  # the step of the one beside training
        self._failures = 0
        self._first_failure = self._not_before = 0.0
        self._seconds: dict[str, float] = {}

    def after(self, step: int) -> None:
        """Between two steps: notes the checkpoint that is written, and begins the next if due."""
        self._collect(wait=False)
        due = step % self._every == 0 or self._failures or self._wanted()
        if step < self._steps and due:
            self._collect(wait=True)
            if self._failures >= _SAVE_TRIES:  # rather than train what may be lost
                self._until_saved()
            elif time.monotonic() >= self._not_before:
                self._begin(step)

    def times(self) -> dict[str, float]:
        """Seconds since the last time: that steps waited, and that a thread wrote beside them."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def last(self) -> Checkpoint:
        """The checkpoint of the last step."""
        self._collect(wait=True)
        return self._until_saved()

    def _until_saved(self) -> Checkpoint:
        """Saves a checkpoint of the present step, when the disk has room for it."""
        while (saved := self._save()) is None:
            self._driver.pause(max(self._not_before - time.monotonic(), 0.0))
        return saved

    def at_once(self) -> None:
        """The checkpoint of the last whole step, whatever signals come."""
        self._finish(_LAST_S)
        deadline = time.monotonic() + _LAST_S
        while True:
            saving = self._run.learner.save.remote()
            try:
                saved = self._driver.value("saving a checkpoint", saving, timeout=_LAST_S)
            except CheckpointError as error:
                if not is_full(str(error)) or time.monotonic() > deadline:
                    raise
                self._run.on_unsaved(error, again=True)
                time.sleep(self._next_pause())
            else:
                self._run.on_checkpoint(saved)
                return

    def rescue(self) -> None:
        """The run fails: the checkpoint that is being written is worth its end all the same."""
        try:
            self._finish(_RESCUE_S)
        except (RunFailed, IsothermError) as error:
            step, self._writing = self._writing, None
            why = f"the checkpoint of step {step} was being written when the run failed: {error}"
            self._run.on_unsaved(CheckpointError(why), again=False)

    def forget(self) -> None:
        """The learner is gone, and what it was writing."""
        self._writing = None
        self._seconds.clear()

    def _begin(self, step: int) -> None:
        self._writing = step
        self._run.on_saving(step)
        begun = self._ask(self._run.learner.begin_save.remote())
        if isinstance(begun, Checkpoint):  # no copy: it is written
            self._written(begun)

    def _save(self) -> Checkpoint | None:
        """Saves a checkpoint; None if it could not be written, and may be the next time."""
        saved = self._ask(self._run.learner.save.remote())
        if saved is not None:
            self._written(saved)
        return saved

    def _collect(self, *, wait: bool) -> None:
        if self._writing is not None:
            self._note(self._ask(self._run.learner.written.remote(wait)))

    def _finish(self, timeout: float) -> None:
        """Waits, while nobody polls, for the one that is being written."""
        if self._writing is None:
            return
        written = self._run.learner.written.remote(True)
        try:
            self._note(self._driver.value("writing a checkpoint", written, timeout=timeout))
        except CheckpointError as error:
            self._writing = None
            self._run.on_unsaved(error, again=False)

    def _ask(self, reference: Any) -> Any:
        """The learner's answer; None if it could not write."""
        began = time.monotonic()
        try:
            return self._driver.ask_learner("saving a checkpoint", reference)
        except CheckpointError as error:
            self._writing = None
            now = time.monotonic()
            if not self._failures:
                self._first_failure = now
            pause = self._next_pause()
            patient = is_full(str(error)) and now - self._first_failure < FULL_S
            if self._failures > _SAVE_TRIES and not patient:
                raise
            self._not_before = now + pause
            self._run.on_unsaved(error, again=True)
            return None
        finally:
            self._add("time/checkpoint", time.monotonic() - began)

    def _next_pause(self) -> float:
        """Counts a failure; returns the seconds until the next try."""
        self._failures += 1
        return min(SAVE_PAUSE_S * 1.5 ** (self._failures - 1), _LONGEST_PAUSE_S)

    def _note(self, written: Written | None) -> None:
        if written is not None:
            self._add("time/checkpoint_write", written.seconds)
            self._written(written.checkpoint)

    def _written(self, checkpoint: Checkpoint) -> None:
        self._writing = None
        self._failures = 0
        self._run.on_checkpoint(checkpoint)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


def _let_end(pending: Any) -> dict[str, float] | None:
    """Waits for an interrupted step. It trained, and counts; or it found no groups: None."""
    try:
        return calls.get(pending, timeout=600)
    except (QueueClosed, errors.RayActorError):
        return None
