"""State of a learner in checkpoints, except the model: as files, and as a copy in main memory.

    optimizer/      write_tensors, tensor_sizes, read_tensors      safetensors
    trainer.json    write_trainer, read_trainer

No file of a checkpoint is a pickle, so reading an untrusted checkpoint runs no code from it.

For `StateCopy` each worker copies its own shard of AdamW's moments to main memory, and the leader
also copies the weights. All workers write the moments together, in the lane `checkpoint` and with a
separate process group, because the next step's collectives run concurrently.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from distill.errors import CheckpointError
from distill.weights.model_weights import HeldWeights, Weights, names_of, plan_buckets
from learner.sharding import local

TRAINER = "trainer.json"
# Approximate size of a file: bytes of its tensors, unsharded. The writer builds a file in memory.
FILE_BYTES = 1 << 30


def write_tensors(
    path: str, state: Mapping[str, Tensor], collectives: dist.ProcessGroup | None
) -> None:
    """Write each worker's share of the tensors to `path`, a directory that every worker reaches.

    Args:
        collectives: process group in which the workers agree on the parts that each writes; None:
            there is one worker.

    Raises:
        CheckpointError: a worker could not write.
    """
    # safetensors supports only contiguous tensors; the moments of a transposed weight are strided.
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    with _as_checkpoint_error(f"cannot write tensors to {path}"):
        save(
            contiguous,
            storage_writer=HuggingFaceStorageWriter(
                path, fqn_to_index_mapping=_files(state) or None, save_distributed=True
            ),
            process_group=collectives,
            no_dist=collectives is None,
        )


def tensor_sizes(path: str) -> dict[str, torch.Size]:
    """Sizes of the whole tensors that `write_tensors` wrote to `path`, by name.

    Raises:
        CheckpointError: the tensors cannot be read.
    """
    try:
        written = HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
        return {name: entry.size for name, entry in written.items()}  # pyright: ignore
    except Exception as error:  # missing and truncated files raise errors of several classes
        raise CheckpointError(f"cannot read the tensors in {path}: {error}") from error


def read_tensors(
    path: str, wanted: Mapping[str, Tensor], collectives: dist.ProcessGroup | None
) -> None:
    """Read into the tensors, whole or sharded, what any number of workers wrote.

    Raises:
        CheckpointError: the tensors cannot be read.
    """
    with _as_checkpoint_error(f"cannot read the tensors in {path}"):
        load(
            dict(wanted),
            storage_reader=HuggingFaceStorageReader(path),
            process_group=collectives,
            no_dist=collectives is None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """State of the learning-rate schedule and of the random generators.

    Attributes:
        schedule: state of the learning-rate schedule; None: a new schedule.
        rng: states of each worker's random generators, by device type.
        moments: whether to read optimizer/.
    """

    schedule: Mapping[str, Any] | None = None
    rng: Sequence[Mapping[str, Tensor]] = field(default_factory=list)
    moments: bool = True


def write_trainer(directory: Path, state: TrainerState) -> None:
    """Write `directory`/trainer.json."""
    rng = [{kind: _encoded(bits) for kind, bits in states.items()} for states in state.rng]
    fields = {"schedule": state.schedule, "rng": rng, "moments": state.moments}
    (directory / TRAINER).write_text(json.dumps(fields), encoding="utf-8")


def read_trainer(directory: Path) -> TrainerState:
    """Read what `write_trainer` wrote.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = directory / TRAINER
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        rng = [{kind: _decoded(text) for kind, text in states.items()} for states in fields["rng"]]
        for states in rng:
            torch.Generator().set_state(states["cpu"])  # validates it; workers restore it later
        return TrainerState(schedule=fields["schedule"], rng=rng, moments=fields["moments"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _encoded(bits: Tensor) -> str:
    return base64.b64encode(bits.cpu().numpy().tobytes()).decode("ascii")


def _decoded(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())


def _files(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of the file for each tensor, from 1."""
    numbers: dict[str, int] = {}
    taken = 0
    for name, tensor in state.items():
        numbers[name] = 1 + taken // FILE_BYTES
        taken += tensor.nbytes
    return numbers


@contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """Context manager that converts torch's errors to CheckpointErrors that begin with `what`."""
    try:
        yield
    except CheckpointException as error:  # a BaseException with the errors of all workers
        why, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{what}: {why}") from why


class CopyCost(NamedTuple):
    """Size of a copy of this worker's moments, and free main memory of its host, in bytes."""

    host: str
    bytes: int
    free: int


@dataclass(slots=True, kw_only=True, eq=False)
class StateCopy:
    """Copy of the complete state of a checkpoint. It is written once, in any thread, or dropped.

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
