"""oneDNN's linear against the product written out, and PyTorch's gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.cpu_linear import use_onednn
from distill.models import new_qwen3


def linears(bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """The same layer twice, the first rerouted."""
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    routed = copy.deepcopy(plain)
    use_onednn(routed)
    return routed, plain


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 24), (16, 24), (40, 24), (2, 9, 24), (1, 24), (24,)])
def test_values_and_gradients(shape: tuple[int, ...], bias: bool) -> None:
    found = []
    for layer in linears(bias):
        x = drawn(*shape).requires_grad_(True)
        y = layer(x)
        (y * drawn(*y.shape)).sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-5)
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for made, expected in zip(*found, strict=True):
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


def test_the_product_written_out() -> None:
    layer, _ = linears(bias=True)
    x = drawn(20, 24)
    for m in (0, 19):
        for n in (0, 39):
            total = layer.bias[n].item()
            for k in range(24):
                total += x[m, k].item() * layer.weight[n, k].item()
            assert layer(x)[m, n].item() == pytest.approx(total, abs=1e-5)


def test_only_what_needs_a_gradient_gets_one() -> None:
    layer, _ = linears(bias=True)
    layer.weight.requires_grad_(False)
    x = drawn(20, 24)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is None
    assert layer.bias.grad.tolist() == [20.0] * 40


def test_new_weights_are_seen_at_once() -> None:
    layer, _ = linears(bias=False)
    x = drawn(20, 24)
    layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight))


def test_other_precisions_are_left_alone() -> None:
    layer = nn.Linear(24, 40).bfloat16()
    use_onednn(layer)
    assert "forward" not in vars(layer)


def test_a_whole_model_computes_the_same() -> None:
    shape = {"vocab_size": 50, "hidden_size": 32, "layers": 2, "heads": 2, "context_length": 64}
    plain = new_qwen3(**shape, eos_token_id=1, pad_token_id=0, seed=0)
    routed = copy.deepcopy(plain)
    use_onednn(routed)
    ids_BT = torch.arange(40).view(2, 20)
    logits = [model(input_ids=ids_BT).logits for model in (routed, plain)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    for made in logits:
        made.square().sum().backward()
    for made, expected in zip(routed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(made.grad, expected.grad, rtol=0, atol=1e-4)
