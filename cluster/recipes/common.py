"""Shared frame of all recipes: lock, Ray, signals, records, and the ending."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import chz
from rich.console import Console

from actors.hub import fetch_missing
from cluster.base.outcomes import Diverged, Interrupted, RunFailed
from cluster.config.common import CommonConfig
from cluster.config.disk_plan import DiskPlan
from cluster.console import lost_output
from cluster.findings.finding import Finding
from cluster.placement.places import LocalPlaces, Places
from cluster.placement.roles import model_paths
from cluster.recipes.observer import Observer, present_observer
from cluster.run_files.best_checkpoint import BestCheckpoint
from cluster.run_files.fork import Fork
from cluster.run_files.notify import Notifier, receiver_of
from cluster.run_files.out_directory import OTHER_JOB_S
from cluster.run_files.run_directory import RunDirectory
from cluster.run_files.trackers import Trackers, check_trackers
from cluster.run_files.tracking import Progression
from cluster.runtime.driver import Signals
from distill.errors import CheckpointError, ConfigError, IsothermError
from learner.checkpoint import Checkpoint
from learner.lora import check_lora
from learner.memory import estimate_memory


def tell_dry_run(console: Console, directory: RunDirectory, layout: str) -> None:
    """Print the memory plan, and a file that repeats the command; lines are not wrapped there."""
    console.print(layout, highlight=False)
    console.print("settings that are not the defaults, as a file for config=FILE.yaml:")
    console.print(directory.yaml, markup=False, highlight=False, soft_wrap=True, end="")


@dataclass(kw_only=True)
class RunSession:
    """Session of a run: its directory, its records and its signals."""

    config: CommonConfig
    directory: RunDirectory
    resume_from: Checkpoint | None
    console: Console
    observer: Observer
    progress: Progression
    trackers: Trackers
    notifier: Notifier
    best: BestCheckpoint
    summary: dict[str, Any] = field(default_factory=dict)
    under_way: bool = False
    last_step: int = 0
    output_lost: bool = False

    @property
    def signals(self) -> Signals:
        return self.observer.signals

    @property
    def first_step(self) -> int:
        return self.resume_from.step if self.resume_from else 0

    def record(self, metrics: Mapping[str, float]) -> None:
        """Record an optimizer step's metrics: on disk first, then for observers and trackers."""
        self.under_way, self.last_step = True, int(metrics["step"])
        self.directory.append_metrics(metrics)
        self.best.see(metrics)
        self.observer.line(metrics)
        self.progress.step(metrics)
        self.note_lost_output()
        self.trackers.log(metrics)

    def note_lost_output(self) -> None:
        """Record once in events.jsonl that the console's output is no longer read."""
        if not self.output_lost and (why := lost_output(self.console)):
            self.output_lost = True
            self.directory.append_event("output_lost", why=why)

    def record_evaluation(self, metrics: Mapping[str, float], step: int) -> None:
        """Record an evaluation outside of a step, of the weights after `step`, on its own line."""
        line = {"step": step, **metrics}
        self.directory.append_metrics(line)
        self.best.see(line)
        self.observer.line(line)
        self.trackers.log(line)

    def record_late(self, metrics: Mapping[str, float], step: int) -> None:
        """Record an evaluation that ended after later steps had changed the weights."""
        self.record_evaluation(metrics, step)
        if self.best.due:
            self.best.pass_over()
            self.progress.note(
                f"step {step} is the best evaluation so far, and is not kept: its checkpoint could "
                "not be written at the time"
            )

    def found(self, finding: Finding) -> None:
        """Report a finding on the console, in events.jsonl and through notify=."""
        self.progress.note(finding.told())
        self.directory.append_event("finding", **finding.to_json())
        self.notifier.tell("finding", **(finding.to_json() | {"text": finding.told()}))

    def unsaved(self, error: CheckpointError, *, again: bool) -> None:
        """Report a checkpoint that could not be written. `again`: it is tried again."""
        self.best.unsaved()
        self.progress.note(f"WARNING: {error}" + (". It is tried again" if again else ""))
        self.directory.append_event("unsaved", why=str(error))

    def rewound(self) -> None:
        """Update the best checkpoint after the learner went back to its newest checkpoint."""
        self.best.saved({each.step for each in self.directory.store.complete()})
        self.best.unsaved()

    def complete(self, checkpoint: Checkpoint) -> None:
        """Exports `final/` and writes a summary with status `finished`."""
        self.directory.finish(checkpoint)
        best = self.directory.store.best()
        self._finished(
            "train",
            {
                "steps": checkpoint.step,
                "checkpoint": {"path": str(checkpoint.path), "seal": checkpoint.seal},
                "final": str(self.directory.final),
                **({} if best is None else {"best": asdict(best)}),
            },
        )
        self.console.print(
            f"finished {checkpoint.step} steps; the model is in {self.directory.final}"
        )
        if best is not None:
            path = self.directory.store.root / f"step-{best.step:06d}" / "model"
            self.console.print(f"best: step {best.step}, {best.metric} {best.value:.4g}, in {path}")

    def kept(self, steps: int) -> None:
        """Write a summary with status `finished` for a run that only kept groups."""
        self._finished("rollout", {"steps": steps, "kept": str(self.directory.groups)})
        self.console.print(
            f"kept the groups of {steps} steps in {self.directory.groups}; train on them with "
            f"train_from={self.directory.path}"
        )

    def _finished(self, whose: str, made: Mapping[str, Any]) -> None:
        steps = self.directory.read_steps()
        seconds = [step["time/step"] for step in steps]
        tokens = sum(step[f"{whose}/tokens"] for step in steps)
        pace = {
            f"{whose}_tokens": int(tokens),
            "tokens_per_s": tokens / sum(seconds),
            "time/step": fmean(seconds),
        }
        self.summary = {"status": "finished"} | self.summary | dict(made) | pace
        self.directory.write_json("summary.json", self.summary)


