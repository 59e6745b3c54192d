"""Tensor operations of the SGLang plugin: the temperature of each row of prefill logits.

    requests    extend_lens, start_lens --> `rows_of_requests`: each request's range of pruned rows
    logits      chunk by chunk          --> `ScaledRows`: divides by T for the input log-probs;
                                            keeps undivided logits of rows that sample a token,
                                            log-probs of `Listed` tokens, and requested hidden
                                            states

Letters: N pruned rows of the pass, G its requests, S its scored rows (the ones whose input
log-prob is requested), K listed tokens, V vocabulary.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.states import HiddenStates

# Maximum number of logits in one logsumexp, whose scratch memory is twice their bytes and may come
# from memory that SGLang has reserved. The bound is larger on CUDA, where each block costs several
# kernel launches: the scratch stays below that of SGLang's own log-softmax over 2,048 rows.
BLOCK_ELEMENTS, _BLOCK_ELEMENTS_ON_CUDA = 1 << 22, 1 << 26
# Characters of base64 that one call decodes (half a millisecond); a multiple of four.
_BASE64_PIECE = 1 << 18


class UnknownPassError(RuntimeError):
    """A forward pass with a shape that the plugin does not support."""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Rows of one request. The last row is the one that a token is sampled from.

    Attributes:
        first: index of the first row among the N.
        count: number of rows.
        scored: number of leading rows that are scored.
        first_scored: index of the first scored row among the S.
    """

    first: int
    count: int
    scored: int
    first_scored: int

    @property
    def sampled(self) -> int:
        return self.first + self.count - 1


