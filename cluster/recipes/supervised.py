"""recipe=sft, dpo and reward_model: one model, trained on existing data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.text import Text

from cluster.config.supervised import DpoConfig, RewardModelConfig, SftConfig, SupervisedConfig
from cluster.config.supervised_checks import (
    SupervisedInputs,
    check_dpo,
    check_reward_model,
    check_sft,
)
from cluster.hosts.learners import supervised_learners
from cluster.placement.device_choice import with_device
from cluster.placement.places import Places
from cluster.recipes.context import RunContext
from cluster.recipes.opening import opened
from cluster.recipes.plan import NoEvaluations, RunPlan, kept_line, learner_line
from cluster.run_files.fork import find_fork
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.learner_alone import LearnerAlone
from distill.settings import changed


@contextmanager
def prepared(config: SupervisedConfig, console: Console) -> Iterator[RunPlan]:
    """Check the run and print its plan.

    Raises:
        IsothermError: the run cannot work with these settings.
    """
    kind = _checked(config)
    inputs, asked = kind.inputs, config.cluster.device
    print_line = partial(console.print, highlight=False)
    config, notice = with_device(config)
    if notice:
        print_line(notice)
    epochs = "" if config.epochs is None else f" ({config.epochs:g} epochs)"
    units = len(inputs.rows_D) // config.rows_per_unit
    config = config.trained_on(units)
    apart = sum(len(source.rows_D) for source in inputs.held_out) // config.rows_per_unit
    both = f", {inputs.overlap} of them with a prompt that is trained" if inputs.overlap else ""
    held_out = f" ({apart} held out{both})" if apart else ""
    recorded = changed(config, device=asked)
    directory = RunDirectory(recorded, inputs.digests, inputs.stops)
    config.check_keep_best()
    with opened(config, directory, print_line) as resume_from:
        fork = None
        if resume_from is None:
            fork = find_fork(config, tokenizer=inputs.tokenizer, print_line=print_line)
        console.print(
            f"{config.recipe}: {config.model.path} on {units} {kind.noun}{held_out}\n"
            f"{kind.line}"
            f"  stops at  {inputs.stops.described(inputs.tokenizer)}\n"
            f"  learner   {learner_line(config)}\n"
            + (f"  start     {fork.described}\n" if fork else "")
            + f"  run       {config.steps} steps{epochs} of {config.data.batch_size} {kind.noun} "
            f"into {directory.path}\n"
            f"  keeps     {kept_line(config, directory.path)}"
        )
        if inputs.warning is not None:
            warning = Text("WARNING", "bold red")
            console.print(warning, f": {inputs.warning}", sep="", highlight=False)
        yield RunPlan(
            config=config,
            tokenizer=inputs.tokenizer,
            longest_row=inputs.longest_rows(config.rows_per_unit),
            directory=directory,
            resume_from=resume_from,
            fork=fork,
            untrained={"num_rows": units},
            parts=partial(_parts, config, inputs),
        )


@dataclass(frozen=True, slots=True)
class _Checked:
    """Checked data of a recipe, and parts of its plan.

    Attributes:
        noun: unit that `batch_size` counts.
        line: a line of the plan that only this recipe has.
    """

    noun: str
    inputs: SupervisedInputs
    line: str = ""


def _checked(config: SupervisedConfig) -> _Checked:
    match config:
        case DpoConfig():
            own = "the model before training" if config.fork_from is None else config.model.path
            reference = config.model.reference or own
            line = f"  reference {reference} (beta={config.objective.beta:g})\n"
            return _Checked("pairs", check_dpo(config), line)
        case RewardModelConfig():
            inputs = check_reward_model(config)
            assert inputs.padding is not None, "its rows are checked against its padding"
            padding = inputs.tokenizer.convert_ids_to_tokens(inputs.padding)
            return _Checked("pairs", inputs, f"  head      one score (padding {padding})\n")
        case SftConfig():
            return _Checked("rows", check_sft(config))
    raise TypeError(config)


def _parts(
    config: SupervisedConfig, inputs: SupervisedInputs, context: RunContext, places: Places
) -> tuple[LearnerAlone, NoEvaluations]:
    make = partial(supervised_learners, config, inputs, context.directory, places)
    learner = LearnerAlone(
        config, places, make, context.directory, context.signals, context.progress.note
    )
    if not config.eval.runs:
        return learner, NoEvaluations()
    return learner, Validation(config, context, learner)


class Validation(NoEvaluations):
    """Evaluations by the learner itself, on held-out rows, between steps."""

    def __init__(self, config: SupervisedConfig, context: RunContext, actors: LearnerAlone) -> None:
        self._config, self._context, self._actors = config, context, actors

    def before_steps(self) -> None:
        if self._context.first_step == 0:
            self._context.record_evaluation(self._validate("before"), 0)
        else:
            self._context.recalls("validation", "before", 0)

    def after_step(self, step: int) -> dict[str, float]:
        every = self._config.eval.every
        due = every > 0 and step % every == 0 and step < self._config.steps
        return self._validate(f"step {step}") if due else {}

    def after_steps(self, step: int) -> None:
        if not self._context.recalls("validation", "after", step):
            self._context.record_evaluation(self._validate("after"), step)

    def _validate(self, when: str) -> dict[str, float]:
        context = self._context
        asked = self._actors.learner.evaluate.remote()
        metrics: dict[str, float] = self._actors.driver.ask_learner("an evaluation", asked)
        context.summary[f"validation {when}"] = metrics
        context.directory.append_event("evaluation", who=when, seconds=metrics["time/validation"])
        shown = "  ".join(
            f"{name.removeprefix('validation/')} {value:.4g}"
            for name, value in metrics.items()
            if name.startswith("validation/")
        )
        context.progress.note(f"held-out rows, {when}: {shown}")
        return metrics
