"""Checkpoints with a separate head although config.json ties it to the embedding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from distill.errors import ConfigError
from distill.models.loading import (
    check_served_ties,
    load_causal_lm,
    load_config,
    meta_causal_lm,
    own_head,
)
from distill.tokenizer import load_tokenizer
from learner.config import LearnerConfig
from learner.export import check_export
from learner.initial_weights import InitialWeights
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from learner.process_group import WorkerGroup
from tests.learner.two_workers import on_workers
from tests.refusals import refuses
from tests.samples import demonstration
from tests.tiny import save_tokenizer

KINDS = ["qwen3", "gemma2", "gpt2", "llama"]
SIZES = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 160,
}  # fmt: skip
ROWS = [demonstration(3 + i, 6, seed=i) for i in range(4)]


def checkpoint(kind: str, root: Path, *, head: str = "own") -> str:
    """Tied model; `head` is its own, a copy of the embedding, or none."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(root)
    save_tokenizer(str(root))
    weights = load_file(root / "model.safetensors")
    [embedding] = {n for n in weights if n.endswith(("embed_tokens.weight", "wte.weight"))}
    if head != "none":
        noise = 0.0 if head == "copy" else 0.05
        torch.manual_seed(1)
        weights["lm_head.weight"] = weights[embedding] + noise * torch.randn_like(
            weights[embedding]
        )
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    return str(root)


def trained(path: str, **settings: Any) -> Learner:
    config = LearnerConfig.of(model=path, total_steps=4, device="cpu", lr=1e-2, **settings)
    learner = Learner(config, "/nowhere")
    learner.step(Part(rows_D=ROWS, loss=cross_entropy_loss))
    return learner


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_its_own_is_trained_and_declared(kind: str, tmp_path: Path) -> None:
    path = checkpoint(kind, tmp_path / "model")
    assert load_config(path).tie_word_embeddings
    assert own_head(meta_causal_lm(path), path) is None, "it is untied already"
    check_export(path)
    with refuses(ConfigError, "student"):
        check_served_ties("student", path)
    alone = WorkerGroup(None, "cpu")
    initial = InitialWeights(path, alone)
    initial.fill(alone)
    loaded = load_causal_lm(path, dtype=torch.float32, device="cpu")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(initial.model.get_parameter(name), parameter), name
    learner = trained(path)
    learner.export(tmp_path / "final", load_tokenizer(path))
    check_served_ties("student", str(tmp_path / "final"))
    assert not load_config(str(tmp_path / "final")).tie_word_embeddings
    again = load_causal_lm(str(tmp_path / "final"), dtype=torch.float32, device="cpu")
    for name, parameter in learner.model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    embedding = again.get_input_embeddings().get_parameter("weight")
    assert not torch.equal(again.get_parameter("lm_head.weight"), embedding)


@pytest.mark.parametrize("head", ["copy", "none"])
def test_equal_matrices_stay_tied(head: str, tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path, head=head)
    check_served_ties("student", path)
    model = load_causal_lm(path, dtype=torch.float32, device="cpu")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings and meta_causal_lm(path).config.tie_word_embeddings


def trained_and_exported(learner: Learner, given: dict[str, Any]) -> dict[str, Any]:
    learner.step(Part(rows_D=ROWS, loss=cross_entropy_loss))
    learner.export(Path(given["final"]), load_tokenizer(given["tokenizer"]))
    return {}


@pytest.mark.slow  # two more processes; tests/learner/test_sharding.py has them always
def test_two_workers_train_a_separate_head(tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path / "model")
    given = {"final": str(tmp_path / "final"), "tokenizer": path}
    config = LearnerConfig.of(model=path, total_steps=4, device="cpu", lr=1e-2)
    on_workers(trained_and_exported, config, tmp_path / "failed", (cross_entropy_loss,), given)
    alone = trained(path)
    final = load_causal_lm(str(tmp_path / "final"), dtype=torch.float32, device="cpu")
    assert not final.config.tie_word_embeddings
    for name, parameter in alone.model.named_parameters():
        np.testing.assert_allclose(
            final.get_parameter(name).detach(), parameter.detach(), atol=1e-4, err_msg=name
        )
