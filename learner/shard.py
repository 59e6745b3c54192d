"""A worker's shard of a model and its optimizer: construction, export, saving and restoring.

A learner with one worker has one shard, which holds the whole model.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.liger import apply_liger_kernel
from transformers.modeling_utils import PreTrainedModel

from distill.errors import ConfigError
from distill.gpu_turn import GpuTurn
from distill.models.attention_probe import shares_prefixes
from distill.models.loading import resolve_device
from distill.models.model_files import ModelFiles, checkpoint_config, generation_settings
from distill.pace import Progress
from distill.weights.lending import BucketLender, LenderPlace, LentBucket
from distill.weights.model_weights import first_non_finite
from learner.config import LearnerConfig, ShadowRule
from learner.export import (
    Exported,
    Names,
    RoundedUpdate,
    StoredWeights,
    carried_over,
    plain_weights,
)
from learner.forward import Forward
from learner.initial_weights import InitialWeights, whole_model
from learner.lora import adapter_tensors, add_lora
from learner.memory import free_bytes, plan_memory
from learner.optimizer import (
    assert_optimizes,
    build_optimizer,
    build_schedule,
    load_moments,
    load_shadow,
    moments,
    move_moments_to_memory,
    offload_moments,
    write_tensors,
)
from learner.plan import CopyCost, Portion
from learner.process_group import WorkerGroup
from learner.routers import RoutingReplay
from learner.sharding import (
    Fingerprints,
    Root,
    compile_layers,
    copied,
    local,
    reshard,
    shard,
    shard_fingerprints,
)
from learner.teachers import Shadow


class ModelShard:
    """A shard of a model, of its optimizer, and of its EMA or lagged teacher, if any.

    Weights, gradients and moments are fp32. Methods with one argument are called on all workers,
    see `LearnerWorker`.

    Raises:
        CheckpointError: the initial checkpoint cannot be loaded.
        ConfigError: the model does not fit into memory.
    """

    def __init__(self, config: LearnerConfig, group: WorkerGroup) -> None:
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed + group.rank)
        self.progress = Progress()  # counts forward passes, backward passes and calls
        self.device = resolve_device(config.device)
        self._config, self._group = config, group
        self.turn = _turn_of(config.gpu_turns[: group.rank + 1])
        self.passes = plan_memory(config, self.device, group)
        padding, initial = config.reward_padding, None
        if group.size > 1:
            initial = InitialWeights(config.model, group, reward_padding=padding)
            self.model = initial.model
        else:
            self.model = whole_model(config.model, torch.float32, padding, self.device)
        names = Names.of(self.model, config.model) if group.rank == 0 else None
        self.names: Names = group.broadcast(names)
        self.files = self._files()
        probe = partial(shares_prefixes, self.model.eval()) if initial is None else initial.probe
        shares = group.broadcast(probe() if group.rank == 0 else None)
        if config.learner.liger:
            use_liger(self.model)
        self.lora = add_lora(self.model, config.lora) if config.lora.trains_adapter else None
        compute_dtype = getattr(torch, config.dtype)
        self._root: Root | None = None
        if config.learner.compile:
            compile_layers(self.model)
        if initial is not None:
            self._root = shard(self.model, group, compute_dtype, initial)
        self._replay = RoutingReplay(self.model) if config.replays_routing else None
        self._forward = Forward(
            self.model,
            dtype=compute_dtype,
            gradient_checkpointing=self.passes.gradient_checkpointing,
            root=self._root,
            shares=shares,
            packs=config.learner.packing,
            event=() if config.stops is None else config.stops.event,
            replay=self._replay,
        )
        reshard(self._root)
        self.optimizer = build_optimizer(self.model, config.learner)
        self._accumulates = False
        self._copied: dict[str, Tensor] = {}
        self.schedule = build_schedule(self.optimizer, config.learner, config.total_steps)
        if config.learner.offload_optimizer:
            offload_moments(self.optimizer)
        self._shadow = None if config.shadow is None else Shadow(self.model, config.shadow)
        self.rounded = RoundedUpdate()
        plain = plain_weights(self.model, self.rounded)
        self._exported = Exported(self.model, self.names, plain, leads=group.rank == 0)
        self.weights = self._exported.weights
        self._lender = BucketLender(self.device)

    @property
    def most_mask(self) -> int:
        """Largest attention mask in elements, for `distill.objective.batching.BatchShape`."""
        return self._forward.most_mask

    @property
    def origin(self) -> str:
        """Path of the checkpoint that training started from."""
        return self._config.origin or self._config.model

    @property
    def packs(self) -> bool:
        """True if rows run packed, for `distill.objective.batching.BatchShape`."""
        return self._forward.packs

    def _files(self) -> ModelFiles:
        """Files of a checkpoint except the weights."""
        path, stops = self._config.model, self._config.stops
        generation = None
        if self.model.can_generate():
            generation = generation_settings(path, None if stops is None else stops.ids)
        config = checkpoint_config(self.model.config, self.origin)
        return ModelFiles(config=config, generation=generation, origin=self.origin)

    def zero_grad(self, _: None) -> None:
        """Drop the accumulated gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self._accumulates = False

    def release_memory(self, _: None) -> None:
        """Release the device's memory, except for weights and moments that stay on the device."""
        self.zero_grad(None)
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def acquire_turn(self, within_s: float) -> bool:
        """Wait for the turn on this worker's GPU; False after `within_s` seconds without it."""
        return self.turn is None or self.turn.acquire(within_s)

    def release_turn(self, _: None) -> None:
        """Give up the turn, or the place in the queue for it."""
        if self.turn is not None:
            self.turn.release()

    def _update(self) -> None:
        """Take the optimizer's step. The gradients must be finite on every worker."""
        assert_optimizes(self.optimizer, self.model)
        self._exported.forget()
        self.optimizer.step()
        self.schedule.step()

    def fingerprints(self, _: None) -> Fingerprints:
        """Fingerprints of this worker's shards of gradient and weights."""
        return shard_fingerprints(self.model, self._group)

    def gather(self, portion: Portion) -> dict[str, Tensor]:
        """Gather weights whole. Only the leader returns them; other workers return nothing."""
        made = {name: self.weights[name].in_precision(portion.dtype) for name in portion.names}
        return made if self._group.rank == 0 else {}

    def lender_place(self, _: None) -> LenderPlace:
        """Location of the memory that this worker lends."""
        return LenderPlace.own(self.device)

    def lend(self, portion: Portion) -> list[LentBucket]:
        """Gather weights into a bucket, and return one handle for each of this worker's readers.

        A worker without readers takes part in gathering, and keeps no tensors.
        """
        readers = portion.readers[self._group.rank]
        self._exported.keep(bool(readers))
        lazy = [self.weights[name] for name in portion.names]
        made = ((weight.layout.name, weight.in_precision(portion.dtype)) for weight in lazy)
        if readers:
            layouts = [weight.layout_in(portion.dtype) for weight in lazy]
            return self._lender.lend(layouts, made, readers)
        for _ in made:
            pass
        return []

    def take_back(self, _: None) -> None:
        """Free the memory of the lent bucket."""
        self._exported.keep(False)
        self._lender.take_back()

    def carried_over(self) -> StoredWeights:
        """Tensors of the initial checkpoint that the model does not have. Call on the leader."""
        layouts = carried_over(self.model, self.names, self.origin)
        return StoredWeights(path=self.origin, layouts=layouts)

    def first_non_finite(self, _: None) -> str | None:
        """Name of the first tensor with a NaN or an infinity in this worker's shards, or None."""
        tensors = self.model.state_dict().items()
        return first_non_finite({name: local(tensor) for name, tensor in tensors})

    def follow(self, version: int) -> None:
        """Update the EMA or lagged teacher from the weights. `version`: their current version."""
        self._followed_by.follow(version)

    def swap_teacher(self, _: None) -> None:
        """Swap the weights with those of the EMA or lagged teacher. Call it again to undo."""
        self._exported.forget()
        self._followed_by.swap()

    @property
    def own_teacher(self) -> ShadowRule | None:
        """Update rule of the EMA or lagged teacher, or None without one."""
        return self._config.shadow

    @property
    def _followed_by(self) -> Shadow:
        assert self._shadow is not None, "no teacher follows these weights"
        return self._shadow

    def load_teacher(self, path: str) -> None:
        """Load the EMA or lagged teacher from a checkpoint.

        Raises:
            CheckpointError: the teacher was written for another model, or cannot be read.
        """
        load_shadow(path, self._followed_by.state(), self._group.collectives)

    def gather_adapter(self, _: None) -> dict[str, Tensor]:
        """Gather the whole adapter, under peft's names. Only the leader returns it."""
        assert self.lora is not None
        made = adapter_tensors(self.lora)
        return made if self._group.rank == 0 else {}

    def save_optimizer(self, path: str) -> None:
        """Write this worker's shards of AdamW's moments, and of the EMA or lagged teacher."""
        write_tensors(path, self._state, self._group.collectives)

    @property
    def _state(self) -> dict[str, Tensor]:
        """Tensors of this worker in checkpoints besides the weights."""
        state = moments(self.model, self.optimizer)
        return state if self._shadow is None else {**state, **self._shadow.state()}

    def copy_moments(self, _: None) -> None:
        """Copy the tensors that `save_optimizer` writes to main memory, for `write_moments`."""
        self._copied = copied(self._state)

    def write_moments(self, path: str | None) -> None:
        """Write the copy of `copy_moments` to `path`, and drop it. None: only drop it.

        Collective in the lane `checkpoint`.

        Raises:
            CheckpointError: a worker could not write.
        """
        copy, self._copied = self._copied, {}
        if path is not None:
            write_tensors(path, copy, self._group.cpu_group)

    def copy_cost(self, _: None) -> CopyCost:
        """Memory that `copy_moments` would need."""
        shares = map(local, self._state.values())
        return CopyCost(socket.gethostname(), sum(s.nbytes for s in shares), free_bytes("cpu"))

    def load_optimizer(self, path: str) -> None:
        """Load this worker's shards of AdamW's moments from a checkpoint.

        Raises:
            CheckpointError: the moments were written for another model, or cannot be read.
        """
        load_moments(path, self.model, self.optimizer, self._group.collectives)
        if self._config.learner.offload_optimizer:
            move_moments_to_memory(self.optimizer)

    def rng_state(self, _: None) -> dict[str, Tensor]:
        """States of this worker's random generators, by device type."""
        states = {"cpu": torch.get_rng_state()}
        if self.device.startswith("cuda"):
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def set_rng_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore the states of `rng_state`; a missing device type keeps its current state."""
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states and self.device.startswith("cuda"):
            torch.cuda.set_rng_state(states["cuda"], self.device)

    def skip_update(self, _: None) -> None:
        """Advance the learning-rate schedule without an update."""
        with warnings.catch_warnings():  # torch warns if a schedule is ahead of its optimizer
            warnings.simplefilter("ignore", UserWarning)
            self.schedule.step()

    def set_schedule(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the learning-rate schedule."""
        self.schedule.load_state_dict(dict(state))
        for group, lr in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = lr


def _turn_of(files: Sequence[str]) -> GpuTurn | None:
    """Turn of the last of these workers, by lock file; None if an earlier worker has the file."""
    if not files or files[-1] in files[:-1]:
        return None
    return GpuTurn(Path(files[-1]))


# Liger's cross-entropy is not used: it is at temperature 1. Ours is in `distill.models.logprobs`.
_KERNELS = {"rope": True, "rms_norm": True, "swiglu": True}
_NOT_OURS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def use_liger(model: PreTrainedModel) -> None:
    """Replace the kernels of the model's modules. Raise ConfigError if Liger has none for it."""
    before = _forwards(model)
    apply_liger_kernel(model, _KERNELS | _NOT_OURS)
    if _forwards(model) == before:
        raise ConfigError(
            f"liger=True changes nothing: Liger has no kernels for {model.config.model_type!r}; "
            "leave it out",
            field="learner.liger",
        )


def _forwards(model: PreTrainedModel) -> list[object]:
    return [module.forward for module in model.modules()]
