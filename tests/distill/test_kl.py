"""Reverse KL against the sum written out, and what every KL must satisfy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.kl import reverse_kl

TEMPERATURES = [0.1, 0.5, 1.0, 2.0, 10.0]
logit_pairs = st.integers(1, 6).flatmap(
    lambda vocab: st.tuples(
        *[st.lists(st.floats(-20, 20, width=32), min_size=vocab, max_size=vocab)] * 2
    )
)


def softmax(logits: list[float], temperature: float) -> list[float]:
    highest = max(logits)
    weights = [math.exp((z - highest) / temperature) for z in logits]
    return [weight / sum(weights) for weight in weights]


def kl_by_hand(student: list[float], teacher: list[float], temperature: float) -> float:
    total = 0.0
    highest = max(teacher)
    log_normaliser = math.log(sum(math.exp((z - highest) / temperature) for z in teacher))
    for v, p in enumerate(softmax(student, temperature)):
        log_q = (teacher[v] - highest) / temperature - log_normaliser
        total += p * (math.log(p) - log_q) if p > 0 else 0.0
    return total


@given(pair=logit_pairs, temperature=st.sampled_from(TEMPERATURES))
def test_the_sum_written_out(pair: tuple, temperature: float) -> None:
    student, teacher = pair
    [value] = reverse_kl(torch.tensor([student]), torch.tensor([teacher]), temperature).tolist()
    assert value == pytest.approx(kl_by_hand(student, teacher, temperature), rel=1e-3, abs=1e-4)
    assert value >= -1e-4


@given(pair=logit_pairs, temperature=st.sampled_from(TEMPERATURES), shift=st.floats(-5, 5))
def test_zero_for_equal_distributions(pair: tuple, temperature: float, shift: float) -> None:
    logits = torch.tensor([pair[0]])
    assert reverse_kl(logits, logits, temperature).item() == 0
    assert reverse_kl(logits, logits + shift, temperature).item() == pytest.approx(0, abs=1e-3)


def test_known_values() -> None:
    even = torch.zeros(1, 2)
    odds = torch.tensor([[0.0, math.log(3)]])  # (1/4, 3/4) at T = 1, (1/10, 9/10) at T = 1/2
    assert reverse_kl(even, odds, 1.0).item() == pytest.approx(0.5 * math.log(4 / 3))
    assert reverse_kl(even, odds, 0.5).item() == pytest.approx(0.5 * math.log(100 / 36))
    assert reverse_kl(odds, even, 1.0).item() == pytest.approx(
        0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    )


def test_both_sides_are_divided_by_the_temperature() -> None:
    student, teacher = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    at_T = reverse_kl(student, teacher, 0.5)
    torch.testing.assert_close(at_T, reverse_kl(2 * student, 2 * teacher, 1.0))
    assert (at_T - reverse_kl(2 * student, teacher, 1.0)).abs().min() > 1e-2  # towards q_1


def test_half_precision_logits_are_computed_in_fp32() -> None:
    student, teacher = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = reverse_kl(student.float(), teacher.float(), 0.7)
    assert reverse_kl(student, teacher, 0.7).tolist() == exact.tolist()


def test_vocabularies_must_agree() -> None:
    with pytest.raises(AssertionError, match="vocabularies differ"):
        reverse_kl(torch.zeros(1, 3), torch.zeros(1, 4), 1.0)
