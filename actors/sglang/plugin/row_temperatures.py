"""The tensor maths of the SGLang plugin: the temperature of each row of prefill logits.

    requests    extend_lens, start_lens --> `rows_of_requests`: each one's run of pruned rows
    logits      chunk by chunk          --> `ScaledRows`: divided by T for the input log-probs, and
                                            kept undivided where a token is sampled

Letters: N pruned rows of the pass, G its requests, S its scored rows (the ones whose input
log-prob is asked for), V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Most logits a logsumexp takes at once: its scratch may come from memory that SGLang has counted.
_BLOCK_ELEMENTS = 1 << 22


class UnknownPassError(RuntimeError):
    """A forward pass whose shape the plugin does not understand, so it refuses to guess."""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request's rows: `count` from `first` of the N, the first `scored` of them scored.

    `first_scored` is the first one's place among the S. The last row is the one sampled from.
    """

    first: int
    count: int
    scored: int
    first_scored: int

    @property
    def sampled(self) -> int:
        return self.first + self.count - 1


def rows_of_requests(extend_lens: Sequence[int], start_lens: Sequence[int]) -> list[RequestRows]:
    """The rows that SGLang keeps: positions [start, extend) of each request, at least the last.

    A request with start == extend is not scored in this pass; its one row is there to sample from.

    Raises:
        UnknownPassError: lengths that no prefill has.
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


class ScaledRows:
    """One forward pass with a temperature other than 1 among its scored requests.

    Everything that outlives a chunk is made here, before the first: SGLang may compute the logits
    of a chunk in memory that it has borrowed from a CUDA graph.

    Args:
        temperatures_G: each request's own.
        unscaled: requests whose log-probs are wanted at T = 1 as well, by their place in the batch.
        vocab_size: most columns that the logits can have.
    """

    def __init__(
        self,
        rows: Sequence[RequestRows],
        temperatures_G: Sequence[float],
        *,
        unscaled: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        assert len(rows) == len(temperatures_G)
        self._rows = rows
        self._unscaled = [rows[g] for g in unscaled]
        self._seen = 0
        self._width: int | None = None
        self.sampled_rows_G = [request.sampled for request in rows]
        counts_G = torch.tensor([request.count for request in rows])
        temperatures_N = torch.tensor(temperatures_G, dtype=torch.float32)
        temperatures_N = temperatures_N.repeat_interleave(counts_G)
        self._divisors_N1 = _to_device(temperatures_N[:, None], device)
        self._sampled_G = _to_device(torch.tensor(self.sampled_rows_G), device)
        self._undivided_GV = torch.empty(len(rows), vocab_size, device=device)
        self._unscaled_S = torch.empty(self.scored if unscaled else 0, device=device)

    @property
    def scored(self) -> int:
        return sum(request.scored for request in self._rows)

    def take(self, logits_NV: Tensor, tokens_S: Tensor) -> Tensor:
        """The next chunk of logits, divided in place; its undivided values are noted first.

        Args:
            tokens_S: the token scored at each scored row, of the whole pass.

        Raises:
            UnknownPassError: more rows than the requests have, or not fp32 logits.
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
        return logits_NV.div_(self._divisors_N1[lo:hi])

    def _note_undivided(self, logits_NV: Tensor, lo: int, hi: int) -> None:
        first, last = bisect_left(self.sampled_rows_G, lo), bisect_left(self.sampled_rows_G, hi)
        if first < last:
            rows_NV = logits_NV[self._sampled_G[first:last] - lo]
            self._undivided_GV[first:last, : self._width] = rows_NV

    def _note_unscaled(self, logits_NV: Tensor, tokens_S: Tensor, lo: int, hi: int) -> None:
        for request in self._unscaled:
            first, last = max(lo, request.first), min(hi, request.first + request.scored)
            for row, end in _blocks(first, last, logits_NV.shape[1]):
                s, e = (n - request.first + request.first_scored for n in (row, end))
                block_NV = logits_NV[row - lo : end - lo]
                chosen_N = block_NV.gather(1, tokens_S[s:e, None]).squeeze(1)
                self._unscaled_S[s:e] = chosen_N - block_NV.logsumexp(dim=1)

    def undivided_GV(self) -> Tensor:
        """The logits to sample from, as the model gave them.

        Raises:
            UnknownPassError: not every row came by.
        """
        if self._seen != len(self._divisors_N1):
            raise UnknownPassError(
                f"{self._seen} rows of logits, where the batch's requests have "
                f"{len(self._divisors_N1)}"
            )
        return self._undivided_GV[:, : self._width].contiguous()

    def unscaled_of(self, g: int) -> Tensor:
        """Request g's log-probs at T = 1, one for each of its scored rows."""
        first = self._rows[g].first_scored
        return self._unscaled_S[first : first + self._rows[g].scored]


class Pieces:
    """Log-probs at T = 1 of one prompt, which may be prefilled in several passes."""

    def __init__(self) -> None:
        self._by_begin: dict[int, Tensor] = {}

    def up_to(self, begin: int, values_S: Tensor) -> TokenLogprobs:
        """All rows so far but the newest, which in a prompt's last pass is past its last token.

        A request that was retracted is prefilled again: what it has from `begin` on is dropped.

        Args:
            begin: position of the newest pass's first scored row.
            values_S: of its scored rows.
        """
        self._by_begin = {b: piece[: begin - b] for b, piece in self._by_begin.items() if b < begin}
        earlier = list(self._by_begin.values())
        # A copy: the values are a view of those of the whole batch.
        self._by_begin[begin] = values_S.clone()
        return TokenLogprobs([*earlier, values_S[:-1]])


class TokenLogprobs:
    """Log-probs still on the device. SGLang copies what it hands to a request when the batch's
    results are processed, after the forward: only then are they brought over."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = pieces

    def copy(self) -> list[float]:
        return torch.cat(list(self._pieces)).tolist()


def _blocks(first: int, last: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK_ELEMENTS // width)
    for row in range(first, last, step):
        yield row, min(row + step, last)


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """Asynchronous copy to the device, from pinned memory."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
