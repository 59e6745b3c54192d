"""Answers in words, by a model that gives no tokens, as the student's own tokens.

ended      the text as the student's template writes it, through the stop token
cut off    the same without what follows the text, and without its last token: where another
           tokenizer was cut, the student's may have no token's end
longer     than the student may say: the first so many tokens, so no stop token
a stop token within the text ends it there, as it would end the student's
"""

from __future__ import annotations

import numpy as np

from distill.chat.template import answered, encode, is_begun
from distill.data.example_encoder import ExampleEncoder
from distill.data.prompts import Prompt
from distill.engine import Sample
from distill.errors import DataError
from distill.types import StopReason, TokenArray

# What bytes that are no character decode to: a text that was cut within one ends so.
_NO_CHARACTER = "\ufffd"


def written_sample(
    encoder: ExampleEncoder, prompt: Prompt, text: str, *, ended: bool, max_new_tokens: int
) -> Sample:
    """The answer as a sample. Nobody knows its log-probs: they are 0, and not to be used.

    Args:
        ended: whoever wrote it ended it; else it was cut off.

    Raises:
        DataError: it cannot be encoded, or is no token.
    """
    tokens_T = _turn(encoder, prompt, text) if ended else _cut(encoder, prompt, text)
    is_stop_T = np.isin(tokens_T, encoder.ends)
    if is_stop_T.any():
        tokens_T = tokens_T[: int(np.argmax(is_stop_T)) + 1]
    tokens_T = tokens_T[:max_new_tokens]
    if not len(tokens_T):
        raise DataError(f"{text[:40]!r} is none of the student's tokens")
    stops = bool(is_stop_T[len(tokens_T) - 1])
    return Sample(
        tokens_T=tokens_T,
        logprobs_T=np.zeros(len(tokens_T), np.float32),
        versions_T=np.zeros(len(tokens_T), np.int32),
        stop_reason=StopReason.EOS if stops else StopReason.LENGTH,
    )


def _turn(encoder: ExampleEncoder, prompt: Prompt, text: str) -> TokenArray:
    """The answer's tokens through a stop token, as recipe=sft trains them."""
    if prompt.messages:
        messages = answered(prompt.messages, text)
        [chain] = encoder.conversation(messages, prompt.tools, context=len(messages) - 1)
    else:
        chain = encoder.completion(prompt.text, text)
    tokens_T = chain.tokens_T[chain.loss_mask_T]
    if prompt.messages and is_begun(prompt.messages):
        spoken = encode(encoder.tokenizer, text, add_special_tokens=False)
        end_T = tokens_T[-1:] if tokens_T[-1] in encoder.ends else tokens_T[:0]
        tokens_T = np.concatenate([np.asarray(spoken, np.int32), end_T])
    if len(tokens_T) and tokens_T[-1] in encoder.ends:
        return tokens_T
    return np.append(tokens_T, np.int32(encoder.end))  # the template writes none


def _cut(encoder: ExampleEncoder, prompt: Prompt, text: str) -> TokenArray:
    """The answer's tokens without what the template writes after it, and without the last."""
    text = text.rstrip(_NO_CHARACTER)
    tokens_T = _turn(encoder, prompt, text)
    other_T = _turn(encoder, prompt, "1" if text.endswith("0") else "0")  # which ends otherwise
    shorter = min(len(tokens_T), len(other_T))
    same_T = tokens_T[len(tokens_T) - shorter :] == other_T[len(other_T) - shorter :]
    after = shorter if same_T.all() else int(np.argmin(same_T[::-1]))
    spoken_T = tokens_T[: len(tokens_T) - after]
    return spoken_T[:-1] if len(spoken_T) > 1 else spoken_T
