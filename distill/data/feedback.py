"""Feedback for a teacher: its context, made anew of how each trajectory went.

    template    "{prompt}\\nA pupil answered: {response}\\nThat was {outcome}; it is {answer}."
    context     the template filled in, in place of a plain prompt; of a chat, in place of what the
                user said last, through the teacher's own chat template

The response that the teacher scores is the policy's, token by token: only what stands before it is
another (`distill.privileged`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import TYPE_CHECKING, Any

from distill.chat.template import Message, render_messages, render_text
from distill.errors import ConfigError, DataError
from distill.lookup import known_names
from distill.types import TokenArray

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

RIGHT, WRONG = "right", "wrong"
# What a template may name: of the prompt's row, and of how an episode went.
_OF_ROW = ("prompt", "answer")
_OF_EPISODE = ("response", "reward", "outcome", "feedback")
PLACEHOLDERS = (*_OF_ROW, *_OF_EPISODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an episode went.

    Attributes:
        reward: all that it earned, its group's comparison included.
        response: the text of what was sampled; special tokens within it are broken up.
        feedback: what the environment says of it; empty: nothing.
    """

    reward: float
    response: str = ""
    feedback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackTemplate:
    """Text with `{placeholders}`; `{{` and `}}` are braces.

    `{outcome}` is "right" where the reward is at least `right_from`, else "wrong".

    Raises:
        ConfigError: a placeholder is unknown, or `{prompt}` is missing.
    """

    text: str
    right_from: float

    def __post_init__(self) -> None:
        try:
            parts = list(Formatter().parse(self.text))
        except ValueError as error:
            raise ConfigError(
                f"teacher_feedback={self.text!r}: {error}; a brace is written {{{{ or }}}}"
            ) from error
        for _, name, spec, conversion in parts:
            if name is not None and name not in PLACEHOLDERS:
                raise ConfigError(
                    f"teacher_feedback: the placeholder {{{name}}} is unknown; "
                    f"{known_names(name, PLACEHOLDERS)}"
                )
            if spec or conversion:
                raise ConfigError(
                    f"teacher_feedback: write {{{name}}} without `!` or `:`; numbers are "
                    "written short as they are"
                )
        if "prompt" not in self.placeholders:
            raise ConfigError(
                f"teacher_feedback={self.text!r} lacks {{prompt}}: the teacher would not see what "
                "is asked; put it where the prompt belongs"
            )

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset(name for _, name, _, _ in Formatter().parse(self.text) if name is not None)

    @property
    def judges(self) -> bool:
        """True if it tells the teacher what a reward found."""
        return not self.placeholders.isdisjoint(("reward", "outcome"))

    def filled(self, prompt: str, answer: str | None, outcome: Outcome) -> str:
        return self.text.format(
            prompt=prompt,
            answer=answer,
            response=outcome.response,
            reward=f"{outcome.reward:g}",
            outcome=RIGHT if outcome.reward >= self.right_from else WRONG,
            feedback=outcome.feedback,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeedbackContext:
    """A problem's own: makes what the teacher sees in place of its prompt, of each episode.

    Attributes:
        tokenizer: the teacher's, which has its chat template.
        prompt: the plain prompt, or what the user said last.
        messages: the chat; empty for a plain prompt.
        room: longest chain that the teacher has room for.
        anew: each episode begins with messages of its own (`begun`); these are an example.
    """

    template: FeedbackTemplate
    tokenizer: PreTrainedTokenizerBase
    prompt: str
    answer: str | None
    room: int
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    anew: bool = False

    def begun(self, messages: Sequence[Message]) -> FeedbackContext:
        """That of an episode which began with these messages.

        Raises:
            DataError: the user said nothing in them.
        """
        if not self.anew:
            return self
        prompt = messages[last_of_user(messages)]["content"]
        return replace(self, messages=messages, prompt=prompt)

    def tokens_T(self, outcome: Outcome) -> TokenArray:
        """Raises DataError if the tokenizer, or its chat template, refuses the text."""
        text = self.template.filled(self.prompt, self.answer, outcome)
        if not self.messages:
            return render_text(self.tokenizer, text)
        last = last_of_user(self.messages)
        said = [
            {**message, "content": text} if place == last else message
            for place, message in enumerate(self.messages)
        ]
        return render_messages(self.tokenizer, said, tools=self.tools)

    def context_T(self, outcome: Outcome, later: int) -> TokenArray | None:
        """The context of an episode; None where it leaves no room for its `later` tokens."""
        made_T = self.tokens_T(outcome)
        return made_T if 0 < len(made_T) <= self.room - later else None


def last_of_user(messages: Sequence[Message]) -> int:
    """The place of what the user said last.

    Raises:
        DataError: there is no such message, or it is no text.
    """
    for place in reversed(range(len(messages))):
        if messages[place]["role"] == "user":
            if not isinstance(messages[place].get("content"), str):
                raise DataError("teacher_feedback needs a text for what the user said last")
            return place
    raise DataError("teacher_feedback takes the place of what the user said last; nobody did")


def feedback_context(
    template: FeedbackTemplate,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    answer: str | None,
    room: int,
    max_new_tokens: int,
    anew: bool = False,
) -> FeedbackContext:
    """The context maker of a prompt, which has room for what can be known before it is answered.

    Args:
        anew: each episode begins with messages of its own.

    Raises:
        DataError: the template names an answer that the row lacks; there is no room.
    """
    if answer is None and "answer" in template.placeholders:
        raise DataError("teacher_feedback names {answer}, and the row has no `answer`")
    prompt = messages[last_of_user(messages)]["content"] if messages else text
    made = FeedbackContext(
        template=template,
        tokenizer=tokenizer,
        prompt=prompt,
        answer=answer,
        messages=messages,
        tools=tools,
        room=room,
        anew=anew,
    )
    responses = 2 if "response" in template.placeholders else 1
    length = len(made.tokens_T(Outcome(reward=0.0)))
    if length + responses * max_new_tokens > room:
        raise DataError(
            f"teacher_feedback makes {length} tokens of the prompt, and {responses} x "
            f"max_new_tokens={max_new_tokens} more exceed the teacher's context of {room}; "
            "shorten the template or lower max_new_tokens"
        )
    return made
