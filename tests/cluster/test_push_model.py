"""docs/benchmarks/weights.md says of real sizes what the code would do with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from benchmarks.push_model import MODELS, Shape, layouts, push_plan, rows
from distill.weights.model_weights import BUCKET_BYTES, plan_buckets
from learner.sharding import plain_weights

DOC = Path(__file__).parents[2] / "docs" / "benchmarks" / "weights.md"


def test_the_table_is_the_plan_of_the_code() -> None:
    written = DOC.read_text().splitlines()
    for row in rows():
        assert row in written, f"{DOC} lacks the line that the code gives:\n{row}"


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        pytest.param(shape, billions, id=shape.name)
        for shape, billions in zip(MODELS, (8.19, 70.55, 235.09), strict=True)
    ],
)
def test_buckets_hold_everything_once_and_no_more_than_they_may(
    shape: Shape, billions: float
) -> None:
    tensors = layouts(shape)
    plan = push_plan(tensors)
    assert round(plan.nbytes / 2e9, 2) == billions, "parameters, as the model's name has them"
    buckets = plan_buckets(tensors)
    assert [tensor for bucket in buckets for tensor in bucket] == tensors
    largest = max(tensor.nbytes for tensor in tensors)
    assert plan.extra_bytes <= max(BUCKET_BYTES, largest)
    # Two buckets side by side do not fit into one: no call is wasted.
    sizes = [sum(tensor.nbytes for tensor in bucket) for bucket in buckets]
    firsts = [bucket[0].nbytes for bucket in buckets[1:]]
    assert all(a + b > BUCKET_BYTES for a, b in zip(sizes, firsts, strict=False))


@pytest.mark.parametrize(
    "shape, config", [(MODELS[0], Qwen3Config), (MODELS[1], LlamaConfig)], ids=["Qwen3", "Llama"]
)
def test_names_and_shapes_are_those_that_a_learner_pushes(shape: Shape, config: type) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config(
                hidden_size=shape.hidden, num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
                intermediate_size=shape.width, vocab_size=shape.vocab, head_dim=shape.head_dim,
                tie_word_embeddings=False,
            )
        )  # fmt: skip
    pushed = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert plain_weights(model).keys() == pushed.keys()
    assert {tensor.name: tensor.shape for tensor in layouts(shape)} == pushed
