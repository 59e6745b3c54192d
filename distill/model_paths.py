"""Paths of models in settings: their meaning, and checks before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from distill.errors import CheckpointError
from distill.lookup import listed, path_meant


def trained_model(path: str) -> str:
    """Directory of the model that `path` names.

    RUN is the directory of a run and stands for its final/; RUN:STEP and RUN:best stand for the
    models of its checkpoints. Any other path is returned unchanged.

    Raises:
        CheckpointError: the run has no such checkpoint.
    """
    if (Path(path) / "final").is_dir() and not (Path(path) / "tokenizer.json").exists():
        return str(Path(path) / "final")
    run, colon, step = path.rpartition(":")
    checkpoints = Path(run) / "checkpoints"
    if not colon or Path(path).exists() or not checkpoints.is_dir():
        return path
    if step == "best":
        try:
            step = str(json.loads((checkpoints / "best.json").read_bytes())["step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: {run} has no best checkpoint (set keep_best=)"
            ) from error
    model = checkpoints / f"step-{step.zfill(6)}" / "model"
    if not model.is_dir():
        kept = ", ".join(sorted(each.name for each in checkpoints.glob("step-*")))
        raise CheckpointError(f"{path}: {run} has no checkpoint of step {step}; it has {kept}")
    return str(model)


def check_model_path(path: str) -> None:
    """Check that `path` is a checkpoint's directory or a hub name, without reading the model.

    Hub names are OWNER/NAME. A name without an owner is refused: on the hub it is a link to another
    name, and in a setting it is mostly a directory that does not exist.

    Raises:
        CheckpointError: there is no such directory, or it is not a checkpoint.
    """
    directory = Path(path)
    if directory.is_dir():
        if (directory / "checkpoints").is_dir() and (directory / "metrics.jsonl").exists():
            raise CheckpointError(
                f"{path} is the directory of a run without final/; wait until the run ends, or "
                f"give one of its checkpoints, {path}:STEP or {path}:best"
            )
        if not (directory / "config.json").is_file():
            raise CheckpointError(
                f"{path} has no config.json: it is not a Hugging Face checkpoint directory"
                + checkpoints_within(path)
            )
    elif directory.is_symlink() and not directory.exists():
        raise CheckpointError(
            f"cannot read a model config from {path!r}: the link points to {directory.readlink()}, "
            "which does not exist"
        )
    elif directory.exists():
        raise CheckpointError(f"{path} is a file; give a checkpoint's directory")
    elif path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise CheckpointError(
            f"cannot read a model config from {path!r}: the directory does not exist. Give a "
            f"checkpoint's directory, or a hub name OWNER/NAME{path_meant(path, '*/')}"
        )


def checkpoints_within(path: str) -> str:
    """Remedy that names the checkpoints in the directory, such as a run's final/; else ""."""
    inner = [str(file.parent) for file in sorted(Path(path).glob("*/config.json"))]
    return f". Give a checkpoint in it: {listed(inner)}" if inner else ""
