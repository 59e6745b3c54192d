"""Prompts: read and check a JSONL file, and walk through it in a seeded, resumable order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.errors import ConfigError, DataError
from distill.renderer import render_messages, render_text
from distill.types import TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One prompt, rendered. `answer` is the reference for the reward, where the file has one."""

    tokens_T: TokenArray
    answer: str | None
    line: int


def read_jsonl(path: str) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every non-blank line.

    Raises:
        DataError: no such file, nothing in it, or a line that is not a JSON object.
    """
    rows: list[tuple[int, dict[str, Any]]] = []
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}:{number}: not valid JSON: {error}") from error
                if not isinstance(row, dict):
                    raise DataError(f"{path}:{number}: expected a JSON object, got {line[:40]!r}")
                rows.append((number, row))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path!r}: {error}") from error
    if not rows:
        raise DataError(f"{path} holds no rows; write one JSON object a line")
    return rows


def load_prompts(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    context_length: int,
    max_new_tokens: int,
) -> list[Prompt]:
    """Reads, renders and checks every prompt of a JSONL file before anything expensive starts.

    Each line has `prompt` (a string, encoded as it stands) or `messages` (OpenAI chat format,
    through the model's chat template), and optionally `answer`.

    Raises:
        DataError: names the file, the line, and what is wrong with it.
    """
    prompts = []
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        try:
            tokens_T = _render(row, tokenizer)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if tokens_T.max() >= vocab_size:
            raise DataError(
                f"{where}: the tokenizer gives id {tokens_T.max()}, outside the model's vocabulary "
                f"of {vocab_size}; tokenizer and model do not belong together"
            )
        if len(tokens_T) + max_new_tokens > context_length:
            raise DataError(
                f"{where}: the prompt has {len(tokens_T)} tokens, and max_new_tokens="
                f"{max_new_tokens} more exceed the model's context of {context_length}; shorten "
                "the prompt or lower max_new_tokens"
            )
        answer = row.get("answer")
        prompts.append(
            Prompt(tokens_T=tokens_T, answer=None if answer is None else str(answer), line=number)
        )
    return prompts


def _render(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> TokenArray:
    text, messages = row.get("prompt"), row.get("messages")
    if (text is None) == (messages is None):
        raise DataError("give exactly one of `prompt` (a string) and `messages` (chat format)")
    if text is not None:
        if not isinstance(text, str) or not text:
            raise DataError(f"`prompt` must be a non-empty string, got {text!r}")
        tokens_T = render_text(tokenizer, text)
    else:
        if not isinstance(messages, list) or not messages:
            raise DataError(f"`messages` must be a non-empty list, got {messages!r}")
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise DataError(f"`messages[{i}]` must be an object with a `role`, got {message!r}")
        tokens_T = render_messages(tokenizer, messages)
    if len(tokens_T) == 0:
        raise DataError("the prompt is empty after tokenization")
    return tokens_T


class PromptStream:
    """The run's endless order of prompts: position -> index, a fresh seeded shuffle every epoch.

    A pure function of (number of prompts, seed), so the cursor of a resumed run is one integer.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        if num_prompts < 1:
            raise ConfigError("there are no prompts to train on")
        self._num_prompts = num_prompts
        self._seed = seed
        self._epoch = -1
        self._order_P: Sequence[int] = ()

    def index(self, position: int) -> int:
        """Index of the prompt at `position` (0-based; epochs follow one another)."""
        epoch, offset = divmod(position, self._num_prompts)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._order_P = rng.permutation(self._num_prompts).tolist()
            self._epoch = epoch
        return self._order_P[offset]
