"""Only the assistant's turns are trained, after the context of a served model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.data.assistant_masks import MaskedTokens, conversation_chains
from distill.errors import DataError
from distill.tokenizer import load_tokenizer
from tests.refusals import refuses
from tests.tiny import EOS, save_tokenizer, token_id

CHATML = (
    "{% if tools %}<s>tools{% for tool in tools %} {{ tool.function.name }}{% endfor %}<e>\n"
    "{% endif %}{% for m in messages %}<s>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</call>{% endfor %}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<e>{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# As Qwen3's: the thinking of a turn goes once another user message follows it.
FORGETFUL = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}\n{% if loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# Opens the thinking for the model, and writes earlier turns without it.
OPENS_THINKING = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n<think>{% endif %}"
)
# As DeepSeek's: the prompt opens the thinking, and no turn is written with it.
DROPS_THINKING = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}"
)


@pytest.fixture
def chatty(tmp_path: Path) -> PreTrainedTokenizerBase:
    """Tokenizer of characters, with `<s>` and `<e>` as special tokens around each message."""
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.add_tokens(["<s>", "<e>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    return tokenizer


def say(*contents: str) -> list[dict]:
    """Turns of user and assistant."""
    return [
        {"role": "assistant" if i % 2 else "user", "content": content}
        for i, content in enumerate(contents)
    ]


def chains_of(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings
) -> list[MaskedTokens]:
    stop_ids = {EOS, token_id(tokenizer, "<e>")}
    return conversation_chains(tokenizer, messages, stop_ids=stop_ids, **settings)


def shown(tokenizer: PreTrainedTokenizerBase, chains: list[MaskedTokens]) -> list[str]:
    """Text of each sequence, with its trained spans in [[ ]]."""
    texts = []
    for chain in chains:
        edges = np.flatnonzero(np.diff(chain.loss_mask_T, append=False)) + 1
        parts = [str(tokenizer.decode(part.tolist())) for part in np.split(chain.tokens_T, edges)]
        texts.append("".join(f"[[{part}]]" if i % 2 else part for i, part in enumerate(parts)))
    return texts


def test_every_assistant_turn_and_its_end_are_trained(chatty: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "be kind"}, *say("hi", "ho", "and?", "no")]
    [chain] = chains_of(chatty, messages)
    assert shown(chatty, [chain]) == [
        "<s>system\nbe kind<e>\n<s>user\nhi<e>\n<s>assistant\n[[ho<e>]]\n<s>user\nand?<e>\n"
        "<s>assistant\n[[no<e>]]\n"
    ]
    assert chain.tokens_T.dtype == np.int32
    whole = chatty.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert chain.tokens_T.tolist() == whole
    [ended] = chains_of(chatty, say("hi", "ho<e>"))
    assert "[[ho<e>]]" in shown(chatty, [ended])[0]


def test_a_template_with_generation_marks(chatty: PreTrainedTokenizerBase) -> None:
    chatty.chat_template = GENERATION
    messages = say("hi", "ho", "and?", "no")
    [chain] = chains_of(chatty, messages)
    marked: Any = chatty.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert chain.tokens_T.tolist() == marked["input_ids"]
    assert chain.loss_mask_T.tolist() == [bool(mask) for mask in marked["assistant_masks"]]


def test_a_text_is_encoded_once_however_many_turns_follow(
    chatty: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = 0, type(chatty).__call__

    def counting(self: PreTrainedTokenizerBase, text: str, **options: Any) -> Any:
        nonlocal encoded
        encoded += len(text)
        return encode(self, text, **options)

    monkeypatch.setattr(type(chatty), "__call__", counting)
    [chain] = chains_of(chatty, say(*["some words"] * 60))
    assert encoded < 2 * len(chain.tokens_T)  # a token is a character or a mark


def test_dropped_thinking_is_trained_where_it_is_seen(chatty: PreTrainedTokenizerBase) -> None:
    chatty.chat_template = FORGETFUL
    messages = say("hi", "<think>hm</think>ho", "and?", "<think>er</think>no")
    assert shown(chatty, chains_of(chatty, messages)) == [
        "<s>user\nhi<e>\n<s>assistant\n[[<think>hm</think>ho<e>]]\n",
        "<s>user\nhi<e>\n<s>assistant\nho<e>\n<s>user\nand?<e>\n"
        "<s>assistant\n[[<think>er</think>no<e>]]\n",
    ]


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
def test_calls_are_trained_not_results(chatty: PreTrainedTokenizerBase, arguments: object) -> None:
    """OpenAI's format has the arguments as JSON text; templates want the object."""
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert shown(chatty, chains_of(chatty, messages, tools=tools)) == [
        "<s>tools add<e>\n<s>user\nhi<e>\n"
        '<s>assistant\n[[<call>add{"x": 1}</call><e>]]\n<s>tool\n2<e>\n<s>assistant\n[[two<e>]]\n'
    ]


