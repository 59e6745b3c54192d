"""The order of a run's steps and checkpoints, with a learner that writes slowly."""

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import distill.durable_files
from cluster.base.background import Background
from cluster.base.outcomes import Interrupted, LearnerFailed, LearnerLost, RunFailed
from cluster.handles.local_actor import LocalActor
from cluster.recipes.plan import NoEvaluations
from cluster.recipes.supervised import Validation
from cluster.run import Run
from cluster.runtime.driver import Driver, Signals
from cluster.runtime.learner_alone import LearnerAlone
from distill.errors import CheckpointError
from learner.checkpoint import Checkpoint
from learner.checkpoint_writer import Written


class Writing:
    """A learner whose checkpoints are complete after `takes` further steps, or fail.

    Its third step raises each error in `broken`, and its evaluations each in `unjudged`.
    """

    def __init__(
        self,
        events: list[str],
        takes: int,
        fails: set[int],
        broken: list[str] | None = None,
        unjudged: list[str] | None = None,
    ) -> None:
        self._events, self._takes, self._fails, self._broken = events, takes, fails, broken
        self._unjudged = unjudged
        self._step = self._begun = 0

    def evaluate(self) -> dict[str, float]:
        if self._unjudged:
            raise OSError(self._unjudged.pop())
        self._events.append("evaluated")
        return {"time/validation": 1.0}

    def step(self, _waited_s: float) -> dict[str, float]:
        if self._step == 2 and self._broken:
            raise OSError(self._broken.pop())
        self._step += 1
        return {"step": self._step}

    def begin_save(self) -> Checkpoint | None:
        self._begun = self._step
        return None if self._takes else self.save()

    def written(self, wait: bool) -> Written | None:
        if not wait and self._step < self._begun + self._takes:
            return None
        if wait and self._step < self._begun + self._takes:
            self._events.append(f"waited for {self._begun}")
        self._check(self._begun)
        return Written(checkpoint=made(self._begun), seconds=2.0)

    def save(self) -> Checkpoint:
        self._check(self._step)
        return made(self._step)

    def _check(self, step: int) -> None:
        if step in self._fails:
            self._fails.remove(step)
            raise CheckpointError(f"no room for {step}")


def made(step: int) -> Checkpoint:
    return Checkpoint(path=Path(f"step-{step}"), step=step, delivery={}, seal="")


class Actors(LearnerAlone):
    """The actors of a run with a learner alone; records events in order."""

    def __init__(self, events: list[str], make: Callable[[], LocalActor]) -> None:
        idle: Any = SimpleNamespace(background=Background(), critical=dict)
        self.signals = Signals()
        self.driver = Driver(supervisor=idle, signals=self.signals, deadline_s=60)
        self._events, self._make = events, make
        self.leader = make()
        self.before: dict[int, Exception] = {}
        self.next_step = 1

    @property
    def learner(self) -> Any:
        return self.leader

    def wait_for_groups(self) -> float:
        if error := self.before.pop(self.next_step, None):
            raise error
        return 0.0

    def ask_learner_canaries(self, step: int) -> None:
        self._events.append(f"saving {step}")

    def commit(self, checkpoint: Checkpoint) -> None:
        self._events.append(f"saved {checkpoint.step}")

    def recover(self, lost: LearnerLost) -> int:
        self._events.append("recovered")
        self.leader, self.next_step = self._make(), 1
        return 0

    def cancel_waits(self) -> None:
        self._events.append("end")

    def start(self, resume_from: Checkpoint | None) -> None:
        self._events.append("started")

    def close(self) -> None:
        self._events.append("closed")


class Scene:
    """A run over such a learner, and its events in order."""

    def __init__(
        self,
        takes: int = 2,
        fails: set[int] | None = None,
        broken: list[str] | None = None,
        unjudged: list[str] | None = None,
    ) -> None:
        self.events: list[str] = []
        self.metrics: list[dict[str, float]] = []
        self.actors = Actors(
            self.events,
            lambda: LocalActor(Writing, self.events, takes, fails or set(), broken, unjudged),
        )

    def record(self, metrics: dict[str, float]) -> None:
        self.actors.next_step = int(metrics["step"]) + 1
        self.events.append(f"step {metrics['step']}")
        self.metrics.append(metrics)

    def unsaved(self, error: CheckpointError, *, will_retry: bool) -> None:
        self.events.append(f"{error}, {'again' if will_retry else 'at last'}")

    def train(self, steps: int = 6, every: int = 2) -> Checkpoint:
        return Run(self._context(steps, every), self.actors, NoEvaluations()).train()

    def run_to_end(self, evaluations: type[Validation] = Validation) -> None:
        """Run three steps with evaluations by the learner before and after them."""
        context = self._context(steps=3, every=2)
        Run(context, self.actors, evaluations(context.config, context, self.actors)).run_to_end()

    def _context(self, steps: int, every: int) -> Any:
        def nothing(*_given: Any, **_fields: Any) -> None:
            pass

        config = SimpleNamespace(
            steps=steps, only_keeps=False, checkpoint=SimpleNamespace(every=every),
            eval=SimpleNamespace(every=0),
        )  # fmt: skip
        return SimpleNamespace(
            config=config, first_step=0, signals=self.actors.signals, summary={},
            best=SimpleNamespace(due=False, saving=nothing), record=self.record,
            unsaved=self.unsaved, trained=nothing, saved=nothing, rewound=nothing,
            resume_from=None, directory=SimpleNamespace(append_event=nothing),
            progress=SimpleNamespace(note=nothing), set_aside=nothing,
            trackers=SimpleNamespace(skip_kept=nothing), recalls=lambda *_: False,
            record_evaluation=lambda _metrics, step: self.events.append(f"recorded {step}"),
            complete=lambda checkpoint: self.events.append(f"complete {checkpoint.step}"),
        )  # fmt: skip


