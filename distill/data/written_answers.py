"""Answers as text, from a model that returns no tokens, converted to the student's tokens.

    complete   the text as the student's template renders it, through the stop token
    cut off    the same without the tokens after the text, and without the text's last token, since
               the cut may not be a boundary of the student's tokens
    too long   the first `max_new_tokens` tokens, without a stop token

A stop token within the text ends the answer there, as it would end the student's response.
"""

from __future__ import annotations

import numpy as np

from distill.chat.template import answered, encode, is_begun
from distill.data.example_encoder import ExampleEncoder
from distill.data.prompts import Prompt
from distill.engine import Sample
from distill.errors import DataError
from distill.types import StopReason, TokenArray

# Invalid bytes decode to this character: a text that was cut within a character ends with it.
_NO_CHARACTER = "\ufffd"


def written_sample(
    encoder: ExampleEncoder, prompt: Prompt, text: str, *, ended: bool, max_new_tokens: int
) -> Sample:
    """Build a sample from an answer. Its log-probs are unknown: they are 0 and must not be used.

    Args:
        ended: True if the answer is complete, False if it was cut off.

    Raises:
        DataError: the text cannot be encoded, or has no tokens.
    """
    tokens_T = _turn(encoder, prompt, text) if ended else _cut(encoder, prompt, text)
    is_stop_T = np.isin(tokens_T, encoder.ends)
    if is_stop_T.any():
        tokens_T = tokens_T[: int(np.argmax(is_stop_T)) + 1]
    tokens_T = tokens_T[:max_new_tokens]
    if not len(tokens_T):
        raise DataError(f"{text[:40]!r} has no tokens in the student's vocabulary")
    stops = bool(is_stop_T[len(tokens_T) - 1])
    return Sample(
        tokens_T=tokens_T,
        logprobs_T=np.zeros(len(tokens_T), np.float32),
        versions_T=np.zeros(len(tokens_T), np.int32),
        stop_reason=StopReason.EOS if stops else StopReason.LENGTH,
    )


def _turn(encoder: ExampleEncoder, prompt: Prompt, text: str) -> TokenArray:
    """Tokens of the answer through a stop token, as recipe=sft trains them."""
    if prompt.messages:
        messages = answered(prompt.messages, text)
        [chain] = encoder.conversation(messages, prompt.tools, context=len(messages) - 1)
    else:
        chain = encoder.completion(prompt.text, text)
    tokens_T = chain.tokens_T[chain.loss_mask_T]
    if prompt.messages and is_begun(prompt.messages):
        spoken = encode(encoder.tokenizer, text)
        end_T = tokens_T[-1:] if tokens_T[-1] in encoder.ends else tokens_T[:0]
        tokens_T = np.concatenate([np.asarray(spoken, np.int32), end_T])
    if len(tokens_T) and tokens_T[-1] in encoder.ends:
        return tokens_T
    return np.append(tokens_T, np.int32(encoder.end))  # the template writes no stop token


def _cut(encoder: ExampleEncoder, prompt: Prompt, text: str) -> TokenArray:
    """Tokens of the answer without its last one, and without the tokens that the template adds.

    The template's tokens are those that this answer and one that ends differently have in common at
    the end.
    """
    text = text.rstrip(_NO_CHARACTER)
    tokens_T = _turn(encoder, prompt, text)
    other_T = _turn(encoder, prompt, "1" if text.endswith("0") else "0")
    shorter = min(len(tokens_T), len(other_T))
    same_T = tokens_T[len(tokens_T) - shorter :] == other_T[len(other_T) - shorter :]
    after = shorter if same_T.all() else int(np.argmin(same_T[::-1]))
    spoken_T = tokens_T[: len(tokens_T) - after]
    return spoken_T[:-1] if len(spoken_T) > 1 else spoken_T
