"""Feedback for a teacher: a context that is rebuilt from the outcome of each trajectory.

    template    "{prompt}\\nA pupil answered: {response}\\nThat was {outcome}; it is {answer}."
    context     the filled-in template in place of a plain prompt; in a chat, in place of the last
                user message, rendered with the teacher's chat template

The teacher scores the tokens of the policy's response unchanged; only the context before the
response differs (`distill.privileged`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from distill.chat.template import Message, render_messages, render_text
from distill.data.row_conversion import TooLong
from distill.errors import ConfigError, DataError
from distill.lookup import known_names
from distill.types import TokenArray, Tokenizer

RIGHT, WRONG = "right", "wrong"
# Placeholders of a template: fields of the prompt's row, and facts of an episode's outcome.
_OF_ROW = ("prompt", "answer")
_OF_EPISODE = ("response", "reward", "outcome", "feedback")
PLACEHOLDERS = (*_OF_ROW, *_OF_EPISODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of an episode.

    Attributes:
        reward: total reward, including the reward from comparing the group's episodes.
        response: text of the sampled tokens; special tokens in it are broken up, so that they are
            not encoded as special tokens again.
        feedback: the environment's feedback on the episode; empty if there is none.
    """

    reward: float
    response: str = ""
    feedback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackTemplate:
    """Text with `{placeholders}`; `{{` and `}}` are braces.

    `{outcome}` is "right" if the reward is at least `correct_reward_threshold`, else "wrong".

    Raises:
        ConfigError: a placeholder is unknown, or `{prompt}` is missing.
    """

    text: str
    correct_reward_threshold: float

    def __post_init__(self) -> None:
        if why := self._wrong():
            raise ConfigError(f"teacher.feedback={self.text!r}: {why}")

    def _wrong(self) -> str:
        """Fault of the template, and the remedy; empty if there is none."""
        try:
            parts = list(Formatter().parse(self.text))
        except ValueError as error:
            return f"{error}; write a brace as {{{{ or }}}}"
        for _, name, spec, conversion in parts:
            if name is not None and name not in PLACEHOLDERS:
                return f"the placeholder {{{name}}} is unknown; {known_names(name, PLACEHOLDERS)}"
            if spec or conversion:
                return f"write {{{name}}} without `!` or `:`; numbers are always written short"
        if "prompt" not in self.placeholders:
            return (
                "it lacks {prompt}, so the teacher would not see the question; put it where the "
                "prompt belongs"
            )
        return ""

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset(name for _, name, _, _ in Formatter().parse(self.text) if name is not None)

    @property
    def judges(self) -> bool:
        """True if the template shows the teacher the reward or the outcome."""
        return not self.placeholders.isdisjoint(("reward", "outcome"))

    def filled(self, prompt: str, answer: str | None, outcome: Outcome) -> str:
        return self.text.format(
            prompt=prompt,
            answer=answer,
            response=outcome.response,
            reward=f"{outcome.reward:g}",
            outcome=RIGHT if outcome.reward >= self.correct_reward_threshold else WRONG,
            feedback=outcome.feedback,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeedbackContext:
    """Builds the teacher's context for each episode of one problem, in place of the prompt.

    Attributes:
        tokenizer: the teacher's tokenizer, with its chat template.
        prompt: the plain prompt, or the last user message.
        answer: reference answer of the problem; None if it has none.
        room: longest token chain that the teacher supports.
        messages: the chat; empty for a plain prompt.
        tools: schemas for the chat template.
        per_episode: True if each episode begins with messages of its own (`with_messages`);
            `messages` and `tools` are then only an example.
    """

    template: FeedbackTemplate
    tokenizer: Tokenizer
    prompt: str
    answer: str | None
    room: int
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    per_episode: bool = False

    def with_messages(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> FeedbackContext:
        """`FeedbackContext` of an episode that began with these messages.

        Args:
            tools: schemas of the episode's tools; None: those of the problem.

        Raises:
            DataError: there is no user message, or the last one is not text.
        """
        if not self.per_episode:
            return self
        prompt = messages[last_of_user(messages)]["content"]
        tools = self.tools if tools is None else tools
        return replace(self, messages=messages, prompt=prompt, tools=tools)

    def tokens_T(self, outcome: Outcome) -> TokenArray:
        """Tokens of the teacher's context for an episode with this outcome.

        Raises:
            DataError: the tokenizer or its chat template refuses the text.
        """
        text = self.template.filled(self.prompt, self.answer, outcome)
        if not self.messages:
            return render_text(self.tokenizer, text)
        last = last_of_user(self.messages)
        messages = [
            {**message, "content": text} if place == last else message
            for place, message in enumerate(self.messages)
        ]
        return render_messages(self.tokenizer, messages, tools=self.tools)

    def check(self, max_new_tokens: int) -> None:
        """Check the context's length with the longest response.

        Raises:
            DataError: the template uses an answer that the row lacks, or the context would be too
                long.
        """
        placeholders = self.template.placeholders
        if self.answer is None and "answer" in placeholders:
            raise DataError(
                "teacher.feedback uses {answer}, but the row has no `answer`",
                field="teacher.feedback",
            )
        responses = 2 if "response" in placeholders else 1
        length = len(self.tokens_T(Outcome(reward=0.0)))
        if length + responses * max_new_tokens > self.room:
            raise TooLong(
                f"the prompt in teacher.feedback has {length:,} tokens, and {responses} x "
                f"max_new_tokens={max_new_tokens} more exceed the teacher's context of "
                f"{self.room:,}; shorten the template or lower max_new_tokens",
                length=length,
                field="teacher.feedback",
            )

    def context_T(self, outcome: Outcome, later: int) -> TokenArray | None:
        """Tokens of an episode's context, or None if they leave no room for `later` tokens."""
        made_T = self.tokens_T(outcome)
        return made_T if 0 < len(made_T) <= self.room - later else None


def last_of_user(messages: Sequence[Message]) -> int:
    """Index of the last user message.

    Raises:
        DataError: there is no such message, or its content is not text.
    """
    for place in reversed(range(len(messages))):
        if messages[place]["role"] == "user":
            if not isinstance(messages[place].get("content"), str):
                raise DataError(
                    "teacher.feedback replaces the last user message, whose content must be text",
                    field="teacher.feedback",
                )
            return place
    raise DataError(
        "teacher.feedback replaces the last user message, but there is no user message",
        field="teacher.feedback",
    )
