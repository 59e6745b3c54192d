"""Pairs of models for benchmarks: a 1.3 M student and a 5.8 M teacher.

`make_pair`: random weights and random words. Speed does not depend on the values of weights. Random
models hardly ever sample EOS, so every response has the full length, in isotherm and in TRL.
`make_taught_pair`: both are trained on text, the teacher far longer, so that there is something to
distil.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel

from cluster.demos.arithmetic import Problems, train_tokenizer
from distill.errors import ConfigError
from distill.models.loading import new_qwen3

VOCAB_SIZE = 4096
PROMPT_WORDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    student: str
    teacher: str
    prompts: str


def given_pair(student: str | None, teacher: str | None, prompts: str | None) -> Pair | None:
    """Pair of these settings; None if no path is given, and a pair must be made.

    Raises:
        ConfigError: only some of the paths are given.
    """
    if student and teacher and prompts:
        return Pair(student=student, teacher=teacher, prompts=prompts)
    if student or teacher or prompts:
        raise ConfigError("give student=, teacher= and prompts= together, or none of them")
    return None


def make_pair(directory: Path, num_prompts: int = 512) -> Pair:
    """Write both checkpoints with one tokenizer, and a prompts file; returns their paths."""
    rng = np.random.default_rng(0)
    words = _words(rng)
    texts = [" ".join(rng.choice(words, size=PROMPT_WORDS)) for _ in range(num_prompts)]
    tokenizer = _tokenizer([" ".join(words)])
    return _saved(directory, tokenizer, _new_models(tokenizer), texts)


def make_taught_pair(directory: Path, texts: Sequence[str], num_prompts: int = 512) -> Pair:
    """Write a pair trained on `texts`, and prompts.

    Prompts are beginnings of some texts on which neither model is trained.
    """
    tokenizer = _tokenizer(texts)
    order: list[int] = np.random.default_rng(0).permutation(len(texts)).tolist()
    asked = [" ".join(texts[i].split()[:PROMPT_WORDS]) for i in order[:num_prompts]]
    read = [texts[i] for i in order[num_prompts:]]
    taught = _new_models(tokenizer)
    for name, steps in (("student", STUDENT_STEPS), ("teacher", TEACHER_STEPS)):
        _read(taught[name], tokenizer, read, steps)
    return _saved(directory, tokenizer, taught, asked)


# Updates of `READ_ROWS` rows of `READ_WIDTH` tokens.
STUDENT_STEPS, TEACHER_STEPS = 30, 300
READ_ROWS, READ_WIDTH, READ_LR = 8, 96, 1e-3


def _read(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], steps: int
) -> None:
    """Train on next tokens of the concatenated texts."""
    ids = [
        token
        for text in texts
        for token in (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
    ]
    rows_RT = torch.tensor(ids[: len(ids) // READ_WIDTH * READ_WIDTH]).view(-1, READ_WIDTH)
    _train(model, rows_RT, steps, READ_ROWS)


def _train(model: PreTrainedModel, rows_RT: torch.Tensor, steps: int, batch_size: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=READ_LR)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        picked = torch.randint(len(rows_RT), (batch_size,), generator=generator)
        optimizer.zero_grad()
        model(input_ids=rows_RT[picked], labels=rows_RT[picked]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def docstrings(least_words: int = 40) -> list[str]:
    """English prose that exists on every machine: docstrings of Python's standard library."""
    return [
        text
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        for text in _docstrings_of(path)
        if len(text.split()) >= least_words
    ]


def _docstrings_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def _new_models(tokenizer: PreTrainedTokenizerFast) -> dict[str, PreTrainedModel]:
    return {
        name: new_qwen3(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden,
            layers=layers,
            heads=hidden // 64,
            context_length=512,
            **_special_ids(tokenizer),
            seed=seed,
        )
        for name, hidden, layers, seed in (("student", 128, 4, 1), ("teacher", 256, 6, 2))
    }


def _saved(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    pair: dict[str, PreTrainedModel],
    texts: Sequence[str],
) -> Pair:
    for name, model in pair.items():
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return Pair(
        student=str(directory / "student"), teacher=str(directory / "teacher"), prompts=str(prompts)
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of the pair."""
    return _tokenizer([" ".join(_words(np.random.default_rng(0)))])


def _words(rng: np.random.Generator) -> list[str]:
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return ["".join(rng.choice(letters, size=rng.integers(2, 9))) for _ in range(6000)]


def _special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def _tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


# Updates after which answers have three digits and an end, and few are right.
SUMS_STEPS, SUMS_ROWS = 60, 128


def make_sums_pair(directory: Path) -> Pair:
    """Two models of 0.1 M parameters for the shortest job: sums, with answers of 4 tokens.

    They have the shape and task of the demo's models but are trained here, so that changes of the
    demo do not affect comparisons. Their answers have the correct length; few are correct.
    """
    problems = Problems.split(held_out=500, seed=0)
    tokenizer = train_tokenizer(directory / "tokenizer", problems.train)
    rows_RT = torch.tensor([tokenizer.encode(p.prompt + p.answer) for p in problems.train])
    eos_R1 = torch.full((len(rows_RT), 1), _special_ids(tokenizer)["eos_token_id"])
    pair: dict[str, PreTrainedModel] = {
        name: new_qwen3(
            vocab_size=len(tokenizer),
            hidden_size=64,
            layers=2,
            heads=4,
            context_length=32,
            **_special_ids(tokenizer),
            seed=seed,
        )
        for name, seed in (("student", 1), ("teacher", 2))
    }
    for model in pair.values():
        _train(model, torch.cat([rows_RT, eos_R1], dim=1), SUMS_STEPS, SUMS_ROWS)
    return _saved(directory, tokenizer, pair, [p.prompt for p in problems.train])