def connected(config: CommonConfig) -> AbstractContextManager[None]:
    """Connection to Ray in a namespace of this run; none for a local run, which may lack Ray."""
    if config.local:
        return nullcontext()
    from cluster.placement.on_ray import connected_to_ray

    return connected_to_ray(config, f"isotherm-{os.getpid()}-{time.time_ns()}")


@contextmanager
def opened(
    config: CommonConfig, directory: RunDirectory, say: Callable[[str], None]
) -> Iterator[Checkpoint | None]:
    """Lock the run's directory for this process; yields the checkpoint to resume from, or None.

    The lock is taken before the directory is read: files that another job is still writing look
    damaged, and its later writes would be lost. A dry run writes nothing and takes no lock.

    Raises:
        ConfigError: a tracker or notify= cannot work; another job holds the directory for too
            long; and as `RunDirectory.check`.
    """
    check_trackers(config.tracking)
    receiver_of(config.tracking.notify)
    with nullcontext() if config.only_plans else directory.locked(say, OTHER_JOB_S):
        yield directory.check(say)


@contextmanager
def session(
    config: CommonConfig,
    directory: RunDirectory,
    resume_from: Checkpoint | None,
    console: Console,
    fork: Fork | None,
    untrained: Mapping[str, Any],
) -> Iterator[RunSession]:
    """Open everything that a run needs besides its actors; summary.json records how it ends.

    Args:
        directory: locked by this process; see `opened`.
        fork: start of a run that has no checkpoint of its own yet.
        untrained: data state (`delivery`) of a checkpoint before the first step.
    """
    receiver = receiver_of(config.tracking.notify)
    observer = present_observer()
    started = time.time()
    with connected(config), observer.signals.installed():
        directory.start(resume_from, fork and fork.to_json())
        if resume_from:
            console.print(f"resuming from {resume_from.path} (step {resume_from.step})")
        first_step = resume_from.step if resume_from else 0
        directory.append_event("begin", step=first_step)
        if fork:
            resume_from = fork.begin(directory.store, untrained)
            console.print(f"starting from {fork.described}", markup=False, highlight=False)
        progress = Progression(console, first_step, config.steps, bar=not config.local)
        trackers = Trackers(
            config.tracking, directory, chz.asdict(config), first_step, progress.note
        )
        notifier = Notifier(receiver, directory.path, progress.note)
        running = RunSession(
            config=config, directory=directory, resume_from=resume_from, console=console,
            observer=observer, progress=progress, trackers=trackers, notifier=notifier,
            best=BestCheckpoint(directory.store, config.checkpoint.keep_best), last_step=first_step,
        )  # fmt: skip
        if forked_from := directory.forked_from:
            running.summary["forked_from"] = forked_from
        status = 1
        try:
            with progress:
                yield running
            status = 0
        except BaseException as raised:
            error = raised
            if isinstance(raised, Diverged):
                if newest := directory.store.latest():
                    raised.offer(directory.path, newest.step)
            elif (
                first_step
                and resume_from
                and not running.under_way
                and isinstance(raised, RunFailed)
            ):
                error = failed_to_resume(raised, resume_from)
            interrupted = isinstance(error, Interrupted)
            if isinstance(error, Interrupted):
                error.trained = running.under_way or first_step > 0
                error.only_kept = config.only_keeps
            if isinstance(error, IsothermError) and error.exit_code == ConfigError.exit_code:
                error.exit_code = 1  # 2 means that nothing was started
            running.summary = {
                "status": "interrupted" if interrupted else "failed",
                "reason": f"{type(error).__name__}: {error}",
                "seconds": time.time() - started,
                **running.summary,
            }
            try:
                directory.write_json("summary.json", running.summary)
            except CheckpointError as unwritten:  # the run's own error is the one to raise
                progress.note(f"WARNING: {unwritten}")
            if error is not raised:
                raise error from raised
            raise
        finally:
            running.note_lost_output()
            directory.append_event("end", status=running.summary.get("status"))
            notifier.finish(running.summary, running.last_step)
            trackers.finish(running.summary, status)


