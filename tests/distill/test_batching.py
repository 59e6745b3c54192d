"""Batches of rows: every row once, within the budget, each trained token in its place."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import DataError, IsothermError
from distill.models.shared_prefix import MOST_MASK
from distill.objective.batching import (
    WORTH_SHARING,
    BatchShape,
    TrainingRow,
    collate,
    deal,
    split_by_token_budget,
    tokens_in_step,
)
from tests.refusals import refuses
from tests.samples import top_logprobs, training_row

rows_lists = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.5, 1.0, 2.0])),
    min_size=1,
    max_size=12,
).map(
    lambda shapes: [
        training_row(prompt, trained, seed=i, temperature=temperature)
        for i, (prompt, trained, temperature) in enumerate(shapes)
    ]
)


@st.composite
def units(draw: st.DrawFn, teachers: tuple[str, ...] = ("",)) -> tuple[list[TrainingRow], int]:
    """Rows, and the number of rows per unit; the rows of a unit have one teacher."""
    size, count = draw(st.integers(1, 3)), draw(st.integers(0, 6))
    rows = []
    for unit in range(count):
        teacher = draw(st.sampled_from(teachers))
        for i in range(size):
            prompt, trained = draw(st.integers(1, 9)), draw(st.integers(1, 9))
            seed = size * unit + i
            rows.append(training_row(prompt, trained, seed=seed, teacher=teacher))
    return rows, size


@given(made=units(teachers=("", "a", "b")), budget=st.integers(1, 400))
def test_teachers_never_share_a_batch(made: tuple[list[TrainingRow], int], budget: int) -> None:
    rows, size = made
    batches = list(split_by_token_budget(rows, budget, size))
    assert all(len({row.teacher for row in batch}) == 1 for batch in batches)
    assert sorted(id(row) for batch in batches for row in batch) == sorted(map(id, rows))


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[TrainingRow], int]:
    """Units of rows, several with a context of up to 150 tokens, in any order."""
    size, rows = draw(st.integers(1, 2)), []
    for group in range(draw(st.integers(1, 4))):
        context_T = np.random.default_rng(group).integers(0, 99, draw(st.integers(1, 150)))
        for _ in range(size * draw(st.integers(1, 5))):
            row = training_row(len(context_T), draw(st.integers(1, 80)), seed=len(rows))
            tokens_T = np.append(context_T, row.tokens_T[len(context_T) :]).astype(np.int32)
            rows.append(replace(row, tokens_T=tokens_T))
    units = [rows[first : first + size] for first in range(0, len(rows), size)]
    return [row for unit in draw(st.permutations(units)) for row in unit], size


def cost(batches: list[list[TrainingRow]], most_mask: int) -> int:
    """Tokens through the layers, counted batch by batch."""
    total = 0
    for rows in batches:
        prefixes = {tuple(row.tokens_T[: row.first_trained - 1]) for row in rows}
        suffix = max(len(row) - row.first_trained for row in rows)
        prefix = max(map(len, prefixes))
        shared = len(prefixes) * prefix + len(rows) * suffix
        padded = len(rows) * max(map(len, rows))
        fits = len(rows) * suffix * (prefix + suffix) <= most_mask and all(prefixes)
        total += shared if fits and padded - shared >= WORTH_SHARING else padded
    return total


def plain_plan(
    rows: list[TrainingRow], size: int, budget: int, most_mask: int, *, by_context: bool
) -> list[list[TrainingRow]]:
    """Units sorted by length, or by context and length, packed until the budget is full."""

    def width(unit: list[TrainingRow]) -> int:
        return max(map(len, unit))

    def context(unit: list[TrainingRow]) -> bytes:
        return unit[0].tokens_T[: unit[0].first_trained].tobytes()

    units = sorted((rows[i : i + size] for i in range(0, len(rows), size)), key=width)
    if by_context:
        widest: dict[bytes, int] = {}
        for unit in units:
            widest.pop(context(unit), None)
            widest[context(unit)] = width(unit)
        names = sorted(widest, key=lambda name: widest[name])
        units.sort(key=lambda unit: names.index(context(unit)))
    batches: list[list[TrainingRow]] = []
    for unit in units:
        grown = [*batches[-1], *unit] if batches else unit
        if not batches or BatchShape.of(grown).held_tokens(most_mask) > budget:
            batches.append(list(unit))
        else:
            batches[-1] = grown
    return batches


@given(
    made=groups(), budget=st.integers(1, 2000), most_mask=st.sampled_from([0, 20_000, MOST_MASK])
)
def test_no_plain_order_takes_fewer_tokens(
    made: tuple[list[TrainingRow], int], budget: int, most_mask: int
) -> None:
    rows, size = made
    batches = list(split_by_token_budget(rows, budget, size, most_mask))
    place = {id(row): i for i, row in enumerate(rows)}
    units = [
        [place[id(row)] for row in batch[first : first + size]]
        for batch in batches
        for first in range(0, len(batch), size)
    ]
    assert sorted(units) == [list(range(i, i + size)) for i in range(0, len(rows), size)]
    assert cost(batches, most_mask) == tokens_in_step(batches, 1, most_mask)
    for by_context in (False, True):
        plain = plain_plan(rows, size, budget, most_mask, by_context=by_context)
        assert cost(batches, most_mask) <= cost(plain, most_mask)
    assert all(cost([b], most_mask) <= budget or len(b) == size for b in batches)
    again = list(split_by_token_budget(rows, budget, size, most_mask))
    assert [list(map(id, batch)) for batch in again] == [list(map(id, batch)) for batch in batches]


@given(made=groups(), budget=st.integers(1, 2000), most_mask=st.sampled_from([0, MOST_MASK]))
def test_packed_units_fill_the_budget_without_padding(
    made: tuple[list[TrainingRow], int], budget: int, most_mask: int
) -> None:
    rows, size = made
    batches = list(split_by_token_budget(rows, budget, size, most_mask, packed=True))
    place = {id(row): i for i, row in enumerate(rows)}
    units = [
        tuple(place[id(row)] for row in batch[first : first + size])
        for batch in batches
        for first in range(0, len(batch), size)
    ]
    assert sorted(units) == [tuple(range(i, i + size)) for i in range(0, len(rows), size)]
    tokens = sum(map(len, rows))
    assert tokens_in_step(batches, 1, most_mask, packed=True) <= tokens
    shapes = [BatchShape.of(batch, packed=True) for batch in batches]
    assert all(s.held_tokens(most_mask) <= budget or s.rows == size for s in shapes)
    if most_mask:
        return
    assert sum(shape.in_full for shape in shapes) == tokens
    first_two = [a.tokens + b.tokens for a, b in pairwise(shapes)]
    assert all(together > budget for together in first_two), "two of them would have been one"


@given(made=groups(), workers=st.integers(1, 8))
def test_batches_are_dealt_evenly(made: tuple[list[TrainingRow], int], workers: int) -> None:
    batches = list(split_by_token_budget(made[0], 300, made[1], MOST_MASK))
    dealt = deal(batches, workers, MOST_MASK)
    assert len({len(mine) for mine in dealt}) == 1
    counted = [id(batch) for mine in dealt for batch, counts in mine if counts]
    assert sorted(counted) == sorted(map(id, batches))
    assert sum(not counts for mine in dealt for _, counts in mine) < workers
    rounds = [[cost([batch], MOST_MASK) for batch, _ in now] for now in zip(*dealt, strict=True)]
    assert workers == 1 or all(min(now) >= max(later) for now, later in pairwise(rounds))
    assert tokens_in_step(batches, workers, MOST_MASK) == sum(map(max, rounds))


@given(rows=rows_lists, seed=st.integers(0, 100))
def test_every_trained_token_at_its_place(rows: list[TrainingRow], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [replace(row, loss_mask_T=_some_of(row.loss_mask_T, rng)) for row in rows]
    batch = collate(rows)
    width = max(len(row) for row in rows)
    expected = []
    for b, row in enumerate(rows):
        for t in range(width):
            real = t < len(row)
            assert batch.tokens_BT[b, t] == (row.tokens_T[t] if real else 0)
            if real and row.loss_mask_T[t]:
                expected.append(
                    (
                        b * width + t - 1, row.tokens_T[t], row.advantages_T[t],
                        row.behaviour_logprobs_T[t], np.float32(row.temperature),
                    )
                )  # fmt: skip
    collated = zip(
        batch.position_N.tolist(), batch.tokens_N.tolist(), batch.advantages_N.numpy(),
        batch.behaviour_logprobs_N.numpy(), batch.temperature_N.numpy(), strict=True,
    )  # fmt: skip
    assert list(collated) == expected
    assert batch.rows == tuple(rows)


OPTIONAL = {
    "proximal_logprobs_T": "proximal_logprobs_N",
    "reference_logprobs_T": "reference_logprobs_N",
}


def full_row(prompt: int, trained: int, *, seed: int, k: int = 3) -> TrainingRow:
    """Row with all optional fields; some of its response is untrained."""
    rng = np.random.default_rng(seed)
    row = training_row(prompt, trained, seed=seed)
    mask_T = _some_of(row.loss_mask_T, rng)
    changes = {name: rng.normal(size=len(row)).astype(np.float32) for name in OPTIONAL}
    top = top_logprobs(int(mask_T.sum()), k, seed=seed)
    return replace(row, loss_mask_T=mask_T, teacher_coef=0.5 + seed, teacher_top=top, **changes)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    k=st.integers(1, 4),
)
def test_optional_fields_are_at_their_tokens(shapes: list[tuple[int, int]], k: int) -> None:
    rows = [full_row(*shape, seed=i, k=k) for i, shape in enumerate(shapes)]
    batch = collate(rows)
    assert batch.teacher_top_ids_NK is not None and batch.teacher_top_logprobs_NK is not None
    n = 0
    for b, row in enumerate(rows):
        for i, t in enumerate(np.flatnonzero(row.loss_mask_T)):
            assert batch.row_N[n] == b and batch.teacher_coef_N[n] == row.teacher_coef
            for name, flat in OPTIONAL.items():
                assert getattr(batch, flat)[n] == getattr(row, name)[t]
            assert row.teacher_top is not None
            assert batch.teacher_top_ids_NK[n].tolist() == row.teacher_top.ids_NK[i].tolist()
            top_K = batch.teacher_top_logprobs_NK[n]
            assert top_K.tolist() == row.teacher_top.logprobs_NK[i].tolist()
            n += 1
    assert n == len(batch.tokens_N) == len(batch.row_N)
    assert batch.row_N.dtype == batch.teacher_top_ids_NK.dtype == torch.long


@pytest.mark.parametrize("lacking", [0, 1, 2])
@pytest.mark.parametrize("name", [*OPTIONAL, "teacher_top"])
def test_a_field_that_one_row_lacks_is_none_for_all(name: str, lacking: int) -> None:
    rows = [full_row(2, 3 + i, seed=i) for i in range(3)]
    rows[lacking] = replace(rows[lacking], **{name: None})
    batch = collate(rows)
    flats = OPTIONAL | {"teacher_top": "teacher_top_ids_NK"}
    for other, flat in flats.items():
        assert (getattr(batch, flat) is None) == (other == name), flat
    assert (batch.teacher_top_logprobs_NK is None) == (name == "teacher_top")


def _some_of(mask_T: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Random non-empty part of the mask: trained tokens need not be contiguous."""
    kept_T = mask_T & (rng.random(len(mask_T)) < 0.5)
    kept_T[np.flatnonzero(mask_T)[-1]] = True
    return kept_T


