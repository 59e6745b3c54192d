"""Named tensors in memory that several processes of one machine share.

    writer    block.write(weights): a copy into the block; block.share() for the readers
    reader    shared.unpack(): views of the same memory, no copy; or shared.portions(...) one
              after the other, so that no more than a bucket is mapped at a time

The writer writes again only when every reader has acknowledged. The block is an anonymous file
(memfd): no directory lists it, and the kernel frees it when the last process that has it open or
mapped ends, even if that process is killed. A reader opens the file through the writer's entry in
/proc, so both must run as one user and see each other's processes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from distill.durable_files import disk_remedy
from distill.errors import EngineError
from distill.gpu import readable
from distill.main_memory import free_main_memory
from distill.weights.model_weights import COPY_BYTES, TensorLayout, Weights, names_of, plan_buckets

# Wide enough for any dtype, and for copies at full speed.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensors:
    """Handle on tensors in shared memory, for any number of readers; small, whatever their size.

    Attributes:
        layouts: layouts of the tensors, in their order in the block.
        offset: offset of the first tensor in the block, in bytes.
        path: path at which a process of this machine opens the block.
        identity: the block's device and inode, because a /proc path can later name another file.
    """

    layouts: tuple[TensorLayout, ...]
    path: str
    identity: tuple[int, int]
    offset: int = 0

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {layout.name: layout.shape for layout in self.layouts}

    def unpack(self) -> dict[str, Tensor]:
        """Map the tensors. Writes to them are not visible to other processes.

        Raises:
            EngineError: the block no longer exists, or this process may not open it.
        """
        with self.held() as held:
            descriptor = int(os.path.basename(held.path))
            before = self.offset % mmap.ALLOCATIONGRANULARITY  # a mapping begins with a page
            block = mmap.mmap(
                descriptor,
                before + block_bytes(self.layouts),
                access=mmap.ACCESS_COPY,
                offset=self.offset - before,
            )
        return views_of(torch.frombuffer(block, dtype=torch.uint8)[before:], self.layouts)

    def portions(self, bucket_bytes: int) -> list[SharedTensors]:
        """Handles on the same tensors, one per bucket (`plan_buckets`), in order."""
        made, offset = [], self.offset
        for bucket in plan_buckets(self.layouts, bucket_bytes):
            made.append(replace(self, layouts=tuple(bucket), offset=offset))
            offset += sum(map(_size, bucket))
        return made

    @contextmanager
    def held(self) -> Iterator[SharedTensors]:
        """Keep the block open, and yield a handle that stays valid even if the writer ends.

        Other processes can open the block through this process. Raises as `unpack`.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _gone(str(error)) from error
        try:
            if _identity(descriptor) != self.identity:
                raise _gone(f"{self.path} was replaced by another file")
            yield replace(self, path=_path(descriptor))
        finally:
            os.close(descriptor)


class SharedBlock:
    """Block of shared memory, as large as the largest weights written to it."""

    def __init__(self) -> None:
        self._file: _AnonymousFile | None = None
        self.layouts: tuple[TensorLayout, ...] = ()  # of the tensors written last

    def write(self, weights: Weights) -> None:
        """Copy weights into the block, a bucket at a time, from any device; overwrites the block.

        Raises:
            EngineError: main memory has no room for the weights.
        """
        buckets = plan_buckets(weights.layouts, COPY_BYTES)
        gathered = (weights.gather(names_of(bucket)) for bucket in buckets)
        self.fill(weights.layouts, (named for bucket in gathered for named in bucket.items()))

    def fill(self, layouts: Sequence[TensorLayout], tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors of these layouts into the block, one at a time. Raises as `write`."""
        self.layouts = tuple(layouts)
        if self._file is None or len(self._file.bytes) < block_bytes(layouts):
            self._file = None  # freed before the larger one is made
            self._file = _AnonymousFile(block_bytes(layouts))
        views = views_of(self._file.bytes, self.layouts)
        for name, tensor in tensors:
            views[name].copy_(tensor)

    def share(self) -> SharedTensors:
        """Handle on the last write; valid until the next write, or until this process ends."""
        assert self._file is not None, "nothing was written yet"
        descriptor = self._file.descriptor
        return SharedTensors(
            layouts=self.layouts, path=_path(descriptor), identity=_identity(descriptor)
        )


class _AnonymousFile:
    """Mapped anonymous file. Readers that have it open keep it after this object is deleted."""

    def __init__(self, nbytes: int) -> None:
        # Checked first: the kernel would not refuse the allocation, but later kill a process.
        if (available := free_main_memory()) < nbytes:
            free_some = "Free some, or use weights=disk"
            raise _no_room(nbytes, f"{readable(available)} are available", free_some)
        self._file = os.fdopen(os.memfd_create("isotherm-weights"), "r+b", buffering=0)
        try:
            os.posix_fallocate(self.descriptor, 0, nbytes)
            block = mmap.mmap(self.descriptor, nbytes)
        except OSError as error:
            raise _no_room(nbytes, str(error), disk_remedy(error)) from error
        self.bytes = torch.frombuffer(block, dtype=torch.uint8)

    @property
    def descriptor(self) -> int:
        return self._file.fileno()


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _size(layout: TensorLayout) -> int:
    return -(-layout.nbytes // _ALIGNMENT) * _ALIGNMENT


def block_bytes(layouts: Sequence[TensorLayout]) -> int:
    return max(_ALIGNMENT, sum(map(_size, layouts)))  # a mapping must not be empty


def starts_of(layouts: Sequence[TensorLayout]) -> list[int]:
    """Offset of each tensor in a block, in bytes."""
    return list(accumulate(map(_size, layouts), initial=0))[:-1]


def views_of(block: Tensor, layouts: Sequence[TensorLayout]) -> dict[str, Tensor]:
    """Views of the tensors in a block of bytes."""
    return {
        layout.name: layout.view(block[start : start + layout.nbytes])
        for layout, start in zip(layouts, starts_of(layouts), strict=True)
    }


def _gone(why: str) -> EngineError:
    return EngineError(
        f"cannot open weights in shared memory ({why}): their writer has ended, or runs as "
        "another user or in another container; use weights=group or weights=disk"
    )


def _no_room(nbytes: int, why: str, remedy: str) -> EngineError:
    return EngineError(
        f"{readable(nbytes)} of weights do not fit into shared memory ({why}). {remedy}"
    )
