"""Chat conversations as token chains: only what the assistant says is trained.

A template need not write a turn the same way once others follow it: many drop the thinking of
earlier turns. What is trained must be what the model sees when it is served, so such a turn gets a
chain of its own, which ends with it; all other turns share the chain of the whole conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.chat.continuation import added_tokens, served_continuation
from distill.chat.messages import is_trained
from distill.chat.template import Message, chat_text, encode_chat
from distill.errors import DataError
from distill.types import BoolArray, TokenArray

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskedTokens:
    """Token ids as the model sees them, and a mask of the same length: True where trained."""

    tokens_T: TokenArray
    loss_mask_T: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RenderedTurn:
    """Tokens up to the end of one assistant turn; those in [start, stop) are trained."""

    tokens_T: TokenArray
    start: int
    stop: int


def conversation_chains(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    stop_ids: Collection[int],
    tools: Sequence[Mapping[str, Any]] | None = None,
    context: int = 0,
) -> list[MaskedTokens]:
    """The chains of a conversation; every assistant turn is trained in exactly one of them.

    A turn's tokens are those after the template's generation prompt, through the first of
    `stop_ids`, which is where the served model stops. Where none occurs they are all of the turn's,
    and the token that the template writes behind them if that is a stop token. Turns among the
    first `context` messages are not trained, nor are those that `is_trained` excludes.

    Raises:
        DataError: no assistant turn to train, or the template cannot render one.
    """
    turns = [
        _turn(tokenizer, messages, i, stop_ids, tools)
        for i in range(context, len(messages))
        if is_trained(messages[i])
    ]
    if not turns:
        raise DataError(
            "there is no assistant turn to train; only what the "
            "assistant says is trained, without `weight: 0` or `train: false`"
        )
    text = chat_text(tokenizer, messages, tools=tools, add_generation_prompt=False)
    whole_T = encode_chat(tokenizer, text)
    last_T = turns[-1].tokens_T
    if np.array_equal(last_T[: len(whole_T)], whole_T):
        whole_T = last_T  # with the end of the last turn, where the template writes that behind it
    shared_mask_T = np.zeros(len(whole_T), np.bool_)
    chains: list[MaskedTokens] = []
    for turn in turns:
        if np.array_equal(turn.tokens_T, whole_T[: len(turn.tokens_T)]):
            shared_mask_T[turn.start : turn.stop] = True
        else:
            mask_T = np.zeros(len(turn.tokens_T), np.bool_)
            mask_T[turn.start : turn.stop] = True
            chains.append(MaskedTokens(tokens_T=turn.tokens_T, loss_mask_T=mask_T))
    if shared_mask_T.any():
        chains.append(MaskedTokens(tokens_T=whole_T, loss_mask_T=shared_mask_T))
    return chains


def _turn(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    i: int,
    stop_ids: Collection[int],
    tools: Sequence[Mapping[str, Any]] | None,
) -> _RenderedTurn:
    """Assistant turn i on its own: what the server gives the model, then what it answers."""
    if i == 0:
        raise DataError("messages[0] is the assistant's, which has nothing to answer; drop it")
    prefix = chat_text(tokenizer, messages[:i], tools=tools, add_generation_prompt=True)
    upto = chat_text(tokenizer, messages[: i + 1], tools=tools, add_generation_prompt=False)
    if not upto.startswith(prefix) or upto == prefix:
        raise DataError(
            f"the chat template does not continue its generation prompt {prefix[-40:]!r} with "
            f"messages[{i}], the assistant's, so its tokens cannot be told; use a template that "
            "does, or give `prompt` and `completion` as strings"
        )
    prefix_T, tokens_T = encode_chat(tokenizer, prefix), encode_chat(tokenizer, upto)
    if not np.array_equal(tokens_T[: len(prefix_T)], prefix_T):
        # a token would join the two; the served model has the prefix as it is and goes on from it
        rest = upto[len(prefix) :]
        added = added_tokens(tokenizer)
        answer_T = served_continuation(tokenizer, prefix_T, rest, added=added)
        answer_T = encode_chat(tokenizer, rest) if answer_T is None else answer_T
        tokens_T = np.concatenate([prefix_T, answer_T])
    is_stop_T = np.isin(tokens_T[len(prefix_T) :], list(stop_ids))
    spoken = int(np.argmax(is_stop_T)) + 1 if is_stop_T.any() else len(is_stop_T)
    if (
        not is_stop_T.any()
        and (end := _end_behind(tokenizer, messages, i, tools, upto)) in stop_ids
    ):
        tokens_T, spoken = np.append(tokens_T, np.int32(end)), spoken + 1
    return _RenderedTurn(tokens_T=tokens_T, start=len(prefix_T), stop=len(prefix_T) + spoken)


def _end_behind(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    i: int,
    tools: Sequence[Mapping[str, Any]] | None,
    upto: str,
) -> int:
    """The token with which the message behind turn i begins; -1 if that cannot be told.

    GLM's turns end with the mark of the next role, which the model says when served. Behind the
    last message the template is asked for what it would write next.
    """
    answers = "tool" if messages[i].get("tool_calls") else "user"
    following = [*messages[i + 1 : i + 2], {"role": answers, "content": "0"}][:1]
    try:
        text = chat_text(
            tokenizer, [*messages[: i + 1], *following], tools=tools, add_generation_prompt=False
        )
    except DataError:  # a role that the template does not know here
        return -1
    if not text.startswith(upto) or text == upto:
        return -1
    return int(encode_chat(tokenizer, text[len(upto) :])[0])
