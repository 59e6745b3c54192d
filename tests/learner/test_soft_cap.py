"""A soft cap on attention scores is applied by every part that runs the model."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, PretrainedConfig, VaultGemmaConfig

from actors.embedded.engine import EmbeddedEngine
from distill.engine import GenerateRequest, ScoreRequest
from distill.models.attention_probe import shares_prefixes
from distill.models.loading import load_causal_lm, meta_causal_lm
from distill.models.shared_prefix import PlainModel
from distill.sampling import TrainSampling
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from tests.learner.conftest import NewLearner, assert_same, gradients, gradients_of, naive_logprobs
from tests.samples import demonstration
from tests.tiny import save_tokenizer

SIZES = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
CAPPED: dict[str, Callable[..., PretrainedConfig]] = {
    "gemma2": Gemma2Config, "vaultgemma": VaultGemmaConfig,
}  # fmt: skip
ROWS = [demonstration(3 + 5 * i, 4 + 3 * i, seed=i) for i in range(3)]
TEMPERATURE = 0.8


@pytest.fixture(params=CAPPED)
def capped(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Checkpoint whose attention scores are far above its cap."""
    torch.manual_seed(0)
    config = CAPPED[request.param](**SIZES, attn_logit_softcapping=5.0, query_pre_attn_scalar=16)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(6 if "q_proj" in name or "k_proj" in name else 2)
    model.model.norm.weight.data.fill_(20.0)  # Gemma's norms scale by 1 + weight
    model.save_pretrained(tmp_path / request.param)
    save_tokenizer(str(tmp_path / request.param))
    return str(tmp_path / request.param)


def by_transformers(path: str, **changed: object):
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **changed
    ).eval()


def test_the_learner_trains_the_capped_model(capped: str, new_learner: NewLearner) -> None:
    right, without = by_transformers(capped), by_transformers(capped, attn_logit_softcapping=None)
    losses = [-naive_logprobs(right, row).sum() for row in ROWS]
    gap = max(
        float((naive_logprobs(right, row) - naive_logprobs(without, row)).abs().max().detach())
        for row in ROWS
    )
    assert gap > 0.01, "the cap does not matter to these weights"
    loss = sum(losses, torch.zeros(())) / sum(row.num_trained for row in ROWS)
    loss.backward()
    for packing in (False, True):
        learner = new_learner(model=capped, packing=packing)
        made = learner.forward_backward(Part(rows_D=ROWS, loss=cross_entropy_loss))
        assert made["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert_same(gradients(learner), gradients_of(right), share=1e-4)


async def test_engine_and_fallback_apply_the_cap(capped: str) -> None:
    right = by_transformers(capped)
    loaded = load_causal_lm(capped, dtype=torch.float32, device="cpu").eval()
    row_T = ROWS[2].tokens_T
    with torch.no_grad():
        expected_TH = right.base_model(torch.from_numpy(row_T)[None].long()).last_hidden_state[0]
        torch.testing.assert_close(PlainModel(loaded).hidden([row_T])[0], expected_TH)
    assert shares_prefixes(loaded)
    assert meta_causal_lm(capped).config._attn_implementation == "eager"
    engine = EmbeddedEngine(model_path=capped, device="cpu", threads=1)
    sampling = TrainSampling(temperature=TEMPERATURE, max_new_tokens=12)
    request = GenerateRequest(prompt_tokens_T=row_T[:9], sampling=sampling, num_samples=2, seed=1)
    for sample in await engine.generate(request):
        chain_T = np.concatenate([row_T[:9], sample.tokens_T])
        ask = ScoreRequest(tokens_T=chain_T, start=9, temperatures=(TEMPERATURE,))
        [score] = await engine.score([ask])
        ids_1T = torch.from_numpy(chain_T)[None].long()
        with torch.no_grad():
            log_p_TV = (right(ids_1T).logits[0] / TEMPERATURE).log_softmax(-1)
        expected_N = log_p_TV[:-1].gather(1, ids_1T[0, 1:, None])[8:, 0]
        np.testing.assert_allclose(sample.logprobs_T, expected_N, atol=1e-4)
        np.testing.assert_allclose(score.logprobs_by_temperature[0], expected_N, atol=1e-4)
