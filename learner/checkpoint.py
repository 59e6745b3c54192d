"""Checkpoints of a run: written completely or not at all, read back, and deleted when superseded.

    out/checkpoints/step-000010/
        model/          Hugging Face checkpoint with its tokenizer: transformers and SGLang load it
        adapter/        with LoRA: only the adapter, in peft's format
        optimizer/      AdamW's state, a part per worker (torch.distributed.checkpoint, safetensors)
        trainer.json    schedule and RNG
        manifest.json   step, delivery state, size and SHA-256 of every file: written last
    out/checkpoints/best.json       the step of the best evaluation, its metric and value
    out/checkpoints/held.json       the step that is evaluated concurrently with training
    out/checkpoints/trusted.json    the step up to which the teacher's scores are proven

A directory is written under a temporary name, synced, and renamed. A directory without a manifest
is not a checkpoint. A run that resumes rejects a checkpoint whose files were changed later.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distill.durable_files import (
    digests,
    disk_remedy,
    is_full,
    sync_directory,
    sync_tree,
    whole_write,
    write_whole,
)
from distill.errors import CheckpointError
from distill.gpu import readable
from distill.records import TrainedGroups

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{6,})$")
_BEST, _HELD, _PROVEN = "best.json", "held.json", "trusted.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        delivery: the prompt groups that the weights were trained on.
        seal: digest of the whole checkpoint.
    """

    path: Path
    step: int
    delivery: Mapping[str, Any]
    seal: str

    @property
    def model_dir(self) -> str:
        return str(self.path / "model")

    @property
    def adapter_dir(self) -> str:
        return str(self.path / "adapter")


