"""Experts of a mixture that tokens were routed to: engines record them, the learner replays them.

A layer's router picks K of E experts for each token. Where two are nearly as good, the last bits of
a sum decide, and an engine's are not the learner's: the same token goes through other weights
there. Replayed, it does not (Ma et al. 2025, arXiv:2510.11370).

Recorded experts are ids of shape (tokens, layers, K), of all of the model's layers: those without
experts have 0. A token of which nobody knows has `unknown_expert(dtype)` throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# uint8, or uint16 where there are more experts.
ExpertArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

# What configs call the number of experts of a layer.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_UINT8, _UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """A mixture of experts: its layers (those without experts, too), E and K."""

    layers: int
    experts: int
    top_k: int

    @classmethod
    def of(cls, config: Any) -> MixtureShape | None:
        """That of a Hugging Face config; None of a dense model's."""
        text = config.get_text_config()
        counts = (getattr(text, name, None) for name in _EXPERTS)
        experts = next((count for count in counts if isinstance(count, int) and count > 1), None)
        top_k = getattr(text, "num_experts_per_tok", None)
        if experts is None or not isinstance(top_k, int) or top_k < 1:
            return None
        return cls(layers=int(text.num_hidden_layers), experts=experts, top_k=top_k)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds every id, and one more for unknown ones."""
        return _UINT8 if self.experts <= unknown_expert(_UINT8) else _UINT16


def unknown_expert(dtype: np.dtype[Any]) -> int:
    """The id that no expert has."""
    return int(np.iinfo(dtype).max)


def merged_experts(length: int, pieces: list[tuple[int, ExpertArray]]) -> ExpertArray | None:
    """Experts of a chain of `length` tokens, from those that became known turn by turn.

    Args:
        pieces: (position of the first token, its experts and those of the tokens after it).
    """
    if not pieces:
        return None
    _, one = pieces[0]
    made = np.full((length, *one.shape[1:]), unknown_expert(one.dtype), one.dtype)
    for first, experts in pieces:
        made[first : first + len(experts)] = experts
    return made
