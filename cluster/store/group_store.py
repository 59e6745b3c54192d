"""Delivered groups on disk, until a checkpoint includes them: `out/groups/e0003-0001.arrow`.

Only the queue's process writes, on the node of the journal. Each `append` writes one record batch
of the stream (`group_format`) and syncs it to disk, so a file that was cut by a crash lacks only
its last batch. The name contains the queue's epoch, and a restarted queue opens a new file. The
files may contain obsolete groups; the ledger determines which groups are valid.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.store.group_format import UNREADABLE, GroupRow, batch_of, groups_of, schema
from distill.durable_files import sync_directory
from distill.records import Lease
from distill.types import TrajectoryGroup

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

# Folder of kept groups in a run's directory.
GROUPS = "groups"
# Bytes after which a file is closed and a new one is opened.
_FILE_BYTES = 64 << 20
_NAME = re.compile(r"e(\d{4,})-(\d{4,})\.arrow$")


class GroupStore:
    """Files of delivered groups in a folder. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # Leases of the deliveries in each file.
        self._files: dict[Path, set[Lease]] = {}
        self._open: int | None = None  # descriptor of the newest file
        self._newest, self._epoch, self._size = root, 0, 0
        for path in sorted(root.glob("e*.arrow")):
            if match := _NAME.match(path.name):
                batches = _batches(path, int(match[1]))
                self._files[path] = {lease for _, leases in batches for lease in leases}

    def append(self, epoch: int, rows: Sequence[GroupRow]) -> None:
        """Write groups, and return when they are on disk.

        Raises:
            OSError: none of the groups is kept; for example, the disk is full.
        """
        batch = batch_of(rows)
        try:
            self._write(epoch, batch.serialize())
        except OSError:
            self.close()
            raise
        self._files[self._newest].update(_leases_of(batch, epoch))
        if self._size >= _FILE_BYTES:
            self.close()

    def _write(self, epoch: int, message: pyarrow.Buffer) -> None:
        if self._open is None or epoch != self._epoch:
            self.close()
            self._begin(epoch)
        assert self._open is not None
        self._write_all(message)
        os.fsync(self._open)
        self._size += message.size

    def _begin(self, epoch: int) -> None:
        """Open a new file. After a failed write, a file is not continued."""
        self._root.mkdir(exist_ok=True)
        numbers = [int(match[2]) for path in self._files if (match := _NAME.match(path.name))]
        path = self._root / f"e{epoch:04d}-{max(numbers, default=0) + 1:04d}.arrow"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._open = os.open(path, flags, 0o644)
        self._files[path] = set()
        self._newest, self._epoch, self._size = path, epoch, 0
        self._write_all(schema({}).serialize())
        sync_directory(self._root)

    def _write_all(self, message: pyarrow.Buffer) -> None:
        assert self._open is not None
        rest = memoryview(message)
        while rest:
            rest = rest[os.write(self._open, rest) :]

    def read(self, leases: Collection[Lease]) -> dict[int, TrajectoryGroup]:
        """Read the groups of these deliveries, by id; missing and unreadable ones are left out."""
        found: dict[int, TrajectoryGroup] = {}
        for path, held in self._files.items():
            if wanted := held.intersection(leases):
                [epoch] = {lease.epoch for lease in wanted}  # a file has one epoch
                found |= _read(path, epoch, wanted)
        return found

    def retain(self, needed: Collection[int]) -> None:
        """Delete the files without needed groups, and continue in a new file.

        Raises:
            OSError: a file cannot be deleted.
        """
        self.close()
        for path, held in list(self._files.items()):
            if not any(lease.group_id in needed for lease in held):
                path.unlink(missing_ok=True)
                del self._files[path]

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open)
            self._open = None


def _read(path: Path, epoch: int, wanted: Collection[Lease]) -> dict[int, TrajectoryGroup]:
    found: dict[int, TrajectoryGroup] = {}
    for batch, leases in _batches(path, epoch):
        rows = [row for row, lease in enumerate(leases) if lease in wanted]
        try:
            groups = groups_of(batch, rows) if rows else []
        except UNREADABLE as error:
            logger.warning("groups in %s cannot be read: %s", path, error)
            continue
        found |= {group.group_id: group for group in groups}
    return found


def _leases_of(batch: pyarrow.RecordBatch, epoch: int) -> list[Lease]:
    """Lease of each row of a batch, in a file of this epoch."""
    columns = (batch.column(name).to_pylist() for name in ("group_id", "attempt"))
    return [
        Lease(group_id=group_id, attempt=attempt, epoch=epoch)
        for group_id, attempt in zip(*columns, strict=True)
    ]


def _batches(path: Path, epoch: int) -> Iterator[tuple[pyarrow.RecordBatch, list[Lease]]]:
    """Complete batches of a file of this epoch, with the lease of each row.

    The iteration ends at the first batch that is incomplete or damaged.
    """
    import pyarrow

    try:
        with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            for batch in stream:
                yield batch, _leases_of(batch, epoch)
    except UNREADABLE:
        return
