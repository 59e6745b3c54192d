"""The handshake's first check: token ids have the same meaning in all engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distill.engine import EngineInfo
from distill.tokenizer import PROBE_TEXTS, TokenizerProbe


def fact_differences(
    policies: Mapping[str, EngineInfo],
    teachers: Mapping[str, EngineInfo],
    tokenizer: TokenizerProbe,
) -> list[str]:
    """Reasons why these engines cannot score each other's token ids; empty if they can.

    Args:
        policies: facts reported by each policy engine, by name; the first represents the student.
        tokenizer: probe of the run's tokenizer, which encodes the prompts.
    """
    first, student = next(iter(policies.items()))
    differences = []
    for name, info in {**policies, **teachers}.items():
        if info.tokenizer is not None:
            differences += _tokenizer_differences(name, info.tokenizer, tokenizer)
        known = info.eos_token_ids is not None and student.eos_token_ids is not None
        if known and set(info.eos_token_ids or ()) != set(student.eos_token_ids or ()):
            differences.append(
                f"{name} ends at token ids {_ids(info.eos_token_ids)} and {first} at "
                f"{_ids(student.eos_token_ids)}; give all engines the same stop tokens"
            )
        if info.stop_event != student.stop_event:
            differences.append(
                f"{name} counts the token ids {_ids(info.stop_event)} as one event and {first} "
                f"{_ids(student.stop_event)}; give all engines the same stop tokens"
            )
    for name, info in policies.items():
        if info.vocab_size != student.vocab_size:
            differences.append(
                f"{name} has a vocabulary of {info.vocab_size} and {first} one of "
                f"{student.vocab_size}; the policy engines must serve one model"
            )
    for name, info in teachers.items():
        if info.vocab_size < student.vocab_size:
            differences.append(
                f"{name} has a vocabulary of {info.vocab_size}, smaller than {first}'s "
                f"{student.vocab_size}: it could not score every token that the student may "
                "sample. Resize the teacher's embeddings, or choose another pair"
            )
    return differences


def _tokenizer_differences(name: str, theirs: TokenizerProbe, ours: TokenizerProbe) -> list[str]:
    """Differences between an engine's tokenizer and the run's.

    Chat templates are not compared, because engines receive token ids.
    """
    encoded = zip(map(repr, PROBE_TEXTS), theirs.texts, ours.texts, strict=True)
    return [
        f"{name} has another tokenizer: it encodes {what} as {_ids(their_ids)}, the run's "
        f"tokenizer as {_ids(our_ids)}; start it on a checkpoint with the student's tokenizer"
        for what, their_ids, our_ids in encoded
        if their_ids != our_ids
    ]


def _ids(token_ids: Sequence[int] | None) -> str:
    return str(list(token_ids or ()))
