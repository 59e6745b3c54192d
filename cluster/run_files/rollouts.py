"""Rollouts that a run keeps for inspection: out/rollouts.jsonl, one JSON object per group.

    {"step": 11, "group_id": 320, "version": 10, "teacher": "", "tag": null, "source": "",
     "answer": "12", "temperature": 0.7, "metrics": {...},
     "trajectories": [
       {"reward": 1, "stop_reason": "eos", "metrics": {...},
        "segments": [
          {"tokens": [...], "actions": [[12, 40]],
           "behaviour_logprobs": [...], "teacher_logprobs": [...], "versions": [...],
           "advantages": [...], "bonuses": null, "teacher_top": null}]}],
     "step_tokens": [[17, 40, 0.31, 0.12], ...]}

    source            source of the prompt, if there are several
    answer            reference answer of the prompt
    actions           spans [start, stop) of tokens that the policy sampled, one per turn; the lists
                      after it have one entry for each of these tokens
    teacher_top       with estimator=top_k: the teacher's likeliest tokens at each of these
                      positions, [id, log q], the likeliest first
    teacher_version   weight version that scored, if the teacher is the policy itself
    step_tokens       in the first kept group of a step: the tokens with the largest shares of the
                      whole step's KL (`TokenGap`)

Only the learner's leader writes the file, with data from the workers that trained on the groups.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from cluster.jsonl_log import LineFile, step_of
from distill.errors import CheckpointError, DataError
from distill.group_share import EVERY_GROUP, GroupShare
from distill.objective.metrics import TokenGap, TokenTable, tokens_by_gap
from distill.types import (
    BoolArray,
    GroupFacts,
    Segment,
    TopLogprobs,
    Trajectory,
    TrajectoryGroup,
    shared_fields,
)

if TYPE_CHECKING:
    from distill.objective.batching import TrainingRow


# Bytes at the end of a file that are read for the newest groups.
_NEWEST_BYTES = 16 << 20
# Number of the teacher's likeliest tokens that are kept per position.
ALTERNATIVES = 5
# Number of tokens that are kept per step, by their shares of the step's KL.
STEP_TOKENS = 20


class RolloutLog:
    """Writer of the kept groups.

    Kept are groups of the first step, of every `every`th step after it, and of the last step: the
    first group that a teacher scored, or the first group if there is none. Of a step whose groups
    were all filtered out, none is kept.

    Args:
        every: interval of steps; 0: no groups are kept.
        whole: keep all groups of these steps.
        last: last step of the run.
        trains: True if each step creates a weight version.
        scored: groups that a teacher scored.
    """

    def __init__(
        self,
        path: str | Path,
        every: int,
        *,
        whole: bool = False,
        last: int | None = None,
        trains: bool = True,
        scored: GroupShare = EVERY_GROUP,
    ) -> None:
        self._lines = LineFile(path)
        self._every, self._whole, self._last = every, whole, last
        self._trains, self._scored = trains, scored

    def chosen(self, step: int, group_ids: Sequence[int]) -> Sequence[int]:
        """Choose the groups to keep among those that `step` trained on, by id."""
        if self._every == 0 or ((step - 1) % self._every and step != self._last):
            return []
        if self._whole:
            return group_ids
        return sorted(group_ids, key=lambda group_id: group_id not in self._scored)[:1]

    def keep(
        self,
        step: int,
        groups_P: Sequence[TrajectoryGroup],
        rows_D: Sequence[TrainingRow],
        tables: Sequence[TokenTable | None],
    ) -> None:
        """Write the chosen groups, with their rows and the tokens of the whole step.

        On a full disk the lines are kept in memory until there is space: see LineFile.
        """
        from distill.objective.rows import rows_by_group  # torch, which readers do not need

        tokens: list[TokenGap] = tokens_by_gap(tables, STEP_TOKENS)
        for group, rows in rows_by_group(groups_P, rows_D):
            version = step - 1 if self._trains else 0  # weights at the beginning of the step
            made = _group(step, version, group, rows)
            made |= {"step_tokens": tokens} if tokens else {}
            tokens, line = [], json.dumps(made, separators=(",", ":"))
            self._lines.append(line.encode(), later=True)
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait for space on the disk."""
        self._lines.flush()

    def rewind(self, step: int) -> None:
        """Delete the groups of steps after `step`, which are repeated. Needs no disk space.

        Raises:
            CheckpointError: the file cannot be read or written.
        """
        self._lines.close()
        path, kept = self._lines.path, 0
        try:
            if not path.exists():
                return
            with path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n") or step_of(line) > step:
                        break
                    kept += len(line)
            os.truncate(path, kept)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be truncated to step {step}: {error}; remove the file, or give "
                "this user write permission"
            ) from error


