"""The head of a checkpoint alone, of families that transform its logits in different ways."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
)

from distill.errors import ConfigError
from distill.models.head import check_head, in_dtype, load_head
from tests.families import SIZES
from tests.refusals import refuses
from tests.tiny import tiny_model_dir

_PHI: dict[str, Any] = SIZES | {"num_key_value_heads": 4}
HEADS: dict[str, Callable[[], PretrainedConfig]] = {
    "tied": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "its own": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "soft cap": lambda: Gemma2Config(**SIZES, head_dim=32, final_logit_softcapping=2.0),
    "logit scale": lambda: CohereConfig(**SIZES, logit_scale=0.25),
    "scaling": lambda: GraniteConfig(**SIZES, logits_scaling=8.0),
    "bias": lambda: PhiConfig(**_PHI),
}


@pytest.fixture(params=HEADS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEADS[request.param]())
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "model")
    return model.eval(), str(tmp_path / "model")


@torch.no_grad()
def test_it_makes_the_logits_that_its_model_makes(made: tuple[Any, str]) -> None:
    model, path = made
    ids_1T = torch.arange(10)[None]
    hidden_TH = model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0]
    head, config = load_head(path, device="cpu")
    torch.testing.assert_close(head(hidden_TH), logits_TV)
    assert check_head(path, "teacher.head") == (SIZES["vocab_size"], SIZES["hidden_size"])
    half = in_dtype(head, config, torch.bfloat16)(hidden_TH.bfloat16())
    torch.testing.assert_close(half, logits_TV, atol=0.05 * logits_TV.abs().max().item(), rtol=0)


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, seed=1)
    config = AutoConfig.from_pretrained(path)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(path)
    with refuses(ConfigError, "teacher.head"):
        check_head(path, "teacher.head")
