"""Random twins of models: tiny models with the family, vocabulary and context of a checkpoint.

The code paths of a run depend on a model's family (names and layouts of tensors, attention,
routers, tied heads, stop tokens) and on its vocabulary, but not on the quality of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig
from transformers.modeling_utils import PreTrainedModel

from distill.errors import CheckpointError, first_line
from distill.models.loading import MAKING, load_config, vocab_size
from distill.models.model_files import ModelFiles, generation_settings
from distill.tokenizer import load_tokenizer

# Sizes by their names in configs; a config keeps a size that is smaller already. Kernels of servers
# support a head dimension of 64, and some assume that it is hidden_size / number of heads.
_SIZES: Mapping[str, int] = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "head_dim": 64,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "num_nextn_predict_layers": 0, "max_window_layers": 2,
}  # fmt: skip
_LAYERS = 2
_VISION = {"num_hidden_layers": 1, "depth": 1}
# Factors of the head's weights. Logits of a newly initialised model are nearly equal, so any
# temperature would pass a check. A tied head is the input embedding: scaled by 10, only the logit
# of the last token itself would be large, and that token would be repeated at any temperature.
_SHARPNESS, _TIED_SHARPNESS = 10.0, 2.0
# Most parameters of a twin, without embeddings; with more, its config was not shrunk successfully.
LARGEST = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """Twin on disk.

    Attributes:
        path: directory of the twin.
        description: description of the twin and its original, to print.
    """

    path: str
    description: str


def save_twin(source: str, target: Path, *, seed: int, reward: bool = False) -> Twin:
    """Write a random twin of the checkpoint at `source`, with its tokenizer, to `target`.

    Args:
        reward: True for a reward model, which has a scalar head in place of the vocabulary's.

    Raises:
        CheckpointError: no small model of this family can be built; nothing was written.
    """
    config = load_config(source)
    small = shrunken(config)
    auto: Any = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    try:
        with MAKING, torch.device("meta"):
            planned = auto.from_config(small, dtype=torch.float32, trust_remote_code=False)
        _check_size(planned)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto.from_config(small, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # a custom config may fail in any way
        raise CheckpointError(
            f"{source!r} cannot be rehearsed: no small {config.model_type} can be built from its "
            f"config ({first_line(error)}); rehearse with a model of another family, or start "
            "with a few steps of the real run"
        ) from error
    head = model.get_output_embeddings()
    if head is not None:
        tied = head.weight is model.get_input_embeddings().weight
        with torch.no_grad():
            head.weight.mul_(_TIED_SHARPNESS if tied else _SHARPNESS)
    generation = generation_settings(source) if model.can_generate() else None
    model.generation_config = GenerationConfig()  # saving may refuse the model's own
    model.save_pretrained(target)
    files = ModelFiles(config=model.config, generation=generation, origin=source)
    files.write(target, load_tokenizer(source))
    return Twin(path=str(target), description=_describe(config, model))


def shrunken(config: Any) -> Any:
    """Copy of the config with `_SIZES`, and one layer of each kind, at least two layers in all."""
    small = deepcopy(config)
    text = small.get_text_config()
    layers = _shrink_layers(text)
    heads, grouped = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    for name, size in _SIZES.items():
        if isinstance(was := getattr(text, name, None), int) and was > size:
            setattr(text, name, size)
    if grouped is not None:
        text.num_key_value_heads = text.num_attention_heads if grouped == heads else 1
    if getattr(text, "mlp_only_layers", None):
        text.mlp_only_layers = [layer for layer in text.mlp_only_layers if layer < layers]
    vision = getattr(small, "vision_config", None)
    for name, size in _VISION.items():
        if vision is not None and hasattr(vision, name):
            setattr(vision, name, size)
    small.dtype = text.dtype = "float32"
    return small


def _shrink_layers(text: Any) -> int:
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        text.num_hidden_layers = min(_LAYERS, text.num_hidden_layers)
        return text.num_hidden_layers
    kept = list(dict.fromkeys(kinds))
    kept += kinds[: max(0, min(_LAYERS, len(kinds)) - len(kept))]
    text.num_hidden_layers, text.layer_types = len(kept), kept
    return len(kept)


def _check_size(model: PreTrainedModel) -> None:
    embeddings = {id(model.get_input_embeddings().weight)}
    if (head := model.get_output_embeddings()) is not None:
        embeddings.add(id(head.weight))
    size = sum(each.numel() for each in model.parameters() if id(each) not in embeddings)
    if size > LARGEST:
        raise ValueError(f"it still has {size / 1e6:.0f} M parameters besides its embeddings")


def _describe(config: Any, model: PreTrainedModel) -> str:
    was, now = config.get_text_config(), model.config.get_text_config()
    millions = sum(each.numel() for each in model.parameters()) / 1e6
    return (
        f"{type(model).__name__}: {now.num_hidden_layers} layers of {was.num_hidden_layers}, "
        f"hidden {now.hidden_size} of {was.hidden_size}, whole vocabulary of "
        f"{vocab_size(config):,}: {millions:.1f} M random parameters"
    )
