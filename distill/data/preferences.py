"""Preference pairs: two answers to the same context, one of them preferred."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distill.chat.template import Message, check_messages, check_text, check_tools
from distill.data.assistant_masks import MaskedTokens
from distill.data.columns import with_chats
from distill.data.example_encoder import ExampleEncoder
from distill.data.row_conversion import LongRows
from distill.data.row_files import Rows, located, read_rows
from distill.data.row_forms import SIDES, check_pair
from distill.data.sft_rows import supervised_row
from distill.errors import DataError
from distill.objective.batching import TrainingRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreferencePair:
    """Two rows with the same context; the loss masks cover only the answers."""

    chosen: TrainingRow
    rejected: TrainingRow


def load_preference_pairs(
    path: str,
    encoder: ExampleEncoder,
    read: Callable[[str], Rows] = read_rows,
    long: LongRows | None = None,
) -> list[PreferencePair]:
    """Load the pairs of a source, each row in one of three forms.

        prompt       a string; `chosen` and `rejected` are strings, to which the EOS is appended.
                     If `chosen` and `rejected` are lists of messages, `prompt` is the user message
                     before them, or the first user message of both
        messages     the context in chat format (allowed in `prompt` too); `chosen` and `rejected`
                     are an assistant message (a string) or the list of messages that follow
        neither      `chosen` and `rejected` are whole conversations that begin with the same
                     messages

    With messages, `tools` go to the chat template. Only assistant messages after the shared context
    are trained, with weight 1.

    Args:
        read: reads the rows of the source at `path`.
        long: treatment of rows that are too long; None: they are refused.

    Raises:
        DataError: a row is wrong; the message names the source, the row and the fault.
    """

    def sides_of(number: int, row: Mapping[str, Any]) -> tuple[int, MaskedTokens, MaskedTokens]:
        check_pair(row)
        return number, *_chains(encoder, with_chats(row))

    return [
        PreferencePair(
            chosen=supervised_row(chosen, f"{path}:{number} chosen"),
            rejected=supervised_row(rejected, f"{path}:{number} rejected"),
        )
        for number, chosen, rejected in (long or LongRows()).converted(path, read(path), sides_of)
    ]


def scored_row(row: TrainingRow, padding: int) -> TrainingRow:
    """Append a padding token to a row, for training a reward model.

    The loss of a row is computed from the hidden states before its trained tokens, but a score from
    the last hidden state. The appended token counts as trained, so its state before is that last
    state; no other token attends to it.
    """
    return replace(
        row,
        tokens_T=np.append(row.tokens_T, np.int32(padding)),
        loss_mask_T=np.append(row.loss_mask_T, True),
        advantages_T=np.append(row.advantages_T, np.float32(0)),
        behaviour_logprobs_T=np.append(row.behaviour_logprobs_T, np.float32(0)),
    )


def _chains(encoder: ExampleEncoder, row: Mapping[str, Any]) -> tuple[MaskedTokens, MaskedTokens]:
    if row.get("prompt") is not None:
        if row.get("messages") is not None:
            raise DataError("give at most one of `prompt` (a string) and `messages` (chat format)")
        prompt = check_text(row, "prompt")
        if any(isinstance(row.get(side), list) for side in SIDES):
            return _chains(encoder, _as_chat(row, prompt))
        chosen, rejected = (
            encoder.written_completion(prompt, check_text(row, side), side) for side in SIDES
        )
    else:
        context, continuations = _split(row)
        tools = check_tools(row)
        chosen, rejected = (
            _only_chain(encoder, [*context, *continuation], tools, len(context), side)
            for side, continuation in zip(SIDES, continuations, strict=True)
        )
    if np.array_equal(chosen.tokens_T, rejected.tokens_T):
        raise _no_preference()
    return chosen, rejected


def _as_chat(row: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """Row with `prompt` moved to `messages`, or dropped if both conversations begin with it."""
    others = {name: value for name, value in row.items() if name != "prompt"}
    begins = {side: _begin(_continuation(row, side)) for side in SIDES}
    if all(message["role"] == "assistant" for message in begins.values()):
        return others | {"messages": [{"role": "user", "content": prompt}]}
    for side, message in begins.items():
        if (message["role"], message.get("content")) != ("user", prompt):
            raise DataError(
                f"`prompt` is not the first user message of `{side}`: begin both sides with it, or "
                "give only the assistant's answers there, or leave `prompt` out",
                field="prompt",
            )
    return others


def _begin(messages: Sequence[Message]) -> Message:
    """First message other than the system message, if there is one."""
    return next((message for message in messages if message["role"] != "system"), messages[0])


def _no_preference() -> DataError:
    return DataError(
        "`chosen` and `rejected` are the same: the pair states no preference; drop it",
        field="chosen",
    )


def _split(row: Mapping[str, Any]) -> tuple[list[Message], list[list[Message]]]:
    """Messages of the shared context, and the messages after it on each side."""
    if row.get("messages") is not None:
        context = check_messages(row["messages"], "messages")
        return context, [_continuation(row, side) for side in SIDES]
    for side in SIDES:
        if not isinstance(row.get(side), list):
            raise DataError(
                f"with neither `prompt` nor `messages`, `{side}` must be a whole conversation (a "
                f"list of messages), got {row.get(side)!r}",
                field=side,
            )
    chosen, rejected = (check_messages(row[side], side) for side in SIDES)
    if chosen == rejected:
        raise _no_preference()
    shared = 0
    for ours, theirs in zip(chosen, rejected, strict=False):  # one may be longer
        if ours != theirs:
            break
        shared += 1
    if not shared:
        raise DataError(
            "`chosen` and `rejected` are conversations that begin differently; give the context "
            "they share in `messages` or `prompt`, or at the beginning of both",
            field="chosen",
        )
    return chosen[:shared], [chosen[shared:], rejected[shared:]]


def _continuation(row: Mapping[str, Any], side: str) -> list[Message]:
    if isinstance(row.get(side), list):
        return check_messages(row[side], side)
    return [{"role": "assistant", "content": check_text(row, side)}]


def _only_chain(
    encoder: ExampleEncoder,
    messages: list[Message],
    tools: list[Mapping[str, Any]] | None,
    context: int,
    side: str,
) -> MaskedTokens:
    with located(f"`{side}`"):
        chains = encoder.written_conversation(messages, tools, context=context)
        if len(chains) > 1:
            raise DataError(
                "the chat template cannot render this multi-turn pair as one chain: it rewrites "
                "earlier turns (as templates do that drop thinking); end the answer after one "
                "assistant turn"
            )
    return chains[0]
