"""Device and size of the checks, and the models that they run on."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from distill.models.loading import vocab_size
from distill.objective.batching import TrainingRow
from learner.config import Precision
from tests.tiny import EOS, PAD, VOCAB_SIZE, save_tokenizer, tiny_model_dir

Size = Literal["tiny", "full"]
Numbers = dict[str, float | str]
TEMPERATURE = 0.7
# Published shapes of Qwen3, and 8B's width at a third of its depth.
SHAPES: dict[str, dict[str, int]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "8B/3": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 12,
        "num_attention_heads": 32,
    },
    "1.1B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16},
}  # fmt: skip
# The same names at sizes that a CPU trains in a second.
_TINY: dict[str, dict[str, int]] = {
    "0.6B": {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1},
    "1.7B": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2},
    "8B/3": {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3},
    "1.1B": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2},
}
_LOGITS_STD = 2.0


class Skipped(Exception):
    """The check cannot run here; the message has the reason."""


class Failed(Exception):
    """The check ran, and found a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Device and size of the checks. `scratch`: directory that they may write to."""

    device: Literal["cpu", "cuda"]
    size: Size
    scratch: str

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> Precision:
        """Default compute precision of engines and learner."""
        return "bfloat16" if self.cuda else "float32"

    def choose(self, tiny: int, full: int) -> int:
        return tiny if self.size == "tiny" else full

    def config(self, shape: str, **changes: Any) -> Qwen3Config:
        """Config of one of `SHAPES`; at size=tiny of its small counterpart."""
        tiny = self.size == "tiny"
        own = (_TINY if tiny else SHAPES)[shape]
        settings: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE if tiny else 151936,
            "num_attention_heads": 2 if tiny else 16,
            "num_key_value_heads": 1 if tiny else 8,
            "head_dim": 32 if tiny else 128,
            "max_position_embeddings": 1024 if tiny else 40960,
            "tie_word_embeddings": shape != "8B/3",
            "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None, "dtype": "float32",
        }  # fmt: skip
        settings |= own | changes
        return Qwen3Config(**settings)

    def model(self, shape: str = "1.1B", seed: int = 3) -> str:
        """A random checkpoint of the shape, created once, with a tokenizer of characters.

        On a GPU it is created there and saved in bfloat16, as checkpoints are published. The last
        norm is scaled, so that logits differ enough to detect a wrong temperature in bfloat16.
        """
        path = Path(self.scratch) / f"{self.size}-{shape.replace('/', '-')}-{seed}"
        if not path.exists():
            model = self.random(self.config(shape), Qwen3ForCausalLM, seed)
            spread = 0.02 * model.config.hidden_size**0.5
            model.model.norm.weight.data.mul_(_LOGITS_STD / spread)
            partial = path.with_suffix(".partial")
            model.to(getattr(torch, self.dtype)).save_pretrained(partial)
            save_tokenizer(partial)
            partial.rename(path)
            del model
            if self.cuda:  # to whatever process the check starts
                torch.cuda.empty_cache()
        return str(path)

    def random(self, config: Any, kind: Any, seed: int = 0) -> Any:
        """A float32 model of a copy of the config, with random weights, on the device."""
        with torch.random.fork_rng(), torch.device(self.device):
            torch.manual_seed(seed)
            return kind(deepcopy(config)).float()  # its attention is switched

    def pair(self) -> tuple[str, str]:
        """Student and teacher with a tokenizer; peaked enough to detect a wrong T in bfloat16."""
        hidden, layers = self.choose(64, 512), self.choose(2, 6)
        made = [
            tiny_model_dir(
                Path(self.scratch), seed=seed, hidden_size=hidden, layers=layers,
                heads=hidden // 32, context_length=512,
            )
            for seed in (1, 2)
        ]  # fmt: skip
        for directory in made:
            save_tokenizer(directory)
        return made[0], made[1]


def rows_of(
    config: Any, *, count: int, length: int, seed: int, **changes: Any
) -> list[TrainingRow]:
    """Random rows; the second half of each is trained."""
    rng = np.random.default_rng(seed)
    trained_T = np.arange(length) >= length // 2
    return [
        TrainingRow(
            tokens_T=rng.integers(2, vocab_size(config), length).astype(np.int32),
            loss_mask_T=trained_T,
            advantages_T=np.where(trained_T, rng.normal(size=length), 0).astype(np.float32),
            behaviour_logprobs_T=np.full(length, -np.log(vocab_size(config)), np.float32),
            temperature=TEMPERATURE,
            source=f"random row {i}",
            **changes,
        )
        for i in range(count)
    ]


def require(condition: bool, why: str) -> None:
    """Raise Failed with the reason unless the condition holds."""
    if not condition:
        raise Failed(why)


def named(numbers: Mapping[str, float], suffix: str) -> Numbers:
    """The numbers under names that include their case."""
    return {f"{name}_{suffix}": value for name, value in numbers.items()}