def _group(
    step: int, version: int, group: TrajectoryGroup, rows: Sequence[TrainingRow]
) -> dict[str, Any]:
    remaining = iter(rows)
    return {
        "step": step,
        "version": version,
        **shared_fields(GroupFacts, group),
        "temperature": group.temperature,
        "metrics": _metrics(group.metrics),
        "trajectories": [
            _trajectory(member, [next(remaining) for _ in member.segments])
            for member in group.trajectories_G
        ],
    }


def _trajectory(member: Trajectory, rows: Sequence[TrainingRow]) -> dict[str, Any]:
    return {
        "reward": _significant(member.reward),
        "stop_reason": member.stop_reason.value,
        "metrics": _metrics(member.metrics),
        "segments": [
            _segment(segment, row) for segment, row in zip(member.segments, rows, strict=True)
        ],
    }


def _segment(segment: Segment, row: TrainingRow) -> dict[str, Any]:
    mask_T = segment.action_mask_T
    teacher_T, bonuses_T = segment.teacher_logprobs_T, segment.bonuses_T
    return {
        "tokens": segment.tokens_T.tolist(),
        "actions": _runs(mask_T),
        "behaviour_logprobs": _nats(segment.behaviour_logprobs_T[mask_T]),
        "teacher_logprobs": None if teacher_T is None else _nats(teacher_T[mask_T]),
        "versions": segment.versions_T[mask_T].tolist(),
        "advantages": [_significant(value) for value in row.advantages_T[mask_T]],
        "bonuses": None
        if bonuses_T is None
        else [_significant(value) for value in bonuses_T[mask_T]],
        "teacher_top": None if segment.teacher_top is None else _first(segment.teacher_top),
        **({} if segment.teacher_version is None else {"teacher_version": segment.teacher_version}),
    }


def _first(top: TopLogprobs) -> list[list[tuple[int, float]]]:
    """Likeliest tokens of each position, as (id, log q)."""
    likeliest_NK = np.argsort(-top.logprobs_NK, axis=1, kind="stable")[:, :ALTERNATIVES]
    ids_NK = np.take_along_axis(top.ids_NK, likeliest_NK, 1).tolist()
    logprobs_NK = np.take_along_axis(top.logprobs_NK, likeliest_NK, 1)
    return [
        list(zip(ids_K, _nats(logprobs_K), strict=True))
        for ids_K, logprobs_K in zip(ids_NK, logprobs_NK, strict=True)
    ]


def _runs(mask_T: BoolArray) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(mask_T.astype(np.int8), prepend=0, append=0))
    return edges.reshape(-1, 2).tolist()


def _nats(logprobs_N: np.ndarray) -> list[float]:
    """Round to four decimals. A KL is a difference, so the absolute error must be bounded."""
    return np.round(logprobs_N.astype(np.float64), 4).tolist()


def _significant(value: float) -> float:
    """Round to four significant digits, because an advantage may be small."""
    return float(f"{value:.4g}")


