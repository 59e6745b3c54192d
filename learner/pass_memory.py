"""Memory of a model's forward and backward passes, and a plan of passes that fit into a memory.

The memory of a pass follows from the config, the precision and the number of tokens that run
together (`PassMemory`). If it does not fit, layers are recomputed, or fewer tokens run together
(`fit_pass`). A row that is longer than the token budget runs whole, so the longest row must fit in
any case.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from distill.errors import CheckpointError, ConfigError
from distill.gpu import readable
from distill.models.decoder_sizes import HeadSizes, mlp_width
from distill.models.linear_stats import positions_per_trained_chunk, positions_together
from distill.models.loading import (
    exact_attention,
    load_config,
    meta_causal_lm,
    tensor_shapes,
    vocab_size,
    weight_files,
)
from learner.config import TOKEN_BUDGET, LearnerSettings, Precision

# Factor of a pass's bytes for gradients of activations and fragmentation of the allocator.
_PASS_MARGIN = 1.1
# Smallest token budget that `fit_pass` chooses by itself.
SMALLEST_BUDGET = 1024
# Step of the row lengths that an error message tries as remedies, in tokens.
_LENGTH_STEP = 256
# Number of float32 tensors in the size of a chunk's logits: the logits divided by T, their
# log-softmax (overwritten by its gradient), a divergence's gradient, and the logits' gradient.
_STATISTICS = 4
# Number of tensors of heads x tokens x tokens of a layer with eager attention: during its backward
# pass, and kept by every other layer. torch's memory tracker measures 3.8 and 1 (attention sinks),
# 4.3 and 2 (soft caps).
_SCORES_AT_ONCE, _SCORES_KEPT = 5, 2


def count_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Number of parameters of tensors of these shapes."""
    return sum(map(prod, shapes.values()))


