"""`python -m cluster.rollouts_to_sft out=RUN data=FILE.jsonl`: kept rollouts for recipe=sft.

Rejection sampling: of the rollouts that the run kept (keep=all), the trajectories with a reward of
at least `min_reward` are written, for supervised training. Each of their segments is a row,

    {"tokens": [...], "loss_mask": [[12, 40]], "tokenizer": "6b1f...", "text": "...",
     "reward": 1.0, "step": 11, "group": 320}

with the same ids that the policy saw and sampled: nothing is encoded again, and every sampled token
is trained in the context in which it was sampled. `only=condensed` selects trajectories of several
segments, such as readings of a long document, in which every turn has a new context. `text`,
`reward`, `step` and `group` are for people; recipe=sft does not read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import chz
from rich.console import Console

from cluster.command import run_command
from cluster.config.early_checks import READ, WRITTEN
from cluster.inspect.report.run_files import RunFiles, read_run, run_tokenizer, why_no_rollouts
from cluster.jsonl_log import write_rows
from cluster.store.kept_groups import KeptGroup
from distill.chat.token_text import decode
from distill.errors import CheckpointError, DataError
from distill.rules import JSONL, setting
from distill.tokenizer import vocabulary_hash
from distill.types import Tokenizer, Trajectory


@chz.chz
class RolloutsToSftConfig:
    """Convert a run's kept rollouts to rows for recipe=sft."""

    out: str = chz.field(doc="directory of the run", metadata=READ)
    data: str = setting(
        JSONL,
        doc="JSONL file to write; an existing file is replaced",
        metadata=WRITTEN,
    )
    min_reward: float = chz.field(
        default=1.0,
        doc="minimum reward of trajectories to write",
    )
    only: Literal["all", "condensed"] = chz.field(
        default="all",
        doc="trajectories to write. all: every trajectory; condensed: those with several segments",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A trajectory that qualifies, and its group."""

    kept: KeptGroup
    member: Trajectory


def rollouts_to_sft(config: RolloutsToSftConfig, console: Console) -> None:
    """Read the run and write the file.

    Raises:
        ConfigError: there is no such run, or the file cannot be written.
        DataError: the run kept no rollouts, no trajectory qualifies, or they cannot be read.
        CheckpointError: the run's tokenizer cannot be read.
    """
    run, data = read_run(Path(config.out)), Path(config.data)
    taken = _qualifying(run, config)
    rows = list(_rows(taken, _tokenizer(run)))
    write_rows("data", data, rows)
    console.print(_summary(run, taken, rows, data), highlight=False)


def _qualifying(run: RunFiles, config: RolloutsToSftConfig) -> list[_Taken]:
    if not run.groups:
        raise DataError(f"out={run.out}: {why_no_rollouts(run)}")
    least_segments = 2 if config.only == "condensed" else 1
    long = [
        _Taken(kept=kept, member=member)
        for kept in run.groups
        for member in kept.group.trajectories_G
        if len(member.segments) >= least_segments
    ]
    if not long:
        raise DataError(
            f"out={run.out}: none of {_number_kept(run)} kept trajectories has more than one "
            "segment; leave out only=condensed"
        )
    taken = [each for each in long if each.member.reward >= config.min_reward]
    if not taken:
        best = max(each.member.reward for each in long)
        raise DataError(
            f"out={run.out}: none of {len(long)} kept trajectories has a reward of at least "
            f"min_reward={config.min_reward:g}; the highest is {best:g}; lower min_reward"
        )
    return taken


def _number_kept(run: RunFiles) -> int:
    return sum(len(kept.group.trajectories_G) for kept in run.groups)


def _tokenizer(run: RunFiles) -> Tokenizer:
    try:
        return run_tokenizer(run)
    except CheckpointError as error:
        raise CheckpointError(
            f"out={run.out}: cannot load the tokenizer of the kept token ids: {error}; restore the "
            "run's tokenizer at its original path"
        ) from error


def _rows(taken: Sequence[_Taken], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """One row per segment. Of segments with equal tokens and masks, only the first is a row."""
    vocab_hash = vocabulary_hash(tokenizer)
    written: set[tuple[bytes, bytes]] = set()
    for each in taken:
        for segment in each.member.segments:
            key = (segment.tokens_T.tobytes(), segment.action_mask_T.tobytes())
            if key in written:
                continue
            written.add(key)
            yield {
                "tokens": segment.tokens_T.tolist(),
                "loss_mask": segment.action_spans,
                "tokenizer": vocab_hash,
                "text": decode(tokenizer, segment.tokens_T),
                "reward": each.member.reward,
                "step": each.kept.step,
                "group": each.kept.group.group_id,
            }


def _summary(
    run: RunFiles, taken: Sequence[_Taken], rows: Sequence[dict[str, Any]], data: Path
) -> str:
    tokens = sum(len(row["tokens"]) for row in rows)
    trained = sum(stop - start for row in rows for start, stop in row["loss_mask"])
    duplicates = sum(len(each.member.segments) for each in taken) - len(rows)
    left_out = f" ({duplicates} duplicates left out)" if duplicates else ""
    return (
        f"wrote {len(taken)} of {_number_kept(run)} kept trajectories to {data}: {len(rows)} rows"
        f"{left_out}, {tokens:,} tokens, {trained:,} with loss"
    )


main = partial(run_command, RolloutsToSftConfig, rollouts_to_sft)
