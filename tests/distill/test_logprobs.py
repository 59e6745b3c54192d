"""Log-probs and entropies against their definition, and vocabulary heads against models."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

from distill.errors import CheckpointError
from distill.models import linear_stats, vocabulary_head
from distill.models.loading import new_qwen3
from distill.models.logprobs import (
    Event,
    TokenStats,
    as_outcomes,
    log_distribution,
    selected_logprobs,
    token_stats,
)
from distill.models.vocabulary_head import VocabularyHead, kept_until_backward
from distill.objective.divergences import kl

VOCAB = 50
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def by_hand(logits: list[float], token: int, temperature: float) -> tuple[float, float]:
    """(log p_T(token), entropy of p_T) in float64, value by value."""
    highest = max(logits)
    total = 0.0
    for z in logits:
        total += math.exp((z - highest) / temperature)
    entropy = 0.0
    for z in logits:
        log_p = (z - highest) / temperature - math.log(total)
        entropy -= math.exp(log_p) * log_p
    return (logits[token] - highest) / temperature - math.log(total), entropy


def drawn_logits(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Five positions, each with its own temperature."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = (3 * torch.randn(5, 11, generator=generator)).to(dtype)
    tokens_N = torch.randint(0, 11, (5,), generator=generator)
    return logits_NV, tokens_N, torch.tensor([0.05, 0.5, 1.0, 2.0, 30.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_position_at_its_own_temperature(dtype: torch.dtype) -> None:
    logits_NV, tokens_N, temperature_N = drawn_logits(dtype)
    stats = token_stats(log_distribution(logits_NV, temperature_N), tokens_N)
    selected_N = selected_logprobs(logits_NV, tokens_N, temperature_N)
    for n in range(5):
        expected = by_hand(logits_NV[n].tolist(), int(tokens_N[n]), float(temperature_N[n]))
        assert stats.logprobs_N[n].item() == pytest.approx(expected[0], rel=1e-5, abs=1e-5)
        assert stats.entropy_N[n].item() == pytest.approx(expected[1], rel=1e-4, abs=1e-5)
        assert selected_N[n].item() == pytest.approx(expected[0], rel=1e-5, abs=1e-5)
    assert stats.logprobs_N.dtype == stats.entropy_N.dtype == selected_N.dtype == torch.float32


def qwen3() -> PreTrainedModel:
    model = new_qwen3(
        vocab_size=VOCAB, hidden_size=32, layers=1, heads=2, context_length=64,
        eos_token_id=1, pad_token_id=0, seed=0,
    )  # fmt: skip
    model.model.norm.weight.data.mul_(20)
    return model


def gemma() -> PreTrainedModel:
    model = from_config(Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=2.0))
    model.model.norm.weight.data.add_(20)  # Gemma's norm weighs by 1 + w
    return model


def granite() -> PreTrainedModel:
    model = from_config(GraniteConfig(**SHAPE, logits_scaling=8.0))
    model.model.norm.weight.data.mul_(20)
    return model


def from_config(config: object) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def hidden_and_logits(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    ids_BT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        hidden_NH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state[0]
        return hidden_NH, model(input_ids=ids_BT, use_cache=False).logits[0].float()


class _TwoLinears(nn.Module):
    """Projection of two matrices that is no Linear, as with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 4, bias=False)
        self.outer = nn.Linear(4, VOCAB)

    @property
    def weight(self) -> Tensor:
        return self.outer.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.outer(self.inner(hidden))


def linear(*, bias: bool = False, frozen: bool = False) -> nn.Linear:
    return nn.Linear(32, VOCAB, bias=bias).requires_grad_(not frozen)