def rows_of_requests(extend_lens: Sequence[int], start_lens: Sequence[int]) -> list[RequestRows]:
    """Rows that SGLang keeps: positions [start, extend) of each request, at least the last.

    A request with start == extend is not scored in this pass; its one row is used for sampling.

    Raises:
        UnknownPassError: the lengths are invalid for a prefill.
    """
    rows: list[RequestRows] = []
    first = first_scored = 0
    for extend, start in zip(extend_lens, start_lens, strict=True):
        if not 0 <= start <= extend or extend == 0:
            raise UnknownPassError(f"extend length {extend} with a log-prob start of {start}")
        scored = extend - start
        rows.append(RequestRows(first, max(scored, 1), scored, first_scored))
        first += max(scored, 1)
        first_scored += scored
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Tokens whose log-probs a request needs at each of its scored rows.

    Attributes:
        first: position of the first row of `ids_NK`.
        ids_NK: int32, on the CPU: the given tokens, one row for each scored row.
        others: number of likeliest tokens, besides the given ones, that are also returned.
    """

    first: int
    ids_NK: Tensor
    others: int

    @classmethod
    def read(cls, sent: Mapping[str, Any]) -> Listed:
        """Construct an instance from the dict that `to_json` returns."""
        ids_N = np.frombuffer(base64.b64decode(sent["ids"]), "<i4").reshape(-1, sent["k"])
        return cls(sent["first"], torch.from_numpy(ids_N.copy()), sent["others"])

    def to_json(self) -> dict[str, Any]:
        ids = self.ids_NK.numpy().astype("<i4").tobytes()
        return {
            "first": self.first,
            "k": self.ids_NK.shape[1],
            "ids": base64.b64encode(ids).decode(),
            "others": self.others,
        }

    def at(self, begin: int, rows: int) -> Tensor:
        """Given ids of `rows` rows from position `begin` on, shape (rows, K).

        The row after the last one, from which a token is sampled, gets the ids of the last row.

        Raises:
            UnknownPassError: the request gives no ids for some of the rows.
        """
        place = begin - self.first
        if not 0 <= place <= place + rows <= len(self.ids_NK) + 1:
            raise UnknownPassError(
                f"{rows} rows from position {begin} on, where ids are given for "
                f"{len(self.ids_NK)} from {self.first} on"
            )
        places = torch.arange(place, place + rows).clamp_(max=len(self.ids_NK) - 1)
        return self.ids_NK[places]


class ScaledRows:
    """One forward pass in which a request has a temperature other than 1, or listed tokens.

    All buffers that outlive a chunk are allocated in the constructor: SGLang may compute the logits
    of a chunk in memory that belongs to a CUDA graph.

    Args:
        temperatures_G: temperature of each request.
        unscaled: for requests that need log-probs at T = 1 as well, by index in the batch: ids of
            the stop event, each of which has the log-prob of all of them together.
        listed: for requests that list tokens, by index: ids (S, K) of the scored rows, and the
            number of other tokens.
        states: indices of requests that need the hidden states of their scored rows.
        vocab_size: maximum number of columns of the logits.
    """

    def __init__(
        self,
        rows: Sequence[RequestRows],
        temperatures_G: Sequence[float],
        *,
        unscaled: Mapping[int, Sequence[int]],
        vocab_size: int,
        device: torch.device,
        listed: Mapping[int, tuple[Tensor, int]] | None = None,
        states: Sequence[int] = (),
    ) -> None:
        assert len(rows) == len(temperatures_G)
        self._rows = rows
        self._unscaled = [
            (rows[g], to_device(torch.tensor(event, dtype=torch.int64), device))
            for g, event in unscaled.items()
        ]
        self._seen = 0
        self._width: int | None = None
        self.sampled_rows_G = [request.sampled for request in rows]
        counts_G = torch.tensor([request.count for request in rows])
        temperatures_N = torch.tensor(temperatures_G, dtype=torch.float32)
        temperatures_N = temperatures_N.repeat_interleave(counts_G)
        self._divisors_N1 = to_device(temperatures_N[:, None], device)
        self._sampled_G = to_device(torch.tensor(self.sampled_rows_G), device)
        self._undivided_GV = torch.empty(len(rows), vocab_size, device=device)
        self._unscaled_S = torch.empty(self.scored if unscaled else 0, device=device)
        self._listed = {
            g: _ListedRows(to_device(ids_SK.long(), device), others)
            for g, (ids_SK, others) in (listed or {}).items()
        }
        self._states: dict[int, list[Tensor]] = {g: [] for g in states}

    @property
    def scored(self) -> int:
        return sum(request.scored for request in self._rows)

    def take(self, logits_NV: Tensor, tokens_S: Tensor, hidden_NH: Tensor) -> Tensor:
        """Record values of the next chunk of logits, and divide the chunk by T in place.

        Args:
            tokens_S: the scored token of each scored row of the whole pass.
            hidden_NH: hidden states from which the head computed the chunk's logits.

        Raises:
            UnknownPassError: there are more rows than the requests have, or logits are not fp32.
        """
        lo, hi = self._seen, self._seen + len(logits_NV)
        if hi > len(self._divisors_N1) or logits_NV.dtype != torch.float32:
            raise UnknownPassError(
                f"rows {lo} to {hi} of logits in {logits_NV.dtype}, where the batch's requests "
                f"have {len(self._divisors_N1)} rows in torch.float32"
            )
        self._seen, self._width = hi, logits_NV.shape[1]
        self._note_undivided(logits_NV, lo, hi)
        self._note_unscaled(logits_NV, tokens_S, lo, hi)
        scaled_NV = logits_NV.div_(self._divisors_N1[lo:hi])
        self._note_listed(scaled_NV, lo, hi)
        self._note_states(hidden_NH, lo, hi)
        return scaled_NV

    def _note_undivided(self, logits_NV: Tensor, lo: int, hi: int) -> None:
        first, last = bisect_left(self.sampled_rows_G, lo), bisect_left(self.sampled_rows_G, hi)
        if first < last:
            rows_NV = logits_NV[self._sampled_G[first:last] - lo]
            self._undivided_GV[first:last, : self._width] = rows_NV

    def _note_unscaled(self, logits_NV: Tensor, tokens_S: Tensor, lo: int, hi: int) -> None:
        for request, event_E in self._unscaled:
            first, last = max(lo, request.first), min(hi, request.first + request.scored)
            for row, end in _blocks(first, last, logits_NV):
                s, e = (n - request.first + request.first_scored for n in (row, end))
                block_NV = logits_NV[row - lo : end - lo]
                chosen_N = block_NV.gather(1, tokens_S[s:e, None]).squeeze(1)
                if len(event_E):
                    event_N = block_NV[:, event_E].logsumexp(dim=1)
                    chosen_N = torch.where(torch.isin(tokens_S[s:e], event_E), event_N, chosen_N)
                self._unscaled_S[s:e] = chosen_N - block_NV.logsumexp(dim=1)

    def _note_listed(self, scaled_NV: Tensor, lo: int, hi: int) -> None:
        for g, listed in self._listed.items():
            request = self._rows[g]
            first, last = max(lo, request.first), min(hi, request.first + request.scored)
            for row, end in _blocks(first, last, scaled_NV):
                listed.note(scaled_NV[row - lo : end - lo], row - request.first)

    def _note_states(self, hidden_NH: Tensor, lo: int, hi: int) -> None:
        if self._states and len(hidden_NH) != hi - lo:
            raise UnknownPassError(f"{len(hidden_NH)} hidden states for {hi - lo} rows of logits")
        for g, parts in self._states.items():
            request = self._rows[g]
            first, last = max(lo, request.first), min(hi, request.first + request.scored)
            if first < last:
                parts.append(hidden_NH[first - lo : last - lo].clone())

    def undivided_GV(self) -> Tensor:
        """Undivided logits of the rows that tokens are sampled from.

        Raises:
            UnknownPassError: `take` has not received every row.
        """
        if self._seen != len(self._divisors_N1):
            raise UnknownPassError(
                f"{self._seen} rows of logits, where the batch's requests have "
                f"{len(self._divisors_N1)}"
            )
        return self._undivided_GV[:, : self._width].contiguous()

    def unscaled_of(self, g: int) -> Tensor:
        """Log-probs of request g at T = 1, one for each of its scored rows."""
        first = self._rows[g].first_scored
        return self._unscaled_S[first : first + self._rows[g].scored]

    def listed_of(self, g: int) -> Tensor:
        """Listed tokens of request g, float32 of shape (scored, given + 2 others).

        The columns are the log-probs of the given tokens, the log-probs of the others, and the ids
        of the others (int32 bits viewed as float32).
        """
        return self._listed[g].found()

    def states_of(self, g: int) -> Tensor:
        """Hidden states of request g's scored rows, in the served dtype: (scored, H)."""
        return torch.cat(self._states[g])


