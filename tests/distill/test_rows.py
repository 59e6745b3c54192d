"""Training rows: a segment each for policies; prompt, completion and EOS for supervision."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.advantages import segment_advantages
from distill.errors import DataError
from distill.rows import load_sft_rows, policy_rows
from distill.tokenizer import load_tokenizer
from tests.samples import group
from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer

OPD = {"kl_coef": 1.0, "kl_discount_factor": 0.0, "reward_coef": 0.0}
GOOD = {"prompt": "2+2=", "completion": "4!"}


def load(path: Path, tokenizer: PreTrainedTokenizerBase, *rows: dict, **limits: int):
    file = path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"vocab_size": VOCAB_SIZE, "max_length": 64} | limits
    return load_sft_rows(str(file), tokenizer, **limits)


def test_a_row_for_every_segment_with_its_own_facts() -> None:
    groups = [group(3, temperature=0.5), group(8, members=3, temperature=2.0)]
    settings = {"kl_coef": 0.7, "kl_discount_factor": 0.9, "reward_coef": 2.0}
    rows = policy_rows(groups, **settings)
    expected = [
        (made.group_id, *pair) for made in groups for pair in segment_advantages(made, **settings)
    ]
    assert len(rows) == len(expected) == 5
    for row, (group_id, made, advantages) in zip(rows, expected, strict=True):
        assert row.source == f"group {group_id}"
        assert row.temperature == made.temperature
        assert row.tokens_T.tolist() == made.tokens_T.tolist()
        assert row.loss_mask_T.tolist() == made.action_mask_T.tolist()
        assert row.behaviour_logprobs_T.tolist() == made.behaviour_logprobs_T.tolist()
        assert row.weights_T.tolist() == advantages.tolist()


def test_an_unscored_group_is_refused() -> None:
    with pytest.raises(DataError, match="not scored by a teacher"):
        policy_rows([group(teacher_logprobs_T=None)], **OPD)


def test_the_loss_is_on_the_completion_and_its_eos(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    [row] = load(tmp_path, tokenizer, GOOD)
    ids = tokenizer.convert_tokens_to_ids(list("2+2=4!"))
    assert row.tokens_T.tolist() == [*ids, EOS]
    assert row.loss_mask_T.tolist() == [False] * 4 + [True] * 3
    assert row.weights_T.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert row.behaviour_logprobs_T.tolist() == [0] * 7
    assert row.temperature == 1.0
    assert row.source.endswith("data.jsonl:1")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "a"}, "`completion` must be a non-empty string, got None"),
        ({"prompt": "", "completion": "b"}, "`prompt` must be a non-empty string, got ''"),
        ({"prompt": "a", "completion": 3}, "`completion` must be a non-empty string, got 3"),
        ({"prompt": "a", "completion": "x" * 63}, "65 tokens exceed the limit of 64"),
        ({"prompt": "a", "completion": "\ud800"}, "cannot encode"),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, bad: dict, message: str
) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{message}"):
        load(tmp_path, tokenizer, GOOD, bad)


def test_the_longest_row_that_fits(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    [row] = load(tmp_path, tokenizer, {"prompt": "a", "completion": "x" * 62})
    assert len(row) == 64


def test_ids_outside_the_model_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=r":1: .* outside the model's vocabulary of 20"):
        load(tmp_path, tokenizer, GOOD, vocab_size=20)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no EOS token"):
        load(tmp_path, tokenizer, GOOD)


def test_policy_rows_share_the_segment_s_arrays() -> None:
    made = group()
    for row, part in zip(policy_rows([made], **OPD), made.segments(), strict=True):
        assert np.shares_memory(row.tokens_T, part.tokens_T)
