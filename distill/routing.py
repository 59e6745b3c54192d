"""Experts of a mixture that tokens were routed to: engines record them, the learner replays them.

A layer's router picks K of E experts for each token. If two experts score almost equally, rounding
decides, and rounds differently in an engine and in the learner: the same token passes through
different weights. Replaying the engine's experts prevents that (Ma et al. 2025, arXiv:2510.11370).

Recorded experts are ids of shape (tokens, layers, K), for all layers of the model: layers without
experts have 0. A token whose experts are unknown has `unknown_expert(dtype)` throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# uint8, or uint16 if uint8 cannot hold the ids.
ExpertArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

# Names of the number of experts of a layer in model configs.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_UINT8, _UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """Shape of a mixture of experts: number of layers (also those without experts), E and K."""

    layers: int
    experts: int
    top_k: int

    @classmethod
    def of(cls, config: Any) -> MixtureShape | None:
        """Shape of the mixture in a Hugging Face config; None for a dense model."""
        text = config.get_text_config()
        counts = (getattr(text, name, None) for name in _EXPERTS)
        experts = next((count for count in counts if isinstance(count, int) and count > 1), None)
        top_k = getattr(text, "num_experts_per_tok", None)
        if experts is None or not isinstance(top_k, int) or top_k < 1:
            return None
        return cls(layers=int(text.num_hidden_layers), experts=experts, top_k=top_k)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest dtype that holds every id, and one more for unknown experts."""
        return _UINT8 if self.experts <= unknown_expert(_UINT8) else _UINT16


def unknown_expert(dtype: np.dtype[Any]) -> int:
    """Id that stands for an unknown expert."""
    return int(np.iinfo(dtype).max)


def merged_experts(length: int, pieces: list[tuple[int, ExpertArray]]) -> ExpertArray | None:
    """Combine the experts of a chain of `length` tokens, recorded turn by turn.

    Args:
        pieces: (position of the first token, experts of it and of the tokens that follow).
    """
    if not pieces:
        return None
    _, first_piece = pieces[0]
    merged = np.full(
        (length, *first_piece.shape[1:]), unknown_expert(first_piece.dtype), first_piece.dtype
    )
    for first, experts in pieces:
        merged[first : first + len(experts)] = experts
    return merged
