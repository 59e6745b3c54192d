"""Record of a run in out/config.json, and the steps that are saved in `out`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cluster.jsonl_log import read_lines, read_object
from distill.errors import DataError

# Directories in `out` with an entry for each saved step: checkpoints, and the marks of a run that
# only keeps groups.
CHECKPOINTS, KEPT = "checkpoints", "kept"
SAVED_IN = (CHECKPOINTS, KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Contents of a config.json. Missing fields are empty.

    Attributes:
        settings: settings in the format of `cluster.config.files.as_tree`.
        data: digest of each source of rows, by its setting.
        stop_tokens: result of `StopTokens.to_json`.
        forked_from: result of `Fork.to_json`.
        versions: versions of the packages that the run used.
    """

    recipe: str = ""
    run_id: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    stop_tokens: Mapping[str, Any] | None = None
    forked_from: Mapping[str, Any] | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_run(cls, out: Path) -> RunRecord | None:
        """Record of the run in `out`; None if there is no config.json.

        Raises:
            DataError: the file cannot be read, or one of its fields has the wrong type.
        """
        path = out / "config.json"
        written = read_object(path)
        if written is None:
            return None
        known = {each.name for each in fields(cls)}
        given = {name: value for name, value in written.items() if name in known}
        for name, value in given.items():
            kind = str if name in ("recipe", "run_id") else Mapping
            optional = name in ("stop_tokens", "forked_from")
            if not isinstance(value, kind) and not (optional and value is None):
                raise DataError(
                    f"{path} does not belong to a run: its {name} is {value!r}; remove the file"
                )
        return cls(**given)

    @property
    def supervised(self) -> bool:
        """True if the run trains on given rows or pairs, and samples nothing."""
        return self.recipe in ("sft", "dpo", "reward_model")


def saved_steps(out: Path) -> set[int]:
    """Steps with a checkpoint in `out`, intact or damaged; 0 is the start of a fork."""
    names = [path.name for folder in SAVED_IN for path in (out / folder).glob("step-*")]
    return {int(match[1]) for name in names if (match := re.match(r"step-(\d+)", name))}


def has_trained(out: Path) -> bool:
    """True if a step was trained or kept in `out`, so that its settings may no longer change.

    Raises:
        DataError: the metrics of the run cannot be read.
    """
    steps = (line["step"] for line in read_lines(out / "metrics.jsonl", {"step"}))
    return any(saved_steps(out)) or any(step != 0 for step in steps)
