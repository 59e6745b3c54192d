"""Random tiny twins of a model's family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, Qwen3Config

from distill.errors import CheckpointError
from distill.models import twins
from distill.models.loading import load_causal_lm, load_config, stop_token_ids, vocab_size
from distill.models.twins import save_twin, shrunken
from distill.tokenizer import load_tokenizer
from tests.families import FAMILIES, family_dir
from tests.tiny import TinyPair, save_tokenizer

# Published sizes of some that are large.
LARGE: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}


@torch.no_grad()
def gap_between_temperatures(model: Any, temperature: float = 0.7) -> float:
    """Mean |log p_T - log p_1.5T| of tokens that the model samples at T."""
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.arange(3, 9)[None]
    gaps: list[float] = []
    for _ in range(12):
        logits_V = model(ids_1T).logits[0, -1]
        by_T, by_other = (
            (logits_V / each).log_softmax(-1) for each in (temperature, 1.5 * temperature)
        )
        token = int(torch.multinomial(by_T.exp(), 1, generator=generator))
        gaps.append(abs(float(by_T[token] - by_other[token])))
        ids_1T = torch.cat([ids_1T, torch.tensor([[token]])], dim=1)
    return sum(gaps) / len(gaps)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_twin_is_of_the_family_and_small(name: str, tmp_path: Path) -> None:
    source = family_dir(tmp_path, name)
    twin = save_twin(source, tmp_path / "twin", seed=3)
    made, config = load_config(twin.path), load_config(source)
    assert type(made) is type(config) and vocab_size(made) == vocab_size(config)
    assert stop_token_ids(twin.path) == stop_token_ids(source)
    assert load_tokenizer(twin.path).get_vocab() == load_tokenizer(source).get_vocab()
    model = load_causal_lm(twin.path, dtype=torch.float32, device="cpu")
    assert gap_between_temperatures(model) > 0.05, "any temperature would fit its log-probs"
    assert type(model).__name__ in twin.description


def test_sizes_shrink_and_kinds_of_layers_are_kept() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 12
    config = Qwen3Config(
        **LARGE, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        layer_types=kinds, sliding_window=4096, use_sliding_window=True,
    )  # fmt: skip
    small = shrunken(config)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert (small.num_hidden_layers, small.hidden_size, small.head_dim) == (2, 128, 64)
    assert (small.num_attention_heads, small.num_key_value_heads) == (2, 1)
    assert (small.vocab_size, small.sliding_window) == (151936, 4096)
    assert config.hidden_size == 4096, "the model's own config is left alone"
    published = AutoConfig.for_model("llama", **LARGE, num_attention_heads=32)
    assert shrunken(published).num_key_value_heads == 2, "as many as heads, as there"


def test_two_seeds_are_two_models(tiny_pair: TinyPair, tmp_path: Path) -> None:
    paths = [save_twin(tiny_pair.student, tmp_path / str(s), seed=s).path for s in (1, 2)]
    first, second = (load_causal_lm(p, dtype=torch.float32, device="cpu") for p in paths)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_a_reward_model_keeps_its_head(tiny_pair: TinyPair, tmp_path: Path) -> None:
    twin = save_twin(tiny_pair.student, tmp_path / "twin", seed=1, reward=True)
    assert "SequenceClassification" in twin.description


def test_a_family_that_does_not_shrink_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "LARGEST", 10_000)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=160, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    save_tokenizer(tmp_path / "gpt2")
    with pytest.raises(CheckpointError):
        save_twin(str(tmp_path / "gpt2"), tmp_path / "twin", seed=1)
    assert not (tmp_path / "twin").exists()
