"""Chunks cover the text once, in order and within the budget, and end at natural boundaries."""

import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.errors import DataError
from distill.text.chunks import Chunk, chunk_text, count_tokens, cut_text
from tests.distill.test_token_rewards import byte_tokenizer
from tests.refusals import refuses

GUIDE = """# Guide

The wall keeps out the wind. It was built by hand, e.g. by Dr. Smith's mother!

## Installation

Run this:

```python
def double(x):
    # Not a heading.

    return 2 * x
```

Then open the door.

- one item of the list
- another item of it
"""
CHINESE = "长城是中国古代的军事工程。它有多长？两万多公里！很多人去看它；也有人不去。"  # noqa: RUF001
JAPANESE = "日本語の文章です。句点で終わります。「引用です。」と言った。"
BYTES = byte_tokenizer(GUIDE, CHINESE, JAPANESE, vocab_size=420)


def chunks(text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase = BYTES) -> list[Chunk]:
    found = chunk_text(text, tokenizer=tokenizer, max_tokens=max_tokens)
    check(found, text, max_tokens, tokenizer)
    return found


def check(
    found: list[Chunk], text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Assert that only whitespace lies between chunks."""
    end = 0
    for chunk in found:
        assert chunk.text == text[chunk.start : chunk.stop] and chunk.text.strip()
        assert chunk.start >= end and not text[end : chunk.start].strip()
        real = len(tokenizer.encode(chunk.text, add_special_tokens=False))
        assert chunk.num_tokens == real <= max_tokens
        end = chunk.stop
    assert not text[end:].strip()


def texts(text: str, max_tokens: int) -> list[str]:
    return [chunk.text for chunk in chunks(text, max_tokens)]


PIECES = [
    *("# Title\n", "\n## Part\n\n", "```\n", "~~~~py\n", "    x = 1\n", "- item\n", "| a | b |\n"),
    *("One sentence. ", "And another! ", "Is it? ", "word ", "\n", "\n\n", " ", "\t", "\r\n"),
    *(
        CHINESE,
        JAPANESE,
        "長",
        "🙂",
        "e\u0301",
        "👩‍👩‍👧",
        "\x00",
        "\x1c",
        "\x85",
        "\u3000",
        "<eos>",
    ),
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=60
)


@given(TEXT, st.integers(8, 80))
@example("a" * 3000, 8)
@example("长" * 3000, 8)
@example("\n" * 3000 + "a", 8)
@example("```\n" + "x = 1\n" * 500 + "```\nafter", 8)
def test_all_of_the_text_once_in_order_within_the_budget(text: str, max_tokens: int) -> None:
    assert chunks(text, max_tokens) == chunks(text, max_tokens)


def test_a_section_that_fits_is_whole() -> None:
    first, second = GUIDE.split("## Installation")
    size = max(count_tokens(BYTES, part) for part in (first, "## Installation" + second))
    assert texts(GUIDE, size) == [first.strip(), ("## Installation" + second).strip()]


def test_a_heading_stays_with_what_follows() -> None:
    rng = random.Random(0)
    for _ in range(100):
        size = rng.randint(20, 60)  # a heading and a paragraph fit
        parts = [rng.choice(["# A heading", "Some words.", "More words here."]) for _ in range(20)]
        found = chunks("\n\n".join(parts), size)
        for chunk, following in pairwise(found):
            assert following.text.startswith("#") or not chunk.text.endswith("# A heading")


@pytest.mark.parametrize("text", [CHINESE, JAPANESE])
def test_sentences_without_spaces(text: str) -> None:
    longest = max(count_tokens(BYTES, part + "。") for part in text.split("。"))
    found = chunks(text, longest)
    assert len(found) > 1
    assert all(chunk.text.rstrip("」")[-1] in "。！？；" for chunk in found)  # noqa: RUF001


def test_less_than_a_word() -> None:
    """A character of several tokens is not cut."""
    assert texts("xq zz", 1) == ["x", "q", "z", "z"]
    assert texts("🙂🙂", 4) == ["🙂", "🙂"]


def test_less_than_a_character() -> None:
    with refuses(DataError, "max_tokens"):
        chunks("so 🙂", 3)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("One is here. Two is there. Three", "One is here. Two is there."),
        ('He said "so." And I\'d gone away', 'He said "so."'),
        ("它有多长？两万多公里！很多人去看它", "它有多长？两万多公里！"),  # noqa: RUF001
        ("「引用です。」と言った", "「引用です。」"),
        ("First line\n\nand so on", "First line"),
        ("Costs 3.14 or so", "Costs 3.14 or s"),
    ],
)
def test_a_cut_ends_with_a_sentence(
    tokenizer: PreTrainedTokenizerBase, text: str, kept: str
) -> None:
    assert cut_text(text, tokenizer=tokenizer, max_tokens=len(text) - 1) == kept
    assert cut_text(text, tokenizer=tokenizer, max_tokens=len(text)) == text


@given(TEXT, st.integers(0, 60))
def test_a_cut_fits(text: str, max_tokens: int) -> None:
    kept = cut_text(text, tokenizer=BYTES, max_tokens=max_tokens)
    assert text.startswith(kept) and count_tokens(BYTES, kept) <= max_tokens
    assert kept or max_tokens < 4 or not text.strip() or count_tokens(BYTES, text) > max_tokens
