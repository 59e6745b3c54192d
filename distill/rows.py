"""Training rows from what was sampled, and from supervised examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.advantages import segment_advantages
from distill.batching import TrainingRow
from distill.errors import DataError
from distill.prompts import read_jsonl
from distill.renderer import encode, render_text
from distill.types import TrajectoryGroup


def policy_rows(
    groups_P: Iterable[TrajectoryGroup],
    *,
    kl_coef: float,
    kl_discount_factor: float,
    reward_coef: float,
) -> list[TrainingRow]:
    """One row a segment, weighted by its advantages, at the segment's own temperature."""
    return [
        TrainingRow(
            tokens_T=segment.tokens_T,
            loss_mask_T=segment.action_mask_T,
            weights_T=advantages_T,
            behaviour_logprobs_T=segment.behaviour_logprobs_T,
            temperature=segment.temperature,
            source=f"group {group.group_id}",
        )
        for group in groups_P
        for segment, advantages_T in segment_advantages(
            group, kl_coef=kl_coef, kl_discount_factor=kl_discount_factor, reward_coef=reward_coef
        )
    ]


# Supervised likelihood is that of the model itself, softmax(z): the unscaled distribution.
SFT_TEMPERATURE = 1.0


def load_sft_rows(
    path: str, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, max_length: int
) -> list[TrainingRow]:
    """Rows of a JSONL file with `prompt` and `completion`; loss on the completion and its EOS.

    The two are encoded apart, as they are at generation, and the tokenizer's EOS closes the row.

    Raises:
        DataError: names the file, the line, and what is wrong with it.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token, so a completion could never end; set one")
    rows = []
    for number, example in read_jsonl(path):
        where = f"{path}:{number}"
        row = _sft_row(example, tokenizer, where)
        if len(row) > max_length:
            raise DataError(
                f"{where}: {len(row)} tokens exceed the limit of {max_length} (the model's context "
                "or max_length); shorten or drop the row"
            )
        if row.tokens_T.max() >= vocab_size:
            raise DataError(
                f"{where}: the tokenizer gives id {row.tokens_T.max()}, outside the model's "
                f"vocabulary of {vocab_size}; tokenizer and model do not belong together"
            )
        rows.append(row)
    return rows


def _sft_row(
    example: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str
) -> TrainingRow:
    for field in ("prompt", "completion"):
        if not isinstance(example.get(field), str) or not example[field]:
            raise DataError(
                f"{where}: `{field}` must be a non-empty string, got {example.get(field)!r}"
            )
    try:
        prompt_T = render_text(tokenizer, example["prompt"])
        completion = encode(tokenizer, example["completion"], add_special_tokens=False)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    tokens_T = np.concatenate(
        [prompt_T, np.asarray([*completion, tokenizer.eos_token_id], np.int32)]
    )
    mask_T = np.arange(len(tokens_T)) >= len(prompt_T)
    return TrainingRow(
        tokens_T=tokens_T,
        loss_mask_T=mask_T,
        weights_T=mask_T.astype(np.float32),
        behaviour_logprobs_T=np.zeros(len(tokens_T), np.float32),
        temperature=SFT_TEMPERATURE,
        source=where,
    )
