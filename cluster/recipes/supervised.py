"""recipe=sft and recipe=dpo: one model, trained on data that is there already."""

from __future__ import annotations

from rich.console import Console

from cluster.build import build_supervised, kill, resolve_device
from cluster.checks import SupervisedInputs, check_dpo, check_sft
from cluster.config_supervised import DpoConfig, SftConfig, SupervisedConfig
from cluster.outputs import RunDirectory
from cluster.recipes.common import Session, already_complete, learner_line, session
from cluster.run import Driver, drive


def run_sft(config: SftConfig, console: Console) -> None:
    """Runs the recipe to its end.

    Raises:
        IsothermError, RunFailed, Interrupted: see `cluster.train`, which turns them to exit codes.
    """
    inputs = check_sft(config)
    _run("sft", f"{len(inputs.rows_D)} rows", config, inputs, console)


def run_dpo(config: DpoConfig, console: Console) -> None:
    """Runs the recipe to its end; raises as `run_sft` does."""
    inputs = check_dpo(config)
    reference = config.reference or "its own start"
    what = f"{len(inputs.rows_D) // 2} pairs, near to {reference} (beta={config.beta:g})"
    _run("dpo", what, config, inputs, console)


def _run(
    recipe: str, what: str, config: SupervisedConfig, inputs: SupervisedInputs, console: Console
) -> None:
    directory = RunDirectory(recipe, config)
    resume_from = directory.check()
    console.print(
        f"{recipe}: {config.model} on {what}, {config.steps} steps of {config.batch_size}, into "
        f"{directory.path} (learner: {learner_line(config, config.model)})"
    )
    if config.dry_run or already_complete(directory, resume_from, config, console):
        return
    with session(config, directory, resume_from, console) as running:
        _train(config, inputs, running)


def _train(config: SupervisedConfig, inputs: SupervisedInputs, running: Session) -> None:
    actors = build_supervised(
        config,
        inputs,
        running.directory,
        running.resume_from,
        resolve_device(config),
    )
    driver = Driver(actors=actors.all, signals=running.signals)
    try:
        for name, follower in actors.named_followers.items():
            driver.watch(name, follower.serve.remote())
        checkpoint = drive(
            driver=driver,
            learner=actors.leader,
            first_step=running.first_step,
            steps=config.steps,
            checkpoint_every=config.checkpoint_every,
            on_step=running.record,
            end_waits=lambda: None,
        )
    finally:
        kill(actors.all.values())
    running.complete(checkpoint)
