"""Statistics of the logits of a linear layer, without holding the logits of a whole batch.

The fp32 logits of a batch, N x V values, would be by far the largest tensor of a distillation step.
They are computed one chunk of positions at a time, and once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill.models.logprobs import DivergenceOf, TokenStats, entropy_of, token_stats

# Most fp32 logits whose statistics are computed together. On a CPU, 4 MiB stay in its cache, which
# outweighs the cost of computing them twice in training; a GPU is faster with large kernels.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
# Most fp32 logits that training holds at a time on a GPU: 1 GiB. Each chunk reads and writes the
# whole fp32 gradient of the projection.
_TRAINED_ELEMENTS = 1 << 28
# Fewest positions of a chunk: the projection's weights are read once per chunk.
_FEWEST_POSITIONS = 128
# Fewest positions whose statistics are computed together in training: a teacher's projection is
# read once for them. Their fp32 logits stay below 32 MiB up to a vocabulary of 2^19; malloc would
# return larger buffers to the system and fault their pages in again.
_FEWEST_TOGETHER = 16

# (logits of some positions (n, V), the slice of these positions in N) -> z / T of the outcomes
# (n, V), see `one_outcome`.
ScaledOf = Callable[[Tensor, slice], Tensor]
# Gradients (N,) of the fields of `TokenStats`; None: the loss does not depend on the field.
_Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def positions_per_chunk(device: torch.device, vocab_size: int) -> int:
    """Number of positions to project to the vocabulary at a time."""
    return max(_FEWEST_POSITIONS, positions_together(device, vocab_size))


def positions_per_trained_chunk(device: torch.device, vocab_size: int) -> int:
    """Number of positions to project to the vocabulary at a time, in training."""
    most = _TRAINED_ELEMENTS // vocab_size if device.type == "cuda" else 0
    return max(positions_per_chunk(device, vocab_size), most)


def positions_together(device: torch.device, vocab_size: int) -> int:
    """Number of positions whose statistics are computed at a time, in training."""
    return max(_FEWEST_TOGETHER, CHUNK_ELEMENTS.get(device.type, 1 << 26) // vocab_size)


def precision_of(weight: Tensor) -> torch.dtype:
    """Precision of the factors of a product with the weight: that of autocast if it is enabled."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right. CUDA sums in float32 and rounds to the precision of `out`.

    The relative error of logits rounded to bfloat16 would be up to 1/256.
    """
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.device.type == "cuda":
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:  # a CPU rounds to the precision of the factors
        out.copy_(left @ right)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the precision of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def float32_logits(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """hidden @ weight.T + bias in float32, for factors of any precision."""
    precision = precision_of(weight_VH)
    if out is None:
        out = hidden_NH.new_empty(len(hidden_NH), len(weight_VH), dtype=torch.float32)
    _multiply(hidden_NH.to(precision), weight_VH.to(precision).t(), out)
    return out if bias_V is None else out.add_(bias_V)


@dataclass(frozen=True, slots=True)
class StatsOfLogits:
    """Statistics of logits, and the gradient of the logits without autograd through the softmax.

    Attributes:
        scaled_of: maps logits to z / T of the outcomes.
        outcomes_N: chosen outcome of each position.
        divergence_of: divergence of log p_T from a teacher; None: not computed.
        entropy_gradient: True if the entropy is differentiable.
    """

    scaled_of: ScaledOf
    outcomes_N: Tensor
    divergence_of: DivergenceOf | None
    entropy_gradient: bool

    def __call__(self, logits_nV: Tensor, positions: slice) -> TokenStats:
        """Statistics of these positions."""
        log_p_nV = torch.log_softmax(self.scaled_of(logits_nV, positions), dim=1)
        stats = token_stats(
            log_p_nV, self.outcomes_N[positions], entropy_gradient=self.entropy_gradient
        )
        if self.divergence_of is None:
            return stats
        return stats._replace(divergence_N=self.divergence_of(log_p_nV, positions))

    def gradient(self, logits_nV: Tensor, positions: slice, grads: _Grads) -> Tensor:
        """Gradient (n, V) of the logits of these positions, from the gradients of the statistics.

        d log p_j / d z_k = [j = k] - p_k for scaled z, so a gradient G of log p becomes
        G - p sum G. The G of a chosen token's log-prob has a single entry and is not made dense.
        """
        with torch.enable_grad():
            logits_nV = logits_nV.detach().requires_grad_()
            scaled_nV = self.scaled_of(logits_nV, positions)
        log_p_nV = torch.log_softmax(scaled_nV.detach(), dim=1)
        chosen_N, entropy_N, divergence_N = grads
        dense_nV = self._of_log_p(log_p_nV, positions, entropy_N, divergence_N)
        total_n = log_p_nV.new_zeros(len(log_p_nV))
        if dense_nV is not None:
            total_n += dense_nV.sum(dim=1)
        if chosen_N is not None:
            total_n += chosen_N[positions]
        grad_nV = log_p_nV.exp_().mul_(-total_n[:, None])
        if dense_nV is not None:
            grad_nV += dense_nV
        if chosen_N is not None:
            grad_nV.scatter_add_(1, self.outcomes_N[positions, None], chosen_N[positions, None])
        return torch.autograd.grad(scaled_nV, logits_nV, grad_nV)[0]

    def _of_log_p(
        self,
        log_p_nV: Tensor,
        positions: slice,
        entropy_N: Tensor | None,
        divergence_N: Tensor | None,
    ) -> Tensor | None:
        """Gradient of log p from those of entropy and divergence; None if both are None."""
        with torch.enable_grad():
            log_p_nV = log_p_nV.detach().requires_grad_()
            made: list[tuple[Tensor, Tensor]] = []
            if entropy_N is not None:
                made.append((entropy_of(log_p_nV), entropy_N[positions]))
            if divergence_N is not None and self.divergence_of is not None:
                made.append((self.divergence_of(log_p_nV, positions), divergence_N[positions]))
        if not made:
            return None
        stats, grads_n = zip(*made, strict=True)
        return torch.autograd.grad(stats, log_p_nV, grads_n)[0]


class LinearStats(torch.autograd.Function):
    """`stats_of` the logits hidden @ weight.T + bias, which are recomputed in the backward pass.

    The factors may be in lower precision (autocast, sharding); logits and sums of gradients are
    float32. Two buffers that autograd would allocate for every chunk are allocated once: the logits
    of a chunk, which are overwritten by their gradient, and the gradient of the weight, to which
    each chunk adds its share. On a CPU, fresh pages for these buffers would take longer than the
    matrix products. The statistics need temporaries of the size of the logits, so they are computed
    for a few positions at a time, in memory that malloc keeps.
    """

    @staticmethod
    def of(
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        stats_of: StatsOfLogits,
        rows: int,
    ) -> TokenStats:
        """Statistics of all positions, of which `rows` are projected at a time."""
        made = LinearStats.apply(hidden_NH, weight_VH, bias_V, stats_of, rows)
        assert isinstance(made, tuple)
        return TokenStats(*made)

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        stats_of: StatsOfLogits,
        rows: int,
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        ctx.set_materialize_grads(False)
        ctx.stats_of, ctx.rows, ctx.precision = stats_of, rows, precision_of(weight_VH)
        factors = hidden_NH.to(ctx.precision), weight_VH.to(ctx.precision)
        # Preallocated: small tensors kept from each part would fragment the memory that large
        # temporaries free.
        made = [hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32) for _ in range(3)]
        with_divergence = False
        for _, _, parts in _logits_of_chunks(*factors, bias_V, rows):
            for logits_nV, positions in parts:
                stats = stats_of(logits_nV, positions)
                with_divergence = stats.divergence_N is not None
                for made_N, stat_n in zip(made, stats, strict=True):
                    if stat_n is not None:
                        made_N[positions] = stat_n
                del stats
        if not stats_of.entropy_gradient:
            ctx.mark_non_differentiable(made[1])
        return (*made[:2], made[2] if with_divergence else None)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *made: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        factor_NH, factor_VH = hidden_NH.to(ctx.precision), weight_VH.to(ctx.precision)
        # The gradient of the log-probs is all zeros if only a divergence is trained on.
        chosen, entropy, divergence = (
            grad if grad is not None and grad.any() else None for grad in made
        )
        grads = chosen, entropy, divergence
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_weight_VH = _float32_zeros(weight_VH) if wants_weight else None
        grad_bias_V = _float32_zeros(bias_V) if wants_bias else None
        for chunk, grad_CV, parts in _logits_of_chunks(factor_NH, factor_VH, bias_V, ctx.rows):
            for logits_nV, positions in parts:
                logits_nV.copy_(ctx.stats_of.gradient(logits_nV, positions, grads))
            factor_CV = grad_CV.to(ctx.precision)
            if grad_hidden_NH is not None:
                _multiply(factor_CV, factor_VH, out=grad_hidden_NH[chunk])
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH, factor_CV.t(), factor_NH[chunk])
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        return (
            grad_hidden_NH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None, None,
        )  # fmt: skip


def _float32_zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32)


def _logits_of_chunks(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, rows: int
) -> Iterator[tuple[slice, Tensor, list[tuple[Tensor, slice]]]]:
    """Yield each chunk's positions, its logits, and its parts as pairs (logits, positions).

    All chunks use the same buffer.
    """
    width = len(weight_VH)
    buffer_CV = hidden_NH.new_empty(min(rows, len(hidden_NH)), width, dtype=torch.float32)
    together = positions_together(hidden_NH.device, width)
    for chunk in slices(0, len(hidden_NH), rows):
        logits_CV = buffer_CV[: chunk.stop - chunk.start]
        float32_logits(hidden_NH[chunk], weight_VH, bias_V, out=logits_CV)
        parts = slices(chunk.start, chunk.stop, together)
        lengths = [part.stop - part.start for part in parts]
        yield chunk, logits_CV, list(zip(logits_CV.split(lengths), parts, strict=True))


def slices(start: int, stop: int, length: int) -> list[slice]:
    return [slice(first, min(first + length, stop)) for first in range(start, stop, length)]
