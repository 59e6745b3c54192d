"""log softmax(z / T) of chosen tokens, without holding logits for a whole batch.

`VocabularyHead` is the last step of a causal LM, hidden state -> logits. Keeping it apart lets
callers project only the positions they need, a chunk at a time: fp32 logits for N x V values are
the largest tensor of a distillation step by far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import PreTrainedModel

from distill.errors import ConfigError

# Most fp32 logits whose statistics are made at once. On a CPU 4 MiB stay in its cache, which pays
# for computing them twice when training; a GPU wants large kernels.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
# Most fp32 logits that training holds at once on a GPU: 1 GiB. Each chunk of them reads and writes
# the whole fp32 gradient of the projection.
_TRAINED_ELEMENTS = 1 << 28
# But never fewer positions than this: the projection's weights are read once per chunk.
_FEWEST_POSITIONS = 128
# Fewest positions whose statistics are made together in training: a teacher's projection is read
# once for them. Their fp32 logits stay below 32 MiB up to a vocabulary of 2^19; malloc would return
# larger buffers to the system and fault their pages in again.
_FEWEST_TOGETHER = 16
# Largest distributions of a batch (N x V) that are kept from a forward pass for its backward pass:
# 64 MiB.
_MOST_KEPT = 1 << 24


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


class TokenStats(NamedTuple):
    """Statistics per position, fp32 (N,): the chosen token's log-prob, the entropy of p_T, and the
    divergence from a teacher where one was asked for."""

    logprobs_N: Tensor
    entropy_N: Tensor
    divergence_N: Tensor | None = None


# log p_T of some positions (n, V), and which of the N they are -> their divergence (n,). Gradients
# flow through log p_T alone. In training it is called again in the backward pass.
DivergenceOf = Callable[[Tensor, slice], Tensor]
# Logits of some positions (n, V), and which of the N they are -> their statistics.
_StatsOf = Callable[[Tensor, slice], TokenStats]


# Several tokens may be one outcome of the next token, an event (`distill.stops`): such a
# distribution has the event's probability in the column of its first token. The other columns have
# this scaled logit: no mass, and a finite difference of two models' log-probs, so that their share
# of a divergence or an entropy, and its gradient, is 0.
ABSENT = -1e30
Event = tuple[int, ...]


def one_outcome(scaled_NV: Tensor, event: Event) -> Tensor:
    """The scaled logits z / T with the event's tokens as one outcome: log sum exp of theirs."""
    if not event:
        return scaled_NV
    columns = torch.tensor(event, device=scaled_NV.device)
    together_N1 = scaled_NV.index_select(1, columns).logsumexp(dim=1, keepdim=True)
    return scaled_NV.index_fill(1, columns, ABSENT).index_copy_(1, columns[:1], together_N1)


def as_outcomes(tokens: Tensor, event: Event) -> Tensor:
    """The columns in which the tokens' outcomes are: the event's for each of its tokens."""
    if not event:
        return tokens
    columns = torch.tensor(event, device=tokens.device, dtype=tokens.dtype)
    return torch.where(torch.isin(tokens, columns), columns[0], tokens)


def kept_until_backward(
    distribution: Callable[[slice], Tensor], elements: int
) -> Callable[[slice], Tensor]:
    """The distribution of positions that a training pass asks for twice, forward and backward.

    It is computed once if the whole batch has few `elements`, else twice, which saves memory.
    """
    if elements > _MOST_KEPT:
        return distribution
    kept: dict[tuple[int, int], Tensor] = {}

    def of(positions: slice) -> Tensor:
        key = positions.start, positions.stop
        if key in kept:
            return kept.pop(key)
        kept[key] = made = distribution(positions)
        return made

    return of


def selected_logprobs(
    logits_NV: Tensor, tokens_N: Tensor, temperature_N: Tensor, event: Event = ()
) -> Tensor:
    """log softmax(z / T)[token], fp32, shape (N,). Every T must be above 0."""
    assert logits_NV.ndim == 2 and tokens_N.ndim == 1 and temperature_N.ndim == 1
    scaled_NV = one_outcome(logits_NV.float() / temperature_N[:, None], event)
    chosen_N = scaled_NV.gather(1, as_outcomes(tokens_N, event)[:, None]).squeeze(1)
    return chosen_N - scaled_NV.logsumexp(dim=1)


