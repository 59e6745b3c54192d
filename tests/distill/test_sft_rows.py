"""Supervised rows: prompt, completion and EOS; or a conversation, the assistant's turns trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.data.sft_rows import SFT_TEMPERATURE, load_sft_rows
from distill.errors import DataError
from distill.objective.batching import TrainingRow
from distill.sampling import UNSCALED
from distill.tokenizer import fingerprint, load_tokenizer
from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer

GOOD = {"prompt": "2+2=", "completion": "4!"}
CHAT = {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4!"}]}
LIMITS = {"vocab_size": VOCAB_SIZE, "max_length": 64, "stop_ids": {EOS}}


def load(path: Path, tokenizer: PreTrainedTokenizerBase, *rows: dict, **limits: Any):
    file = path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_sft_rows(str(file), tokenizer, **LIMITS | limits)


def facts(row: TrainingRow) -> tuple[list[int], list[bool]]:
    return row.tokens_T.tolist(), row.loss_mask_T.tolist()


def test_the_loss_is_on_the_completion_and_its_eos(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    [row] = load(tmp_path, tokenizer, GOOD)
    ids = tokenizer.convert_tokens_to_ids(list("2+2=4!"))
    assert row.tokens_T.tolist() == [*ids, EOS]
    assert row.loss_mask_T.tolist() == [False] * 4 + [True] * 3
    assert row.advantages_T.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert row.behaviour_logprobs_T.tolist() == [0] * 7
    assert row.temperature == SFT_TEMPERATURE == UNSCALED
    assert row.source.endswith("data.jsonl:1")


def test_messages_answer_a_prompt_as_what_the_user_says(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    asked, *said = CHAT["messages"]
    made = load(tmp_path, tokenizer, CHAT, {"prompt": asked["content"], "completion": said})
    assert facts(made[0]) == facts(made[1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "a", "reply": "b"}, r"the row has `prompt`, `reply`, and completion_key= says"),
        ({"prompt": "a", "completion": []}, "`completion` must be a non-empty list"),
        ({"prompt": "", "completion": "b"}, "`prompt` must be a non-empty string, got ''"),
        ({"prompt": "a", "completion": 3}, "`completion` must be a non-empty string, got 3"),
        ({"prompt": "a", "completion": "x" * 63}, "65 tokens exceed the limit of 64"),
        ({"prompt": "a", "completion": "\ud800"}, "cannot encode"),
        ({"messages": []}, "`messages` must be a non-empty list"),
        ({"messages": ["hi"]}, r"`messages\[0\]` must be an object with a `role`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"`messages\[0\].content\[0\]` must be .* got a part of type 'image_url'",
        ),
        ({"messages": [{"role": "user"}]}, r"`messages\[0\].content` .* got None"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": "add"}]},
            r"`messages\[0\].tool_calls` must be a list of objects, got 'add'",
        ),
        ({"messages": CHAT["messages"][:1]}, "no assistant turn to train"),
        (CHAT | {"prompt": "a"}, "`prompt` beside `messages`"),
        (CHAT | {"tools": {"name": "add"}}, "`tools` must be a list of objects"),
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
        load(tmp_path, tokenizer, GOOD, stop_ids=())
    [row] = load(tmp_path, tokenizer, GOOD, stop_ids=(7, 5))
    assert row.tokens_T[-1] == 5, "where a server ends all the same"


def test_a_conversation_is_a_row(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    [row] = load(tmp_path, tokenizer, CHAT)
    assert tokenizer.decode(row.tokens_T.tolist()) == "u:2+2\na:4!\n"
    assert tokenizer.decode(row.tokens_T[row.loss_mask_T].tolist()) == "4!\n"
    assert row.advantages_T.tolist() == row.loss_mask_T.astype(float).tolist()
    assert row.temperature == SFT_TEMPERATURE and row.source.endswith("data.jsonl:1")


def test_a_conversation_may_take_several_rows(tmp_path: Path) -> None:
    """The template writes the last answer in capitals, so the first is seen so only on its own."""
    template = (
        "{% for m in messages %}{{ m.content | upper if loop.last else m.content }}{% endfor %}"
    )
    save_tokenizer(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(str(tmp_path))
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": content}
        for i, content in enumerate(["1", "a", "2", "b"])
    ]
    rows = load(tmp_path, tokenizer, {"messages": messages}, GOOD)
    assert [tokenizer.decode(row.tokens_T.tolist()) for row in rows[:2]] == ["1A", "1a2B"]
    assert [row.num_trained for row in rows] == [1, 1, 3]
    assert [row.source[-2:] for row in rows] == [":1", ":1", ":2"]


def sampled(tokenizer: PreTrainedTokenizerBase) -> dict:
    """A row of token ids, two runs of which were sampled."""
    row = {"tokens": [5, 6, 7, 8, EOS, 9], "loss_mask": [[1, 3], [4, 5]]}
    return row | {"tokenizer": fingerprint(tokenizer).vocab_hash}


def test_token_ids_are_taken_as_they_are(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    whole = sampled(tokenizer) | {"tokens": [3] * 64, "loss_mask": [[1, 64]], "text": "3" * 64}
    rows = load(tmp_path, tokenizer, sampled(tokenizer), GOOD, CHAT, whole)
    assert [row.source[-2:] for row in rows] == [":1", ":2", ":3", ":4"]
    row = rows[0]
    assert row.tokens_T.tolist() == [5, 6, 7, 8, EOS, 9] and row.tokens_T.dtype == np.int32
    assert row.loss_mask_T.tolist() == [False, True, True, False, True, False]
    assert row.advantages_T.tolist() == [0, 1, 1, 0, 1, 0]
    assert row.temperature == SFT_TEMPERATURE
    assert rows[3].num_trained == 63


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "`tokens` must be a non-empty list of token ids, got None"),
        ({"tokens": []}, r"`tokens` must be a non-empty list of token ids, got \[\]"),
        ({"tokens": "ab"}, "`tokens` must be a non-empty list of token ids, got 'ab'"),
        ({"tokens": [3, True]}, "`tokens` must be a non-empty list of token ids"),
        ({"tokens": [3, 4.0]}, "`tokens` must be a non-empty list of token ids"),
        ({"tokens": [3, -1, 4]}, "`tokens` holds a negative id, -1"),
        (
            {"tokens": [3] * 5 + [VOCAB_SIZE]},
            f"`tokens` holds id {VOCAB_SIZE}, outside the model's vocabulary of {VOCAB_SIZE}",
        ),
        ({"tokens": [3, 2**70, 4], "loss_mask": [[1, 2]]}, "outside the model's vocabulary"),
        ({"tokens": [3] * 65}, "65 tokens exceed the limit of 64"),
        ({"loss_mask": None}, "`loss_mask` must be a non-empty list .*, got None"),
        ({"loss_mask": []}, r"`loss_mask` must be a non-empty list .*, got \[\]"),
        ({"loss_mask": [True] * 6}, r"`loss_mask\[0\]` must be \[start, stop\), got True"),
        ({"loss_mask": [[1, 2, 3]]}, r"`loss_mask\[0\]` must be \[start, stop\)"),
        ({"loss_mask": [[0, 2]]}, r"`loss_mask\[0\]` = \[0, 2\] .* leave out the first"),
        ({"loss_mask": [[2, 2]]}, r"`loss_mask\[0\]` = \[2, 2\] is no run of tokens in \[1, 6\)"),
        ({"loss_mask": [[2, 7]]}, r"`loss_mask\[0\]` = \[2, 7\] is no run of tokens in \[1, 6\)"),
        ({"loss_mask": [[1, 3], [2, 4]]}, r"`loss_mask\[1\]` = \[2, 4\] .* in \[3, 6\)"),
        ({"loss_mask": [[3, 4], [1, 2]]}, r"`loss_mask\[1\]` = \[1, 2\]"),
        ({"tokenizer": None}, "fingerprint is '[0-9a-f]{16}', but `tokenizer` is None"),
        ({"tokenizer": "another"}, "but `tokenizer` is 'another'; train a model that shares"),
        ({"prompt": "a"}, "`prompt` beside `tokens`: give either"),
        ({"completion": "a"}, "`completion` beside `tokens`"),
        (CHAT, "`messages` beside `tokens`"),
        (CHAT | {"tokens": None}, "`messages` beside `loss_mask`"),
    ],
)
def test_bad_token_ids_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, changes: dict, message: str
) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{message}"):
        load(tmp_path, tokenizer, GOOD, sampled(tokenizer) | changes)


def test_a_row_without_an_example_is_told_the_forms(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=r":1: there is no example here: give either `prompt` and"):
        load(tmp_path, tokenizer, {"text": "a"})


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools[0].name }}{% for m in messages %}:{{ m.content }}{% endfor %}"
    save_tokenizer(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(str(tmp_path))
    [row] = load(tmp_path, tokenizer, CHAT | {"tools": [{"name": "add"}]})
    assert tokenizer.decode(row.tokens_T.tolist()).startswith("add:")


def test_parquet_gives_the_same_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """All forms in one file: each row has the others' fields as nulls."""
    path = tmp_path / "data.parquet"
    ids = sampled(tokenizer)
    nulls = dict.fromkeys(["messages", *ids])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD | nulls, CHAT, ids]), path)
    rows = load_sft_rows(str(path), tokenizer, **LIMITS)
    same = load(tmp_path, tokenizer, GOOD, CHAT, ids)
    assert [facts(row) for row in rows] == [facts(row) for row in same]
    assert rows[1].source == f"{path}:2"


def test_chat_needs_no_eos_token(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.eos_token = None
    assert len(load(tmp_path, tokenizer, CHAT)) == 1
