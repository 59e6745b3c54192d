"""The learner's loop over rollouts (OPD, task reward, or both), one step per call.

    take      waits for: the step's groups      unblocked by: the rollout workers' puts
    hold      waits for: their trajectories     unblocked by: the object stores that have them,
                                                or had, where they were fetched ahead
    sleep     waits for: the engines' GPUs      unblocked by: every policy engine's release
    publish   waits for: acknowledgements       unblocked by: every policy engine's load

The loop is given a source of groups and a `publish` callable. It knows neither queue nor engine.
A `publish` may return before that, once it needs the weights no more.
Groups come as outlines; their tokens, and the rows made of them, are with the learner's workers
(`learner.rollouts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.delivery import CONSTANT_REWARD, Taken, TrainedGroups
from distill.objective.batching import Batch, TrainingRow
from distill.objective.losses import Metrics, StepCounts
from distill.objective.metrics import (
    TokenTable,
    group_metrics,
    merge_updates,
    without_unknown,
)
from distill.objective.whole_groups import opened
from distill.outlines import TrajectorySource
from distill.types import TrajectoryGroup
from distill.weights.model_weights import Weights
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.checkpoint_writer import CheckpointWriter
from learner.fingerprints import Fingerprints
from learner.foresight import Foresee, Foresight
from learner.forward import Forward
from learner.learner import Learner, Part
from learner.policy_loss import PolicyObjectiveLoss, cross_entropy_loss
from learner.rollouts import Rollouts, StepPlan
from learner.supervised import RowStream
from learner.teachers import LocalTeachers
from learner.trace import NO_TRACE, Stages, Tracing


class GroupSource(TrajectorySource, Protocol):
    """Source of a step's groups: the next ones beside those that are trained."""

    def take(self, trained: TrainedGroups) -> Taken:
        """Blocks until all are there; raises on a deadline, or when the source is closed.

        Asked again before anything was trained, it gives the same.
        """
        ...

    def lose(self, ids: Collection[int], reason: str) -> None:
        """Trajectories of these groups, which were taken, are lost: others are to be made."""
        ...


# Hands weights of a version, and what they account for, to every policy engine; returns `push/*`
# metrics once all of them acknowledged, or once the weights may change.
Publish = Callable[[Weights, int, TrainedGroups], Mapping[str, float]]


# Hands the teacher that follows, with the newest version in it, to its engines.
Teach = Callable[[Weights, int], Mapping[str, float]]


class Keep(Protocol):
    """Keeps some of the rollouts for people to look at."""

    def chosen(self, step: int, group_ids: Sequence[int]) -> Collection[int]:
        """Those of the groups that a step trained on which are to be kept."""
        ...

    def keep(
        self,
        step: int,
        groups_P: Sequence[TrajectoryGroup],
        rows_D: Sequence[TrainingRow],
        tables: Sequence[TokenTable | None],
    ) -> None:
        """Those, their rows (see `rows_by_group`), and the tokens of the whole step."""
        ...


