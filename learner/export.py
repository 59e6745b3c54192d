"""Export of the learner's weights, with the names and shapes of the checkpoint it started from.

    check_export(path)                    rejects models that servers could not read, before a run
    names = Names.of(model, path)         for the leader's model, before an adapter or sharding
    plain = plain_weights(model)          the model's own tensors, an adapter merged into them
    Exported(model, names, plain, ...)    one tensor for each tensor of the checkpoint
    carried_over(model, names, path)      other tensors of the checkpoint, for `final/`

See `distill.models.checkpoint_names` for the conversions, which are transformers' own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from distill.errors import CheckpointError
from distill.models.checkpoint_names import (
    ConversionUnit,
    Shape,
    exact_names,
    follow_checkpoint,
    ignored_names,
    reverted,
    units_of,
)
from distill.models.loading import (
    load_config,
    meta_causal_lm,
    read_tensors,
    tensor_layouts,
    tensor_shapes,
    weight_files,
)
from distill.models.model_files import checkpoint_config
from distill.models.reward import score_head
from distill.weights.model_weights import TensorLayout
from learner.lora import ADAPTER, adapted_layers
from learner.sharding import LazyTensor, stored, whole, whole_in


def check_export(
    path: str,
    meta_model: Callable[[str], PreTrainedModel] = meta_causal_lm,
    fresh: Collection[str] = (),
) -> None:
    """Reject a model whose weights would be pushed and saved under names that no server reads.

    A checkpoint whose headers cannot be read on this machine passes: pytorch_model.bin, or a hub
    name that has not been downloaded.

    Args:
        meta_model: constructs the model that is trained, on the meta device.
        fresh: names of tensors that may be missing from the checkpoint.

    Raises:
        CheckpointError: there is no such model at `path`; or a tensor or a field of its config
            differs from what would be saved; the message names the first one.
    """
    if not weight_files(path):
        return
    model = meta_model(path)
    _check_config(path, model)
    there = tensor_shapes(path)
    taken = follow_checkpoint(model, there)
    aliases = _tied_names(model)
    # A checkpoint of the base model has names without this prefix, and servers read both forms.
    prefix = f"{model.base_model_prefix}."
    for unit in units_of(model, _shapes(model)):
        for name, shape in unit.stored.items():
            known = [name, name.removeprefix(prefix), *aliases.get(name, ())]
            if name not in fresh and not any(there.get(alias) == shape for alias in known):
                other = next((other for other in there if other not in taken), None)
                raise CheckpointError(_explain(path, model, name, shape, there, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of a model's tensors in the checkpoint; the same on every worker.

    Attributes:
        units: conversion units between the model's and the checkpoint's tensors.
        exact: names, in the checkpoint, of tensors that are never rounded.
    """

    units: Sequence[ConversionUnit]
    exact: frozenset[str]

    @classmethod
    def of(cls, model: PreTrainedModel, path: str) -> Names:
        """Names for a model that was loaded from `path` and not changed since."""
        units = units_of(model, _shapes(model))
        there = tensor_layouts(path) if weight_files(path) else {}
        return cls(units=units, exact=exact_names(model, units, there))


