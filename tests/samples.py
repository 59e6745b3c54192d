"""Made-up data: segments, groups and training rows, seeded, valid unless told otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from distill.batching import TrainingRow
from distill.interfaces import Sample
from distill.types import Segment, StopReason, Trajectory, TrajectoryGroup
from tests.tiny import VOCAB_SIZE

TEMPERATURE = 0.7


def segment_fields(
    prompt: int = 3, actions: int = 4, *, seed: int = 0, version: int = 0
) -> dict[str, Any]:
    """Fields of a segment: `prompt` observed tokens, then `actions` sampled ones."""
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


def segment(prompt: int = 3, actions: int = 4, *, seed: int = 0, version: int = 0, **changes: Any):
    return Segment(**segment_fields(prompt, actions, seed=seed, version=version) | changes)


def trajectory(*segments: Segment, reward: float = 0.0, stop: StopReason = StopReason.EOS):
    return Trajectory(segments=segments, reward=reward, stop_reason=stop)


def group(group_id: int = 0, members: int = 2, *, version: int = 0, **changes: Any):
    """Members of different lengths and rewards, one segment each."""
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


def training_row(
    prompt: int = 3, trained: int = 4, *, seed: int = 0, temperature: float = TEMPERATURE
) -> TrainingRow:
    fields = segment_fields(prompt, trained, seed=seed)
    rng = np.random.default_rng(seed + 1)
    return TrainingRow(
        tokens_T=fields["tokens_T"],
        loss_mask_T=fields["action_mask_T"],
        weights_T=rng.normal(size=prompt + trained).astype(np.float32),
        behaviour_logprobs_T=fields["behaviour_logprobs_T"],
        temperature=temperature,
        source=f"row {seed}",
    )


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def sample(*tokens: int, version: int = 0, logprob: float = -1.0) -> Sample:
    """An answer of an engine, its log-probs falling by 1 a token."""
    return Sample(
        tokens_T=ids(*tokens),
        logprobs_T=np.array([logprob - t for t in range(len(tokens))], np.float32),
        versions_T=np.full(len(tokens), version, np.int32),
        stop_reason=StopReason.EOS,
    )
