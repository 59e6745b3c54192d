"""Training rows, and batches of rows under a token budget: from segments to tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from distill.errors import DataError
from distill.privileged import check_context
from distill.routing import ExpertArray
from distill.sampling import check_temperature
from distill.states import HiddenStates
from distill.types import BoolArray, FloatArray, TokenArray, TopLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRows:
    """Sums over the other rows of a row's sequence (the trajectory's other segments).

    The row's loss needs these sums, and the other rows may be in another micro-batch or on another
    worker.

    Attributes:
        tokens: number of trained tokens in the other rows.
        log_ratio: sum of log pi - log old over those tokens, for gspo, whose ratio is that of the
            whole sequence.
        future_kl: sum_s g^s c_s (log pi - log mu)(y_s) over the rows that follow, with s counted
            from the first token after this row; see
            `distill.objective.objectives.own_advantages`.
    """

    tokens: int = 0
    log_ratio: float = 0.0
    future_kl: float = 0.0


NO_OTHER_ROWS = OtherRows()
_OPTIONAL_FLOATS = (
    "proximal_logprobs_T",
    "reference_logprobs_T",
    "sampled_kl_coef_T",
    "clipped_kl_coef_T",
    "teacher_gaps_T",
)


class RowShape(Protocol):
    """Properties of a row that determine its micro-batch.

    Implemented by `TrainingRow`, and by placeholders for rows that are built elsewhere.
    """

    @property
    def teacher(self) -> str: ...

    @property
    def first_trained(self) -> int: ...

    @property
    def num_trained(self) -> int: ...

    @property
    def ends_sequence(self) -> bool: ...

    @property
    def context_key(self) -> bytes:
        """Key that is equal in rows with the same tokens before the first trained token."""
        ...

    @property
    def prefix_key(self) -> bytes:
        """Key as `context_key`, of the same tokens without the last one."""
        ...

    def __len__(self) -> int:
        """Number of tokens."""
        ...


Row = TypeVar("Row", bound=RowShape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRow:
    """One token chain ready for a loss. All `_T` arrays have the same length.

    Attributes:
        tokens_T: token ids.
        loss_mask_T: True where the token is trained; never at position 0.
        advantages_T: advantage of each token; 1 for supervised rows.
        behaviour_logprobs_T: log-probs of the policy that sampled the tokens; 0 for supervised
            rows.
        temperature: the T of the learner's log-probs.
        source: origin of the row, for error messages and the dump of bad rows.
        data_source: name of the row's data source, if there are several.
        proximal_logprobs_T: log-probs of the learner at the start of the step; None: not computed.
        reference_logprobs_T: log-probs of a reference model; None without a reference model.
        teacher: name of the row's teacher, if there are several.
        teacher_coef: weight of the divergence from the teacher; 0: no divergence term.
        teacher_context_T: tokens that the teacher sees in place of the row's first
            `teacher_replaces` tokens; None: the teacher sees the row's own tokens.
        teacher_top: the teacher's likeliest tokens, one row per trained token.
        teacher_states: the teacher's hidden states, one per trained token; None: not requested.
        sampled_kl_coef_T: weight of log p - log q of the sampled token in `advantages_T`, with the
            sampler's log p; None: the advantage has no such term.
        clipped_kl_coef_T: the same weight for the teacher's term if kl_clip bounds that term.
        teacher_gaps_T: log p - log q of the sampled tokens, with the sampler's p; None without
            kl_clip.
        experts_TLK: experts that each token is routed through in a mixture-of-experts model; None:
            the learner's routers choose (`learner.routers`).
        ends_sequence: False if the next row continues the same sequence.
        other_rows: sums over the rest of that sequence.

    Raises:
        DataError: unequal lengths, nothing to train on, or a non-finite number on a trained token.
    """

    tokens_T: TokenArray
    loss_mask_T: BoolArray
    advantages_T: FloatArray
    behaviour_logprobs_T: FloatArray
    temperature: float
    source: str
    data_source: str = ""
    proximal_logprobs_T: FloatArray | None = None
    reference_logprobs_T: FloatArray | None = None
    teacher: str = ""
    teacher_coef: float = 0.0
    teacher_context_T: TokenArray | None = None
    teacher_replaces: int = 0
    teacher_top: TopLogprobs | None = None
    teacher_states: HiddenStates | None = None
    sampled_kl_coef_T: FloatArray | None = None
    clipped_kl_coef_T: FloatArray | None = None
    teacher_gaps_T: FloatArray | None = None
    experts_TLK: ExpertArray | None = None
    ends_sequence: bool = True
    other_rows: OtherRows = NO_OTHER_ROWS

    def __post_init__(self) -> None:
        check_temperature(self.temperature, f"temperature of {self.source}")
        floats = ["advantages_T", "behaviour_logprobs_T"]
        floats += [name for name in _OPTIONAL_FLOATS if getattr(self, name) is not None]
        arrays = ["loss_mask_T", *floats]
        if self.experts_TLK is not None:
            arrays.append("experts_TLK")
        for name in arrays:
            if len(getattr(self, name)) != len(self.tokens_T):
                raise DataError(
                    f"{self.source}: {name} has {len(getattr(self, name))} entries for "
                    f"{len(self.tokens_T)} tokens"
                )
        if len(self.tokens_T) < 2 or self.loss_mask_T[0] or not self.loss_mask_T.any():
            raise DataError(
                f"{self.source}: a row needs a context token and a token to train after it"
            )
        check_context(
            self.teacher_context_T,
            self.teacher_replaces,
            self.first_trained,
            f"{self.source}: teacher_replaces",
        )
        for name in floats:
            if not np.isfinite(getattr(self, name)[self.loss_mask_T]).all():
                raise DataError(f"{self.source}: {name} is not finite on a trained token")
        if self.teacher_top is not None and len(self.teacher_top) != self.num_trained:
            raise DataError(
                f"{self.source}: teacher_top has {len(self.teacher_top)} rows for "
                f"{self.num_trained} trained tokens"
            )

    def __len__(self) -> int:
        return len(self.tokens_T)

    @property
    def first_trained(self) -> int:
        """Index of the first trained token, at least 1."""
        # Not np.argmax, which releases the interpreter lock: if other threads compute, this thread
        # gets the lock back up to 5 ms later.
        return self.loss_mask_T.tobytes().index(True)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.loss_mask_T))

    @property
    def context_key(self) -> bytes:
        """See `RowShape`."""
        return self.tokens_T[: self.first_trained].tobytes()

    @property
    def prefix_key(self) -> bytes:
        """See `RowShape`."""
        return self.tokens_T[: self.first_trained - 1].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Right-padded rows and the flat view of their trained positions.

    `position_N` indexes the flattened (B*T) hidden states one *before* each trained token: the
    position whose logits predict it. Padding is determined by length, never by token id. `row_N` is
    the row of each trained token. A field that any row lacks is None for all rows.
    """

    tokens_BT: Tensor
    position_N: Tensor
    tokens_N: Tensor
    advantages_N: Tensor
    behaviour_logprobs_N: Tensor
    temperature_N: Tensor
    row_N: Tensor
    proximal_logprobs_N: Tensor | None
    reference_logprobs_N: Tensor | None
    teacher_coef_N: Tensor
    teacher_top_ids_NK: Tensor | None
    teacher_top_logprobs_NK: Tensor | None
    sampled_kl_coef_N: Tensor | None
    clipped_kl_coef_N: Tensor | None
    teacher_gaps_N: Tensor | None
    rows: tuple[TrainingRow, ...]

    def sum_by_row(self, values_N: Tensor) -> Tensor:
        """Sum of each row's values, shape (rows,)."""
        return values_N.new_zeros(len(self.rows)).index_add(0, self.row_N, values_N)

    def mean_by_row(self, values_N: Tensor) -> Tensor:
        """Mean of each row's values, shape (rows,)."""
        return self.sum_by_row(values_N) / self.sum_by_row(torch.ones_like(values_N))

    def sequence_tokens(self) -> Tensor:
        """Number of trained tokens of each row's whole sequence, shape (rows,)."""
        return self.of_rows([row.num_trained + row.other_rows.tokens for row in self.rows])

    def of_rows(self, values: Sequence[float]) -> Tensor:
        """Tensor of one number per row, shape (rows,)."""
        return self.behaviour_logprobs_N.new_tensor(values)

    def future_sum(self, values_N: Tensor, discount: float, after_B: Tensor) -> Tensor:
        """S_t = v_t + g S_{t+1} within each row, with `after_B` as S after the row's last token."""
        sums_N = values_N.clone()
        last_B = self.sum_by_row(torch.ones_like(values_N)).long().cumsum(0) - 1
        sums_N[last_B] += discount * after_B.to(sums_N.dtype)
        reach = 1  # tokens that each sum covers; doubles
        while reach < len(sums_N) and (factor := discount**reach):
            same_row = self.row_N[reach:] == self.row_N[:-reach]
            further_N = torch.where(same_row, factor * sums_N[reach:], 0)
            sums_N = torch.cat([sums_N[:-reach] + further_N, sums_N[-reach:]])
            reach *= 2
        return sums_N


