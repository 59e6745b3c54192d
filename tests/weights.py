"""Weights for tests: whole, or in shared memory as a learner offers them to engines."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from distill.weights.lending import BucketLender, LentBucket
from distill.weights.model_weights import HeldWeights, Weights, names_of
from distill.weights.shared_memory import SharedBlock, SharedTensors

# An engine can open a block only while its writer keeps it.
_KEPT: deque[SharedBlock] = deque(maxlen=8)


def gather_all(weights: Weights) -> dict[str, Tensor]:
    return weights.gather(names_of(weights.layouts))


def numbers(weights: Weights) -> dict[str, np.ndarray]:
    """Copies of all tensors, to be sent from a worker or kept while the weights change."""
    return {name: tensor.clone().numpy() for name, tensor in gather_all(weights).items()}


def shared(tensors: Mapping[str, Tensor]) -> SharedTensors:
    """The tensors in a new shared block; the last eight blocks are kept."""
    block = SharedBlock()
    block.write(HeldWeights({name: tensor.detach() for name, tensor in tensors.items()}))
    _KEPT.append(block)
    return block.share()


class LendableWeights:
    """Weights that this process holds whole, and lends as a learner of one worker would."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        held = HeldWeights(tensors)
        self.layouts, self.gather = held.layouts, held.gather
        self.first_non_finite = held.first_non_finite
        self._by_name = {layout.name: layout for layout in held.layouts}
        self._lender = BucketLender("cpu")

    def lend(self, names: Sequence[str], readers: Sequence[int]) -> list[list[LentBucket]]:
        layouts = [self._by_name[name] for name in names]
        mine = self._lender.lend(layouts, self.gather(names).items(), readers[0])
        return [mine, *([] for _ in readers[1:])]

    def take_back(self) -> None:
        self._lender.take_back()
