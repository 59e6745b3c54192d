"""Training rows from supervised examples: a prompt and its completion, or a conversation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.batching import TrainingRow
from distill.conversations import Chain, conversation_chains
from distill.errors import DataError
from distill.records import located, read_rows
from distill.renderer import (
    Message,
    check_messages,
    check_text,
    check_tools,
    check_vocabulary,
    encode,
    render_text,
)

# Supervised likelihood is that of the model itself, softmax(z): the unscaled distribution.
SFT_TEMPERATURE = 1.0


def load_sft_rows(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    max_length: int,
    stop_ids: Collection[int],
) -> list[TrainingRow]:
    """Rows of a file of supervised examples, JSONL or parquet.

    An example has `prompt` and `completion` (strings), with the loss on the completion and its EOS,
    or `messages` (OpenAI chat format; `tools` beside it go to the template), with the loss on what
    the assistant says. A conversation may take several rows; see distill/conversations.py.

    Raises:
        DataError: names the file, the line, and what is wrong with it.
    """
    encoder = ExampleEncoder(
        tokenizer=tokenizer, vocab_size=vocab_size, max_length=max_length, stop_ids=stop_ids
    )
    rows: list[TrainingRow] = []
    for number, example in read_rows(path):
        where = f"{path}:{number}"
        with located(where):
            chains = _chains(encoder, example)
        rows += [supervised_row(chain, where) for chain in chains]
    return rows


def _chains(encoder: ExampleEncoder, example: Mapping[str, Any]) -> list[Chain]:
    if example.get("messages") is None:
        return [
            encoder.completion(check_text(example, "prompt"), check_text(example, "completion"))
        ]
    for field in ("prompt", "completion"):
        if example.get(field) is not None:
            raise DataError(
                f"`{field}` beside `messages`: give either `prompt` and `completion` (strings) or "
                "`messages` (chat format)"
            )
    messages = check_messages(example["messages"], "messages")
    return encoder.conversation(messages, check_tools(example))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleEncoder:
    """Examples to token chains, held to what the model can take.

    Attributes:
        vocab_size: of the model; ids are below it.
        max_length: longest chain, in tokens.
        stop_ids: what ends the served model's turn; see `distill.models.stop_token_ids`.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_length: int
    stop_ids: Collection[int]

    def completion(self, prompt: str, completion: str) -> Chain:
        """A prompt and its completion, encoded apart as they are at generation, and the EOS.

        Raises:
            DataError: no EOS, text that cannot be encoded, too long, or ids the model lacks.
        """
        if self.tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no EOS token: a completion could never end; set one")
        prompt_T = render_text(self.tokenizer, prompt)
        answer = encode(self.tokenizer, completion, add_special_tokens=False)
        answer_T = np.asarray([*answer, self.tokenizer.eos_token_id], np.int32)
        tokens_T = np.concatenate([prompt_T, answer_T])
        mask_T = np.arange(len(tokens_T)) >= len(prompt_T)
        return self._checked(Chain(tokens_T=tokens_T, loss_mask_T=mask_T))

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        context: int = 0,
    ) -> list[Chain]:
        """What the assistant says after the first `context` messages.

        Raises:
            DataError: as of `conversation_chains`; too long, or ids the model lacks.
        """
        chains = conversation_chains(
            self.tokenizer, messages, stop_ids=self.stop_ids, tools=tools, context=context
        )
        return [self._checked(chain) for chain in chains]

    def _checked(self, chain: Chain) -> Chain:
        if len(chain.tokens_T) > self.max_length:
            raise DataError(
                f"{len(chain.tokens_T)} tokens exceed the limit of {self.max_length} (the model's "
                "context or max_length); shorten or drop the row"
            )
        check_vocabulary(chain.tokens_T, self.vocab_size)
        return chain


def supervised_row(chain: Chain, source: str) -> TrainingRow:
    """A chain as a row whose trained tokens weigh 1.

    Raises:
        DataError: the first token would be trained, which has no context.
    """
    return TrainingRow(
        tokens_T=chain.tokens_T,
        loss_mask_T=chain.loss_mask_T,
        weights_T=chain.loss_mask_T.astype(np.float32),
        behaviour_logprobs_T=np.zeros(len(chain.tokens_T), np.float32),
        temperature=SFT_TEMPERATURE,
        source=source,
    )
