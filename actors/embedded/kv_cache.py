"""Decoding with a KV cache that stores prompts once per group and new tokens once per row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.embedded.decoding import Routed, Row, plan_removal
from actors.embedded.routing_recorder import RoutingRecorder
from distill.models.attention import NOWHERE, SlotMap, SuffixPass
from distill.models.shared_prefix import (
    SharedPrefixModel,
    last_of_each,
    pad_right,
    prefix_positions,
)
from distill.routing import ExpertArray

_FIRST_ROWS = 32
_FIRST_COLUMNS = 8


@dataclass(slots=True, eq=False)
class _Prefix:
    """Cached prompt of live rows.

    Attributes:
        key: bytes of the prompt's token ids.
        hidden_H: hidden state of the last token.
        slot: index in the store.
        users: number of live rows that continue the prompt.
        experts_TLK: routed experts; None if they are not recorded.
    """

    key: bytes
    length: int
    hidden_H: Tensor
    slot: int
    users: int = 0
    experts_TLK: ExpertArray | None = None


def _resized(old: Tensor, rows: int, columns: int, used: slice) -> Tensor:
    """Copy the used columns of `old` to the start of a new (rows, heads, columns, D) buffer.

    The buffer is zeroed because masked keys are multiplied too, and 0 times a stray NaN is NaN.
    """
    new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
    kept = old[:, :, used]
    new[: len(old), :, : kept.shape[2]] = kept
    return new


class _PrefixStore:
    """Keys and values of U live prompts, right-padded to P: (U, kv_heads, P, D) for each layer."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, _Prefix] = {}
        self._slots: list[_Prefix] = []
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def add(
        self,
        keys: dict[int, Tensor],
        values: dict[int, Tensor],
        names: Sequence[bytes],
        lengths: Sequence[int],
        hidden_UH: Tensor,
    ) -> None:
        first, end = len(self._slots), len(self._slots) + len(names)
        for store, new in ((self._keys, keys), (self._values, values)):
            for layer, tensor in new.items():
                old = store.get(layer, tensor[:0])
                rows, columns = old.shape[0], old.shape[2]
                if end > rows or tensor.shape[2] > columns:
                    rows = rows if end <= rows else max(end, 2 * rows)
                    columns = max(tensor.shape[2], columns)
                    old = store[layer] = _resized(old, rows, columns, slice(None))
                old[first:end, :, : tensor.shape[2]] = tensor
        for name, length, hidden_H in zip(names, lengths, hidden_UH, strict=True):
            self.by_key[name] = _Prefix(name, length, hidden_H, len(self._slots))
            self._slots.append(self.by_key[name])

    def release(self, prefix: _Prefix) -> None:
        """Remove one user of a prefix. An unused prefix is replaced by that of the last slot."""
        prefix.users -= 1
        if prefix.users:
            return
        del self.by_key[prefix.key]
        moved = self._slots.pop()
        if moved is prefix:
            return
        for store in (self._keys, self._values):
            for tensor in store.values():
                tensor[prefix.slot, :, : moved.length] = tensor[moved.slot, :, : moved.length]
        moved.slot = prefix.slot
        self._slots[moved.slot] = moved

    def view(self) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        """Keys and values up to the length of the longest live prefix, and positions (U, P)."""
        lengths = [prefix.length for prefix in self._slots]
        keys, values = (
            {layer: tensor[: len(lengths), :, : max(lengths)] for layer, tensor in store.items()}
            for store in (self._keys, self._values)
        )
        return keys, values, prefix_positions(lengths, max(lengths))


