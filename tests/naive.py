"""Log-probs by the definition: one plain forward pass over one row, no cache, no padding."""

from typing import Any

import numpy as np
import torch

from distill.types import FloatArray


@torch.no_grad()
def naive_distribution(
    model: Any, tokens_T: np.ndarray, start: int, temperature: float
) -> FloatArray:
    """log softmax(z / T) of every token, one row for each position from `start` on."""
    ids_1T = torch.from_numpy(tokens_T.astype(np.int64))[None]
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float()
    return torch.log_softmax(logits_TV / temperature, dim=-1)[start - 1 : -1].numpy()


def naive_logprobs(model: Any, tokens_T: np.ndarray, start: int, temperature: float) -> FloatArray:
    """log softmax(z / T)[token] for positions from `start` on."""
    log_p_NV = naive_distribution(model, tokens_T, start, temperature)
    return np.take_along_axis(log_p_NV, tokens_T[start:, None], axis=1)[:, 0]
