"""Models whose weights would be exported under unknown names are refused by name.

`test_families.py` tests the export of accepted models.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from distill.errors import CheckpointError
from distill.models.loading import tensor_shapes
from learner.export import check_export
from tests.tiny import SIZES, VOCAB_SIZE

_HEADS: dict[str, Any] = {"head_dim": 8}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
FUSED = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **_MOE, **_HEADS, moe_intermediate_size=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**SIZES, **_MOE),
}


def saved(model: PreTrainedModel, directory: Path, **settings: Any) -> str:
    model.save_pretrained(directory, **settings)
    return str(directory)


def new(config: PretrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_fused_experts_are_taken(name: str, max_shard_size: str, tmp_path: Path) -> None:
    path = saved(new(FUSED[name]), tmp_path, max_shard_size=max_shard_size)
    assert not any("gate_up_proj" in stored for stored in tensor_shapes(path))
    check_export(path)
    as_in_memory = saved(new(FUSED[name]), tmp_path / "fused", save_original_format=False)
    assert any("gate_up_proj" in stored for stored in tensor_shapes(as_in_memory))
    check_export(as_in_memory)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    path = saved(new(FUSED["mixtral"]), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        check_export(path)


def test_a_checkpoint_of_the_base_model_alone_is_taken(tmp_path: Path) -> None:
    base = new(
        GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    ).base_model
    assert isinstance(base, PreTrainedModel)
    saved(base, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["GPT2Model"]
    assert "h.0.ln_1.weight" in load_file(tmp_path / "model.safetensors")
    check_export(str(tmp_path))


def test_another_shape_is_named(tmp_path: Path) -> None:
    path = saved(new(LlamaConfig(**SIZES)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(CheckpointError):
        check_export(path)
