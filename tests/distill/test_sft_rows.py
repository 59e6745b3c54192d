"""Rows of SFT and of preferences: encoding, limits and refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.data.example_encoder import ExampleEncoder
from distill.data.preferences import PreferencePair, load_preference_pairs
from distill.data.sft_rows import SFT_TEMPERATURE, load_sft_rows
from distill.errors import DataError
from distill.objective.batching import TrainingRow
from distill.sampling import UNSCALED
from distill.tokenizer import fingerprint, load_tokenizer
from tests.refusals import refuses
from tests.rows import write_rows
from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer, tiny_tokenizer, token_id

TOKENIZER = tiny_tokenizer()
GOOD = {"prompt": "2+2=", "completion": "4!"}
CHAT = {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4!"}]}
LIMITS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_length": 64, "stop_ids": {EOS}}


def loader(file: Path, load: Callable[[str, ExampleEncoder], list]):
    def load_rows(*rows: dict, tokenizer: PreTrainedTokenizerBase = TOKENIZER, **limits: Any):
        encoder = ExampleEncoder(tokenizer=tokenizer, **LIMITS | limits)
        return load(write_rows(file, *rows), encoder)

    return load_rows


@pytest.fixture
def load(tmp_path: Path):
    return loader(tmp_path / "data.jsonl", load_sft_rows)


@pytest.fixture
def load_pairs(tmp_path: Path):
    return loader(tmp_path / "pairs.jsonl", load_preference_pairs)


def facts(row: TrainingRow) -> tuple[list[int], list[bool]]:
    return row.tokens_T.tolist(), row.loss_mask_T.tolist()


def test_the_loss_is_on_the_completion_and_its_eos(load) -> None:
    [row] = load(GOOD)
    assert row.tokens_T.tolist() == [*(token_id(TOKENIZER, each) for each in "2+2=4!"), EOS]
    assert row.loss_mask_T.tolist() == [False] * 4 + [True] * 3
    assert row.advantages_T.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert row.behaviour_logprobs_T.tolist() == [0] * 7
    assert row.temperature == SFT_TEMPERATURE == UNSCALED
    assert row.source.endswith("data.jsonl:1")


def test_a_row_without_an_example_is_refused_with_its_fields(load) -> None:
    with refuses(DataError, None, names="`instruction`, `output`"):
        load({"instruction": "2+2=", "output": "4!"})


def test_a_completion_that_ends_with_the_eos_gets_no_other(load) -> None:
    ended = GOOD["completion"] + str(TOKENIZER.eos_token)
    rows = load(GOOD, GOOD | {"completion": ended}, GOOD | {"completion": f"{ended}\n"})
    assert facts(rows[0]) == facts(rows[1]) == facts(rows[2])


def test_a_prompt_before_messages_is_a_user_message(load) -> None:
    asked, *answers = CHAT["messages"]
    made = load(CHAT, {"prompt": asked["content"], "completion": answers})
    assert facts(made[0]) == facts(made[1])


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"text": "a"}, None),
        ({"prompt": "a", "reply": "b"}, "completion"),
        ({"prompt": "a", "completion": []}, "completion"),
        ({"prompt": "", "completion": "b"}, "prompt"),
        ({"prompt": "a", "completion": 3}, "completion"),
        ({"prompt": "a", "completion": "x" * 63}, "data.max_length"),
        ({"prompt": "a", "completion": "\ud800"}, None),
        ({"prompt": "a", "completion": f"b{TOKENIZER.eos_token}c"}, "completion"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": "add"}]},
            "messages[0].tool_calls",
        ),
        ({"messages": CHAT["messages"][:1]}, None),
        (CHAT | {"prompt": "a"}, None),
        (CHAT | {"tools": {"name": "add"}}, "tools"),
    ],
)
def test_a_bad_row_is_named(load, bad: dict, field: str | None) -> None:
    with refuses(DataError, field, names="data.jsonl:2:"):
        load(GOOD, bad)


def test_ids_outside_the_model_are_refused(load) -> None:
    with refuses(DataError, None, names=":1:"):
        load(GOOD, vocab_size=20)


def test_completions_need_an_eos_token(load, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.eos_token = None
    with pytest.raises(DataError):
        load(GOOD, stop_ids=(), tokenizer=tokenizer)
    [row] = load(GOOD, stop_ids=(7, 5), tokenizer=tokenizer)
    assert row.tokens_T[-1] == 5, "where a server ends all the same"
    assert len(load(CHAT, tokenizer=tokenizer)) == 1, "a template writes its own"


def test_a_conversation_may_take_several_rows(load, tmp_path: Path) -> None:
    """The template writes the last answer in capitals, so the first needs its own row."""
    template = (
        "{% for m in messages %}{{ m.content | upper if loop.last else m.content }}{% endfor %}"
    )
    save_tokenizer(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(str(tmp_path))
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": content}
        for i, content in enumerate(["1", "a", "2", "b"])
    ]
    rows = load({"messages": messages}, GOOD, tokenizer=tokenizer)
    assert [tokenizer.decode(row.tokens_T.tolist()) for row in rows[:2]] == ["1A", "1a2B"]
    assert [row.num_trained for row in rows] == [1, 1, 3]
    assert [row.source[-2:] for row in rows] == [":1", ":1", ":2"]


def sampled() -> dict:
    """Row of token ids, two runs of which were sampled."""
    row = {"tokens": [5, 6, 7, 8, EOS, 9], "loss_mask": [[1, 3], [4, 5]]}
    return row | {"tokenizer": fingerprint(TOKENIZER).vocab_hash}


def test_token_ids_are_taken_as_they_are(load) -> None:
    whole = sampled() | {"tokens": [3] * 64, "loss_mask": [[1, 64]], "text": "3" * 64}
    rows = load(sampled(), GOOD, CHAT, whole)
    assert [row.source[-2:] for row in rows] == [":1", ":2", ":3", ":4"]
    row = rows[0]
    assert row.tokens_T.tolist() == [5, 6, 7, 8, EOS, 9] and row.tokens_T.dtype == np.int32
    assert row.loss_mask_T.tolist() == [False, True, True, False, True, False]
    assert row.advantages_T.tolist() == [0, 1, 1, 0, 1, 0]
    assert row.temperature == SFT_TEMPERATURE
    assert rows[3].num_trained == 63


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({"tokens": tokens}, "tokens") for tokens in (None, [], "ab", [3, True], [3, 4.0])),
        ({"tokens": [3, -1, 4]}, "tokens"),
        ({"tokens": [3] * 5 + [VOCAB_SIZE]}, "tokens"),
        ({"tokens": [3, 2**70, 4], "loss_mask": [[1, 2]]}, "tokens"),
        ({"tokens": [3] * 65}, "data.max_length"),
        ({"loss_mask": None}, "loss_mask"),
        ({"loss_mask": []}, "loss_mask"),
        ({"loss_mask": [True] * 6}, "loss_mask[0]"),
        *(({"loss_mask": [run]}, "loss_mask[0]") for run in ([1, 2, 3], [0, 2], [2, 2], [2, 7])),
        ({"loss_mask": [[1, 3], [2, 4]]}, "loss_mask[1]"),
        ({"loss_mask": [[3, 4], [1, 2]]}, "loss_mask[1]"),
        ({"tokenizer": None}, "tokens"),
        ({"tokenizer": "another"}, "tokens"),
        ({"prompt": "a"}, None),
        ({"completion": "a"}, None),
        (CHAT, None),
        (CHAT | {"tokens": None}, None),
    ],
)
def test_bad_token_ids_are_named(load, changes: dict, field: str | None) -> None:
    with refuses(DataError, field, names="data.jsonl:2:"):
        load(GOOD, sampled() | changes)


STRINGS = {"prompt": "2+2=", "chosen": "4", "rejected": "5!"}
USER, RIGHT, WRONG, MORE = (
    {"role": role, "content": content}
    for role, content in [("user", "2+2"), ("assistant", "4"), ("assistant", "5"), ("user", "ok?")]
)


def shown(row: TrainingRow) -> tuple[str, str]:
    """(whole text, its trained text)"""
    return (
        str(TOKENIZER.decode(row.tokens_T.tolist())),
        str(TOKENIZER.decode(row.tokens_T[row.loss_mask_T].tolist())),
    )


def both(pair: PreferencePair) -> tuple:
    return shown(pair.chosen), shown(pair.rejected)


def test_strings_are_encoded_as_completions_are(load_pairs, tmp_path: Path) -> None:
    [pair] = load_pairs(STRINGS)
    assert both(pair) == (("2+2=4<eos>", "4<eos>"), ("2+2=5!<eos>", "5!<eos>"))
    for side in ("chosen", "rejected"):
        assert getattr(pair, side).source == f"{tmp_path}/pairs.jsonl:1 {side}"


ASKED, ASKED_TWICE = "u:2+2\na:", "u:2+2\na:4\nu:ok?\na:"
BEFORE = [USER, RIGHT, MORE]


@pytest.mark.parametrize(
    ("row", "before"),
    [
        ({"messages": [USER], "chosen": "4", "rejected": "5"}, ASKED),
        ({"messages": [USER], "chosen": [RIGHT], "rejected": "5"}, ASKED),
        ({"messages": [USER], "chosen": [RIGHT], "rejected": [WRONG]}, ASKED),
        ({"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, ASKED),
        ({"prompt": "2+2", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, ASKED),
        ({"prompt": "2+2", "chosen": [RIGHT], "rejected": "5"}, ASKED),
        ({"messages": BEFORE, "chosen": "4", "rejected": "5"}, ASKED_TWICE),
        ({"chosen": [*BEFORE, RIGHT], "rejected": [*BEFORE, WRONG]}, ASKED_TWICE),
        ({"prompt": "2+2", "chosen": [*BEFORE, RIGHT], "rejected": [*BEFORE, WRONG]}, ASKED_TWICE),
    ],
)
def test_the_common_beginning_of_both_sides_is_context(load_pairs, row: dict, before: str) -> None:
    [pair] = load_pairs(row)
    assert both(pair) == ((before + "4\n", "4\n"), (before + "5\n", "5\n"))


def test_continuations_of_several_turns_train_them_all(load_pairs) -> None:
    row = {"chosen": [USER, RIGHT, MORE, RIGHT], "rejected": [USER, WRONG]}
    [pair] = load_pairs(row)
    assert both(pair) == (("u:2+2\na:4\nu:ok?\na:4\n", "4\n4\n"), ("u:2+2\na:5\n", "5\n"))


def test_several_turns_that_the_template_rewrites_are_refused(load_pairs, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.last and m.role == 'assistant' %}"
        "{{ m.content | upper }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    save_tokenizer(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(str(tmp_path))
    sides = (
        [{"role": "assistant", "content": c}, MORE, {"role": "assistant", "content": "z"}]
        for c in "xy"
    )
    row = dict(zip(("chosen", "rejected"), sides, strict=True)) | {"messages": [USER]}
    with refuses(DataError, None, names="pairs.jsonl:1:"):
        load_pairs(row, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2=", "chosen": "4", "rejected": "4"},
        {"messages": [USER], "chosen": "4", "rejected": [RIGHT]},
        {"chosen": [USER, RIGHT], "rejected": [USER, RIGHT]},
    ],
)
def test_equal_sides_are_refused(load_pairs, row: dict) -> None:
    with refuses(DataError, "chosen", names="pairs.jsonl:2:"):
        load_pairs(STRINGS, row)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "a", "chosen": "b"}, "rejected"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "prompt"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "chosen"),
        ({"prompt": "a", "messages": [USER], "chosen": "b", "rejected": "c"}, None),
        ({"prompt": "3+3", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, "prompt"),
        ({"prompt": "2+2", "chosen": [USER, RIGHT], "rejected": "5"}, "prompt"),
        ({"chosen": "b", "rejected": "c"}, "chosen"),
        ({"chosen": [USER, RIGHT]}, "rejected"),
        ({"chosen": [USER, RIGHT], "rejected": [MORE, WRONG]}, "chosen"),
        ({"chosen": [USER, RIGHT], "rejected": [USER]}, None),
        ({"messages": [USER], "chosen": [MORE], "rejected": "5"}, None),
        ({"messages": [USER], "chosen": [{}], "rejected": "5"}, "chosen[0]"),
        ({"messages": "hi", "chosen": "4", "rejected": "5"}, "messages"),
        ({"messages": [USER], "chosen": "4", "rejected": 5}, "rejected"),
        ({"messages": [USER], "chosen": [], "rejected": "5"}, "chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": "x" * 63}, "data.max_length"),
        ({"messages": [USER], "chosen": "b", "rejected": "x" * 64}, "data.max_length"),
    ],
)
def test_a_bad_pair_is_named(load_pairs, row: dict, field: str | None) -> None:
    with refuses(DataError, field, names="pairs.jsonl:2:"):
        load_pairs(STRINGS, row)
