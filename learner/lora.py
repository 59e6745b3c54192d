"""LoRA through peft: train a low-rank change of chosen Linears, and freeze all other weights.

    W' = W + scale B A,   A (rank, in),  B (out, rank), zero at first,  scale = alpha / rank

(Hu et al. 2021, arXiv:2106.09685, section 4.1.) peft inserts its layers into the given model:

    check_lora(settings, base)                      every check, without loading weights
    model = load_causal_lm(base, ...)
    lora = add_lora(model, settings)                before other code inspects the model's modules
    Forward(model)                                  the model, not peft's wrapper of it
    with adapter_off(lora): ...                     the base: a reference without extra memory
    plain_weights(model)                            W', under the base's names (`learner.export`)
    served_form(lora)                               for servers that compute the adapter themselves
    save_adapter(path, lora, adapter_tensors(lora)) in peft's format; read by `lora.adapter=path`
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils.constants import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from distill.errors import CheckpointError, ConfigError
from distill.lookup import known_names
from distill.models.loading import meta_causal_lm, reading, tensor_shapes
from distill.weights.adapter import AdapterForm
from learner.config import ALL_LINEAR, LoraSettings
from learner.sharding import whole

logger = logging.getLogger(__name__)

# peft's default name of an adapter. A learner has only one adapter.
ADAPTER = "default"

# Models whose adapters SGLang serves exactly (tests/actors/test_sglang_adapters.py), and modules
# that SGLang fuses and serves only together. It fills in a k_proj without an adapter.
_SERVED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SERVED_TARGETS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("o_proj",),
    ("down_proj",),
)

# Fields of an adapter's config that determine W',
_READ = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
)
# and fields that do not affect W'. All other fields must be off: they would not be merged.
_PASSED_OVER = (
    *("peft_type", "peft_version", "task_type", "auto_mapping", "inference_mode"),
    *("base_model_name_or_path", "revision", "lora_dropout"),
)


def check_lora(settings: LoraSettings, base: str) -> float:
    """Run the checks of `add_lora` without weights; return the share of weights that are adapted.

    Raises:
        CheckpointError: there is no model config at `base`, or no readable adapter.
        ConfigError: the settings, or the adapter, do not fit the model.
    """
    model = meta_causal_lm(base)
    total = sum(weight.numel() for weight in model.parameters())
    experts = sum(weight.numel() for weight in model.parameters() if weight.ndim > 2)
    lora = _inject(model, settings)
    layers = adapted_layers(lora.get_base_model()).values()
    adapted = [layer.get_base_layer().get_parameter("weight") for layer in layers]
    share = sum(weight.numel() for weight in adapted) / total
    if experts / total > 0.5:
        logger.warning(
            "the adapter changes %.1f %% of the weights of %s: the experts of a mixture, %.0f "
            "%%, are not nn.Linear modules and are not trained",
            100 * share,
            base,
            100 * experts / total,
        )
    return share


def check_same_form(settings: LoraSettings, base: str, adapter: str) -> None:
    """Check that the adapter of the settings has the same form as a saved one.

    Raises:
        ConfigError: rank, alpha or targets differ, or the adapter does not fit the base.
        CheckpointError: there is no readable adapter.
    """
    saved, _ = _adapter_fields(adapter)
    lora = _inject(meta_causal_lm(base), settings)
    ours: Any = lora.peft_config[ADAPTER]
    of = f"lora.adapter={settings.adapter}" if settings.adapter else "this run"
    for setting, field in (("lora.rank", "r"), ("lora.alpha", "lora_alpha")):
        if (there := saved.get(field)) != (here := getattr(ours, field)):
            raise ConfigError(
                f"{setting} is {here:g} in {of}, and {there:g} in the adapter of {adapter}; give "
                f"{setting}={there:g}",
                field=setting,
            )
    if differs := _other_shape(lora, adapter):
        raise ConfigError(
            f"lora.targets={settings.targets} in {of} differs from the adapter of {adapter}: "
            f"{differs}; give the adapter's lora.targets= "
            f"({', '.join(sorted(saved['target_modules']))})"
        )


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """Insert an adapter into `model`, and freeze its other weights; return peft's wrapper.

    The adapter is always float32. A new one is drawn from torch's generator, and B = 0.

    Raises:
        CheckpointError: the adapter to start from cannot be read.
        ConfigError: the adapter, or the settings, do not fit the model.
    """
    lora = _inject(model, settings)
    if settings.adapter is not None:
        file = Path(settings.adapter) / SAFETENSORS_WEIGHTS_NAME
        with reading(file):
            tensors = load_file(file)
        set_peft_model_state_dict(lora, tensors)
    return lora


@lru_cache(maxsize=8)  # called by the plan, and for each server
def served_adapter(settings: LoraSettings, base: str) -> AdapterForm:
    """`served_form` of the adapter of these settings, without loading weights.

    Raises:
        ConfigError: as `served_form`.
        CheckpointError: there is no model config at `base`, or no readable adapter.
    """
    return served_form(_inject(meta_causal_lm(base), settings))


def served_form(lora: PeftModel) -> AdapterForm:
    """Form in which SGLang computes the adapter in addition to the base, not merged into it.

    Raises:
        ConfigError: SGLang has no such form of this adapter, or may not serve it exactly.
    """
    model = lora.get_base_model()
    if why := _unservable(model):
        raise not_served(why)
    layers = adapted_layers(model)
    layer = next(iter(layers.values()))
    return AdapterForm(
        rank=layer.r[ADAPTER],
        alpha=layer.r[ADAPTER] * layer.scaling[ADAPTER],
        targets=tuple(sorted({_last(name) for name in layers})),
        parameters=sum(weight.numel() for weight in lora.parameters() if weight.requires_grad),
    )


def not_served(why: str) -> ConfigError:
    """Error for weights=adapter if servers cannot compute the adapter."""
    return ConfigError(f"weights=adapter: {why}; or use weights=auto", field="weights.transport")


def _unservable(model: nn.Module) -> str:
    """Reason why SGLang cannot serve the adapter in `model`; empty if it can."""
    config: Any = model.config
    if (family := config.model_type) not in _SERVED_FAMILIES:
        return (
            f"SGLang has been verified to serve adapters of {', '.join(_SERVED_FAMILIES)}, and "
            f"this model is of type {family}"
        )
    layers = adapted_layers(model)
    targets = left = {_last(name) for name in layers}
    for together in _SERVED_TARGETS:
        if some := left & set(together):
            left = left - some
            if missing := set(together) - some - {"k_proj"}:
                return (
                    f"SGLang serves {', '.join(sorted(some))} only together with "
                    f"{', '.join(sorted(missing))}"
                )
    if left:
        return f"SGLang's names of modules do not include {', '.join(sorted(left))}"
    for name, module in model.named_modules():
        if _last(name) in targets and isinstance(module, nn.Linear):
            return f"{name} has no adapter, as other layers' {_last(name)} have"
    if len({(layer.r[ADAPTER], layer.scaling[ADAPTER]) for layer in layers.values()}) > 1:
        return "its layers have several ranks or scales, and SGLang supports one of each"
    return ""


def _last(name: str) -> str:
    return name.rpartition(".")[2]


@contextmanager
def adapter_off(lora: PeftModel) -> Iterator[None]:
    """Context manager in which the model is exactly its base.

    Run no outer pass's backward in it: layers that recompute activations would lack the adapter.
    """
    trained = [parameter for parameter in lora.parameters() if parameter.requires_grad]
    with lora.disable_adapter():
        # peft also freezes the adapter. FSDP would record that for good in its first forward pass.
        for parameter in trained:
            parameter.requires_grad_(True)
        yield


def adapter_tensors(lora: PeftModel) -> dict[str, Tensor]:
    """The adapter's current tensors by peft's names. The next step changes them.

    If the model is sharded, this is a collective, and every rank gets whole tensors.
    """
    named = get_peft_model_state_dict(lora, adapter_name=ADAPTER, save_embedding_layers=False)
    return {name: whole(tensor.detach()) for name, tensor in named.items()}


def save_adapter(path: str | Path, lora: PeftModel, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and config for `PeftModel.from_pretrained(base, path)`. Not a collective."""
    Path(path).mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, Path(path) / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    config: Any = copy(lora.peft_config[ADAPTER])
    config.inference_mode = True  # loading the adapter freezes it by default
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(path))


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Layers with an adapter, by the names of their Linears in the model without the adapter."""
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, LoraLayer)}


def _inject(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """`add_lora` without loading the values of an adapter. The model may be on the meta device."""
    if settings.adapter is None:
        source, made_for = f"lora.targets={settings.targets or ALL_LINEAR}", None
        fields = _fresh(settings, model)
    else:
        source = f"lora.adapter={settings.adapter}"
        fields, made_for = _adapter_fields(settings.adapter)
    try:
        config = LoraConfig(lora_dropout=0.0, task_type="CAUSAL_LM", **fields)
        lora = get_peft_model(
            model, config, adapter_name=ADAPTER, low_cpu_mem_usage=model.device.type == "meta"
        )
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        hint = f" It was made for {made_for!r}" if made_for else ""
        raise ConfigError(
            f"{source} does not fit {model.name_or_path!r}: {error}.{hint}", field="lora.targets"
        ) from error
    owners = Counter(map(id, model.state_dict(keep_vars=True).values()))
    for name, layer in adapted_layers(model).items():
        if isinstance(layer, ParamWrapper):
            raise ConfigError(
                f"{source} names experts of {name}, whose weights are not in nn.Linear modules; "
                "only nn.Linear modules can be adapted. Leave those names out, or leave out "
                "lora.targets",
                field="lora.targets",
            )
        if not isinstance(layer.base_layer, nn.Linear):
            raise ConfigError(
                f"{source} adapts {name}, which is of type {type(layer.base_layer).__name__}; "
                "only nn.Linear modules can be adapted",
                field="lora.targets",
            )
        if owners[id(layer.base_layer.weight)] > 1:
            raise ConfigError(
                f"{source} adapts {name}, whose weight is tied to another's: merging the adapter "
                "into one would change both. Leave it out of the targets",
                field="lora.targets",
            )
    if settings.adapter is not None:
        _check_shapes(lora, settings.adapter, made_for)
    return lora


def _fresh(settings: LoraSettings, model: PreTrainedModel) -> dict[str, Any]:
    """LoraConfig's fields of a new adapter. Raise ConfigError if they do not fit the model."""
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = model.get_output_embeddings()
    adaptable = {name for name in linears if model.get_submodule(name) is not head}
    if not adaptable:
        raise ConfigError(
            f"{model.name_or_path!r} has no nn.Linear module to adapt", field="lora.rank"
        )
    # Servers identify modules by the last part of their names.
    known = sorted({_last(name) for name in adaptable})
    if settings.targets in (None, ALL_LINEAR):
        targets = _without_experts(known, model)
    else:
        targets = [target.strip() for target in settings.targets.split(",")]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in linears):
            raise ConfigError(
                f"lora.targets={settings.targets}: no Linear of {model.name_or_path!r} is "
                f"named {target!r}; {known_names(target, known)}"
            )
    assert settings.rank is not None
    if settings.rank > (width := model.config.get_text_config().hidden_size):
        raise ConfigError(
            f"lora.rank={settings.rank} must be at most {width}, the width of "
            f"{model.name_or_path!r}: no change of its matrices has a higher rank"
        )
    alpha = 2 * settings.rank if settings.alpha is None else settings.alpha
    return {"r": settings.rank, "lora_alpha": alpha, "target_modules": targets}


