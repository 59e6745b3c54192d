"""Thinking is separated from the answer by the marks of each family's chat template."""

import asyncio
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.chat.conversation import Conversation
from distill.chat.responses import THINK, read_response, response_text
from distill.chat.template import chat_text, encode_chat, render_messages
from distill.data.prompts import Prompt
from distill.engine import Sample
from distill.envs.base import StepResult
from distill.envs.single_turn import SingleTurnEnv
from distill.rewards.formats import Format
from distill.rewards.registry import Reward, last_number
from distill.types import StopReason
from tests.samples import sample

QUESTION = {"role": "user", "content": "1+2?"}
THANKS = {"role": "user", "content": "And 4+5?"}
THOUGHT, ANSWER = "so 1 + 2 = 3", "3"


@dataclass(frozen=True, kw_only=True)
class Family:
    """Format of a family's assistant turn, and of its models' samples.

    `assistant` and `prompt` are of its chat template; `before`, `between` and `after` are what a
    model samples around its thinking and answer; `field` is the template's field for thinking.
    """

    assistant: str
    before: str
    between: str
    stop: str = "<|end|>"
    after: str = ""
    prompt: str = "<|start|>assistant\n"
    field: str = "reasoning_content"
    plain: str = ""

    @property
    def template(self) -> str:
        return (
            "{% for m in messages %}{% if m.role == 'assistant' %}" + self.assistant + "{% else %}"
            "<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}" + self.prompt + "{% endif %}"
        )


_HEAD = "<|start|>assistant\n"
_INLINE = (
    "{% if '</think>' in m.content %}{% set c = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set t = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% else %}{% set c = m.content %}{% set t = m.reasoning_content %}{% endif %}"
    "{{ '<|start|>assistant\n' }}{% if loop.last and t %}{{ '<think>\n' + t + '\n</think>\n\n' }}"
    "{% endif %}{{ c + '<|end|>' }}"
)
FAMILIES = {
    "think": Family(assistant=_INLINE, before="<think>\n", between="\n</think>\n\n"),
    "think, opened by the prompt": Family(
        assistant=_INLINE, before="", between="\n</think>\n\n",
        prompt="<|start|>assistant\n<think>\n",
    ),
    "think, never in a history": Family(
        assistant=_HEAD + "{{ m.content.split('</think>')[-1] }}<|end|>", before="<think>",
        between="</think>",
    ),
    "think, emptied in a history": Family(
        assistant=_HEAD + "<think></think>{{ m.content }}<|end|>", before="<think>",
        between="</think>",
    ),
    "channels": Family(
        assistant="<|start|>assistant{% if loop.last and m.thinking %}"
        "<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
        "<|channel|>final<|message|>{{ m.content }}<|end|>",
        before="<|channel|>analysis<|message|>",
        between="<|end|><|start|>assistant<|channel|>final<|message|>",
        stop="<|return|>",
        prompt="<|start|>assistant",
        field="thinking",
        plain="<|channel|>final<|message|>",
    ),
    "brackets": Family(
        assistant="{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endif %}<|end|>",
        before="[THINK]",
        between="[/THINK]",
        prompt="",
    ),
    "a thought channel": Family(
        assistant=_HEAD + "{% if m.reasoning_content and m.tool_calls %}<|channel>thought\n"
        "{{ m.reasoning_content }}\n<channel|>{% endif %}{% for c in m.tool_calls or [] %}"
        "<|call>{{ c.function.name }}{% endfor %}"
        "{{ m.content.split('<channel|>')[-1] }}<|end|>",
        before="<|channel>thought\n",
        between="\n<channel|>",
    ),
    "a namespace": Family(
        assistant=_HEAD + "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}"
        "</seed:think>\n{% endif %}{{ m.content }}<|end|>",
        before="<seed:think>",
        between="</seed:think>\n",
    ),
    "a marked answer": Family(
        assistant=_HEAD + "{% if m.reasoning_content %}<|START_THINKING|>"
        "{{ m.reasoning_content }}<|END_THINKING|>{% endif %}<|START_TEXT|>{{ m.content }}"
        "<|END_TEXT|><|end|>",
        before="",
        between="<|END_THINKING|><|START_TEXT|>",
        after="<|END_TEXT|>",
        prompt="<|start|>assistant\n<|START_THINKING|>",
    ),
}  # fmt: skip
_SPECIAL = (
    "<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>", "[THINK]", "[/THINK]",
    "<|channel>", "<channel|>", "<seed:think>", "</seed:think>", "<|START_THINKING|>",
    "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>", "<think>", "</think>",
)  # fmt: skip


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = FAMILIES[name].template
    return tokenizer


def sample_of(name: str, text: str, *, cut: bool = False) -> Sample:
    stop = "" if cut else FAMILIES[name].stop
    spoken = sample(*encode_chat(tokenizer_of(name), text + stop).tolist())
    return replace(spoken, stop_reason=StopReason.LENGTH) if cut else spoken


