"""The load-balancing loss of routers counts real tokens only, however rows are run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.errors import ConfigError
from distill.models.loading import load_causal_lm, meta_causal_lm
from distill.objective.batching import TrainingRow
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from learner.routers import check_balances
from tests.families import family_dir
from tests.learner.conftest import NewLearner, gradients
from tests.refusals import refuses
from tests.samples import after_context, training_row

CONTEXT_T = np.arange(20, 90, dtype=np.int32)
ROWS = [training_row(3 + i, 9 + 7 * i, seed=i) for i in range(4)]
SHARED = after_context(CONTEXT_T, (3, 9, 20))


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral", "gpt_oss"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return family_dir(tmp_path_factory.mktemp("mixture"), request.param)


def probabilities(path: str, rows: list[np.ndarray]) -> list[torch.Tensor]:
    """Softmax of the router's logits by layer, row by row."""
    model = load_causal_lm(path, dtype=torch.float32, device="cpu").eval()
    by_row = []
    for tokens_T in rows:
        ids_1T = torch.from_numpy(tokens_T.astype(np.int64))[None]
        with torch.no_grad():
            out: Any = model(ids_1T, use_cache=False, output_router_logits=True)
        by_row.append([logits.flatten(0, -2).softmax(-1) for logits in out.router_logits])
    return [torch.cat([each[layer] for each in by_row]) for layer in range(len(by_row[0]))]


def naive_aux(path: str, rows: list[TrainingRow], top_k: int = 2) -> float:
    """E sum_e f_e P_e by loops over the tokens of all layers."""
    p_NE = torch.cat(probabilities(path, [row.tokens_T for row in rows]))
    chosen = torch.zeros(p_NE.shape[1])
    for p_E in p_NE:
        for expert in p_E.argsort(descending=True)[:top_k]:
            chosen[expert] += 1
    return float(p_NE.shape[1] * (chosen / len(p_NE) * p_NE.mean(0)).sum())


def passed(learner: Learner, rows: list[TrainingRow]) -> dict[str, float]:
    learner.zero_grad()
    return learner.forward_backward(Part(rows_D=rows, loss=cross_entropy_loss))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_padding_does_not_count(mixture: str, checkpointing: bool, new_learner: NewLearner) -> None:
    plain = new_learner(model=mixture)
    balanced = new_learner(model=mixture, router_aux_coef=0.5, gradient_checkpointing=checkpointing)
    without, made = passed(plain, ROWS), passed(balanced, ROWS)
    assert "train/router_aux" not in without
    assert made["train/router_aux"] == pytest.approx(naive_aux(mixture, ROWS), rel=1e-4)
    expected = without["train/loss"] + 0.5 * made["train/router_aux"]
    assert made["train/loss"] == pytest.approx(expected, rel=1e-5)
    moved = [
        name
        for name, gradient in gradients(balanced).items()
        if not torch.allclose(gradient, gradients(plain)[name], atol=1e-6)
    ]
    assert any("gate.weight" in name or "router.weight" in name for name in moved)


def test_a_shared_context_counts_once(mixture: str, new_learner: NewLearner) -> None:
    learner = new_learner(model=mixture, router_aux_coef=0.5)
    made = passed(learner, SHARED)
    if learner.worker.most_mask == 0:  # its attention takes no shared context: each row has it
        assert made["train/router_aux"] == pytest.approx(naive_aux(mixture, SHARED), rel=1e-4)
        return
    once = len(CONTEXT_T) - 1  # its last token predicts the first trained one: it is the rows' own
    p_NE = torch.cat(
        [
            *probabilities(mixture, [CONTEXT_T[:once]]),
            *(p_TE[once:-1] for row in SHARED for p_TE in probabilities(mixture, [row.tokens_T])),
        ]
    )
    chosen = torch.bincount(p_NE.topk(2).indices.flatten(), minlength=p_NE.shape[1])
    expected = float(p_NE.shape[1] * (chosen / len(p_NE) * p_NE.mean(0)).sum())
    assert made["train/router_aux"] == pytest.approx(expected, rel=1e-4)


def test_micro_batches_count_by_their_trained_tokens(mixture: str, new_learner: NewLearner) -> None:
    cut = new_learner(model=mixture, router_aux_coef=0.5, token_budget=45)
    made = passed(cut, ROWS)
    batches = cut.dealing.split(ROWS, 1)
    assert len(batches) > 1
    total = sum(row.num_trained for row in ROWS)
    expected = sum(
        naive_aux(mixture, rows) * sum(row.num_trained for row in rows) / total for rows in batches
    )
    assert made["train/router_aux"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_models_without_a_balance_loss_are_refused(name: str, tmp_path: Path) -> None:
    with refuses(ConfigError, "learner.router_aux_coef"):
        check_balances(meta_causal_lm(family_dir(tmp_path, name)))