def _without_experts(names: Sequence[str], model: PreTrainedModel) -> list[str]:
    """The names that peft does not map to the experts of a mixture.

    In some architectures the Linears of a shared expert have the names that the experts had before
    their weights became one parameter. peft replaces such names with that parameter.
    """
    probe = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(probe, model, None)
    assert probe.target_modules is not None
    return sorted(probe.target_modules)


def _adapter_fields(path: str) -> tuple[dict[str, Any], str | None]:
    """LoraConfig's fields of a saved plain LoRA adapter, and the name of its base."""
    file = Path(path) / CONFIG_NAME
    try:
        saved = json.loads(file.read_text())
        kind = saved.get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"cannot read {file}: {error}. lora.adapter= is a directory in which peft saved an "
            "adapter"
        ) from error
    if kind != "LORA":
        raise ConfigError(
            f"{file}: peft_type={kind!r}; only LORA can be trained",
            field="lora.adapter",
        )
    if saved.get("init_lora_weights") == "gaussian":  # only affects how A was drawn
        del saved["init_lora_weights"]
    defaults = LoraConfig().to_dict()
    for name in sorted(saved.keys() - {*_READ, *_PASSED_OVER}):
        if saved[name] and saved[name] != defaults.get(name):
            raise ConfigError(
                f"{file}: {name}={saved[name]!r}; only plain LoRA can be merged, W + scale B A "
                "of nn.Linear modules. Merge this adapter into its base and start from that",
                field="lora.adapter",
            )
    fields = {name: saved[name] for name in _READ if name in saved}
    return fields, saved.get("base_model_name_or_path")


def _check_shapes(lora: PeftModel, path: str, made_for: str | None) -> None:
    """Raise ConfigError if the saved adapter has other tensors or shapes than the model."""
    if not (Path(path) / SAFETENSORS_WEIGHTS_NAME).is_file():
        raise CheckpointError(
            f"lora.adapter={path} has no {SAFETENSORS_WEIGHTS_NAME}; other formats are not read. "
            "Load it with peft and save it again (safe_serialization=True)"
        )
    if differs := _other_shape(lora, path):
        raise ConfigError(
            f"lora.adapter={path} does not fit {lora.get_base_model().name_or_path!r}: {differs}. "
            f"It was made for {made_for!r}; train that model, or leave it out"
        )


def _other_shape(lora: PeftModel, path: str) -> str:
    """Message about the first tensor whose shape in the saved adapter differs; "" if none does."""
    saved = tensor_shapes(path)
    made = {name: tuple(tensor.shape) for name, tensor in adapter_tensors(lora).items()}
    for name in [*made, *saved]:
        if saved.get(name) != made.get(name):
            return (
                f"{name} has shape {saved.get(name, 'none')} in the saved adapter and "
                f"{made.get(name, 'none')} in the model"
            )
    return ""
