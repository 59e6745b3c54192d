"""Fingerprints of a learner's tensors, independent of how they are sharded over its workers.

The sum of a tensor's bits, and of its squares, is the total of the sums of its shards. The sum of
bits is exactly equal for any number of workers that hold equal tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from learner.sharding import local

# (sum of the bits as 32-bit integers, norm) of a tensor; for a shard, (sum, sum of squares).
Fingerprint = tuple[int, float]
# Keys: `gradient` and `weights`, then names of trained tensors, in the model's order.
Fingerprints = Mapping[str, Mapping[str, Fingerprint]]


def shares(model: nn.Module, rank: int) -> Fingerprints:
    """Fingerprints of this worker's shards.

    A tensor that is not sharded, so that every worker holds it whole, is counted on rank 0 only.
    """
    found: dict[str, dict[str, Fingerprint]] = {"gradient": {}, "weights": {}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (rank and not isinstance(parameter, DTensor)):
            continue
        for what, tensor in (("gradient", parameter.grad), ("weights", parameter)):
            if tensor is not None:
                found[what][name] = _of(local(tensor.detach()))
    return found


def _of(tensor: torch.Tensor) -> Fingerprint:
    bits = tensor.contiguous().view(torch.int32).sum(dtype=torch.int64)
    return int(bits), float(tensor.double().square().sum())


def of_all(of_workers: Sequence[Fingerprints]) -> dict[str, dict[str, Fingerprint]]:
    """Combine the shard fingerprints of all workers into fingerprints of the whole tensors."""
    found: dict[str, dict[str, Fingerprint]] = {}
    for what in ("gradient", "weights"):
        names = dict.fromkeys(name for one in of_workers for name in one[what])
        found[what] = {}
        for name in names:
            parts = [one[what][name] for one in of_workers if name in one[what]]
            bits, squares = (sum(values) for values in zip(*parts, strict=True))
            found[what][name] = (int(bits), math.sqrt(squares))
    return found
