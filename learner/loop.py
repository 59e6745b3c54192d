"""The learner's loop over rollouts (OPD, task reward, or both), one step per call.

    take      waits for: the step's groups      unblocked by: the rollout workers' puts
    hold      waits for: their trajectories     unblocked by: the object stores (immediately, if
                                                they were prefetched)
    sleep     waits for: the engines' GPUs      unblocked by: every policy engine's release, or the
                                                end of an engine's turn (distill/gpu_turn.py)
    publish   waits for: acknowledgements       unblocked by: every policy engine's load

The loop receives a source of groups and a `publish` callable, and is independent of queue and
engines. A `publish` may return before the acknowledgements, once it no longer reads the weights.
Groups arrive as metadata; their tokens, and the rows built from them, are on the learner's workers
(`learner.rollouts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from distill.objective.batching import Batch, TrainingRow
from distill.objective.losses import Metrics, StepCounts
from distill.objective.metrics import (
    TokenTable,
    group_metrics,
    merge_updates,
    without_unknown,
)
from distill.objective.whole_groups import opened
from distill.records import StepGroups, TrainedGroups, TrajectorySource
from distill.types import Tokenizer, TrajectoryGroup
from distill.weights.model_weights import Weights
from learner.checkpoint import Checkpoint, CheckpointStore, trained_in
from learner.checkpoint_writer import CheckpointWriter
from learner.forward import Forward
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss, cross_entropy_loss
from learner.rollouts import Peek, Prefetcher, Rollouts, StepPlan
from learner.sharding import Fingerprints
from learner.supervised import RowStream
from learner.trace import NO_TRACE, Stages, Tracing


class GroupSource(TrajectorySource, Protocol):
    """Source of the groups of the next step."""

    def take(self, trained: TrainedGroups) -> StepGroups:
        """Block until all groups of the next step are available, and return them.

        Raises on a deadline, or if the source is closed. Returns the same groups again if nothing
        was trained since the last call.
        """
        ...

    def mark_lost(self, lost: Mapping[int, str]) -> None:
        """Report taken groups whose trajectories are lost, with reasons; they are sampled again."""
        ...


# Pushes weights, their version, and the groups that they account for to every engine of a pool.
# Returns `push/*` metrics once all engines have acknowledged, or once the weights may change.
Publish = Callable[[Weights, int, TrainedGroups], Mapping[str, float]]

# Metrics of a push to the teacher's engines, and their names in a step's metrics.
_TEACHER_METRICS = {
    "push/seconds": "push/teacher_seconds",
    "push/proven": "push/teacher_proven",
}


class SampleRecorder(Protocol):
    """Stores samples of the rollouts for inspection."""

    def chosen(self, step: int, group_ids: Sequence[int]) -> Collection[int]:
        """Choose the groups to keep among those that a step trained on."""
        ...

    def keep(
        self,
        step: int,
        groups_P: Sequence[TrajectoryGroup],
        rows_D: Sequence[TrainingRow],
        tables: Sequence[TokenTable | None],
    ) -> None:
        """Store chosen groups, their rows (see `rows_by_group`), and tables of all step tokens."""
        ...


class StepRecorder(Protocol):
    """Stores the inputs of steps, so that they can be replayed."""

    def taken(self, step: int, taken: StepGroups, groups_P: Sequence[TrajectoryGroup]) -> None:
        """Record the input of `step` before it trains. `groups_P` are the taken groups."""
        ...

    def trained(
        self, step: int, metrics: Mapping[str, float], prints: Fingerprints, workers: int
    ) -> None:
        """Record the result of `step`, and the number of learner workers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedMix:
    """Supervised rows in addition to rollouts: one batch per update, its loss times `coef`."""

    stream: RowStream
    coef: float