def test_a_checkpoint_is_committed_once_it_is_written() -> None:
    run = Scene(takes=1)
    assert run.train(steps=5).step == 5
    assert run.events == [
        *("step 1", "step 2", "saving 2", "step 3", "saved 2"),
        *("step 4", "saving 4", "step 5", "saved 4", "saved 5"),
    ]
    times = [{name for name in line if name != "step"} for line in run.metrics]
    both = {"time/checkpoint", "time/checkpoint_write"}
    assert times == [set(), set(), {"time/checkpoint"}, both, {"time/checkpoint"}]
    assert run.metrics[3]["time/checkpoint_write"] == 2.0


def test_a_checkpoint_waits_for_the_one_before() -> None:
    run = Scene(takes=9)
    run.train(steps=5)
    assert run.events == [
        *("step 1", "step 2", "saving 2", "step 3", "step 4", "waited for 2", "saved 2"),
        *("saving 4", "step 5", "waited for 4", "saved 4", "saved 5"),
    ]


def test_a_synchronous_checkpoint_is_committed_at_once() -> None:
    run = Scene(takes=0)
    run.train(steps=3)
    assert run.events == ["step 1", "step 2", "saving 2", "saved 2", "step 3", "saved 3"]
    assert "time/checkpoint" in run.metrics[2] and "time/checkpoint_write" not in run.metrics[2]


def test_a_failed_checkpoint_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill.durable_files, "PAUSE_S", 0.0)
    run = Scene(takes=1, fails={2, 6})
    run.train(steps=6, every=2)
    assert run.events == [
        *("step 1", "step 2", "saving 2", "step 3", "no room for 2, again", "saving 3"),
        *("step 4", "saved 3", "saving 4", "step 5", "saved 4", "step 6"),
        *("no room for 6, again", "saved 6"),
    ]


class FullDisk(Writing):
    """A learner whose first `tries` checkpoints fail with `error`."""

    def __init__(self, events: list[str], tries: int, error: int = errno.ENOSPC) -> None:
        super().__init__(events, takes=0, fails=set())
        self._tries, self._error = tries, error

    def _check(self, step: int) -> None:
        self._tries -= 1
        if self._tries >= 0:
            raise CheckpointError(f"no room for {step}: {os.strerror(self._error)}")


@pytest.mark.parametrize("steps", [4, 50])
@pytest.mark.parametrize("signalled", [False, True])
def test_a_full_disk_pauses_training_until_it_has_room(
    monkeypatch: pytest.MonkeyPatch, steps: int, signalled: bool
) -> None:
    monkeypatch.setattr(distill.durable_files, "PAUSE_S", 0.0)
    run = Scene()
    run.actors.leader = LocalActor(FullDisk, run.events, 25)
    if signalled:
        run.actors.before = {4: Interrupted(signal.SIGTERM)}
        with pytest.raises(Interrupted):
            run.train(steps=steps)
    else:
        assert run.train(steps=steps).step == steps
    trained = [int(line.split()[1]) for line in run.events if line.startswith("step ")]
    saved = [int(line.split()[1]) for line in run.events if line.startswith("saved ")]
    assert saved[-1] == trained[-1] and trained == sorted(set(trained))
    first = run.events.index(f"saved {saved[0]}")
    assert sum(line.startswith("no room") for line in run.events[:first]) == 25
    assert saved[0] <= 14  # ten steps after the first try, training waits


def test_a_disk_that_stays_full_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill.durable_files, "PAUSE_S", 0.0)
    monkeypatch.setattr(distill.durable_files, "FULL_S", 0.0)
    run = Scene()
    run.actors.leader = LocalActor(FullDisk, run.events, 1000)
    with pytest.raises(CheckpointError):
        run.train()


