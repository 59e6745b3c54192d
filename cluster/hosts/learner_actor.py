"""The learner's actor: hosts a training loop, which it builds itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch

from actors.sglang.parallelism import parallelism
from cluster.config.on_policy import RolloutConfig
from cluster.config.rollout_checks import LearnerInputs
from cluster.config.supervised import DpoConfig, RewardModelConfig, SupervisedConfig
from cluster.config.supervised_checks import SupervisedInputs
from cluster.hosts.followers import ActorFollowers
from cluster.queue.group_queue import GroupQueue
from cluster.run_files.run_directory import RunDirectory
from cluster.store.kept_groups import KeptGroupWriter
from cluster.store.replay_log import ReplayLog, push_nowhere
from cluster.supervision.supervise import WorkDone
from cluster.weights.publisher import Publisher
from cluster.weights.transport import PushSettings
from distill.models.loading import resolve_device
from distill.objective.batching import TrainingRow
from distill.stops import StopTokens
from distill.types import FloatArray
from learner.canaries import CopyAnswer, CopyQuestion
from learner.checkpoint import Checkpoint
from learner.checkpoint_writer import Written
from learner.config import LearnerConfig
from learner.forward import LossFunction
from learner.learner import Learner
from learner.loop import (
    GroupSource,
    PolicyLoop,
    Publish,
    SupervisedMix,
    mixed_loss,
)
from learner.policy_loss import (
    PolicyObjectiveLoss,
    PreferenceLoss,
    TeacherSamplesLoss,
    cross_entropy_loss,
    policy_loss_of,
    reward_model_loss,
)
from learner.process_group import Membership, WorkerGroup
from learner.supervised import RowStream, SupervisedLoop, with_reference
from learner.teachers import LocalTeachers
from learner.trace import Tracing

# Supervised rows that are trained together with rollouts: their number per update, and the default
# of `sft.coef`.
SFT_BATCH_SIZE, SFT_COEF = 8, 0.1
# Interval, in steps, at which keep=sample keeps a group.
_SAMPLE_EVERY = 10
# Longest wait for the turn on GPUs, as a multiple of no_progress_s. An engine that has the turn and
# makes no progress is terminated after one; calls of a working engine may take longer.
_TURN_WAITS = 10

# Makes the publishers of a learner's weights: to policy engines, and to a teacher's if it follows.
Publishers = Callable[[Learner], tuple[Publisher, Publisher | None]]


class LearnerActor:
    """Hosts a training loop in an actor, which builds it."""

    def __init__(self, training: Training, membership: Membership | None) -> None:
        self._followers = None if membership is None else membership.followers
        self._loop = training.loop(membership)

    def progress(self) -> WorkDone:
        """Heartbeat; call it in `HEALTH_GROUP`. Raises: as `ActorFollowers.check`."""
        if isinstance(self._followers, ActorFollowers):
            self._followers.check()
        return WorkDone(self._loop.learner.progress.count)

    def step(self, waited_s: float) -> dict[str, float]:
        return self._loop.step(waited_s)

    def save(self) -> Checkpoint:
        return self._loop.save()

    def begin_save(self) -> Checkpoint | None:
        return self._loop.begin_save()

    def written(self, wait: bool) -> Written | None:
        """See `CheckpointWriter.written`; in `JOIN_GROUP` it does not wait for other calls."""
        return self._loop.writer.written(wait=wait)

    def publish(self) -> str:
        """Push the weights; returns a description of the transport to each engine."""
        self._policy.publish()
        self._publisher.wait()
        return self._publisher.describe()

    def pushed(self, wait: bool) -> None:
        """Raise the error of the last push if it failed. `wait`: wait for its end first."""
        self._publisher.wait() if wait else self._publisher.check()

    def admit(self, engines: Mapping[str, Any]) -> None:
        """Push the current weights, and every later version, to policy engines that join."""
        self._publisher.admit(engines, *self._policy.weights())

    def admit_teachers(self, engines: Mapping[str, Any]) -> None:
        """Push the weights of the lagged or EMA teacher to engines of it that join."""
        _, publisher = self._publishers
        with self._loop.learner.as_teacher():
            publisher.admit(engines, *self._policy.teacher_weights())

    def join(self, engines: Mapping[str, Any]) -> int | None:
        """Admit policy engines concurrently with other calls; call it in `JOIN_GROUP`.

        Returns the weight version; None if there is no copy of it, so `admit` is required.
        """
        return self._publisher.join(engines)

    def lend(self, engines: Mapping[str, Any]) -> tuple[int, dict[str, str]]:
        """Push the current weights, but no later ones, to evaluation engines.

        Returns the version, and the reason for each engine that did not load it.
        """
        weights, version = self._policy.weights()
        return version, self._publisher.lend(engines, weights, version)

    def remove_engines(self, names: Sequence[str]) -> None:
        """Remove engines: they receive no more weights."""
        for publisher in self._publishers:
            publisher.remove_engines(names)

    def settle(self) -> None:
        """Finish the checks of the last pushes."""
        for publisher in self._publishers:
            publisher.settle()

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out rows of supervised data."""
        assert isinstance(self._loop, SupervisedLoop)
        return self._loop.evaluate()

    @property
    def _policy(self) -> PolicyLoop:
        assert isinstance(self._loop, PolicyLoop)
        return self._loop

    @property
    def _publishers(self) -> list[Publisher]:
        """Publishers of the policy's weights, and of a lagged or EMA teacher's if there is one."""
        both = self._policy.publisher, self._policy.teacher_publisher
        return [publisher for publisher in both if isinstance(publisher, Publisher)]

    @property
    def _publisher(self) -> Publisher:
        return self._publishers[0]

    def logprobs(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        return self._loop.learner.logprobs(rows_D)

    def teacher_logprobs(self, name: str, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """Log-probs by the learner's teacher: a copy (estimator=full), or a lagged or EMA one."""
        return self._loop.learner.teacher_logprobs(name, rows_D)

    def canary(self, question: CopyQuestion) -> list[list[CopyAnswer]]:
        """Canary answers of the frozen models of every worker, by rank."""
        return self._loop.learner.canary(question)


def publishers_to(
    config: RolloutConfig,
    policies: Mapping[str, Any],
    teachers: Mapping[str, Any],
    queue: GroupQueue,
    push: PushSettings,
    learner: Learner,
) -> tuple[Publisher, Publisher | None]:
    """Publishers to the policy engines, and to those of a lagged or EMA teacher."""
    policy = Publisher(
        policies,
        push,
        learner.logprobs,
        base_logprobs=learner.base_logprobs,
        credit=queue.publish,
        on_overlap=queue.push if config.pushes_overlap else None,
        progress=learner.progress,
        lenders=learner.lender_places(),
    )
    if config.teacher_rule is None:
        return policy, None
    push = push.for_teachers(parallelism(config.teacher.server_flags))
    teacher = Publisher(teachers, push, learner.logprobs, progress=learner.progress)
    return policy, teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTraining:
    """Training of an opd or rl run on groups of any source. The actor that hosts it builds it.

    Attributes:
        publishers: makes the publishers of the policy's and of the teacher's weights; None: nothing
            is pushed.
    """

    config: RolloutConfig
    learner_config: LearnerConfig
    inputs: LearnerInputs
    source: GroupSource
    directory: RunDirectory
    resume_from: Checkpoint | None
    publishers: Publishers | None = None

    @property
    def losses(self) -> Callable[[WorkerGroup], Sequence[LossFunction]]:
        """Builds the losses, on every worker."""
        return partial(policy_losses, self.config, self.inputs.stops)

    def loop(self, membership: Membership | None = None) -> PolicyLoop:
        """Build the loop, on the leader."""
        config, inputs, directory = self.config, self.inputs, self.directory
        keep = group_writer(config, directory)
        keep.rewind(self.resume_from.step if self.resume_from else 0)
        group = WorkerGroup(membership, resolve_device(self.learner_config.device))
        losses = self.losses(group)
        learner = Learner(self.learner_config, directory.dumps, losses=losses, group=group)
        supervised = None
        if inputs.sft_rows_D:
            stream = RowStream(
                inputs.sft_rows_D,
                batch_size=SFT_BATCH_SIZE,
                seed=config.seed,
                parts=inputs.sft_parts,
            )
            supervised = SupervisedMix(stream=stream, coef=config.sft.coef or SFT_COEF)
        publisher, teacher_publisher = push_nowhere, None
        if self.publishers is not None:
            publisher, teacher_publisher = self.publishers(learner)
        peek = None  # with max_staleness=0 the next step's groups start only after this step
        if isinstance(self.source, GroupQueue) and config.queue.max_staleness:
            peek = self.source.peek
        return PolicyLoop(
            learner=learner,
            tokenizer=inputs.tokenizer,
            source=self.source,
            publish=publisher,
            sleep=_gpus_taken(config, learner, publisher),
            store=directory.store,
            loss=policy_loss_of(losses),
            teacher_weights=teacher_weights(config),
            supervised=supervised,
            # The engines' dtype: rounding before the push gives the same weights in half the bytes.
            push_dtype=getattr(torch, config.engine.dtype_on(config.cluster.device)),
            pushes_adapter=config.weights.transport == "adapter",
            teach=teacher_publisher,
            trace=Tracing(step=config.learner.trace_step, path=directory.trace),
            keep=keep,
            record=ReplayLog(directory.path, config.whole_steps) if config.whole_steps else None,
            peek=peek,
            base_is_reference=config.base_is_reference,
            resume_from=self.resume_from,
        )


def _gpus_taken(
    config: RolloutConfig, learner: Learner, publisher: Publish
) -> Callable[[int], None] | None:
    """Call that acquires the learner's GPUs for a step; None if no engine sleeps on them."""
    if not (isinstance(publisher, Publisher) and config.engines_sleep):
        return None
    if not config.learner_takes_turns:
        return publisher.sleep
    within_s = _TURN_WAITS * config.cluster.no_progress_s
    return lambda _version: learner.acquire_turn(within_s)


def group_writer(config: RolloutConfig, directory: RunDirectory) -> KeptGroupWriter:
    """Writer of the groups that are kept for inspection."""
    return KeptGroupWriter(
        directory.groups,
        {"all": 1, "none": 0}.get(str(config.keep), _SAMPLE_EVERY),
        whole=config.keep == "all",
        last=config.steps,
        trains=not config.only_keeps,
        scored=config.scored_by_teacher(),
    )


def teacher_weights(config: RolloutConfig) -> dict[str, float]:
    """Weight of each teacher's terms in the loss, by teacher name."""
    return {name: teacher.weight for name, teacher in config.teacher_models().items()}


def policy_losses(
    config: RolloutConfig, stops: StopTokens, group: WorkerGroup
) -> tuple[LossFunction, ...]:
    """Losses of an opd or rl run, on every worker; with the teachers of estimator=full."""
    objective = config.objective
    teachers = None
    if config.copied_teachers or config.teacher_heads:
        teachers = LocalTeachers(
            config.copied_teachers,
            heads=config.teacher_heads,
            dtype=getattr(torch, config.engine.dtype_on(config.cluster.device)),
            device=config.cluster.device,
            packing=config.learner.packing,
            event=stops.event,
            group=group,
        )
    loss = PolicyObjectiveLoss(
        objective=objective,
        teachers=teachers,
        own_teacher=config.learner_is_teacher,
        stop_event=stops.event,
    )
    return loss, TeacherSamplesLoss(normalisation=objective.normalisation), mixed_loss


def supervised_losses(config: SupervisedConfig, _: WorkerGroup) -> tuple[LossFunction, ...]:
    """Losses of an sft, dpo or reward_model run."""
    if isinstance(config, DpoConfig):
        return (PreferenceLoss(beta=config.objective.beta, sft_coef=config.objective.sft_coef),)
    if isinstance(config, RewardModelConfig):
        return (reward_model_loss,)
    return (cross_entropy_loss,)


def reference_logprobs(
    config: DpoConfig, learner: Learner, learner_config: LearnerConfig, *, resumed: bool
) -> Callable[[Sequence[TrainingRow]], list[FloatArray]]:
    """Log-prob function of DPO's reference: the learner's own model or a frozen one.

    The frozen model is loaded at the first call.
    """
    if config.model.reference is None and learner_config.lora.trains_adapter:
        return learner.base_logprobs
    if config.model.reference is None and not resumed:  # before its first step
        return learner.logprobs
    return partial(learner.reference_logprobs, config.model.reference or config.model.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedTraining:
    """Training of an sft, dpo or reward_model run. The actor that hosts it builds it."""

    source: ClassVar[None] = None  # followers read no rollouts
    config: SupervisedConfig
    learner_config: LearnerConfig
    inputs: SupervisedInputs
    directory: RunDirectory
    resume_from: Checkpoint | None

    @property
    def losses(self) -> Callable[[WorkerGroup], Sequence[LossFunction]]:
        """Builds the losses, on every worker."""
        return partial(supervised_losses, self.config)

    def loop(self, membership: Membership | None = None) -> SupervisedLoop:
        """Build the loop, on the leader."""
        config, inputs, directory = self.config, self.inputs, self.directory
        group = WorkerGroup(membership, resolve_device(self.learner_config.device))
        losses = self.losses(group)
        learner = Learner(self.learner_config, directory.dumps, losses=losses, group=group)
        rows_D, held_out = inputs.rows_D, inputs.held_out
        if isinstance(config, DpoConfig):
            resumed = self.resume_from is not None
            compute = reference_logprobs(config, learner, self.learner_config, resumed=resumed)
            rows_D = with_reference(rows_D, directory.reference_scores("reference"), compute)
            held_out = [
                replace(
                    source,
                    rows_D=with_reference(
                        source.rows_D, directory.reference_scores(f"validation-{i}"), compute
                    ),
                )
                for i, source in enumerate(held_out)
            ]
            learner.drop_reference()
        return SupervisedLoop(
            learner=learner,
            tokenizer=inputs.tokenizer,
            stream=RowStream(
                rows_D,
                batch_size=config.data.batch_size,
                seed=config.seed,
                rows_per_unit=config.rows_per_unit,
                parts=inputs.parts,
            ),
            held_out=held_out,
            loss=losses[0],
            store=directory.store,
            trace=Tracing(step=config.learner.trace_step, path=directory.trace),
            resume_from=self.resume_from,
        )


Training: TypeAlias = PolicyTraining | SupervisedTraining
