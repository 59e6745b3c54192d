"""Model FLOPs against PyTorch's own counter, and their dependences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.peak import peak_flops
from distill.objective.batching import TrainingRow, collate
from learner.flops import ModelFlops
from tests.samples import training_row
from tests.tiny import VOCAB_SIZE

ROW = training_row(6, 11)
_EAGER: dict[str, Any] = {"attn_implementation": "eager"}


def qwen3(**changes: Any) -> PreTrainedModel:
    # The eager attention multiplies all pairs of tokens by products that the counter sees.
    return Qwen3ForCausalLM(Qwen3Config(**_shape(), **_EAGER, **changes))


def _shape() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip


def gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=64,
        bos_token_id=1, eos_token_id=1, **_EAGER,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def moe(**changes: Any) -> PreTrainedModel:
    sizes = {"moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 2}
    shape: dict[str, Any] = _shape() | sizes | changes
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))


def flops_of(model: PreTrainedModel) -> ModelFlops:
    flops = ModelFlops.of(model)
    assert flops is not None
    return flops


def counted(model: PreTrainedModel, row: TrainingRow, *, backward: bool) -> float:
    """FLOPs by PyTorch of the row's log-probs, projected at its trained tokens only."""
    batch = collate([row])
    counter, head = FlopCounterMode(display=False), model.get_output_embeddings()
    assert head is not None
    with counter:
        hidden_TH = model.base_model(input_ids=batch.tokens_BT, use_cache=False)[0][0]
        logits_NV = head(hidden_TH[batch.position_N])
        if backward:
            logits_NV.sum().backward()
    return counter.get_total_flops()


def unseen(flops: ModelFlops, row: TrainingRow) -> float:
    """Forward FLOPs of pairs of a token and a later one, which eager attention masks."""
    length = len(row)
    return sum(each for _, each in flops.attention) * length * (length - 1) / 2


@pytest.mark.parametrize("make", [qwen3, gpt2])
def test_flops_equal_pytorch_s_count(make: Callable[[], PreTrainedModel]) -> None:
    """Every product counts, except rotary angles, which are a product in transformers 5.17."""
    model = make()
    flops = flops_of(model)
    forward, training = (counted(model, ROW, backward=backward) for backward in (False, True))
    assert flops.forward([ROW]) + unseen(flops, ROW) == pytest.approx(forward, rel=2e-4)
    assert flops.training([ROW]) + 3 * unseen(flops, ROW) == pytest.approx(training, rel=2e-4)


def test_flops_depend_on_tokens_and_not_on_batches() -> None:
    flops = flops_of(qwen3())
    rows = [training_row(3, 9, seed=1), training_row(20, 2, seed=2)]
    assert flops.training(rows) == flops.training(rows[:1]) + flops.training(rows[1:])
    more_context, more_trained = training_row(7, 11), training_row(6, 12)
    projected = flops.training([more_trained]) - flops.training([training_row(7, 11)])
    assert projected == 3 * 2 * 48 * VOCAB_SIZE
    # Each token multiplies all weights, and attends to those before it and to itself.
    weights = 3 * (48 * 32 * (4 + 2 + 2 + 4) + 3 * 48 * 80)
    attended = 3 * 4 * 4 * 32 * len(more_context)
    grown = flops.training([more_context]) - flops.training([ROW])
    assert grown == 3 * (2 * weights + attended)


def test_a_window_bounds_the_flops_of_attention() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    sliding = qwen3(use_sliding_window=True, sliding_window=5, layer_types=types)
    full, windowed = flops_of(qwen3()), flops_of(sliding)
    length = len(ROW)
    seen = sum(min(t, 5) for t in range(1, length + 1))
    saved = length * (length + 1) // 2 - seen
    assert full.forward([ROW]) - windowed.forward([ROW]) == 2 * 4 * 4 * 32 * saved
    short = training_row(1, 3)
    assert full.forward([short]) == windowed.forward([short])


def test_experts_count_as_far_as_a_token_visits_them() -> None:
    two, four = flops_of(moe()), flops_of(moe(num_experts_per_tok=4))
    visited = 2 * 3 * 3 * 48 * 40  # two more, in three layers of three matrices each
    assert four.decoder.forward - two.decoder.forward == 2 * visited
    more_experts = flops_of(moe(num_experts=16))
    routers = 3 * 8 * 48
    assert more_experts.decoder.forward - two.decoder.forward == 2 * routers


def test_unknown_architectures_have_no_flops() -> None:
    experts = moe()
    experts.config = Qwen3Config(**_shape())
    assert ModelFlops.of(experts) is None
    linear = qwen3()
    linear.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    assert ModelFlops.of(linear) is None


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_the_peak_is_measured_once_and_leaves_the_generator_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    peak = peak_flops("cpu", dtype)
    assert peak > 1e8  # a processor of this century
    assert peak_flops("cpu", dtype) == peak
    assert torch.equal(torch.get_rng_state(), before)
