"""Continuous batching of decoding: rows join between chunks, get one token per step, and leave.

A `Row` is one sample. `DecodeBatch` holds the live rows and samples their next tokens. A `Decoder`
computes the hidden state of the last token of each row, with a KV cache (`kv_cache.CachedDecoder`)
or by running every context again (`RecomputingDecoder`, for models whose attention cannot be
replaced). The module does not use asyncio; all of it runs on one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.embedded.routing_recorder import RoutingRecorder
from actors.embedded.token_sampling import SamplingPlan
from distill.engine import GenerateRequest, Sample, ScoreRequest
from distill.models.shared_prefix import PlainModel, SharedPrefixModel, last_of_each
from distill.routing import ExpertArray
from distill.sampling import Sampling, TrainSampling
from distill.stops import StopTokens
from distill.types import StopReason, TokenArray


@dataclass(slots=True, eq=False)
class Row:
    """One sample being generated.

    Attributes:
        owner: the caller's object for the request, which this module does not read.
        uniforms_T: one number in [0, 1) for each token that may be sampled.
        limit: maximum number of new tokens, from max_new_tokens and the model's context length.
        given: a token whose log-prob is reported instead of the sampled token's.
        top_k: number of likeliest outcomes to list at each sampled token.
        known: number of leading tokens whose routed experts are not returned; None: no experts are
            returned.
        experts: routed experts of the tokens that have passed through the model, in pieces.
        routed: number of tokens in `experts`.
        stop_reason: None while the row is live.
        failed: True if the model gave non-finite logits; the row ended without a stop reason.
    """

    owner: Any
    prompt_T: TokenArray
    sampling: Sampling
    limit: int
    uniforms_T: npt.NDArray[np.float64]
    given: int | None = None
    top_k: int = 0
    known: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    experts: list[ExpertArray] = field(default_factory=list)
    routed: int = 0
    stop_reason: StopReason | None = None
    failed: bool = False

    def sample(self) -> Sample:
        """The generated tokens as a `Sample`. The row must have ended."""
        assert self.stop_reason is not None
        return Sample(
            tokens_T=np.array(self.tokens, dtype=np.int32),
            logprobs_T=np.array(self.logprobs, dtype=np.float32),
            versions_T=np.array(self.versions, dtype=np.int32),
            stop_reason=self.stop_reason,
            top_ids_TK=self._top_ids_TK() if self.top_k else None,
            experts_NLK=self._experts_NLK(),
        )

    def note_experts(self, first: int, experts_NLK: ExpertArray) -> None:
        """Record the experts of the tokens from position `first` on, if not yet recorded.

        When a context is run again with new weights, the first record stays: these are the experts
        that the token passed through when the next token was sampled.
        """
        if self.known is None or not first <= self.routed < first + len(experts_NLK):
            return
        self.experts.append(experts_NLK[self.routed - first :])
        self.routed = first + len(experts_NLK)

    def _experts_NLK(self) -> ExpertArray | None:
        if self.known is None or not self.experts:
            return None
        end = len(self.prompt_T) + len(self.tokens) - 1
        return np.concatenate(self.experts)[self.known : end]

    def _top_ids_TK(self) -> TokenArray:
        return np.array(self.top_ids, np.int32).reshape(len(self.tokens), self.top_k)


def new_rows(request: GenerateRequest, limit: int, *, owner: Any) -> list[Row]:
    """Create rows for a request's samples, of at most `limit` tokens.

    The random numbers of sample g depend only on (seed, g).
    """
    rows = []
    for index in range(request.num_samples):
        entropy = np.random.SeedSequence([request.seed % (1 << 64), index])
        uniforms_T = np.random.Generator(np.random.Philox(entropy)).random(limit)
        prompt_T = request.prompt_tokens_T.astype(np.int32)
        row = Row(owner, prompt_T, request.sampling, limit, uniforms_T, top_k=request.top_k)
        row.known = request.known if request.experts else None
        rows.append(row)
    return rows


def reading_rows(request: ScoreRequest, *, owner: Any) -> list[Row]:
    """Create one row of one token for each temperature and scored position, in that order.

    Each row reports the log-prob of the request's token; the sampled token is not used.
    """
    tokens_T = request.tokens_T.astype(np.int32)
    return [
        Row(
            owner,
            tokens_T[:position],
            TrainSampling(temperature=temperature, max_new_tokens=1),
            limit=1,
            uniforms_T=np.full(1, 0.5),
            given=int(tokens_T[position]),
        )
        for temperature in request.temperatures
        for position in range(request.start, len(tokens_T))
    ]


class Routed(NamedTuple):
    """Experts of a row's tokens, from position `first` on."""

    row: int
    first: int
    experts_NLK: ExpertArray


