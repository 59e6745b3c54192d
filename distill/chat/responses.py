"""Responses: the text of sampled tokens, split into thinking and answer.

All parts that judge, show or write a response use this module. The text is that of all sampled
tokens except the final stop token: special tokens are kept, and spaces are not cleaned up.

The marks that a model writes around its thinking are detected from its chat template, by an
assistant message that has its thinking in a separate field. The text that the template writes
around thinking and answer is the text that the model was trained to write:

    <think>...</think>answer                                                        Qwen3, GLM
    [THINK]...[/THINK]answer                                                        Ministral 3
    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>answer
                                                                                    gpt-oss
A template that drops thinking from a history may still contain known marks (`_NAMED`); otherwise
the marks are <think> and </think>.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distill.chat.continuation import added_text
from distill.chat.messages import REASONING
from distill.chat.template import Message, chat_text
from distill.chat.token_text import agreement, decode, end_of_prompt
from distill.engine import Sample
from distill.errors import DataError
from distill.types import StopReason, TokenArray, Tokenizer

# Most tokens of a thinking mark at a prompt's end, even if each letter is a token.
_LONGEST_MARK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Sampled response as text, split into thinking and answer.

    Attributes:
        opening: start of the thinking at the prompt's end; empty if the prompt does not begin it.
        sampled: text of the sampled tokens, including marks, without the final stop token.
        thinking: the thinking, without marks.
        answer: text after the thinking; empty if the response ends within the thinking.
    """

    opening: str = ""
    sampled: str
    thinking: str
    answer: str

    @property
    def text(self) -> str:
        """Whole response: the thinking with its marks, and the answer."""
        return self.opening + self.sampled

    @property
    def message(self) -> dict[str, Any]:
        """Response for environments: a message in OpenAI's form with an additional field `text`."""
        thinking = {"reasoning_content": self.thinking} if self.thinking else {}
        return {"role": "assistant", "content": self.answer, **thinking, "text": self.text}

    @classmethod
    def of(cls, message: Message) -> Response:
        """Inverse of `message`: the response of a message that an environment receives."""
        answer = str(message.get("content") or "")
        thinking = str(message.get("reasoning_content") or "")
        return cls(sampled=str(message.get("text", answer)), thinking=thinking, answer=answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarks:
    """Marks around a model's thinking and its answer.

    Attributes:
        opens, closes: marks around the thinking.
        answer, ends: marks around the answer; empty if the model writes none.
        field: field of a message from which the chat template renders the thinking; None: the
            template renders the thinking within `content`, as it was sampled.
    """

    opens: str = "<think>"
    closes: str = "</think>"
    answer: str = ""
    ends: str = ""
    field: str | None = None

    def opening(self, prompt: str) -> str:
        """End of a prompt from the opening mark on; empty if the prompt does not end with it."""
        stripped = prompt.rstrip()
        return prompt[len(stripped) - len(self.opens) :] if stripped.endswith(self.opens) else ""

    def response(self, sampled: str, opening: str = "") -> Response:
        """Response with the text `sampled` after the prompt's `opening`."""
        thinking, answer = self._split(opening + sampled)
        return Response(opening=opening, sampled=sampled, thinking=thinking, answer=answer)

    def message(self, response: Response) -> dict[str, Any]:
        """Assistant message that the chat template renders as the response."""
        if self.field is None:
            return {"role": "assistant", "content": response.text}
        message = {"role": "assistant", "content": response.answer}
        return message | ({self.field: response.thinking} if response.thinking else {})

    def to_openai(self, message: Message) -> Message:
        """Convert a history's message to OpenAI's form, with thinking in `reasoning_content`."""
        if message["role"] != "assistant":
            return message
        if self.field is None:
            response = self.response(str(message.get("content") or ""))
            thinking, rest = response.thinking, {**message, "content": response.answer}
        else:
            thinking = message.get(self.field)
            rest = {name: value for name, value in message.items() if name != self.field}
        return rest | ({"reasoning_content": thinking} if thinking else {})

    def _split(self, text: str) -> tuple[str, str]:
        thoughts, answers, position = [], [], 0
        close, first = text.find(self.closes), text.find(self.opens)
        if not self.answer and close >= 0 and not 0 <= first < close:
            # Opened in the prompt, by text other than the mark, or not opened at all.
            thoughts.append(text[:close])
            position = close + len(self.closes)
        while (start := text.find(self.opens, position)) >= 0:
            answers.append(text[position:start])
            begin = start + len(self.opens)
            stop = text.find(self.closes, begin)
            thoughts.append(text[begin:] if stop < 0 else text[begin:stop])
            if stop < 0:
                return _joined(thoughts), ""
            position = stop + len(self.closes)
        rest = "".join([*answers, text[position:]])
        return _joined(thoughts), self._unmarked(rest.lstrip("\n") if thoughts else rest)

    def _unmarked(self, rest: str) -> str:
        """Answer without its marks."""
        if self.answer:
            _, mark, after = rest.rpartition(self.answer)
            kind = _MARK.match(self.answer)
            if mark:
                rest = after
            elif kind and kind[0] != self.answer and kind[0] in rest:
                return ""  # the text is in another channel than the answer's
        closed = self.ends and rest.rstrip().endswith(self.ends)
        return rest.rstrip().removesuffix(self.ends) if closed else rest


THINK = ThinkingMarks()


def _joined(thoughts: list[str]) -> str:
    return "\n\n".join(filter(None, (thought.strip() for thought in thoughts)))


# Marks of models whose templates contain the marks but render no thinking from a field.
_NAMED = (
    ThinkingMarks(answer="<response>", ends="</response>"),
    ThinkingMarks(answer="<answer>", ends="</answer>"),
    ThinkingMarks(opens="[THINK]", closes="[/THINK]"),
    ThinkingMarks(opens="<|channel>thought", closes="<channel|>"),
    ThinkingMarks(opens="<|inner_prefix|>", closes="<|inner_suffix|>"),
    ThinkingMarks(opens="Here are my reasoning steps:", closes="[BEGIN FINAL RESPONSE]"),
    ThinkingMarks(opens="<|START_THINKING|>", closes="<|END_THINKING|>"),
)
_QUESTION = {"role": "user", "content": "a question to probe with"}
_THOUGHT, _ANSWER = "a thought to probe with", "an answer to probe with"
_CALL = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": "isotherm_probe", "arguments": {"key": "value"}},
}
_MARK = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
_LAST_MARK = re.compile(rf"(?:{_MARK.pattern})[^<>\[\]\n]*\Z")

