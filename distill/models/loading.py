"""Causal language models: loading, configs, checkpoint tensors, and small random models."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.core_model_loading import build_glob_alternation
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.hub import cached_file

from distill.errors import CheckpointError, ConfigError, first_line
from distill.lookup import path_meant
from distill.main_memory import require_main_memory
from distill.model_paths import check_model_path, checkpoints_within
from distill.types import Tokenizer
from distill.weights.model_weights import TensorLayout

# Per-tensor progress bars of loading and saving would fill a log that several actors share.
transformers.utils.logging.disable_progress_bar()

# torch's names of the dtypes in safetensors files.
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I8": "int8", "U8": "uint8", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "BOOL": "bool",
}  # fmt: skip

# transformers replaces functions of torch while it builds a model, so only one thread may do so.
MAKING = threading.Lock()


def load_config(path: str) -> Any:
    """Load the checkpoint's Hugging Face config, without reading weights.

    Raises:
        CheckpointError: there is no readable config at `path`.
    """
    check_model_path(path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, and transformers' errors of malformed fields
        raise CheckpointError(
            f"cannot read a model config from {path!r}: {first_line(error).rstrip('.')}. Give a "
            f"Hugging Face checkpoint directory, or a hub name this machine can reach"
            f"{checkpoints_within(path)}{path_meant(path, '*/')}"
        ) from error


def exact_attention(config: Any) -> str | None:
    """transformers' attention implementation that honours the whole config; None: the default.

    The default, sdpa, ignores a soft cap on attention scores (Gemma-2, VaultGemma).
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped else None


