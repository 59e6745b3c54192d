"""Memory of forward and backward passes, and the passes that fit beside a learner's model.

What a pass takes follows from the config, the precision and the tokens that run together
(`PassMemory`). Where it does not fit, `LearnerMemory.plan` has layers recomputed, or runs fewer
tokens at a time. A row that is longer than the token budget runs whole, so the longest one has to
fit in any case.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from distill.errors import ConfigError
from distill.models.decoder_sizes import HeadSizes, mlp_width
from distill.models.linear_stats import positions_per_trained_chunk, positions_together
from distill.models.loading import exact_attention, load_config, vocab_size
from learner.config import TOKEN_BUDGET, LearnerSettings, Precision
from learner.memory import (
    TRAINED,
    Holding,
    WorkerMemory,
    estimate_memory,
    known_shapes,
    readable,
)

# Of a pass's bytes: gradients of activations, and what an allocator cannot use.
_PASS_MARGIN = 1.1
# Smallest micro-batches that `fit_pass` chooses by itself.
_SMALLEST_BUDGET = 1024
# Of some logits: divided by T, their log-softmax, which becomes its gradient, a divergence's
# gradient, and their own.
_STATISTICS = 4
# Tensors of heads x tokens x tokens of an eager layer: at once in its backward pass, and kept of
# every other layer. torch's tracker finds 3.8 and 1 (sinks), 4.3 and 2 (soft caps).
_SCORES_AT_ONCE, _SCORES_KEPT = 5, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Bytes that a forward and backward pass takes besides weights, gradients and moments.

    Attributes:
        layers: of the decoder.
        in_layer: what a layer keeps of a token for its backward pass.
        between_layers: of those, its input: all that is kept where layers are recomputed.
        scores: bytes of one tensor of attention scores, a pair of tokens; 0 with fused kernels.
        logits: (most positions, bytes of each) of the logits that are held at once, and of what is
            made of a part of them. No layer is recomputed at that time.
        head: the head's gradient in float32, beside them.
        fixed: weights and gradients in the precision of computation.
        ending: at the end of the backward pass, when activations are gone: embedding and head
            whole, their gradients, and the float32 copy that is summed over the workers.
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
        hidden, heads = text.hidden_size, HeadSizes.of(text)
        queries, keys = heads.queries * heads.dim, heads.keys * heads.dim
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
        embedding = vocab * hidden
        number = 2 if half else 4
        on = torch.device(device)
        logits = (
            (positions_per_trained_chunk(on, vocab), vocab * (4 + number * half)),
            (positions_together(on, vocab), vocab * 4 * _STATISTICS),
        )
        # Autocast copies every weight once. FSDP has two layers whole, and what is in no layer; of
        # one layer also the gradients, and the float32 copy that is summed over the workers.
        copied, ending = parameters * number * half, 0
        if workers > 1:
            ending = 2 * embedding * (2 * number + 4)
            layer = parameters // text.num_hidden_layers
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
        """Memory of micro-batches of so many tokens, in rows of `row` tokens; None: in one row."""
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
        """Text that is printed before a run."""
        kept, again = (readable(self.bytes(tokens, checkpointing=way)) for way in (False, True))
        what = f"for a pass of {tokens} tokens"
        if gradient_checkpointing is None:
            return f"{kept} {what}, or {again} with gradient_checkpointing where that does not fit"
        return f"{again if gradient_checkpointing else kept} {what}"


def _score_bytes(config: Any, *, half: bool) -> int:
    """Bytes of the attention scores of one pair of tokens, over all heads; 0 where a fused kernel
    never holds them: it computes no soft caps (Gemma-2) and no attention sinks (GPT-OSS).

    Args:
        half: weights are bfloat16; under autocast the softmax has its scores in float32.
    """
    heads = config.get_text_config().num_attention_heads
    if exact_attention(config) is not None:  # soft caps, whose softmax is float32 as well
        return 4 * heads
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    eager = model is not None and not model._supports_sdpa
    return (2 if half else 4) * heads * eager


def _mlp_widths(text: Any) -> tuple[int, int]:
    """Width of a token's MLP (experts: of all that it visits), and copies of its input to them."""
    dense = mlp_width(text)
    visited = getattr(text, "num_experts_per_tok", None)
    if not visited:
        return dense, 0
    expert = getattr(text, "moe_intermediate_size", None) or dense
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return visited * expert + shared, 2 * visited


class PassRequest(NamedTuple):
    """Settings of passes; None of one that is left open.

    Attributes:
        longest_rows: tokens of the longest row, or pair of rows that stay together, which runs
            whole whatever the token budget; 0: not known.
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
        reduces_once: gradients are summed over the workers in the last micro-batch of a step alone.
            Until then each worker has its own ones whole.
    """

    token_budget: int
    gradient_checkpointing: bool
    reduces_once: bool = False


