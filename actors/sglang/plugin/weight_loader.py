"""Weights in shared memory, on SGLang's side: its own loader option (`--custom-weight-loader`).

`/update_weights_from_tensor` takes pickled (name, tensor) pairs. We send one pair whose name says
where a bucket of tensors is; the server's scheduler calls `load`, which maps them and lets go of
them. They stay in main memory: the model copies its own part of each, so a tensor-parallel rank
moves that part to its GPU and no more. torch's own handles on
shared memory would keep a file in /dev/shm until a helper process of torch's removes it, which does
not outlive an actor that is killed.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from distill.weights.model_weights import TensorLayout
from distill.weights.shared_memory import SharedTensors


def serialized_order(shared: SharedTensors) -> bytes:
    """The order for the server, pickled; of types that its restricted unpickler knows."""
    return pickle.dumps([(json.dumps(asdict(shared)), torch.empty(0))])


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Called in the server by its `load_format`: the model takes its own part of each tensor."""
    [(order, _)] = named_tensors
    model.load_weights(list(_shared(order).unpack().items()))


def _shared(order: str) -> SharedTensors:
    given = json.loads(order)
    layouts = tuple(
        TensorLayout(name=layout["name"], dtype=layout["dtype"], shape=tuple(layout["shape"]))
        for layout in given["layouts"]
    )
    device, inode = given["identity"]
    return SharedTensors(
        layouts=layouts, path=given["path"], identity=(device, inode), offset=given["offset"]
    )
