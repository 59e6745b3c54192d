"""Names under which weights leave the learner: those of the checkpoint that it started from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from distill.errors import ConfigError
from distill.models.loading import meta_causal_lm, tensor_shapes, weight_files
from learner.sharding import stored


def check_export(
    path: str,
    meta_model: Callable[[str], PreTrainedModel] = meta_causal_lm,
    fresh: Collection[str] = (),
) -> None:
    """Refuses a model whose weights would be pushed and saved under names that no server reads.

    transformers renames, fuses and splits some checkpoints' tensors as it loads them (the experts
    of a mixture, the parts of a multimodal model), and the learner has its tensors as they are in
    memory. A checkpoint whose headers cannot be read here passes: pytorch_model.bin, or a hub name
    that nobody has loaded on this machine.

    Args:
        meta_model: makes the model that is trained, without its values.
        fresh: names of tensors that the checkpoint need not have.

    Raises:
        CheckpointError: there is no such model at `path`.
        ConfigError: with the first tensor that differs on either side.
    """
    if not weight_files(path):
        return
    model = meta_model(path)
    here = {name: tuple(tensor.shape) for name, tensor in stored(model) if name not in fresh}
    there = tensor_shapes(path)
    aliases = _tied_names(model)
    # A checkpoint of the base model alone has its names without this, and servers read either.
    prefix = f"{model.base_model_prefix}."
    for name, shape in here.items():
        known = [*aliases[name], name.removeprefix(prefix)]
        if not any(there.get(alias) == shape for alias in known):
            raise ConfigError(_explain(path, model, name, shape, there))


def _tied_names(model: Any) -> dict[str, list[str]]:
    """Every name of each tensor that is stored under one of them, by that one."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[id(tensor)].append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def _explain(
    path: str, model: Any, name: str, shape: tuple[int, ...], there: dict[str, tuple[int, ...]]
) -> str:
    own = model.state_dict().keys()
    other = next((other for other in there if other not in own), None)
    counterpart = name if name in there else other
    what = "nothing else" if counterpart is None else f"{counterpart} {there[counterpart]}"
    return (
        f"{path} cannot be trained: its weights would leave under names or shapes that servers do "
        f"not read. In memory {type(model).__name__} has {name} {shape}, where the checkpoint has "
        f"{what}. Mixtures of experts and multimodal classes are not exported yet: train a dense "
        "text model (Gemma3ForCausalLM, say); as a teacher or a reference this one can be used"
    )
