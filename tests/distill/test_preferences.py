"""Pairs in three forms; each side trains the assistant's turns after the shared context."""

from pathlib import Path
from typing import Any

import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.data.example_encoder import ExampleEncoder
from distill.data.preferences import PreferencePair, load_preference_pairs
from distill.errors import DataError
from distill.objective.batching import TrainingRow
from distill.tokenizer import load_tokenizer
from tests.refusals import refuses
from tests.rows import write_rows
from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
STRINGS = {"prompt": "2+2=", "chosen": "4", "rejected": "5!"}
USER, RIGHT, WRONG, MORE = (
    {"role": role, "content": content}
    for role, content in [("user", "2+2"), ("assistant", "4"), ("assistant", "5"), ("user", "ok?")]
)
LIMITS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_length": 64, "stop_ids": {EOS}}


@pytest.fixture
def load(tmp_path: Path):
    def load_rows(*rows: dict, tokenizer: PreTrainedTokenizerBase = TOKENIZER, **limits: Any):
        file = write_rows(tmp_path / "pairs.jsonl", *rows)
        return load_preference_pairs(file, ExampleEncoder(tokenizer=tokenizer, **LIMITS | limits))

    return load_rows


def shown(row: TrainingRow) -> tuple[str, str]:
    """(whole text, its trained text)"""
    return (
        str(TOKENIZER.decode(row.tokens_T.tolist())),
        str(TOKENIZER.decode(row.tokens_T[row.loss_mask_T].tolist())),
    )


def both(pair: PreferencePair) -> tuple:
    return shown(pair.chosen), shown(pair.rejected)


def test_strings_are_encoded_as_completions_are(load, tmp_path: Path) -> None:
    [pair] = load(STRINGS)
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
def test_the_common_beginning_of_both_sides_is_context(load, row: dict, before: str) -> None:
    [pair] = load(row)
    assert both(pair) == ((before + "4\n", "4\n"), (before + "5\n", "5\n"))


def test_continuations_of_several_turns_train_them_all(load) -> None:
    row = {"chosen": [USER, RIGHT, MORE, RIGHT], "rejected": [USER, WRONG]}
    [pair] = load(row)
    assert both(pair) == (("u:2+2\na:4\nu:ok?\na:4\n", "4\n4\n"), ("u:2+2\na:5\n", "5\n"))


def test_several_turns_that_the_template_rewrites_are_refused(load, tmp_path: Path) -> None:
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
        load(row, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2=", "chosen": "4", "rejected": "4"},
        {"messages": [USER], "chosen": "4", "rejected": [RIGHT]},
        {"chosen": [USER, RIGHT], "rejected": [USER, RIGHT]},
    ],
)
def test_equal_sides_are_refused(load, row: dict) -> None:
    with refuses(DataError, "chosen", names="pairs.jsonl:2:"):
        load(STRINGS, row)


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
def test_a_bad_pair_is_named(load, row: dict, field: str | None) -> None:
    with refuses(DataError, field, names="pairs.jsonl:2:"):
        load(STRINGS, row)