_found: dict[str, ThinkingMarks] = {}


def thinking_marks(tokenizer: Tokenizer) -> ThinkingMarks:
    """Marks of the tokenizer's chat template; `THINK` if none are detected."""
    template = str(tokenizer.chat_template or "")
    if template not in _found:
        _found[template] = _detected(tokenizer, template) if template else THINK
    return _found[template]


def response_text(tokenizer: Tokenizer, prompt_T: TokenArray, sample: Sample) -> str:
    """Text that the sampled tokens add to the prompt, without the final stop token."""
    tokens_T = np.asarray(sample.tokens_T, np.int32)
    if sample.stop_reason is StopReason.EOS:
        tokens_T = tokens_T[:-1]
    text = added_text(tokenizer, prompt_T, tokens_T)
    return decode(tokenizer, tokens_T) if text is None else text


def read_response(tokenizer: Tokenizer, prompt_T: TokenArray, sample: Sample) -> Response:
    """Response to a prompt, split into thinking and answer by the marks of the chat template."""
    marks = thinking_marks(tokenizer)
    _, end = end_of_prompt(tokenizer, prompt_T, _LONGEST_MARK)
    opening = marks.opening(end)
    return marks.response(response_text(tokenizer, prompt_T, sample), opening)


def _detected(tokenizer: Tokenizer, template: str) -> ThinkingMarks:
    prompt = _turn(_rendered(tokenizer)) or ""
    answer_turn = {"role": "assistant", "content": _ANSWER}
    plain = _turn(_rendered(tokenizer, answer_turn)) or ""
    for called in ({}, {"tool_calls": [_CALL]}):
        for field in REASONING:
            thought = answer_turn | called | {field: _THOUGHT}
            turn = _turn(_rendered(tokenizer, thought))
            if turn is None or (marks := _around(turn, prompt, plain)) is None:
                continue
            if called:  # the template may write the call before the content
                marks = _with_answer(replace(marks, answer=""), prompt, plain)
            elif _reads_inline(tokenizer, turn, thought, marks):
                return marks
            return replace(marks, field=field)
    named = (each for each in _NAMED if each.closes in template and each.answer in template)
    marks = _with_answer(next(named, THINK), prompt, plain)
    inline = answer_turn | {"content": f"{marks.opens}{_THOUGHT}{marks.closes}{_ANSWER}"}
    if (_turn(_rendered(tokenizer, inline)) or "").count(marks.closes) > 1:
        return replace(marks, field=REASONING[0])  # within `content`, marks would be written twice
    return marks