def _metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: _significant(value) for name, value in metrics.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSegment:
    """A kept segment with N sampled tokens.

    Attributes:
        actions: span [start, stop) of the sampled tokens of each turn.
        teacher_top_NK: (id, log q) of the teacher's likeliest tokens; None if not requested.
    """

    tokens_T: Sequence[int]
    actions: Sequence[tuple[int, int]]
    behaviour_logprobs_N: Sequence[float]
    teacher_logprobs_N: Sequence[float] | None
    versions_N: Sequence[int]
    advantages_N: Sequence[float]
    bonuses_N: Sequence[float] | None
    teacher_top_NK: Sequence[Sequence[tuple[int, float]]] | None = None

    def __post_init__(self) -> None:
        if min(self.tokens_T, default=0) < 0:
            raise ValueError(f"a negative token id, {min(self.tokens_T)}")
        edges = [0, *(edge for run in self.actions for edge in run), len(self.tokens_T)]
        if edges != sorted(edges):
            raise ValueError(f"actions {self.actions} are not runs of {len(self.tokens_T)} tokens")
        actions = sum(stop - start for start, stop in self.actions)
        for name in ("behaviour_logprobs", "teacher_logprobs", "versions", "advantages", "bonuses"):
            values = getattr(self, f"{name}_N")
            if values is not None and len(values) != actions:
                raise ValueError(f"{name} has {len(values)} entries for {actions} actions")
        top = self.teacher_top_NK
        if top is not None and len(top) != actions:
            raise ValueError(f"teacher_top has {len(top)} entries for {actions} actions")

    @property
    def sampled_N(self) -> list[int]:
        """Ids of the sampled tokens."""
        return [self.tokens_T[t] for start, stop in self.actions for t in range(start, stop)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTrajectory:
    """One member of a kept group."""

    reward: float
    stop_reason: str
    metrics: Mapping[str, float]
    segments: Sequence[KeptSegment]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup(GroupFacts):
    """A kept group that `step` trained on, starting from the weights of `version`."""

    step: int
    version: int
    temperature: float
    trajectories_G: Sequence[KeptTrajectory]
    step_tokens: Sequence[TokenGap] = ()


class KeptGroups(Sequence[KeptGroup]):
    """Sequence of the groups in a rollouts.jsonl, each read from the file on access.

    Empty if there is no file. The constructor reads and checks all lines once.

    Attributes:
        places: step and id of each group.

    Raises:
        DataError: a line is not a group; the message names the line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[tuple[int, int]] = []  # offset and size of each line, in bytes
        self.places: list[tuple[int, int]] = []
        start = 0
        with path.open("rb") if path.is_file() else io.BytesIO() as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # still being written
                    break
                group = _checked_group(f"{path}:{number}", line)
                self.places.append((group.step, group.group_id))
                self._lines.append((start, len(line)))
                start += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> KeptGroup: ...
    @overload
    def __getitem__(self, index: slice) -> list[KeptGroup]: ...
    def __getitem__(self, index: int | slice) -> KeptGroup | list[KeptGroup]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, size = self._lines[index]
        with self._path.open("rb") as file:
            file.seek(start)
            return _checked_group(str(self._path), file.read(size))


def read_rollouts_from(path: Path, start: int) -> tuple[list[KeptGroup], int]:
    """Read the groups of lines that begin at byte `start` or later, and return the end offset.

    An incomplete last line, which is still being written, begins at the end offset.

    Raises:
        DataError: a line is not a group.
    """
    if not path.exists():
        return [], 0
    groups = []
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()  # the end of the previous line, or the rest of a line
        end = file.tell()
        for line in file:
            if not line.endswith(b"\n"):
                break
            groups.append(_checked_group(str(path), line))
            end += len(line)
    return groups, end


def read_newest_rollouts(path: Path) -> list[KeptGroup]:
    """Read the groups in the last 16 MiB of a file; empty if the file does not exist.

    Raises:
        DataError: a line is not a group.
    """
    size = path.stat().st_size if path.exists() else 0
    return read_rollouts_from(path, max(0, size - _NEWEST_BYTES))[0]


def _checked_group(where: str, line: bytes) -> KeptGroup:
    try:
        return _kept_group(json.loads(line))
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise DataError(
            f"{where} is not a kept group ({type(error).__name__}: {error}); remove the line"
        ) from error


def _kept_group(row: Mapping[str, Any]) -> KeptGroup:
    return KeptGroup(
        step=int(row["step"]),
        group_id=int(row["group_id"]),
        version=int(row["version"]),
        teacher=str(row["teacher"]),
        by_teacher=bool(row["by_teacher"]),
        as_text=bool(row["as_text"]),
        tag=None if row["tag"] is None else str(row["tag"]),
        source=str(row["source"]),
        answer=None if row["answer"] is None else str(row["answer"]),
        temperature=_finite(row["temperature"]),
        metrics=_numbers(row["metrics"]),
        trajectories_G=[
            KeptTrajectory(
                reward=_finite(member["reward"]),
                stop_reason=str(member["stop_reason"]),
                metrics=_numbers(member["metrics"]),
                segments=[_kept_segment(each) for each in _some(member["segments"], "segments")],
            )
            for member in _some(row["trajectories"], "trajectories")
        ],
        step_tokens=[
            TokenGap(int(id_), int(times), _finite(mean), _finite(share))
            for id_, times, mean, share in row.get("step_tokens", ())
        ],
    )


def _kept_segment(row: Mapping[str, Any]) -> KeptSegment:
    teacher, bonuses, top = row["teacher_logprobs"], row["bonuses"], row["teacher_top"]
    return KeptSegment(
        tokens_T=list(map(int, row["tokens"])),
        actions=[(int(start), int(stop)) for start, stop in row["actions"]],
        behaviour_logprobs_N=list(map(_finite, row["behaviour_logprobs"])),
        teacher_logprobs_N=None if teacher is None else list(map(_finite, teacher)),
        versions_N=list(map(int, row["versions"])),
        advantages_N=list(map(_finite, row["advantages"])),
        bonuses_N=None if bonuses is None else list(map(_finite, bonuses)),
        teacher_top_NK=None
        if top is None
        else [[(int(id_), float(logprob)) for id_, logprob in top_K] for top_K in top],
    )


def _some(values: Any, what: str) -> Sequence[Any]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"it has no {what}")
    return values


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _finite(value) for name, value in metrics.items()}
