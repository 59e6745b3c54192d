"""Weights as tests need them: whole, or in shared memory as a learner offers them to engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from torch import Tensor

from distill.weights.model_weights import HeldWeights, Weights, names_of
from distill.weights.shared_memory import SharedBlock, SharedTensors

# An engine can open a block as long as its writer keeps it.
_KEPT: deque[SharedBlock] = deque(maxlen=8)


def gather_all(weights: Weights) -> dict[str, Tensor]:
    return weights.gather(names_of(weights.layouts))


def shared(tensors: Mapping[str, Tensor]) -> SharedTensors:
    """The tensors in a block of their own; the last eight blocks are kept."""
    block = SharedBlock()
    block.write(HeldWeights({name: tensor.detach() for name, tensor in tensors.items()}))
    _KEPT.append(block)
    return block.share()