@pytest.mark.parametrize(
    "build",
    [linear, lambda: linear(bias=True), lambda: linear(frozen=True), _TwoLinears],
    ids=["plain", "bias", "frozen", "not_a_linear"],
)
@pytest.mark.parametrize(
    ("model", "asked", "event"),
    [
        (qwen3, "logprobs", ()),
        (gemma, "entropy", ()),
        (granite, "divergence", ()),
        (qwen3, "all", ()),
        (gemma, "all", (5, 7, 20)),
    ],
)
def test_every_gradient_of_the_chunks_is_autograd_s_own(
    monkeypatch: pytest.MonkeyPatch, model, build, asked: str, event: Event
) -> None:
    """Against one graph over all logits, fp32; each loss leaves the other statistics unused."""
    monkeypatch.setattr(vocabulary_head, "positions_per_chunk", lambda device, vocab_size: 3)
    monkeypatch.setattr(linear_stats, "positions_together", lambda device, vocab_size: 2)
    head = VocabularyHead.of(model(), event)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        projection = build()
        hidden_NH = torch.randn(8, 32, requires_grad=True)
        log_q_NV = torch.log_softmax(torch.randn(8, VOCAB), dim=1)
    head.projection = projection
    tokens_N, temperature_N = torch.arange(8) * 5, torch.linspace(0.4, 2, 8)
    wanted = [hidden_NH, *(p for p in projection.parameters() if p.requires_grad)]

    def reverse_kl(log_p_NV: Tensor, positions: slice) -> Tensor:
        return kl(log_p_NV, log_q_NV[positions])

    def values_and_gradients(stats: TokenStats) -> list[Tensor]:
        assert stats.divergence_N is not None
        terms = {
            "logprobs": stats.logprobs_N,
            "entropy": stats.entropy_N,
            "divergence": stats.divergence_N,
        }
        chosen = [term for name, term in terms.items() if asked in (name, "all")]
        loss = sum((term * torch.arange(1, 9)).sum() for term in chosen)
        assert isinstance(loss, Tensor)
        return [*terms.values(), *torch.autograd.grad(loss, wanted)]

    log_p_NV = head.log_distribution(hidden_NH, temperature_N)
    whole = token_stats(log_p_NV, as_outcomes(tokens_N, event), entropy_gradient=True)
    expected = values_and_gradients(whole._replace(divergence_N=reverse_kl(log_p_NV, slice(0, 8))))
    found = values_and_gradients(
        head.token_stats(
            hidden_NH, tokens_N, temperature_N, divergence_of=reverse_kl, entropy_gradient=True
        )
    )
    for ours, theirs in zip(found, expected, strict=True):
        largest = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_under_autocast_are_the_whole_under_autocast(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """For hidden states in either precision: a model's last norm may return both."""
    model = qwen3()
    head, hidden_NH = VocabularyHead.of(model), hidden_and_logits(model)[0].detach().to(dtype)
    made = []
    for positions in (8, 3):
        monkeypatch.setattr(
            vocabulary_head, "positions_per_chunk", lambda device, vocab_size, n=positions: n
        )
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            stats = head.token_stats(hidden_NH, torch.arange(8), torch.ones(8))
        stats.logprobs_N.sum().backward()
        gradient_VH = model.get_input_embeddings().get_parameter("weight").grad
        assert gradient_VH is not None
        made.append((stats.logprobs_N, gradient_VH.clone()))
    (whole_N, whole_grad), (chunked_N, chunked_grad) = made
    assert chunked_N.dtype == torch.float32
    torch.testing.assert_close(chunked_N, whole_N)
    torch.testing.assert_close(chunked_grad, whole_grad, rtol=0.02, atol=0.02)
    exact_N = head.token_stats(hidden_NH.float(), torch.arange(8), torch.ones(8)).logprobs_N
    assert 0 < (chunked_N - exact_N).abs().max() < 0.1, "nothing was computed in bfloat16"


def test_chunks_bound_the_logits_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen3()
    head = VocabularyHead.of(model)
    hidden_NH, _ = hidden_and_logits(model)
    sizes: list[int] = []
    project = head.projection

    def spy(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return project(hidden)

    spy.weight = head.projection.weight  # pyright: ignore[reportFunctionMemberAccess]
    head.projection = spy
    monkeypatch.setattr(vocabulary_head, "positions_per_chunk", lambda device, vocab_size: 3)
    with torch.no_grad():
        head.token_stats(hidden_NH, torch.arange(8), torch.ones(8))
    assert sizes == [3, 3, 2]


class _Strange(Qwen3ForCausalLM):
    """Model that transforms its logits in an unknown way."""

    def forward(self, *args: object, **kwargs: object):
        output = super().forward(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        assert output.logits is not None
        output.logits.mul_(1.5)
        return output


def test_an_unknown_post_processing_is_refused() -> None:
    model = _Strange(qwen3().config)
    with pytest.raises(CheckpointError):
        VocabularyHead.of(model)


def test_a_model_without_a_decoder_of_its_own_is_refused() -> None:
    """Llama 4's text model is in an attribute that its `base_model` does not name."""
    eager: dict[str, Any] = {**SHAPE, "attn_implementation": "eager"}
    config = Llama4TextConfig(**eager, intermediate_size_mlp=64, num_local_experts=2, head_dim=16)
    model = Llama4ForCausalLM(config)
    with pytest.raises(CheckpointError):
        VocabularyHead.of(model)


@pytest.mark.parametrize("elements, computed", [(1 << 20, 1), (1 << 30, 2)])
def test_a_small_distribution_is_computed_once_for_two_passes(elements: int, computed: int) -> None:
    asked: list[slice] = []

    def distribution(positions: slice) -> Tensor:
        asked.append(positions)
        return torch.arange(10.0)[positions]

    of = kept_until_backward(distribution, elements)
    parts = [slice(0, 4), slice(4, 10)]
    for _ in ("forward", "backward"):
        assert torch.equal(torch.cat([of(part) for part in parts]), torch.arange(10.0))
    assert asked == parts * computed
