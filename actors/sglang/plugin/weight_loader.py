"""SGLang's loader of weights in shared memory (`--custom-weight-loader`).

`/update_weights_from_tensor` accepts pickled (name, tensor) pairs. The engine sends one pair, whose
name is the location of a bucket of tensors. The server's scheduler calls `load`, which maps the
bucket and unmaps it after the load. The tensors stay in main memory: each tensor-parallel rank
copies only its own part to its GPU.

torch's handles of shared memory are not used: they keep a file in /dev/shm until a helper process
of torch removes it, and a killed actor ends that process, too.
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
    """Pickle a bucket's location, with types that the server's restricted unpickler allows."""
    return pickle.dumps([(json.dumps(asdict(shared)), torch.empty(0))])


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load a bucket into the model of a server's rank; SGLang calls it by its `load_format`."""
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
