"""Memory estimate of a learner before its model is loaded: too large is an error, not an OOM kill.

Weights, gradients and moments are counted from the checkpoint's headers (`estimate_memory`). What a
pass takes follows from the config, the precision and the tokens that run together (`PassMemory`);
where it does not fit, `fit_pass` has layers recomputed, or runs fewer tokens at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from distill.errors import ConfigError
from distill.gpu import CONTEXT_BYTES, gib, gpu_bytes
from distill.models.loading import (
    load_config,
    tensor_layouts,
    tensor_shapes,
    vocab_size,
    weight_files,
)
from distill.models.logprobs import positions_per_chunk
from distill.weights.model_weights import plan_buckets
from distill.weights.shared_memory import block_bytes
from learner.config import TOKEN_BUDGET, Precision


class Holding(NamedTuple):
    """Bytes held per parameter; activations come on top and follow token_budget."""

    bytes_per_parameter: int
    what: str


# Of those, AdamW's two moments.
MOMENTS = 8
TRAINED = Holding(4 + 4 + MOMENTS, "weights, gradients and AdamW in fp32")
TRAINED_AND_TEACHER = Holding(
    TRAINED.bytes_per_parameter + 4, "weights, a teacher that follows, gradients and AdamW in fp32"
)
# The base of an adapter, which is small beside it.
FROZEN = Holding(4, "frozen weights in fp32")


def holding_of(*, adapter: bool, followed: bool) -> Holding:
    """What a learner holds; `followed`: a teacher follows its weights (`learner.shadow`)."""
    if adapter:
        return FROZEN
    return TRAINED_AND_TEACHER if followed else TRAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of a model that the learner holds."""

    parameters: int
    holding: Holding

    @property
    def bytes(self) -> int:
        return self.parameters * self.holding.bytes_per_parameter

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e6:.1f} M parameters, {readable(self.bytes)} for "
            f"{self.holding.what}"
        )


def estimate_memory(model: str, holding: Holding = TRAINED) -> MemoryEstimate | None:
    """Estimate from the headers of safetensors files; None where there are none."""
    if not weight_files(model):
        return None
    parameters = sum(map(prod, tensor_shapes(model).values()))
    return MemoryEstimate(parameters=parameters, holding=holding)


def largest_bucket(model: str, dtype: torch.dtype, bucket_bytes: int) -> int:
    """Bytes of the largest bucket of a push in this precision; where no file says what there is,
    of a bucket that is full."""
    if not weight_files(model):
        return bucket_bytes
    layouts = [layout.rounded_to(dtype) for layout in tensor_layouts(model).values()]
    return max(map(block_bytes, plan_buckets(layouts, bucket_bytes)))


def check_fits(
    model: str, device: str, holding: Holding = TRAINED, share: float = 1.0, beside: int = 0
) -> None:
    """Raises ConfigError if a share of the learner's `model` exceeds what is free on `device`.

    `beside`: see `room_bytes`.
    """
    estimate = estimate_memory(model, holding)
    if estimate is None:
        return
    free, needed = room_bytes(device, beside), int(estimate.bytes * share)
    if needed > free:
        raise ConfigError(
            f"{model} in the learner needs {readable(needed)} here ({estimate}) and {device} "
            f"has {readable(free)} free; a model of up to "
            f"{free / share / holding.bytes_per_parameter / 1e6:.0f} M parameters fits, less its "
            "activations. Use a smaller model, an adapter (lora_rank), learner_workers on several "
            "GPUs or machines, or more memory"
        )