def _with_answer(marks: ThinkingMarks, prompt: str, plain: str) -> ThinkingMarks:
    """Add the marks that the template writes around an answer without thinking."""
    before, answered, after = plain.partition(_ANSWER)
    if marks.answer or not answered:
        return marks
    answer = _new(before, prompt) if prompt else ""  # without a prompt: what begins every turn
    return replace(marks, answer="" if marks.closes in answer else answer, ends=_first_mark(after))


def _around(turn: str, prompt: str, plain: str) -> ThinkingMarks | None:
    """Marks around the probe's thought and answer in a rendered turn; None if there are none.

    Args:
        turn: the rendered turn with a thought.
        prompt: the rendered generation prompt.
        plain: the rendered turn without a thought.
    """
    before, thought, after = turn.partition(_THOUGHT)
    opens = _new(before, prompt)
    last = _LAST_MARK.search(before.rstrip())
    if not opens and last and before != plain.partition(_ANSWER)[0]:
        opens = last[0]  # the generation prompt includes the mark
    between, answered, behind = after.partition(_ANSWER)
    closes = _first_mark(after) or between.strip()
    if not (thought and answered and opens and closes):
        return None
    answer = _without_header(
        before.removesuffix(opens), between.strip().removeprefix(closes).strip()
    )
    return ThinkingMarks(opens=opens, closes=closes, answer=answer, ends=_first_mark(behind))


def _reads_inline(tokenizer: Tokenizer, turn: str, thought: Message, marks: ThinkingMarks) -> bool:
    """True if the template renders a thought within `content` equal to one in a field."""
    start = turn.rindex(marks.opens, 0, turn.index(_THOUGHT))
    content = turn[start : turn.index(_ANSWER, start) + len(_ANSWER)]
    inline = {"role": "assistant", "content": content}
    return all(
        _rendered(tokenizer, inline, *later) == _rendered(tokenizer, thought, *later)
        for later in ((), (_QUESTION,))
    )


def _rendered(tokenizer: Tokenizer, *messages: Message) -> str | None:
    """Render the probe's conversation with these messages; None if the template refuses them."""
    begun = not messages or messages[-1]["role"] == "user"
    try:
        return chat_text(tokenizer, [_QUESTION, *messages], tools=None, add_generation_prompt=begun)
    except DataError:
        return None


def _turn(text: str | None) -> str | None:
    """Rendered text after the probe's question."""
    return None if text is None else text.rpartition(_QUESTION["content"])[2]


def _new(before: str, prompt: str) -> str:
    """Text that `before` adds to the prompt; a mark that is only partly new is included whole."""
    agreed = before[: agreement(before, prompt)]
    half = max(agreed.rfind("<"), agreed.rfind("["))
    if half > max(agreed.rfind(">"), agreed.rfind("]")):
        agreed = agreed[:half]
    return before[len(agreed) :].strip()


def _first_mark(text: str) -> str:
    mark = _MARK.match(text.lstrip())
    return mark[0] if mark else ""


def _without_header(header: str, text: str) -> str:
    """Text without its beginning, as far as that repeats the end of the header."""
    header = header.rstrip()
    starts = range(len(header) + 1)
    return text.removeprefix(next(header[i:] for i in starts if text.startswith(header[i:])))