def log_distribution(logits_NV: Tensor, temperature_N: Tensor, event: Event = ()) -> Tensor:
    """log softmax(z / T) over the vocabulary, fp32, shape (N, V)."""
    return torch.log_softmax(one_outcome(logits_NV.float() / temperature_N[:, None], event), dim=1)


def token_stats(
    log_p_NV: Tensor, tokens_N: Tensor, *, entropy_gradient: bool = False
) -> TokenStats:
    """Log-prob of the token and entropy of the distribution (by default without gradient)."""
    chosen_N = log_p_NV.gather(1, tokens_N[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(dim=1)
    return TokenStats(chosen_N, entropy_N)


def projection_of(model: PreTrainedModel) -> nn.Module:
    """The model's vocabulary projection. Raises ConfigError if it has none."""
    projection = model.get_output_embeddings()
    if projection is None:
        raise ConfigError(f"{type(model).__name__} has no vocabulary projection (lm_head)")
    return projection


class VocabularyHead:
    """hidden_NH -> logits_NV as the model itself computes it."""

    def __init__(
        self, projection: Callable[[Tensor], Tensor], config: Any, event: Event = ()
    ) -> None:
        """
        Args:
            projection: the model's vocabulary projection.
            config: the model's, with what becomes of the logits: their scale and soft cap.
            event: tokens that are one outcome in every distribution and statistic made here.
        """
        self.event, self.projection = event, projection
        config = config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies by logit_scale; Granite divides by logits_scaling.
        self.scale = float(getattr(config, "logit_scale", None) or 1) / float(
            getattr(config, "logits_scaling", None) or 1
        )

    @classmethod
    def of(cls, model: PreTrainedModel, event: Event = ()) -> VocabularyHead:
        """A model's head, checked once against the model.

        Raises:
            ConfigError: the logits are no known function of its hidden states.
        """
        head = cls(projection_of(model), model.config, event)
        head._check(model)
        return head

    def __call__(
        self, hidden_NH: Tensor, weights: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Tensor:
        """Logits. `weights` take the place of the projection's own, by their names."""
        module = cast(nn.Module, self.projection)
        if type(module) is nn.Linear and not torch.is_grad_enabled():
            own = dict(module.named_parameters()) | dict(weights)
            return self._finish(_logits(hidden_NH, own["weight"], own.get("bias")))
        if not weights:
            return self._finish(self.projection(hidden_NH))
        return self._finish(functional_call(module, dict(weights), (hidden_NH,)))

    def _finish(self, logits_NV: Tensor) -> Tensor:
        """Post-processing of the logits: the model's scale and soft cap."""
        if self.scale != 1:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        was_training = model.training
        model.eval()
        ids_BT = (
            torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
        )
        decoder = model.base_model
        hidden_BTH = getattr(decoder(input_ids=ids_BT, use_cache=False), "last_hidden_state", None)
        if hidden_BTH is None:
            raise ConfigError(
                f"{type(model).__name__} has no decoder of its own: base_model is "
                f"{type(decoder).__name__}, which gives no last_hidden_state. isotherm projects "
                "hidden states itself; give a checkpoint of a model class that has one"
            )
        hidden_NH = hidden_BTH[0]
        expected_NV = model(input_ids=ids_BT, use_cache=False).logits[0]
        model.train(was_training)
        gap = (self(hidden_NH).float() - expected_NV.float()).abs().max().item()
        scale = expected_NV.float().abs().max().item()
        if not gap <= 1e-2 * max(scale, 1e-3):
            raise ConfigError(
                f"{type(model).__name__} changes its logits after lm_head (by {gap:.3g} on a "
                "probe), in a way isotherm does not know; its log-probs would be wrong"
            )

    def log_distribution(
        self,
        hidden_NH: Tensor,
        temperature_N: Tensor,
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """log p_T of the projected hidden states, fp32, shape (N, V): all of it at once.

        `weights` take the place of the projection's own, by their names (`copied_weights`).
        """
        return log_distribution(self(hidden_NH, weights), temperature_N, self.event)

    def distribution_of(
        self,
        hidden_NH: Tensor,
        temperature_N: Tensor,
        autocast: Callable[[], AbstractContextManager[Any]],
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Callable[[slice], Tensor]:
        """Return a function: slice of the N positions -> log p_T, shape (n, V), without gradient.

        For a training pass, which asks for every slice forward and backward. `autocast` is entered
        in place of that pass's own.
        """

        @torch.no_grad()
        def log_p(positions: slice) -> Tensor:
            with autocast():
                return self.log_distribution(
                    hidden_NH[positions], temperature_N[positions], weights
                )

        return kept_until_backward(log_p, len(hidden_NH) * model_width(self.projection))

    def copied_weights(self, *, frozen: bool) -> dict[str, Tensor]:
        """Copies of the projection's weights: all, or without `frozen` those that are trained."""
        named = cast(nn.Module, self.projection).named_parameters()
        return {name: p.detach().clone() for name, p in named if frozen or p.requires_grad}

    def token_stats(
        self,
        hidden_NH: Tensor,
        tokens_N: Tensor,
        temperature_N: Tensor,
        *,
        divergence_of: DivergenceOf | None = None,
        entropy_gradient: bool = False,
    ) -> TokenStats:
        """`token_stats` of the projected hidden states, a chunk of positions at a time.

        With gradients on and more than one chunk, each chunk's logits are recomputed in the
        backward pass, so peak memory holds one chunk, whatever N is. The memory and time this
        takes at a vocabulary of 151,936: `benchmarks/memory.py`.
        """

        outcomes_N = as_outcomes(tokens_N, self.event)

        def stats_of(logits_NV: Tensor, positions: slice) -> TokenStats:
            log_p_NV = log_distribution(
                self._finish(logits_NV), temperature_N[positions], self.event
            )
            stats = token_stats(log_p_NV, outcomes_N[positions], entropy_gradient=entropy_gradient)
            if divergence_of is None:
                return stats
            return stats._replace(divergence_N=divergence_of(log_p_NV, positions))

        def projected(hidden_nH: Tensor, positions: slice) -> TokenStats:
            return stats_of(self.projection(hidden_nH), positions)

        device, width = hidden_NH.device, model_width(self.projection)
        chunks = _slices(0, len(hidden_NH), positions_per_chunk(device, width))
        many = len(chunks) > 1 and torch.is_grad_enabled()
        if type(self.projection) is nn.Linear:
            linear = cast(nn.Linear, self.projection)
            if many or _precision_of(linear.weight) != torch.float32:
                rows = positions_per_trained_chunk(device, width)
                return _LinearStats.of(
                    hidden_NH, linear.weight, linear.bias, stats_of, rows, entropy_gradient
                )
        if not many:
            return _joined([projected(hidden_NH[chunk], chunk) for chunk in chunks])
        # A projection of another kind may hold any parameters, adapters and randomness.
        return _joined(
            [
                checkpoint(projected, hidden_NH[chunk], chunk, use_reentrant=False)
                for chunk in chunks
            ]
        )


def _precision_of(weight: Tensor) -> torch.dtype:
    """Precision of the factors of a product with the weight: autocast's, where that is on."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right. CUDA sums in float32, and rounds to the precision of `out`.

    Logits rounded to bfloat16 would be off by up to 1/256 of their size.
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


def _logits(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """hidden @ weight.T + bias in float32, whatever the precision of the factors."""
    precision = _precision_of(weight_VH)
    if out is None:
        out = hidden_NH.new_empty(len(hidden_NH), len(weight_VH), dtype=torch.float32)
    _multiply(hidden_NH.to(precision), weight_VH.to(precision).t(), out)
    return out if bias_V is None else out.add_(bias_V)


class _LinearStats(torch.autograd.Function):
    """`stats_of` the logits hidden @ weight.T + bias, which are recomputed in the backward pass.

    The factors may be in lower precision (autocast, sharding), logits and the sums of gradients are
    float32. What autograd would allocate for each chunk is allocated once: the chunk's logits,
    which become their own gradient, and the weight's gradient, to which each chunk adds its share.
    On a CPU, fresh pages for them take longer than the matrix products. The statistics, with
    temporaries of the logits' size, are made of a few positions at a time, whose memory malloc
    keeps.
    """

    @staticmethod
    def of(
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        stats_of: _StatsOf,
        rows: int,
        entropy_gradient: bool,
    ) -> TokenStats:
        """The statistics of all positions, `rows` of which are projected at a time."""
        made = _LinearStats.apply(hidden_NH, weight_VH, bias_V, stats_of, rows, entropy_gradient)
        assert isinstance(made, tuple)
        return TokenStats(*made)

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        stats_of: _StatsOf,
        rows: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        ctx.set_materialize_grads(False)
        ctx.stats_of, ctx.rows, ctx.precision = stats_of, rows, _precision_of(weight_VH)
        factors = hidden_NH.to(ctx.precision), weight_VH.to(ctx.precision)
        # Small tensors kept from each part would sit in the holes that the big ones leave.
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
        if not entropy_gradient:
            ctx.mark_non_differentiable(made[1])
        return (*made[:2], made[2] if with_divergence else None)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        factor_NH, factor_VH = hidden_NH.to(ctx.precision), weight_VH.to(ctx.precision)
        # The log-probs' is zero where only a divergence is trained on.
        grads = tuple(grad if grad is not None and grad.any() else None for grad in grads)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_weight_VH = _float32_zeros(weight_VH) if wants_weight else None
        grad_bias_V = _float32_zeros(bias_V) if wants_bias else None
        for chunk, grad_CV, parts in _logits_of_chunks(factor_NH, factor_VH, bias_V, ctx.rows):
            for logits_nV, positions in parts:
                logits_nV.copy_(_pulled_back(ctx.stats_of, logits_nV, positions, grads))
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
            None, None, None,
        )  # fmt: skip


def _float32_zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32)


def _logits_of_chunks(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, rows: int
) -> Iterator[tuple[slice, Tensor, list[tuple[Tensor, slice]]]]:
    """Chunks: positions, logits, and both again part by part. One buffer serves them all."""
    width = len(weight_VH)
    buffer_CV = hidden_NH.new_empty(min(rows, len(hidden_NH)), width, dtype=torch.float32)
    together = positions_together(hidden_NH.device, width)
    for chunk in _slices(0, len(hidden_NH), rows):
        logits_CV = buffer_CV[: chunk.stop - chunk.start]
        _logits(hidden_NH[chunk], weight_VH, bias_V, out=logits_CV)
        parts = _slices(chunk.start, chunk.stop, together)
        lengths = [part.stop - part.start for part in parts]
        yield chunk, logits_CV, list(zip(logits_CV.split(lengths), parts, strict=True))


def _pulled_back(
    stats_of: _StatsOf,
    logits_nV: Tensor,
    positions: slice,
    grads: tuple[Tensor | None, ...],
) -> Tensor:
    """The gradient of the logits of these positions, from that of all positions' statistics."""
    with torch.enable_grad():
        logits_nV = logits_nV.detach().requires_grad_()
        made = [
            (stat_n, grad_N[positions])
            for stat_n, grad_N in zip(stats_of(logits_nV, positions), grads, strict=True)
            if grad_N is not None and stat_n is not None and stat_n.requires_grad
        ]
    if not made:
        return torch.zeros_like(logits_nV)
    stats, grads_n = zip(*made, strict=True)
    return torch.autograd.grad(stats, logits_nV, grads_n)[0]


def _slices(start: int, stop: int, length: int) -> list[slice]:
    return [slice(first, min(first + length, stop)) for first in range(start, stop, length)]


def _joined(stats: list[TokenStats]) -> TokenStats:
    logprobs, entropies, divergences = zip(*stats, strict=True)
    return TokenStats(
        torch.cat(logprobs),
        torch.cat(entropies),
        None if None in divergences else torch.cat(divergences),
    )


def model_width(projection: Callable[[Tensor], Tensor]) -> int:
    """Rows of a projection's weight: the vocabulary size V."""
    weight = getattr(projection, "weight")  # noqa: B009 (a Linear, or something that quacks like one)
    return int(weight.shape[0])