class PolicyLoop:
    """Trains a `Learner` on groups, one step at a time. The weight version is the step count."""

    def __init__(
        self,
        *,
        learner: Learner,
        tokenizer: Tokenizer,
        source: GroupSource,
        publish: Publish,
        store: CheckpointStore,
        loss: PolicyObjectiveLoss,
        teacher_weights: Mapping[str, float] | None = None,
        supervised: SupervisedMix | None = None,
        base_is_reference: bool = False,
        push_dtype: torch.dtype | None = None,
        pushes_adapter: bool = False,
        teach: Publish | None = None,
        trace: Tracing = NO_TRACE,
        keep: SampleRecorder | None = None,
        sleep: Callable[[int], None] | None = None,
        record: StepRecorder | None = None,
        peek: Peek | None = None,
        resume_from: Checkpoint | None = None,
    ) -> None:
        """
        Args:
            sleep: called with the weight version before a step trains, for engines that share the
                learner's GPUs and hold this version. Makes the engines release their memory until
                the next `publish`, before which the learner releases its own; or waits until they
                have released it in their turns.
            push_dtype: dtype that pushed weights are rounded to; None: not rounded.
            pushes_adapter: the policy's engines hold the base, and receive only the adapter.
            teach: pushes the learner's EMA or lagged teacher to its engines, if it has any.
            base_is_reference: the learner's model without its adapter is the reference policy.
            keep: receives the groups of each step after training; None: disabled.
            record: called before and after each step; None: disabled.
            peek: returns the groups that the next step would take, which are prefetched while
                this one trains; None: no prefetching.
        """
        self.step_count = 0
        self.base_is_reference = base_is_reference
        self._push_dtype, self._pushes_adapter = push_dtype, pushes_adapter
        self._trace, self._stages = trace, Stages()
        self._keep, self._sleep, self._record = keep, sleep, record
        self.learner = learner
        self._source = source
        self.publisher, self.teacher_publisher = publish, teach
        self.writer = CheckpointWriter(learner, tokenizer, store)
        self.loss = loss
        self.rollouts = Rollouts(learner, source, loss, teacher_weights)
        self._prefetcher = None
        if peek is not None:
            # Advantages that compare groups, and the rows' assignment to workers, need all groups.
            together = loss.objective.compares_groups
            self._prefetcher = Prefetcher(
                peek, self.rollouts.prefetch, whole=together or learner.workers > 1
            )
        self._supervised = supervised
        self._trained = trained_in(resume_from)
        if resume_from:
            self.step_count = resume_from.step
            learner.load_trainer_state(resume_from.path)

    def publish(self, *, push_teacher: bool = True) -> Mapping[str, float]:
        """Push the current weights to the engines, as version `step_count`.

        The weights of the EMA or lagged teacher are pushed first: otherwise samples of the new
        version could be scored by an older teacher.

        Args:
            push_teacher: push the teacher in any case, because its engines may hold other weights.
                False: they hold those of the last push, so push only if the teacher has changed.
        """
        if self._sleep is not None:
            self.learner.release_memory()
        taught = self._publish_teacher(push_teacher)
        pushed = self.publisher(*self.weights(), self._trained)
        lost = None if self._pushes_adapter else self.learner.lost_share
        return {**pushed, **taught, **({} if lost is None else {"push/lost_share": lost})}

    def _publish_teacher(self, push_teacher: bool) -> Mapping[str, float]:
        rule = self.learner.own_teacher
        teach = self.teacher_publisher
        if teach is None or rule is None or not (push_teacher or rule.moves_at(self.step_count)):
            return {}
        with self.learner.as_teacher():
            pushed = teach(*self.teacher_weights(), self._trained)
        return {metric: pushed[name] for name, metric in _TEACHER_METRICS.items() if name in pushed}

    def teacher_weights(self) -> tuple[Weights, int]:
        """Weights of the EMA or lagged teacher, and their version. Call in `Learner.as_teacher`."""
        rule = self.learner.own_teacher
        assert rule is not None
        return self.learner.weights(self._push_dtype), rule.version(self.step_count)

    def weights(self) -> tuple[Weights, int]:
        """Current weights, rounded as for the policy's engines, and their version."""
        if self._pushes_adapter:
            assert self._push_dtype is not None
            return self.learner.adapter(self._push_dtype), self.step_count
        return self.learner.weights(self._push_dtype), self.step_count

    def step(self, waited_s: float = 0.0) -> dict[str, float]:
        """Take one step's groups, train on them once, and publish; return the step's metrics.

        Args:
            waited_s: seconds that the caller has already waited for this step's groups.
        """
        with self._trace.around(self.step_count + 1):
            return self._step(waited_s)

    def _step(self, waited_s: float) -> dict[str, float]:
        started = time.perf_counter() - waited_s
        with self._stages("wait"):
            taken, plan = self._take()
        groups_P = taken.groups_P
        accounted = taken.after(self._trained)  # before the weights change
        if self._prefetcher is not None:
            self._prefetcher.begin(accounted, self.rollouts.turn)
        if self._sleep is not None:
            with self._stages("sleep"):
                self._sleep(self.step_count)
        if self.base_is_reference and plan.groups_P:
            with self._stages("reference"):
                self.rollouts.add_reference()
        with self._stages("learn"):
            metrics = group_metrics(groups_P, version=self.step_count) | self._learn(plan)
            metrics = without_unknown(metrics, groups_P)
        self._trained = accounted
        self.step_count += 1
        self.learner.follow(self.step_count)
        if self._record is not None:
            prints = self.learner.fingerprints()
            self._record.trained(self.step_count, metrics, prints, self.learner.workers)
        with self._stages("push"):
            metrics |= self.publish(push_teacher=False)
        seconds = time.perf_counter() - started
        times = self._stages.take()
        return metrics | {
            "step": self.step_count,
            "weight_version": self.step_count,
            **times,
            "time/wait": times["time/wait"] + waited_s,
            "time/step": seconds,
            "tokens_per_s": metrics["train/tokens"] / seconds,
            **taken.metrics(self._trained),
        }

    def _take(self) -> tuple[StepGroups, StepPlan]:
        """Take the step's groups, and wait until every worker has the trajectories of its rows."""
        while True:
            taken = self._source.take(self._trained)
            if self._prefetcher is not None:
                self._prefetcher.end()
            plan = self.rollouts.plan(taken.groups_P)
            with self._stages("rows"):
                lost: Mapping[int, str] = self.rollouts.hold(plan)
            if not lost and self._record is not None:
                groups_P, lost = opened(self._source, taken.groups_P)
                if not lost:
                    self._record.taken(self.step_count + 1, taken, groups_P)
            if not lost:
                return taken, plan
            self._source.mark_lost(lost)

    def _learn(self, plan: StepPlan) -> dict[str, float]:
        """Run the step's optimizer updates: one, or `num_substeps`, each on a part of the groups.

        An update without groups (all filtered out, or fewer groups than updates) and without
        supervised rows is skipped: the weights are unchanged, and the schedule advances.
        """
        metrics: dict[str, float] = {"train/groups": len(plan.groups_P)}
        with self._stages("rows"):
            metrics |= self.rollouts.build(plan)
        updates = []
        for i, parts in enumerate(plan.updates):
            update = []
            for part in parts:
                self.rollouts.before_update(part)
                update.append(part)
            if mix := self._supervised:
                batch = mix.stream.batch(self.step_count * len(plan.updates) + i)
                update.append(Part(rows_D=batch, loss=mixed_loss, coef=mix.coef))
            if update:
                updates.append(self.learner.step(*update))
            else:
                self.learner.skip_update()
        self._keep_some(plan)
        return metrics | merge_updates(updates)

    def _keep_some(self, plan: StepPlan) -> None:
        if self._keep is None or not plan.groups_P:
            return
        step = self.step_count + 1
        if ids := self._keep.chosen(step, [group.group_id for group in plan.groups_P]):
            kept = self.rollouts.kept(plan, ids)
            self._keep.keep(step, kept.groups_P, kept.rows_D, kept.tables)

    def save(self) -> Checkpoint:
        """Write a checkpoint of the current state: weights, optimizer, RNG, trained groups."""
        return self.writer.save(self.step_count, self._trained.to_json())

    def begin_save(self) -> Checkpoint | None:
        """Begin a checkpoint of the current state: see `CheckpointWriter.begin`."""
        return self.writer.begin(self.step_count, self._trained.to_json())


def mixed_loss(forward: Forward, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
    """Cross-entropy in addition to the policy loss; its metric is renamed to `sft/nll`."""
    loss, metrics = cross_entropy_loss(forward, batch, counts)
    return loss, {"sft/nll": metrics["train/nll"]}
