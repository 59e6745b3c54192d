"""The learner's loop for sampled-token objectives (OPD, task reward, or both), one step a call.

    take      waits for: the step's groups      unblocked by: the rollout workers' puts
    publish   waits for: acknowledgements       unblocked by: every policy engine's load

The loop is given a source of groups and a `publish` callable. It knows neither queue nor engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import chz
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.batching import Batch
from distill.delivery import TrainedGroups
from distill.errors import ConfigError
from distill.logprobs import TokenStats
from distill.losses import Metrics, importance_sampling
from distill.metrics import group_metrics
from distill.rows import policy_rows
from distill.types import TrajectoryGroup
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.learner import Learner


@chz.chz
class ObjectiveConfig:
    """What an action token is worth."""

    kl_coef: float = chz.field(default=1.0, doc="weight of the OPD term, -(log p_T - log q_T)")
    kl_discount_factor: float = chz.field(
        default=0.0, doc="discount of future OPD terms; 0 counts the immediate one only"
    )
    reward_coef: float = chz.field(default=0.0, doc="weight of the group-centred task reward")

    @chz.validate
    def _has_a_gradient(self) -> None:
        for name in ("kl_coef", "reward_coef"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or above, and finite")
        if not 0 <= self.kl_discount_factor <= 1:
            raise ConfigError(f"kl_discount_factor={self.kl_discount_factor} must be in [0, 1]")
        if self.kl_coef == 0:
            raise ConfigError(
                "kl_coef=0 leaves the teacher out of the objective: not a distillation; "
                "give a kl_coef above 0"
            )


class GroupSource(Protocol):
    """Where a step's groups come from: each one once, in order of group id."""

    def take(self, num_groups: int) -> list[TrajectoryGroup]:
        """Blocks until all are there; raises on a deadline, or when the source is closed."""
        ...


# Hands weights of a version to every policy engine; returns `push/*` metrics once all of them
# acknowledged.
Publish = Callable[[Mapping[str, Tensor], int], Mapping[str, float]]


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
        objective: ObjectiveConfig,
        groups_per_step: int,
        resume_from: Checkpoint | None = None,
    ) -> None:
        self.step_count = 0
        self.learner = learner
        self._tokenizer = tokenizer
        self._source = source
        self.publisher = publish
        self._store = store
        self._objective = objective
        self._groups_per_step = groups_per_step
        self._trained = TrainedGroups()
        if resume_from:
            self.step_count = resume_from.step
            self._trained = TrainedGroups.from_json(resume_from.delivery)
            learner.load_trainer_state(resume_from.trainer_state())

    def publish(self) -> Mapping[str, float]:
        """Hands the present weights to the engines, as version `step_count`."""
        return self.publisher(self.learner.tensors(), self.step_count)

    def step(self) -> dict[str, float]:
        """Takes one step's groups, trains on them once, publishes; returns the step's metrics."""
        started = time.perf_counter()
        groups_P = self._source.take(self._groups_per_step)
        taken = time.perf_counter()
        group_ids = [group.group_id for group in groups_P]
        assert len(set(group_ids)) == len(group_ids), f"groups {group_ids} name one twice"
        for group_id in group_ids:  # before the weights change
            assert group_id not in self._trained, f"group {group_id} would be trained twice"
        objective = self._objective
        rows_D = policy_rows(
            groups_P,
            kl_coef=objective.kl_coef,
            kl_discount_factor=objective.kl_discount_factor,
            reward_coef=objective.reward_coef,
        )
        metrics = group_metrics(groups_P, version=self.step_count)
        metrics |= self.learner.step(rows_D, importance_sampling_loss)
        for group_id in group_ids:
            self._trained.add(group_id)
        self.step_count += 1
        learnt = time.perf_counter()
        metrics |= self.publish()
        done = time.perf_counter()
        return metrics | {
            "step": self.step_count,
            "weight_version": self.step_count,
            "time/wait": taken - started,
            "time/learn": learnt - taken,
            "time/push": done - learnt,
            "time/step": done - started,
            "tokens_per_s": metrics["train/tokens"] / (done - started),
            "groups/first": groups_P[0].group_id,
            "groups/last": groups_P[-1].group_id,
        }

    def save(self) -> Checkpoint:
        """Writes a checkpoint of this very state: weights, optimizer, RNG, trained groups."""
        return self._store.save(
            step=self.step_count,
            model=self.learner.model,
            tokenizer=self._tokenizer,
            trainer_state=self.learner.trainer_state(),
            delivery=self._trained.to_json(),
        )


def importance_sampling_loss(
    stats: TokenStats, batch: Batch, num_tokens: int
) -> tuple[Tensor, Metrics]:
    return importance_sampling(
        stats.logprobs_N, batch.behaviour_logprobs_N, batch.weights_N, num_tokens
    )