class RoundedUpdate:
    """Share of an adapter's change that is lost when W' is rounded to less than float32.

    With D = W' - W and E = round(W') - round(W), over all adapted weights:

        lost share = 1 - sum(E D) / sum(D D)

    A rounded weight moves only when its change exceeds half of the spacing of the grid, in bfloat16
    a few thousandths of its size. So at first almost the whole change is lost.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def note(self, name: str, delta: Tensor, weight: Tensor, rounded: Tensor) -> None:
        """Record D, W and round(W') of one weight; replaces an earlier record of its name."""
        arrived = rounded.float().sub_(weight.to(rounded.dtype))
        self._sums[name] = torch.stack([(arrived * delta).sum(), delta.square().sum()])

    @property
    def lost_share(self) -> float:
        """Lost share in the newest merge of every weight; 0 if nothing was rounded or changed."""
        if not self._sums:
            return 0.0
        arrived, all_of_it = torch.stack(list(self._sums.values())).double().sum(0).tolist()
        return 1 - arrived / all_of_it if all_of_it else 0.0


def plain_weights(
    model: PreTrainedModel, rounded: RoundedUpdate | None = None
) -> dict[str, LazyTensor]:
    """Every weight of the model by its name; with an adapter, W' in place of W.

    Each tensor occurs once: a tied lm_head occurs as its embedding. A weight without an adapter is
    not copied. Sums are computed in float32 and rounded to the weight's own dtype at the end.
    If another dtype is requested, `rounded` records the share that is lost.
    """
    layers = adapted_layers(model)
    made: dict[str, LazyTensor] = {}
    for name, weight in stored(model):
        if name.partition(".lora_")[0] in layers:
            continue
        module, _, last = name.rpartition(".base_layer.")
        layer = layers.get(module)
        plain = name if layer is None else f"{module}.{last}"
        make = partial(whole_in, weight.detach())
        if layer is not None and last == "weight":
            make = _merging(plain, weight, layer, rounded)
        made[plain] = LazyTensor(layout=TensorLayout.of(plain, weight), make=make)
    return made


def _merging(
    name: str, weight: Tensor, layer: LoraLayer, rounded: RoundedUpdate | None
) -> Callable[[torch.dtype | None], Tensor]:
    a_RI, b_OR = (part.get_parameter(f"{ADAPTER}.weight") for part in (layer.lora_A, layer.lora_B))
    scale = layer.scaling[ADAPTER]

    @torch.no_grad()
    def make(dtype: torch.dtype | None) -> Tensor:
        delta_OI = scale * (whole(b_OR) @ whole(a_RI))
        weight_OI = whole(weight)
        if rounded is None or dtype in (None, weight.dtype):
            return delta_OI.add_(weight_OI).to(dtype or weight.dtype)
        made = (delta_OI + weight_OI).to(dtype)
        rounded.note(name, delta_OI, weight_OI, made)
        return made

    return make


class Exported:
    """Exported tensors of a model. Each conversion unit is converted once for all of its tensors.

    The tensors of the last unit are cached until they are read, or until `forget`.
    """

    def __init__(
        self, model: PreTrainedModel, names: Names, plain: Mapping[str, LazyTensor], leads: bool
    ) -> None:
        """
        Args:
            plain: every stored tensor of the model, by its name in the model.
            leads: True on the leader. Other workers take part in gathering, and keep no tensors.
        """
        self._model, self._plain, self._leads = model, plain, leads
        self._keeps = leads
        self._held: tuple[ConversionUnit, torch.dtype | None, dict[str, Tensor]] | None = None
        self.weights: dict[str, LazyTensor] = {}
        for unit in names.units:
            source = plain[unit.names[0]]
            for name, shape in unit.stored.items():
                exact = name in names.exact
                layout = replace(source.layout, name=name, shape=shape)
                make = source.make if unit.renames else partial(self._make, unit, name)
                self.weights[name] = LazyTensor(layout=layout, make=make, exact=exact)

    def keep(self, kept: bool) -> None:
        """Set whether this worker keeps gathered tensors. The leader always does."""
        if (kept := kept or self._leads) != self._keeps:
            self.forget()
            self._keeps = kept

    def forget(self) -> None:
        """Drop cached tensors. Call this before the weights change."""
        self._held = None

    def _make(self, unit: ConversionUnit, name: str, dtype: torch.dtype | None) -> Tensor:
        if self._held is not None:
            of, precision, tensors = self._held
            if of is unit and precision == dtype and name in tensors:
                return tensors.pop(name)
        self._held = None  # release the cached unit first: two units may not fit into memory
        self._held = (unit, dtype, self._convert(unit, dtype))
        return self._held[2].pop(name)

    @torch.no_grad()
    def _convert(self, unit: ConversionUnit, dtype: torch.dtype | None) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name in unit.names:
            whole = self._plain[name].make(dtype)
            tensors[name] = whole if self._keeps else whole.to("meta")
        return reverted(self._model, unit, tensors)


def carried_over(model: PreTrainedModel, names: Names, path: str) -> list[TensorLayout]:
    """Tensors of the checkpoint at `path` that the model's class ignores, such as MTP layers."""
    if not weight_files(path):
        return []
    there = tensor_layouts(path)
    exported = [name for unit in names.units for name in unit.stored]
    return [there[name] for name in ignored_names(model, there, exported)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """Tensors of a checkpoint on disk, as `Weights`."""

    path: str
    layouts: Sequence[TensorLayout]

    def gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        return read_tensors(self.path, names)

    def first_non_finite(self) -> str | None:
        return None


def _check_config(path: str, model: PreTrainedModel) -> None:
    """Raise CheckpointError if saved checkpoints would name another architecture than `path` does.

    The architecture of a reward model is not compared: its class has another name.
    """
    origin, saved = load_config(path), checkpoint_config(model.config, path)
    fields = ("model_type",) if score_head(model) else ("model_type", "architectures")
    for field in fields:
        there, here = getattr(origin, field), getattr(saved, field)
        if there != here:
            raise CheckpointError(
                f"{path} cannot be trained: its checkpoints would be saved with "
                f"{field}={here!r}, but its config.json has {there!r}, so servers could not load "
                "them. Start from a checkpoint of the text model alone"
            )


def _shapes(model: PreTrainedModel) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in stored(model)}


def _tied_names(model: Any) -> dict[str, list[str]]:
    """All names of each tensor, by its first name, under which the tensor is stored."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[id(tensor)].append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def _explain(
    path: str,
    model: Any,
    name: str,
    shape: Shape,
    there: Mapping[str, Shape],
    other: str | None,
) -> str:
    """Error message for a tensor whose name or shape differs.

    `other` is a tensor of the checkpoint that the model does not load.
    """
    counterpart = name if name in there else other
    what = "nothing else" if counterpart is None else f"{counterpart} {there[counterpart]}"
    return (
        f"{path} cannot be trained: its weights would be saved under names or shapes that "
        f"servers cannot load. {type(model).__name__} would be saved with {name} {shape}, where "
        f"the checkpoint has {what}. Check that it is complete and of the architecture in its "
        "config; a checkpoint written by transformers' `save_pretrained` can be trained"
    )
