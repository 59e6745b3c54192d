"""Tokens on which student and teacher differ: single occurrences, and sums by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import Any

import numpy as np

from cluster.store.kept_groups import KeptGroup, KeptGroups
from distill.chat.token_text import decode
from distill.types import Segment, Tokenizer

# Number of single tokens that are shown.
_MOST = 20


def furthest_apart(
    groups: Sequence[KeptGroup], tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """The sampled tokens with the largest |log p - log q| of student and teacher.

    `place` is the index among the tokens that a trajectory sampled.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    for kept in groups:
        for m, member in enumerate(kept.group.trajectories_G):
            where = {"step": kept.step, "group": kept.group.group_id, "member": m}
            place = 0
            for segment in member.segments:
                found += _gaps(segment, where, place)
                place += segment.num_actions
    worst = [each for _, each in nlargest(_MOST, found, key=lambda pair: pair[0])]
    for each in worst:
        each["text"] = _text(each["id"], tokenizer)
    return worst


def _gaps(
    segment: Segment, where: Mapping[str, Any], place: int
) -> list[tuple[float, dict[str, Any]]]:
    """The segment's tokens with the largest gaps; its first sampled token is at `place`."""
    if segment.teacher_logprobs_T is None:
        return []
    at_N = np.flatnonzero(segment.action_mask_T)
    student_N, teacher_N = (
        each[at_N] for each in (segment.behaviour_logprobs_T, segment.teacher_logprobs_T)
    )
    gaps_N = np.abs(student_N - teacher_N)
    return [
        (
            float(gaps_N[n]),
            {
                **where,
                "id": int(segment.tokens_T[at_N[n]]),
                "student": nats(student_N[n]),
                "teacher": nats(teacher_N[n]),
                "place": place + int(n),
            },
        )
        for n in np.argsort(-gaps_N, kind="stable")[:_MOST]
    ]


def largest_shares(groups: KeptGroups, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """The tokens with the largest shares of the KL, in the newest step that kept such a list."""
    for step in reversed(groups.steps):
        if found := groups.step_tokens(step):
            rows = [each._asdict() | {"text": _text(each.id, tokenizer)} for each in found]
            return {"step": step, "rows": rows}
    return None


def nats(logprobs: np.ndarray) -> Any:
    """Log-probs as JSON, with four decimals: a KL is a difference of them."""
    return np.round(logprobs.astype(np.float64), 4).tolist()


def _text(id_: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else decode(tokenizer, [id_])
