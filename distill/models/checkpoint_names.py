"""Tensors of a model under the names and shapes of its checkpoint, and back.

transformers renames, fuses and splits tensors when it loads a checkpoint: the experts of a mixture,
stored one by one, become one parameter per layer in memory. Servers load checkpoints, so a learner
pushes its weights as `save_pretrained` would write them, by transformers' own conversions:

    units_of(model, shapes)          groups of model tensors that are converted together
    reverted(model, unit, tensors)   model tensors -> checkpoint tensors
    Conversion(model, names)         checkpoint tensors -> model tensors, as loading converts them
    follow_checkpoint(model, names)  record these conversions on a model that was not loaded

Units (at most the fused experts of one layer) are converted one at a time, so that no model is in
memory twice.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import PreTrainedModel

from distill.models.loading import meta_causal_lm, tensor_shapes
from distill.weights.model_weights import TensorLayout

Shape = tuple[int, ...]

# Part of the class name of every module that chooses a token's experts, in all architectures.
_ROUTER = "Router"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionUnit:
    """Tensors that are converted together.

    Attributes:
        names: names of the tensors in the model.
        stored: names and shapes of the tensors in the checkpoint.
        renames: True if model and checkpoint have one tensor each, with equal values.
    """

    names: tuple[str, ...]
    stored: Mapping[str, Shape]
    renames: bool


def units_of(model: PreTrainedModel, shapes: Mapping[str, Shape]) -> list[ConversionUnit]:
    """Conversion units of the model's tensors with these names and shapes, in the same order.

    The model may be on the meta device. Its conversions are those of its loading; for a model that
    was not loaded, those that `follow_checkpoint` recorded.
    """
    conversions = _conversions(model)
    reverse = [conversion.reverse_transform() for conversion in conversions[::-1]]
    renamings, converters = _by_kind(reverse)
    members: dict[str, list[str]] = defaultdict(list)
    converts: dict[str, bool] = {}
    for name in shapes:
        # `revert_weight_conversion` merges tensors for which this returns the same name.
        key, pattern = rename_source_key(name, renamings, converters, reverse=True)
        members[key].append(name)
        converts[key] = pattern is not None
    units = []
    for key, names in members.items():
        if converts[key] or len(names) > 1:
            empty = {name: torch.empty(shapes[name], device="meta") for name in names}
            made = revert_weight_conversion(model, empty)
            stored = {name: tuple(tensor.shape) for name, tensor in made.items()}
            units.append(ConversionUnit(names=tuple(names), stored=stored, renames=False))
        else:
            units.append(
                ConversionUnit(names=(names[0],), stored={key: shapes[names[0]]}, renames=True)
            )
    return units


def reverted(
    model: PreTrainedModel, unit: ConversionUnit, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert the model's tensors of a unit to those of the checkpoint, as views or copies."""
    made = revert_weight_conversion(model, dict(tensors))
    return {name: made[name] for name in unit.stored}


def follow_checkpoint(model: PreTrainedModel, names: Collection[str]) -> set[str]:
    """Record, on a model that was not loaded, the conversions that loading these tensors would use.

    Returns:
        The names of the tensors that correspond to a tensor of the model.
    """
    conversions = get_model_conversion_mapping(model)
    taken = {name for name, key, _ in _targets(model, conversions, names) if key is not None}
    noted: Any = model
    noted._weight_conversions = [each for each in conversions if each.was_used()]
    return taken


def pushed_shapes(path: str) -> dict[str, Shape]:
    """Names and shapes of those tensors of a checkpoint that the trained model has and pushes.

    Raises:
        CheckpointError: there is no model, or no safetensors file, at `path`.
    """
    shapes = tensor_shapes(path)
    taken = follow_checkpoint(meta_causal_lm(path), shapes)
    return {name: shape for name, shape in shapes.items() if name in taken}