# Running a context once for several rows is worthwhile if it saves at least this many tokens.
WORTH_SHARING = 64
# A shared context's keys and values are copied for each row. The keys and values of this many
# tokens take no more memory than the activations of one token (the ratio is 10 to 60 in Llama, Qwen
# and similar models).
_COPIED_KEYS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Token counts of rows run together: each row in full, or each distinct prefix only once.

    Rows (or prefixes, and suffixes) are padded to the longest one or, if `packed`, placed end to
    end without padding. A row's prefix is its context without the last token, which predicts the
    first trained token. `prefixes` are keys and lengths of the distinct prefixes. `most_mask` is
    the model's limit (distill.models.shared_prefix): 0 if the model cannot share prefixes.
    """

    rows: int
    tokens: int
    width: int
    prefixes: frozenset[tuple[bytes, int]]
    shortest_prefix: int
    prefix_width: int
    suffix_width: int
    suffix_tokens: int
    packed: bool

    @classmethod
    def of(cls, rows: Sequence[RowShape], packed: bool = False) -> BatchShape:
        ends = [row.first_trained - 1 for row in rows]
        prefixes = ((row.prefix_key, end) for row, end in zip(rows, ends, strict=True))
        suffixes = [len(row) - 1 - end for row, end in zip(rows, ends, strict=True)]
        return cls(
            rows=len(rows),
            tokens=sum(map(len, rows)),
            width=max(map(len, rows)),
            prefixes=frozenset(prefixes),
            shortest_prefix=min(ends),
            prefix_width=max(ends),
            suffix_width=max(suffixes),
            suffix_tokens=sum(suffixes),
            packed=packed,
        )

    def __add__(self, other: BatchShape) -> BatchShape:
        return BatchShape(
            rows=self.rows + other.rows,
            tokens=self.tokens + other.tokens,
            width=max(self.width, other.width),
            prefixes=self.prefixes | other.prefixes,
            shortest_prefix=min(self.shortest_prefix, other.shortest_prefix),
            prefix_width=max(self.prefix_width, other.prefix_width),
            suffix_width=max(self.suffix_width, other.suffix_width),
            suffix_tokens=self.suffix_tokens + other.suffix_tokens,
            packed=self.packed,
        )

    def shares(self, most_mask: int) -> bool:
        """True if each prefix is run once: it saves tokens, padding included, and the mask fits."""
        return (
            self.shortest_prefix > 0
            and self._keys * self.suffix_width <= most_mask
            and self._shared + WORTH_SHARING <= self.in_full
        )

    def layer_tokens(self, most_mask: int) -> int:
        """Number of tokens that go through the layers, padding included."""
        return self._shared if self.shares(most_mask) else self.in_full

    def held_tokens(self, most_mask: int) -> int:
        """Memory of the batch, as the number of tokens whose activations take as much."""
        copied = self._keys // _COPIED_KEYS if self.shares(most_mask) else 0
        return self.layer_tokens(most_mask) + copied

    @property
    def held_at_most(self) -> int:
        """Upper bound of `held_tokens` for these rows and for any subset of them."""
        return self.in_full + self._keys // _COPIED_KEYS

    @property
    def in_full(self) -> int:
        """Number of tokens of the rows in full, padding included."""
        return self.tokens if self.packed else self.rows * self.width

    @property
    def _shared(self) -> int:
        if self.packed:
            return sum(length for _, length in self.prefixes) + self.suffix_tokens
        return len(self.prefixes) * self.prefix_width + self.rows * self.suffix_width

    @property
    def _keys(self) -> int:
        return self.rows * (self.prefix_width + self.suffix_width)


@dataclass(frozen=True, kw_only=True, eq=False)
class _RowUnit(Generic[Row]):
    """Rows that must be in the same micro-batch."""

    rows: Sequence[Row]
    packed: bool

    @cached_property
    def shape(self) -> BatchShape:
        return BatchShape.of(self.rows, self.packed)

    @property
    def width(self) -> int:
        return max(map(len, self.rows))


def split_by_token_budget(
    rows_D: Sequence[Row],
    token_budget: int,
    rows_per_unit: int = 1,
    most_mask: int = 0,
    packed: bool = False,
) -> Iterator[list[Row]]:
    """Micro-batches that take the memory of at most `token_budget` tokens.

    Each unit of `rows_per_unit` consecutive rows (a preference pair, for example) stays together,
    in order; units of different teachers never share a batch. A unit larger than the budget is a
    batch by itself. Every row appears exactly once.

    Rows are ordered by length, which reduces padding, or by context, so that a model that can share
    prefixes (`most_mask`, see `BatchShape`) runs each context once. The order that sends fewer
    tokens through the layers is used. `packed` rows are not padded, so rows of any lengths can
    share a batch, and the number of batches is smaller.
    """
    assert len(rows_D) % rows_per_unit == 0, f"{len(rows_D)} rows are no units of {rows_per_unit}"
    by_teacher: dict[str, list[_RowUnit[Row]]] = defaultdict(list)
    for first in range(0, len(rows_D), rows_per_unit):
        rows = rows_D[first : first + rows_per_unit]
        by_teacher[rows[0].teacher].append(_RowUnit(rows=rows, packed=packed))
    for _, units in sorted(by_teacher.items()):
        whole = [row for unit in units for row in unit.rows]
        if BatchShape.of(whole, packed).held_at_most <= token_budget:
            # Each of the orders below would produce this one batch.
            yield [row for group in _by_context(units) for unit in group for row in unit.rows]
            continue
        plans = [_fill(order, token_budget, most_mask) for order in _orders(units, most_mask)]
        if packed:
            plans.append(_first_fit(units, token_budget))
        yield from min(
            plans, key=lambda plan: (tokens_in_step(plan, 1, most_mask, packed), len(plan))
        )


def _fill(units: Iterable[_RowUnit[Row]], token_budget: int, most_mask: int) -> list[list[Row]]:
    """Batches of units in this order, each as full as the budget allows."""
    batches: list[list[Row]] = []
    shape = None
    for unit in units:
        grown = unit.shape if shape is None else shape + unit.shape
        if shape is None or grown.held_tokens(most_mask) > token_budget:
            batches.append([])
            grown = unit.shape
        batches[-1] += unit.rows
        shape = grown
    return batches


def _first_fit(units: Sequence[_RowUnit[Row]], token_budget: int) -> list[list[Row]]:
    """First-fit decreasing: packed units, longest first, each in the first batch with room."""
    batches: list[list[Row]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda unit: unit.shape.tokens, reverse=True):
        tokens = unit.shape.tokens
        place = next((i for i, left in enumerate(room) if tokens <= left), len(batches))
        if place == len(batches):
            batches.append([])
            room.append(token_budget)
        batches[place] += unit.rows
        room[place] -= tokens
    return batches


def _orders(units: Sequence[_RowUnit[Row]], most_mask: int) -> list[list[_RowUnit[Row]]]:
    """Three orders of units: by context; by length; paying groups by context, then by length.

    A group has the units of one context; it pays if `_saves_tokens`. Groups, and the units within
    each group, are sorted from short to long.
    """
    groups = _by_context(units)
    paying = [group for group in groups if _saves_tokens(group, most_mask)]
    others = [group for group in groups if not _saves_tokens(group, most_mask)]
    return [
        list(chain.from_iterable(groups)),
        _by_length(units),
        [*chain.from_iterable(paying), *_by_length(chain.from_iterable(others))],
    ]


def _by_context(units: Iterable[_RowUnit[Row]]) -> list[list[_RowUnit[Row]]]:
    groups: dict[bytes, list[_RowUnit[Row]]] = defaultdict(list)
    for unit in units:
        groups[unit.rows[0].context_key].append(unit)
    return sorted(map(_by_length, groups.values()), key=lambda group: group[-1].width)


def _by_length(units: Iterable[_RowUnit[Row]]) -> list[_RowUnit[Row]]:
    return sorted(units, key=lambda unit: unit.width)


def _saves_tokens(group: Sequence[_RowUnit[Row]], most_mask: int) -> bool:
    """True if the group takes fewer tokens as a separate batch than its rows do without padding."""
    rows = [row for unit in group for row in unit.rows]
    return _layer_tokens(rows, most_mask, group[0].packed) < sum(map(len, rows))


def _layer_tokens(rows: Sequence[RowShape], most_mask: int, packed: bool) -> int:
    return BatchShape.of(rows, packed).layer_tokens(most_mask)


def tokens_in_step(
    batches: Sequence[Sequence[RowShape]], workers: int, most_mask: int = 0, packed: bool = False
) -> int:
    """Tokens on the critical path of workers that run these batches in step.

    This is the sum, over the rounds of `deal`, of the tokens of the round's largest batch.
    """
    sizes = (_layer_tokens(batch, most_mask, packed) for batch in batches)
    return sum(sorted(sizes, reverse=True)[::workers])


def deal(
    batches: Sequence[list[Row]], workers: int, most_mask: int = 0, packed: bool = False
) -> list[list[tuple[list[Row], bool]]]:
    """Distribute micro-batches to workers that run in step, the same number to each.

    Batches that run at the same time have similar numbers of tokens, so that no worker waits long
    for another. If the last round has fewer batches than workers, the smallest batch is repeated
    without being counted.

    Returns:
        For each worker, its (micro-batch, True if it counts) pairs.
    """
    if workers == 1:
        return [[(batch, True) for batch in batches]]
    by_size = sorted(
        batches, key=lambda batch: _layer_tokens(batch, most_mask, packed), reverse=True
    )
    missing = -len(by_size) % workers
    dealt = [(batch, True) for batch in by_size] + [(by_size[-1], False)] * missing
    return [dealt[rank::workers] for rank in range(workers)]


def collate(rows: Sequence[TrainingRow], device: str = "cpu") -> Batch:
    """Right-pad rows to a common width with id 0.

    Any id would do, because causal attention never looks at later padding.
    """
    width = max(len(row) for row in rows)
    tokens_BT = np.zeros((len(rows), width), dtype=np.int64)
    positions = []
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)] = row.tokens_T
        positions.append(b * width + np.flatnonzero(row.loss_mask_T) - 1)
    trained = [(row, row.loss_mask_T) for row in rows]

    def gather(values: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device=device, dtype=dtype)

    def gather_floats(name: str) -> Tensor | None:
        given = [(getattr(row, name), mask) for row, mask in trained]
        if any(values_T is None for values_T, _ in given):
            return None
        return gather([values_T[mask] for values_T, mask in given], torch.float32)

    optional = {f"{name.removesuffix('T')}N": gather_floats(name) for name in _OPTIONAL_FLOATS}

    tops = [row.teacher_top for row in rows if row.teacher_top is not None]
    have_tops = len(tops) == len(rows) and len({top.k for top in tops}) == 1

    return Batch(
        tokens_BT=torch.from_numpy(tokens_BT).to(device),
        position_N=gather(positions, torch.long),
        tokens_N=gather([row.tokens_T[mask] for row, mask in trained], torch.long),
        advantages_N=gather([row.advantages_T[mask] for row, mask in trained], torch.float32),
        behaviour_logprobs_N=gather(
            [row.behaviour_logprobs_T[mask] for row, mask in trained], torch.float32
        ),
        temperature_N=gather(
            [np.full(row.num_trained, row.temperature) for row in rows], torch.float32
        ),
        row_N=gather([np.full(row.num_trained, b) for b, row in enumerate(rows)], torch.long),
        teacher_coef_N=gather(
            [np.full(row.num_trained, row.teacher_coef) for row in rows], torch.float32
        ),
        teacher_top_ids_NK=(
            gather([top.ids_NK for top in tops], torch.long) if have_tops else None
        ),
        teacher_top_logprobs_NK=(
            gather([top.logprobs_NK for top in tops], torch.float32) if have_tops else None
        ),
        rows=tuple(rows),
        **optional,
    )
