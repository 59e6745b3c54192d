"""Tokenizers: loading, fingerprints, and comparison."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from distill.errors import CheckpointError, ConfigError, first_line
from distill.model_paths import checkpoints_within
from distill.types import Tokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """Load a checkpoint's tokenizer. Code in the checkpoint is never run.

    Raises:
        CheckpointError: the checkpoint has no tokenizer, or it cannot be read.
    """
    from transformers import AutoTokenizer  # slow: torch, its compiler, the names of all models

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # a corrupt file raises json errors, OSError, ValueError, KeyError
        raise CheckpointError(
            f"cannot load a tokenizer from {path!r}: {first_line(error)}{checkpoints_within(path)}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # transformers creates an empty tokenizer of the model's kind if the files are missing
        raise CheckpointError(f"cannot load a tokenizer from {path!r}: it has no vocabulary")
    # A first call turns off truncation and padding that the file may turn on. Later this would fail
    # while another thread encodes.
    tokenizer("")
    return tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Facts that must agree between two tokenizers for their token ids to be interchangeable."""

    vocab_hash: str
    vocab_len: int
    eos_token_id: object
    chat_template_hash: str | None


def fingerprint(tokenizer: Tokenizer) -> Fingerprint:
    template = tokenizer.chat_template
    return Fingerprint(
        vocab_hash=vocabulary_hash(tokenizer),
        vocab_len=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        chat_template_hash=None if template is None else _hash(json.dumps(template)),
    )


@lru_cache(maxsize=4)
def vocabulary_hash(tokenizer: Tokenizer) -> str:
    return _hash(json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Text whose pieces exercise merges, digits, spaces, newlines and non-ASCII.
PROBE_TEXTS = ("Hello, world!\n  12 + 345 = 357\n", "naïve café 你好 -> x_1 != x_2;  \t(end)")
PROBE_CHAT = ({"role": "user", "content": "What is 12 + 345?"},)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerProbe:
    """Token ids of fixed texts, for comparing tokenizers if only a server can be queried.

    Attributes:
        texts: token ids of each of `PROBE_TEXTS`, without special tokens.
        chat: token ids of `PROBE_CHAT` under the chat template, ready for an answer; None without
            a template, or if it refuses this chat.
    """

    texts: tuple[tuple[int, ...], ...]
    chat: tuple[int, ...] | None

    def digest(self) -> str:
        """Short hash of all the token ids."""
        return _hash(json.dumps([self.texts, self.chat]))


def probe_tokenizer(tokenizer: Tokenizer) -> TokenizerProbe:
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    chat = None
    if tokenizer.chat_template is not None:
        with suppress(Exception):  # templates may raise any error
            rendered = tokenizer.apply_chat_template(
                list(PROBE_CHAT), add_generation_prompt=True, tokenize=False
            )
            chat = encode(str(rendered))
    return TokenizerProbe(texts=tuple(encode(text) for text in PROBE_TEXTS), chat=chat)


def check_same_tokenizer(student: Tokenizer, teacher: Tokenizer) -> None:
    """Check that two tokenizers agree: a teacher scores the student's token ids unchanged.

    Raises:
        ConfigError: they differ; the message names the first difference.
    """
    difference = first_difference(student, teacher)
    if difference:
        raise ConfigError(
            f"student and teacher do not share a tokenizer: {difference}. On-policy distillation "
            "scores the student's token ids with the teacher, so the two must share a vocabulary",
            field="teacher.model",
        )


def first_difference(
    a: Tokenizer,
    b: Tokenizer,
    to_a: str = "to the student",
    to_b: str = "to the teacher",
) -> str | None:
    """Description of the first difference between two tokenizers; None if there is none.

    Args:
        to_a, to_b: names of the two sides in the description.
    """
    ids_a, ids_b = _tokens_by_id(a), _tokens_by_id(b)
    for token_id in sorted(ids_a.keys() | ids_b.keys()):
        token_a, token_b = ids_a.get(token_id), ids_b.get(token_id)
        if token_a != token_b:
            return f"id {token_id} is {token_a!r} {to_a} and {token_b!r} {to_b}"
    for text in PROBE_TEXTS:
        if a(text)["input_ids"] != b(text)["input_ids"]:
            return f"the text {text!r} is encoded differently (merges or normalisation differ)"
    return None


def _tokens_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