def fit_pass(memory: PassMemory, room: int, asked: PassRequest, *, device: str) -> PassPlan | None:
    """The settings asked for; for those left open, the fastest that fit into `room` bytes.

    None if nothing fits.
    """
    budgets = [asked.token_budget or TOKEN_BUDGET[device.partition(":")[0]]]
    while asked.token_budget is None and budgets[-1] // 2 >= _SMALLEST_BUDGET:
        budgets.append(budgets[-1] // 2)
    way = asked.gradient_checkpointing
    for budget in budgets:
        tokens, row = max(budget, asked.longest_rows), asked.longest_rows or None
        for checkpointing in [False, True] if way is None else [way]:
            if memory.bytes(tokens, checkpointing=checkpointing, row=row) <= room:
                return PassPlan(budget, checkpointing)
    return None


# A refusal looks for what fits among so many times the workers, and lengths in such steps.
_MORE_WORKERS = (2, 4, 8)
_LENGTH_STEP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Memory of a model's learner, on any number of workers.

    Attributes:
        parameters: number of the model's.
        query_norm: attention normalises queries and keys.
        holding: bytes per parameter, without passes.
        frozen: bytes of the frozen models that the workers share.
    """

    config: Any
    parameters: int
    query_norm: bool
    dtype: Precision
    device: str
    holding: Holding = TRAINED
    frozen: int = 0

    @classmethod
    def of(
        cls,
        model: str,
        *,
        dtype: Precision,
        device: str,
        holding: Holding = TRAINED,
        frozen: int = 0,
    ) -> LearnerMemory | None:
        """Memory of a model's learner, from config and shapes; None where those are not known."""
        estimate, shapes = estimate_memory(model), known_shapes(model)
        if estimate is None or shapes is None:
            return None
        return cls(
            config=load_config(model),
            parameters=estimate.parameters,
            query_norm=any("q_norm." in name for name in shapes),
            dtype=dtype,
            device=device,
            holding=holding,
            frozen=frozen,
        )

    @property
    def whole_gradients(self) -> int:
        """Bytes of a worker's gradients before they are summed over the workers."""
        return self.parameters * self.holding.gradients

    def states(self, workers: int, *, offloads: bool) -> WorkerMemory:
        """Memory of a worker besides passes."""
        return WorkerMemory.of(
            self.parameters,
            self.holding,
            workers=workers,
            offloads=offloads,
            frozen=self.frozen,
        )

    def passes(self, workers: int) -> PassMemory | None:
        """Memory of a worker's passes; None if the config lacks a field."""
        try:
            return PassMemory.of(
                self.config,
                dtype=self.dtype,
                device=self.device,
                parameters=self.parameters,
                workers=workers,
                query_norm=self.query_norm,
            )
        except AttributeError:  # not attention and an MLP: a config of other names
            return None

    def plan(
        self, room: int, asked: PassRequest, *, workers: int, offloads: bool
    ) -> PassPlan | None:
        """Plan of a worker whose context, states and passes share `room` bytes.

        What the passes leave free may hold whole gradients (`PassPlan.reduces_once`): no pass is
        made smaller for them. None if the config does not say what a pass takes.

        Raises:
            ConfigError: nothing fits; it names the settings that would.
        """
        passes = self.passes(workers)
        if passes is None:
            return None
        left = room - self.states(workers, offloads=offloads).beside_passes
        plan = fit_pass(passes, left, asked, device=self.device)
        if plan is None:
            remedies = list(self._remedies(room, asked, workers, offloads))
            raise _refusal(passes, left, asked, self.device, remedies)
        fits = passes.of_plan(plan, asked.longest_rows) + self.whole_gradients <= left
        return plan._replace(reduces_once=workers > 1 and fits)

    def _fits(self, room: int, asked: PassRequest, workers: int, *, offloads: bool) -> bool:
        states, passes = self.states(workers, offloads=offloads), self.passes(workers)
        assert passes is not None
        left = room - states.beside_passes
        return (
            states.updating <= room
            and fit_pass(passes, left, asked, device=self.device) is not None
        )

    def _remedies(
        self, room: int, asked: PassRequest, workers: int, offloads: bool
    ) -> Iterator[str]:
        """Changes of other settings than lengths, each of which makes the pass fit."""
        if asked.gradient_checkpointing is False:
            asked = asked._replace(gradient_checkpointing=None)
            if self._fits(room, asked, workers, offloads=offloads):
                yield "gradient_checkpointing=True"
        if not self.device.startswith("cuda"):
            return  # workers of one machine share its memory
        may_offload = not offloads and self.holding.moments > 0
        if may_offload and self._fits(room, asked, workers, offloads=True):
            yield "offload_optimizer=True"
            may_offload = False
        for many in (workers * times for times in _MORE_WORKERS):
            for offload in [False, True] if may_offload else [False]:
                if self._fits(room, asked, many, offloads=offloads or offload):
                    yield f"learner.workers={many}{' offload_optimizer=True' * offload}"
                    return


def _refusal(
    passes: PassMemory, left: int, asked: PassRequest, device: str, remedies: list[str]
) -> ConfigError:
    """Error of a pass that does not fit into `left` bytes."""
    recomputed, rows = asked.gradient_checkpointing is not False, asked.longest_rows
    budget = asked.token_budget or _SMALLEST_BUDGET

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


def estimate_pass(model: str, *, dtype: Precision, device: str, workers: int) -> PassMemory | None:
    """Pass memory of a model; None if its size is not known, or its config lacks a field."""
    memory = LearnerMemory.of(model, dtype=dtype, device=device)
    return memory and memory.passes(workers)