class _SuffixStore:
    """Keys and values of the new tokens, right-aligned: (N, kv_heads, columns, D) for each layer.

    At each step all rows write the same column, so reads and writes are slices. The columns before
    a row joined are empty for that row (position NOWHERE). When space runs out, the columns that
    no live row uses are dropped.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows = 0
        self._start = 0  # first column that a live row uses
        self._end = 0  # first free column
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._positions = torch.full((_FIRST_ROWS, _FIRST_COLUMNS), NOWHERE, device=device)

    def open_rows(self, count: int) -> None:
        """Append empty rows."""
        needed = self.rows + count
        capacity, columns = self._positions.shape
        if needed > capacity:
            self._resize(max(needed, 2 * capacity), columns)
        self._positions[self.rows : needed] = NOWHERE
        self.rows = needed

    def trim(self, longest: int) -> None:
        """Shrink the used columns to the last `longest`, the most that a live row uses."""
        self._start = self._end - longest

    def open_columns(self, positions_NS: Tensor) -> None:
        """Add S columns for new tokens at these positions; `append` fills them in every layer."""
        count = positions_NS.shape[1]
        capacity, columns = self._positions.shape
        if self._end + count > columns:
            needed = self._end - self._start + count
            self._resize(capacity, max(_FIRST_COLUMNS, 2 * needed))
        self._positions[: self.rows, self._end : self._end + count] = positions_NS
        self._end += count

    def _resize(self, rows: int, columns: int) -> None:
        used = slice(self._start, self._end)
        kept = self._positions[:, used]
        self._positions = kept.new_full((rows, columns), NOWHERE)
        self._positions[: len(kept), : kept.shape[1]] = kept
        for store in (self._keys, self._values):
            for layer, old in store.items():
                store[layer] = _resized(old, rows, columns, used)
        self._start, self._end = 0, self._end - self._start

    def positions(self, rows: slice) -> Tensor:
        """Positions of the rows' tokens, (rows, columns in use)."""
        return self._positions[rows, self._start : self._end]

    def append(
        self, rows: slice, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values to the newest columns; return all columns in use."""
        new_columns = slice(self._end - keys.shape[2], self._end)
        in_use = slice(self._start, self._end)
        views = []
        for store, new in ((self._keys, keys), (self._values, values)):
            buffer = store.get(layer)
            if buffer is None:
                capacity, columns = self._positions.shape
                buffer = store[layer] = _resized(new[:0], capacity, columns, slice(0))
            buffer[rows, :, new_columns] = new
            views.append(buffer[rows, :, in_use])
        return views[0], views[1]

    def remove(self, moves: Sequence[tuple[int, int]], remaining: int) -> None:
        """Copy row `source` to row `target` for each move; keep the first `remaining` rows."""
        if moves:
            sources, targets = (list(side) for side in zip(*moves, strict=True))
            used = slice(self._start, self._end)
            self._positions[targets, used] = self._positions[sources, used]
            for store in (self._keys, self._values):
                for tensor in store.values():
                    tensor[targets, :, used] = tensor[sources, :, used]
        self.rows = remaining


class CachedDecoder:
    """A `Decoder` that runs every context token once. Rows with equal prompts share a prefix."""

    def __init__(
        self,
        model: SharedPrefixModel,
        token_budget: int,
        recorder: RoutingRecorder | None = None,
    ) -> None:
        self._model, self._token_budget, self._recorder = model, token_budget, recorder
        self.routed: list[Routed] = []
        self.reset()

    def reset(self) -> None:
        self._prefixes = _PrefixStore()
        self._suffixes = _SuffixStore(self._model.device)
        self._prefix_of_row: list[_Prefix] = []
        self._fed_N = np.zeros(0, dtype=np.int64)  # suffix tokens of each row
        self._rows_changed()

    def _rows_changed(self) -> None:
        self._lengths_N: npt.NDArray[np.int64] | None = None
        self._views: tuple[dict[int, Tensor], dict[int, Tensor], SlotMap, Tensor] | None = None

    def admit(self, rows: Sequence[Row]) -> Tensor:
        """See `Decoder.admit`. Rows that already have tokens may only join an empty decoder.

        Such rows are admitted again after the cache was cleared.
        """
        self._prefill({row.prompt_T.tobytes(): row.prompt_T for row in rows})
        new = [self._prefixes.by_key[row.prompt_T.tobytes()] for row in rows]
        for prefix in new:
            prefix.users += 1
        self._prefix_of_row += new
        self._suffixes.open_rows(len(rows))
        self._fed_N = np.append(self._fed_N, np.zeros(len(rows), dtype=np.int64))
        self._rows_changed()
        self.routed = [
            Routed(row, 0, prefix.experts_TLK)
            for row, prefix in enumerate(new)
            if prefix.experts_TLK is not None
        ]
        hidden_NH = torch.stack([prefix.hidden_H for prefix in new])
        if any(row.tokens for row in rows):
            assert len(self._prefix_of_row) == len(rows)
            self._replay([row.tokens for row in rows], hidden_NH)
        return hidden_NH

    def _prefill(self, prompts: dict[bytes, npt.NDArray[np.int32]]) -> None:
        missing = [name for name in prompts if name not in self._prefixes.by_key]
        missing.sort(key=len)
        while missing:
            size = 1
            while size < len(missing) and self._fits(size + 1, len(prompts[missing[size]])):
                size += 1
            batch, missing = missing[:size], missing[size:]
            lengths = [len(prompts[name]) for name in batch]
            tokens_NT = pad_right([prompts[name] for name in batch], self._model.device)
            hidden_NTH, run = self._model.prefill(tokens_NT, keep=True)
            hidden_NH = last_of_each(hidden_NTH, lengths)
            self._prefixes.add(run.keys, run.values, batch, lengths, hidden_NH)
            if self._recorder is not None:
                experts_NTLK = self._recorder.take(tokens_NT.shape)
                for name, length, experts_TLK in zip(batch, lengths, experts_NTLK, strict=True):
                    self._prefixes.by_key[name].experts_TLK = experts_TLK[:length]

    def _fits(self, rows: int, length: int) -> bool:
        return rows * length <= self._token_budget

    def _replay(self, tokens: Sequence[Sequence[int]], hidden_NH: Tensor) -> None:
        """Run the rows' generated tokens again, right-aligned, and update `hidden_NH`."""
        self._fed_N = np.array([len(row) for row in tokens])
        longest = int(self._fed_N.max())
        tokens_NS = np.zeros((len(tokens), longest), dtype=np.int64)
        positions_NS = np.full((len(tokens), longest), NOWHERE)
        for index, (row, prefix) in enumerate(zip(tokens, self._prefix_of_row, strict=True)):
            if row:
                tokens_NS[index, -len(row) :] = row
                positions_NS[index, -len(row) :] = prefix.length + np.arange(len(row))
        keys_at_NS = torch.from_numpy(positions_NS).to(self._model.device)
        queries_at_NS = keys_at_NS.masked_fill(keys_at_NS == NOWHERE, 0)
        inputs_NS = torch.from_numpy(tokens_NS).to(self._model.device)
        self._suffixes.open_columns(keys_at_NS)
        prefix_length = max(prefix.length for prefix in self._prefix_of_row)
        size = max(1, self._token_budget // (prefix_length + longest))
        for first in range(0, len(tokens), size):
            part = slice(first, min(first + size, len(tokens)))
            last_NH = self._run(inputs_NS[part], queries_at_NS[part], part)[:, -1]
            self._note_routed(inputs_NS[part].shape, first)
            fed = torch.from_numpy(self._fed_N[part] > 0).to(last_NH.device)
            hidden_NH[part] = torch.where(fed[:, None], last_NH, hidden_NH[part])

    def feed(self, tokens_N: npt.NDArray[np.int64]) -> Tensor:
        if self._lengths_N is None:
            self._suffixes.trim(int(self._fed_N.max()))
            self._lengths_N = np.array([prefix.length for prefix in self._prefix_of_row])
        device = self._model.device
        positions_N1 = torch.from_numpy(self._lengths_N + self._fed_N).to(device)[:, None]
        self._suffixes.open_columns(positions_N1)
        self._fed_N += 1
        tokens_N1 = torch.from_numpy(tokens_N).to(device)[:, None]
        hidden_N1H = self._run(tokens_N1, positions_N1, slice(0, len(tokens_N)))
        self.routed = []
        self._note_routed(tokens_N1.shape, 0)
        return hidden_N1H[:, 0]

    def _note_routed(self, shape: Sequence[int], first_row: int) -> None:
        """Record the experts of the last pass over the newest tokens of each row, (rows, S)."""
        if self._recorder is None:
            return
        for row, experts_SLK in enumerate(self._recorder.take(shape), start=first_row):
            fed = int(self._fed_N[row])
            new = min(fed, len(experts_SLK))
            first = self._prefix_of_row[row].length + fed - new
            self.routed.append(Routed(row, first, experts_SLK[len(experts_SLK) - new :]))

    def _run(self, tokens_NS: Tensor, positions_NS: Tensor, rows: slice) -> Tensor:
        keys, values, slots, prefix_at_NP = self._view(rows)
        keys_at_NK = torch.cat([prefix_at_NP, self._suffixes.positions(rows)], dim=1)
        append = partial(self._suffixes.append, rows)
        current = SuffixPass(keys, values, slots, positions_NS, keys_at_NK, append)
        return self._model.run(tokens_NS, positions_NS, current)

    def _view(self, rows: slice) -> tuple[dict[int, Tensor], dict[int, Tensor], SlotMap, Tensor]:
        """Keys and values of the rows' prefixes. For all rows, cached until the rows change."""
        if self._views is not None:
            return self._views
        keys, values, positions_UP = self._prefixes.view()
        slot_of_row = [prefix.slot for prefix in self._prefix_of_row[rows]]
        slots = SlotMap(slot_of_row, len(self._prefixes), self._model.device)
        positions_NP = positions_UP[slot_of_row].to(self._model.device)
        views = (keys, values, slots, positions_NP)
        if len(slot_of_row) == len(self._prefix_of_row):
            self._views = views
        return views

    def remove(self, ended: Collection[int]) -> None:
        count = len(self._prefix_of_row)
        moves = plan_removal(count, ended)
        for row in ended:
            self._prefixes.release(self._prefix_of_row[row])
        for source, target in moves:
            self._prefix_of_row[target] = self._prefix_of_row[source]
            self._fed_N[target] = self._fed_N[source]
        remaining = count - len(ended)
        del self._prefix_of_row[remaining:]
        self._fed_N = self._fed_N[:remaining].copy()
        self._suffixes.remove(moves, remaining)
        self._rows_changed()
