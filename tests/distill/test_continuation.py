"""Text as the student's tokens: prompts with completions, and answers with their end."""

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.chat.continuation import EncodedChat, added_text
from distill.chat.template import encode_chat, render_messages, render_text
from distill.data.example_encoder import ExampleEncoder
from distill.data.prompts import Prompt
from distill.data.written_answers import written_sample
from distill.errors import DataError
from distill.tokenizer import load_tokenizer
from distill.types import StopReason
from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer, token_id

_BAR = "\u2581"
_TEXTS = ["the answer is 4 . def f(x):\n    return x # 12 + 34 = 46\n\n", "a b  c\t4é"] * 20
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WORDS = ["the", "answer", "return", "def", "is", "12", "\n\n"]


def _sentencepiece_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace(_BAR, " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip


def _trained(pre: pre_tokenizers.PreTokenizer, decoder: decoders.Decoder, **trained) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre, decoder
    made.train_from_iterator(
        _TEXTS, trainers.BpeTrainer(vocab_size=400, show_progress=False, **trained)
    )
    return made


def _byte_level(add_prefix_space: bool) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pre = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return _trained(pre, decoders.ByteLevel(), initial_alphabet=alphabet)


def _pieces() -> dict[str, int]:
    """Bytes, characters, and words with and without a leading space."""
    chars = sorted(set("".join(_TEXTS).replace(" ", _BAR)))
    words = [*_WORDS, *(_BAR + word for word in _WORDS), _BAR * 2]
    return {piece: i for i, piece in enumerate(dict.fromkeys(["<unk>", *_BYTES, *chars, *words]))}


def _bpe() -> Tokenizer:
    vocab = _pieces()
    merges = [("i", "s"), ("1", "2"), (_BAR, _BAR), ("\n", "\n")]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges) if a + b not in vocab}
    return Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )


def _metaspace(model: Tokenizer, scheme: str, split: bool = True) -> Tokenizer:
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    model.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme, split=split)]
    )
    return model


def _prepend() -> Tokenizer:
    made = _bpe()
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_BAR), normalizers.Replace(" ", _BAR)]
    )
    made.decoder = _sentencepiece_decoder()
    return made


def _replace_only() -> Tokenizer:
    made = _bpe()
    made.normalizer = normalizers.Replace(" ", _BAR)
    made.decoder = decoders.Sequence(
        [decoders.Replace(_BAR, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def _unigram() -> Tokenizer:
    pieces = [(piece, -float(i % 7) - 1) for piece, i in _pieces().items()]
    return Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))


def _word_piece() -> Tokenizer:
    chars = sorted(set("".join(_TEXTS).split() and "".join("".join(_TEXTS).split())))
    words = ["[UNK]", *chars, *("##" + each for each in chars), *_WORDS]
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return made


def _lossy() -> Tokenizer:
    made = _byte_level(False)
    made.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.NFKC(), normalizers.Replace("  ", " ")]
    )
    return made


_EXACT = {
    "byte level": lambda: _byte_level(False),
    "byte level, space before": lambda: _byte_level(True),
    "metaspace first": lambda: _metaspace(_bpe(), "first"),
    "metaspace always": lambda: _metaspace(_bpe(), "always"),
    "metaspace never": lambda: _metaspace(_bpe(), "never"),
    "metaspace first, unsplit": lambda: _metaspace(_bpe(), "first", split=False),
    "prepend": _prepend,
    "replace": _replace_only,
    "unigram first": lambda: _metaspace(_unigram(), "first"),
    "unigram always": lambda: _metaspace(_unigram(), "always"),
}
_LOSSY = {"word piece": _word_piece, "lossy": _lossy}


