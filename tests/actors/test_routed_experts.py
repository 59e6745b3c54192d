"""Engines return the experts of a mixture that each token went through."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from actors.embedded.engine import EmbeddedEngine
from distill.engine import GenerateRequest
from distill.errors import ConfigError, DataError
from distill.sampling import TrainSampling
from distill.stops import StopTokens
from tests.actors.routing import ask, check_experts, chosen_by, prompt
from tests.families import family_dir
from tests.refusals import refuses
from tests.tiny import tiny_model_dir
from tests.weights import shared


def start(path: str, **settings: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model_path=path, device="cpu", threads=1, routed_experts=True, **settings)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])  # the last has no cache
async def test_experts_are_those_of_the_models_own_forward(name: str, tmp_path: Path) -> None:
    """Rows of several lengths that join and leave, shared prompts, a second turn."""
    path = family_dir(tmp_path, name)
    engine = start(path, max_running_requests=4, score_token_budget=60)
    requests = [ask(prompt(n), samples=g, seed=n) for n, g in ((3, 2), (17, 3), (40, 1))]
    plain = GenerateRequest(
        prompt_tokens_T=prompt(17), sampling=TrainSampling(temperature=1.0, max_new_tokens=3),
        num_samples=1, seed=1,
    )  # fmt: skip
    *answers, without = await asyncio.gather(
        *(engine.generate(request) for request in [*requests, plain])
    )
    assert without[0].experts_NLK is None
    for request, samples in zip(requests, answers, strict=True):
        assert len(samples) == request.num_samples
        check_experts(path, request, samples)
    seen_T = np.concatenate([requests[0].prompt_tokens_T, answers[0][0].tokens_T])
    turn = ask(np.concatenate([seen_T, prompt(5)]), known=len(seen_T) - 1)
    [sample] = await engine.generate(turn)
    assert sample.experts_NLK is not None
    assert len(sample.experts_NLK) == 6 + len(sample.tokens_T) - 1
    check_experts(path, turn, [sample])


async def test_a_token_keeps_the_experts_by_which_the_next_was_sampled(tmp_path: Path) -> None:
    """New weights arrive midway: recorded experts stay, later ones are the new weights'."""
    first, second = (family_dir(tmp_path, "qwen3_moe", seed=seed) for seed in (1, 2))
    engine = start(first, stops=StopTokens(ids=()))
    bundle = shared(load_file(Path(second) / "model.safetensors"))
    running = asyncio.ensure_future(engine.generate(ask(prompt(5), new=60)))
    while not await engine.health():
        await asyncio.sleep(0)
    await engine.load_weights(bundle, version=1)
    [sample] = await running
    switch = int((sample.versions_T == 0).sum())
    assert 0 < switch < len(sample.tokens_T), "the push came too early or too late to tell"
    chain_T = np.concatenate([prompt(5), sample.tokens_T])
    old = chosen_by(first, chain_T)[:-1]
    assert sample.experts_NLK is not None and len(sample.experts_NLK) == len(old)
    # Tokens before the last that the old weights sampled have been through the old ones.
    before = 5 + switch - 1
    np.testing.assert_array_equal(np.sort(sample.experts_NLK[:before]), np.sort(old[:before]))
    new = chosen_by(second, chain_T)[:-1]
    np.testing.assert_array_equal(
        np.sort(sample.experts_NLK[before + 1 :]), np.sort(new[before + 1 :])
    )


def test_dense_models_and_requests_without_recording_are_refused(tmp_path: Path) -> None:
    dense = tiny_model_dir(tmp_path, seed=1)
    with refuses(ConfigError, "learner.routing_replay"):
        start(dense)
    engine = EmbeddedEngine(model_path=dense, device="cpu", threads=1)
    with refuses(DataError, "GenerateRequest.experts"):
        asyncio.run(engine.generate(ask(prompt(3))))
