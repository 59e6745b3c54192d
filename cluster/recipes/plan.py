"""A checked run that has not begun: its parts, and the lines that describe it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cluster.config.common import CommonConfig
from cluster.config.disk_plan import DiskPlan
from cluster.config.learning_rate import LARGEST
from cluster.placement.layout import describe_layout
from cluster.placement.places import Places
from cluster.run_files.fork import Fork
from cluster.run_files.run_directory import RunDirectory
from distill.types import Tokenizer
from learner.checkpoint import Checkpoint
from learner.lora import check_lora
from learner.memory import estimate_memory

# A learning rate above the largest one of lr=auto by more than this factor gets a remark.
_LR_TIMES = 10

if TYPE_CHECKING:
    from cluster.recipes.context import RunContext
    from cluster.runtime.learner_alone import LearnerAlone


class NoEvaluations:
    """Evaluations of a run without any. `cluster.run` calls these methods for every kind of run."""

    def before_steps(self) -> None:
        """Evaluate the weights before the first step, or restore an earlier attempt's metrics."""

    def collect(self) -> None:
        """Record an evaluation that ran during training, if it has ended."""

    def after_step(self, step: int) -> dict[str, float]:
        """Evaluate the weights of a step if due; returns metrics for the step's line."""
        return {}

    def wants_checkpoint(self, step: int) -> bool:
        """True if the weights of `step` are evaluated during training, and may be the best."""
        return False

    def finish(self) -> None:
        """Wait for the evaluation that runs during training, after the last step."""

    def abandon(self, why: str) -> None:
        """Abandon the evaluation that runs during training."""

    def rewound(self, step: int) -> None:
        """Abandon evaluations of steps after `step`, to which the learner has returned."""

    def after_steps(self, step: int) -> None:
        """Evaluate the weights after the last step, if no earlier attempt has recorded that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run whose settings, models and data are checked, and whose directory is locked.

    Attributes:
        longest_row: tokens of the longest row, or of the rows of a pair, that a step may train.
        fork: start of a run that has no checkpoint of its own yet.
        untrained: data state (`delivery`) of a checkpoint before the first step.
        parts: makes the run's actors, which are not started yet, and its evaluations.
    """

    config: CommonConfig
    tokenizer: Tokenizer
    longest_row: int
    directory: RunDirectory
    resume_from: Checkpoint | None
    fork: Fork | None
    untrained: Mapping[str, Any]
    parts: Callable[[RunContext, Places], tuple[LearnerAlone, NoEvaluations]]


def is_over(plan: RunPlan, console: Console) -> bool:
    """True if there is nothing to run (a dry run, or a finished one); the reason is printed."""
    config, resume_from = plan.config, plan.resume_from
    if config.only_plans:
        console.print(describe_layout(config, plan.longest_row), highlight=False)
        console.print("settings that differ from the defaults, in the format of config=FILE.yaml:")
        # Not wrapped: the file repeats the command.
        console.print(plan.directory.yaml, highlight=False, soft_wrap=True, end="")
        return True
    if resume_from is None or resume_from.step < config.steps or not plan.directory.is_finished():
        return False
    console.print(
        f"{plan.directory.path} already contains this finished run: nothing to do. Raise steps= "
        "to continue it, or choose another out="
    )
    return True


def kept_line(config: CommonConfig, out: Path) -> str:
    """Description of the checkpoints that are kept, their disk space, and the trackers.

    Raises:
        ConfigError: the disk has less room.
    """
    needed = ""
    if (disk := DiskPlan.of(config)) is not None:
        disk.require_room(out)
        needed = f"; {disk}"
    rules, trackers = config.checkpoint, config.tracking.trackers
    kept = [f"the newest {rules.keep_last}"]
    kept += [f"each {rules.keep_every}th"] if rules.keep_every else []
    kept += [f"the best by {rules.keep_best}"] if rules.keep_best else []
    kept += ["those that replays begin from (keep=)"] if config.replayed_checkpoints else []
    tracked = f"; tracked by {', '.join(trackers)}" if trackers else ""
    return f"a checkpoint every {rules.every} steps (kept: {', '.join(kept)}){needed}{tracked}"


def learner_line(config: CommonConfig, updates_per_step: int = 1) -> str:
    """The learner's line of the resource plan."""
    if config.only_keeps:
        return "none (rollout_only=True): groups are kept, for train_from="
    estimate = estimate_memory(config.model.path, config.learner_holding) or "memory unknown"
    if config.learner.workers > 1:
        replicas = config.learner.replicas
        each = f"in each of {replicas} replicas " if replicas > 1 else ""
        estimate = f"{each}{config.learner.shards} workers share {estimate}"
    rate = f"lr {config.learner.lr:g}"
    if config.learner.lr > _LR_TIMES * LARGEST:
        times = config.learner.lr / LARGEST
        rate += f", {times:.0f} times the rate above which AdamW tends to diverge"
    if (updates := config.steps * updates_per_step) < config.learner.warmup_steps:
        rate += f", never reached: warmup_steps={config.learner.warmup_steps} of {updates} updates"
    if not config.lora.trains_adapter:
        return f"{estimate}, {rate}"
    share = check_lora(config.lora, config.model.path)
    adapter = f"LoRA rank {config.lora.rank}"
    if config.lora.adapter is not None:
        adapter = f"adapter {config.lora.adapter}"
    return f"{estimate}; {adapter} on {share:.0%} of the weights, {rate}"
