"""Attention: masks of windows, no slow kernel, packed rows, and autocast of grouped products."""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import grouped_mm
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    MistralConfig,
    PreTrainedModel,
)

from distill.models import attention, flex_attention
from distill.models.attention import (
    NOWHERE,
    AttentionRule,
    Pass,
    takes_grouped_heads,
    visibility_bias,
)
from distill.models.autocast import cast_grouped_products
from distill.models.flex_attention import BLOCK, FlexPass, Heads, flex_serves
from distill.models.packed_attention import PackedJointPass, PackedPass
from distill.models.shared_prefix import MOST_MASK, SharedPrefixModel
from tests.flex_twin import dense_flex, visible

LENGTH, LAYERS, WINDOW = 61, 12, 8
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "sliding_window": WINDOW,
}  # fmt: skip
KINDS = (["sliding_attention"] * 5 + ["full_attention"]) * 2
CONFIGS = {
    "mistral": MistralConfig(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, layer_types=KINDS, query_pre_attn_scalar=8),
}
TOKENS = torch.randint(50, (3, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=CONFIGS)
def windowed(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model


def eager(model: PreTrainedModel, tokens_NT: Tensor) -> Tensor:
    """The model's final hidden states by transformers' own eager attention."""
    model = deepcopy(model)
    model.set_attn_implementation("eager")
    return model.base_model(input_ids=tokens_NT, use_cache=False).last_hidden_state


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_of_a_window_share_one_mask(windowed: PreTrainedModel, autocast: bool) -> None:
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.ndim >= 2 and tensor.shape[-2:] == (LENGTH, LENGTH):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    expected = eager(windowed, TOKENS)
    ours = SharedPrefixModel(windowed)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with context, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden_NTH = ours.hidden_padded(TOKENS)
    size = 2 if autocast else 4
    assert list(kept.values()) == [LENGTH * 64 * size], "a row of the mask is 61 keys, and padding"
    if not autocast:
        torch.testing.assert_close(hidden_NTH, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_visible_tokens(window: int | None) -> None:
    queries_NS, keys_NK = torch.tensor([[4, 5], [0, 2]]), torch.tensor([[0, 3, 4, 5], [0, 1, 2, 3]])
    keys_NK[0, 1] = NOWHERE
    bias_N1SK = visibility_bias(queries_NS, keys_NK, window, torch.float32)
    for n, queries in enumerate(queries_NS.tolist()):
        for s, query in enumerate(queries):
            for k, key in enumerate(keys_NK[n].tolist()):
                seen = key <= query and (window is None or query - key < window)
                assert bias_N1SK[n, 0, s, k] == (0 if seen else -torch.inf)
    assert all(stride % 16 == 0 for stride in bias_N1SK.stride()[:-1])


def test_kernels_that_take_grouped_heads() -> None:
    """The constraints of torch's fused kernels; everything else goes to its math kernel."""
    takes = takes_grouped_heads
    for masked in (False, True):
        assert takes("cpu", torch.float32, 64, 64, masked=masked)
        assert takes("cuda", torch.bfloat16, 64, 64, masked=masked) == (not masked)
        assert not takes("cuda", torch.float32, 64, 64, masked=masked)
        assert not takes("cuda", torch.bfloat16, 192, 128, masked=masked)
        assert not takes("cuda", torch.bfloat16, 512, 512, masked=masked)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_x2(windowed: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Windows and a shared prefix, as run on that device; the values are the same."""
    calls: list[tuple[bool, bool]] = []
    real = F.scaled_dot_product_attention

    def sdpa(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        assert kwargs["enable_gqa"] == (key.shape[1] < query.shape[1])
        calls.append((kwargs["attn_mask"] is not None, kwargs["enable_gqa"]))
        return real(query, key, value, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(
        attention,
        "takes_grouped_heads",
        lambda _, *rest, **masked: takes_grouped_heads(device, *rest, **masked),
    )
    expected = eager(windowed, TOKENS[:1])
    calls.clear()
    ours = SharedPrefixModel(windowed)
    hidden_1TH = ours.hidden_padded(TOKENS[:1])
    row = TOKENS[0].numpy().astype("int32")
    suffixes = [row[40:], row[40:50]]
    after_NSH = ours.hidden_after([row[:40]], [0, 0], suffixes)
    assert any(masked for masked, _ in calls)
    assert any(grouped for _, grouped in calls) == (device == "cpu")
    torch.testing.assert_close(hidden_1TH, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(after_NSH[0], expected[0, 40:], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(after_NSH[1, :10], expected[0, 40:50], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("softcap, heads", [(None, 1), (30.0, 4)])
def test_scores_that_a_layer_holds_are_counted_by_head(softcap: float | None, heads: int) -> None:
    """A cap is applied to all scores; without one no kernel holds them."""
    config = Gemma2Config(**SIZES, attn_logit_softcapping=softcap)
    model = SharedPrefixModel(AutoModelForCausalLM.from_config(config))
    assert model.most_mask == MOST_MASK // heads


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