# Of a pass's bytes: gradients of activations, and what an allocator cannot use.
_PASS_MARGIN = 1.1
# Smallest micro-batches that `fit_pass` chooses by itself.
_SMALLEST_BUDGET = 1024
# Logits of a chunk, their log-softmax, and its gradient.
_LOGITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Bytes that a forward and backward pass takes besides weights, gradients and moments.

    Attributes:
        layers: of the decoder.
        in_layer: what a layer keeps of a token for its backward pass.
        between_layers: of those, its input: all that is kept where layers are recomputed.
        fixed: logits of a chunk of positions, and weights in the precision of computation.
    """

    layers: int
    in_layer: int
    between_layers: int
    fixed: int

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        dtype: Precision,
        device: str,
        parameters: int,
        workers: int,
        query_norm: bool,
    ) -> PassMemory:
        """Pass memory of a decoder of attention and a gated MLP. A token's tensors by their width:

        two norms (x, and x normalised), the inputs of q, k, v, gate and up; q, k, v and what they
        attend to; gate, its activation, up, and their product; with `query_norm` two more of q and
        k. In bfloat16 norms are float32 inside. Autocast (one worker) has float32 between layers,
        and a copy for each Linear. Checked against what autograd keeps: tests/learner/test_memory.
        """
        text = config.get_text_config()
        hidden, heads = text.hidden_size, text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        queries = heads * head_dim
        keys = (getattr(text, "num_key_value_heads", None) or heads) * head_dim
        normed = (queries + keys) * query_norm
        mlp, copies = _mlp_widths(text)
        half = dtype == "bfloat16"
        if not half:
            in_layer = 4 * (4 * mlp + (6 + copies) * hidden + 2 * (queries + keys) + 2 * normed)
        else:
            of_hidden = 26 if workers == 1 else 16
            in_layer = 8 * mlp + (of_hidden + 2 * copies) * hidden + 4 * (queries + keys)
            in_layer += 6 * normed
        vocab = vocab_size(config)
        logits = positions_per_chunk(torch.device(device), vocab) * vocab * 4 * _LOGITS
        embedding = vocab * hidden
        # Autocast copies every weight once; FSDP has two layers whole, and what is in no layer.
        computed = parameters
        if workers > 1:
            computed = 2 * embedding + 2 * parameters // text.num_hidden_layers
        copied = computed * (2 if half else 4) * (half or workers > 1)
        return cls(
            layers=text.num_hidden_layers,
            in_layer=in_layer,
            between_layers=hidden * (2 if half and workers > 1 else 4),
            fixed=logits + copied,
        )

    def bytes(self, tokens: int, *, checkpointing: bool) -> int:
        """Memory of micro-batches of so many tokens."""
        kept = self.layers * (self.between_layers if checkpointing else self.in_layer)
        again = self.in_layer if checkpointing else 0
        return self.fixed + int(tokens * (kept + again) * _PASS_MARGIN)

    def describe(self, tokens: int, gradient_checkpointing: bool | None) -> str:
        """Text that is printed before a run."""
        kept, again = (readable(self.bytes(tokens, checkpointing=way)) for way in (False, True))
        what = f"for a pass of {tokens} tokens"
        if gradient_checkpointing is None:
            return f"{kept} {what}, or {again} with gradient_checkpointing where that does not fit"
        return f"{again if gradient_checkpointing else kept} {what}"


def _mlp_widths(text: Any) -> tuple[int, int]:
    """Width of a token's MLP (experts: of all that it visits), and copies of its input to them."""
    # GPT-Neo's and GPT-2's None, under either name, is four times the hidden size.
    names = ("intermediate_size", "n_inner")
    widths = (getattr(text, name, None) for name in names)
    dense: int = next(filter(None, widths), 4 * text.hidden_size)
    visited = getattr(text, "num_experts_per_tok", None)
    if not visited:
        return dense, 0
    expert = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return visited * expert + shared, 2 * visited


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Bytes that one learner worker takes of its GPU, besides passes (`PassMemory`).

    Attributes:
        weights, gradients, moments: its share of them.
        offloads: the moments are there for the optimizer's own step only, when no pass is.
    """

    weights: int
    gradients: int
    moments: int
    offloads: bool

    @classmethod
    def of(
        cls,
        parameters: int,
        *,
        adapter: bool,
        workers: int,
        offloads: bool,
        followed: bool = False,
    ) -> WorkerMemory:
        """An adapter's gradients and moments are small beside its frozen base.

        Args:
            followed: a teacher follows the weights, which is as large as what is trained.
        """
        share = -(-4 * parameters // workers)
        trained = 0 if adapter else share
        weights = share + trained * followed
        return cls(weights=weights, gradients=trained, moments=2 * trained, offloads=offloads)

    @property
    def resting(self) -> int:
        """Between two steps: weights, and moments that are not in main memory."""
        return CONTEXT_BYTES + self.weights + (0 if self.offloads else self.moments)

    @property
    def beside_passes(self) -> int:
        """While a pass runs."""
        return self.resting + self.gradients

    @property
    def updating(self) -> int:
        """In the optimizer's step."""
        return CONTEXT_BYTES + self.weights + self.gradients + self.moments

    def require_room(self, room: int, what: str) -> None:
        """Raises ConfigError if its largest moment, but for passes, does not fit into `room`."""
        if self.updating > room:
            raise ConfigError(
                f"{what} in the learner does not fit: weights, gradients and moments take "
                f"{gib(self.updating)} GiB of a GPU in an update, and {gib(room)} are there. Use "
                "more learner_workers, an adapter (lora_rank), or a smaller model"
            )