@cache
def _encoder(name: str, bos: bool = True, eos: bool = False) -> ExampleEncoder:
    made = (_EXACT | _LOSSY)[name]()
    marks = ["<s>", "</s>", "<|user|>"]
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    ids = [(mark, made.token_to_id(mark)) for mark in marks[:2]]
    single = f"{'<s> ' * bos}$A{' </s>' * eos}"
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    return ExampleEncoder(
        tokenizer=tokenizer, vocab_size=len(tokenizer), max_length=10_000,
        stop_ids=[token_id(tokenizer, "</s>")],
    )  # fmt: skip


def _decoded(encoder: ExampleEncoder, ids: list[int]) -> str:
    return str(
        encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


_WRITTEN = st.text("ab4 \n\t.:=(é日ﬁA", min_size=1, max_size=12) | st.lists(
    st.sampled_from([*_WORDS, " ", "  ", "    ", "\n", "4", "é", "<|user|>", "🙂"]),
    min_size=1,
    max_size=6,
).map("".join)


@pytest.mark.parametrize("name", [*_EXACT, *_LOSSY])
@settings(max_examples=12)
@given(prompt=_WRITTEN, completion=_WRITTEN)
def test_the_trained_text_is_the_written_one(name: str, prompt: str, completion: str) -> None:
    encoder = _encoder(name)
    try:
        chain = encoder.completion(prompt, completion)
    except DataError:
        assert name in _LOSSY, "this tokenizer can write any text"
        return
    prompt_T = render_text(encoder.tokenizer, prompt)
    assert chain.tokens_T[~chain.loss_mask_T].tolist() == prompt_T.tolist()
    whole = _decoded(encoder, chain.tokens_T.tolist()[:-1])
    assert whole == _decoded(encoder, prompt_T.tolist()) + completion


_MARKS = [
    AddedToken("<u>", normalized=False),
    AddedToken("<u>4", normalized=False),
    AddedToken("<r>", normalized=False, rstrip=True),
    AddedToken("<l>", normalized=False, lstrip=True),
    AddedToken("<w>", normalized=False, single_word=True),
    AddedToken("<n>", normalized=True),
]
_CHATS = st.lists(
    st.sampled_from([str(mark) for mark in _MARKS] + ["4", " ", "\n", "the answer", " is", "é"]),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", [*_EXACT, *_LOSSY])
@settings(max_examples=40)
@given(begin=_CHATS, rest=_CHATS, other=_CHATS)
def test_a_chat_that_begins_like_another_has_the_tokens_of_its_own_text(
    name: str, begin: str, rest: str, other: str
) -> None:
    tokenizer = _with_marks(name)
    chat = EncodedChat.of(tokenizer, begin + rest)
    assert chat.encode(begin + other).tolist() == encode_chat(tokenizer, begin + other).tolist()


@cache
def _with_marks(name: str) -> PreTrainedTokenizerBase:
    made = (_EXACT | _LOSSY)[name]()
    made.add_tokens(_MARKS)
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("name", [name for name in _EXACT if name != "byte level, space before"])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("Question: 2 + 2? Answer:", " 4"),
        ("Answer:\n", "4"),
        ("def f(x):\n", "    return x"),
        ("the answer is ", "12"),
        ("<|user|>", "the answer"),
        ("a", "b"),
    ],
)
def test_no_space_is_inserted_in_between(name: str, prompt: str, completion: str) -> None:
    encoder = _encoder(name)
    chain = encoder.completion(prompt, completion)
    said_T = chain.tokens_T[chain.loss_mask_T][:-1]
    before_T = chain.tokens_T[1 : len(chain.tokens_T) - len(said_T) - 1]
    assert _decoded(encoder, [*before_T, *said_T]).lstrip(" ").endswith(prompt + completion)


@pytest.mark.parametrize("name", [*_EXACT, *_LOSSY])
@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_a_prompt_has_one_bos_and_no_eos(name: str, bos: bool, eos: bool) -> None:
    encoder = _encoder(name, bos, eos)
    tokenizer = encoder.tokenizer
    for text in ("the answer", "<s>the answer", "<s><|user|>the answer"):
        ids = render_text(tokenizer, text).tolist()
        assert ids.count(tokenizer.bos_token_id) == max(int(bos), text.count("<s>"))
        assert tokenizer.eos_token_id not in ids
    row = encoder.completion("the answer is", " 12")
    assert tokenizer.eos_token_id not in row.tokens_T[~row.loss_mask_T]
    assert np.count_nonzero(row.tokens_T == tokenizer.eos_token_id) == 1


