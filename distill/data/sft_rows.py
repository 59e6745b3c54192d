"""Training rows from supervised examples, each in one of three forms.

    prompt, completion    strings; the loss covers the completion and the EOS after it. If the
                          completion is a list of messages, the prompt is the user message before
                          them
    messages              a conversation (OpenAI chat format; the field `tools` goes to the
                          template); the loss covers the assistant's messages. A conversation may
                          need several rows: see distill/data/assistant_masks.py. If there is a
                          `completion`, the messages are its context and are not trained. Messages
                          are allowed in `prompt` too
    tokens, loss_mask     token ids, and the runs [start, stop) of them that the loss covers; the
                          field `tokenizer` is the fingerprint of the tokenizer that produced the
                          ids, which is required because nothing is encoded again

Other fields are ignored, unless a name looks like a misspelling of one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distill.chat.template import Message, check_messages, check_text, check_tools
from distill.data.assistant_masks import MaskedTokens
from distill.data.example_encoder import ExampleEncoder
from distill.data.row_conversion import LongRows
from distill.data.row_files import Rows, read_rows
from distill.data.row_forms import check_example
from distill.errors import DataError
from distill.objective.batching import TrainingRow
from distill.sampling import UNSCALED
from distill.tokenizer import vocabulary_hash
from distill.types import Tokenizer

# The supervised likelihood is that of the model's unscaled distribution, softmax(z).
SFT_TEMPERATURE = UNSCALED


def load_sft_rows(
    path: str,
    encoder: ExampleEncoder,
    read: Callable[[str], Rows] = read_rows,
    long: LongRows | None = None,
) -> list[TrainingRow]:
    """Load the training rows of a source of supervised examples, in the forms above.

    Args:
        read: reads the rows of the source at `path`.
        long: treatment of rows that are too long; None: they are refused.

    Raises:
        DataError: a row is wrong; the message names the source, the row and the fault.
    """

    def chains_of(number: int, example: Mapping[str, Any]) -> tuple[int, list[MaskedTokens]]:
        return number, _chains(encoder, example)

    examples = (long or LongRows()).converted(path, read(path), chains_of)
    return [
        supervised_row(chain, f"{path}:{number}") for number, chains in examples for chain in chains
    ]


def _chains(encoder: ExampleEncoder, example: Mapping[str, Any]) -> list[MaskedTokens]:
    form, example = check_example(example)
    if form == "messages":
        messages = check_messages(example["messages"], "messages")
        if example.get("completion") is None:
            return encoder.written_conversation(messages, check_tools(example))
        answer = _answer(example)
        tools, context = check_tools(example), len(messages)
        return encoder.written_conversation([*messages, *answer], tools, context=context)
    if form == "tokens":
        _check_tokenizer(example, encoder.tokenizer)
        ids = _check_ids(example)
        return [encoder.as_sampled(ids, _check_runs(example, len(ids)))]
    return _answered(encoder, example)


def _answered(encoder: ExampleEncoder, example: Mapping[str, Any]) -> list[MaskedTokens]:
    """Chains of `prompt` and `completion`: plain texts, or a chat if the completion is messages."""
    prompt, completion = check_text(example, "prompt"), example["completion"]
    if not isinstance(completion, list):
        text = check_text(example, "completion")
        return [encoder.written_completion(prompt, text, "completion")]
    asked: Message = {"role": "user", "content": prompt}
    return encoder.written_conversation([asked, *_answer(example)], check_tools(example), context=1)


def _answer(example: Mapping[str, Any]) -> list[Message]:
    """`completion` as messages; a text is one assistant message."""
    if isinstance(example["completion"], list):
        return check_messages(example["completion"], "completion")
    return [{"role": "assistant", "content": check_text(example, "completion")}]


def _check_tokenizer(example: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    vocab_hash = vocabulary_hash(tokenizer)
    if example.get("tokenizer") != vocab_hash:
        raise DataError(
            f"`tokens` must be ids of the model's tokenizer, with the fingerprint {vocab_hash!r}, "
            f"but `tokenizer` is {example.get('tokenizer')!r}; train a model with the tokenizer of "
            "the ids, or give text",
            field="tokens",
        )


def _check_ids(example: Mapping[str, Any]) -> list[int]:
    ids = example.get("tokens")
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise DataError(
            f"`tokens` must be a non-empty list of token ids, got {_short(ids)}", field="tokens"
        )
    if min(ids) < 0:
        raise DataError(f"`tokens` has a negative id, {min(ids)}", field="tokens")
    return ids


def _check_runs(example: Mapping[str, Any], length: int) -> list[tuple[int, int]]:
    """Runs of `loss_mask`, which must be in order, after the first token and within `length`."""
    runs = example.get("loss_mask")
    if not isinstance(runs, list) or not runs:
        raise DataError(
            f"`loss_mask` must be a non-empty list of [start, stop), got {_short(runs)}",
            field="loss_mask",
        )
    end, checked = 1, []
    for i, run in enumerate(runs):
        if not isinstance(run, list) or [type(edge) for edge in run] != [int, int]:
            raise DataError(
                f"`loss_mask[{i}]` must be [start, stop), got {_short(run)}",
                field=f"loss_mask[{i}]",
            )
        start, stop = run
        if not end <= start < stop <= length:
            raise DataError(
                f"`loss_mask[{i}]` = {run} is not a run of tokens in [{end}, {length}): runs must "
                "be in order, must not overlap, must end within the tokens, and must leave out the "
                "first token, which has no context",
                field=f"loss_mask[{i}]",
            )
        checked.append((start, stop))
        end = stop
    return checked


def _short(value: object) -> str:
    return repr(value)[:60]


def supervised_row(chain: MaskedTokens, source: str) -> TrainingRow:
    """Training row of a chain; each trained token has weight 1.

    Raises:
        DataError: the mask includes the first token, which has no context.
    """
    return TrainingRow(
        tokens_T=chain.tokens_T,
        loss_mask_T=chain.loss_mask_T,
        advantages_T=chain.loss_mask_T.astype(np.float32),
        behaviour_logprobs_T=np.broadcast_to(np.float32(0), len(chain.tokens_T)),  # no memory
        temperature=SFT_TEMPERATURE,
        source=source,
    )