def trained_in(checkpoint: Checkpoint | None) -> TrainedGroups:
    """Groups that the weights of a rollout run's checkpoint account for; None: before the first."""
    return TrainedGroups.from_json(checkpoint.delivery) if checkpoint else TrainedGroups()


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation: the step of its weights, and the metric with its value."""

    step: int
    metric: str
    value: float


class CheckpointStore:
    """Checkpoints of one run: the newest, the best, and some older ones."""

    def __init__(self, root: str | Path, keep: int, keep_every: int = 0, window: int = 0) -> None:
        """
        Args:
            keep: number of newest checkpoints to keep.
            keep_every: keep also each checkpoint whose step is divisible by this; 0: disabled.
            window: number of newest steps of which each can be replayed from a kept checkpoint.
        """
        assert keep >= 1 and keep_every >= 0
        self.root = Path(root)
        self._keep, self._keep_every, self._window = keep, keep_every, window
        self._intact: list[Checkpoint] = []  # written or read by this object

    def save(
        self,
        *,
        step: int,
        write: Callable[[Path], object],
        delivery: Mapping[str, Any],
    ) -> Checkpoint:
        """Write a checkpoint into a new directory, and delete superseded checkpoints.

        An intact checkpoint of the same step and delivery state is not written again.

        Raises:
            CheckpointError: writing failed (full disk, say). Earlier checkpoints are unchanged.
        """
        final = self.root / f"step-{step:06d}"
        for left in self.root.glob(".step-*.partial"):  # left by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        if (saved := self._saved(final, delivery)) is not None:
            return saved
        try:
            with whole_write(final) as partial:
                partial.mkdir(parents=True)
                write(partial)
                hashes = sync_tree(partial)
                sizes = {name: (partial / name).stat().st_size for name in hashes}
                manifest: dict[str, Any] = {"step": step, "delivery": dict(delivery)}
                manifest |= {"sizes": sizes, "sha256": hashes}
                manifest["seal"] = _seal(manifest)
                write_whole(partial / "manifest.json", json.dumps(manifest, indent=2).encode())
            sync_directory(self.root)
            sync_directory(self.root.parent)
        except Exception as error:  # OSError; torch: RuntimeError; tokenizers: a bare Exception
            raise CheckpointError(self._explain(final, error)) from error
        for old in self._superseded():
            gone = old.path.with_name(f".{old.path.name}.partial")  # the next save removes the rest
            try:
                old.path.rename(gone)
                shutil.rmtree(gone)
            except OSError as error:
                logger.warning("checkpoint %s cannot be removed and is kept: %s", old.path, error)
        made = Checkpoint(path=final, step=step, delivery=delivery, seal=manifest["seal"])
        self._intact.append(made)
        return made

    def _superseded(self) -> list[Checkpoint]:
        held = self._held()  # before `best`: the held checkpoint may become the best between them
        best = self.best()
        complete = self.complete()
        trusted = self._newest_proven(complete)
        first = self._first_needed(complete)
        return [
            old
            for old in complete[: -self._keep]
            if old.step < first
            and not (self._keep_every and old.step % self._keep_every == 0)
            and not (best and best.step == old.step)
            and old.step not in (held, trusted)
        ]

    def _first_needed(self, complete: Sequence[Checkpoint]) -> float:
        """Step of the oldest checkpoint that the window needs."""
        if not self._window or not complete:
            return float("inf")
        before = complete[-1].step - self._window
        return max((each.step for each in complete if each.step <= before), default=before)

    def hold(self, step: int) -> None:
        """Keep the checkpoint of a step, written or not yet, until `release` or the next `hold`.

        Raises CheckpointError if the mark cannot be written.
        """
        self._mark(_HELD, {"step": step})

    def release(self) -> None:
        """End `hold`: the checkpoint is deleted when it is superseded."""
        with suppress(OSError):  # on a read-only disk the mark, and so the checkpoint, stays
            (self.root / _HELD).unlink(missing_ok=True)

    def _held(self) -> int | None:
        return self._marked(_HELD)

    def _marked(self, name: str) -> int | None:
        try:
            return json.loads((self.root / name).read_bytes())["step"]
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def mark_proven(self, step: int) -> None:
        """Record that weights up to this step are proven, and keep the newest such checkpoint.

        Raises CheckpointError if the mark cannot be written.
        """
        self._mark(_PROVEN, {"step": step})

    def _newest_proven(self, complete: Sequence[Checkpoint]) -> int | None:
        up_to = self._marked(_PROVEN)
        return max(
            (c.step for c in complete if up_to is not None and c.step <= up_to), default=None
        )

    def best(self) -> Best | None:
        """Evaluation of the last `mark_best`; None if its checkpoint no longer exists."""
        try:
            best = Best(**json.loads((self.root / _BEST).read_bytes()))
        except (OSError, ValueError, TypeError):  # a missing or edited file is the same as no mark
            return None
        return best if any(each.step == best.step for each in self.complete()) else None

    def mark_best(self, best: Best) -> None:
        """Mark the checkpoint of the best evaluation, and keep it until another one is marked.

        Raises CheckpointError if the mark cannot be written.
        """
        self._mark(_BEST, asdict(best))

    def _mark(self, name: str, value: Mapping[str, Any]) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            write_whole(self.root / name, json.dumps(dict(value)).encode())
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.root / name}: {error}. {disk_remedy(error)}"
            ) from error

    def latest(
        self, print_line: Callable[[str], None] = logger.warning, before: int | None = None
    ) -> Checkpoint | None:
        """Read the newest intact checkpoint, every file of it; None if there are none.

        Args:
            print_line: receives a message for each newer checkpoint that is damaged: the damaged
                file, and the steps that are lost.
            before: consider only checkpoints of earlier steps.

        Raises:
            CheckpointError: none of the checkpoints is intact.
        """
        damaged: dict[str, str] = {}
        for path in reversed(self._directories()):
            if before is not None and _step(path) >= before:
                continue
            try:
                found = _read_whole(path)
            except _Damaged as error:
                damaged[path.name] = str(error)
                continue
            for name, why in damaged.items():
                print_line(
                    f"checkpoint {name} is damaged: {why}. Resuming from step {found.step}; "
                    "later steps are trained again"
                )
            self._intact.append(found)
            return found
        if damaged:
            raise CheckpointError(
                f"{self.root} holds {', '.join(sorted(damaged))}, none of them complete and intact "
                f"({'; '.join(f'{name}: {why}' for name, why in damaged.items())}). Remove them to "
                "start over, or choose another out="
            )
        return None

    def of_step(self, step: int) -> Checkpoint | None:
        """Read the checkpoint of a step, every file of it; None if there is none.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        path = self.root / f"step-{step:06d}"
        if not path.is_dir():
            return None
        try:
            return _read_whole(path)
        except _Damaged as error:
            raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints of later steps, which `latest` skipped, to `*.damaged`.

        Raises:
            CheckpointError: a directory cannot be renamed.
        """
        for path in self._directories():
            if _step(path) > step:
                aside = path.with_name(f"{path.name}.damaged")
                try:
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
                except OSError as error:
                    raise CheckpointError(
                        f"cannot rename the damaged {path}: {error}. {disk_remedy(error)}"
                    ) from error

    def complete(self) -> list[Checkpoint]:
        """Checkpoints whose files have their full sizes, oldest first. Contents are not read."""
        found = []
        for path in self._directories():
            with suppress(_Damaged):
                found.append(_read(path))
        return found

    def _directories(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        return sorted((p for p in self.root.iterdir() if _NAME.match(p.name)), key=_step)

    def _saved(self, path: Path, delivery: Mapping[str, Any]) -> Checkpoint | None:
        """Checkpoint at `path` if it is intact and has this delivery state, otherwise None."""
        try:
            found = _read(path)
            if found.delivery != delivery:
                return None
            if found not in self._intact:
                _verify(path)
        except _Damaged:
            return None
        return found

    def _explain(self, final: Path, error: BaseException) -> str:
        free = ""
        if is_full(error):
            there = self.root if self.root.exists() else Path("/")
            free = f" ({readable(shutil.disk_usage(there).free)} free)"
        newest = self.complete()
        kept = f"the newest complete one is {newest[-1].path}" if newest else "none exists yet"
        return (
            f"cannot write checkpoint {final}: {error}{free}. Earlier checkpoints are "
            f"untouched; {kept}. {disk_remedy(error)} and run the same command again to resume"
        )


class _Damaged(Exception):
    """Directory that is not a complete checkpoint; the message has the reason."""


def _step(path: Path) -> int:
    match = _NAME.match(path.name)
    assert match is not None
    return int(match[1])


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise _Damaged(f"manifest.json cannot be read ({error})") from error
    return manifest


def _seal(manifest: Mapping[str, Any]) -> str:
    """Digest of the manifest's other fields, which include the digests of all files."""
    rest = {name: value for name, value in manifest.items() if name != "seal"}
    written = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(written.encode(errors="backslashreplace")).hexdigest()


