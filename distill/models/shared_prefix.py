"""Causal LMs: one that runs each shared prefix once, and a plain one for other architectures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.models.attention import (
    ATTENTION,
    NOWHERE,
    PASS_KEYWORD,
    CausalPass,
    JointPass,
    Pass,
    SlotMap,
)
from distill.models.packed_attention import PackedJointPass, PackedPass
from distill.types import TokenArray


def _one_row(prefixes_UP: Tensor, suffixes_NS: Tensor) -> Tensor:
    """Concatenate prefixes and suffixes, flattened, to one row (1, U P + N S)."""
    return torch.cat([prefixes_UP.flatten(), suffixes_NS.flatten()])[None]


def pad_right(rows: Sequence[TokenArray | Sequence[int]], device: torch.device) -> Tensor:
    """Token rows as a tensor (N, longest) int64 on `device`, right-padded with id 0."""
    tokens_NT = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int64)
    for row_T, tokens_T in zip(tokens_NT, rows, strict=True):
        row_T[: len(tokens_T)] = tokens_T
    return torch.from_numpy(tokens_NT).to(device)


# Most elements of one attention mask. With a soft cap on scores, most elements of a layer's scores:
# the cap rules out fused kernels, so the scores are held in memory.
MOST_MASK = 1 << 26


class SharedPrefixModel:
    """Base model (no vocabulary head) that is called with a pass; replaces its attention function.

    Attributes:
        most_mask: largest rows x new tokens x visible tokens of a batch that shares prefixes.
    """

    def __init__(self, model: Any) -> None:
        model.set_attn_implementation(ATTENTION)
        config = model.config.get_text_config()
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        self.most_mask = MOST_MASK // (config.num_attention_heads if capped else 1)
        self.base = model.base_model
        self.device: torch.device = model.device
        self._config = config

    def run(self, tokens_NS: Tensor, positions_NS: Tensor, current: Pass) -> Tensor:
        """Final hidden states, (N, S, H)."""
        return self.base(
            input_ids=tokens_NS,
            position_ids=positions_NS,
            use_cache=False,
            **{PASS_KEYWORD: current},
        ).last_hidden_state

    def prefill(self, tokens_NT: Tensor, *, keep: bool) -> tuple[Tensor, CausalPass]:
        """Run right-padded rows from position 0; return hidden states (N, T, H) and the pass."""
        length = tokens_NT.shape[1]
        current = CausalPass(length, keep=keep)
        positions_1T = torch.arange(length, device=self.device)[None]
        return self.run(tokens_NT, positions_1T, current), current

    def hidden(self, rows: Sequence[TokenArray]) -> Tensor:
        """Hidden states of independent rows, (N, longest, H); undefined beyond a row's end."""
        return self.hidden_padded(pad_right(rows, self.device))

    def hidden_padded(self, tokens_NT: Tensor) -> Tensor:
        """`hidden` for rows that are already right-padded."""
        return self.prefill(tokens_NT, keep=False)[0]

    def hidden_packed(self, rows: Sequence[TokenArray]) -> Tensor:
        """Hidden states of independent rows, end to end without padding, (L, H)."""
        lengths = [len(row) for row in rows]
        if self._attends_by_flex():
            current = self._flex(lengths, range(len(lengths)))
        else:
            current = PackedPass(lengths, self.device)
        return self._run_packed(rows, [0] * len(rows), current)

    def hidden_after_packed(
        self,
        prefixes: Sequence[TokenArray],
        prefix_of_row: Sequence[int],
        suffixes: Sequence[TokenArray],
    ) -> Tensor:
        """`hidden_after` for suffixes end to end, (L, H); at most attention pads."""
        prefix_lengths, suffix_lengths = ([len(row) for row in of] for of in (prefixes, suffixes))
        if self._attends_by_flex():
            continues = [*range(len(prefixes)), *prefix_of_row]
            current = self._flex([*prefix_lengths, *suffix_lengths], continues)
        else:
            current = PackedJointPass(prefix_lengths, prefix_of_row, suffix_lengths, self.device)
        firsts = [0] * len(prefixes) + [prefix_lengths[place] for place in prefix_of_row]
        return self._run_packed([*prefixes, *suffixes], firsts, current)[sum(prefix_lengths) :]

    def _attends_by_flex(self) -> bool:
        """True if flex attention works here, with which packed rows need no padding at all."""
        if self.device.type != "cuda":
            return False
        # Imported here: it takes seconds, and only a GPU needs it.
        from distill.models.flex_attention import Heads, flex_serves

        mixed = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if mixed else self.base.dtype
        return flex_serves(Heads.of(self._config), dtype, self.device)

    def _flex(self, lengths: Sequence[int], continues: Sequence[int]) -> Pass:
        from distill.models.flex_attention import FlexPass

        return FlexPass(lengths, continues, self.device)

    def _run_packed(
        self, rows: Sequence[TokenArray], firsts: Sequence[int], current: Pass
    ) -> Tensor:
        """Hidden states of rows end to end, (L, H); `firsts`: positions of their first tokens."""
        tokens_L = np.concatenate(rows).astype(np.int64)
        positions_L = np.concatenate(
            [first + np.arange(len(row)) for first, row in zip(firsts, rows, strict=True)]
        )
        tokens_1L, positions_1L = (
            torch.from_numpy(each)[None].to(self.device) for each in (tokens_L, positions_L)
        )
        return self.run(tokens_1L, positions_1L, current)[0]

    def hidden_after(
        self,
        prefixes: Sequence[TokenArray],
        prefix_of_row: Sequence[int],
        suffixes: Sequence[TokenArray],
    ) -> Tensor:
        """Hidden states of the suffix tokens, (N, longest suffix, H); each prefix is run once.

        Prefixes and suffixes go through the model as one row, so each layer runs once, as FSDP
        (which gathers a layer's weights while it runs) and activation checkpointing expect.
        """
        prefix_tokens_UP, tokens_NS = (
            pad_right(prefixes, self.device),
            pad_right(suffixes, self.device),
        )
        rows = range(len(suffixes))
        query_positions_NS, suffix_positions_NS = (
            pad_positions([len(prefixes[prefix_of_row[row]]) for row in rows], suffixes, filler)
            for filler in (0, NOWHERE)
        )
        slots = SlotMap(prefix_of_row, len(prefixes), self.device)
        prefix_positions_UP = prefix_positions(
            [len(p) for p in prefixes], prefix_tokens_UP.shape[1]
        )
        key_positions_NK = torch.cat(
            [prefix_positions_UP[list(prefix_of_row)], suffix_positions_NS], dim=1
        ).to(self.device)
        query_positions_NS = query_positions_NS.to(self.device)
        positions_UP = torch.arange(prefix_tokens_UP.shape[1], device=self.device).expand_as(
            prefix_tokens_UP
        )
        current = JointPass(positions_UP, slots, query_positions_NS, key_positions_NK)
        hidden_1LH = self.run(
            _one_row(prefix_tokens_UP, tokens_NS),
            _one_row(positions_UP, query_positions_NS),
            current,
        )
        return hidden_1LH[0, prefix_tokens_UP.numel() :].unflatten(0, tokens_NS.shape)