def test_a_token_across_the_boundary_is_cut_as_generation_would_cut_it() -> None:
    """`:` and ` yes` join to `: yes` when encoded at once; a served model sees `:` and goes on."""
    ids = {"<unk>": 0, "<eos>": 1, ":": 2, " ": 3, "y": 4, ": ": 5, "u": 6, "a": 7}
    backend = Tokenizer(models.BPE(ids, [(":", " ")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    [chain] = conversation_chains(tokenizer, say("y", " y"), stop_ids=())
    assert tokenizer("u:ya: y")["input_ids"] == [6, 2, 4, 7, 5, 4]
    assert chain.tokens_T.tolist() == [6, 2, 4, 7, 2, 3, 4]
    assert chain.loss_mask_T.tolist() == [False] * 5 + [True] * 2


# As GLM's: a turn ends with the mark of the next role.
_NEXT_ROLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "texts"),
    [
        (say("hi", "ho"), ["<user>hi<assistant>[[ho<user>]]"]),
        (say("hi", "ho", "a", "b"), ["<user>hi<assistant>[[ho<user>]]a<assistant>[[b<user>]]"]),
        (say("hi", "ho", "a"), ["<user>hi<assistant>[[ho<user>]]a"]),
        (
            [*say("hi", "ho"), {"role": "system", "content": "s"}, *say("a", "b")],
            [
                "<user>hi<assistant>[[ho<user>]]",
                "<user>hi<assistant>ho<system>s<user>a<assistant>[[b<user>]]",
            ],
        ),
        (
            [
                *say("hi"),
                {"role": "assistant", "content": "f", "tool_calls": [{"function": {"name": "f"}}]},
            ],
            ["<user>hi<assistant>[[f<tool>]]"],
        ),
    ],
)
def test_a_turn_that_ends_with_the_next_role_trains_that(
    tmp_path: Path, messages: list[dict], texts: list[str]
) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.add_tokens(["<user>", "<assistant>", "<tool>", "<system>"], special_tokens=True)
    tokenizer.chat_template = _NEXT_ROLE
    stop_ids = [token_id(tokenizer, mark) for mark in ("<user>", "<tool>")]
    chains = conversation_chains(tokenizer, messages, stop_ids=stop_ids)
    assert shown(tokenizer, chains) == texts


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": "hi"}], None),
        ([{"role": "assistant", "content": "hi"}], None),
        (say("hi", "h<e>o"), "messages"),
        (say("hi", "h<e>o<e>\n"), "messages"),
        (
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "tool_calls": [{"function": {"arguments": "{x"}}]},
            ],
            "a message.tool_calls[0]",
        ),
    ],
)
def test_conversations_that_cannot_be_trained(
    chatty: PreTrainedTokenizerBase, messages: list[dict], field: str | None
) -> None:
    with refuses(DataError, field):
        chains_of(chatty, messages)


def test_a_prompt_that_no_turn_continues_is_refused(chatty: PreTrainedTokenizerBase) -> None:
    chatty.chat_template = OPENS_THINKING
    with refuses(DataError, "messages"):
        chains_of(chatty, say("hi", "ho"))
    [chain] = chains_of(chatty, say("hi", "<think>hm</think>ho"))
    assert shown(chatty, [chain]) == ["<s>user\nhi<e>\n<s>assistant\n<think>[[hm</think>ho<e>]]\n"]


@pytest.mark.parametrize("begins", ["<think>\n", "<think>"])
def test_thinking_that_the_prompt_opens_and_no_turn_keeps_is_trained(
    chatty: PreTrainedTokenizerBase, begins: str
) -> None:
    chatty.chat_template = DROPS_THINKING
    messages = say("hi", f"{begins}hm\n</think>\n\nho", "and?", f"{begins}er</think>no ")
    assert shown(chatty, chains_of(chatty, messages)) == [
        "<s>user\nhi<e><s>assistant\n<think>\n[[hm\n</think>\n\nho<e>]]",
        "<s>user\nhi<e><s>assistant\n\n\nho<e><s>user\nand?<e>"
        "<s>assistant\n<think>\n[[er</think>no <e>]]",
    ]
    for content in ("ho", "hm</think>ho", "<think>hm", "<think>hm</think>"):
        with refuses(DataError, "messages"):
            chains_of(chatty, say("hi", content))
