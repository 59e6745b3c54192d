"""GPU memory of an SGLang server, computed from its model's config, and the size of its cache.

    room = weights + working memory + cache of N tokens

By default SGLang uses a fraction of the memory that is free when it starts (`ServerMemory.alone`).
If several processes share a GPU, that fraction depends on the order in which they start. So the
room of each process is fixed, and N follows from the equation: `--max-total-tokens`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from actors.sglang.config import SglangConfig
from actors.sglang.flags import parse_flags
from actors.sglang.parallelism import Parallelism, parallelism
from distill.errors import ConfigError
from distill.gpu import CONTEXT_BYTES, DTYPE_BYTES, GIB, gib
from distill.models.decoder_sizes import HeadSizes, mlp_width
from distill.models.loading import load_config, tensor_layouts, vocab_size

# Memory outside of SGLang's memory saver, which a sleeping server keeps: workspaces of attention
# (384 MiB for flashinfer) and of cuBLAS, and buffers of captured graphs.
_WORKSPACE_BYTES = 512 << 20
# GPU memory that a sleeping server keeps: its CUDA context; workspaces; NCCL buffers of its ranks
# and of the group that pushes weights (0.5 GiB); the driver's memory for captured graphs outside
# their pool (8 MiB each by SGLang's own count, 37 graphs); and blocks of torch's allocator that
# hold a small tensor. An estimate: a small model's server kept 1.03 GiB (docs/gpu-results.md).
ASLEEP_BYTES = 3 * GIB
# Bytes of captured decode graphs per sequence of the batch: SGLang's own reserve
# (arg_groups/memory_hook.py).
_GRAPH_BYTES = 2 << 20
# Bytes of captured prefill graphs: 58 of 8 MiB; with latent attention a fixed amount.
_PREFILL_GRAPH_BYTES, _LATENT_GRAPH_BYTES = 464 << 20, 1536 << 20
# SGLang's reserve: bytes for each token of a prefill, a constant, and bytes for each rank; and the
# minimum on a GPU of more than 60 GiB.
_RESERVED_A_TOKEN, _RESERVED, _RESERVED_A_RANK = 3 << 19, 512 << 20, 128 << 20
_LARGE_GPU, _RESERVED_OF_LARGE = 60 * GIB, 10 * GIB
# Rows whose log-probs SGLang computes at a time (SGLANG_LOGPROB_CHUNK_SIZE), and float32 numbers
# that SGLang and the plugin hold for each token of the vocabulary during the computation.
_LOGPROB_ROWS, _PER_LOGIT = 2048, 3
# Default number of tokens in one prefill.
_PREFILL_TOKENS = 8192


def served_bytes(model: str, dtype: str) -> int:
    """Bytes of a local checkpoint's weights in SGLang.

    Quantised weights (fp8, packed integers and their scales) are counted as stored, all others in
    `dtype`.
    """
    return sum(
        prod(layout.shape) * _served_bits(layout.dtype, dtype) // 8
        for layout in tensor_layouts(model).values()
    )


def _served_bits(stored: str, dtype: str) -> int:
    """Bits of a loaded number; `stored` is its stored dtype, as named by torch or safetensors."""
    found = re.search(r"\d+", stored)
    bits = 8 if found is None else int(found[0])  # bool
    plain = bits >= 16 and "float" in stored
    return 8 * DTYPE_BYTES[dtype] if plain else bits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """Bytes on each GPU of a server.

    Attributes:
        weights: bytes of this GPU's part of the weights.
        working: CUDA context, workspaces, captured graphs, activations of a prefill, log-probs of
            its rows.
        reserved: bytes that SGLang reserves for working memory when it sizes the cache itself.
        static: share of a GPU that the flags give to weights and cache; None: SGLang applies
            `reserved`.
        token: bytes of one token in the cache; None for a model whose state is not counted in
            tokens.
        fixed_tokens: number of cached tokens that the flags set; None: not set.
    """

    weights: int
    working: int
    reserved: int
    static: float | None
    token: int | None
    fixed_tokens: int | None

    @classmethod
    def of(
        cls, config: Any, weights: int, *, dtype: str, max_running: int, flags: str = ""
    ) -> ServerMemory:
        """Compute the memory of a server of a decoder. `working` is an upper estimate.

        Args:
            config: config of the checkpoint.
            weights: bytes of all weights.
            max_running: maximum number of requests decoded together, unless a flag sets it.
            flags: flags for SGLang's command line.
        """
        given, spread = parse_flags(flags), parallelism(flags)
        text = config.get_text_config()
        prefill = _int_flag(given, "--chunked-prefill-size", _PREFILL_TOKENS)
        activations = (
            max(prefill, _PREFILL_TOKENS)
            * DTYPE_BYTES[dtype]
            * (8 * text.hidden_size + 3 * mlp_width(text) // spread.tensor)
        )
        logits = _LOGPROB_ROWS * vocab_size(config) * 4 * _PER_LOGIT
        graphs = (
            0
            if "--disable-cuda-graph" in given
            else _GRAPH_BYTES * _int_flag(given, "--max-running-requests", max_running)
        )
        number = 1 if "fp8" in "".join(given.get("--kv-cache-dtype", [])) else DTYPE_BYTES[dtype]
        fixed = _int_flag(given, "--max-total-tokens", 0)
        latent = getattr(text, "kv_lora_rank", None)
        reserved = _RESERVED + max(prefill, 2048) * _RESERVED_A_TOKEN
        reserved += spread.split * _RESERVED_A_RANK
        reserved += (_LATENT_GRAPH_BYTES if latent else _PREFILL_GRAPH_BYTES) + graphs
        static = "".join(given.get("--mem-fraction-static", []))
        return cls(
            weights=weights // spread.split,
            working=CONTEXT_BYTES + _WORKSPACE_BYTES + activations + logits + graphs,
            reserved=reserved,
            static=float(static) if static else None,
            token=cache_bytes_per_token(config, number, spread),
            fixed_tokens=fixed or None,
        )

    @classmethod
    def of_checkpoint(cls, config: SglangConfig) -> ServerMemory:
        """Compute the memory of a server with these settings; its checkpoint must be local."""
        return cls.of(
            load_config(config.model),
            served_bytes(config.model, config.dtype),
            dtype=config.dtype,
            max_running=config.max_running_requests,
            flags=config.server_flags,
        )

    def alone(self, total: int) -> ServerMemory:
        """Memory of a server that has GPUs of `total` bytes to itself, so that SGLang sizes the
        cache.

        `working` is then what SGLang leaves free: by `--mem-fraction-static`, or its own reserve.
        """
        if self.static is not None:
            reserved = int(total * (1 - self.static))
        else:
            reserved = max(self.reserved, _RESERVED_OF_LARGE if total > _LARGE_GPU else 0)
        return replace(self, working=CONTEXT_BYTES + reserved)

    def tokens_in(self, room: int, what: str, least: int) -> int:
        """Number of tokens whose cache fits into `room` bytes of a GPU.

        Args:
            what: name of the server for errors.
            least: minimum number of tokens: one whole context.

        Raises:
            ConfigError: fewer than `least` fit, or the number cannot be computed.
        """
        if self.fixed_tokens is not None:
            return self.fixed_tokens
        if self.token is None:
            raise ConfigError(
                f"{what}: its layers keep a state that is not counted in tokens, so the size of "
                "its cache on a shared GPU cannot be computed; set --max-total-tokens in its "
                "server flags, or gpus_per_actor=1",
                field="cluster.gpus_per_actor",
            )
        tokens = (room - self.weights - self.working) // self.token
        if tokens < least:
            raise ConfigError(
                f"{what} does not fit: of {gib(room)} GiB of a GPU its weights take "
                f"{gib(self.weights)}, working memory {gib(self.working)}, and the rest holds "
                f"{max(0, tokens)} tokens of cache ({self.token} bytes each), less than one "
                f"context of {least}. Use --tp-size, a larger gpus_per_actor, fewer processes on "
                "the GPU, or --context-length and --max-total-tokens in its server flags",
                field="cluster.gpus_per_actor",
            )
        return tokens

    def bytes(self, tokens: int) -> int:
        """Total bytes with a cache of `tokens` tokens."""
        return self.weights + self.working + (self.token or 0) * tokens


def cache_bytes_per_token(config: Any, number: int, spread: Parallelism) -> int | None:
    """Bytes of one token in the cache of each GPU; None if a layer has another kind of state.

    Counted are keys and values of each layer, with heads split over tensor ranks (at least one head
    each). With latent attention (MLA): one compressed vector and its rotary part, on every rank.
    Layers with a sliding window are counted like the others, as an upper bound.

    Args:
        number: bytes of one number in the cache.
    """
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None) or ()
    if any("attention" not in kind or "linear" in kind for kind in layer_types):
        return None
    layers = -(-text.num_hidden_layers // spread.pipeline)
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        return layers * (latent + text.qk_rope_head_dim) * number
    heads = HeadSizes.of(text)
    ranks = spread.tensor // (spread.data if spread.data_attention else 1)
    return layers * 2 * max(1, heads.keys // max(1, ranks)) * heads.dim * number


def _int_flag(flags: dict[str, list[str]], name: str, default: int) -> int:
    value = "".join(flags.get(name, []))
    return int(value) if value.lstrip("-").isdecimal() else default
