"""Batched scoring: the plan of passes, of shared prefixes and of the positions to project.

The requests of one group continue the same prompt. If it is long enough to pay, it is run once.
Only scored positions go through the vocabulary projection, a bounded number at a time. The
likeliest tokens are looked for only at the positions of the requests that want them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distill.engine import Score, ScoreRequest
from distill.models.logprobs import (
    Event,
    VocabularyHead,
    one_outcome,
    positions_per_chunk,
    selected_logprobs,
)
from distill.models.shared_prefix import PlainModel, SharedPrefixModel
from distill.objective.batching import WORTH_SHARING
from distill.types import FloatArray, TokenArray, TopLogprobs


@dataclass(slots=True, eq=False)
class ScoreItem:
    """One request, who asked, and, once scored, its score; None if that is not finite."""

    owner: Any
    request: ScoreRequest
    found: Score | None = None

    @property
    def prefix_T(self) -> TokenArray:
        """Tokens of which no hidden state is needed: the first scored token's is the next one."""
        return self.request.tokens_T[: self.request.start - 1]

    @property
    def suffix_T(self) -> TokenArray:
        """Tokens whose hidden states predict the scored ones."""
        return self.request.tokens_T[self.request.start - 1 : -1]

    def score(self) -> Score:
        assert self.found is not None
        return self.found

    def settle(self, logprobs_KN: FloatArray, top: _Top) -> None:
        """Takes the item's part of a batch: K temperatures, N positions."""
        if not (np.isfinite(logprobs_KN).all() and np.isfinite(top.logprobs_NK).all()):
            return
        self.found = Score(
            logprobs_by_temperature=tuple(logprobs_KN.copy()),
            top=TopLogprobs(**top._asdict()) if self.request.top_k else None,
        )


class _Top(NamedTuple):
    """The K likeliest tokens at each of N positions, numpy; not checked yet."""

    ids_NK: TokenArray
    logprobs_NK: FloatArray

    def part(self, first: int, end: int, k: int) -> _Top:
        return _Top(self.ids_NK[first:end, :k], self.logprobs_NK[first:end, :k])


@dataclass(slots=True, eq=False)
class ScoreBatch:
    """Items of one forward pass; with `prefixes`, each of those is run once for its items."""

    items: list[ScoreItem]
    prefixes: list[TokenArray] = field(default_factory=list)
    prefix_of_item: list[int] = field(default_factory=list)

    def run(self, model: SharedPrefixModel | PlainModel, head: VocabularyHead) -> list[ScoreItem]:
        """Settles every item; returns the items."""
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
        top_k_M = np.repeat([item.request.top_k for item in self.items], lengths)
        scored_KM, top = _project(hidden_MH, targets_M, temperatures_MK, top_k_M, head)
        end = end_of_top = 0
        for item, length in zip(self.items, lengths, strict=True):
            k, first, first_of_top = item.request.top_k, end, end_of_top
            end += length
            end_of_top += length if k else 0
            item.settle(
                scored_KM[: len(item.request.temperatures), first:end],
                top.part(first_of_top, end_of_top, k),
            )
        return self.items


def _index(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)


def _project(
    hidden_MH: Tensor,
    targets_M: TokenArray,
    temperatures_MK: FloatArray,
    top_k_M: np.ndarray,
    head: VocabularyHead,
) -> tuple[FloatArray, _Top]:
    """log softmax(z / T)[target] for each position and each of its K temperatures: (K, M).

    And the likeliest tokens at the first T, a row for each position whose `top_k_M` is above 0; as
    many as the largest of those.
    """
    target_tensor_M = _index(targets_M, hidden_MH)
    temperature_tensor_MK = torch.from_numpy(temperatures_MK).to(hidden_MH.device)
    most = int(top_k_M.max())
    size = positions_per_chunk(hidden_MH.device, head(hidden_MH[:1]).shape[1])
    chunks: list[Tensor] = []
    tops: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(hidden_MH), size):
        part = slice(first, first + size)
        logits_CV = head(hidden_MH[part])
        chunks.append(
            torch.stack(
                [
                    selected_logprobs(logits_CV, target_tensor_M[part], temperature_C, head.event)
                    for temperature_C in temperature_tensor_MK[part].T
                ]
            )
        )
        wanted_N = np.flatnonzero(top_k_M[part])
        if len(wanted_N):
            rows_N = _index(wanted_N, hidden_MH)
            temperature_N = temperature_tensor_MK[part][rows_N, 0]
            tops.append(_likeliest(logits_CV[rows_N], temperature_N, most, head.event))
    scored_KM = torch.cat(chunks, dim=1).cpu().numpy()
    if not tops:
        return scored_KM, _Top(np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))
    ids_NK, logprobs_NK = (torch.cat(parts).cpu().numpy() for parts in zip(*tops, strict=True))
    return scored_KM, _Top(ids_NK.astype(np.int32), logprobs_NK)


def _likeliest(
    logits_NV: Tensor, temperature_N: Tensor, k: int, event: Event
) -> tuple[Tensor, Tensor]:
    """(ids, log softmax(z / T), fp32) of the k likeliest tokens of each row, best first: (N, k).

    An event is among them by the id of its first token.
    """
    scaled_NV = one_outcome(logits_NV.float() / temperature_N[:, None], event)
    best_NK, ids_NK = scaled_NV.topk(k, dim=1)
    return ids_NK, best_NK - scaled_NV.logsumexp(dim=1, keepdim=True)


def plan(items: Sequence[ScoreItem], token_budget: int, most_mask: int) -> list[ScoreBatch]:
    """Splits items into forward passes of at most `token_budget` padded tokens (or one item).

    Those with shared prefixes have masks of at most `most_mask` elements.
    """
    shared: list[list[ScoreItem]] = []
    alone: list[ScoreItem] = []
    by_prefix = sorted(items, key=_prefix_name)
    for _, group in groupby(by_prefix, key=_prefix_name):
        members = list(group)
        prefix = len(members[0].prefix_T)
        suffix = max(len(item.suffix_T) for item in members)
        worth_it = prefix * (len(members) - 1) >= WORTH_SHARING
        if worth_it and suffix * (prefix + suffix) <= most_mask:
            shared.append(members)
        else:
            alone += members
    return _plan_alone(alone, token_budget) + _plan_shared(shared, token_budget, most_mask)


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


def _plan_shared(
    groups: list[list[ScoreItem]], token_budget: int, most_mask: int
) -> list[ScoreBatch]:
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
            if not batches or tokens > token_budget or mask > most_mask:
                batches.append(ScoreBatch([]))
                longest_prefix, longest_suffix, is_open = len(prefix_T), len(item.suffix_T), False
            if not is_open:
                batches[-1].prefixes.append(prefix_T)
                is_open = True
            batches[-1].items.append(item)
            batches[-1].prefix_of_item.append(len(batches[-1].prefixes) - 1)
    return batches
