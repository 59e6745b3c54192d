"""From a prompt as people write it to the tokens a model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.errors import DataError
from distill.types import TokenArray

Message = Mapping[str, Any]


def render_text(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenArray:
    """A plain string as it stands, with whatever special tokens the tokenizer itself adds.

    Raises:
        DataError: the tokenizer cannot encode it.
    """
    return np.asarray(encode(tokenizer, text, add_special_tokens=True), dtype=np.int32)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`.

    Raises:
        DataError: a character that the tokenizer does not know, or that is no character.
    """
    try:
        return tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    except Exception as error:  # tokenizers raises bare Exceptions; a lone surrogate, TypeError
        raise DataError(f"the tokenizer cannot encode {text[:40]!r}: {error}") from error


def render_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> TokenArray:
    """Chat messages through the model's own template, up to where the assistant speaks.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "the prompt has `messages` but the tokenizer has no chat template; give the prompts as "
            "plain strings in `prompt`, or a tokenizer with a template"
        )
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except Exception as error:  # jinja2 raises whatever the template's author chose
        raise DataError(f"the chat template refuses these messages: {error}") from error
    return np.asarray(ids, dtype=np.int32)
