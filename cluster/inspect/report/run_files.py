"""Reader of a run's files: its settings, its metrics, its kept rollouts and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.jsonl_log import read_lines
from cluster.run_files.rollouts import KeptGroup, read_rollouts
from distill.errors import CheckpointError, ConfigError, DataError
from distill.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The files of a run, read. What it has not written is empty."""

    out: Path
    recipe: str
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    groups: Sequence[KeptGroup]
    evaluations: Sequence[Mapping[str, Any]]

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """Metrics of the optimizer steps, without the lines of evaluations between them."""
        return [row for row in self.metrics if not _is_evaluation(row)]


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    measured = row.keys() - {"step"}
    return bool(measured) and all(name.startswith(("eval/", "time/eval")) for name in measured)


def read_run(out: Path, setting: str = "out") -> Run:
    """The run in `out`, finished or not; `setting` is what names the directory.

    Raises:
        ConfigError: there is no such directory.
        DataError: it has neither events nor metrics, or something in it cannot be read.
    """
    if not out.is_dir():
        raise ConfigError(f"{setting}={out} is not a directory; give a run's directory")
    metrics = read_lines(out / "metrics.jsonl", {"step"})
    events = read_lines(out / "events.jsonl", {"t", "event"})
    if not events and not metrics:
        raise DataError(
            f"{setting}={out} holds neither events.jsonl nor metrics.jsonl with anything in it; "
            "give the directory of a run that has started"
        )
    written, summary = _object(out / "config.json"), _object(out / "summary.json")
    settings, versions = written.get("settings"), written.get("versions")
    return Run(
        out=out,
        recipe=str(written.get("recipe", "unknown")),
        settings=settings if isinstance(settings, dict) else {},
        versions=versions if isinstance(versions, dict) else {},
        summary=summary,
        metrics=metrics,
        events=events,
        groups=read_rollouts(out / "rollouts.jsonl"),
        evaluations=_evaluations(out / "evaluations.jsonl"),
    )


_RESPONSE = {"line", "prompt", "text", "stop_reason", "num_tokens"}


def _evaluations(path: Path) -> list[dict[str, Any]]:
    found = read_lines(path, {"step", "who", "responses"})
    for number, row in enumerate(found, 1):
        each = row["responses"]
        if not isinstance(each, list) or not all(
            isinstance(one, dict) and one.keys() >= _RESPONSE for one in each
        ):
            raise DataError(f"{path}:{number} holds no responses; remove the line")
    return found


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove the file") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is no JSON object; remove the file")
    return found


def run_tokenizer(run: Run) -> PreTrainedTokenizerBase:
    """The tokenizer that the run's token ids are of: beside its final weights, or the student's.

    Raises:
        CheckpointError: there is none, or none that can be read.
    """
    final, student = run.out / "final", run.settings.get("student")
    tried = [str(final)] if final.is_dir() else []
    tried += [student] if isinstance(student, str) else []
    complaints = []
    for path in tried:
        try:
            return load_tokenizer(path)
        except CheckpointError as error:
            complaints.append(str(error))
    raise CheckpointError(
        "; ".join(complaints)
        or "the run's directory has no final/ yet and its config.json names no student"
    )


def why_no_rollouts(run: Run) -> str:
    """Explanation for a reader why there are no rollouts."""
    if run.recipe in ("sft", "dpo"):
        return f"recipe={run.recipe} samples nothing, so there are no rollouts to show."
    settings = run.settings
    if settings.get("keep_rollouts_every") == 0 or settings.get("keep_rollouts") == "none":
        name = "keep_rollouts" if settings.get("keep_rollouts") == "none" else "keep_rollouts_every"
        return (
            f"This run kept no rollouts: {name}={settings[name]}. The same command resumes a run "
            "with another value."
        )
    return (
        "This run kept no rollouts: there is no rollouts.jsonl in its directory, or nothing in it. "
        "A run with keep_rollouts_every=N keeps the first group of every Nth step that trains."
    )
