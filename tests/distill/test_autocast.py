"""Autocast of grouped products."""

import torch
from torch.nn.functional import grouped_mm

from distill.models.autocast import cast_grouped_products


def test_grouped_products_are_cast_under_autocast_alone() -> None:
    cast_grouped_products("cpu")
    inputs, weights = torch.randn(64, 32, requires_grad=True), torch.randn(4, 32, 16)
    weights.requires_grad_()
    ends = torch.tensor([16, 16, 48, 64], dtype=torch.int32)
    exact = grouped_mm(inputs, weights, offs=ends)
    with torch.autocast("cpu", torch.bfloat16):
        cast = grouped_mm(inputs, weights, offs=ends)
    assert (exact.dtype, cast.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(cast.float(), exact, rtol=0.02, atol=0.1)
    cast.float().sum().backward()
    assert inputs.grad is not None and inputs.grad.dtype == torch.float32
    assert weights.grad is not None and weights.grad.dtype == torch.float32