def known_shapes(model: str) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the model's tensors by name, from the headers of its safetensors files.

    If the model is on the hub and its files are not on this machine, the shapes come from its
    config. None if neither is available.
    """
    if weight_files(model):
        return tensor_shapes(model)
    return None if Path(model).exists() else _shapes_by_config(model)


@lru_cache
def _shapes_by_config(name: str) -> dict[str, tuple[int, ...]] | None:
    try:
        tensors = meta_causal_lm(name).named_parameters()
    except CheckpointError:  # the hub is unreachable, or the model is not a causal language model
        return None
    return {name: tuple(tensor.shape) for name, tensor in tensors}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Properties of a model that determine its learner's memory.

    Attributes:
        config: transformers config of the model.
        parameters: number of parameters.
        query_norm: attention normalises queries and keys.
    """

    config: Any
    parameters: int
    query_norm: bool

    @classmethod
    def of(cls, model: str) -> ModelSize | None:
        """Size of a checkpoint's model; None if its config or shapes are unknown."""
        shapes = known_shapes(model)
        if shapes is None:
            return None
        parameters, query_norm = count_of(shapes), any("q_norm." in name for name in shapes)
        return cls(config=load_config(model), parameters=parameters, query_norm=query_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Memory of a forward and backward pass, without weights, gradients and moments. In bytes.

    Attributes:
        layers: number of layers of the decoder.
        in_layer: activations that a layer keeps for its backward pass, per token.
        between_layers: the layer's input among these, which is all that a recomputed layer keeps.
        scores: one tensor of attention scores, per pair of tokens; 0 with fused kernels.
        logits: pairs (largest number of positions, bytes per position): of the logits that exist
            at a time, and of the tensors computed from a part of them. No layer is recomputed then.
        head: float32 gradient of the head, which exists together with the logits.
        fixed: weights and gradients in the precision of the computation.
        ending: the end of the backward pass, when activations are freed: whole embedding and head,
            their gradients, and the float32 copy that is summed over the workers.
    """

    layers: int
    in_layer: int
    between_layers: int
    scores: int
    logits: tuple[tuple[int, int], ...]
    head: int
    fixed: int
    ending: int

    @classmethod
    def of(cls, model: ModelSize, *, dtype: Precision, device: str, workers: int) -> PassMemory:
        """Pass memory of a decoder with attention and a gated MLP.

        Tensors of a token in a layer: x and normalised x of two norms, and the inputs of q, k, v,
        gate and up; q, k, v and the output of attention; gate, its activation, up, and their
        product; with `query_norm` two more of q and k. In bfloat16, norms compute in float32.
        Autocast (one worker) has float32 between layers, and a copy for each Linear.
        tests/learner/test_memory.py compares this with the tensors that autograd saves.
        """
        config = model.config
        text = config.get_text_config()
        hidden, heads = text.hidden_size, HeadSizes.of(text)
        queries, keys = heads.queries * heads.dim, heads.keys * heads.dim
        normed = (queries + keys) * model.query_norm
        mlp, copies = _mlp_widths(text)
        half = dtype == "bfloat16"
        if not half:
            in_layer = 4 * (4 * mlp + (6 + copies) * hidden + 2 * (queries + keys) + 2 * normed)
        else:
            of_hidden = 26 if workers == 1 else 16
            in_layer = 8 * mlp + (of_hidden + 2 * copies) * hidden + 4 * (queries + keys)
            in_layer += 6 * normed
        vocab = vocab_size(config)
        embedding = vocab * hidden
        number = 2 if half else 4
        on = torch.device(device)
        logits = (
            (positions_per_trained_chunk(on, vocab), vocab * (4 + number * half)),
            (positions_together(on, vocab), vocab * 4 * _STATISTICS),
        )
        # Autocast copies every weight once. FSDP holds two whole layers and the weights outside of
        # layers; for one layer also the gradients, and the float32 copy that is summed over the
        # workers.
        copied, ending = model.parameters * number * half, 0
        if workers > 1:
            ending = 2 * embedding * (2 * number + 4)
            layer = model.parameters // text.num_hidden_layers
            copied = (2 * embedding + 3 * layer) * number + 4 * layer
        return cls(
            layers=text.num_hidden_layers,
            in_layer=in_layer,
            between_layers=hidden * (2 if half and workers > 1 else 4),
            scores=_score_bytes(config, half=half and workers > 1),
            logits=logits,
            head=embedding * 4 * half,
            fixed=copied,
            ending=ending,
        )

    def bytes(self, tokens: int, *, checkpointing: bool, row: int | None = None) -> int:
        """Memory of a micro-batch of `tokens` tokens, in rows of `row` tokens; None: one row."""
        per_layer = self.between_layers if checkpointing else self.in_layer
        pairs = tokens * min(tokens, row or tokens) * self.scores
        kept = int(tokens * self.layers * per_layer * _PASS_MARGIN)
        again = int(tokens * self.in_layer * _PASS_MARGIN) if checkpointing else 0
        if not checkpointing:
            kept += pairs * _SCORES_KEPT * (self.layers - 1)
        again += pairs * _SCORES_AT_ONCE
        head = self.head + sum(min(tokens, most) * size for most, size in self.logits)
        return max(self.fixed + kept + max(head, again), self.ending)

    def of_plan(self, plan: PassPlan, longest_rows: int) -> int:
        """Memory of a plan's largest pass, without whole gradients."""
        tokens, row = max(plan.token_budget, longest_rows), longest_rows or None
        return self.bytes(tokens, checkpointing=plan.gradient_checkpointing, row=row)

    def describe(self, tokens: int, gradient_checkpointing: bool | None) -> str:
        """Description of the memory, printed before a run."""
        kept, again = (readable(self.bytes(tokens, checkpointing=way)) for way in (False, True))
        what = f"for a pass of {tokens} tokens"
        if gradient_checkpointing is None:
            return f"{kept} {what}, or {again} with gradient_checkpointing where that does not fit"
        return f"{again if gradient_checkpointing else kept} {what}"


def _score_bytes(config: Any, *, half: bool) -> int:
    """Bytes of the attention scores of one pair of tokens, over all heads; 0 with a fused kernel.

    Fused kernels support neither soft caps (Gemma-2) nor attention sinks (GPT-OSS).

    Args:
        half: weights are bfloat16. Under autocast the softmax has float32 scores.
    """
    heads = config.get_text_config().num_attention_heads
    if exact_attention(config) is not None:  # soft caps: their softmax is always float32
        return 4 * heads
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    eager = model is not None and not model._supports_sdpa
    return (2 if half else 4) * heads * eager


def _mlp_widths(text: Any) -> tuple[int, int]:
    """Width of a token's MLP (sum over its experts), and copies of its input for the experts."""
    dense = mlp_width(text)
    visited = getattr(text, "num_experts_per_tok", None)
    if not visited:
        return dense, 0
    expert = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return visited * expert + shared, 2 * visited


class PassRequest(NamedTuple):
    """Requested settings of passes; None: to be chosen.

    Attributes:
        longest_rows: tokens of the longest row, or pair of rows that stay together. It runs whole,
            even if it exceeds the token budget. 0: unknown.
    """

    token_budget: int | None = None
    gradient_checkpointing: bool | None = None
    longest_rows: int = 0

    @classmethod
    def of(cls, settings: LearnerSettings, longest_rows: int) -> PassRequest:
        return cls(settings.token_budget, settings.gradient_checkpointing, longest_rows)


class PassPlan(NamedTuple):
    """Token budget and gradient checkpointing with which passes fit into memory.

    Attributes:
        reduces_once: gradients are summed over the workers only in the last micro-batch of a step.
            Until then each worker holds its own whole gradients.
    """

    token_budget: int
    gradient_checkpointing: bool
    reduces_once: bool = False


def fit_pass(memory: PassMemory, room: int, asked: PassRequest, *, device: str) -> PassPlan | None:
    """Requested settings, completed with the fastest ones that fit into `room` bytes.

    None if no settings fit.
    """
    budgets = [asked.token_budget or TOKEN_BUDGET[device.partition(":")[0]]]
    while asked.token_budget is None and budgets[-1] // 2 >= SMALLEST_BUDGET:
        budgets.append(budgets[-1] // 2)
    way = asked.gradient_checkpointing
    for budget in budgets:
        tokens, row = max(budget, asked.longest_rows), asked.longest_rows or None
        for checkpointing in [False, True] if way is None else [way]:
            if memory.bytes(tokens, checkpointing=checkpointing, row=row) <= room:
                return PassPlan(budget, checkpointing)
    return None


def refusal(
    passes: PassMemory, left: int, asked: PassRequest, device: str, remedies: list[str]
) -> ConfigError:
    """Error for a pass that does not fit into `left` bytes."""
    recomputed, rows = asked.gradient_checkpointing is not False, asked.longest_rows
    budget = asked.token_budget or SMALLEST_BUDGET

    def needed(tokens: int) -> int:
        row = min(rows, tokens) or None
        if rows >= budget:  # shorter rows run together, up to the budget
            tokens = max(tokens, budget)
        return passes.bytes(tokens, checkpointing=recomputed, row=row)

    lengths = range(_LENGTH_STEP, max(budget, rows), _LENGTH_STEP)
    shorter = bisect_right(lengths, left, key=needed) * _LENGTH_STEP
    if rows >= budget:
        field, what = (
            "sampling.max_new_tokens",
            f"max_new_tokens (or max_length): rows of {rows} tokens need",
        )
        remedies += [f"rows of at most {shorter} tokens"] if shorter else []
    else:
        field, what = "learner.token_budget", f"token_budget={budget} needs"
        remedies += [f"token_budget={shorter}"] if shorter and asked.token_budget else []
    use = f"Use {', or '.join(remedies)}" if remedies else "Use GPUs with more memory"
    return ConfigError(
        f"{what} {readable(needed(max(budget, rows)))} for a pass (activations, logits"
        f"{', attention scores' * bool(passes.scores)}) and {device} has "
        f"{readable(max(left, 0))} left beside the model. {use}",
        field=field,
    )