def whole(name: str) -> str:
    family = FAMILIES[name]
    return family.before + THOUGHT + family.between + ANSWER + family.after


def judged(name: str, taken: Sample, reward: Reward, pattern: str | None = None) -> StepResult:
    tokenizer = tokenizer_of(name)
    prompt = Prompt(
        tokens_T=render_messages(tokenizer, [QUESTION]), answer="3", line=1, messages=[QUESTION]
    )
    env = SingleTurnEnv(prompt, tokenizer, reward, Format(pattern=pattern, reward=0.0), {})
    return asyncio.run(env.step(taken))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_number_in_a_thought_is_no_answer(name: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    prompt_T = render_messages(tokenizer, [QUESTION])
    response = read_response(tokenizer, prompt_T, sample_of(name, whole(name)))
    assert (response.thinking, response.answer) == (THOUGHT, ANSWER)
    assert response.sampled == whole(name)
    thought = read_response(tokenizer, prompt_T, sample_of(name, family.before + THOUGHT, cut=True))
    assert (thought.thinking, thought.answer) == (THOUGHT, "")
    assert judged(name, sample_of(name, whole(name)), last_number).reward == 1
    assert judged(name, sample_of(name, family.before + THOUGHT, cut=True), last_number).reward == 0


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.before])
def test_a_response_without_thinking_is_its_answer(name: str) -> None:
    text = FAMILIES[name].plain + "so 1 + 2 = 3\n"
    taken = sample_of(name, text)
    response = read_response(
        tokenizer_of(name), render_messages(tokenizer_of(name), [QUESTION]), taken
    )
    assert (response.thinking, response.answer) == ("", "so 1 + 2 = 3\n")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_next_prompt_equals_the_template_s_text(name: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    talk = Conversation(tokenizer, [QUESTION])
    talk.add_sample(sample_of(name, whole(name)))
    apart = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    assert talk.openai_messages == [QUESTION, apart]
    talk.add_messages([THANKS])
    shown = str(tokenizer.decode(talk.observation_T.tolist(), skip_special_tokens=False))
    message = {"role": "assistant", "content": ANSWER, family.field: THOUGHT}
    if name == "brackets":
        parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": ANSWER}]
        message = {"role": "assistant", "content": parts}
    served = chat_text(
        tokenizer, [QUESTION, message, THANKS], tools=None, add_generation_prompt=True
    )
    assert shown == served


@pytest.mark.parametrize("name", FAMILIES)
def test_formats_and_rewards_of_users_see_the_marks(name: str) -> None:
    family, seen = FAMILIES[name], []

    def reward(response: str, _answer: str) -> float:
        seen.append(response)
        return 0.0

    opened = family.prompt.removeprefix(_HEAD) if not family.before else ""
    pattern = r"(<think>|<\|START_THINKING\|>|<\|channel|\[THINK|<seed).*3.*"
    result = judged(name, sample_of(name, whole(name)), reward, pattern)
    assert seen == [opened + whole(name)] and result.metrics["format"] == 1


def test_channels_that_are_not_the_final_one_are_no_answer() -> None:
    preamble = "<|channel|>commentary<|message|>I will add 1 and 2.<|end|><|start|>assistant"
    name = "channels"
    assert judged(name, sample_of(name, preamble + whole(name)), last_number).reward == 1
    for text in (preamble, f"{FAMILIES[name].before}hm<|end|>{preamble}", "<|channel|>final"):
        prompt_T = render_messages(tokenizer_of(name), [QUESTION])
        assert read_response(tokenizer_of(name), prompt_T, sample_of(name, text)).answer == ""


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<think>3</think>4", "3", "4"),
        ("3</think>4", "3", "4"),
        ("<think>1</think>a<think>2</think>4", "1\n\n2", "a4"),
        ("4<think>3", "3", ""),
        ("<think>3</think>\n\n    return 4\n", "3", "    return 4\n"),
        ("  4 ", "", "  4 "),
        ("</think>", "", ""),
        ("", "", ""),
    ],
)
def test_without_marks_thinking_is_in_think(text: str, thinking: str, answer: str) -> None:
    response = THINK.response(text)
    assert (response.thinking, response.answer, response.text) == (thinking, answer, text)


def test_a_response_is_the_sampled_text() -> None:
    """Spaces and special tokens are kept; only the last token is the stop token."""
    tokenizer = tokenizer_of("think")
    prompt_T = np.array([1], np.int32)
    for text in ("a != b , say 'm' .", " a", "<|end|><|end|>x", "[THINK]"):
        assert response_text(tokenizer, prompt_T, sample_of("think", text)) == text
        assert response_text(tokenizer, prompt_T, sample_of("think", text, cut=True)) == text


def test_the_space_before_a_response_is_kept() -> None:
    pieces = {"<unk>": 0, "\u2581": 1, ":": 2, "4": 3, "<e>": 4}
    backend = Tokenizer(models.BPE(pieces, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    prompt_T = np.array([1, 2], np.int32)
    assert response_text(tokenizer, prompt_T, sample(1, 3, 4)) == " 4"
