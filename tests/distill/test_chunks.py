"""Chunks cover a text once; condensers and histories keep to their token budgets."""

import asyncio
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.chat.template import Message, render_messages
from distill.engine import GenerateRequest, Sample
from distill.errors import ConfigError, DataError
from distill.sampling import EvalSampling
from distill.text.bm25_words import words
from distill.text.chunks import Chunk, chunk_text, count_tokens, cut_text
from distill.text.condense import (
    GAP,
    SUMMARY_PREFIX,
    CheckedCondenser,
    Condenser,
    KeywordCondenser,
    ModelCondenser,
    condense_history,
    load_condenser,
)
from distill.types import StopReason
from tests.distill.test_token_rewards import byte_tokenizer
from tests.refusals import refuses
from tests.tiny import CHAT_TEMPLATE

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
BYTES.chat_template = CHAT_TEMPLATE


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
def test_a_cut_ends_a_sentence(tokenizer: PreTrainedTokenizerBase, text: str, kept: str) -> None:
    assert cut_text(text, tokenizer=tokenizer, max_tokens=len(text) - 1) == kept
    assert cut_text(text, tokenizer=tokenizer, max_tokens=len(text)) == text


@given(TEXT, st.integers(0, 60))
def test_a_cut_fits(text: str, max_tokens: int) -> None:
    kept = cut_text(text, tokenizer=BYTES, max_tokens=max_tokens)
    assert text.startswith(kept) and count_tokens(BYTES, kept) <= max_tokens
    assert kept or max_tokens < 4 or not text.strip() or count_tokens(BYTES, text) > max_tokens


GREEDY = EvalSampling(temperature=0, max_new_tokens=64)

STORY = "\n\n".join(
    [
        *(f"On day {i} the market sold bread, milk and eggs as ever." for i in range(12)),
        "Then the lighthouse keeper found a green bottle.",
        *(f"On day {i} the market sold bread, milk and eggs as ever." for i in range(12, 24)),
    ]
)


def keywords(
    text: str, max_tokens: int, focus: str = "", tokenizer: PreTrainedTokenizerBase = BYTES
) -> str:
    condenser = KeywordCondenser(tokenizer=tokenizer)
    condensed = asyncio.run(condenser(text, focus=focus, max_tokens=max_tokens))
    assert len(tokenizer.encode(condensed, add_special_tokens=False)) <= max_tokens
    return condensed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Hello, WORLD: snake_case", ["hello", "world", "snake", "case"]),
        ("\uff21\uff22\uff23 \uff11\uff12", ["abc", "12"]),
        ("长城很长", ["长", "城", "很", "长", "长城", "城很", "很长"]),
        ("at 山 x", ["at", "山", "x"]),
        ("日本語は2つ", ["日", "本", "語", "は", "日本", "本語", "語は", "2", "つ"]),
        ("한국어", ["한", "국", "어", "한국", "국어"]),
        ("Straße", ["strasse"]),
        ("... --- _", []),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


@pytest.mark.parametrize("focus", ["Where is the green bottle?", "LIGHTHOUSE", ""])
def test_keywords_keep_relevant_sentences(focus: str) -> None:
    """Without a focus, rare sentences matter more than repeated ones."""
    assert "Then the lighthouse keeper found a green bottle." in keywords(STORY, 80, focus)


def test_keywords_keep_the_order_and_mark_the_gaps() -> None:
    condensed = keywords(STORY, 160, "day 3 and day 21, and the bottle")
    parts = condensed.split(GAP)
    assert len(parts) > 1
    where = [STORY.index(part) for part in parts]
    assert where == sorted(where)
    assert condensed.index("day 3 ") < condensed.index("bottle") < condensed.index("day 21 ")


def test_a_text_within_the_budget_is_unchanged() -> None:
    assert keywords(STORY, 10**6, "bottle") == STORY
    assert keywords(STORY, count_tokens(BYTES, STORY)) == STORY
    assert keywords("", 0) == ""


def test_a_budget_below_a_character() -> None:
    with refuses(DataError, "max_tokens"):
        keywords("🙂🙂", 2)


@given(TEXT, st.integers(8, 60), st.sampled_from(["", "wall", "长城", "🙂", "part one"]))
def test_keywords_keep_to_the_budget(text: str, max_tokens: int, focus: str) -> None:
    condensed = keywords(text, max_tokens, focus)
    assert condensed == keywords(text, max_tokens, focus)
    assert condensed.strip() or not text.strip()


@given(TEXT, st.integers(1, 60))
def test_another_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> None:
    keywords(text, max_tokens, "wall", tokenizer)


