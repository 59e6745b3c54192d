"""Checks of a checkpoint's files, and of settings against them, without importing torch.

They reject only files and settings that are certainly invalid. The rest is checked again when
models and tokenizers are loaded.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from distill.errors import CheckpointError, ConfigError
from distill.lookup import known_names

# Files with the texts of tokens. Each token of the tokenizer is in one of them.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
# Patterns of vocabulary files. Every tokenizer has a file that matches one of them.
_VOCABULARIES = (
    "tokenizer.json",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "*.spm",
    "tekken.json",
    "vocab*",
)
# First bytes of a Git LFS pointer, which replaces a large file that was not fetched.
_POINTER = b"version https://git-lfs.github.com/spec/"
# First bytes of a file of torch.save before torch 1.6; later files are zip archives.
_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def check_readable(directory: Path) -> None:
    """Raise CheckpointError if config.json is not a JSON object."""
    file = directory / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; copy it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object; copy it again")


def check_weights(directory: Path) -> None:
    """Check that all weights files exist, and read their headers.

    Raises:
        CheckpointError: a file is missing or unreadable.
    """
    files = sorted(directory.glob("*.safetensors"))
    pickles = [] if files else sorted(directory.glob("pytorch_model*.bin"))
    for shard in _shards(directory, "pytorch_model.bin" if pickles else "model.safetensors"):
        if not (directory / shard).is_file():
            raise CheckpointError(
                f"{directory} lacks {shard}, which its index names; copy it again"
            )
    if not files and not pickles:
        raise CheckpointError(f"{directory} has no weights (no *.safetensors file)")
    for file in pickles:
        _refuse_pointer(file)
        if not (zipfile.is_zipfile(file) or _begins(file, _TORCH)):
            raise CheckpointError(f"{file} is corrupt or truncated: it is not a file of torch.save")
    for file in files:
        _refuse_pointer(file)
        try:
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is corrupt or truncated: {error}") from error


def check_vocabulary_files(directory: Path) -> None:
    """Raise CheckpointError if the checkpoint has no tokenizer."""
    files = [file for pattern in _VOCABULARIES for file in directory.glob(pattern)]
    if not files:
        raise CheckpointError(
            f"{directory} has no tokenizer (no tokenizer.json, *.model or vocab file); copy the "
            "tokenizer files of its base model into it"
        )
    for file in files:
        _refuse_pointer(file)


def _refuse_pointer(file: Path) -> None:
    if _begins(file, _POINTER):
        raise CheckpointError(
            f"{file} is a pointer of Git LFS, not the file itself; run `git lfs pull` in "
            f"{file.parent}"
        )


def _begins(file: Path, start: bytes) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(start)) == start


def _shards(directory: Path, whole: str) -> list[str]:
    """Names of the files into which the file `whole` is split, from its index; empty without one.

    Raises:
        CheckpointError: the index is unreadable.
    """
    index = directory / f"{whole}.index.json"
    if not index.is_file():
        return []
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is unreadable: {error}") from error


def check_length(directory: Path, max_new_tokens: int) -> None:
    """Raise ConfigError if responses may be longer than the model's context."""
    context = _text_config(directory).get("max_position_embeddings")
    if isinstance(context, int) and max_new_tokens >= context:
        raise ConfigError(
            f"sampling.max_new_tokens={max_new_tokens} leaves no room for a prompt: the context of "
            f"{directory} is {context} tokens; lower max_new_tokens",
            value=max_new_tokens,
        )


def check_stop_tokens(directory: Path, stop_tokens: str) -> None:
    """Raise ConfigError for a stop token that is not in the tokenizer's files."""
    if not (directory / "tokenizer.json").is_file():
        return
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    size = _text_config(directory).get("vocab_size")
    for given in filter(None, map(str.strip, stop_tokens.split(","))):
        forms = {json.dumps(given), json.dumps(given, ensure_ascii=False)}
        if given.isdecimal():
            if not isinstance(size, int) or int(given) < size:
                continue
        elif any(form in text for form in forms):
            continue
        raise ConfigError(
            f"model.stop_tokens={stop_tokens}: {given!r} is neither a token of {directory} nor an "
            f"id; {known_names(given, sorted(_special_tokens(directory)))}",
            value=stop_tokens,
        )


def _text_config(directory: Path) -> dict[str, Any]:
    config = _json(directory / "config.json")
    return {**config, **config.get("text_config", {})}


def _special_tokens(directory: Path) -> Iterator[str]:
    for token in _json(directory / "tokenizer.json").get("added_tokens", ()):
        yield token["content"]


def _json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_bytes())
    except (OSError, ValueError):  # loading the model raises the error
        return {}
    return read if isinstance(read, dict) else {}
