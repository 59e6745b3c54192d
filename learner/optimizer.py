"""AdamW, its learning-rate schedule, and its state on disk."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from distill.errors import CheckpointError
from learner.config import OptimizerConfig
from learner.sharding import local


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and spares vectors (norms, biases)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def lr_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The rate at 0-based `step` as a share of the peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))


def build_schedule(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int
) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: lr_factor(step, config, total_steps))


def offload_moments(optimizer: torch.optim.AdamW) -> None:
    """Keeps AdamW's moments in main memory, but for the duration of its own step.

    Activations and moments are then never on a GPU at the same time; both ways over the bus are
    the price of a step.
    """

    def bring(*_: Any) -> None:
        for parameter, state in optimizer.state.items():
            _move(state, local(parameter).device)

    def put_away(*_: Any) -> None:
        for state in optimizer.state.values():
            _move(state, torch.device("cpu"))

    optimizer.register_step_pre_hook(bring)
    optimizer.register_step_post_hook(put_away)


def _move(state: dict[str, Tensor], device: torch.device) -> None:
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            moved = tensor.to_local().to(device)
            state[name] = DTensor.from_local(
                moved, tensor.device_mesh, tensor.placements,
                run_check=False, shape=tensor.shape, stride=tensor.stride(),
            )  # fmt: skip
        else:
            state[name] = tensor.to(device)


def save_moments(
    path: str,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    collectives: dist.ProcessGroup | None,
) -> None:
    """Writes each worker's share of AdamW's state, by the names of the weights.

    Args:
        path: a directory that every worker reaches.
        collectives: by which the workers agree on who writes what; None: there is one.

    Raises:
        CheckpointError: a worker could not write.
    """
    state = {
        f"{name}.{key}": value
        for name, parameter in _trained(model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    with _plainly(f"cannot write the optimizer's state to {path}"):
        save(
            state,
            storage_writer=FileSystemWriter(path),
            process_group=collectives,
            no_dist=collectives is None,
        )


def load_moments(
    path: str,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    collectives: dist.ProcessGroup | None,
) -> None:
    """Fills the optimizer's state with what any number of workers wrote.

    Raises:
        CheckpointError: it was written for another model, or cannot be read.
    """
    try:
        reader = FileSystemReader(path)
        written = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a missing or cut metadata file has many faces
        raise CheckpointError(f"cannot read the optimizer's state in {path}: {error}") from error
    fresh = {name: _fresh_state(parameter) for name, parameter in _trained(model)}
    wanted = {f"{name}.{key}": v for name, state in fresh.items() for key, v in state.items()}
    if written:  # none is written before the first update
        _check_fits(written, wanted, path)
        with _plainly(f"cannot read the optimizer's state in {path}"):
            load(
                wanted,
                storage_reader=reader,
                process_group=collectives,
                no_dist=collectives is None,
            )
        for name, parameter in _trained(model):
            optimizer.state[parameter] = fresh[name]


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """As AdamW with `fused` makes it."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def _check_fits(written: Mapping[str, Any], wanted: Mapping[str, Tensor], path: str) -> None:
    for name in sorted(written.keys() | wanted.keys()):
        there = tuple(written[name].size) if name in written else None
        here = tuple(wanted[name].shape) if name in wanted else None
        if there != here:
            raise CheckpointError(
                f"the optimizer's state in {path} was written for another model: {name} has shape "
                f"{there} there and {here} here (None: it has none). Resume with the model that "
                "the run began with, or choose another out="
            )


@contextmanager
def _plainly(what: str) -> Iterator[None]:
    """CheckpointErrors that begin with `what`; no warning that a learner alone is alone."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint.*")
            yield
    except CheckpointException as error:  # no Exception; holds those of every worker
        why, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{what}: {why}") from error
