"""Copy of a learner's state in main memory, so that it can be written while training continues.

Each worker copies its own shard of AdamW's moments, and the leader the weights as well. All workers
write the moments together, in separate threads and with a separate process group, because the next
step's collectives run meanwhile.

    leader's thread      write -> path ------> moments -> model, adapter, schedule, RNG
    followers' threads            waits for: path    unblocked by: the leader's `write` or `drop`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from distill.weights.model_weights import HeldWeights, Weights, names_of, plan_buckets
from learner.process_group import WorkerGroup
from learner.sharding import local
from learner.state_files import TrainerState, write_tensors, write_trainer


class CopyCost(NamedTuple):
    """Size of a copy of this worker's moments, and free main memory of its host, in bytes."""

    host: str
    bytes: int
    free: int


class MomentsCopy:
    """A worker's shard of AdamW's moments. Each worker calls `write` once, in a thread."""

    def __init__(self, state: Mapping[str, Tensor], group: WorkerGroup) -> None:
        self._state = {name: _in_memory(tensor) for name, tensor in state.items()}
        self._group = group

    def write(self, path: str | None = None) -> None:
        """Write the copy to the leader's `path`, together with all workers, and drop it.

        The leader passes the path, or None to drop the copy only; other workers pass nothing.

        Raises:
            CheckpointError: a worker could not write.
        """
        try:
            path = self._group.agree_aside(path)
            if path is not None:
                write_tensors(path, self._state, self._group.aside)
        finally:
            self._state = {}


class StateCopy:
    """Copy of the complete state of a checkpoint. It is written once, in any thread, or dropped.

    Args:
        write_model: writes weights as a Hugging Face checkpoint with its tokenizer.
        write_adapter: writes the adapter; None if there is none.
    """

    def __init__(
        self,
        *,
        weights: HeldWeights,
        moments: MomentsCopy,
        trainer: TrainerState,
        write_model: Callable[[Path, Weights], None],
        write_adapter: Callable[[Path], None] | None,
    ) -> None:
        self._weights, self._moments, self._trainer = weights, moments, trainer
        self._write_model, self._write_adapter = write_model, write_adapter
        self._begun = False

    def write(self, path: Path) -> None:
        """Write the copy in the format of `Learner.save`.

        Raises: as `Learner.save`.
        """
        self._begun = True
        self._moments.write(str(path / "optimizer"))  # first: the other workers wait for it
        self._write_model(path / "model", self._weights)
        if self._write_adapter is not None:
            self._write_adapter(path / "adapter")
        write_trainer(path, self._trainer)

    def drop(self) -> None:
        """Free the memory on every worker. The copy cannot be written afterwards."""
        if not self._begun:
            self._begun = True
            self._moments.write(None)
        self._weights, self._write_adapter = HeldWeights({}), None


def copied_weights(weights: Weights) -> HeldWeights:
    """The weights in main memory, gathered in portions. With several workers, a collective."""
    copies: dict[str, Tensor] = {}
    for bucket in plan_buckets(weights.layouts):
        copies |= copied(weights.gather(names_of(bucket)))
    return HeldWeights(copies)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _in_memory(tensor) for name, tensor in tensors.items()}


def _in_memory(tensor: Tensor) -> Tensor:
    copy = local(tensor.detach()).to("cpu", copy=True)
    # Not from_local, which moves the shard to the devices of the mesh.
    return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy  # pyright: ignore
