"""Attention masks: one for all layers of a window, and no fallback to a slow kernel."""

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    MistralConfig,
    PreTrainedModel,
)

from distill.models import attention
from distill.models.attention import NOWHERE, takes_grouped_heads, visibility_bias
from distill.models.shared_prefix import MOST_MASK, SharedPrefixModel

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
def test_layers_of_a_window_keep_one_mask_between_them(
    windowed: PreTrainedModel, autocast: bool
) -> None:
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
def test_no_mask_meets_grouped_heads_on_cuda(
    windowed: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
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
