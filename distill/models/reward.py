"""Reward models: a decoder with a scalar head on the hidden state of a row's last token.

The format on disk is that of transformers' `AutoModelForSequenceClassification`: the decoder's
tensors, `score.weight`, and a config with one label and a padding token.

transformers reads the score at the last token of a row that is not padding, SGLang at the last
token. Both read the same token only if no row ends with the padding token (`padding_token`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification
from transformers.modeling_utils import PreTrainedModel

from distill.errors import CheckpointError
from distill.models.loading import (
    MAKING,
    exact_attention,
    load_complete,
    load_config,
)
from distill.types import Tokenizer

# Name of the scalar head in every decoder of transformers.
HEAD = "score"
HEAD_WEIGHT = f"{HEAD}.weight"


def score_head(model: PreTrainedModel) -> nn.Linear | None:
    """Scalar head of a reward model; None for any other model."""
    head = getattr(model, HEAD, None)
    return head if isinstance(head, nn.Linear) and head.out_features == 1 else None


def load_reward_model(path: str, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Load a reward model, without running code from the checkpoint.

    Raises:
        CheckpointError: not a reward model, or missing, corrupt or incomplete weights.
    """
    check_reward_config(path)
    return _load(path, dtype, device, fresh=())


def start_reward_model(path: str, *, padding: int, device: str) -> PreTrainedModel:
    """Load a checkpoint in fp32 to train it as a reward model.

    A checkpoint without a scalar head gets one with random weights from torch's generator.

    Raises:
        CheckpointError: missing, corrupt or incomplete weights.
    """
    model = _load(path, torch.float32, device, fresh=(HEAD_WEIGHT,), padding=padding)
    return _as_reward_model(model)


def meta_reward_model(path: str, *, padding: int | None = None) -> PreTrainedModel:
    """Build a checkpoint's reward model on the meta device; a scalar head is added if missing.

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
    except Exception as error:  # a custom config may fail in any way
        raise CheckpointError(
            f"{path!r} cannot be a reward model: transformers has no {config.model_type} with a "
            f"score (AutoModelForSequenceClassification: {type(error).__name__}); give another "
            "causal language model"
        ) from error
    if score_head(model) is None:
        raise CheckpointError(
            f"{path!r} cannot be a reward model: {type(model).__name__} has no scalar `{HEAD}` "
            "on top of a decoder; give a causal language model"
        )
    return _as_reward_model(model)


def check_reward_config(path: str) -> Any:
    """Load the config of a reward model.

    Raises:
        CheckpointError: there is no config at `path`, or it is that of another kind of model.
    """
    config = load_config(path)
    kinds = config.architectures or ["unknown"]
    if not kinds[0].endswith("ForSequenceClassification"):
        raise CheckpointError(
            f"{path} is not a reward model but a {kinds[0]}, which has no score. To train one from "
            f"it: recipe=reward_model model={path}"
        )
    if config.num_labels != 1:
        raise CheckpointError(
            f"{path} is not a reward model: it has {config.num_labels} labels, but a reward is one "
            "number"
        )
    return config


def padding_token(tokenizer: Tokenizer, model_vocab: int, lasts: Collection[int]) -> int:
    """Id of the padding token of a reward model: the tokenizer's, unless it may end a row.

    Args:
        model_vocab: vocabulary size of the model, which is above every usable id.
        lasts: ids of tokens that may end a row.

    Raises:
        CheckpointError: every special token may end a row.
    """
    for id_ in _candidates(tokenizer):
        if id_ not in lasts and id_ < model_vocab:
            return id_
    raise CheckpointError(
        "every special token of the tokenizer may end a row, so none can be used for padding: the "
        "score of a row would be read one token too early. Give it a separate padding token "
        "(`pad_token` in its tokenizer_config.json)"
    )


def _candidates(tokenizer: Tokenizer) -> Iterable[int]:
    """Ids to try: the padding token, special tokens named like one, other special tokens."""
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
    """Load the model. Only the tensors named in `fresh` may be missing; they get random values."""
    settings = {} if padding is None else {"num_labels": 1, "pad_token_id": padding}
    with _quiet():
        model = load_complete(
            AutoModelForSequenceClassification, path, fresh, dtype=dtype, **settings
        )
    if score_head(model) is None:
        raise CheckpointError(f"{path!r} is not a reward model: it has no scalar `{HEAD}`")
    return cast(PreTrainedModel, model.to(device))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' report of missing tensors; `require_complete` reports real errors."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _as_reward_model(model: PreTrainedModel) -> PreTrainedModel:
    """Set the model's class in its config, which is saved with the model, and return the model."""
    model.config.architectures = [type(model).__name__]
    return model
