"""Routing replay: a row runs through the experts that it has."""

import asyncio
import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.embedded.engine import EmbeddedEngine
from distill.chat.segments import SegmentBuilder
from distill.engine import GenerateRequest
from distill.errors import ConfigError, DataError
from distill.models.loading import load_causal_lm, meta_causal_lm
from distill.models.routers import WEIGH, routers_of, weights_of
from distill.objective.batching import TrainingRow
from distill.objective.settings import ObjectiveConfig
from distill.routing import MixtureShape, merged_experts, unknown_expert
from distill.sampling import TrainSampling
from distill.stops import StopTokens
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss, cross_entropy_loss
from tests.families import family_dir, undecided
from tests.learner.conftest import NewLearner, assert_same, gradients, gradients_of, naive_logprobs
from tests.learner.routing import other_experts, own_experts
from tests.refusals import refuses
from tests.samples import after_context, training_row

MIXTURES = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
CONTEXT_T = np.arange(20, 90, dtype=np.int32)
ROWS = [training_row(3 + i, 9 + 7 * i, seed=i) for i in range(4)]
SHARED = after_context(CONTEXT_T, (3, 9, 20))


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return family_dir(tmp_path_factory.mktemp("mixture"), request.param)


def passed(learner: Learner, rows: list[TrainingRow]) -> dict[str, float]:
    learner.zero_grad()
    return learner.forward_backward(Part(rows_D=rows, loss=cross_entropy_loss))


def twin(path: str, rows: list[TrainingRow]) -> tuple[float, dict[str, torch.Tensor]]:
    """Weighted cross-entropy and its gradient, row by row, by routers with given experts."""
    model = load_causal_lm(path, dtype=torch.float32, device="cpu").eval()
    total = sum(row.num_trained for row in rows)
    loss = torch.zeros(())
    for row in rows:
        experts_TLK = torch.from_numpy(experts_of(row))
        hooks = [
            router.register_forward_hook(_with_experts(experts_TLK[:, layer]))
            for layer, router in routers_of(model).items()
        ]
        wanted_N = torch.from_numpy(row.advantages_T[row.loss_mask_T])
        loss = loss - (wanted_N * naive_logprobs(model, row)).sum() / total
        for hook in hooks:
            hook.remove()
    loss.backward()
    return float(loss), gradients_of(model)


def experts_of(row: TrainingRow) -> np.ndarray:
    assert row.experts_TLK is not None
    return row.experts_TLK


def _with_experts(experts_TK: torch.Tensor) -> Any:
    """Hook that weighs the given experts token by token and expert by expert."""
    unknown = torch.iinfo(experts_TK.dtype).max

    def hook(router: Any, _inputs: Any, outputs: Any) -> Any:
        logits_TE, weights_TK, own_TK = outputs
        weights, chosen = [], []
        for t in range(len(logits_TE)):
            if experts_TK[t, 0] == unknown:
                weights.append(weights_TK[t])
                chosen.append(own_TK[t])
                continue
            ids = [int(e) for e in experts_TK[t]]
            kind = type(router).__name__
            if "GptOss" in kind:
                mass = [logits_TE[t, e].exp() for e in ids]
                total = sum(mass)
            elif "Deepseek" in kind:
                mass = [1 / (1 + (-logits_TE[t, e]).exp()) for e in ids]
                total = sum(mass) / router.routed_scaling_factor
            else:
                everything = logits_TE[t].exp().sum()
                mass = [logits_TE[t, e].exp() / everything for e in ids]
                total = sum(mass) if getattr(router, "norm_topk_prob", True) else 1
            weights.append(torch.stack([m / total for m in mass]))
            chosen.append(torch.tensor(ids))
        return logits_TE, torch.stack(weights), torch.stack(chosen)

    return hook


@pytest.mark.parametrize("name", WEIGH)
@pytest.mark.parametrize("normalised", [True, False])
def test_weights_are_the_routers_own_to_the_bit(name: str, normalised: bool) -> None:
    module = importlib.import_module(MODULES[name])
    config: Any = SimpleNamespace(
        hidden_size=16, num_experts=8, num_local_experts=8, n_routed_experts=8,
        num_experts_per_tok=3, norm_topk_prob=normalised, routed_scaling_factor=2.5, n_group=2,
        topk_group=1,
    )  # fmt: skip
    torch.manual_seed(0)
    router = getattr(module, name)(config)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.randn(50, 16).to(dtype)
        logits, weights, chosen = router.to(dtype)(hidden)
        assert torch.equal(weights_of(router, logits, chosen).to(weights.dtype), weights)


