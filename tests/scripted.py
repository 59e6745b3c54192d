"""A policy that says what a script has: episodes are played, tokens are real, nothing is learnt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.chat.template import encode_chat
from distill.engine import GenerateRequest, Sample
from distill.envs.base import EnvContext
from distill.rewards.registry import RewardFunction, exact_match
from distill.types import StopReason
from examples.show.chat_worlds import DIGITS_APART, product_book, products, train_chat_tokenizer

# Of the turn, and what the model sees before it, as text: what it says.
Script = Callable[[int, str], str]


def chat_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return train_chat_tokenizer(directory, product_book(products(50, 0), guesses=0.3), DIGITS_APART)


def setting(
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int = 512,
    max_new_tokens: int = 48,
    reward: RewardFunction = exact_match,
    **changes: object,
) -> EnvContext:
    return EnvContext(
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        context_length=context_length,
        max_new_tokens=max_new_tokens,
        reward=reward,
        **changes,  # pyright: ignore[reportArgumentType]
    )


class Scripted:
    """Says `script(turn, seen)`, or the texts in turn. A turn longer than asked for is cut."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, script: Script | Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._script = script if callable(script) else lambda turn, _seen: script[turn]
        self.seen: list[str] = []
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        return [self._sample(request) for _ in range(request.num_samples)]

    def _sample(self, request: GenerateRequest) -> Sample:
        seen = str(self._tokenizer.decode(request.prompt_tokens_T.tolist()))
        text = self._script(len(self.seen), seen)
        self.seen.append(seen)
        self.requests.append(request)
        ids_T = np.append(encode_chat(self._tokenizer, text), self._tokenizer.eos_token_id)
        cut = len(ids_T) > request.sampling.max_new_tokens
        ids_T = ids_T[: request.sampling.max_new_tokens].astype(np.int32)
        return Sample(
            tokens_T=ids_T,
            logprobs_T=np.full(len(ids_T), -0.5, np.float32),
            versions_T=np.zeros(len(ids_T), np.int32),
            stop_reason=StopReason.LENGTH if cut else StopReason.EOS,
        )


def call(name: str, arguments: Mapping[str, object] | str) -> str:
    """A tool call as the tokenizer's template writes it."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'