def failed_to_resume(error: RunFailed, resume_from: Checkpoint) -> RunFailed:
    """Error of a resumed run that made no step, with a remedy in case of a bad checkpoint."""
    return RunFailed(
        f"{error}. No step was made since resuming from {resume_from.path}: if it is the "
        "checkpoint that cannot be loaded, move it away, and the one before it is taken"
    )


@contextmanager
def placed(config: CommonConfig, running: RunSession) -> Iterator[tuple[str, Places]]:
    """Reserve places for every actor of the run; yields the device and the places.

    Raises:
        ConfigError: the cluster is too small, or does not have room within the deadline.
    """
    device = config.device
    assert device != "auto", "the device of a run is chosen before it is placed"
    if config.local:
        models = {path for paths in model_paths(config).values() for path in paths.values()}
        fetch_missing(models, running.progress.note)
        yield device, LocalPlaces()
        return
    from cluster.placement.on_ray import placed_on_ray

    with placed_on_ray(
        config,
        device,
        running.directory,
        resumes=running.resume_from is not None,
        say=running.progress.note,
        poll=running.signals.check,
    ) as placement:
        yield device, placement


def already_complete(
    directory: RunDirectory, resume_from: Checkpoint | None, config: CommonConfig, console: Console
) -> bool:
    """True if `out/` already holds the requested run, finished."""
    done = resume_from is not None and resume_from.step >= config.steps and directory.is_finished()
    if done:
        console.print(
            f"{directory.path} already holds this run, finished: nothing to do. Ask for more "
            "steps= to go on, or choose another out="
        )
    return done


def kept_line(config: CommonConfig, model: str, out: Path) -> str:
    """Description of the checkpoints that are kept, their disk space, and the trackers.

    Raises:
        ConfigError: the disk has less room.
    """
    needed = ""
    if (disk := DiskPlan.of(config, model)) is not None:
        disk.require_room(out)
        needed = f"; {disk}"
    rules, trackers = config.checkpoint, config.tracking.trackers
    kept = [f"the newest {rules.keep_last}"]
    kept += [f"each {rules.keep_every}th"] if rules.keep_every else []
    kept += [f"the best by {rules.keep_best}"] if rules.keep_best else []
    told = f"; tracked by {', '.join(trackers)}" if trackers else ""
    return f"a checkpoint every {rules.every} steps, of which stay {', '.join(kept)}{needed}{told}"


def learner_line(config: CommonConfig, model: str, updates_per_step: int = 1) -> str:
    """The learner's line of the resource plan."""
    if config.only_keeps:
        return "none (rollout_only=True): groups are kept, for train_from="
    estimate = estimate_memory(model, config.learner_holding) or "memory unknown"
    if config.learner_workers > 1:
        estimate = f"{config.learner_workers} workers share {estimate}"
    rate = f"lr {config.lr:g}"
    if (updates := config.steps * updates_per_step) < config.warmup_steps:
        rate += f", never reached: warmup_steps={config.warmup_steps} of {updates} updates"
    if not config.lora.trains_adapter:
        return f"{estimate}, {rate}"
    share = check_lora(config.lora, model)
    adapter = f"LoRA rank {config.lora.rank}"
    if config.lora.adapter is not None:
        adapter = f"adapter {config.lora.adapter}"
    return f"{estimate}; {adapter} on {share:.0%} of the weights, {rate}"