@dataclass
class Scribe:
    """Scripted sampler that records its prompts."""

    answer: Callable[[str], str]
    prompts: list[str] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        prompt = str(BYTES.decode(request.prompt_tokens_T.tolist()))
        self.prompts.append(prompt)
        ids = [*BYTES(self.answer(prompt))["input_ids"], BYTES.eos_token_id]
        sample = Sample(
            tokens_T=np.array(ids, np.int32), logprobs_T=np.zeros(len(ids), np.float32),
            versions_T=np.zeros(len(ids), np.int32), stop_reason=StopReason.EOS,
        )  # fmt: skip
        return [sample]


def by_model(
    scribe: Scribe, text: str, max_tokens: int, *, focus: str = "", chunk_tokens: int = 128
) -> str:
    condenser = ModelCondenser(
        sampler=scribe, tokenizer=BYTES, sampling=GREEDY, chunk_tokens=chunk_tokens
    )
    condensed = asyncio.run(condenser(text, focus=focus, max_tokens=max_tokens))
    assert count_tokens(BYTES, condensed) <= max_tokens
    return condensed


def test_a_model_is_asked_chunk_after_chunk() -> None:
    scribe = Scribe(lambda prompt: f"{prompt.count('milk')} days." if "milk" in prompt else "None.")
    condensed = by_model(scribe, STORY, 200, focus="how many days?")
    assert len(scribe.prompts) > 3
    assert sum(int(part.split()[0]) for part in condensed.split("\n\n")) == 24
    for prompt in scribe.prompts:
        assert prompt.startswith("u:Summarise") and prompt.endswith("\na:")
        assert "bears on this:\nhow many days?" in prompt and "Write at most " in prompt


def test_a_model_without_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BYTES, "chat_template", None)
    scribe = Scribe(lambda prompt: "Bread.")
    assert by_model(scribe, STORY, 30, chunk_tokens=4096) == "Bread."
    [prompt] = scribe.prompts
    assert prompt.startswith("Summarise") and prompt.endswith(STORY[-20:] + "\n\nSummary:\n")
    assert "bears on" not in prompt


def test_summaries_are_summarised_until_they_fit() -> None:
    scribe = Scribe(lambda prompt: "The market sold milk on this day. " * 2)
    condensed = by_model(scribe, STORY, 30, chunk_tokens=64)
    first_round = sum("On day" in prompt for prompt in scribe.prompts)
    assert condensed.endswith("day.") and len(scribe.prompts) > first_round


@pytest.mark.parametrize("max_tokens", [1, 5, 30])
def test_a_model_that_repeats_its_input_terminates(max_tokens: int) -> None:
    scribe = Scribe(lambda prompt: prompt[prompt.index("Text:\n") + 6 :] * 2)
    assert by_model(scribe, STORY, max_tokens, chunk_tokens=64)


def test_thinking_is_no_summary() -> None:
    scribe = Scribe(
        lambda prompt: "<think>Hm.</think>\n\nBread." if "day 3" in prompt else "<think>"
    )
    assert by_model(scribe, STORY, 200) == "Bread."


