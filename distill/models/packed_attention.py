"""Attention of rows placed end to end, without padding, in one row of the model.

    PackedPass        independent rows, each of which attends only to itself
    PackedJointPass   prefixes, and the suffixes that continue them

All matrix products except those of attention process the rows unpadded. Attention pads: rows of
similar length are processed together, so that its kernels have shapes that they are fast at, and no
mask of all tokens by all tokens is built.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distill.models.attention import NOWHERE, AttentionRule, CausalPass, SlotMap, SuffixPass

# Rows are padded to one length if each gets at most this many tokens, or this share of the longest.
_LIKE_TOKENS, _LIKE_SHARE = 16, 0.25


class PackedPass:
    """Attention over rows placed end to end, L tokens, each of which attends only to its own row.

    Rows of similar length are padded to the longest of them and processed together by a
    `CausalPass`; no mask of L x L is built.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        rows = _EndToEnd(lengths, device)
        self._together = [
            (rows.grid(each), CausalPass(lengths[each[0]], keep=False))
            for each in _of_like_length(lengths)
        ]
        self._place_L = rows.places()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        outs = []
        for token_NW, causal in self._together:
            query_N, key_N, value_N = (_rows_of(each, token_NW) for each in (query, key, value))
            out = causal.attend(layer, query_N, key_N, value_N, rule)
            outs.append(out.transpose(0, 1).flatten(1, 2))
        return torch.cat(outs, dim=1).index_select(1, self._place_L)[None]


class PackedJointPass:
    """Prefixes and the suffixes that continue them, end to end in one row, without padding.

    The tokens of all prefixes come first. Only attention pads, as in `PackedPass`: suffixes of
    similar length whose prefixes have similar lengths are processed together.
    """

    def __init__(
        self,
        prefix_lengths: Sequence[int],
        prefix_of_row: Sequence[int],
        suffix_lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        self._cut = sum(prefix_lengths)
        self._causal = PackedPass(prefix_lengths, device)
        prefixes, suffixes = (
            _EndToEnd(lengths, device) for lengths in (prefix_lengths, suffix_lengths)
        )
        self._together: list[_Continued] = []
        for alike in _of_like_length(suffix_lengths):
            before = [prefix_lengths[prefix_of_row[row]] for row in alike]
            for places in _of_like_length(before):
                rows = sorted((alike[place] for place in places), key=lambda r: -suffix_lengths[r])
                own = sorted({prefix_of_row[row] for row in rows}, key=lambda u: -prefix_lengths[u])
                slots = SlotMap([own.index(prefix_of_row[row]) for row in rows], len(own), device)
                positions = _positions(
                    [prefix_lengths[prefix_of_row[row]] for row in rows],
                    [suffix_lengths[row] for row in rows],
                )
                query_NS, key_NK = (each.to(device) for each in positions)
                grids = prefixes.grid(own), suffixes.grid(rows)
                self._together.append(_Continued(*grids, slots, query_NS, key_NK))
        self._place_L = suffixes.places()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        (query_P, query_S), (key_P, key_S), (value_P, value_S) = (
            (each[:, :, : self._cut], each[:, :, self._cut :]) for each in (query, key, value)
        )
        outs = [
            each.attend(layer, query_S, (key_P, key_S), (value_P, value_S), rule)
            for each in self._together
        ]
        suffixes = torch.cat(outs, dim=1).index_select(1, self._place_L)[None]
        return torch.cat([self._causal.attend(layer, query_P, key_P, value_P, rule), suffixes], 2)


class _Continued:
    """Suffixes that are padded and processed together; each attends to its prefix and itself."""

    def __init__(
        self,
        token_UP: Tensor,
        token_NS: Tensor,
        slots: SlotMap,
        query_positions_NS: Tensor,
        key_positions_NK: Tensor,
    ) -> None:
        self._token_UP, self._token_NS = token_UP, token_NS
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._pass = SuffixPass(
            self._keys, self._values, slots, query_positions_NS, key_positions_NK, None
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: tuple[Tensor, Tensor],
        values: tuple[Tensor, Tensor],
        rule: AttentionRule,
    ) -> Tensor:
        """Attention output (heads, N S, D).

        Args:
            layer, rule: see `Pass`.
            query: queries of all suffixes.
            keys, values: those of all prefixes, and those of all suffixes.
        """
        self._keys[layer], self._values[layer] = (
            _rows_of(each, self._token_UP) for each in (keys[0], values[0])
        )
        query_N, key_N, value_N = (
            _rows_of(each, self._token_NS) for each in (query, keys[1], values[1])
        )
        out = self._pass.attend(layer, query_N, key_N, value_N, rule)
        del self._keys[layer], self._values[layer]
        return out.transpose(0, 1).flatten(1, 2)


class _EndToEnd:
    """Index maps between rows placed end to end and the padded grids of rows of similar length."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths, self._device = lengths, device
        self._starts = np.cumsum([0, *lengths])
        self._place_L = np.zeros(self._starts[-1], dtype=np.int64)
        self._padded = 0

    def grid(self, rows: Sequence[int]) -> Tensor:
        """Indices (N, W) of the tokens of these rows, which are given longest first.

        Padding repeats tokens of other rows, or the last token; no real token attends to it.
        """
        width = self._lengths[rows[0]]
        for place, row in enumerate(rows):
            first = self._padded + place * width
            self._place_L[self._starts[row] : self._starts[row + 1]] = first + np.arange(
                self._lengths[row]
            )
        self._padded += len(rows) * width
        token_NW = self._starts[list(rows)][:, None] + np.arange(width)
        return torch.from_numpy(np.minimum(token_NW, self._starts[-1] - 1)).to(self._device)

    def places(self) -> Tensor:
        """Index (L,) of each token in the concatenation of all grids."""
        return torch.from_numpy(self._place_L).to(self._device)


def _positions(firsts: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Positions of suffix tokens (N, S), and of their keys (N, P + S): prefixes, then suffixes.

    Padding queries have position 0, where each attends to the first token of its prefix, because a
    softmax over no keys is NaN.
    """
    firsts_N1, lengths_N1 = torch.tensor(firsts)[:, None], torch.tensor(lengths)[:, None]
    old_NP = torch.arange(max(firsts)).expand(len(firsts), -1)
    new_NS = torch.arange(max(lengths)).expand(len(firsts), -1)
    padded_NS, position_NS = new_NS >= lengths_N1, firsts_N1 + new_NS
    old_NP = old_NP.masked_fill(old_NP >= firsts_N1, NOWHERE)
    keys_NK = torch.cat([old_NP, position_NS.masked_fill(padded_NS, NOWHERE)], dim=1)
    return position_NS.masked_fill(padded_NS, 0), keys_NK


def _of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Lists of indices of rows of similar length, the longest first."""
    together: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True):
        longest = lengths[together[-1][0]] if together else 0
        if together and longest - lengths[row] <= max(_LIKE_TOKENS, _LIKE_SHARE * longest):
            together[-1].append(row)
        else:
            together.append([row])
    return together


def _rows_of(tensor: Tensor, token_NW: Tensor) -> Tensor:
    """(1, heads, L, D) -> (N, heads, W, D)."""
    taken = tensor[0].index_select(1, token_NW.flatten())
    return taken.unflatten(1, token_NW.shape).transpose(0, 1)