@pytest.mark.parametrize("signalled", [False, True])
@pytest.mark.parametrize("error", [errno.EFBIG, errno.EIO], ids=["limit on size", "bad disk"])
def test_other_errors_of_the_disk_end_the_run_after_ten_tries(
    monkeypatch: pytest.MonkeyPatch, error: int, signalled: bool
) -> None:
    """At once on a signal."""
    monkeypatch.setattr(distill.durable_files, "PAUSE_S", 0.0)
    run = Scene()
    run.actors.leader = LocalActor(FullDisk, run.events, 1000, error)
    if signalled:
        run.actors.before = {1: Interrupted(signal.SIGTERM)}
    with pytest.raises(CheckpointError):
        run.train()
    assert sum(line.startswith("no room") for line in run.events) == (0 if signalled else 10)


def test_a_signal_ends_the_run_after_its_checkpoints() -> None:
    run = Scene(takes=9)
    run.actors.before[4] = Interrupted(signal.SIGTERM)
    with pytest.raises(Interrupted):
        run.train()
    assert run.events[-4:] == ["end", "waited for 2", "saved 2", "saved 3"]


@pytest.mark.parametrize(("fails", "event"), [((), "saved 2"), ((2,), "no room for 2, at last")])
def test_a_failed_run_finishes_the_checkpoint_under_way(fails: tuple[int, ...], event: str) -> None:
    run = Scene(takes=9, fails=set(fails))
    run.actors.before[4] = RunFailed("no room for anybody")
    with pytest.raises(RunFailed):
        run.train()
    assert run.events[-2:] == ["waited for 2", event]


class Stuck(Writing):
    """A learner whose fourth step waits for a worker that has failed; its writer does not."""

    def __init__(
        self, events: list[str], waits: threading.Event, over: threading.Event, fails: bool = False
    ) -> None:
        super().__init__(events, takes=9, fails=set())
        self._waits, self._over, self._half_done = waits, over, fails

    def step(self, _waited_s: float) -> dict[str, float]:
        if self._step == 3:
            self._waits.set()
            self._over.wait()
            if self._half_done:
                raise OSError("a broken disk")
        return super().step(_waited_s)


@pytest.mark.parametrize("signalled", [False, True])
def test_a_failed_run_finishes_the_checkpoint_during_a_stuck_step(signalled: bool) -> None:
    """With `signalled`, a signal arrives and the step fails: no half of it is saved."""
    run, waits, over = Scene(), threading.Event(), threading.Event()
    run.actors.leader = LocalActor(Stuck, run.events, waits, over, signalled)

    async def happens() -> None:
        await asyncio.to_thread(waits.wait)
        if not signalled:
            raise RunFailed("a worker has no memory")
        over.set()
        run.actors.signals.received = signal.SIGTERM
        raise Interrupted(signal.SIGTERM)

    run.actors.driver.background.start(happens())
    with pytest.raises(RunFailed):
        run.train()
    assert run.events[-3:] == ["end" if signalled else "step 3", "waited for 2", "saved 2"]
    over.set()
    run.actors.driver.background.close()


def test_a_failed_step_is_repeated_once_from_the_checkpoint_under_way() -> None:
    run = Scene(broken=["a broken disk"])
    assert run.train(steps=3).step == 3
    assert run.events == [
        *("step 1", "step 2", "saving 2", "waited for 2", "saved 2", "recovered"),
        *("step 1", "step 2", "saving 2", "step 3", "waited for 2", "saved 2", "saved 3"),
    ]
    run = Scene(broken=["a broken disk", "a broken disk"])
    with pytest.raises(LearnerFailed):
        run.train(steps=3)
    assert run.events.count("recovered") == 1


def test_a_failed_evaluation_by_the_learner_is_repeated_once() -> None:
    run = Scene(unjudged=["a broken disk"])
    run.run_to_end()
    assert run.events[:4] == ["started", "recovered", "evaluated", "recorded 0"]
    assert run.events[-4:] == ["evaluated", "recorded 3", "complete 3", "closed"]
    run = Scene(unjudged=["a broken disk", "a broken disk"])
    with pytest.raises(LearnerFailed):
        run.run_to_end()
    assert run.events == ["started", "recovered", "closed"]


def test_a_learner_lost_after_the_last_step_is_restarted_for_its_evaluation() -> None:
    """The steps after its checkpoint are trained again."""
    run, losses = Scene(), ["it died"]

    class LosesItself(Validation):
        def after_steps(self, step: int) -> None:
            if losses:
                raise LearnerLost(losses.pop())
            super().after_steps(step)

    run.run_to_end(LosesItself)
    assert run.events.count("step 3") == 2
    assert run.events[-4:] == ["evaluated", "recorded 3", "complete 3", "closed"]


@pytest.mark.parametrize("first_bad", [None, 2])
def test_a_lost_learner_loses_the_checkpoint_under_way(first_bad: int | None) -> None:
    """One with bad weights, whose learner is alive, is written before it is looked for."""
    run, lost = Scene(takes=9), LearnerLost("gone")
    lost.before = first_bad
    run.actors.before[3] = lost
    run.train(steps=3)
    assert run.events == [
        *("step 1", "step 2", "saving 2", *(["waited for 2"] if first_bad else []), "recovered"),
        *("step 1", "step 2", "saving 2", "step 3", "waited for 2", "saved 2", "saved 3"),
    ]
