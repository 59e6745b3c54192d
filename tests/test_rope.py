"""Scores do not depend on the other rows of a batch, at every length that a model accepts.

Some rotary embeddings choose their frequencies by the longest row of a batch.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
)

from actors.embedded.engine import EmbeddedEngine
from distill.engine import GenerateRequest, ScoreRequest
from distill.errors import DataError
from distill.models.loading import context_length, load_causal_lm
from distill.objective.batching import collate
from distill.sampling import TrainSampling
from learner.forward import Forward
from tests.samples import training_row
from tests.tiny import VOCAB_SIZE

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
    "long_factor": [1.0 + 3 * i for i in range(8)], "original_max_position_embeddings": 48,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
CONFIGS: dict[str, tuple[PreTrainedConfig, int]] = {
    "longrope": (
        Phi3Config(**SIZES, rope_parameters=LONG, original_max_position_embeddings=48),
        48,
    ),
    "dynamic": (LlamaConfig(**SIZES, rope_parameters=DYNAMIC), 64),
    "yarn": (LlamaConfig(**SIZES, rope_parameters=YARN), 64),
    "longrope in some layers": (
        Gemma3TextConfig(
            **SIZES, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"sliding_attention": PLAIN, "full_attention": LONG},
        ),
        48,
    ),
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param][0])
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(6)  # else positions hardly matter
    model.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_context_ends_where_the_longest_row_would_choose_the_frequencies(name: str) -> None:
    config, length = CONFIGS[name]
    assert context_length(config) == length


def test_micro_batches(checkpoint: str) -> None:
    model = load_causal_lm(checkpoint, dtype=torch.float32, device="cpu")
    longest = context_length(model.config)
    forward = Forward(model)
    short, long = training_row(10, 30, seed=1), training_row(10, longest - 10, seed=2)
    with torch.no_grad():
        alone_N = forward(collate([short])).logprobs_N
        together_N = forward(collate([short, long])).logprobs_N[: len(alone_N)]
    torch.testing.assert_close(together_N, alone_N, atol=1e-5, rtol=0)


@pytest.mark.parametrize("checkpoint", ["longrope", "dynamic"], indirect=True)
def test_no_longer_row_gets_into_a_micro_batch(checkpoint: str) -> None:
    model = load_causal_lm(checkpoint, dtype=torch.float32, device="cpu")
    row = training_row(10, context_length(model.config) - 9, seed=2)
    with pytest.raises(AssertionError):
        Forward(model)(collate([row]))


async def test_engine_batches(checkpoint: str) -> None:
    """Prefill, decoding and scoring."""
    engine = EmbeddedEngine(model_path=checkpoint, device="cpu", threads=1)
    longest = (await engine.info()).context_length
    short, long = request(40, longest), request(longest - 12, longest)
    [alone] = await engine.generate(short)
    [together], [_] = await asyncio.gather(engine.generate(short), engine.generate(long))
    assert together.tokens_T.tolist() == alone.tokens_T.tolist()
    np.testing.assert_allclose(together.logprobs_T, alone.logprobs_T, atol=1e-5)
    chains = [chain(40), chain(longest)]
    [alone_score] = await engine.score(chains[:1])
    together_score = (await engine.score(chains))[0]
    np.testing.assert_allclose(
        together_score.logprobs_by_temperature, alone_score.logprobs_by_temperature, atol=1e-5
    )
    with pytest.raises(DataError):
        await engine.score([chain(longest + 1)])


def request(prompt: int, longest: int) -> GenerateRequest:
    return GenerateRequest(
        prompt_tokens_T=chain(prompt).tokens_T,
        sampling=TrainSampling(temperature=0.8, max_new_tokens=min(12, longest - prompt)),
        num_samples=1,
        seed=prompt,
    )


def chain(length: int) -> ScoreRequest:
    tokens_T = np.random.default_rng(length).integers(3, VOCAB_SIZE, size=length).astype(np.int32)
    return ScoreRequest(tokens_T=tokens_T, start=5, temperatures=(0.8,))
