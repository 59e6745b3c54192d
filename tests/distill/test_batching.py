"""Rows become batches: every row once, under the budget, each trained token at its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.batching import TrainingRow, collate, split_by_token_budget
from distill.errors import DataError, IsothermError
from tests.samples import training_row

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


@given(rows=rows_lists, budget=st.integers(1, 80))
def test_every_row_once_and_the_budget_kept(rows: list[TrainingRow], budget: int) -> None:
    batches = list(split_by_token_budget(rows, budget))
    assert sorted(id(row) for batch in batches for row in batch) == sorted(id(row) for row in rows)
    for batch in batches:
        assert len(batch) * max(len(row) for row in batch) <= budget or len(batch) == 1


@given(rows=rows_lists)
def test_a_wide_budget_takes_one_batch(rows: list[TrainingRow]) -> None:
    width = max(len(row) for row in rows)
    [batch] = split_by_token_budget(rows, len(rows) * width)
    assert len(batch) == len(rows)


def test_rows_of_like_length_go_together() -> None:
    rows = [training_row(1, length - 1) for length in (9, 2, 8, 3)]
    assert [[len(row) for row in batch] for batch in split_by_token_budget(rows, 18)] == [
        [2, 3],
        [8, 9],
    ]


def test_rows_of_one_context_stay_together() -> None:
    context_T = np.array([7, 8, 9], np.int32)
    group = [
        replace(row, tokens_T=np.concatenate([context_T, row.tokens_T[3:]]))
        for row in (training_row(3, n, seed=n) for n in (1, 8))
    ]
    between = training_row(4, 2, seed=99)
    [batch] = split_by_token_budget([group[1], between, group[0]], 100)
    assert [id(row) for row in batch] == [id(between), id(group[0]), id(group[1])]


def test_no_rows_no_batches() -> None:
    assert list(split_by_token_budget([], 10)) == []


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
                        b * width + t - 1,
                        row.tokens_T[t],
                        row.weights_T[t],
                        row.behaviour_logprobs_T[t],
                        np.float32(row.temperature),
                    )
                )
    collated = zip(
        batch.position_N.tolist(),
        batch.tokens_N.tolist(),
        batch.weights_N.numpy(),
        batch.behaviour_logprobs_N.numpy(),
        batch.temperature_N.numpy(),
        strict=True,
    )
    assert list(collated) == expected
    assert batch.rows == tuple(rows)


def _some_of(mask_T: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random, non-empty part of the mask: trained tokens need not be contiguous."""
    kept_T = mask_T & (rng.random(len(mask_T)) < 0.5)
    kept_T[np.flatnonzero(mask_T)[-1]] = True
    return kept_T


def test_padding_is_known_by_length_when_pad_is_eos_and_a_real_token() -> None:
    short = replace(training_row(1, 2), tokens_T=np.array([0, 0, 0], np.int32))  # 0 is EOS and pad
    batch = collate([short, training_row(2, 3)])
    assert batch.tokens_BT[0].tolist() == [0, 0, 0, 0, 0]
    assert batch.position_N.tolist() == [0, 1, 5 + 1, 5 + 2, 5 + 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_T": np.zeros(6, np.float32)}, "here: weights_T has 6 entries for 7 tokens"),
        ({"loss_mask_T": np.ones(7, np.bool_)}, "here: a row needs a context token"),
        ({"loss_mask_T": np.zeros(7, np.bool_)}, "here: a row needs a context token"),
        ({"weights_T": np.full(7, np.nan, np.float32)}, "here: weights_T is not finite"),
        (
            {"behaviour_logprobs_T": np.full(7, -np.inf, np.float32)},
            "here: behaviour_logprobs_T is not finite",
        ),
    ],
)
def test_rows_are_checked(changes: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(training_row(), source="here", **changes)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_row_has_a_temperature_above_zero(temperature: float) -> None:
    with pytest.raises(IsothermError, match="temperature of row 0"):
        training_row(temperature=temperature)


def test_numbers_on_untrained_tokens_are_not_judged() -> None:
    weights_T = np.where(np.arange(7) < 3, np.nan, 1).astype(np.float32)
    row = replace(training_row(), weights_T=weights_T)
    assert collate([row]).weights_N.tolist() == [1, 1, 1, 1]
