"""Scoring in batches: what to run together, which prefix to run once, which positions to project.

The requests of one group continue the same prompt. If it is long enough to pay, it is run once.
Only scored positions go through the vocabulary projection, a bounded number at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.interfaces import Score, ScoreRequest
from distill.logprobs import positions_per_chunk, selected_logprobs
from distill.shared_prefix import MOST_MASK, WORTH_SHARING, PlainModel, SharedPrefixModel
from distill.types import FloatArray, TokenArray


@dataclass(slots=True, eq=False)
class ScoreItem:
    """One request, who asked, and, once scored, its log-probs: (temperatures, positions)."""

    owner: Any
    request: ScoreRequest
    logprobs: FloatArray | None = None

    @property
    def prefix_T(self) -> TokenArray:
        """Tokens of which no hidden state is needed: the first scored token's is the next one."""
        return self.request.tokens_T[: self.request.start - 1]

    @property
    def suffix_T(self) -> TokenArray:
        """Tokens whose hidden states predict the scored ones."""
        return self.request.tokens_T[self.request.start - 1 : -1]

    def is_finite(self) -> bool:
        return self.logprobs is not None and bool(np.isfinite(self.logprobs).all())

    def score(self) -> Score:
        assert self.logprobs is not None
        return Score(logprobs_by_temperature=tuple(self.logprobs))


@dataclass(slots=True, eq=False)
class ScoreBatch:
    """Items of one forward pass; with `prefixes`, each of those is run once for its items."""

    items: list[ScoreItem]
    prefixes: list[TokenArray] = field(default_factory=list)
    prefix_of_item: list[int] = field(default_factory=list)

    def run(
        self, model: SharedPrefixModel | PlainModel, head: Callable[[Tensor], Tensor]
    ) -> list[ScoreItem]:
        """Fills in `logprobs` of every item; returns the items."""
        lengths = [len(item.suffix_T) for item in self.items]
        if self.prefixes:
            assert isinstance(model, SharedPrefixModel)
            suffixes = [item.suffix_T for item in self.items]
            hidden_NTH = model.hidden_after(self.prefixes, self.prefix_of_item, suffixes)
            firsts = [0] * len(lengths)
        else:
            hidden_NTH = model.hidden([item.request.tokens_T[:-1] for item in self.items])
            firsts = [item.request.start - 1 for item in self.items]
        row_M = np.repeat(np.arange(len(lengths)), lengths)
        spans = [np.arange(f, f + n) for f, n in zip(firsts, lengths, strict=True)]
        place_M = np.concatenate(spans)
        hidden_MH = hidden_NTH[_index(row_M, hidden_NTH), _index(place_M, hidden_NTH)]
        targets_M = np.concatenate(
            [item.request.tokens_T[item.request.start :] for item in self.items]
        )
        temperatures = [item.request.temperatures for item in self.items]
        columns = max(len(of_item) for of_item in temperatures)
        # A request with fewer temperatures than its batch-mates repeats its last one.
        padded = [of_item + of_item[-1:] * (columns - len(of_item)) for of_item in temperatures]
        temperatures_MK = np.repeat(np.array(padded, dtype=np.float32), lengths, axis=0)
        scored_KM = _project(hidden_MH, targets_M, temperatures_MK, head)
        ends = np.cumsum(lengths)
        for item, end, length in zip(self.items, ends, lengths, strict=True):
            item.logprobs = scored_KM[: len(item.request.temperatures), end - length : end].copy()
        return self.items


def _index(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)


def _project(
    hidden_MH: Tensor,
    targets_M: TokenArray,
    temperatures_MK: FloatArray,
    head: Callable[[Tensor], Tensor],
) -> FloatArray:
    """log softmax(z / T)[target] for each position and each of its K temperatures: (K, M)."""
    target_tensor_M = _index(targets_M, hidden_MH)
    temperature_tensor_MK = torch.from_numpy(temperatures_MK).to(hidden_MH.device)
    size = positions_per_chunk(hidden_MH.device, head(hidden_MH[:1]).shape[1])
    chunks = []
    for first in range(0, len(hidden_MH), size):
        part = slice(first, first + size)
        logits_CV = head(hidden_MH[part])
        chunks.append(
            torch.stack(
                [
                    selected_logprobs(logits_CV, target_tensor_M[part], temperature_C)
                    for temperature_C in temperature_tensor_MK[part].T
                ]
            )
        )
    return torch.cat(chunks, dim=1).cpu().numpy()


def plan(items: Sequence[ScoreItem], token_budget: int, *, share: bool) -> list[ScoreBatch]:
    """Splits items into forward passes of at most `token_budget` padded tokens (or one item)."""
    shared: list[list[ScoreItem]] = []
    alone: list[ScoreItem] = []
    by_prefix = sorted(items, key=_prefix_name)
    for _, group in groupby(by_prefix, key=_prefix_name):
        members = list(group)
        prefix = len(members[0].prefix_T)
        suffix = max(len(item.suffix_T) for item in members)
        worth_it = prefix * (len(members) - 1) >= WORTH_SHARING
        if share and worth_it and suffix * (prefix + suffix) <= MOST_MASK:
            shared.append(members)
        else:
            alone += members
    return _plan_alone(alone, token_budget) + _plan_shared(shared, token_budget)


def _prefix_name(item: ScoreItem) -> bytes:
    return item.prefix_T.tobytes()


def _plan_alone(items: list[ScoreItem], token_budget: int) -> list[ScoreBatch]:
    batches: list[ScoreBatch] = []
    longest = 0
    for item in sorted(items, key=lambda item: -len(item.request.tokens_T)):
        if not batches or longest * (len(batches[-1].items) + 1) > token_budget:
            batches.append(ScoreBatch([]))
            longest = len(item.request.tokens_T) - 1
        batches[-1].items.append(item)
    return batches


def _plan_shared(groups: list[list[ScoreItem]], token_budget: int) -> list[ScoreBatch]:
    """Groups of like length go together; one that does not fit goes on in the next batch."""
    batches: list[ScoreBatch] = []
    longest_prefix = longest_suffix = 0
    for members in sorted(groups, key=lambda group: -len(group[0].request.tokens_T)):
        prefix_T = members[0].prefix_T
        is_open = False  # in the last batch, that is
        for item in sorted(members, key=lambda item: -len(item.suffix_T)):
            longest_prefix = max(longest_prefix, len(prefix_T))
            longest_suffix = max(longest_suffix, len(item.suffix_T))
            rows = len(batches[-1].items) + 1 if batches else 0
            prefixes = len(batches[-1].prefixes) + (not is_open) if batches else 0
            tokens = prefixes * longest_prefix + rows * longest_suffix
            mask = rows * longest_suffix * (longest_prefix + longest_suffix)
            if not batches or tokens > token_budget or mask > MOST_MASK:
                batches.append(ScoreBatch([]))
                longest_prefix, longest_suffix, is_open = len(prefix_T), len(item.suffix_T), False
            if not is_open:
                batches[-1].prefixes.append(prefix_T)
                is_open = True
            batches[-1].items.append(item)
            batches[-1].prefix_of_item.append(len(batches[-1].prefixes) - 1)
    return batches
