"""Everything that can be wrong with the input, found before an actor starts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.config import choose_engine
from actors.sglang_external import ExternalSglangEngine, is_url
from cluster.config import OpdConfig, SftConfig
from distill.batching import TrainingRow
from distill.errors import CheckpointError, ConfigError
from distill.interfaces import EngineInfo
from distill.models import context_length, load_config, vocab_size
from distill.prompts import Prompt, load_prompts
from distill.rows import load_sft_rows
from distill.tokenizer import check_same_tokenizer, load_tokenizer, probe

# An external teacher says who it is in far less; one that does not answer is not there.
_INTRODUCTION_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpdInputs:
    """A checked OPD run: what its actors are built from."""

    tokenizer: PreTrainedTokenizerBase
    train_prompts_P: list[Prompt]
    eval_prompts_P: list[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class SftInputs:
    """A checked SFT run."""

    tokenizer: PreTrainedTokenizerBase
    rows_D: list[TrainingRow]


def check_opd(config: OpdConfig) -> OpdInputs:
    """Reads both checkpoints' headers, both tokenizers and every prompt.

    Raises:
        ConfigError, CheckpointError, DataError: with the field or file, the value and the remedy.
    """
    choose_engine(config.engine)
    student = _check_model(config.student)
    tokenizer = load_tokenizer(config.student)
    teacher = _check_teacher(config.teacher, tokenizer)
    for role, size in (("student", vocab_size(student)), ("teacher", teacher.vocab_size)):
        if size < len(tokenizer):
            raise ConfigError(
                f"{role}={getattr(config, role)} has a vocabulary of {size}, smaller than the "
                f"tokenizer's {len(tokenizer)}; model and tokenizer do not belong together"
            )
    if teacher.vocab_size < vocab_size(student):
        raise ConfigError(
            f"teacher={config.teacher} has a vocabulary of {teacher.vocab_size}, smaller than the "
            f"student's {vocab_size(student)}: a token that the student may sample could not be "
            "scored. Resize the teacher's embeddings, or choose another pair"
        )
    shared_context = min(context_length(student), teacher.context_length)

    def load(path: str, max_new_tokens: int) -> list[Prompt]:
        return load_prompts(
            path,
            tokenizer,
            vocab_size=vocab_size(student),
            context_length=shared_context,
            max_new_tokens=max_new_tokens,
        )

    longest = max(config.max_new_tokens, config.longest_evaluation())
    if config.eval_prompts is not None:
        train_P = load(config.prompts, config.max_new_tokens)
        eval_P = load(config.eval_prompts, longest)[: config.eval_size]
    else:
        train_P, eval_P = _hold_out(load(config.prompts, longest), config)
    if config.reward_coef > 0 and not all(prompt.answer is not None for prompt in train_P):
        line = next(prompt.line for prompt in train_P if prompt.answer is None)
        raise ConfigError(
            f"reward_coef={config.reward_coef} needs an `answer` with every prompt; "
            f"{config.prompts}:{line} has none"
        )
    return OpdInputs(tokenizer=tokenizer, train_prompts_P=train_P, eval_prompts_P=eval_P)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Teacher:
    vocab_size: int
    context_length: int


def _check_teacher(teacher: str, tokenizer: PreTrainedTokenizerBase) -> _Teacher:
    """Looks at a checkpoint, or asks a running server; either must share the tokenizer."""
    if is_url(teacher):
        info = asyncio.run(_ask(teacher))
        if info.tokenizer is not None and info.tokenizer.texts != probe(tokenizer).texts:
            raise ConfigError(
                f"student and teacher={teacher} do not share a tokenizer: the server encodes known "
                "texts differently. It scores the student's token ids as they are"
            )
        return _Teacher(vocab_size=info.vocab_size, context_length=info.context_length)
    model = _check_model(teacher)
    check_same_tokenizer(tokenizer, load_tokenizer(teacher))
    return _Teacher(vocab_size=vocab_size(model), context_length=context_length(model))


async def _ask(url: str) -> EngineInfo:
    engine = ExternalSglangEngine(url=url, request_deadline_s=_INTRODUCTION_DEADLINE_S)
    try:
        return await engine.info()
    finally:
        await engine.close()


def check_sft(config: SftConfig) -> SftInputs:
    """Reads the checkpoint's headers, the tokenizer, and every row.

    Raises:
        ConfigError, CheckpointError, DataError: with the field or file, the value and the remedy.
    """
    model = _check_model(config.model)
    tokenizer = load_tokenizer(config.model)
    limit = context_length(model)
    if config.max_length is not None:
        if not 2 <= config.max_length <= limit:
            raise ConfigError(
                f"max_length={config.max_length} must be between 2 and the model's context, {limit}"
            )
        limit = config.max_length
    rows_D = load_sft_rows(config.data, tokenizer, vocab_size=vocab_size(model), max_length=limit)
    return SftInputs(tokenizer=tokenizer, rows_D=rows_D)


def _hold_out(prompts_P: list[Prompt], config: OpdConfig) -> tuple[list[Prompt], list[Prompt]]:
    """(train, eval): a seeded choice of at most eval_size prompts and a tenth of them all."""
    size = min(config.eval_size, len(prompts_P) // 10)
    order = np.random.default_rng(config.seed).permutation(len(prompts_P)).tolist()
    held_out = set(order[:size])
    train_P = [prompt for p, prompt in enumerate(prompts_P) if p not in held_out]
    return train_P, [prompts_P[p] for p in sorted(held_out)]


def _shards(directory: Path) -> list[str]:
    """Files that a sharded checkpoint's index names; none where there is no index."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is unreadable: {error}") from error


def _check_model(path: str) -> Any:
    """The model's config, after a look at the header of every weights file of a local directory."""
    config = load_config(path)
    directory = Path(path)
    if directory.is_dir():
        files = sorted(directory.glob("*.safetensors"))
        for shard in _shards(directory):
            if not (directory / shard).is_file():
                raise CheckpointError(f"{path} lacks {shard}, which its index names; copy it again")
        if not files and not list(directory.glob("pytorch_model*.bin")):
            raise CheckpointError(f"{path} holds no weights (no *.safetensors file)")
        for file in files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    tensors.keys()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is corrupt or cut short: {error}") from error
    return config
