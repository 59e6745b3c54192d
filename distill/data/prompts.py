"""Reading, rendering and checking of prompts before a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from distill.chat.template import (
    Message,
    check_messages,
    check_text,
    check_tools,
    check_vocabulary,
    is_begun,
    render_messages,
    render_text,
)
from distill.chat.unwritten import check_written
from distill.data.answers import answer_text
from distill.data.columns import fields_of, refuse_misspelt, with_chats
from distill.data.feedback import FeedbackContext, FeedbackTemplate, last_of_user
from distill.data.row_conversion import LongRows, TooLong
from distill.data.row_files import Rows, read_rows
from distill.errors import DataError
from distill.json_values import is_number
from distill.lookup import known_names
from distill.types import TokenArray, Tokenizer

logger = logging.getLogger(__name__)

# Fields of a row that are read.
FIELDS = frozenset(
    {
        *("prompt", "messages", "tools", "answer", "teacher", "tag", "bonuses"),
        *("teacher_prompt", "teacher_messages"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """Rendered prompt.

    Attributes:
        tokens_T: the prompt's tokens for the policy.
        answer: reference answer for the reward; None if the row has none.
        line: number of the row in the source, from 1.
        teacher: name of the teacher that scores the prompt, if teachers have names.
        tag: kind of prompt, for metrics by kind; None if the row has none.
        teacher_tokens_T: the prompt's tokens for the teacher; None: the same as `tokens_T`.
        feedback: builds the teacher's context from each episode's outcome; None: the context does
            not depend on the outcome.
        bonuses: reward of each occurrence of a phrase in the response, by phrase.
        messages: the prompt as a chat; empty for a plain string.
        text: the prompt as a plain string; empty for a chat.
        tools: schemas of the tools that were passed to the chat template.
        teacher_prompt: the row's own prompt for the teacher, a text or a chat; empty: `messages` or
            `text`.
    """

    tokens_T: TokenArray
    answer: str | None
    line: int
    teacher: str = ""
    tag: str | None = None
    teacher_tokens_T: TokenArray | None = None
    feedback: FeedbackContext | None = None
    bonuses: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    text: str = ""
    tools: Sequence[Mapping[str, Any]] | None = None
    teacher_prompt: str | Sequence[Message] = ""

    @property
    def for_text_teacher(self) -> str | Sequence[Message]:
        """Prompt for a teacher that is queried with text: a text or a chat."""
        return self.teacher_prompt or self.messages or self.text


def prompt_key(prompt: bytes) -> bytes:
    """Short key that is equal for equal prompts, given as the bytes of their tokens or texts."""
    return blake2b(prompt, digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStyle:
    """Settings that turn every prompt into the beginning of a chat.

    A plain string becomes a user message. `system` becomes the system message of rows without a
    system message; `tools` are schemas that are passed to the chat template.
    """

    system: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptContext:
    """Models and limits of a run, for which prompts are rendered and checked.

    Attributes:
        vocab_size: vocabulary size of the model; every id is below it.
        context_length: longest chain, in tokens, that the policy and all scoring models support.
        max_new_tokens: longest response (or turn), in tokens.
        teachers: names of the teachers. A single named teacher also scores rows that name no
            teacher; without names, the field `teacher` is ignored.
        teacher_context_length: longest chain that the teachers support; None: `context_length`.
        teacher_tokenizers: tokenizers of teachers by name (`""` for a single unnamed one), whose
            chat templates render `teacher_messages`; other teachers use `tokenizer`.
        feedback: template of the teachers' context, filled in per episode; None: the context of the
            problem's row.
        read: reads the rows of a source and renames the run's columns.
        long: treatment of rows that are too long.
    """

    tokenizer: Tokenizer
    vocab_size: int
    context_length: int
    max_new_tokens: int
    teachers: Collection[str] = ()
    teacher_context_length: int | None = None
    teacher_tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)
    feedback: FeedbackTemplate | None = None
    read: Callable[[str], Rows] = read_rows
    long: LongRows = field(default_factory=LongRows)

    @property
    def teacher_room(self) -> int:
        """Longest context of the teachers, in tokens."""
        return self.teacher_context_length or self.context_length

    def tokenizer_of(self, teacher: str) -> Tokenizer:
        """Tokenizer whose chat template renders the teacher's context."""
        return self.teacher_tokenizers.get(teacher, self.tokenizer)

    def feedback_on(
        self,
        messages: Sequence[Message],
        *,
        teacher: str,
        text: str = "",
        answer: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        per_episode: bool = True,
    ) -> FeedbackContext | None:
        """`FeedbackContext` for a prompt of messages, or of `text`.

        None if the teacher sees the same context as the model.

        Args:
            per_episode: True if each episode begins with messages of its own, similar to these.

        Raises:
            DataError: there is no user message whose content is text; or see
                `FeedbackContext.check`.
        """
        if self.feedback is None:
            return None
        made = FeedbackContext(
            template=self.feedback,
            tokenizer=self.tokenizer_of(teacher),
            prompt=messages[last_of_user(messages)]["content"] if messages else text,
            answer=answer,
            room=self.teacher_room,
            messages=messages,
            tools=tools,
            per_episode=per_episode,
        )
        made.check(self.max_new_tokens)
        return made


