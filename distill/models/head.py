"""Vocabulary projection of a model, read from its checkpoint without the rest of the model."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn

from distill.errors import ConfigError
from distill.models.checkpoint_values import CheckpointValues, reads_by_tensor
from distill.models.loading import meta_causal_lm, vocab_size
from distill.models.logprobs import Event
from distill.models.vocabulary_head import VocabularyHead, projection_of


def check_head(path: str, role: str) -> tuple[int, int]:
    """Return (vocabulary size, hidden size) of a checkpoint's head, from the files' headers.

    Raises:
        CheckpointError: there is no causal language model at `path`.
        ConfigError: the head cannot be read by itself; the field is the setting `role`.
    """
    model = meta_causal_lm(path)
    head: Any = projection_of(model)
    if not reads_by_tensor(model, path) or type(head) is not nn.Linear:
        raise ConfigError(
            f"{role}={path}: its head cannot be read by itself, because the checkpoint is "
            "quantised or has no safetensors files; give the original checkpoint, which has the "
            "same head"
        )
    CheckpointValues(model, path)
    return vocab_size(model.config), head.in_features


def load_head(path: str, *, device: str, event: Event = ()) -> tuple[VocabularyHead, Any]:
    """Load a checkpoint's head, frozen and in the precision of its files, and the model's config.

    Only the tensors of the projection are read: the weight (lm_head, or the embedding that it is
    tied to) and a bias. Scale and soft cap of the logits come from the config.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    model = meta_causal_lm(path)
    projection = cast(nn.Linear, projection_of(model))
    kind = {id(tensor): name for name, tensor in projection.named_parameters()}
    own = model.state_dict(keep_vars=True)
    names = [name for name, tensor in own.items() if id(tensor) in kind]
    loaded = {}
    for name, tensor in CheckpointValues(model, path).read(names):
        loaded[kind[id(own[name])]] = tensor
    head = nn.Linear(
        *projection.weight.shape[::-1], bias=projection.bias is not None, device="meta"
    )
    for name, tensor in loaded.items():
        setattr(head, name, nn.Parameter(tensor.to(device), requires_grad=False))
    assert not any(p.is_meta for p in head.parameters()), f"{path} lacks a part of its head"
    return VocabularyHead(head, model.config, event), model.config


def in_dtype(head: VocabularyHead, config: Any, dtype: torch.dtype) -> VocabularyHead:
    """Return the head if its weights have this dtype, else a converted copy."""
    module = cast(nn.Module, head.projection)
    if next(module.parameters()).dtype == dtype:
        return head
    return VocabularyHead(deepcopy(module).to(dtype), config, head.event)
