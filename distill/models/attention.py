"""Attention over shared prefixes: each prefix is computed and stored once for all rows.

Hugging Face models look up their attention function by name, so one registered function replaces
both the KV cache and the masks, and no model code is copied:

    base_model(..., isotherm_pass=p)  ->  every attention layer  ->  p.attend(layer, q, k, v)

A *pass* defines which tokens the new tokens attend to:

    CausalPass   earlier tokens of the same row (prefill, scoring)
    SuffixPass   a stored prefix, the row's earlier suffix, and earlier new tokens of the row
    JointPass    prefixes and the suffixes that continue them, all in one row

Visibility depends only on positions: a query attends to a key that is not later than the query and
lies inside the layer's window. Padding keys have the position `NOWHERE`. Rows never attend to one
another. `packed_attention.py` has passes for rows of any lengths, unpadded in one row.

If each row has a single new token (decoding), all rows of a prefix are multiplied with its keys
together ("cascade" attention), so the prompt is read once per group and not once per sample.
Decoding is bound by memory bandwidth, so this accounts for most of its speed. Grouped-query heads
are not expanded either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distill.errors import EngineError

ATTENTION = "isotherm_shared_prefix"
PASS_KEYWORD = "isotherm_pass"

# Position of a key that no query may attend to: later than any query.
NOWHERE = 1 << 40


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Attention parameters of one layer: score scale, sliding window in tokens, tanh soft cap."""

    scale: float
    window: int | None
    softcap: float | None