class Record(Protocol):
    """Keeps what steps need to be done again."""

    def taken(self, step: int, taken: Taken, groups_P: Sequence[TrajectoryGroup]) -> None:
        """What `step` is about to train on: as it was taken, and the groups whole."""
        ...

    def trained(
        self, step: int, metrics: Mapping[str, float], prints: Fingerprints, workers: int
    ) -> None:
        """What became of it, on so many workers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedMix:
    """Supervised rows beside the rollouts: a batch in every update, its loss times `coef`."""

    stream: RowStream
    coef: float


class PolicyLoop:
    """Trains a `Learner` on groups, a step at a time. The weight version is the step count."""

    def __init__(
        self,
        *,
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
        source: GroupSource,
        publish: Publish,
        store: CheckpointStore,
        loss: PolicyObjectiveLoss,
        teacher_weights: Mapping[str, float] | None = None,
        supervised: SupervisedMix | None = None,
        base_is_reference: bool = False,
        push_dtype: torch.dtype | None = None,
        teach: Teach | None = None,
        trace: Tracing = NO_TRACE,
        keep: Keep | None = None,
        sleep: Callable[[int], None] | None = None,
        record: Record | None = None,
        foresee: Foresee | None = None,
        resume_from: Checkpoint | None = None,
        background: bool | None = False,
    ) -> None:
        """
        Args:
            background: as `CheckpointWriter` takes it.
            sleep: has engines that hold this version, and share the learner's GPUs, release them
                until the next `publish`, before which the learner releases what it can.
            push_dtype: what weights are rounded to for the engines; None: they get all of them.
            teach: of a learner whose own teacher follows it, where that has engines.
            base_is_reference: the learner's model without its adapter is the reference policy.
            keep: is shown what each step trained on, once it has been; None: nobody is.
            record: is told of each step before it and after it; None: nobody is.
            foresee: says what the next step would take, to be fetched while this one is trained;
                None: nothing is fetched ahead.
        """
        self.step_count = 0
        self._base_is_reference = base_is_reference
        self._push_dtype, self._teach = push_dtype, teach
        self._trace, self._stages = trace, Stages()
        self._keep, self._sleep, self._record = keep, sleep, record
        self.learner = learner
        self._source = source
        self.publisher = publish
        self.writer = CheckpointWriter(learner, tokenizer, store, background=background)
        self.loss = loss
        self.rollouts = Rollouts(learner, source, loss, teacher_weights)
        self._foresight = None
        if foresee is not None:
            # How rows are dealt to several workers, and such advantages, depend on all groups.
            together = loss.objective.baseline == "global" or bool(loss.objective.advantage)
            self._foresight = Foresight(
                foresee, self.rollouts.fetch_ahead, whole=together or learner.workers > 1
            )
        self._supervised = supervised
        self._trained = TrainedGroups()
        if resume_from:
            self.step_count = resume_from.step
            self._trained = TrainedGroups.from_json(resume_from.delivery)
            learner.load_trainer_state(resume_from.path)

    @property
    def teachers(self) -> LocalTeachers | None:
        """The teachers in this process, if the objective needs any here."""
        return self.loss.teachers

    def publish(self, *, anew: bool = True) -> Mapping[str, float]:
        """Hands the present weights to the engines, as version `step_count`.

        First those of the teacher that follows to its own, or what begins with these weights could
        be scored by older ones.

        Args:
            anew: its engines may hold anything; False: what was handed to them last.
        """
        if self._sleep is not None:
            self.learner.rest()
        taught = self._publish_teacher(anew)
        pushed = self.publisher(
            self.learner.weights(self._push_dtype), self.step_count, self._trained
        )
        lost = self.learner.lost_share
        return {**pushed, **taught, **({} if lost is None else {"push/lost_share": lost})}

    def _publish_teacher(self, anew: bool) -> Mapping[str, float]:
        rule = self.learner.own_teacher
        if self._teach is None or rule is None or not (anew or rule.moves_at(self.step_count)):
            return {}
        with self.learner.as_teacher():
            return self._teach(*self.teacher_weights())

    def teacher_weights(self) -> tuple[Weights, int]:
        """The weights of the teacher that follows, within `Learner.as_teacher`; their version."""
        rule = self.learner.own_teacher
        assert rule is not None
        return self.learner.weights(self._push_dtype), rule.version(self.step_count)

    def weights(self) -> tuple[Weights, int]:
        """The present weights as engines get them, and their version."""
        return self.learner.weights(self._push_dtype), self.step_count

    def step(self, waited_s: float = 0.0) -> dict[str, float]:
        """Takes one step's groups, trains on them once, publishes; returns the step's metrics.

        Args:
            waited_s: for how long this step's groups have been waited for already.
        """
        with self._trace.around(self.step_count + 1):
            return self._step(waited_s)

    def _step(self, waited_s: float) -> dict[str, float]:
        started = time.perf_counter() - waited_s
        with self._stages("wait"):
            taken, plan = self._take()
        groups_P = taken.groups_P
        ids = [group.group_id for group in groups_P]
        accounted = self._trained.after(ids, taken.set_aside)  # before the weights change
        if self._foresight is not None:
            self._foresight.begin(accounted, self.rollouts.turn)
        if self._sleep is not None:
            with self._stages("sleep"):
                self._sleep(self.step_count)
        if self._base_is_reference and plan.groups_P:
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
            metrics |= self.publish(anew=False)
        seconds = time.perf_counter() - started
        times = self._stages.take()
        return metrics | {
            "step": self.step_count,
            "weight_version": self.step_count,
            **times,
            "time/wait": times["time/wait"] + waited_s,
            "time/step": seconds,
            "tokens_per_s": metrics["train/tokens"] / seconds,
            **taken_metrics(taken, self._trained),
        }

    def _take(self) -> tuple[Taken, StepPlan]:
        """The step's groups, once every worker has those that it trains on."""
        while True:
            taken = self._source.take(self._trained)
            if self._foresight is not None:
                self._foresight.end()
            plan = self.rollouts.plan(taken.groups_P)
            with self._stages("rows"):
                lost: Mapping[int, str] = self.rollouts.hold(plan)
            if not lost and self._record is not None:
                groups_P, lost = opened(self._source, taken.groups_P)
                if not lost:
                    self._record.taken(self.step_count + 1, taken, groups_P)
            if not lost:
                return taken, plan
            self._source.lose(list(lost), "; ".join(sorted(set(lost.values()))))

    def _learn(self, plan: StepPlan) -> dict[str, float]:
        """The step's optimizer updates: one, or `num_substeps` on a part of the groups each.

        One that has neither groups (filtered out, or fewer than updates) nor supervised rows is
        skipped: the weights stay, and the schedule goes on.
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
        """Writes a checkpoint of this very state: weights, optimizer, RNG, trained groups."""
        return self.writer.save(self.step_count, self._trained.to_json())

    def begin_save(self) -> Checkpoint | None:
        """Begins one of this very state: see `CheckpointWriter.begin`."""
        return self.writer.begin(self.step_count, self._trained.to_json())


def taken_metrics(taken: Taken, trained: TrainedGroups) -> dict[str, float]:
    """Which groups a step took, and what `trained` accounts for with them."""
    aside = trained.set_aside.values()
    age = {} if taken.start_max is None else {"staleness/start_max": taken.start_max}
    return {
        **age,
        "groups/first": taken.groups_P[0].group_id,
        "groups/last": taken.groups_P[-1].group_id,
        "groups/watermark": trained.watermark,
        "groups/overdue": taken.overdue,
        "groups/begun_again": taken.begun_again,
        "groups/set_aside": sum(reason != CONSTANT_REWARD for reason in aside),
        **_replaced_metrics(taken),
    }


def _replaced_metrics(taken: Taken) -> dict[str, float]:
    """Number of groups that the step passed over, and the mean reward with theirs.

    That is the policy's reward on the prompts as they come; `reward/mean` is that of the groups it
    was trained on.
    """
    metrics: dict[str, float] = {"groups/replaced": len(taken.replaced)}
    if taken.replaced:
        rewards_P = [fmean(t.reward for t in group.trajectories_G) for group in taken.groups_P]
        metrics["reward/mean_of_all"] = fmean([*rewards_P, *taken.replaced.values()])
    return metrics


def mixed_loss(forward: Forward, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
    """Cross-entropy beside the policy loss, whose metrics keep their names."""
    loss, metrics = cross_entropy_loss(forward, batch, counts)
    return loss, {"sft/nll": metrics["train/nll"]}
