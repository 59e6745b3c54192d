"""Values of a checkpoint's tensors, read a few at a time for a model on the meta device.

    model = meta_causal_lm(path, dtype=torch.float32)
    values = CheckpointValues(model, path)           read headers, raise errors of shapes and names
    allocate(model, values.missing)                  allocate memory, compute values not stored
    for name, tensor in values.read(): ...           read stored values, under the model's names

`load_causal_lm` loads the same values with the whole model in memory.
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
    """True if the checkpoint has safetensors files and is not quantised."""
    config: Any = model.config
    return bool(weight_files(path)) and getattr(config, "quantization_config", None) is None


class CheckpointValues:
    """Values that a checkpoint has for a model on the meta device.

    Attributes:
        layouts: layouts of the tensors that `read` yields, in the same order; tied tensors once.
        missing: names of the model's tensors that the checkpoint lacks and is allowed to lack.

    Raises:
        CheckpointError: missing, unreadable or misshapen tensors.
    """

    def __init__(self, model: PreTrainedModel, path: str, fresh: Collection[str] = ()) -> None:
        """
        Args:
            fresh: names of tensors that the checkpoint may lack.
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
        """Pairs (the model's name, tensor); only one conversion unit is in memory at a time.

        A tensor that needs no conversion has the precision in which it is stored.

        Args:
            names: the model's names of the tensors to read; None: all.

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
        except (RuntimeError, AttributeError) as error:  # AttributeError: torch lacks the dtype
            raise CheckpointError(
                f"cannot load weights from {self._path!r}: {first_line(error)}"
            ) from error


def allocate(model: PreTrainedModel, missing: Collection[str] = ()) -> None:
    """Allocate main memory for a model on the meta device, and compute values not in checkpoints.

    transformers computes these values: buffers such as rotary frequencies, and random values of the
    tensors named in `missing`. The memory of other tensors is not written here, so the system
    reserves no pages for it yet.
    """
    model.to_empty(device="cpu")
    model.tie_weights()
    for name, tensor in model.state_dict(keep_vars=True).items():
        # transformers does not initialise tensors that have this mark.
        tensor._is_hf_initialized = name not in missing
    with MAKING:
        model.initialize_weights()
    model.eval()
