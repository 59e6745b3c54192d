"""Reward models: a decoder with a scalar head, which reads the hidden state of a row's last token.

On disk such a model is what transformers' `AutoModelForSequenceClassification` loads: the decoder's
tensors, `score.weight`, and a config with one label and a padding token.

transformers reads the score at a row's last token that is not padding, SGLang at its last token. So
that both read the same one, no row may end with the padding token (`padding_token`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification
from transformers.modeling_utils import PreTrainedModel

from distill.errors import CheckpointError, first_line
from distill.models.loading import (
    MAKING,
    exact_attention,
    load_config,
    require_complete,
)

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# Its weights, in every decoder that transformers knows.
HEAD = "score"
HEAD_WEIGHT = f"{HEAD}.weight"


def score_head(model: PreTrainedModel) -> nn.Linear | None:
    """The scalar head of a reward model; None of any other model."""
    head = getattr(model, HEAD, None)
    return head if isinstance(head, nn.Linear) and head.out_features == 1 else None


def load_reward_model(path: str, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Loads a reward model; never runs code that the checkpoint brings along.

    Raises:
        CheckpointError: it is none, or its weights are missing, corrupt or incomplete.
    """
    check_reward_config(path)
    return _load(path, dtype, device, fresh=())


def start_reward_model(path: str, *, padding: int, device: str) -> PreTrainedModel:
    """A reward model to train, fp32: the checkpoint's decoder, and its head, or else a fresh one.

    A fresh head is drawn from torch's generator.

    Raises:
        CheckpointError: missing, corrupt or incomplete weights.
    """
    model = _load(path, torch.float32, device, fresh=(HEAD_WEIGHT,), padding=padding)
    return _as_reward_model(model)


def meta_reward_model(path: str, *, padding: int | None = None) -> PreTrainedModel:
    """The reward model of a checkpoint, or of its decoder: names and shapes, on the meta device.

    Raises:
        CheckpointError: there is no config of a causal decoder at `path`.
    """
    config = load_config(path)
    config.num_labels = 1
    config.pad_token_id = padding
    try:
        with MAKING, torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=exact_attention(config),
                trust_remote_code=False,
            )
    except Exception as error:  # a foreign config may fail in any way
        raise CheckpointError(
            f"{path!r} cannot be a reward model: transformers has no {config.model_type} with a "
            f"score (AutoModelForSequenceClassification: {type(error).__name__}); give another "
            "causal language model"
        ) from error
    if score_head(model) is None:
        raise CheckpointError(
            f"{path!r} cannot be a reward model: {type(model).__name__} has no scalar `{HEAD}` "
            "behind a decoder; give a causal language model"
        )
    return _as_reward_model(model)


def check_reward_config(path: str) -> Any:
    """The config of a reward model.

    Raises:
        CheckpointError: there is none at `path`, or it is another kind of model.
    """
    config = load_config(path)
    kinds = config.architectures or ["unknown"]
    if not kinds[0].endswith("ForSequenceClassification"):
        raise CheckpointError(
            f"{path} is no reward model but a {kinds[0]}: it has no score. Train one of it: "
            f"recipe=reward_model model={path}"
        )
    if config.num_labels != 1:
        raise CheckpointError(
            f"{path} is no reward model: it has {config.num_labels} labels, and a reward is one "
            "number"
        )
    return config


def padding_token(
    tokenizer: PreTrainedTokenizerBase, model_vocab: int, lasts: Collection[int]
) -> int:
    """Id of the padding of a reward model: the tokenizer's, unless it may end a row.

    Args:
        model_vocab: ids are below it.
        lasts: tokens that end rows.

    Raises:
        CheckpointError: every special token may end a row.
    """
    for id_ in _candidates(tokenizer):
        if id_ not in lasts and id_ < model_vocab:
            return id_
    raise CheckpointError(
        "the tokenizer has no special token for padding that ends no row: the score of a row would "
        "be read one token too early. Give it a padding token of its own (`pad_token` in its "
        "tokenizer_config.json)"
    )


def _candidates(tokenizer: PreTrainedTokenizerBase) -> Iterable[int]:
    """The padding, what is called so, and every other special token."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = [id_ for id_, token in sorted(added.items()) if token.special]
    named = [id_ for id_ in special if "pad" in str(added[id_]).lower()]
    others = (tokenizer.unk_token_id, tokenizer.bos_token_id)
    for id_ in cast(list[Any], [tokenizer.pad_token_id, *named, *others, *special]):
        if id_ is not None:
            yield id_


def _load(
    path: str,
    dtype: torch.dtype,
    device: str,
    *,
    fresh: Collection[str],
    padding: int | None = None,
) -> PreTrainedModel:
    """Loads the model; only the tensors named in `fresh` may be missing, and are drawn."""
    attention = exact_attention(load_config(path))
    settings = {} if padding is None else {"num_labels": 1, "pad_token_id": padding}
    try:
        with MAKING, _quiet():
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=False,
                output_loading_info=True,
                **settings,
            )
    except Exception as error:  # safetensors, pickle, json, OSError: a corrupt file has many faces
        raise CheckpointError(f"cannot load weights from {path!r}: {first_line(error)}") from error
    model, report = loaded
    require_complete(model, path, set(report["missing_keys"]).difference(fresh))
    if score_head(model) is None:
        raise CheckpointError(f"{path!r} is no reward model: it has no scalar `{HEAD}`")
    return cast(PreTrainedModel, model.to(device))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of what a checkpoint lacks: we say it, where it is a mistake."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _as_reward_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model with a config that says what it is, for whoever loads the config that is saved."""
    model.config.architectures = [type(model).__name__]
    return model
