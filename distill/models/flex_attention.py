"""Attention of packed rows by torch's flex attention: one kernel, without padding.

    token q attends to token k   if k is in q's own row, or in the prefix that q's row continues,
                                 and k is not later than q and inside the layer's window

Blocks of 128 x 128 tokens without such a pair are never computed. The kernel is compiled for CUDA;
on other devices flex attention has no backward pass. `flex_serves` compares the kernel with padded
attention on each machine before it is used there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from distill.errors import first_line
from distill.models.attention import AttentionRule
from distill.models.decoder_sizes import HeadSizes
from distill.models.packed_attention import PackedJointPass

logger = logging.getLogger(__name__)

BLOCK = 128
# Prefix lengths of the probe, the prefix that each suffix continues, and the suffix lengths; below,
# the largest allowed difference relative to the largest value.
_PREFIXES, _CONTINUE, _SUFFIXES = (150, 7), (0, 0, 1), (140, 3, 60)
_TOLERANCE = {torch.float32: 5e-3}  # float32 products may be computed in TensorFloat-32
_TOLERANCE_OF_HALVES = 3e-2


class Heads(NamedTuple):
    """Attention heads of a model: the sizes for which the kernel is compiled."""

    queries: int
    keys: int
    dim: int
    softcap: float | None

    @classmethod
    def of(cls, config: Any) -> Heads | None:
        """Heads of a decoder's config, or None if keys and values have different sizes."""
        if getattr(config, "kv_lora_rank", None) is not None:
            return None
        return cls(*HeadSizes.of(config), getattr(config, "attn_logit_softcapping", None))


