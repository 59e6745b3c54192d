"""Losses and their gradients against loops and finite differences, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distill.losses import cross_entropy, importance_sampling

sizes = st.integers(1, 8)
seeds = st.integers(0, 1000)


def drawn(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """log pi, log behaviour and advantages of `size` tokens."""
    generator = torch.Generator().manual_seed(seed)
    logprobs_N, behaviour_N = -torch.rand(2, size, generator=generator, dtype=torch.float64)
    return logprobs_N, behaviour_N, torch.randn(size, generator=generator, dtype=torch.float64)


def slope(loss: Callable[[Tensor], Tensor], at_N: Tensor, n: int, step: float = 1e-6) -> float:
    """Central difference of `loss` in its n-th argument."""
    nudge_N = torch.zeros_like(at_N)
    nudge_N[n] = step
    return (loss(at_N + nudge_N) - loss(at_N - nudge_N)).item() / (2 * step)


@given(sizes, seeds)
def test_importance_sampling_written_out(size: int, seed: int) -> None:
    logprobs_N, behaviour_N, advantages_N = drawn(size, seed)
    logprobs_N.requires_grad_(True)
    loss, metrics = importance_sampling(logprobs_N, behaviour_N, advantages_N, 7)
    expected = ratios = gaps = 0.0
    for n in range(size):
        log_ratio = logprobs_N[n].item() - behaviour_N[n].item()
        expected -= math.exp(log_ratio) * advantages_N[n].item() / 7
        ratios += math.exp(log_ratio)
        gaps += abs(log_ratio)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert metrics["train/ratio"].item() == pytest.approx(ratios)
    assert metrics["train/logprob_gap"].item() == pytest.approx(gaps)

    loss.backward()
    assert logprobs_N.grad is not None
    for n in range(size):
        expected = slope(
            lambda at_N: importance_sampling(at_N, behaviour_N, advantages_N, 7)[0],
            logprobs_N.detach(),
            n,
        )
        assert logprobs_N.grad[n].item() == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    _, behaviour_N, advantages_N = drawn(5, 3)
    logprobs_N = behaviour_N.clone().requires_grad_(True)
    importance_sampling(logprobs_N, behaviour_N, advantages_N, 5)[0].backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx((-advantages_N / 5).tolist())


def test_only_the_policy_carries_a_gradient() -> None:
    tensors = [tensor.requires_grad_(True) for tensor in drawn(4, 0)]
    loss, metrics = importance_sampling(*tensors, 4)
    loss.backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None and tensors[2].grad is None
    assert not any(value.requires_grad for value in metrics.values())


@given(sizes, seeds)
def test_cross_entropy_written_out(size: int, seed: int) -> None:
    logprobs_N, _, weights_N = drawn(size, seed)
    logprobs_N.requires_grad_(True)
    loss, metrics = cross_entropy(logprobs_N, weights_N, 7)
    expected = nll = 0.0
    for n in range(size):
        expected -= weights_N[n].item() * logprobs_N[n].item() / 7
        nll -= logprobs_N[n].item()
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert metrics["train/nll"].item() == pytest.approx(nll)
    loss.backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx((-weights_N / 7).tolist())


@given(sizes, seeds, st.integers(0, 8))
def test_micro_batches_add_up_to_the_batch(size: int, seed: int, cut: int) -> None:
    tensors = drawn(size, seed)
    for loss_function, arguments in (
        (importance_sampling, tensors),
        (cross_entropy, (tensors[0], tensors[2])),
    ):
        whole, metrics = loss_function(*arguments, size)
        parts = [
            loss_function(*(tensor[part] for tensor in arguments), size)
            for part in (slice(None, cut), slice(cut, None))
        ]
        assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), abs=1e-12)
        for name, value in metrics.items():
            total = sum(part[name].item() for _, part in parts)
            assert total == pytest.approx(value.item(), abs=1e-12)


@pytest.mark.parametrize("shape", [(3,), (1,), (4, 1)])
def test_shapes_must_agree(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        importance_sampling(torch.zeros(4), torch.zeros(4), torch.zeros(shape), 4)
    with pytest.raises(AssertionError):
        cross_entropy(torch.zeros(4), torch.zeros(shape), 4)
