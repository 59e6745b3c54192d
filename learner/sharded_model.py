"""A model that is sharded over a learner's workers, as seen by the leader: weights and state."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from distill.errors import EngineError
from distill.pace import Progress
from distill.types import Tokenizer
from distill.weights.adapter import AdapterWeights
from distill.weights.lending import LenderPlace, LentBucket
from distill.weights.model_weights import (
    HeldWeights,
    Weights,
    by_dtype,
    joined,
    names_of,
    plan_buckets,
    save_weights,
    total_bytes,
)
from learner.config import LearnerConfig, ShadowRule
from learner.forward import LossFunction
from learner.lora import save_adapter, served_form
from learner.optimizer import TrainerState, read_trainer, write_trainer
from learner.plan import CopyCost, Portion
from learner.process_group import Lane, WorkerGroup
from learner.sharding import Fingerprints, copied, whole_fingerprints
from learner.worker import LearnerWorker

# Longest wait of one `acquire_turn` call of a worker, seconds. Each call counts as progress.
_TURN_CALL_S = 1.0


class ShardedModel:
    """A model and its training state, sharded over the workers.

    Raises:
        CheckpointError: the initial checkpoint cannot be loaded.
        ConfigError: the model does not fit into memory.
    """

    def __init__(
        self, config: LearnerConfig, losses: Sequence[LossFunction], group: WorkerGroup
    ) -> None:
        self._group = group
        self._turns: dict[Lane, threading.Lock] = defaultdict(threading.Lock)
        self.worker = LearnerWorker(config, losses, group)

    @property
    def device(self) -> str:
        return self.worker.device

    @property
    def workers(self) -> int:
        return self._group.size

    @property
    def progress(self) -> Progress:
        """Progress counter of the worker in this process."""
        return self.worker.progress

    @property
    def model(self) -> PreTrainedModel:
        """The model in this process: whole, or sharded."""
        return self.worker.model

    def skip_update(self) -> None:
        """Advance the learning-rate schedule without an update."""
        self.on_all("skip_update")

    def release_memory(self) -> None:
        """Release the memory of gradients and cached blocks, and then the turn on the GPUs."""
        self.on_all("release_memory")
        if self.worker.turn is not None:  # all workers first: a server may use several of the GPUs
            self.on_all("release_turn")

    def acquire_turn(self, within_s: float) -> None:
        """Acquire the turn on all workers' GPUs, until `release_memory` (distill/gpu_turn.py).

        Raises:
            EngineError: the learner did not get the turn within `within_s` seconds.
        """
        end = time.monotonic() + within_s
        while not all(self.on_all("acquire_turn", _TURN_CALL_S)):
            if time.monotonic() >= end:
                self.on_all("release_turn")
                raise EngineError(
                    f"the learner waited {within_s:.0f} s for its turn on the GPUs that it shares "
                    "with engines"
                )

    def on_each(self, method: str, arguments: Sequence[Any], lane: Lane = "main") -> list[Any]:
        """Call a method on every worker, each with its own argument; return the results by rank.

        A lane runs one call at a time, because a push gathers weights in several threads.
        """
        with (
            self._turns[lane],
            self._group.followers(method, arguments[1:], lane) as results,
        ):
            return [self.worker.execute(method, arguments[0]), *results()]

    def on_all(self, method: str, argument: Any = None, lane: Lane = "main") -> list[Any]:
        """Call a method on every worker with the same argument; return the results by rank."""
        return self.on_each(method, [argument] * self._group.size, lane)

    def fingerprints(self) -> Fingerprints:
        """Fingerprints of every trained tensor's weights, and of its gradient while it exists."""
        return whole_fingerprints(self.on_all("fingerprints"))

    def weights(self, dtype: torch.dtype | None = None) -> Weights:
        """Current weights under the checkpoint's names, read lazily: the next step changes them.

        If `dtype` is not None, weights are rounded to it, except exact tensors (`learner.export`).
        """
        return _GatheredWeights(self, dtype)

    def adapter(self, dtype: torch.dtype) -> AdapterWeights:
        """The adapter's current tensors, rounded to `dtype`, for servers that hold the base."""
        assert self.worker.lora is not None
        tensors = {name: tensor.to(dtype) for name, tensor in self._adapter().items()}
        return AdapterWeights(tensors, served_form(self.worker.lora))

    def lender_places(self) -> list[LenderPlace]:
        """Location of each worker's memory, by rank, for engines that read weights from it."""
        return self.on_all("lender_place")

    @property
    def own_teacher(self) -> ShadowRule | None:
        """Update rule of the EMA or lagged teacher (`learner.teachers`), or None without one."""
        return self.worker.own_teacher

    def follow(self, version: int) -> None:
        """Update the EMA or lagged teacher, if any. Call this after each step, with its version."""
        if self.own_teacher is not None:
            self.on_all("follow", version)

    @contextmanager
    def as_teacher(self) -> Iterator[None]:
        """Context manager in which weights and log-probs are those of the EMA or lagged teacher."""
        self.on_all("swap_teacher")
        try:
            yield
        finally:
            self.on_all("swap_teacher")

    @property
    def lost_share(self) -> float | None:
        """Fraction of an adapter's change that was lost to rounding in the last gathered weights
        (`learner.export.RoundedUpdate`); None without an adapter."""
        return None if self.worker.lora is None else self.worker.rounded.lost_share

    def save(self, path: Path, tokenizer: Tokenizer) -> None:
        """Write a checkpoint of the weights and the training state.

        The weights are written as a Hugging Face checkpoint to `model/`. An adapter is merged into
        it, and also written to `adapter/`. Any number of workers can resume from the checkpoint.

        Raises:
            CheckpointError, OSError, RuntimeError, SafetensorError: writing failed.
        """
        self.export(path / "model", tokenizer)
        if self.worker.lora is not None:
            save_adapter(path / "adapter", self.worker.lora, self._adapter())
        self.on_all("save_optimizer", str(path / "optimizer"))
        write_trainer(path, self._trainer_state())

    def copied(self, tokenizer: Tokenizer) -> StateCopy:
        """Copy the state that `save` writes into main memory.

        The copy takes 12 bytes per trained parameter: 8 for moments, sharded over the workers, and
        4 for weights, on the leader. It must be written or dropped before the next copy.
        """
        write_adapter = None
        if (lora := self.worker.lora) is not None:
            write_adapter = partial(save_adapter, lora=lora, tensors=copied(self._adapter()))
        weights = copied_weights(self.weights())
        self.on_all("copy_moments")
        return StateCopy(
            weights=weights,
            write_moments=partial(self.on_all, "write_moments", lane="checkpoint"),
            trainer=deepcopy(self._trainer_state()),
            write_model=partial(self._export, tokenizer),
            write_adapter=write_adapter,
        )

    def has_room_for_copy(self) -> bool:
        """True if `copied` needs at most half of the free main memory on every host."""
        costs: list[CopyCost] = self.on_all("copy_cost")
        needed = Counter({costs[0].host: total_bytes(self.weights())})
        for cost in costs:
            needed[cost.host] += cost.bytes
        return all(2 * needed[cost.host] <= cost.free for cost in costs)

    def _adapter(self) -> dict[str, torch.Tensor]:
        return self.on_all("gather_adapter")[0]

    def _trainer_state(self) -> TrainerState:
        return TrainerState(
            schedule=self.worker.schedule.state_dict(), rng=self.on_all("rng_state")
        )

    def export(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        """Write the weights and the tokenizer as a Hugging Face checkpoint to a new directory.

        Tensors of the initial checkpoint that servers use and the model's class ignores are copied.

        Raises: as `save`.
        """
        self._export(tokenizer, model_dir, self.weights())

    def _export(self, tokenizer: Tokenizer, model_dir: Path, weights: Weights) -> None:
        model_dir.mkdir()
        self.worker.files.write(model_dir, tokenizer)
        save_weights(model_dir, joined(weights, self.worker.carried_over()))

    def load_trainer_state(self, path: Path) -> None:
        """Restore the state that `save` wrote to `path`, except for the weights.

        The first checkpoint of a forked run contains only the moments.

        Raises:
            CheckpointError: the state cannot be read, or was written for another model.
        """
        state = read_trainer(path)
        if state.moments:
            self.on_all("load_optimizer", str(path / "optimizer"))
        if state.schedule is not None:
            self.on_all("set_schedule", state.schedule)
        # A fork, which has no schedule, starts a new teacher.
        if state.schedule is not None and self.own_teacher is not None:
            self.on_all("load_teacher", str(path / "optimizer"))
        # Workers that are not in the checkpoint keep their initial RNG state.
        missing: list[dict[str, torch.Tensor]] = [{}] * max(0, self._group.size - len(state.rng))
        self.on_each("set_rng_state", [*state.rng, *missing][: self._group.size])


@dataclass(slots=True, kw_only=True, eq=False)
class StateCopy:
    """Copy of the complete state of a checkpoint. It is written once, in any thread, or dropped.

    Each worker copies its own shard of AdamW's moments to main memory, and the leader also copies
    the weights. All workers write the moments together, in the lane `checkpoint` and with a
    separate process group, because the next step's collectives run concurrently.

    Attributes:
        write_moments: writes all workers' copies of the moments to a directory, and drops them;
            with None it only drops them.
        write_model: writes weights as a Hugging Face checkpoint with its tokenizer.
        write_adapter: writes the adapter; None if there is no adapter.
    """

    weights: HeldWeights
    write_moments: Callable[[str | None], object]
    trainer: TrainerState
    write_model: Callable[[Path, Weights], None]
    write_adapter: Callable[[Path], None] | None
    _begun: bool = field(init=False, default=False)

    def write(self, path: Path) -> None:
        """Write the copy in the format of `Learner.save`.

        Raises: as `Learner.save`.
        """
        self._begun = True
        self.write_moments(str(path / "optimizer"))
        self.write_model(path / "model", self.weights)
        if self.write_adapter is not None:
            self.write_adapter(path / "adapter")
        write_trainer(path, self.trainer)

    def drop(self) -> None:
        """Free the memory on every worker. The copy cannot be written afterwards."""
        if not self._begun:
            self._begun = True
            self.write_moments(None)
        self.weights, self.write_adapter = HeldWeights({}), None


def copied_weights(weights: Weights) -> HeldWeights:
    """Copy of the weights in main memory, gathered in portions. A collective if sharded."""
    copies: dict[str, torch.Tensor] = {}
    for bucket in plan_buckets(weights.layouts):
        copies |= copied(weights.gather(names_of(bucket)))
    return HeldWeights(copies)


class _GatheredWeights:
    """`Weights` of a sharded model, gathered from its workers in portions.

    Implements `LentByWorkers`: each worker can lend the tensors that it has gathered.
    """

    def __init__(self, model: ShardedModel, dtype: torch.dtype | None) -> None:
        self._model, self._dtype = model, dtype
        weights = model.worker.weights.values()
        self.layouts = by_dtype(weight.layout_in(dtype) for weight in weights)

    def gather(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return self._model.on_all("gather", Portion(names, self._dtype))[0]

    def first_non_finite(self) -> str | None:
        return next(filter(None, self._model.on_all("first_non_finite")), None)

    def lend(self, names: Sequence[str], readers: Sequence[int]) -> list[list[LentBucket]]:
        return self._model.on_all("lend", Portion(names, self._dtype, readers))

    def take_back(self) -> None:
        self._model.on_all("take_back")