class FlexPass:
    """Attention over rows placed end to end, L tokens in all, some of which may continue prefixes.

    Args:
        lengths: length of each row.
        continues: for each row, the index of the prefix row that it continues, or the row's own
            index if it continues none.
    """

    def __init__(
        self, lengths: Sequence[int], continues: Sequence[int], device: torch.device
    ) -> None:
        self._device = device
        firsts = [0 if before == row else lengths[before] for row, before in enumerate(continues)]
        row_L = np.repeat(np.arange(len(lengths)), lengths)
        starts = np.cumsum([0, *lengths])[:-1]
        position_L = np.arange(len(row_L)) - starts[row_L] + np.asarray(firsts)[row_L]
        self._columns = row_L, np.asarray(continues)[row_L], position_L
        self._row_L, self._before_L, self._position_L = (
            torch.from_numpy(each).to(device) for each in self._columns
        )
        self._masks: dict[int | None, BlockMask] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        kernel = _compiled() if query.device.type == "cuda" else flex_attention
        out = kernel(
            query,
            key,
            value,
            score_mod=None if rule.softcap is None else _softcap(rule.softcap),
            block_mask=self.mask(rule.window),
            scale=rule.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(out, Tensor)
        return out

    def mask(self, window: int | None) -> BlockMask:
        """Block mask of layers with this window, cached for all of these layers."""
        if window not in self._masks:
            some, full = _blocks(*self._columns, window)
            partial_count, partial = _listed(some & ~full, self._device)
            full_count, whole = _listed(full, self._device)
            self._masks[window] = BlockMask.from_kv_blocks(
                partial_count,
                partial,
                full_count,
                whole,
                BLOCK_SIZE=BLOCK,
                mask_mod=_sees(self._row_L, self._before_L, self._position_L, window),
                seq_lengths=(len(self._row_L), len(self._row_L)),
            )
        return self._masks[window]


def _blocks(
    row_L: np.ndarray, before_L: np.ndarray, position_L: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Two masks (query blocks, key blocks): some token attends to some key; all to all keys.

    There are far fewer rows than tokens, and each row is contiguous, so blocks are compared by
    rows, not by tokens.

    Args:
        row_L, before_L, position_L: each token's row, the row that it continues, and its position.
    """
    length = len(row_L)
    reach = length if window is None else window
    # The part of each row in each block: its first token, and its last.
    begins = np.flatnonzero(np.diff(row_L, prepend=-1))
    cuts = np.union1d(begins, np.arange(0, length, BLOCK))
    ends = np.append(cuts[1:], length) - 1
    block, row, before = cuts // BLOCK, row_L[cuts], before_L[cuts]
    first, last = position_L[cuts], position_L[ends]
    kin = (row[None, :] == row[:, None]) | (row[None, :] == before[:, None])
    some = kin & (first[None, :] <= last[:, None]) & (last[None, :] > first[:, None] - reach)
    full = kin & (last[None, :] <= first[:, None]) & (first[None, :] > last[:, None] - reach)
    starts = np.flatnonzero(np.diff(block, prepend=-1))
    seen, whole = (
        combine.reduceat(combine.reduceat(of, starts, axis=0), starts, axis=1)
        for combine, of in ((np.logical_or, some), (np.logical_and, full))
    )
    if length % BLOCK:  # the last block is not full
        whole[-1] = whole[:, -1] = False
    return seen, whole


def _sees(row_L: Tensor, before_L: Tensor, position_L: Tensor, window: int | None) -> Any:
    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        kin = (row_L[key] == row_L[query]) | (row_L[key] == before_L[query])
        return kin & (position_L[key] <= position_L[query])

    if window is None:  # not a very large number: the kernel reads more than 32 bits as 0
        return sees

    def sees_within_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, query, key) & (position_L[query] - position_L[key] < window)

    return sees_within_window


@cache
def _softcap(cap: float) -> Any:
    def capped(
        score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor
    ) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number (1, 1, Q) and indices (1, 1, Q, K) of the set key blocks of each query block.

    The indices of set blocks come first, those of all other blocks after them.
    """
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    counts = blocks.sum(1).astype(np.int32)
    count_11Q, order_11QK = (
        torch.from_numpy(each)[None, None].to(device) for each in (counts, order)
    )
    return count_11Q, order_11QK


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)


@cache
def flex_serves(heads: Heads | None, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the kernel compiles here and its outputs and gradients match padded attention.

    Call this before a forward pass, not within one: the kernel that is compiled and cached here
    must not belong to a layer.
    """
    if heads is None or device.type != "cuda":
        return False
    try:
        gap = probe_kernel(heads, dtype, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compiler errors have many types
        why = first_line(error)
        logger.warning("packed rows use padded attention, because flex attention failed: %s", why)
        return False
    if gap > _TOLERANCE.get(dtype, _TOLERANCE_OF_HALVES):
        logger.warning(
            ("packed rows use padded attention: flex attention differs from it by %.2g"), gap
        )
        return False
    return True


@torch.enable_grad()
def probe_kernel(heads: Heads, dtype: torch.dtype, device: torch.device) -> float:
    """Largest difference between flex and padded attention, over outputs and gradients.

    Differences are relative to the largest value.
    """
    passes = [
        FlexPass((*_PREFIXES, *_SUFFIXES), (0, 1, *_CONTINUE), device),
        PackedJointPass(_PREFIXES, _CONTINUE, _SUFFIXES, device),
    ]
    length = sum(_PREFIXES) + sum(_SUFFIXES)
    draw = torch.Generator(device).manual_seed(0)
    inputs = [
        torch.randn(1, n, length, heads.dim, generator=draw, device=device).to(dtype)
        for n in (heads.queries, heads.keys, heads.keys, heads.queries)
    ]
    rule = AttentionRule(heads.dim**-0.5, None, heads.softcap)
    found = []
    with torch.autocast(device.type, enabled=False):
        for current in passes:
            query, key, value = (each.clone().requires_grad_() for each in inputs[:3])
            out = current.attend(0, query, key, value, rule)
            found.append((out.detach(), *torch.autograd.grad(out, (query, key, value), inputs[3])))
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-9))
        for ours, theirs in zip(*(map(Tensor.float, each) for each in found), strict=True)
    )
