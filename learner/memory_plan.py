"""Memory of a learner's worker, for the model and its passes, and the plan of passes that fit.

`dry_run=True` prints the plan for a GPU's size. A worker computes its plan for the free memory.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from distill.errors import ConfigError
from distill.gpu import CONTEXT_BYTES, gib, readable
from distill.models.loading import load_config
from learner.config import TOKEN_BUDGET, LearnerConfig, Precision
from learner.memory import (
    TRAINED,
    BytesPerParameter,
    check_fits,
    check_offload_fits,
    estimate_memory,
    holding_of,
    known_shapes,
    room_bytes,
)
from learner.pass_memory import SMALLEST_BUDGET, PassMemory, PassPlan, PassRequest, fit_pass
from learner.process_group import WorkerGroup

logger = logging.getLogger(__name__)

# Candidates that an error message tries as remedies: multiples of the number of workers, and row
# lengths in multiples of this many tokens.
_MORE_WORKERS = (2, 4, 8)
_LENGTH_STEP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Properties of a model that determine its learner's memory.

    Attributes:
        config: transformers config of the model.
        parameters: number of parameters.
        query_norm: attention normalises queries and keys.
    """

    config: Any
    parameters: int
    query_norm: bool

    @classmethod
    def of(cls, model: str) -> ModelSize | None:
        """Size of a checkpoint's model; None if its config or shapes are unknown."""
        estimate, shapes = estimate_memory(model), known_shapes(model)
        if estimate is None or shapes is None:
            return None
        query_norm = any("q_norm." in name for name in shapes)
        return cls(config=load_config(model), parameters=estimate.parameters, query_norm=query_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Memory of a model's learner. The properties are bytes of one worker, without passes.

    Attributes:
        holding: bytes per parameter, without passes.
        frozen: bytes of the frozen models that the workers share.
        workers: number of workers.
        replicas: number of replicas of the model, each shared by `workers / replicas` workers.
        offloads: the moments are on the GPU only during the optimizer's step, when no pass runs.
    """

    model: ModelSize
    dtype: Precision
    device: str
    holding: BytesPerParameter = TRAINED
    frozen: int = 0
    workers: int = 1
    replicas: int = 1
    offloads: bool = False

    @property
    def weights(self) -> int:
        return self._own_parameters * self.holding.weights

    @property
    def gradients(self) -> int:
        return self._own_parameters * self.holding.gradients

    @property
    def moments(self) -> int:
        return self._own_parameters * self.holding.moments

    @property
    def own_frozen(self) -> int:
        """Bytes of a worker's shards of the frozen models."""
        return -(-self.frozen // self._shards)

    @property
    def _shards(self) -> int:
        return self.workers // self.replicas

    @property
    def _own_parameters(self) -> int:
        return -(-self.model.parameters // self._shards)

    @property
    def held(self) -> int:
        """Bytes of all tensors of the worker, on the GPU and in main memory."""
        return self.weights + self.own_frozen + self.gradients + self.moments

    @property
    def between_steps(self) -> int:
        """Bytes between two steps: weights, and moments that are not in main memory."""
        return self.outside_passes - self.gradients

    @property
    def outside_passes(self) -> int:
        """Bytes while a pass runs, without the pass itself."""
        return self.during_update - (self.moments if self.offloads else 0)

    @property
    def during_update(self) -> int:
        """Bytes during the optimizer's step."""
        return CONTEXT_BYTES + self.held

    @property
    def whole_gradients(self) -> int:
        """Bytes of a worker's gradients before they are summed over the workers."""
        return self.model.parameters * self.holding.gradients

    def require_room(self, room: int, what: str) -> None:
        """Raise ConfigError if the peak, without passes, does not fit into `room` bytes."""
        if self.during_update > room:
            raise ConfigError(
                f"{what} in the learner does not fit: weights, gradients and "
                f"moments{' with copies of teachers' * bool(self.frozen)} take "
                f"{gib(self.during_update)} GiB of a GPU in an update, and {gib(room)} GiB are "
                "available. Use more learner.workers, fewer learner.replicas, an adapter "
                "(lora.rank), or a smaller model",
                field="learner.workers",
            )

    @property
    def passes(self) -> PassMemory | None:
        """Memory of a worker's passes; None if the config lacks a field."""
        try:
            return PassMemory.of(
                self.model.config,
                dtype=self.dtype,
                device=self.device,
                parameters=self.model.parameters,
                workers=self.workers,
                query_norm=self.model.query_norm,
            )
        except AttributeError:  # the model is not attention and an MLP, so its config differs
            return None

    def plan(self, room: int, asked: PassRequest) -> PassPlan | None:
        """Plan of a worker whose context, states and passes share `room` bytes.

        Memory that the passes leave free may hold whole gradients (`PassPlan.reduces_once`); no
        pass is made smaller for this. None if the memory of a pass is unknown for this config.

        Raises:
            ConfigError: no plan fits; the message names settings that would fit.
        """
        passes = self.passes
        if passes is None:
            return None
        left = room - self.outside_passes
        plan = fit_pass(passes, left, asked, device=self.device)
        if plan is None:
            remedies = list(self._remedies(room, asked))
            raise _refusal(passes, left, asked, self.device, remedies)
        fits = passes.of_plan(plan, asked.longest_rows) + self.whole_gradients <= left
        return plan._replace(reduces_once=self.workers > 1 and fits)

    def _fits(self, room: int, asked: PassRequest) -> bool:
        passes = self.passes
        assert passes is not None
        left = room - self.outside_passes
        return (
            self.during_update <= room
            and fit_pass(passes, left, asked, device=self.device) is not None
        )

    def _remedies(self, room: int, asked: PassRequest) -> Iterator[str]:
        """Changes of settings other than lengths, each of which makes the pass fit."""
        if asked.gradient_checkpointing is False:
            asked = asked._replace(gradient_checkpointing=None)
            if self._fits(room, asked):
                yield "gradient_checkpointing=True"
        if not self.device.startswith("cuda"):
            return  # workers of one machine share its memory
        if self.replicas > 1 and replace(self, replicas=1)._fits(room, asked):
            yield "learner.replicas=1"
        may_offload = not self.offloads and self.holding.moments > 0
        if may_offload and replace(self, offloads=True)._fits(room, asked):
            yield "offload_optimizer=True"
            may_offload = False
        for many in (self.workers * times for times in _MORE_WORKERS):
            for offload in [False, True] if may_offload else [False]:
                larger = replace(self, workers=many, offloads=self.offloads or offload)
                if larger._fits(room, asked):
                    yield f"learner.workers={many}{' offload_optimizer=True' * offload}"
                    return


def _refusal(
    passes: PassMemory, left: int, asked: PassRequest, device: str, remedies: list[str]
) -> ConfigError:
    """Error for a pass that does not fit into `left` bytes."""
    recomputed, rows = asked.gradient_checkpointing is not False, asked.longest_rows
    budget = asked.token_budget or SMALLEST_BUDGET

    def needed(tokens: int) -> int:
        row = min(rows, tokens) or None
        if rows >= budget:  # shorter rows run together, up to the budget
            tokens = max(tokens, budget)
        return passes.bytes(tokens, checkpointing=recomputed, row=row)

    lengths = range(_LENGTH_STEP, max(budget, rows), _LENGTH_STEP)
    shorter = bisect_right(lengths, left, key=needed) * _LENGTH_STEP
    if rows >= budget:
        field, what = (
            "sampling.max_new_tokens",
            f"max_new_tokens (or max_length): rows of {rows} tokens need",
        )
        remedies += [f"rows of at most {shorter} tokens"] if shorter else []
    else:
        field, what = "learner.token_budget", f"token_budget={budget} needs"
        remedies += [f"token_budget={shorter}"] if shorter and asked.token_budget else []
    use = f"Use {', or '.join(remedies)}" if remedies else "Use GPUs with more memory"
    return ConfigError(
        f"{what} {readable(needed(max(budget, rows)))} for a pass (activations, logits"
        f"{', attention scores' * bool(passes.scores)}) and {device} has "
        f"{readable(max(left, 0))} left beside the model. {use}",
        field=field,
    )


def plan_memory(config: LearnerConfig, device: str, group: WorkerGroup) -> PassPlan:
    """Plan passes for the memory that the model leaves; the same on all workers. Collective.

    Raises:
        ConfigError: the model does not fit, or no pass fits in addition to the model.
    """
    settings, offloads = config.learner, config.learner.offload_optimizer
    holding = holding_of(adapter=config.lora.trains_adapter, followed=config.shadow is not None)
    sharers = group.sharers(device)
    room = room_bytes(device, config.gpu_part, config.gpu_taken)
    check_fits(config.model, device, holding, sharers / group.shards, room)
    if offloads and device.startswith("cuda"):
        check_offload_fits(config.model, holding, group.shards, group.workers_here())
    asked = PassPlan(
        settings.token_budget or TOKEN_BUDGET[device.partition(":")[0]],
        bool(settings.gradient_checkpointing),
    )
    plan = None
    if (size := ModelSize.of(config.model)) is not None:
        memory = LearnerMemory(
            model=size,
            dtype=config.dtype,
            device=device,
            holding=holding,
            workers=group.size,
            replicas=group.replicas,
            offloads=offloads,
        )
        request = PassRequest.of(settings, config.longest_rows)
        # The context of this process exists already, so the free memory does not include it.
        room = room // sharers + CONTEXT_BYTES
        plan = memory.plan(room, request)
    plan = plan or asked
    if group.sum_over_workers(float(plan.gradient_checkpointing)):
        plan = plan._replace(gradient_checkpointing=True)
    if group.sum_over_workers(float(not plan.reduces_once)):
        plan = plan._replace(reduces_once=False)
    if plan[:2] != asked[:2]:
        logger.warning(
            "memory of %s is limited: using gradient_checkpointing=%s, token_budget=%d",
            device,
            plan.gradient_checkpointing,
            plan.token_budget,
        )
    return plan
