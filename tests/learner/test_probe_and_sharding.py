"""Models whose attention cannot be replaced: two workers train them like one."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertGenerationConfig,
    DogeConfig,
    GptOssConfig,
    PretrainedConfig,
    Qwen3Config,
    StableLmConfig,
    XLNetConfig,
)

import distill.models.attention_probe
from distill.errors import CheckpointError
from distill.models.attention_probe import shares_prefixes
from learner.config import LearnerConfig, LearnerSettings
from learner.learner import Learner
from learner.optimizer import assert_optimizes, build_optimizer
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from tests.learner.conftest import untimed
from tests.learner.test_dropout import checkpoint
from tests.learner.two_workers import on_workers
from tests.samples import training_row
from tests.tiny import SIZES
from tests.weights import numbers

ROWS = [training_row(3 + i, 4 + 2 * i, seed=i) for i in range(6)]
# Their attention raises when it is called our way, in the middle of the first layer.
RAISES = {
    "stablelm": StableLmConfig(**SIZES),
    "gpt_oss": GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
}

XLNET = {"vocab_size": SIZES["vocab_size"], "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}


def train(learner: Learner, _: dict[str, Any]) -> dict[str, Any]:
    """Take two steps; return the weights before and after."""
    before = numbers(learner.weights())
    metrics = [learner.step(Part(rows_D=ROWS, loss=cross_entropy_loss)) for _ in range(2)]
    assert_optimizes(learner.worker.optimizer, learner.model)
    return {"metrics": metrics, "before": before, "weights": numbers(learner.weights())}


@pytest.mark.slow
@pytest.mark.parametrize("name", RAISES)
def test_two_workers_train_every_layer_of_a_model_that_raises_in_the_probe(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LearnerConfig.of(
        model=checkpoint(RAISES[name], tmp_path / name), lr=1e-3, total_steps=2, device="cpu"
    )
    with caplog.at_level(logging.WARNING):
        alone = train(Learner(config, str(tmp_path)), {})
    assert caplog.records
    together = on_workers(train, config, tmp_path, (cross_entropy_loss,), {})
    for theirs, ours in zip(alone["metrics"], together["metrics"], strict=True):
        for metric in untimed(ours).keys() - {"train/padding_share"}:
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-5, abs=1e-6), metric
    assert together["weights"].keys() == alone["weights"].keys()
    for tensor, weight in alone["weights"].items():
        np.testing.assert_allclose(together["weights"][tensor], weight, atol=1e-5, err_msg=tensor)
        assert not np.array_equal(weight, together["before"][tensor]), tensor


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_probe_without_memory_is_no_evidence_on_the_architecture(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=8)).eval()

    def fail(*_: Any) -> str:
        raise error

    monkeypatch.setattr(distill.models.attention_probe, "compare_passes", fail)
    with pytest.raises(type(error)):
        shares_prefixes(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("config", [BertGenerationConfig(**SIZES), XLNetConfig(**XLNET)])
def test_a_model_that_sees_later_tokens_is_refused(config: PretrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(CheckpointError):
        shares_prefixes(model)


def test_a_mask_of_the_model_s_own_is_not_left_out() -> None:
    """Doge adds a learned one that is at first the same for all keys."""
    config = DogeConfig(**SIZES, num_experts=0)
    assert not shares_prefixes(AutoModelForCausalLM.from_config(config).eval())


# What is asserted at each update


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(inputs))


def test_an_optimizer_of_other_tensors_is_not_stepped() -> None:
    model = SmallModel()
    optimizer = build_optimizer(model, LearnerSettings(lr=1e-3))
    assert_optimizes(optimizer, model)
    model.linear.weight = nn.Parameter(model.linear.weight.detach().clone())
    with pytest.raises(AssertionError):
        assert_optimizes(optimizer, model)
    model.linear.weight.requires_grad_(False)
    with pytest.raises(AssertionError):
        assert_optimizes(optimizer, model)
    model = SmallModel()
    optimizer = build_optimizer(model, LearnerSettings(lr=1e-3))
    optimizer.param_groups[0]["params"].append(model.linear.weight)
    with pytest.raises(AssertionError):
        assert_optimizes(optimizer, model)