class _ListedRows:
    """Log-probs of listed tokens at one request's scored rows, collected chunk by chunk."""

    def __init__(self, ids_SK: Tensor, others: int) -> None:
        self._ids_SK, self._others = ids_SK, others
        listed = ids_SK.shape[1] + others
        self._logprobs_SK = torch.empty(len(ids_SK), listed, device=ids_SK.device)
        self._others_SK = torch.empty(len(ids_SK), others, dtype=torch.int32, device=ids_SK.device)

    def note(self, scaled_NV: Tensor, first: int) -> None:
        """Record rows of logits, divided by T, starting at the request's scored row `first`."""
        rows = slice(first, first + len(scaled_NV))
        ids_NK, given = self._ids_SK[rows], self._ids_SK.shape[1]
        whole_N1 = scaled_NV.logsumexp(dim=1, keepdim=True)
        self._logprobs_SK[rows, :given] = scaled_NV.gather(1, ids_NK) - whole_N1
        if self._others:
            best_NK, others_NK = scaled_NV.scatter(1, ids_NK, -torch.inf).topk(self._others, dim=1)
            self._logprobs_SK[rows, given:] = best_NK - whole_N1
            self._others_SK[rows] = others_NK.int()

    def found(self) -> Tensor:
        return torch.cat([self._logprobs_SK, self._others_SK.view(torch.float32)], dim=1)


class Pieces:
    """Values of one prompt's scored rows, collected over the passes of its prefill."""

    def __init__(self) -> None:
        self._by_begin: dict[int, Tensor] = {}

    def up_to(self, begin: int, values_S: Tensor) -> PromptValues:
        """Add the values of a pass; return all rows so far except the newest.

        In a prompt's last pass the newest row is after the prompt's last token. A retracted request
        is prefilled again: its earlier values from `begin` on are dropped.

        Args:
            begin: position of the first scored row of this pass.
            values_S: values of its scored rows, along the first dimension.
        """
        self._by_begin = {b: piece[: begin - b] for b, piece in self._by_begin.items() if b < begin}
        earlier = list(self._by_begin.values())
        # A copy: the values are a view of those of the whole batch.
        self._by_begin[begin] = values_S.clone()
        return PromptValues([*earlier, values_S[:-1]])


class PromptValues:
    """Values on the device, copied to the CPU on demand.

    SGLang calls `copy` when it processes the results of the batch, after the forward pass. `copy`
    returns a list if there is one value per row, else the name of the dtype, a colon, and the
    values in base64.
    """

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = pieces

    def copy(self) -> list[float] | str:
        values = torch.cat(list(self._pieces)).cpu()
        if values.ndim == 1:
            return values.tolist()
        content = values.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = str(values.dtype).removeprefix("torch.")
        return f"{dtype}:{base64.b64encode(content).decode()}"


def read_listed(text: str, given: int, others: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decode `PromptValues` into log-probs of given tokens, log-probs of others, ids of others.

    Raises:
        ValueError: the text is not base64, or has another size.
    """
    found = np.frombuffer(decoded(text.removeprefix("float32:")), "<f4")
    found_NK = found.reshape(-1, given + 2 * others)
    ids_NK = np.ascontiguousarray(found_NK[:, given + others :]).view("<i4")
    return found_NK[:, :given], found_NK[:, given : given + others], ids_NK


def read_states(text: str, rows: int) -> HiddenStates:
    """Decode `PromptValues` into hidden states of `rows` positions.

    Raises:
        ValueError, DataError: the text is not base64, or its dtype or size is wrong.
    """
    dtype, _, content = text.partition(":")
    return HiddenStates.from_bytes(decoded(content), dtype, rows)


def decoded(text: str) -> bytes:
    """Decode base64, in pieces: a single call would hold the GIL until the last byte.

    Raises:
        ValueError: the text is not base64.
    """
    pieces = range(0, len(text), _BASE64_PIECE)
    return b"".join(
        binascii.a2b_base64(text[i : i + _BASE64_PIECE], strict_mode=True) for i in pieces
    )


def _blocks(first: int, last: int, logits_NV: Tensor) -> Iterator[tuple[int, int]]:
    """Split the rows from `first` to `last` into ranges for one logsumexp each."""
    elements = _BLOCK_ELEMENTS_ON_CUDA if logits_NV.is_cuda else BLOCK_ELEMENTS
    step = max(1, elements // logits_NV.shape[1])
    for row in range(first, last, step):
        yield row, min(row + step, last)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Asynchronous copy to the device, from pinned memory."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
