"""Conversion of sampled tokens to responses as text.

All parts that judge, show or write a response use this module. The text is that of all sampled
tokens except the final stop token: special tokens are kept, and spaces are not cleaned up.
"""

from __future__ import annotations

import numpy as np

from distill.chat.continuation import added_text
from distill.chat.thinking import Response, thinking_marks
from distill.chat.token_text import decode, end_of_prompt
from distill.engine import Sample
from distill.types import StopReason, TokenArray, Tokenizer

# Most tokens of a thinking mark at a prompt's end, even if each letter is a token.
_LONGEST_MARK = 64


def response_text(tokenizer: Tokenizer, prompt_T: TokenArray, sample: Sample) -> str:
    """Text that the sampled tokens add to the prompt, without the final stop token."""
    tokens_T = np.asarray(sample.tokens_T, np.int32)
    if sample.stop_reason is StopReason.EOS:
        tokens_T = tokens_T[:-1]
    text = added_text(tokenizer, prompt_T, tokens_T)
    return decode(tokenizer, tokens_T) if text is None else text


def read_response(tokenizer: Tokenizer, prompt_T: TokenArray, sample: Sample) -> Response:
    """Response to a prompt, split into thinking and answer by the marks of the chat template."""
    marks = thinking_marks(tokenizer)
    _, end = end_of_prompt(tokenizer, prompt_T, _LONGEST_MARK)
    opening = marks.opening(end)
    return marks.response(response_text(tokenizer, prompt_T, sample), opening)
