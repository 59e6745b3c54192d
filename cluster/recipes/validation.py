"""Evaluations of a learner on held-out rows (sft, dpo, reward_model), and their absence."""

from __future__ import annotations

from cluster.config.supervised import SupervisedConfig
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
