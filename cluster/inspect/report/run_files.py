"""Reader of a run's files: settings, metrics, events, kept rollouts, evaluations and tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.files import at_path
from cluster.config.run_record import RunRecord
from cluster.jsonl_log import read_lines, read_object
from cluster.store.group_store import GROUPS
from cluster.store.kept_groups import KeptGroups
from distill.errors import CheckpointError, ConfigError, DataError
from distill.tokenizer import load_tokenizer
from distill.types import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Contents of a run's files. Contents of a missing file are empty."""

    out: Path
    record: RunRecord
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    groups: KeptGroups
    evaluations: Sequence[Mapping[str, Any]]

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """Metrics of the optimizer steps, without the lines of evaluations between them."""
        return [row for row in self.metrics if not _is_evaluation(row)]


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    measured = row.keys() - {"step"}
    return bool(measured) and all(name.startswith(("eval/", "time/eval")) for name in measured)


def require_directory(out: Path, setting: str) -> None:
    """Raise ConfigError if `out`, which `setting` names, is not a directory."""
    if not out.is_dir():
        raise ConfigError(f"{setting}={out} is not a directory; give a run's directory")


def read_run(out: Path, setting: str = "out") -> RunFiles:
    """Read the run in `out`, finished or not. `setting` is the setting that names the directory.

    Raises:
        ConfigError: there is no such directory.
        DataError: the directory has neither events nor metrics, or a file cannot be read.
    """
    require_directory(out, setting)
    metrics = _metrics(out / "metrics.jsonl")
    events = _events(out / "events.jsonl")
    if not events and not metrics:
        raise DataError(
            f"{setting}={out} has no events or metrics: events.jsonl and metrics.jsonl are "
            "missing or empty; give the directory of a run that has started"
        )
    record = RunRecord.of_run(out) or RunRecord(recipe="unknown")
    return RunFiles(
        out=out,
        record=record,
        summary=read_object(out / "summary.json") or {},
        metrics=metrics,
        events=events,
        groups=KeptGroups(out / GROUPS),
        evaluations=_evaluations(out / "evaluations.jsonl"),
    )


# Required fields of events, by kind, and fields that are numbers in events of any kind.
_OF_EVENT = {"size": {"pool", "ready", "starting"}, "step": {"step"}}
_NUMBERS = {"t", "ready", "starting", "seconds", "alive", "push", "learner_wait", "credit_starved"}
_GROUPS = {"sampling", "environment", "scoring", "queue_depth"}
# Largest step or time that a chart can show.
_LARGEST = 1e15


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Read lines of metrics. Raises DataError, naming the line, if a value is not a number."""
    rows = read_lines(path, {"step"})
    for number, row in enumerate(rows, 1):
        _require_numbers(f"{path}:{number}", row, row.keys())
    return rows


def _events(path: Path) -> list[dict[str, Any]]:
    """Read lines of events. Raises DataError, naming the line, if a field is missing or wrong."""
    rows = read_lines(path, {"t", "event"})
    for number, row in enumerate(rows, 1):
        kind = row["event"] if isinstance(row["event"], str) else ""
        if lacks := _OF_EVENT.get(kind, set()) - row.keys():
            raise DataError(
                f"{path}:{number} is an event {kind!r} without {' and '.join(sorted(lacks))}; "
                "remove the line"
            )
        numbers = _NUMBERS | _GROUPS | ({"step"} if kind == "step" else set())
        _require_numbers(f"{path}:{number}", row, row.keys() & numbers)
    return rows


def _require_numbers(where: str, row: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        value = row[name]
        along = name in ("t", "step")
        good = isinstance(value, int | float) and (not along or abs(value) < _LARGEST)
        if not good and (along or value is not None):
            raise DataError(f"{where} has the invalid value {name}={value!r}; remove the line")


_RESPONSE = {"line", "prompt", "text", "stop_reason", "num_tokens"}


def _evaluations(path: Path) -> list[dict[str, Any]]:
    found = read_lines(path, {"step", "who", "responses"})
    for number, row in enumerate(found, 1):
        each = row["responses"]
        if not isinstance(each, list) or not all(
            isinstance(one, dict) and one.keys() >= _RESPONSE and _counts(one) for one in each
        ):
            raise DataError(f"{path}:{number} has no valid list of responses; remove the line")
    return found


def _counts(response: Mapping[str, Any]) -> bool:
    return all(isinstance(response[name], int) for name in ("line", "num_tokens"))


def run_tokenizer(run: RunFiles) -> Tokenizer:
    """Load the tokenizer of the run's token ids: from its final/, or else the student's.

    Raises:
        CheckpointError: neither can be read.
    """
    final, student = run.out / "final", at_path(run.record.settings, "model.path")
    tried = [str(final)] if final.is_dir() else []
    tried += [student] if isinstance(student, str) else []
    problems = []
    for path in tried:
        try:
            return load_tokenizer(path)
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError(
        "; ".join(problems)
        or "the run's directory has no final/ yet, and its config.json names no model"
    )


def why_no_rollouts(run: RunFiles) -> str:
    """Text that explains why the run has no rollouts."""
    if run.record.supervised:
        return f"recipe={run.record.recipe} does not sample, so it has no rollouts."
    if run.record.settings.get("keep") == "none":
        return (
            "This run kept no rollouts: keep=none. Resume the run with the same command and "
            "another value of keep to keep rollouts."
        )
    return (
        "This run kept no rollouts: its directory has no files groups/kept-*.arrow. "
        "A run with keep=sample keeps the first group of every 10th step that trains."
    )
