"""Memory of a learner's worker: for the model, and a plan of passes that fit beside it.

Weights, gradients and moments are computed from the checkpoint's headers (`estimate_memory`),
passes from its config (`learner.pass_memory`), before the model is loaded: what does not fit is an
error, not an OOM kill. `dry_run=True` prints the plan for a GPU's size (`LearnerMemory`). A worker
computes its plan for the free memory (`plan_memory`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from distill.errors import ConfigError
from distill.gpu import (
    CONTEXT_BYTES,
    gib,
    gpu_bytes,
    headroom,
    parameter_count,
    part_bytes,
    readable,
)
from distill.main_memory import free_main_memory, require_main_memory
from distill.models.loading import (
    load_config,
    vocab_size,
)
from learner.config import TOKEN_BUDGET, LearnerConfig, Precision
from learner.pass_memory import (
    ModelSize,
    PassMemory,
    PassPlan,
    PassRequest,
    count_of,
    fit_pass,
    known_shapes,
    refusal,
)
from learner.process_group import WorkerGroup

logger = logging.getLogger(__name__)

# Multiples of the number of workers that an error message tries as remedies.
_MORE_WORKERS = (2, 4, 8)


class BytesPerParameter(NamedTuple):
    """Bytes held per parameter, without activations, which depend on token_budget."""

    what: str
    weights: int
    gradients: int = 0
    moments: int = 0

    @property
    def bytes_per_parameter(self) -> int:
        return self.weights + self.gradients + self.moments


TRAINED = BytesPerParameter("weights, gradients and AdamW in fp32", 4, 4, 8)
TRAINED_AND_TEACHER = BytesPerParameter(
    "weights, a lagged or EMA teacher, gradients and AdamW in fp32", 8, 4, 8
)
# The base of an adapter. The adapter itself is small, and is neglected.
FROZEN = BytesPerParameter("frozen weights in fp32", 4)


def holding_of(*, adapter: bool, followed: bool) -> BytesPerParameter:
    """Bytes per parameter of a learner.

    `followed`: it also holds an EMA or lagged teacher (`learner.teachers`).
    """
    if adapter:
        return FROZEN
    return TRAINED_AND_TEACHER if followed else TRAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory estimate for a model in the learner."""

    parameters: int
    holding: BytesPerParameter

    @property
    def bytes(self) -> int:
        return self.parameters * self.holding.bytes_per_parameter

    def __str__(self) -> str:
        return f"{parameter_count(self.parameters)}, {readable(self.bytes)} for {self.holding.what}"


def estimate_memory(model: str, holding: BytesPerParameter = TRAINED) -> MemoryEstimate | None:
    """Estimate from the shapes of the model's tensors; None if they are unknown."""
    shapes = known_shapes(model)
    if shapes is None:
        return None
    return MemoryEstimate(parameters=count_of(shapes), holding=holding)


def frozen_in(dtype: torch.dtype) -> BytesPerParameter:
    """Bytes per parameter of a model that is not trained (`learner.teachers`)."""
    return BytesPerParameter(f"a frozen model's weights in {dtype}", dtype.itemsize)


def frozen_bytes(models: Iterable[str], dtype: str) -> int | None:
    """Bytes of the weights of models that are not trained; None if a size is unknown."""
    holding = frozen_in(getattr(torch, dtype))
    estimates = [estimate_memory(model, holding) for model in models]
    known = [estimate.bytes for estimate in estimates if estimate is not None]
    return sum(known) if len(known) == len(estimates) else None


def head_bytes(model: str, dtype: str) -> int:
    """Bytes of a teacher's head in a worker (`learner.teachers.TeacherHead`).

    It is held in the dtype of its checkpoint, and in the `dtype` of its states if that differs.
    """
    config = load_config(model)
    text = config.get_text_config()
    held = {text.dtype or config.dtype or torch.float32, getattr(torch, dtype)}
    return vocab_size(config) * text.hidden_size * sum(each.itemsize for each in held)


def check_fits(
    model: str, device: str, holding: BytesPerParameter = TRAINED, share: float = 1.0,
    room: int | None = None,
) -> None:  # fmt: skip
    """Raise ConfigError if a share of the learner's `model` exceeds the memory of `device`.

    Args:
        room: bytes that the share may fill; None: the free memory.
    """
    estimate = estimate_memory(model, holding)
    if estimate is None:
        return
    free, needed = room_bytes(device) if room is None else room, int(estimate.bytes * share)
    if needed > free:
        raise ConfigError(
            f"{model} in the learner needs {readable(needed)} here ({estimate}) and {device} "
            f"has {readable(free)} free; a model of up to "
            f"{free / share / holding.bytes_per_parameter / 1e6:.0f} M parameters fits, less its "
            "activations. Use a smaller model, an adapter (lora.rank), learner.workers on several "
            "GPUs or machines, or more memory"
        )


def check_offload_fits(
    model: str, holding: BytesPerParameter, workers: int, workers_here: int
) -> None:
    """Raise ConfigError if main memory is too small for the moments of this host's workers.

    `workers`: number of workers that share a replica.
    """
    if (estimate := estimate_memory(model)) is not None:
        moments = holding.moments * estimate.parameters * workers_here // workers
        require_main_memory(moments, f"offload_optimizer=True with {workers_here} workers here")


def room_bytes(device: str, share: float = 1.0, reserved: int = 0) -> int:
    """Memory in bytes that a learner may fill: the free memory of the device.

    On a shared GPU: the planned `share` of its memory, less the `reserved` bytes of other
    processes. The memory that these processes hold at the moment is ignored, because servers fill
    their part after the learner starts. Memory that this process already holds, such as frozen
    models, is never free.
    """
    if not device.startswith("cuda"):
        return free_bytes(device)
    total = gpu_bytes() if reserved or share < 1 else None
    if total is not None:
        part = part_bytes(total, share, reserved) - CONTEXT_BYTES
        return max(0, part - torch.cuda.memory_allocated(device))
    return max(0, free_bytes(device) - headroom(torch.cuda.mem_get_info(device)[1]))


def free_bytes(device: str) -> int:
    """Free memory in bytes: of the GPU, or of the machine within its container's limit."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # blocks that this process has freed
        return torch.cuda.mem_get_info(device)[0]
    return free_main_memory()


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
                self.model, dtype=self.dtype, device=self.device, workers=self.workers
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
            raise refusal(passes, left, asked, self.device, remedies)
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
