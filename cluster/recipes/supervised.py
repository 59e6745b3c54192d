"""recipe=sft: supervised fine-tuning of one model on prompt/completion rows."""

from __future__ import annotations

from rich.console import Console

from cluster.build import build_sft, kill, resolve_device
from cluster.checks import SftInputs, check_sft
from cluster.config import SftConfig
from cluster.outputs import RunDirectory
from cluster.recipes.common import Session, already_complete, session
from cluster.run import Driver, drive


def run_sft(config: SftConfig, console: Console) -> None:
    """Runs the recipe to its end.

    Raises:
        IsothermError, RunFailed, Interrupted: see `cluster.train`, which turns them to exit codes.
    """
    inputs = check_sft(config)
    directory = RunDirectory("sft", config)
    resume_from = directory.check()
    console.print(
        f"sft: {config.model} on {len(inputs.rows_D)} rows, {config.steps} steps of "
        f"{config.batch_size}, into {directory.path}"
    )
    if config.dry_run or already_complete(directory, resume_from, config, console):
        return
    with session(config, directory, resume_from, console) as running:
        _train(config, inputs, running)


def _train(config: SftConfig, inputs: SftInputs, running: Session) -> None:
    learner = build_sft(
        config,
        inputs,
        running.directory,
        running.resume_from,
        resolve_device(config),
    )
    try:
        checkpoint = drive(
            driver=Driver(actors={"learner": learner}, signals=running.signals),
            learner=learner,
            first_step=running.first_step,
            steps=config.steps,
            checkpoint_every=config.checkpoint_every,
            on_step=running.record,
            end_waits=lambda: None,
        )
    finally:
        kill([learner])
    running.complete(checkpoint)
