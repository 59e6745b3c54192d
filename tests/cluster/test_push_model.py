"""The table in docs/benchmarks/weights.md is the plan of the code for real sizes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.push_model import MODELS, Shape, layouts, push_plan, rows
from distill.weights.model_weights import plan_buckets
from learner.export import Exported, Names, plain_weights

DOC = Path(__file__).parents[2] / "docs" / "benchmarks" / "weights.md"


def test_the_table_is_the_plan_of_the_code() -> None:
    written = DOC.read_text().splitlines()
    for row in rows():
        assert row in written, f"{DOC} lacks the line that the code gives:\n{row}"


@pytest.mark.parametrize(
    "shape, config",
    [(MODELS[0], Qwen3Config), (MODELS[1], LlamaConfig), (MODELS[2], Qwen3MoeConfig)],
    ids=["Qwen3", "Llama", "Qwen3-MoE"],
)
def test_names_and_shapes_equal_those_of_a_learner_s_push(shape: Shape, config: type) -> None:
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
