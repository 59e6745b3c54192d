"""Tiny checkpoints of families that differ in what they store, attend to and route.

They are written by `save_pretrained` in the published layout, with the experts of a mixture one by
one. A multi-token prediction (MTP) layer, which transformers skips, is added here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from tests.tiny import EOS, PAD, VOCAB_SIZE, save_tokenizer

# Of sizes that SGLang's kernels take on a CPU: hidden sizes in multiples of 32, heads of 64.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": EOS, "dtype": "float32",
}  # fmt: skip
_HEADS: dict[str, Any] = {"head_dim": 64}
_WINDOWS: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_DEEPSEEK: dict[str, Any] = SIZES | {
    "num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
MTP_LAYER = 3
# SGLang takes the size of a head to be what the hidden one gives.
_MIXTRAL: dict[str, Any] = SIZES | {
    "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "truncate": False,
    "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture at a tiny size.

    Attributes:
        fused: its tensors have other names or shapes than in its checkpoints.
        sharpness: of the final norm; about 12 makes log-probs differ by a few nats.
    """

    config: Callable[[], PretrainedConfig]
    fused: bool = False
    sharpness: float = 12.0


FAMILIES: dict[str, Family] = {
    "llama": Family(config=lambda: LlamaConfig(**SIZES, **_HEADS, tie_word_embeddings=False)),
    "llama_tied": Family(config=lambda: LlamaConfig(**SIZES, **_HEADS, tie_word_embeddings=True)),
    "gemma2": Family(config=lambda: Gemma2Config(**SIZES, **_HEADS, **_WINDOWS)),
    "gemma3": Family(config=lambda: Gemma3TextConfig(**SIZES, **_HEADS, **_WINDOWS)),
    "gemma3_multimodal": Family(
        config=lambda: Gemma3Config(
            text_config=SIZES | _HEADS | _WINDOWS,
            vision_config=_VISION,
            mm_tokens_per_image=4,
            dtype="float32",
        ),
        fused=True,
    ),
    "qwen3_moe": Family(
        config=lambda: Qwen3MoeConfig(
            **SIZES, **_HEADS, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
        ),
        fused=True,
    ),
    "mixtral": Family(
        config=lambda: MixtralConfig(
            **_MIXTRAL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        ),
        fused=True,
    ),
    "deepseek_v3": Family(config=lambda: DeepseekV3Config(**_DEEPSEEK), fused=True),
    "gpt_oss": Family(
        config=lambda: GptOssConfig(
            **SIZES, **_HEADS, **_WINDOWS, num_local_experts=4, num_experts_per_tok=2,
            rope_parameters=_YARN,
        )
    ),
}  # fmt: skip


def family_dir(root: Path, name: str, seed: int = 1) -> str:
    """Save a random model of the family and a tokenizer under `root`; return its directory."""
    family = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(family.config())
        _sharpen(model, family.sharpness)
        directory = root / f"{name}-{seed}"
        model.save_pretrained(directory)
        if name == "deepseek_v3":
            _add_mtp_layer(directory)
        if name == "gemma3_multimodal":
            (directory / "preprocessor_config.json").write_text('{"size": 28}')
    save_tokenizer(directory)
    return str(directory)


@torch.no_grad()
def _sharpen(model: Any, sharpness: float) -> None:
    """Scale weights so that contexts, masks, routers and positions matter; see `tiny_model_dir`."""
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if "layers." in name and parameter.ndim > 1:
            parameter.mul_(8 if "router" in name or ".gate." in name else 4)
        elif last in ("sinks", "bias"):
            parameter.normal_(std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # No number of bfloat16: rounding would be seen.
            buffer.copy_(torch.linspace(-0.01, 0.0100001, len(buffer)))
    norm = model.base_model.get_decoder().norm.weight
    if "Gemma" in type(model).__name__:  # whose norms multiply by 1 + weight
        norm.add_(1).mul_(sharpness).sub_(1)
    else:
        norm.mul_(sharpness)


def _add_mtp_layer(directory: Path) -> None:
    """Add an MTP layer after the last layer and to the config, as DeepSeek publishes it."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    last = f"model.layers.{MTP_LAYER - 1}."
    layer = {
        name.replace(last, f"model.layers.{MTP_LAYER}."): torch.randn_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    here = f"model.layers.{MTP_LAYER}"
    hidden = SIZES["hidden_size"]
    layer |= {
        f"{here}.enorm.weight": torch.randn(hidden),
        f"{here}.hnorm.weight": torch.randn(hidden),
        f"{here}.eh_proj.weight": torch.randn(hidden, 2 * hidden).bfloat16(),
        f"{here}.shared_head.norm.weight": torch.randn(hidden),
        f"{here}.shared_head.head.weight": torch.randn(VOCAB_SIZE, hidden),
        f"{here}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors | layer, file, metadata={"format": "pt"})


def undecided(directory: str) -> None:
    """Make the routers weigh all experts almost equally, and the experts differ much."""
    file = Path(directory) / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".gate." in name:
            tensor.mul_(0.005).add_(tensor[:1] / 0.005)
        elif ".down_proj." in name:
            tensor.mul_(4)
    save_file(tensors, file, metadata={"format": "pt"})
