"""Packed rows are trained like single ones; families that cannot are refused."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from distill.errors import ConfigError
from distill.models import flex_attention
from distill.models.attention_probe import check_packs
from distill.models.shared_prefix import SharedPrefixModel
from distill.objective.batching import TrainingRow
from distill.objective.settings import ObjectiveConfig
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss, PreferenceLoss, cross_entropy_loss
from learner.supervised import with_reference
from learner.teachers import LocalTeachers
from tests.flex_twin import dense_flex
from tests.learner.conftest import NewLearner, assert_same, gradients, gradients_of, naive_logprobs
from tests.learner.test_dropout import checkpoint
from tests.refusals import refuses
from tests.samples import demonstration, training_row
from tests.tiny import SIZES

# A long row among short ones, of which some have one length; the windows are shorter than most.
LENGTHS = [(3, 4), (40, 60), (1, 1), (7, 12), (2, 5), (30, 9), (5, 2), (1, 1), (12, 7)]
ROWS = [demonstration(prompt, n, seed=i) for i, (prompt, n) in enumerate(LENGTHS)]
_WINDOW: dict[str, Any] = {"head_dim": 8, "sliding_window": 8}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "sliding": MistralConfig(**SIZES, **_WINDOW),
    "alternating": Gemma2Config(**SIZES, **_WINDOW, attn_logit_softcapping=0.5),
    "moe": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
_STATE: dict[str, Any] = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2}
STATEFUL: dict[str, PretrainedConfig] = {
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "llama4_text": Llama4TextConfig(**SIZES, num_local_experts=2, head_dim=8),
    "mamba": MambaConfig(**_STATE),
    "mamba2": Mamba2Config(**_STATE, num_heads=8, head_dim=8),
    "qwen3_next": Qwen3NextConfig(**SIZES, layer_types=["linear_attention", "full_attention"]),
    "recurrent_gemma": RecurrentGemmaConfig(**SIZES),
    "rwkv": RwkvConfig(**_STATE),
}


def alone(model: str, rows: Sequence[TrainingRow]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss and its gradient, row by row with transformers' own code."""
    plain = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    losses = [-naive_logprobs(plain, row).sum() for row in rows]
    loss = sum(losses, torch.zeros(())) / sum(row.num_trained for row in rows)
    loss.backward()
    return loss.item(), gradients_of(plain)


def group(context: int, lengths: Sequence[int], seed: int) -> list[TrainingRow]:
    """A prompt's samples: rows of one context."""
    context_T = np.random.default_rng(seed).integers(3, 160, context).astype(np.int32)
    rows = [training_row(context, n, seed=100 * seed + i) for i, n in enumerate(lengths)]
    return [
        replace(row, tokens_T=np.concatenate([context_T, row.tokens_T[context:]]), temperature=1.0)
        for row in rows
    ]


