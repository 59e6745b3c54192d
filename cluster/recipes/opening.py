"""Environment of a run, opened in this order: lock, Ray, signals, records, places."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console

from actors.hub import fetch_missing
from cluster.base.outcomes import Diverged, Interrupted, RunFailed
from cluster.config.common import CommonConfig
from cluster.config.files import as_tree
from cluster.placement.places import LocalPlaces, Places
from cluster.placement.roles import cpus_here, model_paths
from cluster.recipes.context import Observer, RunContext
from cluster.recipes.plan import RunPlan
from cluster.run_files.best_checkpoint import BestCheckpoint
from cluster.run_files.notify import Notifier, receiver_of
from cluster.run_files.out_directory import OTHER_JOB_S
from cluster.run_files.run_directory import RunDirectory
from cluster.run_files.trackers import Trackers, check_trackers
from cluster.run_files.tracking import Progression
from distill.errors import CheckpointError, ConfigError, IsothermError
from learner.checkpoint import Checkpoint


@contextmanager
def opened(
    config: CommonConfig, directory: RunDirectory, print_line: Callable[[str], None]
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
    with nullcontext() if config.only_plans else directory.locked(print_line, OTHER_JOB_S):
        yield directory.check(print_line)


def connected(config: CommonConfig) -> AbstractContextManager[None]:
    """Connection to Ray in a namespace of this run; none for a local run, which may lack Ray."""
    if config.cluster.local:
        return nullcontext()
    from cluster.placement.connect import connect

    return connect(f"isotherm-{os.getpid()}-{time.time_ns()}", cpus_here(config))


@contextmanager
def run_context(plan: RunPlan, console: Console, observer: Observer) -> Iterator[RunContext]:
    """Connect to Ray and open everything that a run writes; summary.json records how it ends."""
    started = time.monotonic()
    with connected(plan.config), observer.signals.installed():
        context = _context(plan, console, observer)
        status = 1
        try:
            with context.progress:
                yield context
            status = 0
        except BaseException as raised:
            error = _explained(raised, context)
            _write_failure(context, error, time.monotonic() - started)
            if error is not raised:
                raise error from raised
            raise
        finally:
            context.note_lost_output()
            context.directory.append_event("end", status=context.summary.get("status"))
            context.notifier.finish(context.summary, context.last_step)
            context.trackers.finish(context.summary, status)


def _context(plan: RunPlan, console: Console, observer: Observer) -> RunContext:
    """Begin the run's records or continue them; move a forked run's checkpoint into place."""
    config, directory, resume_from = plan.config, plan.directory, plan.resume_from
    directory.start(resume_from, plan.fork and plan.fork.to_json())
    if resume_from:
        console.print(f"resuming from {resume_from.path} (step {resume_from.step})")
    first_step = resume_from.step if resume_from else 0
    directory.append_event("begin", step=first_step)
    if plan.fork:
        resume_from = plan.fork.begin(directory.store, plan.untrained)
        console.print(f"starting from {plan.fork.described}", highlight=False)
    on_ray = not config.cluster.local
    progress = Progression(console, first_step, config.steps, bar=on_ray)
    settings = as_tree(config)
    best = BestCheckpoint(directory.store, config.checkpoint.keep_best)
    best.recall(directory.read_metrics())
    return RunContext(
        config=config,
        tokenizer=plan.tokenizer,
        directory=directory,
        resume_from=resume_from,
        console=console,
        observer=observer,
        progress=progress,
        trackers=Trackers(
            config.tracking, directory, settings, first_step, progress.note, on_ray=on_ray
        ),
        notifier=Notifier(receiver_of(config.tracking.notify), directory.path, progress.note),
        best=best,
        last_step=first_step,
        summary={"forked_from": origin} if (origin := directory.forked_from) else {},
    )


def _explained(raised: BaseException, context: RunContext) -> BaseException:
    """Error that a run ends with, extended by its progress and by what can be resumed."""
    error, checkpoint = raised, context.resume_from
    if isinstance(raised, Diverged):
        if newest := context.directory.store.latest():
            raised.offer(context.directory.path, newest.step)
    elif isinstance(raised, RunFailed) and not context.run_started and context.first_step:
        assert checkpoint is not None, "its step is the first one"
        error = RunFailed(
            f"{raised}. The run made no step after resuming from {checkpoint.path}: if that "
            "checkpoint cannot be loaded, move it away, and the run resumes from the one before it"
        )
    if isinstance(error, Interrupted):
        error.trained = context.run_started or context.first_step > 0
        error.only_kept = context.config.only_keeps
    if isinstance(error, IsothermError) and error.exit_code == ConfigError.exit_code:
        error.exit_code = 1  # 2 means that nothing was started
    return error


def _write_failure(context: RunContext, error: BaseException, seconds: float) -> None:
    context.summary = {
        "status": "interrupted" if isinstance(error, Interrupted) else "failed",
        "reason": f"{type(error).__name__}: {error}",
        "seconds": seconds,
        **context.summary,
    }
    try:
        context.directory.write_json("summary.json", context.summary)
    except CheckpointError as unwritten:  # the run's own error is the one to raise
        context.progress.note(f"WARNING: {unwritten}")


@contextmanager
def placed(context: RunContext) -> Iterator[Places]:
    """Reserve places for every actor of the run.

    Raises:
        ConfigError: the cluster is too small, or does not have room within the deadline.
    """
    config = context.config
    assert config.cluster.device != "auto", "the device of a run is chosen before it is placed"
    if config.cluster.local:
        models = {path for paths in model_paths(config).values() for path in paths.values()}
        fetch_missing(models, context.progress.note)
        yield LocalPlaces()
        return
    from cluster.placement.on_ray import placed_on_ray

    with placed_on_ray(
        config,
        context.directory,
        resumes=context.resume_from is not None,
        print_line=context.progress.note,
        poll=context.signals.check,
    ) as places:
        yield places