MODULE = """
LENGTH = 3

def head(text, focus, max_tokens):
    return f"{focus} {text}"[:max_tokens]

async def later(text, focus, max_tokens):
    return head(text, focus, max_tokens)

def too_long(text, focus, max_tokens):
    return text

def nothing(text, focus, max_tokens):
    return None
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "condensers_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "condensers_of_mine"


def call(condenser: Condenser, max_tokens: int) -> str:
    return asyncio.run(condenser("so it is", focus="why", max_tokens=max_tokens))


@pytest.mark.parametrize("name", ["head", "later"])
def test_custom_functions(user_module: str, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    condenser = load_condenser(f"{user_module}:{name}", tokenizer)
    assert call(condenser, 6) == "why so"
    packed = pickle.dumps(condenser)
    assert f"{user_module}:{name}".encode() in packed
    again = pickle.loads(packed)
    assert isinstance(again, CheckedCondenser) and call(again, 6) == "why so"


@pytest.mark.parametrize("name", ["too_long", "nothing"])
def test_a_custom_function_with_a_bad_result_is_an_error(
    user_module: str, name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    condenser = load_condenser(f"{user_module}:{name}", tokenizer)
    with refuses(DataError, "condenser"):
        call(condenser, 6)


@pytest.mark.parametrize(
    "name", ["keyword", "condensers_of_mine:", "nowhere.at.all:f", "condensers_of_mine:LENGTH"]
)
def test_names_that_cannot_be_loaded(user_module: str, name: str) -> None:
    with refuses(ConfigError, "env.condenser"):
        load_condenser(name, BYTES)


def message(role: str, content: str, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


SYSTEM = message("system", "You keep a diary.")
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": '{"q": "cat"}'}}],
}
HISTORY = [
    SYSTEM, message("user", "Tell me of the market. " * 5), message("assistant", STORY),
    message("user", "And the lighthouse?"), CALL, message("tool", "The keeper is old."),
    message("tool", "The lamp is new."), message("assistant", "It still stands."),
    message("user", "Who found the green bottle?"),
]  # fmt: skip


def condense(
    messages: list[Message],
    max_tokens: int,
    *,
    keep_last: int = 2,
    condenser: Condenser | None = None,
    tokenizer: PreTrainedTokenizerBase = BYTES,
) -> list[Message]:
    condensed = asyncio.run(
        condense_history(
            messages, condenser=condenser or KeywordCondenser(tokenizer=tokenizer),
            tokenizer=tokenizer, max_tokens=max_tokens, keep_last=keep_last,
        )
    )  # fmt: skip
    assert len(render_messages(tokenizer, condensed)) <= max_tokens
    return condensed


def test_a_history_within_the_budget_is_unchanged() -> None:
    whole = len(render_messages(BYTES, HISTORY))
    assert condense(HISTORY, whole) == HISTORY
    assert condense(HISTORY, whole - 1) != HISTORY


def test_middle_messages_become_one() -> None:
    condensed = condense(HISTORY, 150)
    assert [condensed[0], *condensed[2:]] == [SYSTEM, *HISTORY[-2:]]
    assert condensed[1]["role"] == "user"
    assert condensed[1]["content"].startswith(SUMMARY_PREFIX)
    assert "green bottle" in condensed[1]["content"]
    assert condense(condensed, 150) == condensed


@pytest.mark.parametrize(("keep_last", "stay"), [(0, 0), (1, 1), (3, 5), (4, 5), (5, 5), (6, 6)])
def test_results_stay_with_their_calls(keep_last: int, stay: int) -> None:
    condensed = condense(HISTORY, 260, keep_last=keep_last)
    assert condensed[2:] == HISTORY[len(HISTORY) - stay :]


@dataclass
class Echo:
    """Return the text as far as it fits; record the calls."""

    asked: list[tuple[str, str, int]] = field(default_factory=list)

    async def __call__(self, text: str, *, focus: str, max_tokens: int) -> str:
        self.asked.append((text, focus, max_tokens))
        return text[:max_tokens]


def test_the_condenser_sees_calls_and_results_and_the_question() -> None:
    echo = Echo()
    condense(HISTORY, 150, condenser=echo)
    [(text, focus, max_tokens)] = echo.asked
    assert focus == "Who found the green bottle?" and 0 < max_tokens < 150
    assert 'calls {"name": "find"' in text and "tool: The lamp is new." in text
    assert text.startswith("user: Tell me") and "diary" not in text


def test_a_summary_of_a_summary_has_one_prefix() -> None:
    echo = Echo()
    condensed = condense(HISTORY, 150, condenser=echo)
    more = [*condensed, message("assistant", STORY), message("user", "So?"), *HISTORY[-2:]]
    again = condense(more, 150, condenser=echo)
    assert len(again) == 4 and again[1]["content"].count(SUMMARY_PREFIX) == 1
    assert SUMMARY_PREFIX not in echo.asked[-1][0]


def test_a_condenser_that_takes_more_than_it_may_is_cut() -> None:
    class Talker:
        async def __call__(self, text: str, *, focus: str, max_tokens: int) -> str:
            return "The market sold milk. " * 200

    condensed = condense(HISTORY, 150, condenser=Talker())
    assert condensed[1]["content"].endswith("milk.")


def test_a_budget_below_the_fixed_messages_is_refused() -> None:
    with refuses(DataError, "max_tokens"):
        condense(HISTORY, 20)
    fixed = len(render_messages(BYTES, [SYSTEM, message("user", SUMMARY_PREFIX), *HISTORY[-2:]]))
    with refuses(DataError, "max_tokens"):
        condense(HISTORY, fixed - 1)
    assert condense(HISTORY, fixed)[1]["content"] == SUMMARY_PREFIX


def test_nothing_between_to_condense() -> None:
    with refuses(DataError, "max_tokens"):
        condense([*HISTORY[-2:], message("user", STORY)], 60, keep_last=3)


@given(st.lists(TEXT, min_size=1, max_size=8), st.integers(80, 200), st.integers(0, 3))
def test_a_history_keeps_to_its_budget(contents: list[str], max_tokens: int, keep: int) -> None:
    roles = ["user", "assistant"] * 4
    messages = [SYSTEM, *(message(r, c) for r, c in zip(roles, contents))]  # noqa: B905
    try:
        condensed = condense(messages, max_tokens, keep_last=keep)
    except DataError as error:
        assert error.field == "max_tokens"
    else:
        assert condensed[0] == SYSTEM
        assert keep == 0 or condensed[-keep:] == messages[1:][-keep:] or condensed == messages
