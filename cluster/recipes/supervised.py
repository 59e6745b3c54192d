"""recipe=sft, dpo and reward_model: one model, trained on data that is there already."""

from __future__ import annotations

from functools import partial

from rich.console import Console
from rich.markup import escape

from cluster.base.outcomes import LearnerLost
from cluster.config.supervised import (
    DpoConfig,
    RewardModelConfig,
    SftConfig,
    SupervisedConfig,
)
from cluster.config.supervised_checks import (
    SupervisedInputs,
    check_dpo,
    check_reward_model,
    check_sft,
)
from cluster.hosts.learners import supervised_learners
from cluster.placement.device_choice import with_device
from cluster.placement.layout import describe_layout
from cluster.recipes.common import (
    RunSession,
    already_complete,
    kept_line,
    learner_line,
    opened,
    placed,
    session,
    tell_dry_run,
)
from cluster.recipes.learner_alone import LearnerAlone
from cluster.run_files.best_checkpoint import check_metric
from cluster.run_files.fork import find_fork
from cluster.run_files.run_directory import RunDirectory
from distill.settings import changed
from learner.checkpoint import Checkpoint

# Metrics of the held-out rows of each recipe, the usual ones.
_MEASURED = {
    "sft": {"validation/loss", "validation/nll"},
    "dpo": {"validation/loss", "validation/accuracy", "validation/margin"},
    "reward_model": {"validation/loss", "validation/accuracy", "validation/margin"},
}


def run_sft(config: SftConfig, console: Console) -> None:
    """Runs the recipe to its end.

    Raises:
        IsothermError, RunFailed, Interrupted: see `cluster.train`, which turns them to exit codes.
    """
    inputs = check_sft(config)
    _run("sft", "rows", config, inputs, console)


def run_dpo(config: DpoConfig, console: Console) -> None:
    """Runs the recipe to its end; raises as `run_sft` does."""
    inputs = check_dpo(config)
    own = "its own start" if config.fork_from is None else config.model
    reference = config.reference or own
    how = f", near to {reference} (beta={config.beta:g})"
    _run("dpo", "pairs", config, inputs, console, how)


def run_reward_model(config: RewardModelConfig, console: Console) -> None:
    """Runs the recipe to its end; raises as `run_sft` does."""
    inputs = check_reward_model(config)
    assert inputs.padding is not None, "a reward model's rows are checked against its padding"
    padding = inputs.tokenizer.convert_ids_to_tokens(inputs.padding)
    how = f", with a scalar head (padding {padding})"
    _run("reward_model", "pairs", config, inputs, console, how)


def _run(
    recipe: str,
    noun: str,
    config: SupervisedConfig,
    inputs: SupervisedInputs,
    console: Console,
    how: str = "",
) -> None:
    """Prints the plan, and runs it; `noun` is what `batch_size` counts."""
    asked = config.device
    config, said = with_device(config)
    if said:
        console.print(said, markup=False, highlight=False)
    epochs = "" if config.epochs is None else f" ({config.epochs:g} epochs)"
    units = len(inputs.rows_D) // config.rows_per_unit
    config = config.trained_on(units)
    apart = sum(len(source.rows_D) for source in inputs.held_out) // config.rows_per_unit
    both = f", {inputs.overlap} of them with a prompt that is trained" if inputs.overlap else ""
    held_out = f" ({apart} held out{both})" if apart else ""
    recorded = changed(config, device=asked)
    directory = RunDirectory(recipe, recorded, inputs.digests, inputs.stops)
    say = partial(console.print, markup=False, highlight=False)
    check_metric(config.checkpoint.keep_best, "validation/", _MEASURED[recipe], own=True)
    with opened(config, directory, say) as resume_from:
        fork = None
        if resume_from is None:
            fork = find_fork(
                config, recipe, title="model", model=config.model,
                tokenizer=inputs.tokenizer, say=say,
            )  # fmt: skip
        console.print(
            f"{recipe}: {config.model} on {units} {noun}{held_out}{how}, {config.steps} "
            f"steps{epochs} of {config.batch_size}, into {directory.path} (learner: "
            f"{learner_line(config, config.model)}); stops at "
            f"{inputs.stops.described(inputs.tokenizer)}"
            + (f"; starts from {fork.described}" if fork else "")
            + f"; {kept_line(config, config.model, directory.path)}"
        )
        if inputs.warning is not None:
            console.print(f"[bold red]WARNING[/]: {escape(inputs.warning)}", highlight=False)
        if config.only_plans:
            longest = inputs.longest_rows(config.rows_per_unit)
            tell_dry_run(console, directory, describe_layout(config, longest))
        if config.only_plans or already_complete(directory, resume_from, config, console):
            return
        untrained = {"num_rows": units}
        with session(config, directory, resume_from, console, fork, untrained) as running:
            _train(config, inputs, running)


def _train(config: SupervisedConfig, inputs: SupervisedInputs, running: RunSession) -> None:
    with placed(config, running) as (device, placement):
        make = partial(supervised_learners, config, inputs, running.directory, device, placement)
        _MeasuredRun(config, running, make).to_the_end()


class _MeasuredRun(LearnerAlone):
    """A learner that is measured on held-out rows."""

    _config: SupervisedConfig

    def before_steps(self) -> None:
        if self._config.eval.runs and self._running.first_step == 0:
            self._validate_apart("before", step=0)
        elif self._config.eval.runs:
            self._recall_before()

    def after_steps(self, checkpoint: Checkpoint) -> None:
        if self._config.eval.runs:
            self._validate_apart("after", step=checkpoint.step)

    def on_step(self, metrics: dict[str, float]) -> None:
        step, every = int(metrics["step"]), self._config.eval.every
        due = every > 0 and step % every == 0 and step < self._config.steps
        try:
            if due and self._running.signals.received is None:
                metrics = metrics | self._validate(f"step {step}")
        finally:
            super().on_step(metrics)  # it is trained, whatever became of the other

    def _validate_apart(self, when: str, step: int) -> None:
        """An evaluation of the held-out rows that no step's line has."""
        while True:
            try:
                metrics = self._validate(when)
            except LearnerLost as lost:
                self.recover(lost)
            else:
                self._running.record_evaluation(metrics, step)
                return

    def _validate(self, when: str) -> dict[str, float]:
        running = self._running
        asked = self.learner.evaluate.remote()
        metrics: dict[str, float] = self._driver.ask_learner("an evaluation", asked)
        running.summary[f"validation {when}"] = metrics
        running.directory.append_event("evaluation", who=when, seconds=metrics["time/validation"])
        shown = "  ".join(
            f"{name.removeprefix('validation/')} {value:.4g}"
            for name, value in metrics.items()
            if name.startswith("validation/")
        )
        running.progress.note(f"held-out rows, {when}: {shown}")
        return metrics

    def _recall_before(self) -> None:
        """The evaluation before the first step, from an earlier attempt's line of it."""
        for line in self._running.directory.read_metrics():
            if line["step"] == 0 and "time/validation" in line:
                metrics = {name: value for name, value in line.items() if name != "step"}
                self._running.summary["validation before"] = metrics
