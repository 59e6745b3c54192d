"""Where the checks run, and the models that they run on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from distill.models.loading import new_qwen3, vocab_size
from distill.objective.batching import TrainingRow
from learner.config import Precision
from tests.tiny import EOS, PAD, save_tokenizer, tiny_model_dir

Size = Literal["tiny", "full"]
TEMPERATURE = 0.7


class Skipped(Exception):
    """A check that cannot run here, and why."""


class Failed(Exception):
    """A check that ran and found something wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Device and size of the checks; `scratch` is theirs to write to."""

    device: Literal["cpu", "cuda"]
    size: Size
    scratch: str

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> Precision:
        """What engines and learner compute in by default."""
        return "bfloat16" if self.cuda else "float32"

    def choose(self, tiny: int, full: int) -> int:
        return tiny if self.size == "tiny" else full

    def model(self) -> str:
        """A random checkpoint: 1.1 B parameters with the vocabulary of Qwen3, or 0.1 M."""
        if self.size == "tiny":
            return tiny_model_dir(Path(self.scratch), seed=3, context_length=1024)
        path = Path(self.scratch) / "qwen3-1b"
        if not path.exists():
            new_qwen3(
                vocab_size=151936, hidden_size=2048, layers=16, heads=32, context_length=16384,
                eos_token_id=EOS, pad_token_id=PAD, seed=3,
            ).save_pretrained(path)  # fmt: skip
        return str(path)

    def pair(self) -> tuple[str, str]:
        """Student and teacher with a tokenizer; sharp enough that a wrong T is seen in bfloat16."""
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
    """Random rows, of which the second half is trained."""
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
    if not condition:
        raise Failed(why)
