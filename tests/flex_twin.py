"""Dense reference of flex attention; torch's own has no backward pass on a CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


def dense_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Any,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """Compute all scores, then apply the lists of blocks, and the mask within partial blocks."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if score_mod is not None:
        scores = score_mod(scores, None, None, None, None)
    scores = scores.masked_fill(~visible(block_mask), float("-inf"))
    return torch.softmax(scores, dim=-1) @ value


def visible(mask: BlockMask) -> Tensor:
    """Visible tokens (L, L) according to the lists of blocks that the kernel reads."""
    length = mask.seq_lengths[0]
    at, none = torch.arange(length), torch.zeros((), dtype=torch.long)
    asked = mask.mask_mod(none, none, at[:, None], at[None])
    size = mask.BLOCK_SIZE[0]
    partial, full = (
        listed(counts, indices).repeat_interleave(size, 0).repeat_interleave(size, 1)
        for counts, indices in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    )
    return (partial[:length, :length] & asked) | full[:length, :length]


def listed(counts: Tensor | None, indices: Tensor | None) -> Tensor:
    """Boolean (query blocks, key blocks): true where a list has the block."""
    assert counts is not None and indices is not None
    blocks = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for i, count in enumerate(counts[0, 0].tolist()):
        blocks[i, indices[0, 0, i, :count].long()] = True
    return blocks
