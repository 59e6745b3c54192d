"""Prompts that are text or token ids, which a program writes itself, without a chat template.

If a prompt's text begins with an earlier prompt and its sample, their tokens are kept as seen and
sampled, and only the text that the program added is encoded. Any other text is encoded as a whole.
A prompt that does not begin with all tokens of an earlier prompt and its sample begins a new
segment (`distill.chat.segments`).

    "Q: 6*7?\\nA:" -- [" I look.\\nObservation:"] -- " 42\\nA:" -- [" 42"]        one segment
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distill.chat.continuation import added_text, added_tokens, served_continuation
from distill.chat.responses import response_text
from distill.chat.template import render_text
from distill.chat.token_text import decode
from distill.engine import Sample
from distill.errors import DataError
from distill.types import StopReason, TokenArray, Tokenizer


class RawPrompts:
    """The raw prompts of one episode, with the tokens of their samples."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = added_tokens(tokenizer)
        self._tokens_by_text: dict[str, TokenArray] = {}

    def encode_prompt(self, prompt: str | Sequence[int]) -> PendingText:
        """Encode a prompt; samples of the result are converted to text by `to_message`.

        Raises:
            DataError: the prompt is empty, cannot be encoded, or has an id that is not a token.
        """
        if isinstance(prompt, str):
            text, tokens_T = prompt, self._encoded(prompt)
        else:
            if not all(0 <= id_ < len(self._tokenizer) for id_ in prompt):
                raise DataError(
                    f"`prompt` has a token id that is not within 0 and {len(self._tokenizer) - 1}",
                    field="prompt",
                )
            tokens_T = np.asarray(prompt, np.int32)
            text = decode(self._tokenizer, tokens_T)
        if not len(tokens_T):
            raise DataError("`prompt` is empty: sampling needs at least one token", field="prompt")
        return PendingText(self, self._tokenizer, text, tokens_T)

    def keep(self, text: str, tokens_T: TokenArray) -> None:
        """Store the tokens of a prompt and its sample, for prompts that begin with their text."""
        self._tokens_by_text[text] = tokens_T

    def _encoded(self, prompt: str) -> TokenArray:
        known = max(filter(prompt.startswith, self._tokens_by_text), key=len, default="")
        if known:
            before_T, rest = self._tokens_by_text[known], prompt[len(known) :]
            if not rest:
                return before_T
            added_T = served_continuation(self._tokenizer, before_T, rest, added=self._added)
            if added_T is not None:
                return np.concatenate([before_T, added_T])
        return render_text(self._tokenizer, prompt)


@dataclass(frozen=True, slots=True, eq=False)
class PendingText:
    """A raw prompt that awaits samples.

    Attributes:
        observation_T: int32 ids that the model sees.
    """

    prompts: RawPrompts
    tokenizer: Tokenizer
    text: str
    observation_T: TokenArray

    def to_message(self, sample: Sample, stops: Sequence[str] = ()) -> dict[str, str]:
        """Convert a sample to an assistant's message, whose text ends before the first of `stops`.

        The text does not contain the stop token, so that a program may continue it. If the program
        appends the stop token's text, the prompt continues from the sampled stop token.
        """
        sampled_T = np.asarray(sample.tokens_T, np.int32)
        tokens_T = np.concatenate([self.observation_T, sampled_T])
        text = response_text(self.tokenizer, self.observation_T, sample)
        if sample.stop_reason is StopReason.EOS:
            self.prompts.keep(self.text + text, tokens_T[:-1])
        whole = added_text(self.tokenizer, self.observation_T, sampled_T)
        if whole is not None:
            self.prompts.keep(self.text + whole, tokens_T)
        for stop in stops:
            text = text.partition(stop)[0]
        return {"role": "assistant", "content": text}