class Pass(Protocol):
    """Attention of one forward pass: from the new tokens to all tokens visible to them."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Attention output (N, heads, S, D).

        Args:
            layer: index of the layer.
            query: (N, heads, S, D).
            key, value: (N, kv_heads, S, D).
            rule: attention parameters of the layer.
        """
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' AttentionInterface; output (N, S, heads, D)."""
    # transformers builds no mask for a custom attention function, so a mask here is one that the
    # model built itself.
    others = kwargs | {"attention_mask": attention_mask}
    for name in ("attention_mask", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise EngineError(f"attention with {name} is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, sliding_window, softcap)
    layer: Any = module.layer_idx
    current: Pass = kwargs[PASS_KEYWORD]
    if torch.is_autocast_enabled(query.device.type):
        # Norms and rotary embeddings return float32 queries and keys, and no CUDA kernel supports
        # float32 with grouped heads.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return current.attend(layer, query, key, value, rule).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


def keep_attention_eager() -> None:
    """Exclude this attention function from layers that torch.compile compiles."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, torch.compiler.disable(_attention))


# Row stride, in elements, of a bias that fused CUDA kernels accept without copying: a multiple of
# this.
_ALIGNED = 16


def visibility_bias(
    query_positions_NS: Tensor, key_positions_NK: Tensor, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Attention bias: 0 where a query may attend to a key, else -inf; shape (N, 1, S, K)."""
    latest_NS1, keys_N1K = query_positions_NS[:, :, None], key_positions_NK[:, None, :]
    hidden_NSK = keys_N1K > latest_NS1
    if window is not None:
        hidden_NSK |= keys_N1K <= latest_NS1 - window
    rows, queries, keys = hidden_NSK.shape
    aligned = -(-keys // _ALIGNED) * _ALIGNED
    bias_NSK = torch.zeros(rows, queries, aligned, dtype=dtype, device=hidden_NSK.device)
    return bias_NSK[:, :, :keys].masked_fill_(hidden_NSK, float("-inf"))[:, None]


class _Visibility:
    """Attention biases of a pass, cached per window size and dtype and shared between layers.

    Boolean masks are not used: scaled_dot_product_attention would convert the mask to a bias in
    every layer and keep each bias for the backward pass.
    """

    def __init__(self, query_positions_NS: Tensor, key_positions_NK: Tensor) -> None:
        self._query_positions_NS, self._key_positions_NK = query_positions_NS, key_positions_NK
        self._made: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def bias(self, window: int | None, query: Tensor) -> Tensor:
        """Bias in the query's precision."""
        made = self._made.get((window, query.dtype))
        if made is None:
            made = self._made[window, query.dtype] = visibility_bias(
                self._query_positions_NS, self._key_positions_NK, window, query.dtype
            )
        return made


def takes_grouped_heads(
    device: str, dtype: torch.dtype, key_dim: int, value_dim: int, *, masked: bool
) -> bool:
    """True if a fused attention kernel supports grouped-query heads.

    Otherwise scaled_dot_product_attention would fall back to the math kernel, which holds the
    scores of every head in float32. On CUDA only flash attention supports grouped heads, and it
    accepts no mask. The CPU kernel always supports them, in 0.70 to 0.96 of the time of repeated
    heads.
    """
    if device != "cuda":
        return True
    return not masked and dtype.itemsize == 2 and key_dim == value_dim <= 256


def _dense(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, rule: AttentionRule
) -> Tensor:
    grouped = query.shape[1] // key.shape[1]
    if rule.softcap is None:
        if grouped > 1 and not takes_grouped_heads(
            query.device.type, query.dtype, key.shape[3], value.shape[3], masked=bias is not None
        ):
            key, value = key.repeat_interleave(grouped, 1), value.repeat_interleave(grouped, 1)
            grouped = 1
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            is_causal=bias is None,
            scale=rule.scale,
            enable_gqa=grouped > 1,
        )
    assert bias is not None
    key, value = key.repeat_interleave(grouped, 1), value.repeat_interleave(grouped, 1)
    scores = query @ key.transpose(2, 3) * rule.scale
    scores = torch.tanh(scores / rule.softcap) * rule.softcap + bias
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value


class CausalPass:
    """Causal attention within right-padded rows that start at position 0.

    With `keep`, `keys` and `values` have each layer's keys and values afterwards.
    """

    def __init__(self, length: int, *, keep: bool) -> None:
        self._length = length
        self._keep = keep
        self._visibility: _Visibility | None = None
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        if self._keep:
            self.keys[layer], self.values[layer] = key, value
        bias = None
        if rule.softcap is not None or (rule.window is not None and rule.window < self._length):
            if self._visibility is None:
                positions_1T = torch.arange(self._length, device=query.device)[None]
                self._visibility = _Visibility(positions_1T, positions_1T)
            bias = self._visibility.bias(rule.window, query)
        return _dense(query, key, value, bias, rule)


class SlotMap:
    """Mapping of rows to slots (prefix, index among its rows), to process a prefix's rows together.

    `spread` copies N rows into U x G slots, where G is the largest number of rows of any prefix;
    `collect` is its inverse. Both return views if the rows fill all slots in order, as in a batch
    of whole groups.
    """

    def __init__(self, prefix_of_row: Sequence[int], prefixes: int, device: torch.device) -> None:
        places = [0] * prefixes
        place_of_row = []
        for prefix in prefix_of_row:
            place_of_row.append(places[prefix])
            places[prefix] += 1
        self._prefixes, self._places = prefixes, max(places)
        slot_of_row = np.asarray(prefix_of_row) * self._places + place_of_row
        row_of_slot = np.zeros(prefixes * self._places, dtype=np.int64)
        row_of_slot[slot_of_row] = np.arange(len(slot_of_row))
        self._ordered = np.array_equal(slot_of_row, np.arange(len(row_of_slot)))
        self.prefix_of_row = torch.tensor(prefix_of_row, device=device)
        self._slot_of_row = torch.from_numpy(slot_of_row).to(device)
        self._row_of_slot = torch.from_numpy(row_of_slot).to(device)

    def spread(self, rows: Tensor) -> Tensor:
        """(N, kv_heads, R, E) -> (U, kv_heads, G * R, E); slots without a row repeat row 0."""
        if not self._ordered:
            rows = rows.index_select(0, self._row_of_slot)
        slots = rows.unflatten(0, (self._prefixes, self._places)).transpose(1, 2)
        return slots.flatten(2, 3)

    def collect(self, slots: Tensor) -> Tensor:
        """(U, kv_heads, G * R, E) -> (N, kv_heads, R, E)."""
        rows = slots.unflatten(2, (self._places, -1)).transpose(1, 2).flatten(0, 1)
        return rows if self._ordered else rows.index_select(0, self._slot_of_row)


Append = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class SuffixPass:
    """Attention of S new tokens per row to a stored prefix and to the row's suffix.

    Args:
        prefix_keys, prefix_values: tensors (U, kv_heads, P, D) by layer, right-padded.
        slots: the prefix that each row continues.
        query_positions_NS: positions of the new tokens; padding may have any real position.
        key_positions_NK: positions of prefix, earlier suffix and new keys; NOWHERE for padding.
        append: function that stores a layer's new keys and values and returns those of the whole
            suffix; None: nothing is stored, and the new tokens are the whole suffix.
    """

    def __init__(
        self,
        prefix_keys: dict[int, Tensor],
        prefix_values: dict[int, Tensor],
        slots: SlotMap,
        query_positions_NS: Tensor,
        key_positions_NK: Tensor,
        append: Append | None,
    ) -> None:
        self._keys, self._values, self._slots = prefix_keys, prefix_values, slots
        self._visibility = _Visibility(query_positions_NS, key_positions_NK)
        self._append = append

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        if self._append is not None:
            key, value = self._append(layer, key, value)
        bias = self._visibility.bias(rule.window, query)
        prefix_key, prefix_value = self._keys[layer], self._values[layer]
        if query.shape[2] == 1:
            return self._attend_step(query, prefix_key, prefix_value, key, value, bias, rule)
        rows = self._slots.prefix_of_row
        key = torch.cat([prefix_key.index_select(0, rows), key], dim=2)
        value = torch.cat([prefix_value.index_select(0, rows), value], dim=2)
        return _dense(query, key, value, bias, rule)

    def _attend_step(
        self,
        query: Tensor,
        prefix_key: Tensor,
        prefix_value: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        rule: AttentionRule,
    ) -> Tensor:
        prefix_length, slots = prefix_key.shape[2], self._slots
        query = (query * rule.scale).reshape(len(query), key.shape[1], -1, query.shape[3])
        prefix_scores = slots.collect(slots.spread(query) @ prefix_key.transpose(2, 3))
        scores = torch.cat([prefix_scores, query @ key.transpose(2, 3)], dim=3)
        if rule.softcap is not None:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        weights = torch.softmax(scores.add_(bias), dim=3, dtype=torch.float32).to(value.dtype)
        out = slots.collect(slots.spread(weights[..., :prefix_length]) @ prefix_value)
        out = out + weights[..., prefix_length:] @ value
        return out.reshape(len(out), -1, 1, out.shape[3])


class JointPass:
    """Prefixes and the suffixes that continue them, in one row: U * P tokens, then N * S.

    Each layer attends within each prefix, and from each suffix to its prefix and itself. No keys or
    values are kept after the layer.

    Args:
        positions_UP: positions of the prefixes' tokens; padding comes last.
        slots, query_positions_NS, key_positions_NK: see `SuffixPass`.
    """

    def __init__(
        self,
        positions_UP: Tensor,
        slots: SlotMap,
        query_positions_NS: Tensor,
        key_positions_NK: Tensor,
    ) -> None:
        self._prefix_shape, self._suffix_shape = positions_UP.shape, query_positions_NS.shape
        self._prefixes = CausalPass(positions_UP.shape[1], keep=True)
        self._suffixes = SuffixPass(
            self._prefixes.keys,
            self._prefixes.values,
            slots,
            query_positions_NS,
            key_positions_NK,
            None,
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        (query_U, query_N), (key_U, key_N), (value_U, value_N) = (
            self._apart(tensor) for tensor in (query, key, value)
        )
        outs = [
            self._prefixes.attend(layer, query_U, key_U, value_U, rule),
            self._suffixes.attend(layer, query_N, key_N, value_N, rule),
        ]
        del self._prefixes.keys[layer], self._prefixes.values[layer]
        return torch.cat([out.transpose(0, 1).flatten(1, 2) for out in outs], dim=1)[None]

    def _apart(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """(1, heads, U P + N S, D) -> (U, heads, P, D) and (N, heads, S, D)."""
        cut = self._prefix_shape.numel()
        prefix, suffix = tensor[0, :, :cut], tensor[0, :, cut:]
        return (
            prefix.unflatten(1, self._prefix_shape).transpose(0, 1),
            suffix.unflatten(1, self._suffix_shape).transpose(0, 1),
        )
