"""Sampled tokens stay as sampled, turns become segments, observations are the template's text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.chat import conversation as turns
from distill.chat.conversation import BEFORE, NO_TEXT, STOP, TURN, Conversation
from distill.chat.segments import SegmentBuilder
from distill.chat.template import chat_text, encode_chat, render_messages
from distill.engine import Sample
from distill.errors import ConfigError, DataError
from distill.types import Segment, StopReason, TokenArray
from tests.chat_templates import (
    ADD,
    FORMATS,
    ONLY_CALLS,
    TEMPLATES,
    call_of,
    chat_tokenizer,
    stop_of,
)
from tests.refusals import refuses
from tests.samples import ids, sample
from tests.tiny import token_id

QUESTION = {"role": "user", "content": "What is 1 + 2?"}
THANKS = {"role": "user", "content": "Thanks."}
CALL = call_of("qwen2.5")
# Templates that write another turn than was sampled: without its thinking, or in a channel.
REWRITES = ("qwq", "gpt-oss")


def result(parsed: turns.ParsedTurn, content: str = "3") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": parsed.calls[0].id, "name": "add", "content": content}


def spoken(tokenizer: PreTrainedTokenizerBase, text: str) -> Sample:
    return sample(*encode_chat(tokenizer, text).tolist())


class Episode:
    """Conversation driven like an environment's, with all observed and sampled tokens."""

    def __init__(self, family: str, *messages: dict[str, Any], **settings: Any) -> None:
        self.tokenizer = chat_tokenizer(family)
        self.stop = stop_of(family)
        tools = settings.pop("tools", [ADD] if family in FORMATS else [])
        self.talk = Conversation(self.tokenizer, messages or [QUESTION], tools=tools, **settings)
        self.tools = tools
        self.turns: list[tuple[TokenArray, Sample]] = []

    def says(self, text: str, *, stop: str | None = None) -> turns.ParsedTurn:
        return self.samples(spoken(self.tokenizer, text + (self.stop if stop is None else stop)))

    def samples(self, taken: Sample) -> turns.ParsedTurn:
        self.turns.append((self.talk.observation_T, taken))
        return self.talk.add_sample(taken)

    def hears(self, *messages: dict[str, Any]) -> bool:
        """True if the next observation extends the sequence; checks that it is right."""
        observation_T, taken = self.turns[-1]
        breaks = len(self.talk.prefix_breaks)
        self.talk.add_messages(messages)
        extended = len(self.talk.prefix_breaks) == breaks
        served = chat_text(
            self.tokenizer, self.talk.messages, tools=self.tools or None, add_generation_prompt=True
        )
        seen_T = np.concatenate([observation_T, taken.tokens_T])
        next_T = self.talk.observation_T
        assert next_T.dtype == np.int32 and self.shown(next_T) == served
        if extended:
            assert next_T[: len(seen_T)].tolist() == seen_T.tolist()
        else:
            assert "\ufffd" in self.shown(taken.tokens_T) or not served.startswith(
                self.shown(seen_T)
            )
            assert next_T.tolist() == encode_chat(self.tokenizer, served).tolist()
        return extended

    def shown(self, tokens_T: TokenArray) -> str:
        return str(self.tokenizer.decode(tokens_T.tolist(), skip_special_tokens=False))

    def segments(self) -> tuple[Segment, ...]:
        return build(*self.turns)


def parted(episode: Episode) -> list[str]:
    return [found.reason for found in episode.talk.prefix_breaks]


def trained(episode: Episode) -> list[list[str]]:
    """Text of each trained span, by segment."""
    texts = []
    for segment in episode.segments():
        edges = np.flatnonzero(np.diff(segment.action_mask_T)) + 1
        spans = np.split(segment.tokens_T, edges)
        texts.append([episode.shown(span) for span in spans[1::2]])
    return texts


