"""docs/benchmarks/weights.md says of real sizes what the code would do with them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.push_model import MODELS, Shape, layouts, push_plan, rows
from distill.weights.model_weights import BUCKET_BYTES, plan_buckets
from learner.export import Exported, Names, plain_weights

DOC = Path(__file__).parents[2] / "docs" / "benchmarks" / "weights.md"


def test_the_table_is_the_plan_of_the_code() -> None:
    written = DOC.read_text().splitlines()
    for row in rows():
        assert row in written, f"{DOC} lacks the line that the code gives:\n{row}"


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        pytest.param(shape, billions, id=shape.name)
        for shape, billions in zip(MODELS, (8.19, 70.55, 30.53, 235.09), strict=True)
    ],
)
def test_buckets_hold_everything_once_and_no_more_than_they_may(
    shape: Shape, billions: float
) -> None:
    tensors = layouts(shape)
    plan = push_plan(tensors)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    assert round(parameters / 1e9, 2) == billions, "parameters, as the model's name has them"
    buckets = plan_buckets(tensors)
    assert [tensor for bucket in buckets for tensor in bucket] == tensors
    largest = max(tensor.nbytes for tensor in tensors)
    assert plan.extra_bytes <= max(BUCKET_BYTES, largest)
    # Two buckets of one dtype side by side do not fit into one: no call is wasted.
    for one, other in itertools.pairwise(buckets):
        both = sum(tensor.nbytes for tensor in one) + other[0].nbytes
        assert both > BUCKET_BYTES or one[0].dtype != other[0].dtype
    assert len({bucket[0].dtype for bucket in buckets[:-1]}) == 1, "routers are the last bucket"


@pytest.mark.parametrize(
    "shape, config",
    [(MODELS[0], Qwen3Config), (MODELS[1], LlamaConfig), (MODELS[2], Qwen3MoeConfig)],
    ids=["Qwen3", "Llama", "Qwen3-MoE"],
)
def test_names_and_shapes_are_those_that_a_learner_pushes(shape: Shape, config: type) -> None:
    mixture = {"num_experts": shape.experts, "moe_intermediate_size": shape.width}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config(
                hidden_size=shape.hidden, num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
                intermediate_size=shape.width, vocab_size=shape.vocab, head_dim=shape.head_dim,
                tie_word_embeddings=False, **(mixture if shape.experts else {}),
            )
        )  # fmt: skip
    exported = Exported(model, Names.of(model, ""), plain_weights(model), leads=True)
    pushed = [tensor.layout_in(torch.bfloat16) for tensor in exported.weights.values()]
    assert set(layouts(shape)) == set(pushed)
    unsorted = len(plan_buckets(pushed))
    assert push_plan(layouts(shape)).calls == (58 if shape.experts else unsorted)
    assert not shape.experts or unsorted == 145, "a router in each of 48 layers cut them"
