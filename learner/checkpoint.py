"""Checkpoints: written whole or not at all, newest complete one found again, old ones dropped.

    out/checkpoints/step-000010/
        model/          Hugging Face checkpoint with its tokenizer: transformers and SGLang load it
        adapter/        with LoRA: the adapter alone, as peft saves it
        optimizer/      AdamW's state, a part of each worker (torch.distributed.checkpoint)
        trainer.pt      schedule and RNG (read with weights_only=True)
        manifest.json   step, delivery state, and the size of every file: written last

A directory is written under a temporary name, synced, and renamed. No manifest, no checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import CheckpointError

_NAME = re.compile(r"step-(\d{6,})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk. `delivery` says which prompt groups its weights contain."""

    path: Path
    step: int
    delivery: Mapping[str, Any]

    @property
    def model_dir(self) -> str:
        return str(self.path / "model")

    @property
    def adapter_dir(self) -> str:
        return str(self.path / "adapter")


class CheckpointStore:
    """The checkpoints of one run, newest `keep` of them."""

    def __init__(self, root: str | Path, keep: int) -> None:
        assert keep >= 1
        self.root = Path(root)
        self._keep = keep

    def save(
        self,
        *,
        step: int,
        write: Callable[[Path], None],
        delivery: Mapping[str, Any],
    ) -> Checkpoint:
        """Has a checkpoint written into a new directory, and drops the oldest beyond `keep`.

        A step has one state: where it is saved already, it is left as it is.

        Raises:
            CheckpointError: it could not be written (disk full, say). Earlier ones are untouched.
        """
        final = self.root / f"step-{step:06d}"
        saved = _read(final)
        if saved is not None and saved.delivery == delivery:
            return saved
        partial = self.root / f".{final.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            sizes = _sync_files(partial)
            manifest = {"step": step, "delivery": dict(delivery), "sizes": sizes}
            _write_synced(partial / "manifest.json", json.dumps(manifest, indent=1))
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _sync_directory(self.root)
        except Exception as error:  # OSError; torch: RuntimeError; tokenizers: a bare Exception
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(self._explain(final, error)) from error
        for old in self.complete()[: -self._keep]:
            shutil.rmtree(old.path)
        return Checkpoint(path=final, step=step, delivery=delivery)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, or None where no step was ever saved.

        Raises:
            CheckpointError: checkpoints exist and not one of them is intact.
        """
        complete = self.complete()
        if complete:
            return complete[-1]
        broken = sorted(path.name for path in self._directories())
        if broken:
            raise CheckpointError(
                f"{self.root} holds {', '.join(broken)}, none of them complete (a manifest or a "
                "file is missing or cut short). Remove them to start over, or choose another out="
            )
        return None

    def _directories(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        return sorted(path for path in self.root.iterdir() if _NAME.match(path.name))

    def complete(self) -> list[Checkpoint]:
        found = [checkpoint for path in self._directories() if (checkpoint := _read(path))]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def _explain(self, final: Path, error: BaseException) -> str:
        free = shutil.disk_usage(self.root if self.root.exists() else Path("/")).free >> 20
        newest = self.complete()
        kept = f"the newest complete one is {newest[-1].path}" if newest else "none exists yet"
        return (
            f"cannot write checkpoint {final}: {error} ({free} MiB free). Earlier checkpoints are "
            f"untouched; {kept}. Free some space and run the same command again to resume"
        )


def _read(path: Path) -> Checkpoint | None:
    """The checkpoint at `path` if its manifest is there and every file has the size it names."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        sizes = {name: (path / name).stat().st_size for name in manifest["sizes"]}
        found = Checkpoint(path=path, step=manifest["step"], delivery=manifest["delivery"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if sizes == manifest["sizes"] else None


def _sync_files(root: Path) -> dict[str, int]:
    sizes = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[str(path.relative_to(root))] = path.stat().st_size
    return sizes


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
