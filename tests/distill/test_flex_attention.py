"""Packed rows by flex attention: visible tokens, blocks, and equality with padded rows.

Gradients go through a dense twin (tests/flex_twin.py); whole learners are in
tests/learner/test_packing.py, and the compiled kernel in `make gpu`.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from distill.models import flex_attention
from distill.models.attention import AttentionRule, Pass
from distill.models.flex_attention import BLOCK, FlexPass, Heads, flex_serves
from distill.models.packed_attention import PackedJointPass, PackedPass
from tests.flex_twin import dense_flex, visible

CPU = torch.device("cpu")
# Prefixes, and what continues which of them; rows within a block, over many, and of one token.
JOINT = [
    ([5], [0], [3]),
    ([150, 1, 20], [0, 0, 1, 2, 2, 0], [140, 1, 30, 7, 20, 60]),
    ([128, 140], [0, 1], [128, 116]),
]


def tokens(lengths: Sequence[int], continues: Sequence[int]) -> list[tuple[int, int, int]]:
    """(row, continued row, position) of each token."""
    found = []
    for row, (length, before) in enumerate(zip(lengths, continues, strict=True)):
        first = lengths[before] if before != row else 0
        found += [(row, before, first + i) for i in range(length)]
    return found


def seen(lengths: Sequence[int], continues: Sequence[int], window: int | None) -> np.ndarray:
    """Visible tokens (L, L), token by token."""
    rows, befores, positions = map(np.array, zip(*tokens(lengths, continues), strict=True))
    kin = (rows[None] == rows[:, None]) | (rows[None] == befores[:, None])
    ago = positions[:, None] - positions[None]
    return kin & (ago >= 0) & (ago < (window or 1 << 30))


@pytest.mark.parametrize("window", [None, 1, 50, 200])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_hold_exactly_the_visible_tokens(seed: int, window: int | None) -> None:
    draw = np.random.default_rng(seed)
    prefixes = draw.integers(1, 400, size=3).tolist()
    continues = [0, 1, 2, *draw.integers(0, 3, size=5).tolist()]
    lengths = [*prefixes, *draw.integers(1, 300, size=5).tolist()]
    expected = seen(lengths, continues, window)
    mask = FlexPass(lengths, continues, CPU).mask(window)
    assert np.array_equal(visible(mask).numpy(), expected)
    blocks = -(-len(expected) // BLOCK)
    for i in range(blocks):
        row = expected[i * BLOCK : (i + 1) * BLOCK]
        needed = {j for j in range(blocks) if row[:, j * BLOCK : (j + 1) * BLOCK].any()}
        lists = [
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        ]
        held = [indices[0, 0, i, : counts[0, 0, i]].tolist() for counts, indices in lists]
        assert {*held[0], *held[1]} == needed and not {*held[0]} & {*held[1]}


def heads(length: int, count: int, seed: int) -> Tensor:
    return torch.randn(1, count, length, 16, generator=torch.Generator().manual_seed(seed))


def results(length: int, current: Pass, rule: AttentionRule, *, gradients: bool) -> list[Tensor]:
    """Output, and its gradients for queries, keys and values."""
    inputs = [heads(length, n, seed).requires_grad_(gradients) for seed, n in enumerate((4, 2, 2))]
    query, key, value = inputs
    out = current.attend(0, query, key, value, rule)
    back = torch.autograd.grad(out, inputs, heads(length, 4, 9)) if gradients else ()
    return [out, *back]


RULES = [
    AttentionRule(0.25, None, None), AttentionRule(0.25, 33, None), AttentionRule(0.3, 150, 5.0),
]  # fmt: skip


def passes(case: int) -> list[tuple[int, Pass, Pass]]:
    """(L, flex, padded) of rows that continue others, and of independent rows."""
    prefixes, of_row, suffixes = JOINT[case]
    lengths = [*prefixes, *suffixes]
    total, rows = sum(lengths), range(len(lengths))
    joint = FlexPass(lengths, [*range(len(prefixes)), *of_row], CPU)
    return [
        (total, joint, PackedJointPass(prefixes, of_row, suffixes, CPU)),
        (total, FlexPass(lengths, rows, CPU), PackedPass(lengths, CPU)),
    ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", range(len(JOINT)))
def test_flex_attention_equals_padded_attention(
    rule: AttentionRule, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_attention, "flex_attention", dense_flex)
    for length, *ways in passes(case):
        ours, theirs = (results(length, way, rule, gradients=True) for way in ways)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # its compiler's parts, imported
def test_torch_reads_masks_and_caps_as_the_twin_does() -> None:
    """Only the forward pass runs on a CPU."""
    length, flex, padded = passes(0)[0]
    [ours], [theirs] = (results(length, way, RULES[-1], gradients=False) for way in (flex, padded))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_kernel_that_is_off_or_does_not_compile_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = Heads(4, 2, 16, None)
    assert not flex_serves(shape, torch.float32, CPU), "it has no backward pass there"
    monkeypatch.setattr(flex_attention, "flex_attention", dense_flex)
    assert flex_attention.probe_kernel(shape, torch.float32, CPU) < 1e-5
    cuda = torch.device("cuda")
    for probe, warning in (
        (lambda *_: 0.5, "0.5"),
        (lambda *_: 1 / 0, "division by zero"),
    ):
        monkeypatch.setattr(flex_attention, "probe_kernel", probe)
        flex_serves.cache_clear()
        assert not flex_serves(shape, torch.bfloat16, cuda)
        assert warning in caplog.text
    monkeypatch.setattr(flex_attention, "probe_kernel", lambda *_: 0.01)
    flex_serves.cache_clear()
    assert flex_serves(shape, torch.bfloat16, cuda)
    flex_serves.cache_clear()
    assert not flex_serves(shape, torch.float32, cuda), "0.01 is much in float32"
    assert not flex_serves(None, torch.bfloat16, cuda)
    flex_serves.cache_clear()