def last_of_each(hidden_NTH: Tensor, lengths: Sequence[int]) -> Tensor:
    """Hidden state of the last token of each right-padded row, (N, H)."""
    last_N = torch.tensor(lengths, device=hidden_NTH.device) - 1
    return hidden_NTH[torch.arange(len(lengths), device=hidden_NTH.device), last_N]


def prefix_positions(lengths: Sequence[int], longest: int) -> Tensor:
    """Positions (U, longest) int64: 0, 1, ... up to each prefix's length, then NOWHERE."""
    positions_P = torch.arange(longest)
    beyond_UP = positions_P[None] >= torch.tensor(lengths)[:, None]
    return positions_P[None].expand(len(lengths), -1).masked_fill(beyond_UP, NOWHERE)


def pad_positions(firsts: Sequence[int], rows: Sequence[TokenArray], filler: int) -> Tensor:
    """Positions (N, longest) int64: first, first + 1, ... for each row's tokens, then `filler`."""
    positions_NS = np.full((len(rows), max(len(row) for row in rows)), filler, dtype=np.int64)
    for row_S, first, tokens in zip(positions_NS, firsts, rows, strict=True):
        row_S[: len(tokens)] = np.arange(first, first + len(tokens))
    return torch.from_numpy(positions_NS)


class PlainModel:
    """Base model with its own attention, for models where it cannot be replaced. Uses no cache."""

    most_mask = 0

    def __init__(self, model: Any) -> None:
        self.base = model.base_model
        self.device: torch.device = model.device

    def hidden(self, rows: Sequence[TokenArray]) -> Tensor:
        """Hidden states, (N, longest, H). Causal models never attend to right padding."""
        return self.hidden_padded(pad_right(rows, self.device))

    def hidden_padded(self, tokens_NT: Tensor) -> Tensor:
        """`hidden` for rows that are already right-padded."""
        return self.base(input_ids=tokens_NT, use_cache=False).last_hidden_state