def imitated(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The rows as demonstrations: each trained token counts once."""
    return [replace(row, advantages_T=row.loss_mask_T.astype(np.float32)) for row in rows]


# Samples of one token, of one length, and of lengths far apart; after contexts of all lengths.
GROUPS = [
    *group(40, (1, 3, 3, 50), 1), *group(33, (9, 2, 70, 1), 2), *group(2, (30, 4), 3),
    *group(60, (5,), 4),
]  # fmt: skip
# Rows, and the number of their tokens that are run: of a context all but the last, which is each
# row's own, and that once.
PACKED = {
    "rows": (ROWS, sum(map(len, ROWS))),
    "groups": (
        imitated(GROUPS), 40 + 33 + 2 + 60 - 4 + sum(row.num_trained for row in GROUPS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("of", PACKED)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_trained_as_if_each_were_alone(
    family: str, of: str, new_learner: NewLearner, tmp_path: Path
) -> None:
    rows, tokens = PACKED[of]
    model = checkpoint(FAMILIES[family], tmp_path / family)
    loss, gradient = alone(model, rows)
    learner = new_learner(model=model, packing=True)
    runs: list[torch.Size] = []
    learner.model.get_input_embeddings().register_forward_pre_hook(
        lambda _module, inputs: runs.append(inputs[0].shape)
    )
    for ordered in (rows, rows[::-1]):
        learner.zero_grad()
        made = learner.forward_backward(Part(rows_D=ordered, loss=cross_entropy_loss))
        assert made["train/loss"] == pytest.approx(loss, rel=1e-5)
        assert_same(gradients(learner), gradient, share=1e-5)
    assert runs == [(1, tokens)] * 2, "not run as one, a context run twice, or something padded"


@pytest.mark.parametrize("family", ["tied", "alternating"])
@pytest.mark.parametrize("rows", [ROWS, imitated(GROUPS)], ids=["rows", "groups"])
def test_flex_attention_trains_the_same(
    family: str,
    rows: list[TrainingRow],
    new_learner: NewLearner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA except for the kernel: windows, soft caps, grouped heads, recomputed layers."""
    monkeypatch.setattr(flex_attention, "flex_attention", dense_flex)
    monkeypatch.setattr(SharedPrefixModel, "_attends_by_flex", lambda _self: True)
    model = checkpoint(FAMILIES[family], tmp_path / family)
    loss, gradient = alone(model, rows)
    for changes in ({}, {"gradient_checkpointing": True}):
        learner = new_learner(model=model, packing=True, **changes)
        made = learner.forward_backward(Part(rows_D=rows, loss=cross_entropy_loss))
        assert made["train/loss"] == pytest.approx(loss, rel=1e-5)
        assert_same(gradients(learner), gradient, share=1e-5)


def test_pairs_are_packed_too(new_learner: NewLearner, tmp_path: Path) -> None:
    padded, packed = (new_learner(packing=packing, token_budget=80) for packing in (False, True))
    rows = with_reference(ROWS[:8], tmp_path / "reference.npz", packed.logprobs)
    for theirs, ours in zip(padded.logprobs(rows), packed.logprobs(rows), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    part = Part(rows_D=rows, loss=PreferenceLoss(beta=0.3, sft_coef=0.1), rows_per_unit=2)
    expected, made = padded.step(part), packed.step(part)
    assert made["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)
    assert_same(gradients(packed), gradients(padded), share=1e-5)
    assert packed.evaluate(part) == pytest.approx(padded.evaluate(part), rel=1e-4)


@pytest.mark.parametrize("family", STATEFUL)
def test_layers_that_run_along_the_sequence_are_refused_by_name(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(STATEFUL[family])
    with refuses(ConfigError, "learner.packing"):
        check_packs(model)


SINKS = GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
# Whose attention transformers does not look up by name.
OWN_ATTENTION = BloomConfig(vocab_size=160, hidden_size=32, n_layer=1, n_head=2)


@pytest.mark.parametrize("config", [SINKS, OWN_ATTENTION], ids=["sinks", "own attention"])
def test_attention_that_cannot_be_replaced_is_refused_before_it_is_loaded(
    config: PretrainedConfig,
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with refuses(ConfigError, "learner.packing"):
        check_packs(model)


def test_attention_that_cannot_be_replaced_is_refused_by_the_learner(
    new_learner: NewLearner, tmp_path: Path
) -> None:
    model = checkpoint(SINKS, tmp_path / "sinks")
    with refuses(ConfigError, "learner.packing"):
        new_learner(model=model, packing=True)
    new_learner(model=model)


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """Number of tokens of each pass of any model, padding included."""
    sizes: list[int] = []

    def note(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, nn.Embedding):
            sizes.append(inputs[0].numel())

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    yield sizes
    hook.remove()


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        (FAMILIES["alternating"], True),
        (FAMILIES["moe"], True),
        (SINKS, False),
        (STATEFUL["lfm2"], False),
    ],
    ids=lambda of: getattr(of, "model_type", ""),
)
@pytest.mark.parametrize("rows", [ROWS, imitated(GROUPS)], ids=["rows", "groups"])
def test_a_frozen_model_that_cannot_pack_pads_within_the_budget(
    config: PretrainedConfig,
    packs: bool,
    rows: list[TrainingRow],
    new_learner: NewLearner,
    passes: list[int],
    tmp_path: Path,
) -> None:
    """A teacher's distribution and scores, and a reference's, beside a student that packs."""
    budget = sum(map(len, rows))
    frozen = checkpoint(config, tmp_path / "frozen")
    plain = AutoModelForCausalLM.from_pretrained(
        frozen, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = [naive_logprobs(plain, row).numpy() for row in rows]
    rows = [replace(row, teacher_coef=1.0) for row in rows]
    losses = []
    for packing, tokens in ((False, 1), (True, budget)):
        teachers = LocalTeachers({"": frozen}, dtype=torch.float32, device="cpu", packing=packing)
        learner = new_learner(packing=packing, token_budget=tokens)
        full = PolicyObjectiveLoss(objective=ObjectiveConfig(estimator="full"), teachers=teachers)
        part = Part(rows_D=rows, loss=full)
        passes.clear()
        losses.append([learner.evaluate(part)["train/loss"], learner.step(part)["train/loss"]])
        by_teacher, number = learner.teacher_logprobs("", rows), len(passes)
        for logprobs in (by_teacher, learner.reference_logprobs(frozen, rows)):
            for made_N, expected_N in zip(logprobs, expected, strict=True):
                np.testing.assert_allclose(made_N, expected_N, atol=2e-5)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert max(passes) <= budget, "a pass of more tokens than the budget"
    # One pass of each model in `evaluate` and `step`, and one of the teacher for its scores.
    assert (number == 5) == packs
