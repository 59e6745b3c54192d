"""Tokens on which student and teacher differ: single occurrences, and sums by token."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from typing import Any

from cluster.run_files.rollouts import KeptGroup
from distill.chat.token_text import decode
from distill.types import Tokenizer

# Number of single tokens that are shown.
_MOST = 20


def furthest_apart(
    groups: Sequence[KeptGroup], tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """The sampled tokens with the largest |log p - log q| of student and teacher.

    `place` is the index among the tokens that a trajectory sampled.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    for group in groups:
        for m, member in enumerate(group.trajectories_G):
            place = 0
            for segment in member.segments:
                ids = segment.sampled_N
                of_teacher = segment.teacher_logprobs_N
                for n, student in enumerate(segment.behaviour_logprobs_N if of_teacher else ()):
                    teacher = of_teacher[n] if of_teacher else 0.0
                    where = {"step": group.step, "group": group.group_id, "member": m}
                    token = {"id": ids[n], "student": student, "teacher": teacher}
                    found.append((abs(student - teacher), where | token | {"place": place + n}))
                place += len(ids)
    worst = [each for _, each in nlargest(_MOST, found, key=lambda pair: pair[0])]
    for each in worst:
        each["text"] = _text(each["id"], tokenizer)
    return worst


def largest_shares(
    groups: Sequence[KeptGroup], tokenizer: Tokenizer | None
) -> dict[str, Any] | None:
    """The tokens with the largest shares of the KL, in the newest step that kept such a list."""
    newest = next((group for group in reversed(groups) if group.step_tokens), None)
    if newest is None:
        return None
    rows = [each._asdict() | {"text": _text(each.id, tokenizer)} for each in newest.step_tokens]
    return {"step": newest.step, "rows": rows}


def _text(id_: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else decode(tokenizer, [id_])
