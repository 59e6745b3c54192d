"""Values of a checkpoint's tensors, read a few at a time into a model that has none.

    model = meta_causal_lm(path, dtype=torch.float32)
    values = CheckpointValues(model, path)           headers are read, and all errors raised
    allocate(model, values.missing)                  memory, and what no checkpoint stores
    for name, tensor in values.read(): ...           the rest, under the model's names

`load_causal_lm` gives the same values, and holds all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from distill.errors import CheckpointError, first_line
from distill.models.checkpoint_names import Conversion, follow_checkpoint
from distill.models.loading import (
    MAKING,
    opened,
    require_complete,
    tensor_layouts,
    weight_files,
)
from distill.weights.model_weights import TensorLayout


def reads_by_tensor(model: PreTrainedModel, path: str) -> bool:
    """True if the checkpoint is of safetensors files, which need no quantiser to be read."""
    config: Any = model.config
    return bool(weight_files(path)) and getattr(config, "quantization_config", None) is None


class CheckpointValues:
    """Values that a checkpoint has for a model on the meta device.

    Attributes:
        layouts: of the tensors that `read` yields, in its order; a tied tensor comes once.
        missing: names of the model's tensors that the checkpoint need not have, and has not.

    Raises:
        CheckpointError: missing, unreadable or misshapen tensors.
    """

    def __init__(self, model: PreTrainedModel, path: str, fresh: Collection[str] = ()) -> None:
        """
        Args:
            fresh: names of tensors that the checkpoint need not have.
        """
        self._path = path
        self._there = tensor_layouts(path)
        self._conversion = Conversion(model, follow_checkpoint(model, self._there))
        own: dict[str, Tensor] = model.state_dict(keep_vars=True)
        layouts: dict[int, TensorLayout] = {}
        for name, tensor in self._outlined():
            if tensor.shape != own[name].shape:
                raise CheckpointError(
                    f"cannot load weights from {path!r}: {name} has shape {tuple(tensor.shape)} "
                    f"there and {tuple(own[name].shape)} in the model that its config describes"
                )
            layouts.setdefault(id(own[name]), TensorLayout.of(name, tensor))
        self.layouts = list(layouts.values())
        self.missing = [name for name, tensor in own.items() if id(tensor) not in layouts]
        require_complete(model, path, set(self.missing).difference(fresh))

    def read(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(the model's name, tensor) pairs; a unit of conversion at a time is in memory.

        A tensor has the precision that it is stored in, unless it was converted.

        Args:
            names: the tensors that are read, with those of their units; None: all.

        Raises:
            CheckpointError: a file cannot be read.
        """
        wanted = {layout.name for layout in self.layouts}
        if names is not None:
            wanted &= set(names)
        with opened(self._path) as take:
            for name, tensor in self._conversion(take, wanted):
                if name in wanted:
                    yield name, tensor

    def bytes_of(self, names: Collection[str]) -> int:
        """Bytes of these tensors in float32."""
        chosen = set(names)
        return 4 * sum(prod(each.shape) for each in self.layouts if each.name in chosen)

    def _outlined(self) -> Iterator[tuple[str, Tensor]]:
        def take(name: str) -> Tensor:
            layout = self._there[name]
            return torch.empty(layout.shape, dtype=getattr(torch, layout.dtype), device="meta")

        try:
            yield from self._conversion(take)
        except (RuntimeError, AttributeError) as error:  # of torch, and for a dtype unknown to it
            raise CheckpointError(
                f"cannot load weights from {self._path!r}: {first_line(error)}"
            ) from error


def allocate(model: PreTrainedModel, missing: Collection[str] = ()) -> None:
    """Give a model on the meta device main memory, and the values that no checkpoint stores.

    transformers computes them: buffers such as rotary frequencies, and the tensors named in
    `missing`, which it draws. Memory of other tensors is never touched, and takes none until it is.
    """
    model.to_empty(device="cpu")
    model.tie_weights()
    for name, tensor in model.state_dict(keep_vars=True).items():
        # The mark by which transformers' own loading leaves a tensor as it is.
        tensor._is_hf_initialized = name not in missing
    with MAKING:
        model.initialize_weights()
    model.eval()