def test_text_that_a_tokenizer_cannot_encode_is_refused() -> None:
    with pytest.raises(DataError):
        _encoder("lossy").completion("the answer:", " It is Four")


@pytest.mark.parametrize("name", _EXACT)
@pytest.mark.parametrize("prompt", ["日本語日本語", "🙂🙂🙂🙂", "answer: 日本🙂"])
@pytest.mark.parametrize("text", ["日é", "\n4", "🙂"])
def test_characters_of_several_tokens_are_continued(name: str, prompt: str, text: str) -> None:
    encoder = _encoder(name)
    chain = encoder.completion(prompt, text)
    said_T = chain.tokens_T[chain.loss_mask_T][:-1]
    prompt_T = chain.tokens_T[~chain.loss_mask_T]
    assert added_text(encoder.tokenizer, prompt_T, said_T) == text
    assert _decoded(encoder, chain.tokens_T.tolist()[:-1]).endswith(prompt + text)


LONG = 1 << 20
CHAT = [{"role": "user", "content": "hi"}]
# Writes a stop token after each turn, and a line behind it; one that opens a turn with thoughts.
ENDS = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
THINKS = ENDS.replace(
    "[{{ m.role[0] }}]", "[{{ m.role[0] }}]{% if m.role == 'assistant' %}?!{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    save_tokenizer(tmp_path)
    return load_tokenizer(str(tmp_path))


def encoder_of(
    tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int] = (EOS,), template: str = ""
) -> ExampleEncoder:
    if template:
        tokenizer.chat_template = template
    return ExampleEncoder(
        tokenizer=tokenizer, vocab_size=VOCAB_SIZE, max_length=LONG, stop_ids=stop_ids
    )


def plain(tokenizer: PreTrainedTokenizerBase) -> Prompt:
    return Prompt(tokens_T=render_text(tokenizer, "1 + 1 ="), answer=None, line=1, text="1 + 1 =")


def chat(tokenizer: PreTrainedTokenizerBase) -> Prompt:
    tokens_T = render_messages(tokenizer, CHAT)
    return Prompt(tokens_T=tokens_T, answer=None, line=1, messages=CHAT)


def written_text(
    encoder: ExampleEncoder, prompt: Prompt, text: str, *, ended: bool, limit: int = LONG
) -> tuple[str, StopReason]:
    """The sample's text with stop tokens, and its stop reason."""
    sample = written_sample(encoder, prompt, text, ended=ended, max_new_tokens=limit)
    assert len(sample.tokens_T) == len(sample.logprobs_T) == len(sample.versions_T)
    assert sample.tokens_T.dtype == np.int32 and not sample.logprobs_T.any()
    return str(encoder.tokenizer.decode(sample.tokens_T.tolist())), sample.stop_reason


