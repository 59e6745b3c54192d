"""Chat conversations as token chains, in which only tokens of the assistant are trained.

A template may render a turn differently once other turns follow: many templates drop the thinking
of earlier turns. A turn must be trained as the served model produces it, so a turn that is rendered
differently gets a separate chain, which ends with the turn. All other turns share the chain of the
whole conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill.chat.continuation import EncodedChat, added_tokens, served_continuation
from distill.chat.messages import is_trained
from distill.chat.responses import thinking_marks
from distill.chat.template import Message, chat_text, encode_chat
from distill.errors import DataError
from distill.stops import hits
from distill.types import BoolArray, TokenArray, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskedTokens:
    """Token ids as the model sees them, and a mask of the same length: True where trained."""

    tokens_T: TokenArray
    loss_mask_T: BoolArray


def conversation_chains(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    stop_ids: Collection[int],
    tools: Sequence[Mapping[str, Any]] | None = None,
    context: int = 0,
) -> list[MaskedTokens]:
    """Token chains of a conversation; every assistant turn is trained in exactly one chain.

    The trained tokens of a turn begin after the template's generation prompt and end with the first
    of `stop_ids`, where the served model stops. A turn without a stop token is trained to its end,
    including the first token that the template writes after it if that token is a stop token. Turns
    among the first `context` messages, and turns that `is_trained` excludes, are not trained.

    Raises:
        DataError: there is no assistant turn to train, or the template cannot render a turn.
    """
    trained = [i for i in range(context, len(messages)) if is_trained(messages[i])]
    if not trained:
        raise DataError(
            "there is no assistant turn to train; only assistant messages without `weight: 0` and "
            "`train: false` are trained"
        )
    whole = EncodedChat.of(
        tokenizer, chat_text(tokenizer, messages, tools=tools, add_generation_prompt=False)
    )
    whole_T = whole.tokens_T
    turns = [_turn(tokenizer, messages, i, stop_ids, tools, whole) for i in trained]
    last_T = turns[-1].tokens_T
    if np.array_equal(last_T[: len(whole_T)], whole_T):
        whole_T = last_T  # may also have the stop token that a template writes after the last turn
    shared_mask_T = np.zeros(len(whole_T), np.bool_)
    chains: list[MaskedTokens] = []
    for turn in turns:
        if np.array_equal(turn.tokens_T, whole_T[: len(turn.tokens_T)]):
            shared_mask_T[: len(turn.tokens_T)] |= turn.loss_mask_T
        else:
            chains.append(turn)
    if shared_mask_T.any():
        chains.append(MaskedTokens(tokens_T=whole_T, loss_mask_T=shared_mask_T))
    return chains


def check_stops(
    tokenizer: Tokenizer, text: str, stop_ids: Collection[int], what: str, field: str
) -> None:
    """Raise DataError if the text, described by `what`, has a stop token before its end."""
    added, text = added_tokens(tokenizer), text.rstrip()
    for stop in sorted(added[id_] for id_ in stop_ids if id_ in added):
        if stop in text.removesuffix(stop):
            raise DataError(
                f"{what} has the stop token {stop} before its end, at which a served model would "
                "stop; remove it",
                field=field,
            )


def _turn(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    i: int,
    stop_ids: Collection[int],
    tools: Sequence[Mapping[str, Any]] | None,
    whole: EncodedChat,
) -> MaskedTokens:
    """Render assistant turn i as served: the context that the model gets, then its answer.

    Only the answer is trained, up to its stop token.

    Args:
        whole: all messages.
    """
    if i == 0:
        raise DataError("messages[0] is an assistant message with nothing before it; drop it")
    content = str(messages[i].get("content") or "")
    check_stops(tokenizer, content, stop_ids, f"messages[{i}], the assistant's,", "messages")
    added = added_tokens(tokenizer)
    prefix = chat_text(tokenizer, messages[:i], tools=tools, add_generation_prompt=True)
    upto = whole.text
    if i + 1 < len(messages):
        upto = chat_text(tokenizer, messages[: i + 1], tools=tools, add_generation_prompt=False)
    if not upto.startswith(prefix) or upto == prefix:
        upto = _with_thinking(tokenizer, prefix, upto, content, i)
    prefix_T, tokens_T = whole.encode(prefix), whole.encode(upto)
    if not np.array_equal(tokens_T[: len(prefix_T)], prefix_T):
        # A token spans the boundary. A served model continues the unchanged prefix instead.
        rest = upto[len(prefix) :]
        answer_T = served_continuation(tokenizer, prefix_T, rest, added=added)
        answer_T = encode_chat(tokenizer, rest) if answer_T is None else answer_T
        tokens_T = np.concatenate([prefix_T, answer_T])
    is_stop_T = hits(tokens_T[len(prefix_T) :], stop_ids)
    spoken = int(np.argmax(is_stop_T)) + 1 if is_stop_T.any() else len(is_stop_T)
    if not is_stop_T.any():
        # A turn of GLM models ends with the mark of the next role, which a served model generates.
        answers = "tool" if messages[i].get("tool_calls") else "user"
        for following in (*messages[i + 1 : i + 2], {"role": answers, "content": "0"}):
            end = _end_behind(tokenizer, [*messages[: i + 1], following], tools, upto)
            if end in stop_ids:
                tokens_T, spoken = np.append(tokens_T, np.int32(end)), spoken + 1
                break
    mask_T = np.zeros(len(tokens_T), np.bool_)
    mask_T[len(prefix_T) : len(prefix_T) + spoken] = True
    return MaskedTokens(tokens_T=tokens_T, loss_mask_T=mask_T)


def _with_thinking(tokenizer: Tokenizer, prefix: str, upto: str, content: str, i: int) -> str:
    """Text of turn i behind a generation prompt that begins its thinking, which the template drops.

    DeepSeek's templates drop thinking from all turns, but end the prompt with `<think>`.

    Args:
        upto: text that the template renders up to the end of the turn, without thinking.
        content: content of the turn's message.

    Raises:
        DataError: the prompt begins no thinking, or the turn has none.
    """
    marks = thinking_marks(tokenizer)
    switch = "enable_thinking" in str(tokenizer.chat_template)
    if opening := marks.opening(prefix):
        _, closed, answer = content.rpartition(marks.closes)
        answer = answer.strip()
        if closed and answer and answer in upto and content.startswith(marks.opens):
            said = content.removeprefix(marks.opens).removeprefix(opening.removeprefix(marks.opens))
            return prefix + said.rstrip() + upto.rpartition(answer)[2]
        off = " or chat_template_kwargs='{\"enable_thinking\": false}'"
        raise DataError(
            f"the chat template's generation prompt begins thinking ({opening!r}), but "
            f"messages[{i}], the assistant's, has no thinking before an answer; give it "
            f"{marks.opens}...{marks.closes} before the answer, in `content`, or switch thinking "
            "off with chat_template=FILE"
            f"{off if switch else ''}",
            field="messages",
        )
    on = ", switch thinking on with chat_template_kwargs='{\"enable_thinking\": true}'"
    raise DataError(
        f"the chat template does not continue its generation prompt {prefix[-40:]!r} with "
        f"messages[{i}], the assistant's, so its tokens cannot be determined; use a template "
        f"that does{on if switch else ''}, or give `prompt` and `completion` as strings"
    )


def _end_behind(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    upto: str,
) -> int:
    """First token that the last message adds to `upto`, or -1 if it cannot be determined."""
    try:
        text = chat_text(tokenizer, messages, tools=tools, add_generation_prompt=False)
    except DataError:  # the template does not support the role here
        return -1
    if not text.startswith(upto) or text == upto:
        return -1
    return int(encode_chat(tokenizer, text[len(upto) :])[0])
