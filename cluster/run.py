"""A run from prompts to pushed weights: the work of the driver, in order.

  prompts -> rollout workers <=> policy engines, reward model    requests in batches, by mailbox
                 |     +===> teachers, reference                 scores at each segment's own T
                 v deliver
               queue --keep--> out/groups                        metadata and references only
                 | take
                 v
    one_step -> learner: load, train -> Publisher -> engines: acknowledge the version
                 ^--- credit for new groups <--- publish

  run waits for             unblocked by                    deadline
  every actor's start       its first answer                start deadline of its role
  push and handshake        engines, learner                no_progress_s
  a step's groups           deliveries                      Watchdog: no actor makes progress
  the learner's step        load, train, push               no_progress_s without its progress
  an evaluation             its responses                   no_progress_s, after five tries
  a checkpoint              the learner, its writer         no_progress_s; 600 s after failures
  a full disk               free space                      1,800 s, then the run fails
  last canaries             answers of scorers              30 s after a signal

During every wait the driver checks for signals twice a second, and coroutines advance
(`Background`): heartbeats and restarts of each actor (`Supervisor`), announcements to workers,
statuses of workers and of the queue (`Fleet`), canaries, engines that join, and evaluations that
run concurrently with training. If the learner is lost or its work fails, it returns to a checkpoint
(`_repeated`, `recover`); `Driver.ask_learner` distinguishes its errors from those of engines.

sft, dpo, reward_model and train_from= are the same run with only a learner.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from cluster.base.outcomes import Interrupted, LearnerFailed, LearnerLost, RunFailed
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.config.supervised import SupervisedConfig
from cluster.placement.roles import LEARNER
from cluster.queue.group_queue import QueueClosed
from cluster.recipes.checkpoints import Checkpoints
from cluster.recipes.context import Observer, RunContext
from cluster.recipes.opening import placed, run_context
from cluster.recipes.plan import NoEvaluations, RunPlan, is_over
from learner.checkpoint import Checkpoint

if TYPE_CHECKING:
    from cluster.runtime.learner_alone import LearnerAlone

Value = TypeVar("Value")
# Time limit in seconds of a step in progress when a signal ends the run.
_STEP_S = 600.0


def run(config: CommonConfig, console: Console, observer: Observer | None = None) -> None:
    """Run to the end. `outcomes.exit_code` maps exceptions to the command's exit code.

    Raises:
        IsothermError: the settings, models or data are invalid, or the handshake failed.
        RunFailed: an actor failed too often, or made no progress.
        Interrupted: the run received a signal; every completed step is in a checkpoint.
    """
    with _prepared(config, console) as plan:  # takes the lock of out/; starts nothing
        if is_over(plan, console):
            return
        with (
            run_context(plan, console, observer or Observer()) as context,
            placed(context) as places,
        ):
            Run(context, *plan.parts(context, places)).run_to_end()


def _prepared(config: CommonConfig, console: Console) -> AbstractContextManager[RunPlan]:
    if isinstance(config, RolloutConfig):
        from cluster.recipes.on_policy import prepared  # engines, which other recipes do not need

        return prepared(config, console)
    from cluster.recipes.supervised import prepared

    assert isinstance(config, SupervisedConfig)
    return prepared(config, console)


class Run:
    """One run. `step` counts the steps that the learner's weights contain.

    Args:
        actors: `Fleet` or `LearnerAlone`, not started yet.
    """

    def __init__(
        self, context: RunContext, actors: LearnerAlone, evaluations: NoEvaluations
    ) -> None:
        self.context, self.actors, self.evaluations = context, actors, evaluations
        self.step, self.steps = context.first_step, context.config.steps
        self.checkpoints = Checkpoints(actors, context, evaluations)
        self._step_call: Any = None  # the learner's call of the step in progress
        self._failed_after: int | None = None  # value of `step` at the last failure of a step

    def run_to_end(self) -> None:
        """Run until the last step, then end all actors. Raises the reason of an early end."""
        try:
            self.start()
            try:
                checkpoint = self.train()
                self.evaluations.finish()
            except Interrupted:
                if self.context.run_started:
                    self.actors.ask_last_canaries(self.context.last_step)
                raise
            finally:
                self.evaluations.abandon("the run ends")
            self.finish(checkpoint)
        finally:
            self.actors.close()

    def start(self) -> None:
        """Start every actor; verify that all score alike before the first sample is taken."""
        self.actors.start(self.context.resume_from)
        self.context.trackers.skip_kept()
        self._repeated(self._prove)
        self.actors.work()  # starts the rollout workers

    def _prove(self) -> None:
        self.actors.compare_all(self.context.resume_from)  # exit code 3
        self.evaluations.before_steps()

    def train(self) -> Checkpoint:
        """Train until the last step, with recoveries of the learner; return the last checkpoint."""
        try:
            return self._repeated(self._steps)
        except Exception:
            self.checkpoints.finish_after_failure()  # completes a checkpoint that is being written
            raise

    def _steps(self) -> Checkpoint:
        try:
            while self.step < self.steps:
                self.one_step()
            return self.checkpoints.last()
        except Interrupted:
            self.end_step()
            self.checkpoints.save_now()
            raise

    def _repeated(self, work: Callable[[], Value]) -> Value:
        """Do work that needs the learner, and repeat it after each recovery of the learner."""
        while True:
            try:
                return work()
            except LearnerLost as lost:
                if self.context.signals.received is not None:  # no time for another learner
                    raise
                self.recover(lost)

    def one_step(self) -> None:
        """Wait for groups -> take, load, train, push -> evaluate -> record -> checkpoint."""
        self.evaluations.collect()
        waited_s = self.actors.wait_for_groups()
        self._step_call = self.actors.learner.step.remote(waited_s)  # `PolicyLoop.step`
        metrics = self.actors.driver.ask_learner("the learner's step", self._step_call)
        self.trained(metrics)
        self.checkpoints.after_step(self.step)  # written concurrently with the next steps

    def trained(self, metrics: dict[str, float]) -> None:
        """Record a trained step, whose weights are on the engines or being pushed."""
        self.step, self._step_call = int(metrics["step"]), None
        metrics = metrics | self.checkpoints.times() | self.actors.turns()
        self.context.trained(metrics)
        try:
            if self.context.signals.received is None:  # after a signal the checkpoint comes first
                metrics = metrics | self.evaluations.after_step(self.step)
        finally:
            self.context.record(metrics)  # even if the evaluation fails: the step is trained
        if self.context.signals.received is None:
            self.actors.ask_canaries(self.step)

    def recover(self, lost: LearnerLost) -> None:
        """Restart the learner from the newest checkpoint before its weights were bad.

        Raises:
            LearnerFailed: the work of the same step has failed twice.
        """
        while True:
            if isinstance(lost, LearnerFailed):
                if self._failed_after == self.step:
                    raise lost
                self._failed_after = self.step
            self._step_call = None
            self.checkpoints.before_recovery(lost)
            try:
                self.step = self.actors.recover(lost)
            except LearnerLost as again:
                lost = again
                continue
            self.context.rewound(self.step)
            self.evaluations.rewound(self.step)
            return

    def end_step(self) -> None:
        """Complete a step in progress after a signal, unless the step has found no groups.

        Raises:
            RunFailed: the step failed; the learner's weights may be those of half a step.
        """
        self.actors.cancel_waits()
        if self._step_call is None:
            return
        try:
            metrics = self.actors.driver.value(
                "the learner's step", self._step_call, timeout=_STEP_S, worker=LEARNER
            )
        except RunFailed as failed:
            if isinstance(failed.__cause__, QueueClosed):
                return
            raise
        self.trained(metrics)

    def finish(self, checkpoint: Checkpoint) -> None:
        """Finish after the last step: last checks, evaluations, and the files of a finished run."""
        checkpoint = self._repeated(partial(self._evaluated, checkpoint))
        self.context.set_aside(self.actors.set_aside(checkpoint))
        self.context.complete(checkpoint)  # certificate.json, final/, summary.json

    def _evaluated(self, checkpoint: Checkpoint) -> Checkpoint:
        if self.step < self.steps:  # the checkpoint was damaged when the learner needed it
            checkpoint = self._steps()
        self.actors.settle()  # the check of the last push
        self.evaluations.after_steps(checkpoint.step)
        return checkpoint
