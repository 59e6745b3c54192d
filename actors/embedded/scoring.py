"""Batched scoring: plans of forward passes with shared prefixes, and the vocabulary projection.

The requests of one group continue the same prompt, which is run once if it is long enough. Only
scored positions are projected to the vocabulary, a bounded number at a time. Given and likeliest
tokens are computed only at positions of requests that list tokens. Returned hidden states are the
inputs of the projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

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
    """One request of a `score` call.

    Attributes:
        owner: the call.
        found: the score; None before it is computed, or if it is not finite.
    """

    owner: Any
    request: ScoreRequest
    found: Score | None = None

    @property
    def prefix_T(self) -> TokenArray:
        """Tokens whose hidden states are not needed: all but the one before the first scored."""
        return self.request.tokens_T[: self.request.start - 1]

    @property
    def suffix_T(self) -> TokenArray:
        """Tokens whose hidden states predict the scored tokens."""
        return self.request.tokens_T[self.request.start - 1 : -1]

    def score(self) -> Score:
        assert self.found is not None
        return self.found

    def settle(
        self, logprobs_KN: FloatArray, tops: Sequence[tuple[Tensor, Tensor]], hidden_NH: Tensor
    ) -> None:
        """Set `found` from the item's part of a batch, if all values are finite.

        Args:
            logprobs_KN: log-probs at K temperatures and N positions.
            tops: ids and log-probs of listed tokens, for consecutive ranges of positions.
            hidden_NH: hidden states at the N positions.
        """
        listed = [torch.cat(parts).cpu().numpy() for parts in zip(*tops, strict=True)]
        if not all(np.isfinite(values).all() for values in (logprobs_KN, *listed)):
            return
        top = None
        if listed:
            ids_NK, top_NK = listed
            top = TopLogprobs(ids_NK=ids_NK.astype(np.int32), logprobs_NK=top_NK)
        states, states_N = None, self.request.states_N
        if states_N is not None:
            states = HiddenStates.of(hidden_NH[torch.tensor(states_N, device=hidden_NH.device)])
        self.found = Score(
            logprobs_by_temperature=tuple(logprobs_KN.copy()), top=top, states=states
        )


@dataclass(slots=True, eq=False)
class ScoreBatch:
    """Items of one forward pass.

    Attributes:
        prefixes: shared prefixes, each run once; empty: items are run in full.
        prefix_of_item: index of each item's prefix.
    """

    items: list[ScoreItem]
    prefixes: list[TokenArray] = field(default_factory=list)
    prefix_of_item: list[int] = field(default_factory=list)

    def run(self, model: SharedPrefixModel | PlainModel, head: VocabularyHead) -> list[ScoreItem]:
        """Compute the scores of the items, and return the items."""
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
        place_M = np.concatenate(
            [np.arange(f, f + n) for f, n in zip(firsts, lengths, strict=True)]
        )
        hidden_MH = hidden_NTH[_index(row_M, hidden_NTH), _index(place_M, hidden_NTH)]
        targets_M = np.concatenate(
            [item.request.tokens_T[item.request.start :] for item in self.items]
        )
        temperatures = [item.request.temperatures for item in self.items]
        columns = max(len(of_item) for of_item in temperatures)
        # A request with fewer temperatures than the others of its batch repeats its last one.
        padded = [of_item + of_item[-1:] * (columns - len(of_item)) for of_item in temperatures]
        temperatures_MK = np.repeat(np.array(padded, dtype=np.float32), lengths, axis=0)
        ends = np.cumsum(lengths).tolist()
        spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        requests = [item.request for item in self.items]
        scored_KM, tops = _project(
            hidden_MH, targets_M, temperatures_MK, list(zip(requests, spans, strict=True)), head
        )
        for item, span, top in zip(self.items, spans, tops, strict=True):
            scored_KN = scored_KM[: len(item.request.temperatures), span]
            item.settle(scored_KN, top, hidden_MH[span])
        return self.items


def _index(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)


def _project(
    hidden_MH: Tensor,
    targets_M: TokenArray,
    temperatures_MK: FloatArray,
    spans: Sequence[tuple[ScoreRequest, slice]],
    head: VocabularyHead,
) -> tuple[FloatArray, list[list[tuple[Tensor, Tensor]]]]:
    """Compute log-probs of the targets, and listed tokens, in chunks of positions.

    Args:
        spans: each request with the range of its positions.

    Returns:
        log softmax(z / T)[target] for each position and each of its K temperatures, (K, M); and for
        each request the results of `_listed`, one for each chunk.
    """
    target_tensor_M = _index(targets_M, hidden_MH)
    temperature_tensor_MK = torch.from_numpy(temperatures_MK).to(hidden_MH.device)
    size = positions_per_chunk(hidden_MH.device, head(hidden_MH[:1]).shape[1])
    chunks: list[Tensor] = []
    tops: list[list[tuple[Tensor, Tensor]]] = [[] for _ in spans]
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
        for (request, span), top in zip(spans, tops, strict=True):
            begin, end = max(first, span.start), min(first + size, span.stop)
            if request.listed and begin < end:
                rows_NV = logits_CV[begin - first : end - first]
                top.append(_listed(rows_NV, request, begin - span.start, head.event))
    return torch.cat(chunks, dim=1).cpu().numpy(), tops


def _listed(
    logits_NV: Tensor, request: ScoreRequest, first: int, event: Event
) -> tuple[Tensor, Tensor]:
    """Ids and log softmax(z / T) in fp32 of given tokens, then of the likeliest others, best first.

    An event has the id of its first token. T is the request's first temperature.

    Args:
        logits_NV: logits of the request's scored positions from `first` on.
    """
    scaled_NV = one_outcome(logits_NV.float() / request.temperatures[0], event)
    whole_N1 = scaled_NV.logsumexp(dim=1, keepdim=True)
    ids, found = [], []
    if request.given_NK is not None:
        ids.append(_index(request.given_NK[first : first + len(logits_NV)], logits_NV))
        found.append(scaled_NV.gather(1, ids[0]))
        scaled_NV = scaled_NV.scatter(1, ids[0], -torch.inf)
    best_NK, best_ids_NK = scaled_NV.topk(request.top_k, dim=1)
    return torch.cat([*ids, best_ids_NK], 1), torch.cat([*found, best_NK], 1) - whole_N1


def plan(items: Sequence[ScoreItem], token_budget: int, most_mask: int) -> list[ScoreBatch]:
    """Split items into forward passes of at most `token_budget` padded tokens, or one item.

    Passes with shared prefixes have attention masks of at most `most_mask` elements.
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
    """Batch groups of similar length; a group that does not fit continues in the next batch."""
    batches: list[ScoreBatch] = []
    longest_prefix = longest_suffix = 0
    for members in sorted(groups, key=lambda group: -len(group[0].request.tokens_T)):
        prefix_T = members[0].prefix_T
        is_open = False  # True if the last batch contains the prefix
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