MODULES = {
    name: f"transformers.models.{family}.modeling_{family}"
    for name, family in {
        "FlexOlmoTopKRouter": "flex_olmo", "MixtralTopKRouter": "mixtral",
        "OlmoeTopKRouter": "olmoe", "Qwen2MoeTopKRouter": "qwen2_moe",
        "Qwen3MoeTopKRouter": "qwen3_moe", "Qwen3NextTopKRouter": "qwen3_next",
        "Qwen3_5MoeTopKRouter": "qwen3_5_moe", "GptOssTopKRouter": "gpt_oss",
        "DeepseekV3TopkRouter": "deepseek_v3", "Dots1TopkRouter": "dots1",
        "ExaoneMoeTopkRouter": "exaone_moe", "Glm4MoeTopkRouter": "glm4_moe",
        "SolarOpenTopkRouter": "solar_open",
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", [False, True])
def test_own_choices_change_nothing(
    mixture: str, checkpointing: bool, new_learner: NewLearner
) -> None:
    plain = new_learner(model=mixture, gradient_checkpointing=checkpointing)
    replaying = new_learner(
        model=mixture, replays_routing=True, gradient_checkpointing=checkpointing
    )
    without, made = passed(plain, ROWS), passed(replaying, own_experts(mixture, ROWS))
    assert made.pop("train/routing_mismatch") == 0
    assert made["train/loss"] == without["train/loss"]
    expected = gradients(plain)
    for name, gradient in gradients(replaying).items():
        assert torch.equal(gradient, expected[name]), name


SETTINGS: dict[str, dict[str, Any]] = {
    "padded": {"token_budget": 45},
    "recomputed": {"gradient_checkpointing": True},
    "packed": {"packing": True},
}


@pytest.mark.parametrize("rows", [ROWS, SHARED], ids=["rows", "shared"])
@pytest.mark.parametrize("way", SETTINGS)
def test_given_experts_have_the_loss_and_gradient_of_the_twin(
    rows: list[TrainingRow], way: str, mixture: str, new_learner: NewLearner
) -> None:
    if way == "packed" and "gpt_oss" in mixture:
        pytest.skip("GPT-OSS keeps its own attention, which cannot pack")
    learner = new_learner(model=mixture, replays_routing=True, **SETTINGS[way])
    shared = rows is SHARED
    rows = other_experts(mixture, rows)
    if shared:  # one engine's prefill: the same for all of them
        context = experts_of(rows[0])[: len(CONTEXT_T)]
        rows = [
            replace(row, experts_TLK=np.concatenate([context, experts_of(row)[len(context) :]]))
            for row in rows
        ]
    elif way == "padded":
        assert len(learner.dealing.split(rows, 1)) > 1
    made = passed(learner, rows)
    loss, expected = twin(mixture, rows)
    assert made["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert_same(gradients(learner), expected, 1e-4)
    routers = [name for name in expected if name.endswith(("gate.weight", "router.weight"))]
    assert routers and all(expected[name].abs().max() > 0 for name in routers)


def test_the_mismatch_counts_routings(new_learner: NewLearner, tmp_path: Path) -> None:
    path = family_dir(tmp_path, "qwen3_moe")
    learner = new_learner(model=path, replays_routing=True)
    rows, known = own_experts(path, ROWS), 0
    unknown = unknown_expert(experts_of(rows[0]).dtype)
    for row in rows:
        experts_of(row)[1] = unknown
        known += (len(row) - 1) * 2
    # In the last layer, which has no other effect: 3 other experts, one other order.
    for t in (3, 4, 5):
        chosen = experts_of(rows[2])[t, 1]
        chosen[0] = next(e for e in range(8) if e not in chosen)
    experts_of(rows[1])[2, 1] = experts_of(rows[1])[2, 1][::-1].copy()
    assert passed(learner, rows)["train/routing_mismatch"] == pytest.approx(3 / known)


def test_rows_without_experts_are_routed_by_the_learner(
    mixture: str, new_learner: NewLearner
) -> None:
    learner = new_learner(model=mixture, replays_routing=True)
    expected = new_learner(model=mixture).logprobs(ROWS)
    mixed = [*other_experts(mixture, ROWS[:2]), *ROWS[2:]]
    made = learner.logprobs(mixed)
    for mine_N, other_N in zip(made[2:], expected[2:], strict=True):
        np.testing.assert_allclose(mine_N, other_N, atol=1e-5)
    assert np.abs(made[0] - expected[0]).max() > 1e-3
    for mine_N, other_N in zip(learner.logprobs(ROWS), expected, strict=True):
        assert np.array_equal(mine_N, other_N)
    assert "train/routing_mismatch" not in passed(learner, ROWS)


def test_an_adapter_learns_through_the_given_experts(
    new_learner: NewLearner, tmp_path: Path
) -> None:
    """A fresh adapter changes nothing; its base routes by itself, as a reference."""
    path = family_dir(tmp_path, "qwen3_moe")
    learner = new_learner(model=path, replays_routing=True, lora_rank=2)
    rows = other_experts(path, ROWS)
    made = passed(learner, rows)
    loss, _ = twin(path, rows)
    assert made["train/loss"] == pytest.approx(loss, rel=1e-5)
    bare = [replace(row, experts_TLK=None) for row in rows]
    for mine_N, other_N in zip(
        learner.base_logprobs(bare), new_learner(model=path).logprobs(ROWS), strict=True
    ):
        np.testing.assert_allclose(mine_N, other_N, atol=1e-5)


def test_experts_of_another_model_are_refused(mixture: str, new_learner: NewLearner) -> None:
    learner = new_learner(model=mixture, replays_routing=True)
    odd = replace(ROWS[0], experts_TLK=np.zeros((len(ROWS[0]), 1, 1), np.uint8))
    with pytest.raises(DataError):
        learner.logprobs([odd])


def test_dense_models_and_unknown_routers_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with refuses(ConfigError, "learner.routing_replay"):
        routers_of(meta_causal_lm(family_dir(tmp_path, "llama")))
    monkeypatch.delitem(WEIGH, "MixtralTopKRouter")
    with refuses(ConfigError, "learner.routing_replay"):
        routers_of(meta_causal_lm(family_dir(tmp_path, "mixtral")))


def test_experts_of_later_turns_are_appended() -> None:
    def experts(*values: int) -> np.ndarray:
        return np.array(values, np.uint8).reshape(-1, 1, 1)

    assert merged_experts(4, []) is None
    made = merged_experts(7, [(0, experts(1, 2, 3)), (4, experts(4, 5))])
    assert made is not None and made.ravel().tolist() == [1, 2, 3, 255, 4, 5, 255]
    assert MixtureShape(layers=1, experts=255, top_k=1).dtype == np.uint8
    assert MixtureShape(layers=1, experts=256, top_k=1).dtype == np.uint16


def test_replay_closes_the_gap_to_an_engine_in_half_precision(
    new_learner: NewLearner, tmp_path: Path
) -> None:
    """A bfloat16 engine, and routers with almost equal scores at every token."""
    path = family_dir(tmp_path, "qwen3_moe")
    undecided(path)
    rows = asyncio.run(_sampled_in_bfloat16(path))
    part = Part(rows_D=rows, loss=PolicyObjectiveLoss(objective=ObjectiveConfig(kl_coef=1.0)))
    plain, replaying = (
        new_learner(model=path, replays_routing=replay, lr=1e-9) for replay in (False, True)
    )
    without, made = plain.step(part), replaying.step(part)
    assert made["train/routing_mismatch"] > 0.05
    assert made["train/logprob_gap"] < 0.5 * without["train/logprob_gap"]
    assert made["train/logprob_gap_unreplayed"] == pytest.approx(without["train/logprob_gap"])
    assert not {"train/routing_mismatch", "train/logprob_gap_unreplayed"} & without.keys()
    assert "train/logprob_gap_unreplayed" not in replaying.step(part), "every tenth update only"


async def _sampled_in_bfloat16(path: str) -> list[TrainingRow]:
    engine = EmbeddedEngine(
        model_path=path, dtype="bfloat16", device="cpu", threads=1, routed_experts=True,
        stops=StopTokens(ids=()),
    )  # fmt: skip
    request = GenerateRequest(
        prompt_tokens_T=CONTEXT_T[:20], sampling=TrainSampling(temperature=1.0, max_new_tokens=40),
        num_samples=8, seed=3, experts=True,
    )  # fmt: skip
    rows = []
    for sample in await engine.generate(request):
        segments = SegmentBuilder(1.0)
        segments.append(request.prompt_tokens_T, sample)
        [segment] = segments.build()
        mask_T = segment.action_mask_T
        rows.append(
            TrainingRow(
                tokens_T=segment.tokens_T, loss_mask_T=mask_T,
                advantages_T=mask_T.astype(np.float32),
                behaviour_logprobs_T=segment.behaviour_logprobs_T, temperature=1.0,
                source="a sample", experts_TLK=segment.experts_TLK,
            )
        )  # fmt: skip
    return rows
