"""Files of a Hugging Face model directory other than weights: configs, tokenizer, processor.

    generation_settings(path)         contents of the checkpoint's generation_config.json
    ModelFiles.write(directory, ...)  write all files
    check_model_files(path, ...)      write them to a temporary directory, as a test before a run

A checkpoint's generation_config.json is copied as JSON. transformers loads many that its
`GenerationConfig.save_pretrained` refuses: `temperature` without `do_sample`, for example.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils.hub import cached_file

from distill.errors import CheckpointError, first_line
from distill.models.loading import load_config, processor_files
from distill.types import Tokenizer

_GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Files of one model other than its weights.

    Attributes:
        config: Hugging Face config of the checkpoint; see `checkpoint_config`.
        generation: contents of generation_config.json; None: the file is not written.
        origin: checkpoint whose processor files are copied.
    """

    config: Any
    generation: dict[str, Any] | None
    origin: str

    def write(self, directory: Path, tokenizer: Tokenizer) -> None:
        """Write all files to a directory that exists."""
        self.config.save_pretrained(directory)
        if self.generation is not None:
            text = json.dumps(self.generation, indent=2, ensure_ascii=False)
            (directory / _GENERATION).write_text(f"{text}\n", encoding="utf-8")
        tokenizer.save_pretrained(directory)
        for file in processor_files(self.origin):
            shutil.copy(file, directory / file.name)


def checkpoint_config(config: Any, origin: str) -> Any:
    """Config for a checkpoint of a model with config `config` that has all tensors of `origin`.

    If the model is the text model of a multimodal model (Qwen3.5), this is the config of the outer
    model with `config` as its text config, because servers support only the outer architecture.
    """
    outer = load_config(origin)
    for name, kind in getattr(outer, "sub_configs", {}).items():
        if kind is type(config) and type(outer) is not kind:
            outer.tie_word_embeddings = config.tie_word_embeddings
            outer.dtype = config.dtype
            setattr(outer, name, config)
            return outer
    return config


def generation_settings(path: str, stops: Collection[int] | None = None) -> dict[str, Any]:
    """Contents of the checkpoint's generation_config.json.

    If there is no such file, the settings that transformers derives from config.json.

    Args:
        stops: ids that replace `eos_token_id`; None: `eos_token_id` is kept.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    try:
        file = cached_file(path, _GENERATION)
    except (OSError, ValueError):  # the checkpoint has none
        file = None
    if file is None:
        config = GenerationConfig.from_pretrained(
            path, config_file_name="config.json", _from_model_config=True
        )
        settings = json.loads(config.to_json_string(use_diff=True))
    else:
        settings = _json_object(file)
    return settings if stops is None else {**settings, "eos_token_id": list(stops)}


def check_model_files(path: str, tokenizer: Tokenizer) -> None:
    """Write the files of the model at `path` to a temporary directory, as a checkpoint would.

    Raises:
        CheckpointError: the files cannot be written, so no checkpoint could be written.
    """
    files = ModelFiles(config=load_config(path), generation=generation_settings(path), origin=path)
    with tempfile.TemporaryDirectory(prefix="isotherm-") as directory:
        try:
            files.write(Path(directory), tokenizer)
        except Exception as error:  # transformers' validators, tokenizers: a bare Exception
            raise CheckpointError(
                f"the config or tokenizer of {path} can be loaded but not saved, so no checkpoint "
                f"could be written: {type(error).__name__}: {first_line(error)}. Correct that file"
            ) from error


def _json_object(file: str) -> dict[str, Any]:
    try:
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"it has a {type(settings).__name__} in place of an object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}. Correct or remove it") from error
    return settings