def _read(path: Path) -> Checkpoint:
    """Read the manifest at `path` and compare the sizes of all files; raises _Damaged."""
    manifest = _manifest(path)
    if manifest.get("seal") != (seal := _seal(manifest)):
        raise _Damaged("manifest.json was edited: its fields do not match its seal")
    try:
        found = Checkpoint(
            path=path, step=manifest["step"], delivery=manifest["delivery"], seal=seal
        )
        if found.step != _step(path) or not isinstance(found.delivery, dict):
            raise ValueError(f"step {found.step}, delivery {found.delivery!r}")
        for name, size in manifest["sizes"].items():
            if (there := (path / name).stat().st_size) != size:
                raise _Damaged(f"{name} has {there} bytes, and the manifest has {size}")
    except OSError as error:
        raise _Damaged(f"{error.filename} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _Damaged(f"manifest.json has missing or invalid fields ({error!r})") from error
    return found


def _verify(path: Path) -> None:
    """Raise _Damaged if the contents of a file have changed since it was written."""
    try:
        written = _manifest(path)["sha256"]
        there = digests(path, written)
    except (OSError, KeyError, AttributeError, TypeError) as error:
        raise _Damaged(f"it cannot be read: {error}") from error
    for name, expected in written.items():
        if there[name] != expected:
            raise _Damaged(f"{name} has sha256 {there[name]}, and the manifest has {expected}")


def _read_whole(path: Path) -> Checkpoint:
    """Read the checkpoint at `path`, and verify the contents of its files; raises _Damaged."""
    found = _read(path)
    _verify(path)
    return found
