"""The bench's own pair: a 1.3 M student, a 5.8 M teacher, random weights, random words.

Speed does not depend on what the weights know. Random models hardly ever sample EOS, so every
response has the full length, here and in the peer: equal work.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.models.loading import new_qwen3

VOCAB_SIZE = 4096
PROMPT_WORDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    student: str
    teacher: str
    prompts: str


def make_pair(directory: Path, num_prompts: int = 512) -> Pair:
    """Writes both checkpoints, with one tokenizer, and a prompts file; returns their paths."""
    rng = np.random.default_rng(0)
    words = _words(rng)
    texts = [" ".join(rng.choice(words, size=PROMPT_WORDS)) for _ in range(num_prompts)]
    tokenizer = _tokenizer(words)
    for name, hidden, layers, seed in (("student", 128, 4, 1), ("teacher", 256, 6, 2)):
        model = new_qwen3(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden,
            layers=layers,
            heads=hidden // 64,
            context_length=512,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            seed=seed,
        )
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return Pair(
        student=str(directory / "student"), teacher=str(directory / "teacher"), prompts=str(prompts)
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """The pair's tokenizer."""
    return _tokenizer(_words(np.random.default_rng(0)))


def _words(rng: np.random.Generator) -> list[str]:
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return ["".join(rng.choice(letters, size=rng.integers(2, 9))) for _ in range(6000)]


def _tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
