"""AdamW, its learning-rate schedule, and the state of training on disk.

    optimizer/      write_tensors, tensor_sizes, read_tensors      safetensors
    trainer.json    write_trainer, read_trainer

No file of a checkpoint is a pickle, so reading an untrusted checkpoint runs no code from it.
"""

from __future__ import annotations

import base64
import json
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from distill.errors import CheckpointError
from learner.config import LearnerSettings
from learner.sharding import local
from learner.teachers import SUFFIX

# AdamW's state of a weight that had a gradient.
_STATE = ("step", "exp_avg", "exp_avg_sq")

TRAINER = "trainer.json"
# Approximate size of a file: bytes of its tensors, unsharded. The writer builds a file in memory.
FILE_BYTES = 1 << 30

# torch warns if a learner has only one worker. `catch_warnings` around each call would not do: a
# thread that leaves it restores the filters for all threads.
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint.*")


def build_optimizer(model: nn.Module, settings: LearnerSettings) -> torch.optim.AdamW:
    """AdamW that decays matrices, but not vectors (norms, biases, also biases of experts)."""
    groups: dict[float, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in _trained(model):
        # GPT-OSS has the biases of a layer's experts in one matrix.
        decays = parameter.ndim >= 2 and not name.endswith("bias")
        groups[settings.weight_decay if decays else 0.0].append(parameter)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for decay, params in groups.items()],
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        fused=True,
    )


def assert_optimizes(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Assert that the optimizer has every trained parameter of the model once, and no other."""
    known = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    for name, parameter in _trained(model):
        count = known.pop(id(parameter), 0)
        assert count == 1, f"the optimizer has {name} {count} times: it would not be trained"
    assert not known, f"the optimizer has {len(known)} tensors that are not weights of the model"


def lr_factor(step: int, settings: LearnerSettings, total_steps: int) -> float:
    """Learning rate at 0-based `step`, as a fraction of the peak."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    span = max(1, total_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    match settings.lr_schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))


def build_schedule(
    optimizer: torch.optim.Optimizer, settings: LearnerSettings, total_steps: int
) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: lr_factor(step, settings, total_steps))


def offload_moments(optimizer: torch.optim.AdamW) -> None:
    """Keep AdamW's moments in main memory, except during the optimizer's step.

    Activations and moments are then never on a GPU at the same time. Each step copies the moments
    to the GPU and back.
    """

    def move_to_device(*_: Any) -> None:
        for parameter, state in optimizer.state.items():
            _move(state, local(parameter).device)

    optimizer.register_step_pre_hook(move_to_device)
    optimizer.register_step_post_hook(lambda *_: move_moments_to_memory(optimizer))


def move_moments_to_memory(optimizer: torch.optim.AdamW) -> None:
    """Move this worker's share of AdamW's moments into main memory."""
    memory = torch.device("cpu")
    for state in optimizer.state.values():
        _move(state, memory)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the copies are asynchronous
    for state in optimizer.state.values():
        for name, tensor in state.items():
            assert local(tensor).device == memory, f"{name} stayed on {local(tensor).device}"


def _move(state: dict[str, Tensor], device: torch.device) -> None:
    for name, tensor in state.items():
        moved = _copy(local(tensor), device)
        if isinstance(tensor, DTensor):
            # Not from_local, which moves the share to the devices of the mesh. FSDP's
            # CPUOffloadPolicy constructs its tensors like this, too.
            spec = tensor._spec
            moved = DTensor(moved, spec, requires_grad=False)  # pyright: ignore
        state[name] = moved


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_cuda and device.type == "cpu":
        pinned = torch.empty_like(tensor, device=device, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)


def moments(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """This worker's share of AdamW's state, not copied, by the names of the weights."""
    return {
        f"{name}.{key}": value
        for name, parameter in _trained(model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_moments(
    path: str,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    collectives: dist.ProcessGroup | None,
) -> None:
    """Load the optimizer's state, which any number of workers wrote.

    A weight that never had a gradient has no state in the checkpoint, and gets none.

    Raises:
        CheckpointError: the state was written for another model, or cannot be read.
    """
    # Skip a lagged or EMA teacher: this run may be a fork of a run that had one.
    written = {n: size for n, size in tensor_sizes(path).items() if not n.endswith(SUFFIX)}
    trained = {
        name: parameter
        for name, parameter in _trained(model)
        if any(f"{name}.{key}" in written for key in _STATE)
    }
    fresh = {name: _fresh_state(parameter) for name, parameter in trained.items()}
    wanted = {f"{name}.{key}": v for name, state in fresh.items() for key, v in state.items()}
    if written:  # none is written before the first update
        _check_fits(written, wanted, path)
        read_tensors(path, wanted, collectives)
        for name, parameter in trained.items():
            optimizer.state[parameter] = fresh[name]


def load_shadow(
    path: str, state: Mapping[str, Tensor], collectives: dist.ProcessGroup | None
) -> None:
    """Load `Shadow.state()`, which was written together with the moments.

    Raises:
        CheckpointError: the state is missing, was written for another model, or cannot be read.
    """
    written = {n: size for n, size in tensor_sizes(path).items() if n.endswith(SUFFIX)}
    _check_fits(written, state, path)
    read_tensors(path, state, collectives)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Initial state of a parameter, as AdamW with `fused` creates it."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    moments = (torch.zeros_like(parameter, requires_grad=False) for _ in range(2))
    return dict(zip(_STATE, (step, *moments), strict=True))


def _check_fits(written: Mapping[str, torch.Size], wanted: Mapping[str, Tensor], path: str) -> None:
    for name in sorted(written.keys() | wanted.keys()):
        there = tuple(written[name]) if name in written else None
        here = tuple(wanted[name].shape) if name in wanted else None
        if there != here:
            raise CheckpointError(
                f"the optimizer's state in {path} was written for another model: {name} has shape "
                f"{there} there and {here} here (None: it has none). Resume with the model that "
                "the run began with, or choose another out="
            )


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
