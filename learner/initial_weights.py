"""Initial weights of several workers: the leader reads them tensor by tensor, and sends shards.

    initial = InitialWeights(path, group)           the model: shapes, and uninitialised memory
    initial.probe()                                 on the leader
    add_lora(initial.model, config), ...            the model keeps its own Linears
    shard(initial.model, group, dtype, initial)     calls `fill`, which sets the values

The leader reads the checkpoint one conversion unit at a time (a tensor, or a layer's experts), and
sends each worker its shard. So main memory holds the shards, and on the leader one more unit. If a
checkpoint cannot be read tensor by tensor (pytorch_model.bin, or quantised), the leader holds the
whole model until it is sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from distill.main_memory import require_main_memory
from distill.models.attention_probe import shares_prefixes
from distill.models.checkpoint_values import CheckpointValues, allocate, reads_by_tensor
from distill.models.loading import load_causal_lm, meta_causal_lm
from distill.models.reward import HEAD_WEIGHT, meta_reward_model, start_reward_model
from learner.process_group import WorkerGroup
from learner.sharding import layers_of, scatter_tensor


class InitialWeights:
    """Initial model of the workers; `fill` sets its values from the checkpoint.

    Attributes:
        model: the model, on every worker.

    Raises:
        CheckpointError: the weights are missing, corrupt or incomplete.
        ConfigError: the leader's host lacks the main memory to read them.
    """

    def __init__(
        self,
        path: str,
        group: WorkerGroup,
        *,
        dtype: torch.dtype = torch.float32,
        reward_padding: int | None = None,
    ) -> None:
        """
        Args:
            path: checkpoint.
            dtype: dtype of the weights.
            reward_padding: see `LearnerConfig`.
        """
        self._path, self._dtype, self._padding = path, dtype, reward_padding
        self._values: CheckpointValues | None = None
        self.model = self._outline()
        if group.rank > 0:
            allocate(self.model)
        elif reads_by_tensor(self.model, path):
            self._begin()
        else:
            self.model = whole_model(path, dtype, reward_padding, "cpu")
        plan = self._plan() if group.rank == 0 else None
        self._dtypes: dict[str, torch.dtype] = group.broadcast(plan)
        # Modules, not parameters or names: sharding replaces parameters, adapters rename modules.
        self._places = {name: _place(self.model, name) for name in self._dtypes}

    def probe(self) -> bool:
        """Result of `shares_prefixes`. Call only on the leader: other workers have no values."""
        if self._values is None:
            return shares_prefixes(self.model.eval())
        return shares_prefixes(self._shallow(self._values))

    def parameters(self) -> Collection[nn.Parameter]:
        return [getattr(module, leaf) for module, leaf in self._places.values()]

    def fill(self, group: WorkerGroup) -> None:
        if self._values is None:
            for name, dtype in self._dtypes.items():
                scatter_tensor(None, dtype, self._sharded(name), group)
            return
        names = list(self._dtypes)
        for name, tensor in self._values.read(names):
            assert name == names.pop(0), f"{name} was read out of turn"
            scatter_tensor(tensor, self._dtypes[name], self._sharded(name), group)
        assert not names, f"{names[0]} was not read"

    def _sharded(self, name: str) -> Tensor:
        module, leaf = self._places[name]
        return getattr(module, leaf)

    def _outline(self) -> PreTrainedModel:
        """The model on the meta device."""
        if self._padding is not None:
            return meta_reward_model(self._path, padding=self._padding)
        return meta_causal_lm(self._path, dtype=self._dtype)

    @torch.no_grad()
    def _begin(self) -> None:
        """Read the checkpoint's headers, and the buffers, which are not sharded."""
        fresh = () if self._padding is None else (HEAD_WEIGHT,)
        self._values = values = CheckpointValues(self.model, self._path, fresh)
        needed = values.bytes_of(_probed(self.model))  # more than any conversion unit
        require_main_memory(needed, f"loading {self._path} tensor by tensor")
        allocate(self.model, values.missing)
        buffers = dict(self.model.named_buffers())
        for name, tensor in values.read(buffers):
            buffers[name].copy_(tensor)

    def _plan(self) -> dict[str, torch.dtype]:
        """Dtypes of the parameters that the leader sends, by name, in the order of reading."""
        if self._values is None:
            return {}
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        layouts = self._values.layouts
        return {x.name: getattr(torch, x.dtype) for x in layouts if x.name in parameters}

    @torch.no_grad()
    def _shallow(self, values: CheckpointValues) -> PreTrainedModel:
        """Copy of the model with values in the first layer of each kind and zeros in the others.

        Weights of zeros share one tensor for each shape.
        """
        model = self._outline()
        allocate(model)
        read = _probed(model)
        own = model.state_dict(keep_vars=True)
        for name, tensor in values.read(read):
            own[name].copy_(tensor)
        zeros: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        for name, parameter in model.named_parameters():
            if name not in read:
                key = parameter.shape, parameter.dtype
                if key not in zeros:
                    zeros[key] = torch.zeros(parameter.shape, dtype=parameter.dtype)
                parameter.data = zeros[key]
        return model


def whole_model(
    path: str, dtype: torch.dtype, reward_padding: int | None, device: str
) -> PreTrainedModel:
    """The initial model with its values, on one worker. The head of a reward model is new."""
    if reward_padding is not None:
        return start_reward_model(path, padding=reward_padding, device=device)
    return load_causal_lm(path, dtype=dtype, device=device)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module, _, leaf = name.rpartition(".")
    return model.get_submodule(module), leaf


def _probed(model: PreTrainedModel) -> set[str]:
    """Names of tensors that are outside of layers, or in the first layer of its kind."""
    layers = set(layers_of(model))
    kinds: set[Hashable] = set()
    repeated: list[str] = []
    for name, module in model.named_modules():
        if module in layers:
            kind = _kind(module)
            if kind in kinds:
                repeated.append(f"{name}.")
            kinds.add(kind)
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name for name, _ in tensors if not name.startswith(tuple(repeated))}


def _kind(layer: nn.Module) -> Hashable:
    """Hashable description of a layer: its modules, their settings, and the weights' shapes.

    Layers are of the same kind if they differ only in their index and the values of their weights.
    """
    modules = []
    for name, module in layer.named_modules():
        settings = [
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None)
            and not (key.startswith("layer_") and type(value) is int)
        ]
        weights = module.named_parameters(recurse=False)
        shapes = tuple((key, tuple(weight.shape)) for key, weight in weights)
        modules.append((name, type(module), tuple(sorted(settings)), shapes))
    return tuple(modules)