@pytest.mark.parametrize(
    "changes",
    [
        {"advantages_T": np.zeros(6, np.float32)},
        {"loss_mask_T": np.ones(7, np.bool_)},
        {"loss_mask_T": np.zeros(7, np.bool_)},
        {"advantages_T": np.full(7, np.nan, np.float32)},
        {"behaviour_logprobs_T": np.full(7, -np.inf, np.float32)},
        {"proximal_logprobs_T": np.zeros(8, np.float32)},
        {"reference_logprobs_T": np.zeros(6, np.float32)},
        {"proximal_logprobs_T": np.full(7, np.nan, np.float32)},
        {"reference_logprobs_T": np.full(7, np.inf, np.float32)},
        {"teacher_top": top_logprobs(3, 2)},
    ],
)
def test_rows_are_checked(changes: dict) -> None:
    with pytest.raises(DataError):
        replace(training_row(), source="here", **changes)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_row_has_a_temperature_above_zero(temperature: float) -> None:
    with refuses(IsothermError, "temperature of row 0"):
        training_row(temperature=temperature)


def test_numbers_on_untrained_tokens_are_not_judged() -> None:
    advantages_T = np.where(np.arange(7) < 3, np.nan, 1).astype(np.float32)
    row = replace(training_row(), advantages_T=advantages_T)
    assert collate([row]).advantages_N.tolist() == [1, 1, 1, 1]