class PassPlan(NamedTuple):
    """Token budget and gradient checkpointing with which passes fit into memory."""

    token_budget: int
    gradient_checkpointing: bool


def fit_pass(
    memory: PassMemory,
    room: int,
    *,
    device: str,
    token_budget: int | None,
    gradient_checkpointing: bool | None,
) -> PassPlan:
    """The settings asked for; for those left open, the fastest that fit into `room` bytes.

    Raises:
        ConfigError: nothing does.
    """
    default = TOKEN_BUDGET[device.partition(":")[0]]
    budgets = [token_budget or default]
    while token_budget is None and budgets[-1] // 2 >= _SMALLEST_BUDGET:
        budgets.append(budgets[-1] // 2)
    ways = [False, True] if gradient_checkpointing is None else [gradient_checkpointing]
    for budget in budgets:
        for checkpointing in ways:
            if memory.bytes(budget, checkpointing=checkpointing) <= room:
                return PassPlan(budget, checkpointing)
    needed = memory.bytes(budgets[-1], checkpointing=ways[-1])
    remedy = "" if ways[-1] else "gradient_checkpointing=True, "
    raise ConfigError(
        f"token_budget={budgets[-1]} needs {readable(needed)} for a pass (activations, logits) and "
        f"{device} has {readable(max(room, 0))} left beside the model. Use {remedy}a smaller "
        "token_budget, more learner_workers, or a GPU with more memory"
    )


def estimate_pass(model: str, *, dtype: Precision, device: str, workers: int) -> PassMemory | None:
    """Pass memory of a local checkpoint; None if it is elsewhere, or its config lacks a field."""
    estimate = estimate_memory(model)
    if estimate is None:
        return None
    query_norm = any("q_norm." in name for name in tensor_shapes(model))
    try:
        return PassMemory.of(
            load_config(model),
            dtype=dtype,
            device=device,
            parameters=estimate.parameters,
            workers=workers,
            query_norm=query_norm,
        )
    except AttributeError:  # not attention and an MLP: a config of other names
        return None


def room_bytes(device: str, beside: int) -> int:
    """Memory that a learner may fill: what is free; or, of a GPU of which `beside` bytes are
    another's, all the rest, whatever that other holds at the moment."""
    total = gpu_bytes() if beside and device.startswith("cuda") else None
    return free_bytes(device) if total is None else total - beside - CONTEXT_BYTES


def free_bytes(device: str) -> int:
    """Memory that can be had now: of the GPU, or of the machine within its container's limit."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(free, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or its limit is the word "max"
        return free


def readable(size: int) -> str:
    """The size in MiB below one GiB, else in GiB."""
    return f"{size / (1 << 20):.3g} MiB" if size < 1 << 30 else f"{size / (1 << 30):.3g} GiB"
