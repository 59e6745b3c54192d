"""Decode probe of a model: a cached decode, replayed, against its own forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.embedded.decoding import Row
from actors.embedded.kv_cache import CachedDecoder
from distill.models.attention_probe import relative_gap
from distill.models.shared_prefix import SharedPrefixModel
from distill.sampling import EvalSampling
from distill.types import TokenArray


@torch.inference_mode()
def decode_gap(
    ours: SharedPrefixModel, rows: Sequence[TokenArray], expected: Sequence[Tensor]
) -> float:
    """Largest relative gap of two ragged rows prefilled, decoded four tokens, and replayed."""
    prompts = [row[: len(row) - 4] for row in rows]
    sampling = EvalSampling(temperature=0, max_new_tokens=5)  # nothing is sampled here
    live = [Row(None, prompt, sampling, 5, np.zeros(5)) for prompt in prompts]
    decoder = CachedDecoder(ours, 1024)
    seen = [decoder.admit(live)]
    for step in range(4):
        tokens_N = np.array([row[len(row) - 4 + step] for row in rows], dtype=np.int64)
        for row, token in zip(live, tokens_N.tolist(), strict=True):
            row.tokens.append(token)
        seen.append(decoder.feed(tokens_N))
    decoder.reset()
    seen.append(decoder.admit(live))
    return max(
        relative_gap(hidden_NH[index], expected[index][len(row) - 5 + min(step, 4)])
        for step, hidden_NH in enumerate(seen)
        for index, row in enumerate(rows)
    )
