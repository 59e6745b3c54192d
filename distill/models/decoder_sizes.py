"""Sizes of a decoder by its config, from which memory, FLOPs and kernels are derived."""

from __future__ import annotations

from typing import Any, NamedTuple


class HeadSizes(NamedTuple):
    """Numbers of query heads and of key and value heads, and the width of each."""

    queries: int
    keys: int
    dim: int

    @classmethod
    def of(cls, text: Any) -> HeadSizes:
        """Sizes by a text model's config. Compressed keys and values (MLA) have other sizes.

        Raises:
            AttributeError: the config has no such fields, because the decoder has no attention.
        """
        queries = text.num_attention_heads
        return cls(
            queries,
            getattr(text, "num_key_value_heads", None) or queries,
            getattr(text, "head_dim", None) or text.hidden_size // queries,
        )


def mlp_width(text: Any) -> int:
    """Width of a layer's MLP by a text model's config; for a mixture, of its dense layers."""
    # None, under either name, means four times the hidden size in GPT-Neo and GPT-2.
    widths = (getattr(text, name, None) for name in ("intermediate_size", "n_inner"))
    return next(filter(None, widths), 4 * text.hidden_size)
