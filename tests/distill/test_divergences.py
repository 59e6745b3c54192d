"""Divergences against written-out sums, and their properties."""

import math

import pytest
import torch
from torch import Tensor

from distill.objective.divergences import (
    TAIL_FLOOR,
    coarse,
    divergence,
    kl,
    shared_columns,
    top_of_reverse_kl,
    with_tail,
    without_padding,
)
from distill.objective.settings import DivergenceName

NAMES: list[DivergenceName] = ["reverse_kl", "forward_kl", "jsd"]


def log_pair(seed: int, *, rows: int = 6, vocab: int = 9) -> tuple[Tensor, Tensor]:
    """log p and log q, shape (rows, vocab), float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, rows, vocab, generator=generator, dtype=torch.float64)
    log_p_NV, log_q_NV = torch.log_softmax(logits, dim=-1)
    return log_p_NV, log_q_NV


def divergence_by_hand(p: list[float], q: list[float], name: DivergenceName, beta: float) -> float:
    total = 0.0
    for p_v, q_v in zip(p, q, strict=True):
        if name == "reverse_kl":
            total += p_v * math.log(p_v / q_v)
        elif name == "forward_kl":
            total += q_v * math.log(q_v / p_v)
        else:
            m_v = beta * q_v + (1 - beta) * p_v
            total += beta * q_v * math.log(q_v / m_v) + (1 - beta) * p_v * math.log(p_v / m_v)
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", NAMES)
def test_every_divergence_written_out(name: DivergenceName, beta: float, seed: int) -> None:
    log_p_NV, log_q_NV = log_pair(seed)
    made = divergence(log_p_NV, log_q_NV, name, beta)
    in_fp32 = divergence(log_p_NV.float(), log_q_NV.float(), name, beta)
    for n in range(len(made)):
        expected = divergence_by_hand(
            log_p_NV[n].exp().tolist(), log_q_NV[n].exp().tolist(), name, beta
        )
        assert made[n].item() == pytest.approx(expected, rel=1e-9)
        assert in_fp32[n].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert divergence(log_p_NV, log_p_NV, name, beta).tolist() == pytest.approx([0] * len(made))


def likeliest(log_q_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(log-probs, ids) of the K likeliest, shapes (N, K)."""
    log_q_NK, ids_NK = log_q_NV.topk(k, dim=1)
    return log_q_NK, ids_NK


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_partition_loses_no_mass(k: int) -> None:
    log_p_NV, log_q_NV = log_pair(2)
    log_q_NK, ids_NK = likeliest(log_q_NV, k)
    for log_part_NK, log_all_NV in (
        (coarse(log_p_NV, ids_NK), log_p_NV),
        (with_tail(log_q_NK), log_q_NV),
    ):
        assert log_part_NK.exp().sum(dim=1).tolist() == pytest.approx([1] * 6)
        for n in range(6):
            top = [log_all_NV[n, v].item() for v in ids_NK[n].tolist()]
            rest = sum(log_all_NV[n, v].exp().item() for v in range(9) if v not in ids_NK[n])
            assert log_part_NK[n].tolist() == pytest.approx([*top, math.log(rest)])


@pytest.mark.parametrize("name", NAMES)
def test_a_top_with_padding_that_the_student_lacks(name: DivergenceName) -> None:
    """The same as a teacher with one token less; the student's mass is unchanged."""
    log_p_NV, log_q_NV = log_pair(3)
    log_p_NV = log_p_NV.requires_grad_(True)
    log_q_NK, ids_NK = likeliest(log_q_NV, 3)
    named_NK = torch.cat([ids_NK[:, :1], torch.full((6, 1), 11), ids_NK[:, 1:]], dim=1)
    padded_NK = torch.cat([log_q_NK[:, :1], torch.full((6, 1), -9.0), log_q_NK[:, 1:]], dim=1)
    kept_NK = without_padding(log_p_NV.shape[1], named_NK, padded_NK)
    less_NK = log_q_NK - math.log1p(-math.exp(-9.0))
    for made_N, expected_N in (
        (
            divergence(coarse(log_p_NV, named_NK), with_tail(kept_NK), name, 0.5),
            divergence(coarse(log_p_NV, ids_NK), with_tail(less_NK), name, 0.5),
        ),
        (
            top_of_reverse_kl(log_p_NV, named_NK, padded_NK),
            top_of_reverse_kl(log_p_NV, ids_NK, log_q_NK),
        ),
    ):
        torch.testing.assert_close(made_N, expected_N)
        [made_NV] = torch.autograd.grad(made_N.sum(), log_p_NV)
        [expected_NV] = torch.autograd.grad(expected_N.sum(), log_p_NV)
        assert made_NV.norm() > 0.1
        torch.testing.assert_close(made_NV, expected_NV)


@pytest.mark.parametrize("mass", [0.0, 0.002, 0.5, 1.0 - 1e-7])
def test_padding_in_the_top_is_left_out_with_any_mass(mass: float) -> None:
    log_q_NK = torch.tensor([[0.6 * (1 - mass), mass, 0.3 * (1 - mass)]]).log()
    kept_NK = without_padding(9, torch.tensor([[4, 11, 2]]), log_q_NK)
    if mass < 0.9:
        assert kept_NK.exp().tolist()[0] == pytest.approx([0.6, 0, 0.3])
    assert with_tail(kept_NK).isfinite().all() and kept_NK.exp().sum() <= 1