def load_prompts(path: str, context: PromptContext, chat: ChatStyle | None = None) -> list[Prompt]:
    """Read, render and check every prompt of a source before anything expensive starts.

    A row has `prompt` (a string, encoded unchanged) or `messages` (OpenAI chat format, allowed in
    `prompt` too, rendered with the model's chat template and the row's `tools`; if the last message
    is the assistant's, it is continued), and optionally

        answer            reference answer for the reward: a string or a number (`answer_text`)
        teacher           name of the teacher that scores the prompt; required if there are several
        tag               kind of prompt
        teacher_prompt    or `teacher_messages`: context that the teacher sees in place of the
                          prompt, such as the prompt and its solution
        bonuses           object of phrase -> reward

    Other fields are ignored, unless a name looks like a misspelling of one of these.

    Args:
        chat: turns every prompt into a chat; None: strings are encoded unchanged.

    Raises:
        DataError: a row is wrong; the message names the source, the row and the fault.
    """

    def prompt_of(number: int, row: Mapping[str, Any]) -> Prompt:
        check_form(row)
        prompt = _prompt(with_chats(row), number, context, chat)
        _check_tokens(prompt, context)
        return _with_feedback(prompt, context)

    prompts = context.long.converted(path, context.read(path), prompt_of)
    begun = sum(bool(prompt.messages) and is_begun(prompt.messages) for prompt in prompts)
    if begun:
        logger.warning(
            "%d of %d prompts of %s end with an assistant message, which is continued",
            begun,
            len(prompts),
            path,
        )
    return prompts


def check_form(row: Mapping[str, Any]) -> None:
    """Check the names of a row's fields, without a tokenizer.

    Raises:
        DataError: a field is misspelt, or the row has no prompt or two prompts.
    """
    refuse_misspelt(row, FIELDS)
    _check_prompt(with_chats(row), "")


def _prompt(
    row: Mapping[str, Any], number: int, context: PromptContext, chat: ChatStyle | None
) -> Prompt:
    teacher, teacher_tokens_T, teacher_prompt = teacher_named(row, context.teachers), None, ""
    if row.get("teacher_prompt") is not None or row.get("teacher_messages") is not None:
        its_own = context.tokenizer_of(teacher)
        teacher_tokens_T, chat_told, _ = _render(row, its_own, "teacher_", chat)
        teacher_prompt = chat_told or check_text(row, "teacher_prompt")
    tokens_T, messages, tools = _render(row, context.tokenizer, "", chat)
    return Prompt(
        tokens_T=tokens_T,
        messages=messages,
        text="" if messages else check_text(row, "prompt"),
        tools=tools,
        answer=answer_text(row.get("answer")),
        line=number,
        teacher=teacher,
        tag=None if row.get("tag") is None else check_text(row, "tag"),
        teacher_tokens_T=teacher_tokens_T,
        teacher_prompt=teacher_prompt,
        bonuses=_bonuses(row.get("bonuses")),
    )


def _check_tokens(prompt: Prompt, context: PromptContext) -> None:
    seen_by_teacher_T = prompt.tokens_T
    if prompt.teacher_tokens_T is not None:
        seen_by_teacher_T = prompt.teacher_tokens_T
        check_vocabulary(seen_by_teacher_T, context.vocab_size)
    check_vocabulary(prompt.tokens_T, context.vocab_size)
    new, room = context.max_new_tokens, context.context_length
    _check_length("the prompt", prompt.tokens_T, "model", room, new)
    teacher_room = context.teacher_room
    _check_length("what the teacher sees", seen_by_teacher_T, "teacher", teacher_room, new)


