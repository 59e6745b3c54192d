"""Fingerprints of a learner's tensors, the same however they are shared out among its workers.

The sum of a tensor's bits, and of its squares, is that of its shards' sums: bits are exactly equal
on any number of workers that hold equal tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from learner.sharding import local

# (sum of its bits as 32-bit numbers, norm) of a tensor; of a share of one, its squares' sum.
Fingerprint = tuple[int, float]
# By name, of each trained tensor's `gradient` and `weights`, in the model's order.
Fingerprints = Mapping[str, Mapping[str, Fingerprint]]


def shares(model: nn.Module, rank: int) -> Fingerprints:
    """Those of what this worker holds. A tensor that all hold whole is counted by the first."""
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
    """Those of the whole tensors, of the shares of all workers."""
    found: dict[str, dict[str, Fingerprint]] = {}
    for what in ("gradient", "weights"):
        names = dict.fromkeys(name for one in of_workers for name in one[what])
        found[what] = {}
        for name in names:
            parts = [one[what][name] for one in of_workers if name in one[what]]
            bits, squares = (sum(values) for values in zip(*parts, strict=True))
            found[what][name] = (int(bits), math.sqrt(squares))
    return found