@pytest.mark.parametrize("name", NAMES)
def test_padding_of_a_whole_vocabulary_is_masked_before_the_softmax(name: DivergenceName) -> None:
    logits_NV = torch.randn(6, 11, generator=torch.Generator().manual_seed(5))
    log_p_NV, _ = log_pair(3)
    made = shared_columns(log_p_NV, logits_NV.log_softmax(dim=1))
    masked = logits_NV.masked_fill(torch.arange(11) >= 9, -math.inf).log_softmax(dim=1)[:, :9]
    torch.testing.assert_close(
        divergence(*made, name, 0.5), divergence(log_p_NV, masked, name, 0.5), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_a_partition_s_divergence_is_at_most_the_whole_one(name: DivergenceName, seed: int) -> None:
    """The divergence grows with K, up to the whole divergence with all tokens but one."""
    log_p_NV, log_q_NV = log_pair(seed)
    whole_N = divergence(log_p_NV, log_q_NV, name, 0.5)
    least_N = torch.zeros_like(whole_N)
    for k in range(1, 9):
        log_q_NK, ids_NK = likeliest(log_q_NV, k)
        made_N = divergence(coarse(log_p_NV, ids_NK), with_tail(log_q_NK), name, 0.5)
        assert (made_N >= least_N - 1e-12).all() and (made_N <= whole_N + 1e-12).all()
        least_N = made_N
    torch.testing.assert_close(least_N, whole_N)


@pytest.mark.parametrize("name", NAMES)
def test_a_partition_s_divergence_is_zero_where_they_agree_only(name: DivergenceName) -> None:
    _, log_q_NV = log_pair(4)
    log_q_NK, ids_NK = likeliest(log_q_NV, 3)
    tail_N1 = with_tail(log_q_NK)[:, -1:]
    generator = torch.Generator().manual_seed(0)
    within_NV = torch.randn(log_q_NV.shape, generator=generator, dtype=torch.float64)
    within_NV = torch.log_softmax(within_NV.scatter(1, ids_NK, -math.inf), dim=1)
    same_NV = (within_NV + tail_N1).scatter(1, ids_NK, log_q_NK)  # another tail, of the same mass
    assert same_NV.exp().sum(dim=1).tolist() == pytest.approx([1] * 6)
    zero_N = divergence(coarse(same_NV, ids_NK), with_tail(log_q_NK), name, 0.5)
    assert zero_N.abs().max() < 1e-12
    assert divergence(same_NV, log_q_NV, name, 0.5).min() > 1e-3
    moved_NV = torch.log_softmax(
        same_NV + 0.1 * (same_NV == same_NV.max(dim=1, keepdim=True)[0]), 1
    )
    assert divergence(coarse(moved_NV, ids_NK), with_tail(log_q_NK), name, 0.5).min() > 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_teacher_without_a_tail_leaves_value_and_gradient_finite(name: DivergenceName) -> None:
    """Rounding may leave the top K with a sum of 1 or a little more."""
    logits_NV = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    for surplus in (0.0, 3e-4):
        log_q_NK = torch.tensor([[0.75, 0.25 + surplus]]).log()
        assert with_tail(log_q_NK)[0, -1].item() == pytest.approx(math.log(TAIL_FLOOR))
        log_p_NV = torch.log_softmax(logits_NV, dim=1)
        value = divergence(coarse(log_p_NV, torch.tensor([[4, 1]])), with_tail(log_q_NK), name, 0.5)
        [gradient_NV] = torch.autograd.grad(value.sum(), logits_NV)
        assert 0.01 < value.item() < -math.log(TAIL_FLOOR)
        assert gradient_NV.isfinite().all() and gradient_NV.norm() > 1e-3


def test_the_top_and_the_sampled_tail_have_the_gradient_of_the_whole() -> None:
    log_p_NV, log_q_NV = log_pair(5)
    log_q_NK, ids_NK = likeliest(log_q_NV, 3)
    logits_NV = log_p_NV.clone().requires_grad_(True)
    log_p_NV = torch.log_softmax(logits_NV, dim=1)
    [whole_NV] = torch.autograd.grad(kl(log_p_NV, log_q_NV).sum(), logits_NV, retain_graph=True)
    top = top_of_reverse_kl(log_p_NV, ids_NK, log_q_NK).sum()
    [made_NV] = torch.autograd.grad(top, logits_NV, retain_graph=True)
    assert (made_NV - whole_NV).norm() > 0.1 * whole_NV.norm()
    for n in range(len(log_p_NV)):
        for v in range(9):
            if v in ids_NK[n]:
                continue  # a token of the top: its advantage is zero
            gap = (log_p_NV[n, v] - log_q_NV[n, v]).item()
            [score_NV] = torch.autograd.grad(log_p_NV[n, v], logits_NV, retain_graph=True)
            made_NV = made_NV + log_p_NV[n, v].exp().item() * gap * score_NV
    torch.testing.assert_close(made_NV, whole_NV)