@pytest.mark.parametrize("family", FORMATS)
def test_a_tool_loop(family: str) -> None:
    """Only templates that drop or rewrite earlier turns open a new segment."""
    episode = Episode(family)
    thought = "hm\n</think>\n\n" if family in ("qwq", "opens thinking") else ""
    call = thought + call_of(family)
    parsed = episode.says(call)
    assert [call.name for call in parsed.calls] == ["add"] and not parsed.malformed
    extended = episode.hears(result(parsed))
    assert extended == (family != "qwq")
    episode.says(f"{thought}It is 3.")
    assert episode.hears(THANKS) == (family not in REWRITES)
    roles = [message["role"] for message in episode.talk.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    assert len(episode.segments()) == (2 if family == "qwq" else 1)


def test_thinking_is_kept_in_the_tool_loop_and_goes_with_the_next_question() -> None:
    episode = Episode("qwen3")
    first = f"<think>\nadd\n</think>\n\n{CALL}"
    assert episode.hears(result(episode.says(first)))
    second = "<think>\n3\n</think>\n\nIt is 3."
    episode.says(second)
    assert not episode.hears(THANKS)
    assert parted(episode) == [BEFORE] and "</think>" not in episode.shown(
        episode.talk.observation_T
    )
    episode.says("You are welcome.")
    stop = episode.stop
    assert trained(episode) == [[first + stop, second + stop], [f"You are welcome.{stop}"]]
    [found] = episode.talk.prefix_breaks
    assert "<think>\nadd" in found.seen and len(found.served) <= 120


@pytest.mark.parametrize("text", ["hm</think>It is 3.", "</think>", "<think>", "a</think></think>"])
def test_an_orphan_of_the_thinking_parts(text: str) -> None:
    episode = Episode("qwen3")
    parsed = episode.says(f"{text}{CALL}")
    heard = result(parsed) if parsed.calls else THANKS
    extended = episode.hears(heard)
    assert extended == (text == "<think>") and parsed.content.startswith(text)


def test_a_prompt_that_opens_the_thinking_is_part_of_the_turn() -> None:
    episode = Episode("opens thinking")
    parsed = episode.says(f"{CALL} maybe")
    assert parsed.calls == () and parsed.content == f"{CALL} maybe"
    assert episode.talk.messages[-1]["content"] == f"<think>\n{CALL} maybe"
    assert episode.hears(THANKS)


def test_a_template_that_trims() -> None:
    episode = Episode("trims")
    episode.says("yes")
    assert episode.hears(THANKS)
    episode.says("yes ")
    assert not episode.hears(THANKS)
    episode.says("yes")
    assert episode.hears(THANKS)
    assert parted(episode) == [TURN]
    assert trained(episode) == [["yes<|im_end|>", "yes <|im_end|>"], ["yes<|im_end|>"]]


def test_a_stop_token_that_the_template_does_not_write() -> None:
    episode = Episode("qwen2.5")
    assert episode.says("Yes.", stop="<|endoftext|>").content == "Yes."
    assert not episode.hears(THANKS) and parted(episode) == [STOP]


def test_bytes_that_are_no_text() -> None:
    episode = Episode("qwen2.5")
    tokenizer = episode.tokenizer
    first = token_id(tokenizer, "\u00e2")
    parsed = episode.samples(sample(first, token_id(tokenizer, episode.stop)))
    assert parsed.content == "\ufffd"
    assert not episode.hears(THANKS) and parted(episode) == [NO_TEXT]


def test_calls_that_the_template_refuses_are_plain_text() -> None:
    episode = Episode("llama")
    text = ";".join([call_of("llama")] * 2)
    parsed = episode.says(text)
    assert len(parsed.calls) == 2 and "tool_calls" in episode.talk.messages[-1]
    assert episode.hears(result(parsed), result(parsed))
    assert episode.talk.messages[1] == {"role": "assistant", "content": text}


def test_messages_that_the_template_refuses_are_not_heard() -> None:
    episode = Episode("gemma")
    episode.says("Yes.")
    before = episode.talk.messages
    for refused in ({"role": "tool", "content": "3"}, {"role": "user", "content": "\ud800"}):
        with pytest.raises(DataError):
            episode.talk.add_messages([refused])
    with refuses(DataError, "model.chat_template"):
        episode.talk.replace([{"role": "system", "content": "Be kind."}])
    assert episode.talk.messages == before and episode.talk.prefix_breaks == ()
    assert episode.hears(THANKS)


def test_a_condensed_history_is_rendered_again() -> None:
    episode = Episode("qwen2.5")
    episode.says("Yes.")
    episode.hears(THANKS)
    summary = {"role": "user", "content": "We spoke of sums."}
    episode.talk.replace([summary])
    rendered_T = render_messages(episode.tokenizer, [summary], tools=[ADD])
    assert episode.talk.observation_T.tolist() == rendered_T.tolist()
    assert episode.talk.prefix_breaks == () and episode.talk.messages == [summary]
    episode.says("We did.")
    assert episode.hears(THANKS) and len(episode.segments()) == 2


def test_tools_need_a_template_for_them() -> None:
    with refuses(ConfigError, "model.chat_template"):
        Episode("gemma", tools=[ADD])
    episode = Episode("gemma")
    assert episode.says(CALL) == turns.ParsedTurn(text=CALL, content=CALL)
    assert episode.hears(THANKS)


def spacing_tokenizer(assistant: str) -> PreTrainedTokenizerBase:
    """Tokenizer like SentencePiece's: a text that is encoded alone starts with a space."""
    tokens = ["<unk>", "\u2581", *"abcdefgh:"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_tokens([AddedToken("<e>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + assistant + "{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("sampled", [("c", "d", "<e>"), ("c", "d")])
def test_the_following_text_is_encoded_in_its_context(sampled: tuple[str, ...]) -> None:
    tokenizer = spacing_tokenizer(":{{ m.content }}<e>")
    talk = Conversation(tokenizer, [{"role": "user", "content": "ab"}])
    reason = StopReason.EOS if "<e>" in sampled else StopReason.LENGTH
    ids = [token_id(tokenizer, token) for token in sampled]
    talk.add_sample(replace(sample(*ids), stop_reason=reason))
    talk.add_messages([{"role": "user", "content": "ef"}])
    tokens = ["\u2581", *"ab:", *"cd", "<e>", *"ef:"]
    assert tokenizer.convert_ids_to_tokens(talk.observation_T.tolist()) == tokens
    assert talk.prefix_breaks == ()


def test_text_that_depends_on_its_context_is_encoded_after_other_text() -> None:
    tokenizer = spacing_tokenizer(":{{ m.content }}")
    talk = Conversation(tokenizer, [{"role": "user", "content": "ab"}])
    ids = [token_id(tokenizer, token) for token in "cd"]
    talk.add_sample(replace(sample(*ids), stop_reason=StopReason.LENGTH))
    talk.add_messages([{"role": "user", "content": "ef"}])
    assert not talk.prefix_breaks
    assert tokenizer.decode(talk.observation_T.tolist()) == "ab:cdef:"


_TEXTS = st.sampled_from(["Yes.", " no ", "<think>\nhm\n</think>\n\nSo.", "x</think>y", "\n", ""])
_HEARD = st.sampled_from(["Go on.", "  ", "<think>", "caf\u00e9 \U0001f40c", "e\u0301"])


@st.composite
def turns_of(draw: st.DrawFn, family: str) -> tuple[Sample, str]:
    """Turn of text, calls and random ids, with or without its end, and the next message."""
    tokenizer = chat_tokenizer(family)
    call = call_of(family)
    texts = draw(st.lists(_TEXTS | st.sampled_from([call, call[:20]]), max_size=3))
    ids = encode_chat(tokenizer, "".join(texts)).tolist()
    ids += draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=4) | st.just([]))
    ended = draw(st.booleans()) or not ids
    if ended:
        ids.append(token_id(tokenizer, stop_of(family)))
    taken = sample(*ids)
    return (taken if ended else replace(taken, stop_reason=StopReason.LENGTH)), draw(_HEARD)


@pytest.mark.parametrize("family", [name for name in TEMPLATES if name not in ONLY_CALLS])
@settings(max_examples=12)
@given(data=st.data())
def test_sampled_tokens_are_once_in_the_context_as_seen(family: str, data: st.DataObject) -> None:
    """For any samples. `Episode.hears` checks each observation against the template's text."""
    episode = Episode(family)
    drawn = data.draw(st.lists(turns_of(family), min_size=1, max_size=4))
    for turn, (taken, heard) in enumerate(drawn):
        # no two tokens have the same log-prob
        parsed = episode.samples(replace(taken, logprobs_T=taken.logprobs_T - 1000 * turn))
        answers: Sequence[dict[str, Any]] = [result(parsed, heard)] if parsed.calls else ()
        episode.hears(*answers or [{"role": "user", "content": heard}])
    chains = episode.segments()
    kept = [float(p) for chain in chains for p in chain.behaviour_logprobs_T[chain.action_mask_T]]
    assert kept == [float(p) for _, taken in episode.turns for p in taken.logprobs_T]
    for observation_T, taken in episode.turns:
        [chain] = [c for c in chains if taken.logprobs_T[0] in c.behaviour_logprobs_T]
        start, stop = len(observation_T), len(observation_T) + len(taken.tokens_T)
        assert chain.behaviour_logprobs_T[start] == taken.logprobs_T[0]
        assert chain.tokens_T[:start].tolist() == observation_T.tolist()
        assert chain.tokens_T[start:stop].tolist() == taken.tokens_T.tolist()
        assert chain.action_mask_T[start:stop].all()


def build(*turns: tuple[np.ndarray, Sample]) -> tuple[Segment, ...]:
    builder = SegmentBuilder(0.7)
    for observation_T, taken in turns:
        builder.append(observation_T, taken)
    return builder.build()


def test_a_new_segment_starts_at_the_break() -> None:
    made = build((ids(5), sample(7)), (ids(9), sample(8)), (ids(9, 8, 3), sample(2)))
    assert [segment.tokens_T.tolist() for segment in made] == [[5, 7], [9, 8, 3, 2]]


def test_experts_are_those_of_the_pass_that_went_on_from_the_token() -> None:
    def routed(sampled: Sample, *experts: int) -> Sample:
        return replace(sampled, experts_NLK=np.array(experts, np.uint8).reshape(-1, 1, 1))

    first, second = build(
        (ids(5, 6), routed(sample(7, 1), 10, 11, 12)),
        # Of the first turn's four tokens the last was not through the model yet.
        (ids(5, 6, 7, 1, 8), routed(sample(4, 3), 13, 14, 15)),
        (ids(9), routed(sample(2), 16)),
    )
    assert first.experts_TLK is not None and second.experts_TLK is not None
    assert first.experts_TLK.ravel().tolist() == [10, 11, 12, 13, 14, 15, 255]
    assert second.experts_TLK.ravel().tolist() == [16, 255]
    [unknown] = build((ids(5, 6), sample(7)), (ids(5, 6, 7), routed(sample(8), 10)))
    assert unknown.experts_TLK is not None
    assert unknown.experts_TLK.ravel().tolist() == [255, 255, 10, 255]
    assert build((ids(5), sample(7)))[0].experts_TLK is None


def test_nothing_trained_is_refused() -> None:
    with pytest.raises(DataError):
        build()
    builder = SegmentBuilder(0.7)
    builder.append(ids(5), sample(7), trained=False)
    with pytest.raises(DataError):
        builder.build()


def test_a_turn_that_is_not_trained_is_context() -> None:
    """Also of its own segment; a segment without trained tokens is left out."""
    builder = SegmentBuilder(0.7)
    builder.append(ids(5), sample(7, 8), row(1, 2), trained=False)
    builder.append(ids(5, 7, 8, 3), sample(6), row(4))
    builder.append(ids(9), sample(7), trained=False)
    [made] = builder.build()
    assert made.tokens_T.tolist() == [5, 7, 8, 3, 6]
    assert made.action_mask_T.tolist() == [False] * 4 + [True]
    assert made.versions_T.tolist()[:4] == [-1] * 4
    assert made.behaviour_logprobs_T.tolist()[:4] == [0] * 4
    assert made.bonuses_T is not None and made.bonuses_T.tolist() == [0, 0, 0, 0, 4]


def row(*bonuses: float) -> np.ndarray:
    return np.array(bonuses, np.float32)


def outcome(made: Segment) -> tuple[list[int], int] | None:
    if made.teacher_context_T is None:
        assert made.teacher_replaces == 0
        return None
    return made.teacher_context_T.tolist(), made.teacher_replaces


def test_the_privileged_context_is_on_every_segment_that_begins_with_the_prompt() -> None:
    """And on no other: observed tokens count, not sampled ones."""
    builder = SegmentBuilder(0.7, ids(3, 4, 2))
    for observation in [ids(5, 6), ids(5, 6, 7, 8), ids(5, 6, 1), ids(5), ids(9, 5, 6)]:
        builder.append(observation, sample(6 if len(observation) == 1 else 7))
    whole, cut, *others = builder.build()
    assert outcome(whole) == outcome(cut) == ([3, 4, 2], 2)
    assert [made.tokens_T.tolist() for made in others] == [[5, 6], [9, 5, 6, 7]]
    assert [outcome(made) for made in others] == [None, None]
    [plain] = build((ids(5), sample(7)))
    assert outcome(plain) is None


def test_an_untrained_first_segment_defines_the_prompt() -> None:
    builder = SegmentBuilder(0.7, ids(3))
    builder.append(ids(5, 6), sample(7), trained=False)
    builder.append(ids(5, 6, 1), sample(8))
    builder.append(ids(4), sample(8))
    assert [outcome(made) for made in builder.build()] == [([3], 2), None]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=4),  # newly observed
            st.lists(st.integers(0, 9), min_size=1, max_size=4),  # sampled
            st.booleans(),  # whether the context starts afresh
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_sampled_token_is_kept_once_with_its_context(turns: list) -> None:
    builder, context, expected = SegmentBuilder(0.7), [], []
    for observed, sampled, afresh in turns:
        context = ([] if afresh else context) + observed
        builder.append(ids(*context), sample(*sampled))
        for token in sampled:
            expected.append((tuple(context), token))
            context = [*context, token]
    made = []
    for segment in builder.build():
        for t in np.flatnonzero(segment.action_mask_T):
            made.append((tuple(segment.tokens_T[:t].tolist()), int(segment.tokens_T[t])))
    assert sorted(made) == sorted(expected)