def load_causal_lm(path: str, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Load a model's weights and config, without running code from the checkpoint.

    Raises:
        CheckpointError: missing, corrupt or incomplete weights.
        ConfigError: the model does not fit into main memory, through which all weights pass.
    """
    if weight_files(path):
        parameters = sum(map(prod, tensor_shapes(path).values()))
        require_main_memory(parameters * dtype.itemsize, f"loading {path} whole")
    model = load_complete(AutoModelForCausalLM, path, dtype=dtype)
    if any(
        model.get_parameter(head) is not model.get_parameter(embedding)
        for head, embedding in _declared_ties(model).items()
    ):
        _untie(model.config)
    return cast(PreTrainedModel, model.to(device))


def load_complete(auto: Any, path: str, fresh: Collection[str] = (), **settings: Any) -> Any:
    """Load a checkpoint by an auto class of transformers. Only tensors of `fresh` may be missing.

    Raises:
        CheckpointError: missing, corrupt or incomplete weights.
    """
    attention = exact_attention(load_config(path))
    try:
        with MAKING:
            model, report = auto.from_pretrained(
                path,
                attn_implementation=attention,
                trust_remote_code=False,
                output_loading_info=True,
                **settings,
            )
    except Exception as error:  # corrupt files raise many types of errors
        raise CheckpointError(f"cannot load weights from {path!r}: {first_line(error)}") from error
    require_complete(model, path, set(report["missing_keys"]).difference(fresh))
    return model


def require_complete(model: PreTrainedModel, path: str, missing: Collection[str]) -> None:
    """Raise CheckpointError if tensors are missing that the model's class requires."""
    excused = model._keys_to_ignore_on_load_missing or ()
    lacking = sorted(n for n in missing if not any(re.search(pattern, n) for pattern in excused))
    if lacking:
        raise CheckpointError(
            f"{path!r} lacks {len(lacking)} of the model's tensors, {lacking[0]!r} first; they "
            "would be random. Copy the checkpoint again, or save it completely"
        )


def _declared_ties(model: Any) -> dict[str, str]:
    """Tensors that the model's config ties: name of one -> name of the other."""
    return model.get_expanded_tied_weights_keys(all_submodels=True)


def _untie(config: Any) -> None:
    for each in (config, config.get_text_config()):
        each.tie_word_embeddings = False


def own_head(model: PreTrainedModel, path: str) -> str | None:
    """Name of a tensor that the model's config ties to another, although their values differ.

    In this case transformers loads both tensors from `path` and leaves them untied, while servers
    follow the config. None if there is no such tensor.
    """
    ties = _declared_ties(model)
    there = tensor_shapes(path) if ties and weight_files(path) else {}
    for pair in ties.items():
        if there.keys() >= set(pair):
            head, embedding = read_tensors(path, pair).values()
            if not torch.equal(head, embedding):
                return pair[0]
    return None


def meta_causal_lm(path: str, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build the checkpoint's model on the meta device, with names and shapes but without values.

    Embedding and head are tied as in `load_causal_lm`: by the config, unless the checkpoint has a
    head with other values.

    Raises:
        CheckpointError: there is no config of a causal language model at `path`.
    """
    config = load_config(path)
    model = _on_meta(config, path, dtype)
    if own_head(model, path) is None:
        return model
    _untie(config)
    return _on_meta(config, path, dtype)


def _on_meta(config: Any, path: str, dtype: torch.dtype | None) -> PreTrainedModel:
    config.name_or_path = path  # as loading sets it, also for a text model within another
    try:
        with MAKING, torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=exact_attention(config),
                trust_remote_code=False,
            )
    except Exception as error:  # a custom config may fail in any way
        raise CheckpointError(f"{path!r} is not a causal language model: {error}") from error
    _keep_exact(model, dtype)
    return model


def _keep_exact(model: Any, dtype: torch.dtype | None) -> None:
    """Convert to float32 the tensors that loading keeps in float32, such as biases of routers."""
    plan = {} if dtype is None else model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, *_ = build_glob_alternation(list(plan))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and pattern.search(name):
            tensor.data = tensor.data.float()


def check_served_ties(role: str, path: str) -> None:
    """Raise ConfigError for a checkpoint that SGLang would serve without its own head."""
    config = load_config(path)
    if head := own_head(_on_meta(config, path, None), path):
        raise ConfigError(
            f"{role}={path}: config.json has tie_word_embeddings=true, but {head} differs from "
            "the embedding, which SGLang would use instead. Set "
            '"tie_word_embeddings": false in that file, or use engine=embedded'
        )


def new_qwen3(
    *,
    vocab_size: int,
    hidden_size: int,
    layers: int,
    heads: int,
    context_length: int,
    eos_token_id: int,
    pad_token_id: int | None,
    seed: int,
) -> Qwen3ForCausalLM:
    """Build a randomly initialised Qwen3 model (head_dim 64, tied embeddings) in fp32.

    Raises:
        ConfigError: the hidden size is not a multiple of 32, as kernels of servers require.
    """
    if hidden_size % 32:
        raise ConfigError(f"hidden_size={hidden_size} must be a multiple of 32")
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=64,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def stop_token_ids(path: str) -> frozenset[int]:
    """Ids that end a generation: those of the generation config, else those of the model config.

    Ids outside the vocabulary, which no model can sample, are left out.

    Raises:
        CheckpointError: a config at `path` cannot be read.
    """
    config = load_config(path).get_text_config()
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a checkpoint may have no generation config
        ids = None
    except ValueError as error:
        raise CheckpointError(
            f"transformers refuses {path}/generation_config.json: {first_line(error)}. Correct it"
        ) from error
    ids = config.eos_token_id if ids is None else ids
    listed = [] if ids is None else [ids] if isinstance(ids, int) else ids
    return frozenset(id_ for id_ in listed if 0 <= id_ < vocab_size(config))


def ends_of(path: str, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids at which servers end a response: those of the checkpoint's configs, and the EOS token.

    Raises:
        CheckpointError: there is no readable config at `path`.
    """
    eos: Any = tokenizer.eos_token_id
    return stop_token_ids(path) | (frozenset() if eos is None else {eos})


@contextmanager
def reading(file: str | Path) -> Iterator[None]:
    """Context for reading a safetensors file. Raises CheckpointError if reading fails."""
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{file} is corrupt or truncated: {first_line(error)}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {first_line(error)}") from error
    except (MemoryError, RuntimeError) as error:  # RuntimeError: from torch, which maps files
        raise CheckpointError(
            f"cannot read {file} into memory: {first_line(error)}. Give this machine more memory, "
            "or save the model in several files (`save_pretrained(max_shard_size='5GB')`)"
        ) from error


def tensor_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors. Raises the same errors as `tensor_layouts`."""
    return {name: layout.shape for name, layout in tensor_layouts(path).items()}


def tensor_layouts(path: str) -> dict[str, TensorLayout]:
    """Layouts of a checkpoint's tensors by name, from the headers of its safetensors files.

    Raises:
        CheckpointError: there are no such files at `path`, or one cannot be read.
    """
    layouts: dict[str, TensorLayout] = {}
    for file in _some_weight_files(path):
        # With "pt", torch would map the whole file, which may fail for lack of memory.
        with reading(file), safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                part = tensors.get_slice(name)
                dtype = str(part.get_dtype())
                layouts[name] = TensorLayout(
                    name=name, dtype=_DTYPES.get(dtype, dtype), shape=tuple(part.get_shape())
                )
    return layouts


def read_tensors(path: str, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Read the named tensors of a checkpoint. Raises the same errors as `tensor_layouts`."""
    with opened(path) as take:
        return {name: take(name) for name in names}


@contextmanager
def opened(path: str) -> Iterator[Callable[[str], torch.Tensor]]:
    """Open a checkpoint's files; the context's value is a function that reads a tensor by name.

    The function keeps no reference to a tensor. Raises the same errors as `tensor_layouts`.
    """
    with ExitStack() as files:
        found: dict[str, tuple[Path, Any]] = {}
        for file in _some_weight_files(path):
            with reading(file):
                # With "mmap", pages count as this process's memory until the file is closed.
                tensors = files.enter_context(safe_open(file, framework="pt", backend="pread"))
                found |= dict.fromkeys(tensors.keys(), (file, tensors))

        def take(name: str) -> torch.Tensor:
            file, tensors = found[name]
            with reading(file):
                return tensors.get_tensor(name)

        yield take


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint's safetensors files, unchanged.

    Raises:
        CheckpointError: there are no such files at `path`, or one cannot be read.
    """
    return read_tensors(path, tensor_layouts(path))


def weight_files(path: str) -> list[Path]:
    """Safetensors files of a checkpoint, sorted; for a hub name, those in this machine's cache."""
    directory = _directory(path)
    return [] if directory is None else sorted(directory.glob("*.safetensors"))


def processor_files(path: str) -> list[Path]:
    """Files that configure a multimodal checkpoint's processors; located as by `weight_files`."""
    directory = _directory(path)
    return [] if directory is None else sorted(directory.glob("*processor_config.json"))


def _directory(path: str) -> Path | None:
    """Directory of a checkpoint's files; for a hub name, the one in this machine's cache.

    None if the name is invalid, or the checkpoint was never downloaded to this machine.
    """
    if Path(path).exists():
        return Path(path)
    try:
        found = cached_file(path, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent


def _some_weight_files(path: str) -> list[Path]:
    if files := weight_files(path):
        return files
    where = "has" if Path(path).exists() else "is not a directory, and the hub's cache has"
    raise CheckpointError(f"{path} {where} no safetensors file")


def context_length(config: Any) -> int:
    """Number of positions that the model supports with scores that do not depend on the batch.

    Raises:
        CheckpointError: the config does not declare a length.
    """
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise CheckpointError(f"{config.model_type} config has no max_position_embeddings")
    return min(int(length), rope_length(config) or int(length))


def rope_length(config: Any) -> int | None:
    """Number of positions up to which rotary frequencies do not depend on a batch's longest row.

    None if the frequencies never depend on it. Beyond this length, `longrope` and `dynamic` rotate
    every row of a batch by the frequencies of the longest row, while cached keys were rotated by
    the frequencies of a shorter row. SGLang's longrope does the same.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    # One entry for all layers, or one per kind of layer.
    by_layer = [ropes] if "rope_type" in ropes else list(ropes.values())
    lengths = [
        rope["original_max_position_embeddings"]
        if rope["rope_type"] == "longrope"
        else text.max_position_embeddings
        for rope in by_layer
        if isinstance(rope, dict)
        and (rope.get("rope_type") == "longrope" or "dynamic" in rope.get("rope_type", ""))
    ]
    return min(map(int, lengths), default=None)


def vocab_size(config: Any) -> int:
    """Width of the vocabulary projection, which may exceed the tokenizer's length (padding)."""
    return int(config.get_text_config().vocab_size)


def silence(layer: torch.nn.Module) -> None:
    """Set the dropout and jitter attributes of a module, which its forward pass reads, to 0."""
    for name, value in vars(layer).items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(layer, name, 0.0)


def resolve_device(device: str) -> str:
    """Name of the device; `auto` is the first CUDA device if there is one, else the CPU.

    Raises:
        ConfigError: torch has no device of that name.
    """
    if device != "auto":
        try:
            torch.device(device)
        except RuntimeError:
            raise ConfigError(f"device={device} is unknown; use auto, cpu or cuda") from None
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
