"""The run's directory: what is in it, whether it can be resumed, and what is written when.

out/config.json      settings and versions       out/metrics.jsonl   an object per optimizer step
out/summary.json     how the run ended           out/checkpoints/    see learner/checkpoint.py
out/calibration.json the handshake               out/final/          the trained model
out/ledger.jsonl     each prompt group's life    out/events.jsonl    deaths, restarts, pool sizes
out/rollouts.jsonl   a group every few steps     (written by the learner; cluster/rollouts.py)
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chz

from cluster.config import CommonConfig
from cluster.lines import LineFile
from distill.errors import CheckpointError, ConfigError
from learner.checkpoint import Checkpoint, CheckpointStore

# Settings that a resumed run may change: none of them alters what a step computes.
_MAY_CHANGE = {
    "steps", "checkpoint_every", "keep_checkpoints", "wandb", "device", "gpus_per_actor", "threads",
    "deadline_s", "dry_run", "eval_every", "policy_engines", "teacher_engines", "rollout_workers",
    "token_budget", "out", "start_deadline_s", "policy_server_flags", "teacher_server_flags",
    "weights", "probe_every", "gradient_checkpointing", "learner_workers",
    "compile", "liger", "offload_optimizer", "trace_step", "hang_after_s", "max_restarts",
    "placement", "placement_deadline_s", "policy_engines_max", "teacher_engines_max",
    "rollout_workers_max", "rollout_cpus", "colocate", "lease_s", "max_group_failures",
    "max_set_aside", "stall_after_s", "scale_up_after_s", "scale_down_after_s",
    "keep_rollouts_every",
}  # fmt: skip


class RunDirectory:
    """`out/` of one run."""

    def __init__(self, recipe: str, config: CommonConfig) -> None:
        self.path = Path(config.out).resolve()
        self._recipe = recipe
        self._attempt = secrets.token_hex(3)
        self._config = config
        self.store = CheckpointStore(self.path / "checkpoints", config.keep_checkpoints)
        self._metrics = LineFile(self.path / "metrics.jsonl")
        self._events = LineFile(self.path / "events.jsonl")

    def actor_name(self, role: str) -> str:
        """A name no other run on the cluster uses, this directory's earlier runs included."""
        return f"{self._recipe}-{self._attempt}/{role}"

    def log(self, name: str) -> str:
        """Where a process of this run, a server for example, keeps what it prints."""
        return str(self.path / "logs" / f"{name}.log")

    @property
    def run_id(self) -> str:
        """The run's own name, kept over every resume; written by `start`."""
        return json.loads((self.path / "config.json").read_text())["run_id"]

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    def check(self) -> Checkpoint | None:
        """The checkpoint to resume from, or None for a fresh start. Writes nothing.

        Raises:
            ConfigError: the directory holds another run, or cannot be written.
            CheckpointError: it holds a run whose checkpoints are all broken.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"out={self.path} is a file; give a directory")
        parent = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not os.access(parent, os.W_OK):
            raise ConfigError(f"out={self.path} cannot be written (no permission in {parent})")
        if not (self.path / "config.json").is_file():
            if self.path.is_dir() and any(p for p in self.path.iterdir() if p.name != ".lock"):
                raise ConfigError(
                    f"out={self.path} is not empty and holds no isotherm run; choose another out="
                )
            return None
        self._check_same_run()
        return self.store.latest()

    def _check_same_run(self) -> None:
        try:
            written = json.loads((self.path / "config.json").read_text())
            recipe, settings = written["recipe"], written["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.path / 'config.json'} is unreadable ({error}); choose another out="
            ) from error
        if recipe != self._recipe:
            raise ConfigError(
                f"out={self.path} holds a run of recipe={recipe}; choose another out="
            )
        now = _settings(self._config)
        # The end of a schedule shapes every step of it.
        fixed = {"steps"} if now["lr_schedule"] != "constant" else set()
        for name in sorted((settings.keys() | now.keys()) - (_MAY_CHANGE - fixed)):
            if settings.get(name) != now.get(name):
                raise ConfigError(
                    f"out={self.path} holds another run: {name} was {settings.get(name)!r} there "
                    f"and is {now.get(name)!r} now. Choose another out=, or give {name} as it was"
                )

    def is_finished(self) -> bool:
        """Whether the last run here got to its end."""
        summary = self.path / "summary.json"
        try:
            return json.loads(summary.read_text())["status"] == "finished"
        except (OSError, ValueError, KeyError, TypeError):
            return False  # no summary, or one cut short: the checkpoints tell the rest

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory for this process; two runs never write to one `out/`."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"out={self.path} is in use by a running job; wait for it, or choose another"
                ) from error
            yield

    def start(self, resume_from: Checkpoint | None) -> None:
        """Writes config.json; drops the metrics of steps that the checkpoint does not contain."""
        run_id = self.run_id if resume_from else secrets.token_hex(4)
        packages = ("isotherm", "ray", "torch", "transformers")
        self.write_json(
            "config.json",
            {
                "recipe": self._recipe,
                "run_id": run_id,
                "settings": _settings(self._config),
                "versions": {name: _version(name) for name in packages},
            },
        )
        (self.path / "summary.json").unlink(missing_ok=True)
        self.rewind_metrics(resume_from.step if resume_from else 0)

    def rewind_metrics(self, step: int) -> None:
        """Drops the metrics of later steps: they are done again."""
        self._metrics.flush()
        self._metrics.close()
        path = self._metrics.path
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        _replace(path, "".join(line + "\n" for line in kept))

    def append_metrics(self, metrics: Mapping[str, float]) -> None:
        self._metrics.append(json.dumps(dict(metrics)).encode())

    def append_event(self, event: str, **fields: Any) -> None:
        """A line of events.jsonl: what happened, when (unix seconds), and to whom."""
        line = {"t": time.time(), "event": event, **fields}
        self._events.append(json.dumps(line).encode())

    def read_metrics(self) -> list[dict[str, float]]:
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        _replace(self.path / name, json.dumps(dict(value), indent=1) + "\n")

    def finish(self, checkpoint: Checkpoint) -> None:
        """Copies the last checkpoint's model to `final/`, and its adapter, if it has one, to
        `adapter/`; each whole or not at all."""
        if Path(checkpoint.adapter_dir).is_dir():
            _copy(checkpoint.adapter_dir, self.path / "adapter")
        _copy(checkpoint.model_dir, self.final)


def _copy(source: str, target: Path) -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write {target}: {error}. The model is safe in {source}"
        ) from error


def _settings(config: CommonConfig) -> dict[str, Any]:
    """The settings, each object's class beside its fields: an environment is told by both."""
    settings = chz.asdict(config, include_type=True)
    settings.pop("__chz_type__")
    return json.loads(json.dumps(settings))


def _step_of(line: str) -> float:
    """The line's step; a line cut short by a crash belongs to no step that is kept."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
