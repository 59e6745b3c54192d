"""Named tensors in memory that several processes of one machine have in common.

    writer    block.write(weights): a copy into the block; block.share() for each reader
    reader    shared.unpack(), once: views of the same memory, no copy

The writer writes again only when every reader has said that it is done. torch counts handles: one
that was opened twice would free the memory under the others, and one that nobody opens keeps it
until its writer ends.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from torch import Tensor

from distill.errors import EngineError
from distill.weights import Weights, names_of, plan_buckets

# Wide enough for any dtype, and for the copy to run at full speed.
_ALIGNMENT = 64
_WHERE = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensors:
    """One reader's handle on tensors in shared memory; small, whatever their size.

    Attributes:
        shapes: of the tensors, by name.
        handle: pickled (name, tensor) pairs, as torch's multiprocessing passes them on.
    """

    shapes: Mapping[str, tuple[int, ...]]
    handle: bytes

    def unpack(self) -> dict[str, Tensor]:
        """The tensors: copy from them, never into. To be called once."""
        return dict(pickle.loads(self.handle))


def handle(shared: Mapping[str, Tensor]) -> bytes:
    """A handle for one more reader of tensors that are in shared memory; SGLang takes it, too."""
    # The default, file descriptors, cannot reach a process that is not our child.
    torch.multiprocessing.set_sharing_strategy("file_system")
    return bytes(ForkingPickler.dumps(list(shared.items())))


class SharedBlock:
    """One block of shared memory, as large as the largest bundle that was written."""

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self.tensors: dict[str, Tensor] = {}

    def write(self, weights: Weights) -> None:
        """Copies weights in, a bucket at a time, from any device; what was there before is gone.

        Raises:
            EngineError: there is no room for them in shared memory.
        """
        sizes = [-(-layout.nbytes // _ALIGNMENT) * _ALIGNMENT for layout in weights.layouts]
        if self._block is None or len(self._block) < sum(sizes):
            self._block, self.tensors = None, {}
            self._block = _allocate(sum(sizes))
        offset, views = 0, {}
        for layout, size in zip(weights.layouts, sizes, strict=True):
            part = self._block[offset : offset + layout.nbytes]
            views[layout.name] = part.view(layout.torch_dtype).view(layout.shape)
            offset += size
        for bucket in plan_buckets(weights.layouts):
            for name, tensor in weights.gather(names_of(bucket)).items():
                views[name].copy_(tensor)
        self.tensors = views

    def share(self) -> SharedTensors:
        """What was written last, for one reader."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return SharedTensors(shapes=shapes, handle=handle(self.tensors))


def _allocate(nbytes: int) -> Tensor:
    # Beyond its limit the kernel would not refuse, but kill with a bus error.
    free = shutil.disk_usage(_WHERE).free
    if free < nbytes:
        raise EngineError(
            f"{nbytes >> 20} MiB of weights do not fit into {_WHERE} ({free >> 20} MiB free): make "
            "it larger (docker run --shm-size), or use weights=disk"
        )
    torch.multiprocessing.set_sharing_strategy("file_system")
    return torch.empty(nbytes, dtype=torch.uint8).share_memory_()