@pytest.mark.parametrize(
    ("text", "ended", "limit", "expected", "stop"),
    [
        ("two", True, LONG, "two<eos>", StopReason.EOS),
        ("two", False, LONG, "tw", StopReason.LENGTH),  # "two" may be the start of a longer token
        ("two", True, 4, "two<eos>", StopReason.EOS),  # it just fits, as a sample's stop token does
        ("two", True, 3, "two", StopReason.LENGTH),  # one more token would be the stop
        ("two", False, 2, "tw", StopReason.LENGTH),
        ("long" * 4000, True, 7, "longlon", StopReason.LENGTH),
        ("long" * 4000, True, LONG, "long" * 4000 + "<eos>", StopReason.EOS),
        ("t", False, LONG, "t", StopReason.LENGTH),  # all there is
        ("two\ufffd\ufffd", False, LONG, "tw", StopReason.LENGTH),  # cut within a character
        ("two<eos>", True, LONG, "two<eos>", StopReason.EOS),  # a server that lets it through
        ("two<eos>rest", True, LONG, "two<eos>", StopReason.EOS),
        ("two<eos>rest", False, LONG, "two<eos>", StopReason.EOS),
        (" two\n", True, LONG, " two\n<eos>", StopReason.EOS),
    ],
)
def test_where_an_answer_ends(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    ended: bool,
    limit: int,
    expected: str,
    stop: StopReason,
) -> None:
    encoder = encoder_of(tokenizer)
    assert written_text(encoder, plain(tokenizer), text, ended=ended, limit=limit) == (
        expected,
        stop,
    )


@pytest.mark.parametrize("template", [ENDS, ""])
def test_a_begun_answer_is_continued(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    encoder = encoder_of(tokenizer, template=template)
    messages = [*CHAT, {"role": "assistant", "content": "it is "}]
    tokens_T = render_messages(tokenizer, messages)
    prompt = Prompt(tokens_T=tokens_T, answer=None, line=1, messages=messages)
    assert written_text(encoder, prompt, "two", ended=True) == ("two<eos>", StopReason.EOS)
    assert written_text(encoder, prompt, "two", ended=False) == ("tw", StopReason.LENGTH)


@pytest.mark.parametrize(
    ("template", "text", "ended", "expected", "stop"),
    [
        (ENDS, "two", True, "two<eos>", StopReason.EOS),
        (ENDS, "two", False, "tw", StopReason.LENGTH),
        (ENDS, "0", False, "0", StopReason.LENGTH),
        (ENDS, "10", False, "1", StopReason.LENGTH),  # as it ends as the probe does
        (THINKS, "two", True, "?!two<eos>", StopReason.EOS),  # as the template opens a turn
        (THINKS, "two", False, "?!tw", StopReason.LENGTH),
        ("", "two", True, "two\n<eos>", StopReason.EOS),  # a template that writes no stop token
        ("", "two", False, "tw", StopReason.LENGTH),
    ],
)
def test_a_turn_is_written_by_the_student_s_template(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    text: str,
    ended: bool,
    expected: str,
    stop: StopReason,
) -> None:
    encoder = encoder_of(tokenizer, template=template)
    assert written_text(encoder, chat(tokenizer), text, ended=ended) == (expected, stop)


def test_the_end_is_the_run_s_and_not_the_tokenizer_s(tokenizer: PreTrainedTokenizerBase) -> None:
    """A student whose config names another stop token than its tokenizer, and pads with its EOS."""
    other, pad = token_id(tokenizer, "z"), token_id(tokenizer, "<pad>")
    for stops in ((other,), (pad, other)):
        prompt = plain(tokenizer)
        text, stop = written_text(encoder_of(tokenizer, stops), prompt, "two", ended=True)
        assert text == "two" + str(tokenizer.decode([min(stops)])) and stop is StopReason.EOS
        text, stop = written_text(encoder_of(tokenizer, stops), prompt, "two", ended=False)
        assert text == "tw" and stop is StopReason.LENGTH
        # Its own EOS is a token like any other there.
        text, stop = written_text(encoder_of(tokenizer, stops), prompt, "a<eos>bz", ended=True)
        assert text == "a<eos>bz" and stop is StopReason.EOS
    text, _ = written_text(encoder_of(tokenizer, (EOS, other)), plain(tokenizer), "two", ended=True)
    assert text == "two<eos>", "its own, where it is one of them"


def test_text_without_valid_tokens_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = plain(tokenizer)
    with pytest.raises(DataError):
        written_text(encoder_of(tokenizer), prompt, "", ended=False)
    small = replace(encoder_of(tokenizer), vocab_size=20)
    with pytest.raises(DataError):
        written_text(small, prompt, "two", ended=True)
