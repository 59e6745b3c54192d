"""Training has no dropout and no router noise, even if the checkpoint's config has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhimoeConfig,
    PretrainedConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from distill.objective.batching import TrainingRow
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from learner.teachers import LocalTeachers
from tests.learner.conftest import IMPORTANCE_SAMPLING, assert_same, naive_logprobs
from tests.samples import after_context, training_row
from tests.tiny import SIZES, VOCAB_SIZE

# Three share a context of a length that pays; pairs for DPO.
CONTEXT_T = np.arange(40, 110, dtype=np.int32)
ROWS = [*after_context(CONTEXT_T, (3, 9, 20)), training_row(5, 12, seed=7)]

_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
}  # fmt: skip
_OPT: dict[str, Any] = {
    name: SIZES[name] for name in SIZES.keys() - {"intermediate_size", "num_key_value_heads"}
}
NOISY = {
    "llama": LlamaConfig(**SIZES, attention_dropout=0.1),
    "granite": GraniteConfig(**SIZES, attention_dropout=0.1),
    "gpt2": GPT2Config(**_GPT2, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
    "opt": OPTConfig(**_OPT, ffn_dim=48, word_embed_proj_dim=32, dropout=0.1, layerdrop=0.2),
    "phimoe": PhimoeConfig(
        **SIZES, num_local_experts=4, router_jitter_noise=0.1, input_jitter_noise=0.1
    ),
}


def checkpoint(config: PretrainedConfig, directory: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name and "wte" not in name:
                parameter.mul_(4)  # its context matters
    model.save_pretrained(directory)
    return str(directory)


@pytest.fixture(params=list(NOISY))
def noisy(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Checkpoint with dropout in its config."""
    return checkpoint(NOISY[request.param], tmp_path / request.param)


def learner_of(model: str, **changes: object) -> Learner:
    config = LearnerConfig.of(model=model, lr=1e-3, total_steps=3, device="cpu", **changes)
    return Learner(config, model)


def own_logprobs(model: str, rows: list[TrainingRow]) -> list[np.ndarray]:
    """Log-probs of transformers in inference mode."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return [naive_logprobs(plain, row).numpy() for row in rows]


def sampled_by(model: str) -> list[TrainingRow]:
    """The rows as if the model itself had sampled them."""
    rows = []
    for row, logprobs_N in zip(ROWS, own_logprobs(model, ROWS), strict=True):
        behaviour_T = np.zeros(len(row), np.float32)
        behaviour_T[row.loss_mask_T] = logprobs_N
        rows.append(replace(row, behaviour_logprobs_T=behaviour_T))
    return rows


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_ratio_of_the_sampling_policy_is_1(noisy: str, checkpointing: bool) -> None:
    learner = learner_of(noisy, gradient_checkpointing=checkpointing)
    rows = sampled_by(noisy)
    learner.logprobs(rows)  # and scoring leaves it as it is
    metrics = learner.step(Part(rows_D=rows, loss=IMPORTANCE_SAMPLING))
    assert metrics["train/logprob_gap"] < 1e-4
    assert metrics["train/grad_norm"] > 0


def test_a_local_teacher_scores_without_noise(noisy: str) -> None:
    teachers = LocalTeachers({"": noisy}, dtype=torch.float32, device="cpu")
    scored = teachers.models[""].logprobs(ROWS, 4096)
    for made, expected in zip(scored, own_logprobs(noisy, ROWS), strict=True):
        np.testing.assert_allclose(made, expected, atol=1e-4)


def test_checkpointed_layers_run_again_in_the_backward_pass(noisy: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        learner = learner_of(noisy, gradient_checkpointing=checkpointing)
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        modules = learner.model.modules()
        layer = next(m for m in modules if isinstance(m, GradientCheckpointingLayer))
        next(layer.children()).register_forward_hook(count)
        learner.step(Part(rows_D=ROWS, loss=cross_entropy_loss))
        assert calls == 1 + checkpointing
        used = {n for n, p in learner.model.named_parameters() if p.grad is not None}
        gradients.append({n: learner.model.get_parameter(n).grad for n in used})
    assert_same(*gradients, share=1e-4)
