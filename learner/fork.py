"""A start from another run's checkpoint: what must agree with it, and what is taken over.

    check_fork(checkpoint, ...)             all that can be wrong, with no weights loaded
    store.save(step=0, write=partial(write_start, checkpoint.path, moments=...), ...)
    learner.load_trainer_state(...)         of step 0: no schedule and no RNG are taken over

The new run's first checkpoint, step 0, is the other's weights. It resumes from that like from any
other, whatever has become of the run they are from.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.errors import ConfigError
from distill.models.loading import load_config
from distill.tokenizer import first_difference, load_tokenizer
from learner.checkpoint import Checkpoint, link_or_copy
from learner.config import LoraSettings
from learner.lora import check_goes_on
from learner.state import TrainerState, write_trainer

# Of a model's config: what says nothing of how it computes, and what a run itself sets.
_PASSED_OVER = (
    *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
    *("eos_token_id", "bos_token_id", "pad_token_id", "num_labels", "id2label", "label2id"),
)


def check_fork(
    checkpoint: Checkpoint,
    *,
    title: str,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    lora: LoraSettings,
) -> None:
    """Checks that a model, its tokenizer and its adapter are those that the checkpoint was made of.

    Args:
        title: the setting that names `model`, for messages.

    Raises:
        ConfigError: they are others; with the field, both values, and the remedy.
        CheckpointError: one of them cannot be read.
    """
    saved = checkpoint.model_dir
    ours, theirs = _shape(model), _shape(saved)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"{title}={model} is another model than the one in {checkpoint.path}: its {name} "
                f"is {ours.get(name)!r}, and {theirs.get(name)!r} there. Give the {title}= that "
                "run had",
                field=title,
            )
    if difference := first_difference(tokenizer, load_tokenizer(saved), "here", "there"):
        raise ConfigError(
            f"{title}={model} has another tokenizer than the model in {checkpoint.path}: "
            f"{difference}. Give the {title}= that run had",
            field=title,
        )
    adapter = Path(checkpoint.adapter_dir)
    if lora.trains_adapter and not adapter.is_dir():
        raise ConfigError(
            f"{checkpoint.path} holds a model of which all weights were trained, and "
            f"lora.rank={lora.rank} would train an adapter on {title}={model}, without them. "
            f"Leave out the adapter, or give {title}={saved} in place of fork_from=",
            field="lora.rank",
        )
    if adapter.is_dir() and not lora.trains_adapter:
        raise ConfigError(
            f"{checkpoint.path} holds an adapter, and no lora.rank= is given: give that run's, or, "
            f"to train all weights, {title}={saved} (the adapter merged) in place of fork_from=",
            field="lora.rank",
        )
    if lora.trains_adapter:
        check_goes_on(lora, model, str(adapter))


def _shape(model: str) -> dict[str, Any]:
    config = load_config(model).to_dict()
    return {
        name: value
        for name, value in config.items()
        if name not in _PASSED_OVER and not name.startswith("_")
    }


def has_moments(checkpoint: Checkpoint) -> bool:
    """False of the first checkpoint of a run that took over none itself."""
    return (checkpoint.path / "optimizer").is_dir()


def write_start(checkpoint: Path, path: Path, *, moments: bool) -> None:
    """Writes the checkpoint of step 0: another's model, adapter and, if asked, AdamW's moments.

    Files are linked where both places are on one file system, and copied elsewhere.

    Raises:
        OSError: it could not be written, or the other is gone.
    """
    for name in ("model", "adapter", *(["optimizer"] if moments else [])):
        if (checkpoint / name).is_dir() or name == "model":
            shutil.copytree(checkpoint / name, path / name, copy_function=link_or_copy)
    write_trainer(path, TrainerState(moments=moments))
