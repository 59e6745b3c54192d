"""Families of models on real SGLang servers: `final/` is served and scored, then pushes."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from actors.sglang.config import SglangConfig
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from distill.engine import CheckpointDirectory, ScoreRequest
from distill.models.loading import load_config
from distill.objective.batching import TrainingRow
from distill.routing import ExpertArray, MixtureShape
from distill.tokenizer import load_tokenizer
from distill.types import FloatArray
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from tests.actors.routing import ask, check_experts, prompt
from tests.families import FAMILIES, family_dir
from tests.samples import training_row
from tests.waiting import DEADLINE_S
from tests.weights import gather_all, shared

T = 0.7
ROWS = [training_row(3 + i, 9 + 4 * i, seed=i, temperature=T) for i in range(4)]
# Families that SGLang 0.5.23 does not run on a CPU without its compiled kernels, with the reason.
LACKS = {
    "gemma2": "it reads hidden_act, which transformers 5.19 calls hidden_activation alone",
    "gemma3_multimodal": "its loader does not know the vision tower's names of transformers 5.19",
    "deepseek_v3": "on a CPU it takes no rotary embedding without scaling",
    "gpt_oss": "it takes attention backends with compiled kernels alone",
}


async def scored(engine: HostedSglangEngine, rows: Sequence[TrainingRow]) -> list[FloatArray]:
    requests = [
        ScoreRequest(tokens_T=row.tokens_T, start=row.first_trained, temperatures=(T,))
        for row in rows
    ]
    scores = await asyncio.wait_for(engine.score(requests), timeout=360)  # its start included
    return [score.logprobs_by_temperature[0] for score in scores]


def expect_close(ours: list[FloatArray], theirs: list[FloatArray]) -> None:
    for mine_N, other_N in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine_N, other_N, atol=1e-3)


async def expect_experts(engine: HostedSglangEngine, path: str) -> None:
    """Assert that the server returns the experts of the model's own forward pass.

    For several samples of a prompt, and for a second turn whose first is cached.
    """
    first = ask(prompt(17), samples=3)
    samples = await asyncio.wait_for(engine.generate(first), timeout=DEADLINE_S)
    check_experts(path, first, samples)
    seen_T = np.concatenate([first.prompt_tokens_T, samples[0].tokens_T])
    second = ask(np.concatenate([seen_T, prompt(5)]), known=len(seen_T) - 1)
    [sample] = await asyncio.wait_for(engine.generate(second), timeout=DEADLINE_S)
    assert sample.cached_tokens and sample.experts_NLK is not None
    assert len(sample.experts_NLK) == 6 + len(sample.tokens_T) - 1
    check_experts(path, second, [sample])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_trained_pushed_scored_and_loaded(name: str, tmp_path: Path) -> None:
    if not sglang_installed():
        pytest.skip("SGLang is not installed")
    if name in LACKS:
        pytest.skip(f"SGLang on a CPU does not run {name}: {LACKS[name]}")
    asyncio.run(train_push_and_score(family_dir(tmp_path, name), tmp_path))


@pytest.mark.slow
def test_two_ranks_name_the_experts_of_one(tmp_path: Path) -> None:
    """A server of one rank and one of two each return their own samples' experts.

    The experts of the same tokens, as a prompt, are equal at both.
    """
    if not sglang_installed():
        pytest.skip("SGLang is not installed")
    path = family_dir(tmp_path, "qwen3_moe")

    async def experts(ranks: int) -> ExpertArray:
        config = SglangConfig(
            model=path, device="cpu", start_deadline_s=DEADLINE_S, request_deadline_s=60,
            routed_experts=True, server_flags=f"--tp-size {ranks}",
        )  # fmt: skip
        engine = HostedSglangEngine(config)
        try:
            await asyncio.wait_for(engine.info(), timeout=360)
            await expect_experts(engine, path)
            [sample] = await engine.generate(ask(prompt(60), new=1))
            assert sample.experts_NLK is not None
            return sample.experts_NLK
        finally:
            await engine.close()

    one_NLK, two_NLK = (asyncio.run(experts(ranks)) for ranks in (1, 2))
    np.testing.assert_array_equal(np.sort(one_NLK), np.sort(two_NLK))


async def train_push_and_score(path: str, tmp_path: Path) -> None:
    config = LearnerConfig.of(
        model=path, total_steps=4, token_budget=4096, device="cpu", max_grad_norm=1e9, lr=1e-2
    )
    learner = Learner(config, str(tmp_path / "failed"))
    before = learner.logprobs(ROWS)
    learner.step(Part(rows_D=ROWS, loss=cross_entropy_loss))
    after = learner.logprobs(ROWS)
    assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True)) > 0.05
    final = str(tmp_path / "final")
    learner.export(Path(final), load_tokenizer(path))
    routes = MixtureShape.of(load_config(path)) is not None
    config = SglangConfig(
        model=final, device="cpu", start_deadline_s=DEADLINE_S, request_deadline_s=60,
        routed_experts=routes,
    )  # fmt: skip
    engine = HostedSglangEngine(config)
    try:
        expect_close(await scored(engine, ROWS), after)
        await engine.load_weights(CheckpointDirectory(path=path), version=1)
        expect_close(await scored(engine, ROWS), before)
        bundle = shared(gather_all(learner.weights()))
        await engine.load_weights(bundle, version=2)
        expect_close(await scored(engine, ROWS), after)
        if routes:
            await expect_experts(engine, final)
    finally:
        await engine.close()
