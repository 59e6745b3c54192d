"""Encoding of examples as token chains: prompt and completion, conversation, or token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distill.chat.continuation import require_continuation
from distill.chat.template import Message, check_vocabulary, render_text
from distill.chat.unwritten import check_written
from distill.data.assistant_masks import MaskedTokens, check_stops, conversation_chains
from distill.data.row_conversion import TooLong
from distill.errors import DataError
from distill.types import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleEncoder:
    """Encoder of examples as token chains that the model supports.

    Attributes:
        vocab_size: vocabulary size of the model; every id is below it.
        max_length: longest chain, in tokens.
        stop_ids: tokens that end a turn of the served model; see
            `distill.models.loading.ends_of`.
        exact: True: refuse a completion that the tokenizer cannot represent, for example because it
            lacks characters; False: encode it as closely as the tokenizer can.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_length: int
    stop_ids: Collection[int]
    exact: bool = True

    def completion(self, prompt: str, completion: str) -> MaskedTokens:
        """Token chain of a prompt, the completion encoded as its continuation, and the EOS.

        No EOS is added to a completion that ends with a stop token.

        Raises:
            DataError: there is no EOS, the text cannot be encoded or is too long, or ids are not in
                the model's vocabulary.
        """
        prompt_T = render_text(self.tokenizer, prompt)
        answer_T = require_continuation(self.tokenizer, prompt_T, completion, exact=self.exact)
        if not np.isin(answer_T[-1:], self.ends).any():
            answer_T = np.append(answer_T, np.int32(self.end))
        tokens_T = np.concatenate([prompt_T, answer_T])
        mask_T = np.arange(len(tokens_T)) >= len(prompt_T)
        return self._checked(MaskedTokens(tokens_T=tokens_T, loss_mask_T=mask_T))

    def written_completion(self, prompt: str, completion: str, field: str) -> MaskedTokens:
        """`completion` for the text in a row's `field`. Whitespace after its stop token is dropped.

        Raises:
            DataError: see `completion`; or the text has a stop token before its end.
        """
        check_stops(self.tokenizer, completion, self.ends, f"`{field}`", field)
        stripped = completion.rstrip()
        ends = any(stripped.endswith(str(self.tokenizer.decode([end]))) for end in self.ends)
        return self.completion(prompt, stripped if ends else completion)

    @property
    def end(self) -> int:
        """Token that ends a completion: the tokenizer's EOS, or the smallest stop token id.

        The EOS is used if it is a stop token or there are no stop tokens.

        Raises:
            DataError: there is neither an EOS nor a stop token.
        """
        eos: Any = self.tokenizer.eos_token_id
        if eos is not None and (eos in self.stop_ids or not self.stop_ids):
            return eos
        if not self.stop_ids:
            raise DataError("the tokenizer has no EOS token, so completions could not end; set one")
        return min(self.stop_ids)

    @property
    def ends(self) -> list[int]:
        """`end` and the stop tokens. Raises the same error as `end`."""
        return [self.end, *self.stop_ids]

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        context: int = 0,
    ) -> list[MaskedTokens]:
        """Token chains of the assistant's turns after the first `context` messages.

        Raises:
            DataError: see `conversation_chains`; or a chain is too long, or has ids that are not in
                the model's vocabulary.
        """
        chains = conversation_chains(
            self.tokenizer, messages, stop_ids=self.stop_ids, tools=tools, context=context
        )
        return [self._checked(chain) for chain in chains]

    def written_conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        context: int = 0,
    ) -> list[MaskedTokens]:
        """`conversation` for messages of a row, which the chat template must render completely.

        Raises:
            DataError: see `conversation`; or the template leaves out a part.
        """
        check_written(self.tokenizer, messages, tools=tools, context=context)
        return self.conversation(messages, tools, context=context)

    def as_sampled(self, ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> MaskedTokens:
        """Token chain of given ids; tokens in the `runs`, each [start, stop), are trained.

        Raises:
            DataError: the chain is too long, or has ids that are not in the model's vocabulary.
        """
        if max(ids) >= self.vocab_size:
            raise DataError(
                f"`tokens` has id {max(ids)}, outside the model's vocabulary of "
                f"{self.vocab_size}; train the model whose tokenizer made the ids",
                field="tokens",
            )
        mask_T = np.zeros(len(ids), np.bool_)
        for start, stop in runs:
            mask_T[start:stop] = True
        return self._checked(MaskedTokens(tokens_T=np.asarray(ids, np.int32), loss_mask_T=mask_T))

    def _checked(self, chain: MaskedTokens) -> MaskedTokens:
        if len(chain.tokens_T) > self.max_length:
            raise TooLong(
                f"{len(chain.tokens_T):,} tokens exceed the limit of {self.max_length:,} (the "
                "model's context, or max_length); raise the limit or shorten the row",
                length=len(chain.tokens_T),
                field="data.max_length",
            )
        check_vocabulary(chain.tokens_T, self.vocab_size)
        return chain