class Decoder(Protocol):
    """Runs the contexts of the live rows, in the caller's order.

    Attributes:
        routed: experts recorded in the last `admit` or `feed`. Row numbers count the admitted rows
            after `admit`, and all rows after `feed`.
    """

    routed: list[Routed]

    def admit(self, rows: Sequence[Row]) -> Tensor:
        """Add rows after the live ones; return the hidden states of their last tokens, (N, H)."""
        ...

    def feed(self, tokens_N: npt.NDArray[np.int64]) -> Tensor:
        """Append one token to every live row; return the hidden states, (N, H)."""
        ...

    def remove(self, ended: Collection[int]) -> None:
        """Remove rows; the others are renumbered by `plan_removal`."""
        ...

    def reset(self) -> None:
        """Remove all rows and clear the cache."""
        ...


def plan_removal(count: int, ended: Collection[int]) -> list[tuple[int, int]]:
    """Moves (source, target) that make the remaining rows contiguous: the last rows fill gaps."""
    remaining = count - len(ended)
    holes = sorted(row for row in ended if row < remaining)
    sources = [row for row in range(remaining, count) if row not in ended]
    return list(zip(sources, holes, strict=True))


@dataclass(eq=False)
class DecodeBatch:
    """Live and waiting rows, and the sampling of their next tokens.

    Attributes:
        decoder: computes hidden states from contexts.
        head: hidden states (N, H) -> logits (N, V).
        stops: tokens that end a row; the stop token is part of the sample.
        max_rows: maximum number of live rows.
    """

    decoder: Decoder
    head: Callable[[Tensor], Tensor]
    stops: StopTokens
    max_rows: int
    _waiting: deque[Row] = field(init=False, default_factory=deque)
    _rows: list[Row] = field(init=False, default_factory=list)
    _hidden_NH: Tensor | None = field(init=False, default=None)
    _plan: SamplingPlan | None = field(init=False, default=None)

    def __bool__(self) -> bool:
        return bool(self._rows or self._waiting)

    def add(self, rows: Sequence[Row]) -> None:
        self._waiting.extend(rows)

    def admit(self) -> None:
        """Admit as many waiting rows as fit."""
        free = min(self.max_rows - len(self._rows), len(self._waiting))
        if not free:
            return
        new = [self._waiting.popleft() for _ in range(free)]
        hidden_NH = self.decoder.admit(new)
        self._note_experts(new)
        if self._hidden_NH is not None:
            hidden_NH = torch.cat([self._hidden_NH, hidden_NH])
        self._hidden_NH = hidden_NH
        self._rows += new
        self._plan = None

    def step(self, version: int) -> list[Row]:
        """Sample one token for every live row with weights `version`; return the ended rows."""
        if self._hidden_NH is None:
            return []
        if self._plan is None:
            samplings = [row.sampling for row in self._rows]
            self._plan = SamplingPlan(
                samplings,
                [row.given for row in self._rows],
                self._hidden_NH.device,
                self.stops.event,
                [row.top_k for row in self._rows],
            )
        uniforms_N = np.array([row.uniforms_T[len(row.tokens)] for row in self._rows])
        logits_NV = self.head(self._hidden_NH).float()
        tokens_N, logprobs_N = self._plan.sample(logits_NV, uniforms_N)
        self._list(self._plan.likeliest(logits_NV))
        ended = self._append(tokens_N, logprobs_N, version)
        if ended:
            tokens_N = self._drop(ended, tokens_N)
        if any(row.failed for row in ended.values()):
            self.recompute()  # a NaN in the cache would spread to other rows, even if masked
        elif self._rows:
            self._hidden_NH = self.decoder.feed(tokens_N)
            self._note_experts(self._rows)
        return list(ended.values())

    def _note_experts(self, rows: Sequence[Row]) -> None:
        for routed in self.decoder.routed:
            rows[routed.row].note_experts(routed.first, routed.experts_NLK)

    def _list(self, ids_NK: npt.NDArray[np.int32] | None) -> None:
        """Append the likeliest ids at the current token to the rows that list them."""
        if ids_NK is None:
            return
        listing = (row for row in self._rows if row.top_k)
        for row, ids_K in zip(listing, ids_NK, strict=True):
            row.top_ids.append(ids_K[: row.top_k])

    def _append(
        self, tokens_N: npt.NDArray[np.int64], logprobs_N: npt.NDArray[np.float32], version: int
    ) -> dict[int, Row]:
        ended: dict[int, Row] = {}
        finite = bool(np.isfinite(logprobs_N).all())
        token_logprobs = zip(tokens_N.tolist(), logprobs_N.tolist(), strict=True)
        for index, (row, (token, logprob)) in enumerate(
            zip(self._rows, token_logprobs, strict=True)
        ):
            if not finite and not np.isfinite(logprob):
                row.failed = True
                ended[index] = row
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
            if token in self.stops.ids:
                row.stop_reason = StopReason.EOS
                ended[index] = row
            elif len(row.tokens) == row.limit:
                row.stop_reason = StopReason.LENGTH
                ended[index] = row
        return ended

    def _drop(
        self, ended: Collection[int], values_N: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Remove rows; return the `values_N` of the remaining rows, in their new order."""
        moves = plan_removal(len(self._rows), ended)
        remaining = len(self._rows) - len(ended)
        for source, target in moves:
            self._rows[target] = self._rows[source]
            values_N[target] = values_N[source]
        del self._rows[remaining:]
        self._plan = None
        if remaining:
            self.decoder.remove(ended)
        else:
            self._forget_rows()
        return values_N[:remaining]

    def take_out(self, unwanted: Callable[[Row], bool]) -> list[Row]:
        """Remove and return unfinished rows, live or waiting, such as aborted ones."""
        out = [row for row in self._waiting if unwanted(row)]
        self._waiting = deque(row for row in self._waiting if not unwanted(row))
        live = {index: row for index, row in enumerate(self._rows) if unwanted(row)}
        if live:
            order_N = self._drop(live, np.arange(len(self._rows)))
            if self._hidden_NH is not None:
                self._hidden_NH = self._hidden_NH[torch.from_numpy(order_N)]
        return out + list(live.values())

    def recompute(self) -> None:
        """Clear the cache and run the contexts of the live rows again, as after new weights."""
        rows = self._rows
        self._forget_rows()
        if rows:
            self._hidden_NH = self.decoder.admit(rows)
            self._note_experts(rows)
            self._rows = rows

    def clear(self) -> None:
        """Remove all rows, live or waiting."""
        self._waiting.clear()
        self._forget_rows()

    def _forget_rows(self) -> None:
        self.decoder.reset()
        self._rows, self._hidden_NH, self._plan = [], None, None


class RecomputingDecoder:
    """Runs every full context at every step: quadratic cost, but correct for any causal model."""

    def __init__(
        self,
        model: PlainModel | SharedPrefixModel,
        token_budget: int,
        recorder: RoutingRecorder | None = None,
    ) -> None:
        self._model, self._token_budget, self._recorder = model, token_budget, recorder
        self._contexts: list[npt.NDArray[np.int64]] = []
        self.routed: list[Routed] = []

    def admit(self, rows: Sequence[Row]) -> Tensor:
        first = len(self._contexts)
        self._contexts += [np.append(row.prompt_T, row.tokens).astype(np.int64) for row in rows]
        return self._last_hidden(self._contexts[first:])

    def feed(self, tokens_N: npt.NDArray[np.int64]) -> Tensor:
        pairs = zip(self._contexts, tokens_N, strict=True)
        self._contexts = [np.append(context, token) for context, token in pairs]
        return self._last_hidden(self._contexts)

    def remove(self, ended: Collection[int]) -> None:
        for source, target in plan_removal(len(self._contexts), ended):
            self._contexts[target] = self._contexts[source]
        del self._contexts[len(self._contexts) - len(ended) :]

    def reset(self) -> None:
        self._contexts = []

    def _last_hidden(self, contexts: Sequence[npt.NDArray[np.int64]]) -> Tensor:
        self.routed = []
        longest = max(len(context) for context in contexts)
        size = max(1, self._token_budget // longest)
        hidden = []
        for first in range(0, len(contexts), size):
            part = contexts[first : first + size]
            hidden_NTH = self._model.hidden([context.astype(np.int32) for context in part])
            hidden.append(last_of_each(hidden_NTH, [len(context) for context in part]))
            if self._recorder is not None:
                experts_NTLK = self._recorder.take(hidden_NTH.shape[:2])
                for place, (context, experts_TLK) in enumerate(
                    zip(part, experts_NTLK, strict=True)
                ):
                    self.routed.append(Routed(first + place, 0, experts_TLK[: len(context)]))
        return torch.cat(hidden)
