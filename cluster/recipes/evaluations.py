"""Evaluations of an opd or rl run: before, between, during (eval.engines=) and after its steps.

between   the driver waits; the metrics are in the step's own line
during    the weights of the step are pushed to separate engines, which hold them until the
          evaluation ends; its metrics are a separate line of the same step, with `eval/version`.
          Lines are written between steps, while no checkpoint is being saved. One whose engines
          are all gone is lost, and repeated with later weights
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from actors.rollout.evaluator import Evaluation
from cluster.base.background import forget
from cluster.base.outcomes import LearnerLost
from cluster.config.on_policy import RolloutConfig
from cluster.handles.engine_pool import EnginePool
from cluster.placement.roles import (
    EVALUATION,
    POLICY,
    queried_roles,
    served_teachers,
    teacher_roles,
)
from cluster.recipes.context import RunContext
from cluster.recipes.plan import NoEvaluations
from cluster.run_files.tracking import measured_line
from cluster.runtime.fleet import Fleet
from distill.errors import CheckpointError

# Number of problems of an evaluation whose responses keep=sample keeps.
_SAMPLED_PROBLEMS = 8


class EvaluationSchedule:
    """Schedule of the steps whose weights are evaluated. One evaluation runs at a time.

    Args:
        every: steps between two evaluations.
        steps: steps of the run; the evaluation after the last one is not scheduled here.
    """

    def __init__(self, every: int, steps: int) -> None:
        self._every, self._steps = every, steps
        self._due_step: int | None = None  # a due step whose evaluation has not begun, or was lost
        self._newest = (0, 0)  # the due step, and the one whose weights were taken
        self.running: int | None = None

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0 and step < self._steps

    def wanted(self, step: int) -> bool:
        """True if an evaluation should begin after `step`: its own, or one that was lost."""
        if self.due(step):
            self._due_step = step
        return self._due_step is not None and step < self._steps

    def began(self, step: int) -> None:
        assert self.running is None and self._due_step is not None
        self.running, self._newest, self._due_step = step, (self._due_step, step), None

    def done(self) -> None:
        self.running = None

    def lost(self) -> None:
        """Schedule the running evaluation again, with the weights of a later step."""
        self.running, self._due_step = None, self._newest[0]

    def rewound(self, step: int) -> int | None:
        """Go back to `step`. Returns the step of the running evaluation if its weights are lost."""
        abandoned = None
        due, taken = self._newest
        if taken > step:
            abandoned, self.running = self.running, None
            self._due_step, self._newest = due, (0, 0)
        if self._due_step is not None and self._due_step > step:
            self._due_step = None  # the step will be reached again
        return abandoned


class Evaluations(NoEvaluations):
    """All evaluations of one run, which has held-out problems."""

    def __init__(self, config: RolloutConfig, context: RunContext, fleet: Fleet) -> None:
        self._config, self._context, self._fleet = config, context, fleet
        self._schedule = EvaluationSchedule(config.eval.every, config.steps)
        self._create_task = fleet.driver.background.create_task
        self._running: asyncio.Task[Evaluation] | None = None  # during steps
        self._pinned: Mapping[str, Any] = {}  # its engines
        self._learner_lost = False

    # before and after all steps

    def before_steps(self) -> None:
        """Evaluate the teachers and, concurrently, the untrained policy.

        A resumed run restores the policy's metrics of an earlier attempt instead.
        """
        if self._context.first_step:
            self._evaluate_teachers()
            self._context.recalls("eval", "before", 0)
            return
        self._fleet.check_push(wait=True)
        policy = self._create_task(self._measured("before", lambda: self._pool(POLICY)))
        try:
            self._evaluate_teachers()
            measured = self._answered(policy)
        finally:
            forget(policy)
        self._note("before", 0, measured)
        self._context.record_evaluation(measured.metrics, 0)

    def after_steps(self, step: int) -> None:
        """Evaluate the trained policy, unless a killed attempt has recorded that already."""
        if not self._context.recalls("eval", "after", step):
            self._context.record_evaluation(self._evaluate("after", step), step)

    def _evaluate_teachers(self) -> None:
        """Evaluate each teacher with the same decoder on the same prompts, as the target level.

        A teacher that is the policy itself is skipped. A resumed run reuses the metrics of an
        earlier attempt, since the teacher's weights are the same.
        """
        if self._config.teacher.moves:
            return
        first_step = self._context.first_step
        lines = self._context.directory.read_metrics() if first_step else []
        for name, role in served_teachers(self._config).items():
            if f"eval {role}" in self._context.summary:  # before the learner was lost
                continue
            family = f"eval/teacher={name}/" if name else "eval/teacher/"
            if known := _of_family(lines, family):
                self._context.summary[f"eval {role}"] = known
                continue
            measured = self._answered(self._decoded(role, partial(self._pool, role)))
            self._note(role, first_step, measured)
            self._context.record_evaluation(
                {k.replace("eval/", family, 1): v for k, v in measured.metrics.items()}, first_step
            )

    # between two steps

    def after_step(self, step: int) -> dict[str, float]:
        """Evaluate the weights of a step if due; returns metrics for the step's line."""
        if not self._config.eval.engines:
            return self._evaluate(f"step {step}", step) if self._schedule.due(step) else {}
        self.collect()
        if not self._schedule.wanted(step):
            return {}
        metrics = {}
        if (before := self._schedule.running) is not None:
            metrics["time/eval_wait"] = self._wait(before, step)
        self._begin(step)
        return metrics

    # during steps

    def wants_checkpoint(self, step: int) -> bool:
        return self._schedule.running == step and self._config.checkpoint.keep_best is not None

    def _begin(self, step: int) -> None:
        """Begin an evaluation of the current weights, if an evaluation engine is up."""
        pinned = self._fleet.admission.push_to_evaluators()
        if pinned is None:
            if self._schedule.due(step):
                self._context.progress.note(
                    f"the evaluation of step {step} is delayed: no evaluation engine is running"
                )
            return
        if self._config.checkpoint.keep_best is not None:
            try:
                self._context.directory.store.hold(step)
            except CheckpointError as error:  # a full disk
                self._context.progress.note(
                    f"WARNING: the checkpoint of step {step}, which is being evaluated, may be "
                    f"deleted: {error}"
                )
        version, self._pinned = pinned
        self._running = self._create_task(
            self._measured(
                f"step {step}",
                lambda: EnginePool(EVALUATION, self._holding, self._patience_s),
                version,
            )
        )
        self._schedule.began(step)
        self._context.directory.append_event(
            "evaluation begins", step=step, version=version, engines=list(self._pinned)
        )

    @property
    def _holding(self) -> dict[str, Any]:
        """Engines that hold the weights that are evaluated. One that was restarted does not."""
        serving = self._fleet.supervisor.serving(EVALUATION)
        return {name: h for name, h in self._pinned.items() if serving.get(name) == h}

    @property
    def _is_over(self) -> bool:
        """True if no evaluation runs, it has ended, or its engines are gone."""
        return self._running is None or self._running.done() or not self._holding

    def collect(self) -> None:
        """Record the evaluation that runs during training, if it has ended.

        Raises:
            IsothermError: the evaluation failed; the same error as of one between steps.
        """
        step, task = self._schedule.running, self._running
        if step is None or task is None or not self._is_over:
            return
        self._discard()
        if not self._holding and (not task.done() or task.exception()):
            self._lost(step, "its engines died")
            return
        measured = task.result()
        self._schedule.done()
        self._note(f"step {step}", step, measured)
        self._context.record_late(measured.metrics, step)
        self._context.directory.store.release()

    def _lost(self, step: int, why: str) -> None:
        self._schedule.lost()
        self._context.directory.store.release()
        self._context.directory.append_event("evaluation lost", step=step, why=why)
        self._context.progress.note(
            f"the evaluation of step {step} is lost: {why}; the next evaluation uses later weights"
        )

    def _wait(self, before: int, step: int | None) -> float:
        """Wait for the running evaluation to end; returns the seconds waited."""
        began = time.monotonic()
        for_whom = "the run ends" if step is None else f"that of step {step} is due"
        self._context.progress.note(f"waiting for the evaluation of step {before}: {for_whom}")
        while self._running is not None and not self._is_over:
            self._fleet.driver.waited_for(self._running)
            if not self._learner_lost:
                self._fleet.admission.admit_waiting()
        seconds = time.monotonic() - began
        self._context.directory.append_event("evaluation awaited", step=before, seconds=seconds)
        self.collect()
        return seconds

    def finish(self) -> None:
        """Wait for the running evaluation, after the last step."""
        self.collect()
        while (running := self._schedule.running) is not None:
            try:
                self._wait(running, None)
            except LearnerLost as lost:  # the learner is no longer needed
                self._learner_lost = True
                self._context.progress.note(f"{lost}; its last checkpoint contains every step")

    def abandon(self, why: str) -> None:
        """Abandon the running evaluation, if any, and report why."""
        if (step := self._schedule.running) is not None:
            self._schedule.done()
            self._report_abandoned(step, why)

    def rewound(self, step: int) -> None:
        """Abandon evaluations of steps after `step`, to which the learner has returned."""
        if (abandoned := self._schedule.rewound(step)) is not None:
            self._report_abandoned(abandoned, f"the learner is back at step {step}")

    def _discard(self) -> None:
        if self._running is not None:
            forget(self._running)
        self._running = None

    def _report_abandoned(self, step: int, why: str) -> None:
        self._discard()
        self._context.directory.store.release()
        self._context.directory.append_event("evaluation given up", step=step, why=why)
        self._context.progress.note(f"the evaluation of step {step} is abandoned: {why}")

    # an evaluation

    def _evaluate(self, when: str, step: int) -> dict[str, float]:
        """Evaluate the policy's current weights while training waits."""
        self._fleet.check_push(wait=True)
        measured = self._answered(self._measured(when, lambda: self._pool(POLICY)))
        self._note(when, step, measured)
        return measured.metrics

    def _answered(
        self, evaluation: Coroutine[Any, Any, Evaluation] | asyncio.Task[Evaluation]
    ) -> Evaluation:
        """Value of an evaluation that the run waits for; it admits engines that start meanwhile."""
        task = self._create_task(evaluation)
        try:
            while not self._fleet.driver.waited_for(task):
                self._fleet.admission.admit_waiting()
            return task.result()
        finally:
            forget(task)

    async def _measured(
        self, when: str, policy: Callable[[], EnginePool], version: int | None = None
    ) -> Evaluation:
        """Measure the held-out prompts: accuracy with the serving decoder, and KL(p_T || q_T).

        The KL is measured only if there is a teacher.
        """
        started = time.perf_counter()
        decoded = await self._decoded(when, policy)
        metrics = decoded.metrics
        if teachers := teacher_roles(self._config):
            metrics |= await self._fleet.evaluator_calls.ask(
                "evaluation",
                lambda evaluator: evaluator.reverse_kl.remote(
                    policy(),
                    self._pools(teachers, policy),
                    self._config.sampling.train(),
                    models=self._queried(policy),
                ),
            )
        metrics["time/eval"] = time.perf_counter() - started
        if version is not None:
            metrics["eval/version"] = version
        return decoded

    async def _decoded(self, when: str, engines: Callable[[], EnginePool]) -> Evaluation:
        """Metrics of the engines' responses, and the responses that are kept."""
        sampling = self._config.eval.sampling(self._config.sampling.max_new_tokens)
        keep = {"all": None, "none": 0}.get(str(self._config.keep), _SAMPLED_PROBLEMS)
        return await self._fleet.evaluator_calls.ask(
            f"evaluation, {when}",
            lambda evaluator: evaluator.evaluate.remote(
                engines(), sampling, self._queried(engines), keep
            ),
        )

    def _queried(self, policy: Callable[[], EnginePool]) -> dict[str, EnginePool]:
        """Models that environments may query in an evaluation, besides the policy."""
        return self._pools(queried_roles(self._config), policy)

    def _pools(
        self, roles: Mapping[str, str], policy: Callable[[], EnginePool]
    ) -> dict[str, EnginePool]:
        return {
            name: policy() if role == POLICY else self._pool(role) for name, role in roles.items()
        }

    def _pool(self, role: str) -> EnginePool:
        return self._fleet.pool(role, patience_s=self._patience_s)

    @property
    def _patience_s(self) -> float:
        """Seconds that a pool waits for an engine that is restarted."""
        return self._fleet.supervisor.hang_after_s

    def _note(self, when: str, step: int, measured: Evaluation) -> None:
        """Record an evaluation everywhere except in metrics.jsonl."""
        metrics, directory = measured.metrics, self._context.directory
        if measured.responses:
            directory.append_evaluation(step, when, measured.responses)
        self._context.summary[f"eval {when}"] = metrics
        directory.append_event("evaluation", who=when, seconds=metrics.get("time/eval"))
        self._context.progress.note(f"evaluation, {when}: {measured_line(metrics)}")


def _of_family(lines: Sequence[Mapping[str, float]], family: str) -> dict[str, float]:
    """Newest metrics of a teacher, under the names of an evaluation; empty without any."""
    for line in reversed(lines):
        found = {n.replace(family, "eval/", 1): v for n, v in line.items() if n.startswith(family)}
        if found:
            return found
    return {}
