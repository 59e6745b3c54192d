"""Directory of a run: its files, the checks before a resume, and the order of writes.

out/config.json         settings, data, versions
out/summary.json        status at the end of the run
out/calibration.json    results of the handshake
out/certificate.json    proven facts about the scores (certificate.py)
out/metrics.jsonl       one line per step or evaluation
out/events.jsonl        deaths, restarts, pool sizes
out/evaluations.jsonl   kept responses of evaluations
out/ledger.jsonl        events of every prompt group (cluster/queue/journal.py)
out/checkpoints/        see learner/checkpoint.py
out/final/              the trained model
out/groups/             groups (cluster/store): delivered, for inspection, and of whole steps
out/kept/               with rollout_only=True: marks of kept steps, in place of checkpoints
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.common import CommonConfig
from cluster.config.files import as_tree, as_yaml, at_path
from cluster.config.on_policy import RolloutConfig
from cluster.config.run_record import CHECKPOINTS, KEPT, RunRecord, has_trained
from cluster.jsonl_log import LineFile, read_lines, read_object, step_of
from cluster.queue.journal import replay
from cluster.run_files.out_directory import check_out, locked
from cluster.run_files.run_lock import LOCK
from cluster.store.group_store import GROUPS
from distill.durable_files import (
    digests,
    disk_remedy,
    sync_directory,
    sync_tree,
    whole_write,
    write_whole,
)
from distill.errors import CheckpointError, ConfigError, DataError
from distill.settings import MAY_CHANGE, fields_of, flagged, identity_of
from distill.stops import StopTokens
from learner.checkpoint import Checkpoint, CheckpointStore

if TYPE_CHECKING:
    from actors.rollout.evaluator import EvaluatedResponse

logger = logging.getLogger(__name__)


class RunDirectory:
    """`out/` of one run.

    Args:
        digests: SHA-256 of the rows that settings name, by setting; see `cluster.config.rows`.
        stops: stop tokens of the run's responses, for config.json.

    Attributes:
        on_event: called in this process with each event after it was written.
    """

    def __init__(
        self,
        config: CommonConfig,
        digests: Mapping[str, str] | None = None,
        stops: StopTokens | None = None,
    ) -> None:
        self._stops = stops
        self.path = Path(config.out).resolve()
        self.final, self.groups = self.path / "final", self.path / GROUPS
        self.ledger = self.path / "ledger.jsonl"
        self.trace = self.path / "trace.json"
        self.dumps = str(self.path / "failed")  # of batches that were not finite
        self._attempt = secrets.token_hex(3)
        self._config = config
        self._data = dict(digests or {})
        window = config.whole_steps if isinstance(config, RolloutConfig) else 0
        self.store = CheckpointStore(
            self.path / (KEPT if config.only_keeps else CHECKPOINTS),
            config.checkpoint.keep_last,
            config.checkpoint.keep_every,
            window,
        )
        self._metrics = LineFile(self.path / "metrics.jsonl")
        self._events = LineFile(self.path / "events.jsonl")
        self._evaluations = LineFile(self.path / "evaluations.jsonl")
        self.on_event: Callable[[str, Mapping[str, Any]], None] = _ignore

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"on_event": _ignore}

    def actor_name(self, role: str) -> str:
        """Actor name that is unique on the cluster, also among earlier attempts of this run."""
        return f"{self._config.recipe}-{self._attempt}/{role}"

    def log(self, name: str) -> str:
        """Log file for the output of a process of this run, such as a server."""
        return str(self.path / "logs" / f"{name}.log")

    def turn(self, index: int) -> Path:
        """File of the turn on the GPUs that engines of this index share."""
        return self.path / "logs" / f"gpus-{index}.turn"

    @property
    def run_id(self) -> str:
        """Id of the run, kept by every resume; written by `start`."""
        return self._record().run_id

    def _record(self) -> RunRecord:
        record = RunRecord.of_run(self.path)
        assert record is not None, "written by `start`"
        return record

    @property
    def yaml(self) -> str:
        """Settings of the run that differ from their defaults, for `config=FILE`."""
        return as_yaml(self._config, leave=("dry_run",))

    def reference_scores(self, rows: str) -> Path:
        """File of a reference's log-probs of these rows, which a resumed run reads."""
        return self.path / f"{rows}_logprobs.npz"

    def check(self, print_line: Callable[[str], None] = logger.warning) -> Checkpoint | None:
        """Check the directory; return the checkpoint to resume from, or None for a fresh start.

        An earlier attempt with other settings is replaced by a fresh start if it trained nothing.
        The check leaves no files behind.

        Args:
            print_line: prints a line about such an attempt, and about each damaged checkpoint that
                is skipped.

        Raises:
            ConfigError: the directory holds another run, or cannot be written.
            CheckpointError: the checkpoints of the run are all damaged.
            DataError: a line of metrics, events or ledger is damaged, by a crash or by hand.
        """
        check_out(self.path)
        if not (self.path / "config.json").is_file():
            return None
        if (other := self._of_another_run()) is not None:
            if has_trained(self.path):
                raise other
            print_line(
                f"out={self.path} holds an attempt with another {other.field}= that trained no "
                "step; this run replaces it"
            )
            self._check_lines()
            return None
        self._check_lines()
        return self.store.latest(print_line)

    def _check_lines(self) -> None:
        """Check the files that the run reads or appends to; a truncated last line is accepted."""
        for line in read_lines(self._metrics.path, {"step"}):
            if not isinstance(line["step"], int):
                raise DataError(
                    f"{self._metrics.path}: {line} has no valid step number; remove the line"
                )
        read_lines(self._events.path, {"t", "event"})
        of = replay(self.ledger).run_id
        if of not in ("", self.run_id) and self.store.complete():
            raise ConfigError(
                f"{self.ledger} belongs to run {of}, but {self.path} holds run {self.run_id}; "
                "restore its own ledger, or move this one away: the audit then covers only what "
                "follows",
                field="out",
            )

    def _of_another_run(self) -> ConfigError | None:
        """Error that names a setting in which the earlier attempt differs; None if none does."""
        try:
            self._check_same_run(self._recorded())
        except ConfigError as other:
            return other
        return None

    def _recorded(self) -> RunRecord:
        """Record of the earlier attempt. Raises CheckpointError if config.json is not a run's."""
        try:
            was = self._record()
        except DataError as error:
            why = error.__cause__ or "it was not written by a run"
            raise CheckpointError(
                f"{self.path / 'config.json'} is unreadable ({why}); choose another out="
            ) from error
        if not (was.recipe and was.run_id and was.settings):
            raise CheckpointError(
                f"{self.path / 'config.json'} was not written by a run; choose another out="
            )
        return was

    def _check_same_run(self, was: RunRecord) -> None:
        """Raise ConfigError, with the setting that differs, if the recorded run is another one."""
        if was.recipe != self._config.recipe:
            raise ConfigError(
                f"out={self.path} holds a run of recipe={was.recipe}; choose another out=",
                field="recipe",
            )
        now = as_tree(self._config)
        # The number of steps changes every learning rate of a schedule that is not constant.
        fixed = {"steps"} if at_path(now, "learner.lr_schedule") != "constant" else set()
        kind = type(self._config)
        may_change = flagged(kind, MAY_CHANGE) - fixed
        moved = {name for name in was.data if was.data[name] == self._data.get(name)}
        paths = fields_of(kind)
        if unknown := was.settings.keys() - {path.partition(".")[0] for path in paths}:
            raise ConfigError(
                f"out={self.path} holds a run of another version of isotherm, which has the "
                f"setting {min(unknown)}; choose another out="
            )
        for name in (each for each in paths if each not in may_change | moved):
            before, after = at_path(was.settings, name), at_path(now, name)
            if identity_of(kind, name, before) != identity_of(kind, name, after):
                raise ConfigError(
                    f"out={self.path} holds another run: {name} was {before!r} there and is "
                    f"{after!r} now. Choose another out=, or restore {name}",
                    field=name,
                )

        stops = self._stops and self._stops.to_json()
        if None not in (stops, was.stop_tokens) and stops != was.stop_tokens:
            raise ConfigError(
                f"out={self.path} holds another run: its stop tokens were {was.stop_tokens} and "
                f"are {stops} now, because a model's generation_config.json or tokenizer has "
                "changed. Restore it, or choose another out=",
                field="model.stop_tokens",
            )
        for name in sorted(was.data.keys() - moved):
            raise ConfigError(
                f"{name}={at_path(now, name)} has changed since the run in out={self.path} began: "
                f"its sha256 is {self._data.get(name)} and was {was.data[name]}, but group ids "
                "refer to rows by their position. Restore the rows, or choose another out="
            )

    def is_finished(self) -> bool:
        """True if the last run in this directory finished."""
        try:
            return self.read_summary().get("status") == "finished"
        except DataError:
            return False  # the file was cut short; the checkpoints determine the state

    def read_summary(self) -> Mapping[str, Any]:
        """Contents of summary.json; empty without a file. Raises DataError if it is unreadable."""
        return read_object(self.path / "summary.json") or {}

    @contextmanager
    def locked(
        self, print_line: Callable[[str], None] = logger.warning, wait_s: float = 0.0
    ) -> Iterator[None]:
        """Context manager that locks the directory, so that two runs never write to one `out/`.

        A directory that was created for the lock is removed with the lock, unless the run wrote
        other files.

        Args:
            print_line: prints a line if another job holds the lock.
            wait_s: seconds to wait for that job's end.

        Raises:
            ConfigError: the other job still holds the lock, or `out/` cannot be written.
        """
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        with locked(self.path, print_line, wait_s) as lock:
            try:
                yield
            finally:
                for file in (self._metrics, self._events, self._evaluations):
                    file.close()  # also writes the lines that waited for disk space
                if made and [path.name for path in self.path.iterdir()] == [LOCK]:
                    lock.remove()
                    with suppress(OSError):  # other processes may have written in a parent
                        for path in made:
                            path.rmdir()

    @property
    def forked_from(self) -> Mapping[str, Any] | None:
        """Checkpoint of another run from which this run began; written by `start`."""
        return self._record().forked_from

    def start(
        self, resume_from: Checkpoint | None, forked_from: Mapping[str, Any] | None = None
    ) -> None:
        """Write config.json, and delete metrics of steps that the checkpoint does not contain.

        Args:
            forked_from: checkpoint of another run from which this run begins.
        """
        if (self.path / "config.json").is_file() and self._of_another_run() is not None:
            for scores in self.path.glob(self.reference_scores("*").name):
                scores.unlink()  # possibly scored by another model
        self.store.release()  # checkpoints that a killed attempt was evaluating
        # A fresh start does not use the first checkpoint of a fork that trained nothing. The
        # checkpoint is removed before its settings: otherwise a crash here would leave a checkpoint
        # that belongs to other settings.
        self.store.set_aside_after(resume_from.step if resume_from else -1)
        run_id = self.run_id if resume_from else secrets.token_hex(4)
        if resume_from:
            forked_from = self.forked_from
        packages = ("isotherm", "ray", "torch", "transformers")
        self.write_json(
            "config.json",
            {
                "recipe": self._config.recipe,
                "run_id": run_id,
                "settings": as_tree(self._config),
                "data": self._data,
                "stop_tokens": None if self._stops is None else self._stops.to_json(),
                **({} if forked_from is None else {"forked_from": forked_from}),
                "versions": {name: _version(name) for name in packages},
            },
        )
        for name in ("summary.json", "certificate.json"):  # written at the end of an attempt
            (self.path / name).unlink(missing_ok=True)
        # -1 also for a resume from step 0: evaluations before the first step are repeated.
        self._keep_metrics(resume_from.step or -1 if resume_from else -1)

    def rewind_metrics(self, step: int) -> None:
        """Delete the metrics of later steps, and set aside their checkpoints, which are damaged."""
        self.store.set_aside_after(step)
        self._keep_metrics(step)

    def _keep_metrics(self, step: int) -> None:
        """Delete lines of metrics of later steps, and responses of evaluations without metrics.

        A process that was killed after it had written the responses wrote no metrics. The
        evaluation is repeated.
        """
        kept = _keep(self._metrics, lambda line: step_of(line) <= step)
        measured = {step_of(line) for line in kept if b'"eval/' in line}
        if self._evaluations.path.exists():
            _keep(self._evaluations, lambda line: step_of(line) in measured)

    def append_metrics(self, metrics: Mapping[str, float]) -> None:
        self._metrics.append(json.dumps(dict(metrics)).encode())

    def append_event(self, event: str, **fields: Any) -> None:
        """Append an event with its Unix time to events.jsonl."""
        line = {"t": time.time(), "event": event, **fields}
        self._events.append(json.dumps(line).encode())
        self.on_event(event, fields)

    def read_events(self, event: str) -> list[dict[str, Any]]:
        """Read the events of one kind, of all attempts of the run."""
        self._events.flush()
        return [
            line for line in read_lines(self._events.path, {"t", "event"}) if line["event"] == event
        ]

    def append_evaluation(
        self, step: int, who: str, responses: Sequence[EvaluatedResponse]
    ) -> None:
        """Append the responses of an evaluation of `who` after `step` to evaluations.jsonl."""
        line = {"step": step, "who": who, "responses": [asdict(each) for each in responses]}
        self._evaluations.append(json.dumps(line).encode())

    def read_metrics(self) -> list[dict[str, float]]:
        """Read metrics.jsonl: steps, and evaluations between them."""
        self._metrics.flush()
        return read_lines(self._metrics.path, {"step"})

    def read_steps(self) -> list[dict[str, float]]:
        """Read the lines of metrics.jsonl of optimizer steps."""
        return [line for line in self.read_metrics() if "time/step" in line]

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file atomically. Raises CheckpointError if it cannot be written."""
        _replace(self.path / name, json.dumps(dict(value), indent=1).encode() + b"\n")

    def finish(self, checkpoint: Checkpoint) -> None:
        """Copy the last checkpoint's model to `final/`, and its adapter, if any, to `adapter/`.

        Each copy is atomic.
        """
        if Path(checkpoint.adapter_dir).is_dir():
            _copy(checkpoint.adapter_dir, self.path / "adapter")
        _copy(checkpoint.model_dir, self.final)


def _ignore(_event: str, _fields: Mapping[str, Any]) -> None:
    pass


def _copy(source: str, target: Path) -> None:
    try:
        with whole_write(target) as partial:
            shutil.copytree(source, partial)
            copied = sync_tree(partial)
            for name, read in digests(Path(source), copied).items():
                if copied[name] != read:
                    raise OSError(f"{name} was read as sha256 {read} and written as {copied[name]}")
        sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {error}. The model is safe in {source}. {disk_remedy(error)}"
        ) from error


def _keep(file: LineFile, wanted: Callable[[bytes], bool]) -> list[bytes]:
    """Delete the other lines of a file; returns those that it keeps.

    A file of which all lines are kept is not written again: the disk may be full.
    """
    file.close()
    there = file.path.exists()
    before = file.path.read_bytes() if there else b""
    kept = [line for line in before.splitlines() if wanted(line)]
    after = b"".join(line + b"\n" for line in kept)
    if after != before or not there:
        _replace(file.path, after)
    return kept


def _replace(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}. {disk_remedy(error)}") from error


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
