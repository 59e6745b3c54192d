"""Batched scoring: the plan of passes, of shared prefixes and of the positions to project.

The requests of one group continue the same prompt. If it is long enough to pay, it is run once.
Only scored positions go through the vocabulary projection, a bounded number at a time. Given and
likeliest tokens are looked for only at the positions of the requests that want them. Hidden states
are those that the projection is given.
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
from distill.models.linear_stats import positions_per_chunk
from distill.models.logprobs import Event, one_outcome, selected_logprobs
from distill.models.shared_prefix import PlainModel, SharedPrefixModel
from distill.models.vocabulary_head import VocabularyHead
from distill.objective.batching import WORTH_SHARING
from distill.states import HiddenStates
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

    def settle(self, logprobs_KN: FloatArray, top: _Top | None, hidden_NH: Tensor) -> None:
        """Takes the item's part of a batch: K temperatures, N positions; None: no listed tokens."""
        listed = [] if top is None else [top.logprobs_NK]
        if not all(np.isfinite(logprobs).all() for logprobs in (logprobs_KN, *listed)):
            return
        states, states_N = None, self.request.states_N
        if states_N is not None:
            states = HiddenStates.of(hidden_NH[torch.tensor(states_N, device=hidden_NH.device)])
        self.found = Score(
            logprobs_by_temperature=tuple(logprobs_KN.copy()),
            top=None if top is None else TopLogprobs(**top._asdict()),
            states=states,
        )


class _Top(NamedTuple):
    """K tokens at each of N positions, numpy; not checked yet."""

    ids_NK: TokenArray
    logprobs_NK: FloatArray


class _Listing(NamedTuple):
    """Tokens wanted at each of N positions: `given_NK`, whose rows are filled up with the size of
    the vocabulary, and `top_k_N` of the others."""

    given_NK: TokenArray
    top_k_N: np.ndarray

    @classmethod
    def of(cls, requests: Sequence[ScoreRequest], vocab_size: int) -> _Listing:
        lengths = [len(request.tokens_T) - request.start for request in requests]
        width = max(request.listed - request.top_k for request in requests)
        given_NK = np.full((sum(lengths), width), vocab_size, np.int32)
        ends = np.cumsum(lengths)
        for request, end, length in zip(requests, ends, lengths, strict=True):
            if request.given_NK is not None:
                given_NK[end - length : end, : request.given_NK.shape[1]] = request.given_NK
        return cls(given_NK, np.repeat([request.top_k for request in requests], lengths))

    def part(self, positions: slice) -> _Listing:
        return _Listing(self.given_NK[positions], self.top_k_N[positions])

    def wanted_at(self, vocab_size: int) -> np.ndarray:
        """The positions at which any token is wanted."""
        return np.flatnonzero((self.top_k_N > 0) | (self.given_NK < vocab_size).any(axis=1))

    def of_request(self, found: _Top, first: int, request: ScoreRequest) -> _Top:
        """The request's own columns of the rows found from `first` on."""
        width, given = self.given_NK.shape[1], request.listed - request.top_k
        columns = [*range(given), *range(width, width + request.top_k)]
        rows = slice(first, first + len(request.tokens_T) - request.start)
        return _Top(found.ids_NK[rows][:, columns], found.logprobs_NK[rows][:, columns])


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
        vocab_size = head(hidden_MH[:1]).shape[1]
        listing = _Listing.of([item.request for item in self.items], vocab_size)
        scored_KM, top = _project(hidden_MH, targets_M, temperatures_MK, listing, head, vocab_size)
        end = end_of_top = 0
        for item, length in zip(self.items, lengths, strict=True):
            first = end
            end += length
            item.settle(
                scored_KM[: len(item.request.temperatures), first:end],
                listing.of_request(top, end_of_top, item.request) if item.request.listed else None,
                hidden_MH[first:end],
            )
            end_of_top += length if item.request.listed else 0
        return self.items


def _index(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)


def _project(
    hidden_MH: Tensor,
    targets_M: TokenArray,
    temperatures_MK: FloatArray,
    listing: _Listing,
    head: VocabularyHead,
    vocab_size: int,
) -> tuple[FloatArray, _Top]:
    """log softmax(z / T)[target] for each position and each of its K temperatures: (K, M).

    And the listed tokens at the first T, a row for each position at which some are wanted: the
    given ones, and as many of the others as the largest `top_k`.
    """
    target_tensor_M = _index(targets_M, hidden_MH)
    temperature_tensor_MK = torch.from_numpy(temperatures_MK).to(hidden_MH.device)
    most = int(listing.top_k_N.max())
    size = positions_per_chunk(hidden_MH.device, vocab_size)
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
        here = listing.part(part)
        wanted_N = here.wanted_at(vocab_size)
        if len(wanted_N):
            rows_N = _index(wanted_N, hidden_MH)
            temperature_N = temperature_tensor_MK[part][rows_N, 0]
            given_NK = _index(here.given_NK[wanted_N], hidden_MH)
            tops.append(_listed(logits_CV[rows_N], temperature_N, given_NK, most, head.event))
    scored_KM = torch.cat(chunks, dim=1).cpu().numpy()
    if not tops:
        return scored_KM, _Top(np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))
    ids_NK, logprobs_NK = (torch.cat(parts).cpu().numpy() for parts in zip(*tops, strict=True))
    return scored_KM, _Top(ids_NK.astype(np.int32), logprobs_NK)


def _listed(
    logits_NV: Tensor, temperature_N: Tensor, given_NK: Tensor, k: int, event: Event
) -> tuple[Tensor, Tensor]:
    """(ids, log softmax(z / T), fp32) of each row's given tokens, then of the k likeliest others,
    best first: (N, given + k). An id of V, which fills up a row, has no meaning.

    An event is among them by the id of its first token.
    """
    scaled_NV = one_outcome(logits_NV.float() / temperature_N[:, None], event)
    whole_N1 = scaled_NV.logsumexp(dim=1, keepdim=True)
    if not given_NK.shape[1]:
        best_NK, ids_NK = scaled_NV.topk(k, dim=1)
        return ids_NK, best_NK - whole_N1
    with_filler_NV = torch.nn.functional.pad(scaled_NV, (0, 1))
    found_NK = with_filler_NV.gather(1, given_NK)
    others_NV = with_filler_NV.scatter_(1, given_NK, -torch.inf)[:, :-1]
    best_NK, ids_NK = others_NV.topk(k, dim=1)
    return torch.cat([given_NK, ids_NK], dim=1), torch.cat([found_NK, best_NK], 1) - whole_N1


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