def _with_feedback(prompt: Prompt, context: PromptContext) -> Prompt:
    if context.feedback is not None and prompt.teacher_tokens_T is not None:
        raise DataError(
            "both the row and teacher.feedback define the teacher's context; leave out "
            "`teacher_prompt` and `teacher_messages`, or the setting"
        )
    feedback = context.feedback_on(
        prompt.messages,
        teacher=prompt.teacher,
        text=prompt.text,
        answer=prompt.answer,
        tools=prompt.tools,
        per_episode=False,
    )
    return replace(prompt, feedback=feedback)


def _render(
    row: Mapping[str, Any],
    tokenizer: Tokenizer,
    prefix: str,
    chat: ChatStyle | None,
) -> tuple[TokenArray, Sequence[Message], Sequence[Mapping[str, Any]] | None]:
    """Tokens, messages and tools of the prompt whose field names begin with `prefix`."""
    text, messages = _check_prompt(row, prefix)
    given: list[Message] = []
    tools = None
    if row.get(messages) is not None:
        given = check_messages(row[messages], messages)
    elif chat is not None:
        given = [{"role": "user", "content": check_text(row, text)}]
    if given:
        given, tools = _in_style(given, check_tools(row), chat)
        check_written(tokenizer, given, tools=tools)
        tokens_T = render_messages(tokenizer, given, tools=tools)
    else:
        tokens_T = render_text(tokenizer, check_text(row, text))
    if len(tokens_T) == 0:
        raise DataError(f"the {prefix}prompt is empty after tokenization")
    return tokens_T, given, tools


def _check_prompt(row: Mapping[str, Any], prefix: str) -> tuple[str, str]:
    """Names of the two fields of a prompt. Raises DataError unless the row has exactly one."""
    text, messages = f"{prefix}prompt", f"{prefix}messages"
    if (row.get(text) is None) == (row.get(messages) is None):
        found = f"; {fields_of(row)}; give the prompt's column with columns.prompt="
        raise DataError(
            f"give exactly one of `{text}` (a string) and `{messages}` (chat format)"
            f"{'' if prefix else found}"
        )
    return text, messages


def _in_style(
    messages: list[Message], tools: Sequence[Mapping[str, Any]] | None, chat: ChatStyle | None
) -> tuple[list[Message], Sequence[Mapping[str, Any]] | None]:
    """Messages and tool schemas to pass to the chat template."""
    if chat is None:
        return messages, tools
    if is_begun(messages):
        raise DataError(
            "the last message is the assistant's, but this environment cannot continue an answer; "
            "drop it"
        )
    if tools:
        raise DataError(
            "the environment defines the `tools`; leave the field out of the row", field="tools"
        )
    if chat.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": chat.system}, *messages]
    return messages, chat.tools or None


def _check_length(
    what: str, tokens_T: TokenArray, whose: str, context_length: int, max_new_tokens: int
) -> None:
    if len(tokens_T) + max_new_tokens > context_length:
        raise TooLong(
            f"{what} has {len(tokens_T):,} tokens, and max_new_tokens={max_new_tokens} more exceed "
            f"the {whose}'s context of {context_length:,}; shorten the prompt or lower "
            "max_new_tokens",
            length=len(tokens_T),
            field="sampling.max_new_tokens",
        )


def teacher_named(row: Mapping[str, Any], teachers: Collection[str]) -> str:
    """Name of the teacher that scores the row; empty if teachers have no names.

    Raises:
        DataError: there are several teachers and the row names none, or the name is unknown.
    """
    named = None if row.get("teacher") is None else check_text(row, "teacher")
    if not teachers:
        return ""
    if named is None:
        if len(teachers) > 1:
            raise DataError(
                "`teacher` is missing: with several teachers each row names one of "
                f"{', '.join(sorted(teachers))}",
                field="teacher",
            )
        return next(iter(teachers))
    if named not in teachers:
        raise DataError(
            f"`teacher` is {named!r}, which is not a teacher; {known_names(named, teachers)}",
            field="teacher",
        )
    return named


def _bonuses(bonuses: object) -> dict[str, float]:
    if bonuses is None:
        return {}
    if not isinstance(bonuses, dict):
        raise DataError(
            f"`bonuses` must be an object of phrase -> reward, got {bonuses!r}", field="bonuses"
        )
    for phrase, value in bonuses.items():
        if not phrase:
            raise DataError(
                "`bonuses` has an empty phrase, which occurs everywhere; drop it", field="bonuses"
            )
        if not is_number(value):
            raise DataError(
                f"`bonuses[{phrase!r}]` must be a finite number, got {value!r}", field="bonuses"
            )
    return {phrase: float(value) for phrase, value in bonuses.items()}