class Conversion:
    """Conversion of a checkpoint's tensors to those of a model loaded from such a checkpoint."""

    def __init__(self, model: PreTrainedModel, names: Collection[str]) -> None:
        """
        Args:
            names: names of all tensors of the checkpoint. A tensor that the model does not have
                keeps its name.
        """
        self._model = model
        conversions = _conversions(model)
        self._converters = {
            pattern: converter
            for converter in _by_kind(conversions)[1]
            for pattern in converter.source_patterns
        }
        # The model's first name of each unit -> [(the checkpoint's name, the converter's pattern)]
        self._sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        for name, key, pattern in _targets(model, conversions, names):
            self._sources[name if key is None else key].append((name, pattern))

    def __call__(
        self, take: Callable[[str], Tensor], wanted: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Pairs (the model's name, tensor), one unit at a time.

        Args:
            take: returns a tensor of the checkpoint by its checkpoint name.
            wanted: the model's names of the tensors to return; None: all. Tensors that are merged
                from several tensors, or split, are always returned.
        """
        for key, sources in self._sources.items():
            (first, pattern), *others = sources
            if pattern is None and not others:
                if wanted is None or key in wanted:
                    yield key, take(first)
                continue
            yield from self._converted(key, sources, take).items()

    def _converted(
        self, key: str, sources: Sequence[tuple[str, str | None]], take: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        pattern = next(pattern for _, pattern in sources if pattern is not None)
        converter = deepcopy(self._converters[pattern])
        for name, pattern in sources:
            assert pattern is not None, f"{name} is stored as well as the sources of {key}"
            converter.add_tensor(key, name, pattern, take(name))  # pyright: ignore[reportArgumentType] - tensors are taken as well as futures
        made = converter.convert(key, model=self._model, config=self._model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


def ignored_names(
    model: PreTrainedModel, stored: Collection[str], exported: Collection[str]
) -> list[str]:
    """Names of a checkpoint's tensors that the model's class ignores, such as multi-token
    prediction (MTP) layers.

    Those are the tensors that match the class's own patterns, and those of the
    `num_nextn_predict_layers` layers after the last layer: the patterns of a class name such a
    layer only for the published model size.
    """
    config = model.config.get_text_config()
    ahead = getattr(config, "num_nextn_predict_layers", None) or 0
    layers = range(config.num_hidden_layers, config.num_hidden_layers + ahead)
    patterns = [
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *(rf"(^|\.)layers\.{layer}\." for layer in layers),
    ]
    known = set(exported)
    return [
        name
        for name in stored
        if name not in known and any(re.search(pattern, name) for pattern in patterns)
    ]


def exact_names(
    model: PreTrainedModel, units: Sequence[ConversionUnit], stored: Mapping[str, TensorLayout]
) -> frozenset[str]:
    """Checkpoint names of tensors that stay in float32 when weights are rounded to less.

    These are the tensors that the model's class keeps in float32, those of routers (a rounded
    router chooses other experts; SGLang keeps routers of several architectures in float32), and
    those that a checkpoint of lower precision stores in float32.
    """
    patterns = model._keep_in_fp32_modules_strict or ()
    routers = {
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        if _ROUTER in type(module).__name__
        for name in module.state_dict()
    }
    exact = set()
    for unit in units:
        for name in unit.names:
            if name in routers or any(re.search(pattern, name) for pattern in patterns):
                exact |= unit.stored.keys()
    sizes: dict[str, int] = defaultdict(int)
    for layout in stored.values():
        sizes[layout.dtype] += layout.nbytes
    if sizes and max(sizes, key=lambda dtype: sizes[dtype]) != "float32":
        exact |= {name for name, layout in stored.items() if layout.dtype == "float32"}
    return frozenset(exact)


def _conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Conversions used to load the model, as `revert_weight_conversion` finds them."""
    noted = getattr(model, "_weight_conversions", None)
    if noted is not None:
        return noted
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in conversions if not isinstance(each, PrefixChange)]


def _targets(
    model: PreTrainedModel, conversions: Sequence[WeightTransform], names: Collection[str]
) -> Iterator[tuple[str, str | None, str | None]]:
    """Match a checkpoint's tensors with those of the model, as loading does.

    Yields:
        The name in the checkpoint, the name in the model or None, and the pattern of the converter
        between them or None.
    """
    renamings, converters = _by_kind(conversions)
    own, prefix = model.state_dict(), model.base_model_prefix
    for name in sorted(names, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if key not in own and name in own:
            key, pattern = rename_source_key(name, [], [], prefix, own)
        yield (name, key, pattern) if key in own else (name, None, None)


def _by_kind(
    conversions: Sequence[WeightTransform],
) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    return renamings, [each for each in conversions if isinstance(each, WeightConverter)]
