"""Seeded segments, groups and training rows; valid by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.columns import GroupColumns, checked
from distill.data.assistant_masks import MaskedTokens
from distill.data.sft_rows import supervised_row
from distill.engine import EngineInfo, Sample
from distill.objective.batching import TrainingRow
from distill.objective.metrics import token_table
from distill.objective.rows import rows_by_group
from distill.objective.sums import meta_of
from distill.records import TrajectoryGroupMeta
from distill.types import Segment, StopReason, TokenArray, TopLogprobs, Trajectory, TrajectoryGroup
from tests.tiny import VOCAB_SIZE

if TYPE_CHECKING:
    from learner.loop import SampleRecorder

TEMPERATURE = 0.7


def segment_fields(
    prompt: int = 3, actions: int = 4, *, seed: int = 0, version: int = 0
) -> dict[str, Any]:
    """Fields of a segment of `prompt` observed tokens and `actions` sampled tokens."""
    rng = np.random.default_rng(seed)
    length = prompt + actions
    mask_T = np.arange(length) >= prompt
    return {
        "tokens_T": rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
        "action_mask_T": mask_T,
        "behaviour_logprobs_T": np.where(mask_T, -rng.exponential(2, length), 0).astype(np.float32),
        "versions_T": np.where(mask_T, version, -1).astype(np.int32),
        "temperature": TEMPERATURE,
        "teacher_logprobs_T": np.where(mask_T, -rng.exponential(2, length), 0).astype(np.float32),
        "teacher_logprobs_q1_T": np.where(mask_T, -rng.exponential(3, length), 0).astype(
            np.float32
        ),
    }


def segment_of(**fields: Any) -> Segment:
    """Segment of lists or arrays of any type, with its `first_action`."""
    for name, value in fields.items():
        if name.endswith("_T") and value is not None:
            dtype = np.bool_ if name == "action_mask_T" else np.float32
            ints = ("tokens_T", "versions_T", "teacher_context_T")
            fields[name] = np.array(value, np.int32 if name in ints else dtype)
    actions_N = np.flatnonzero(fields["action_mask_T"])
    return Segment(**{"first_action": int(actions_N[0]) if len(actions_N) else 0, **fields})


def segment(prompt: int = 3, actions: int = 4, *, seed: int = 0, version: int = 0, **changes: Any):
    if changes.get("teacher_context_T") is not None:
        changes = {"teacher_replaces": prompt} | changes
    return segment_of(**segment_fields(prompt, actions, seed=seed, version=version) | changes)


def trajectory(
    *segments: Segment, reward: float = 0.0, stop: StopReason = StopReason.EOS, **changes: Any
):
    return Trajectory(segments=segments, reward=reward, stop_reason=stop, **changes)


def packed(made: TrajectoryGroup) -> tuple[TrajectoryGroupMeta, GroupColumns]:
    """Group as a rollout worker delivers it."""
    columns = checked(made)
    return meta_of(made, columns), columns


def group(group_id: int = 0, members: int = 2, *, version: int = 0, **changes: Any):
    """Group whose members differ in length and reward, with one segment each."""
    return TrajectoryGroup(
        group_id=group_id,
        trajectories_G=tuple(
            trajectory(
                segment(2 + g, 3 + g, seed=100 * group_id + g, version=version, **changes),
                reward=float(g % 2),
            )
            for g in range(members)
        ),
    )


def keep_step(
    log: SampleRecorder, step: int, groups: list[TrajectoryGroup], rows: list[TrainingRow]
) -> None:
    """Record the groups of a step in a log, as the loop does."""
    chosen = log.chosen(step, [made.group_id for made in groups])
    found = [pair for pair in rows_by_group(groups, rows) if pair[0].group_id in chosen]
    if found:
        tables = [token_table(list(made.segments())) for made in groups]
        log.keep(step, [made for made, _ in found], [r for _, own in found for r in own], tables)


def training_row(
    prompt: int = 3,
    trained: int = 4,
    *,
    seed: int = 0,
    temperature: float = TEMPERATURE,
    **changes: Any,
) -> TrainingRow:
    fields = segment_fields(prompt, trained, seed=seed)
    rng = np.random.default_rng(seed + 1)
    row = TrainingRow(
        tokens_T=fields["tokens_T"], loss_mask_T=fields["action_mask_T"],
        advantages_T=rng.normal(size=prompt + trained).astype(np.float32),
        behaviour_logprobs_T=fields["behaviour_logprobs_T"], temperature=temperature,
        source=f"row {seed}",
    )  # fmt: skip
    return replace(row, **changes)


def after_context(
    context_T: TokenArray, lengths: Sequence[int], temperature: float = TEMPERATURE
) -> list[TrainingRow]:
    """Rows of one context, one for each number of trained tokens, which is also its seed."""
    start = len(context_T)
    rows = [training_row(start, n, seed=n, temperature=temperature) for n in lengths]
    return [
        replace(row, tokens_T=np.concatenate([context_T, row.tokens_T[start:]])) for row in rows
    ]


def answer_pair(context: int, lengths: tuple[int, int], seed: int) -> list[TrainingRow]:
    """Preference pair: supervised rows of two answers to one context."""
    chosen, rejected = (demonstration(context, n, seed=seed + n) for n in lengths)
    tokens_T = np.concatenate([chosen.tokens_T[:context], rejected.tokens_T[context:]])
    return [chosen, replace(rejected, tokens_T=tokens_T)]


def demonstration(prompt: int = 3, trained: int = 4, *, seed: int = 0) -> TrainingRow:
    """Supervised row."""
    fields = segment_fields(prompt, trained, seed=seed)
    chain = MaskedTokens(tokens_T=fields["tokens_T"], loss_mask_T=fields["action_mask_T"])
    return supervised_row(chain, f"demonstration {seed}")


def top_logprobs(positions: int, k: int, *, seed: int = 0) -> TopLogprobs:
    """Top k of a random distribution at each position."""
    logits_NV = np.random.default_rng(seed).normal(0, 3, (positions, VOCAB_SIZE))
    log_q_NV = logits_NV - np.log(np.exp(logits_NV).sum(axis=1, keepdims=True))
    ids_NK = np.argsort(-log_q_NV, axis=1)[:, :k]
    return TopLogprobs(
        ids_NK=ids_NK.astype(np.int32),
        logprobs_NK=np.take_along_axis(log_q_NV, ids_NK, axis=1).astype(np.float32),
    )


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def sample(*tokens: int, version: int = 0, logprob: float = -1.0) -> Sample:
    """Engine sample whose log-probs fall by 1 per token."""
    return Sample(
        tokens_T=ids(*tokens),
        logprobs_T=np.array([logprob - t for t in range(len(tokens))], np.float32),
        versions_T=np.full(len(tokens), version, np.int32),
        stop_reason=StopReason.EOS,
    )


def engine_info(**changes: Any) -> EngineInfo:
    facts: dict[str, Any] = {
        "kind": "embedded", "model": "m", "vocab_size": VOCAB_SIZE, "context_length": 64,
        "weight_version": 0, "dtype": "float32", "eos_token_ids": (1,), "tokenizer": None,
        "temperature_scaling": "in the engine",
    }  # fmt: skip
    return EngineInfo(**facts | changes)
