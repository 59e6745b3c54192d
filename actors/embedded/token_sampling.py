"""Token sampling from logits: exact softmax(z / T) by inverse CDF, greedy, and truncation.

Each sampled token is determined by one uniform number, so the samples of a row depend only on its
logits and its generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.models.logprobs import Event, as_outcomes, one_outcome
from distill.sampling import UNSCALED, EvalSampling, Sampling


class SamplingPlan:
    """Sampling parameters of N rows as tensors. Rows may mix training and evaluation."""

    def __init__(
        self,
        samplings: Sequence[Sampling],
        given: Sequence[int | None],
        device: torch.device,
        event: Event = (),
        top_k: Sequence[int] = (),
    ) -> None:
        """
        Args:
            given: for each row, a token whose log-prob is reported instead of the sampled token's;
                None: the sampled token's.
            event: tokens that count as one outcome, with the sum of their probabilities.
            top_k: for each row, number of likeliest outcomes to list; empty: 0 for all rows.
        """
        self._event = event
        # Greedy rows are not scaled, because a temperature of 0 cannot divide.
        temperatures = [sampling.temperature or UNSCALED for sampling in samplings]
        self._unscaled = all(temperature == UNSCALED for temperature in temperatures)
        self._temperature_N1 = torch.tensor(temperatures, device=device)[:, None]
        greedy = [row for row, sampling in enumerate(samplings) if sampling.temperature == 0]
        self._greedy = torch.tensor(greedy, dtype=torch.int64, device=device)
        cut = [
            (row, sampling)
            for row, sampling in enumerate(samplings)
            if isinstance(sampling, EvalSampling)
            and sampling.temperature > 0
            and (sampling.top_p < 1 or sampling.top_k > 0)
        ]
        self._cut = torch.tensor([row for row, _ in cut], dtype=torch.int64, device=device)
        self._top_p_C = torch.tensor([s.top_p for _, s in cut], device=device)
        self._top_k_C = torch.tensor([s.top_k or 1 << 62 for _, s in cut], device=device)
        asked = [(row, token) for row, token in enumerate(given) if token is not None]
        self._asked = torch.tensor([row for row, _ in asked], dtype=torch.int64, device=device)
        given_A1 = torch.tensor([[token] for _, token in asked], device=device)
        self._given_A1 = as_outcomes(given_A1, event)
        self._event_E = torch.tensor(event, dtype=torch.int64, device=device)
        self._most = max(top_k, default=0)
        self._listed = [row for row, k in enumerate(top_k) if k]

    def likeliest(self, logits_NV: Tensor) -> npt.NDArray[np.int32] | None:
        """Ids of the likeliest outcomes, the best first, for each row with a `top_k` above 0.

        Each row has as many ids as the largest `top_k`. The event has the id of its first token.
        None if no row lists outcomes.
        """
        if not self._most:
            return None
        if len(self._listed) < len(logits_NV):
            logits_NV = logits_NV[self._listed]
        if self._event:  # the rank of an event depends on its total probability at T
            temperature_N1 = self._temperature_N1
            if len(self._listed) < len(temperature_N1):
                temperature_N1 = temperature_N1[self._listed]
            logits_NV = one_outcome(logits_NV / temperature_N1, self._event)
        ids_NK = logits_NV.topk(self._most, dim=1).indices
        return ids_NK.cpu().numpy().astype(np.int32)

    def sample(
        self, logits_NV: Tensor, uniforms_N: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Sample a token for each row.

        Returns:
            The tokens, and their log softmax(z / T) before truncation, or that of the given token
            (T = 0: unscaled). Non-finite logits give a non-finite log-prob and an arbitrary token.
        """
        scaled_NV = logits_NV if self._unscaled else logits_NV / self._temperature_N1
        p_NV = torch.softmax(scaled_NV, dim=1, dtype=torch.float32)
        weights_NV = p_NV
        if len(self._cut):
            weights_NV = p_NV.clone()
            weights_NV[self._cut] = truncate(p_NV[self._cut], self._top_p_C, self._top_k_C)
        tokens_N = draw(weights_NV, torch.from_numpy(uniforms_N).to(p_NV.device))
        if len(self._greedy):
            tokens_N[self._greedy] = logits_NV[self._greedy].argmax(dim=1)
        chosen_N = p_NV.gather(1, tokens_N[:, None]).squeeze(1)
        if len(self._event_E):
            together_N = p_NV.index_select(1, self._event_E).sum(dim=1)
            chosen_N = torch.where(torch.isin(tokens_N, self._event_E), together_N, chosen_N)
        logprobs_N = chosen_N.log()
        if len(self._asked):
            # Not log(p): p of an unlikely given token may be 0 in fp32.
            asked_AV = one_outcome(scaled_NV[self._asked].float(), self._event)
            log_p_AV = torch.log_softmax(asked_AV, dim=1)
            logprobs_N[self._asked] = log_p_AV.gather(1, self._given_A1).squeeze(1)
        return tokens_N.cpu().numpy(), logprobs_N.cpu().numpy()


def truncate(p_NV: Tensor, top_p_N: Tensor, top_k_N: Tensor) -> Tensor:
    """Set the probabilities outside top_k, then outside top_p of the remaining mass, to 0.

    Rows are not renormalised. top_p keeps the smallest number of likeliest tokens whose mass
    reaches top_p, and always the first one.
    """
    sorted_NV, order_NV = p_NV.sort(dim=1, descending=True, stable=True)
    rank_V = torch.arange(p_NV.shape[1], device=p_NV.device)
    sorted_NV = sorted_NV.masked_fill(rank_V[None] >= top_k_N[:, None], 0.0)
    mass_NV = sorted_NV.cumsum(dim=1, dtype=torch.float64)
    before_NV = mass_NV - sorted_NV
    limit_N1 = top_p_N[:, None] * mass_NV[:, -1:]
    # top_p = 1 cuts nothing: rounding in the sum must not drop the tail.
    sorted_NV = sorted_NV.masked_fill((before_NV >= limit_N1) & (top_p_N[:, None] < 1), 0.0)
    return torch.zeros_like(p_NV).scatter_(1, order_NV, sorted_NV)


def draw(weights_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Draw one index for each row, in proportion to non-negative weights; never one of weight 0.

    The inverse CDF has two levels, blocks and the tokens of one block, so that only about 2 sqrt(V)
    of V values are accumulated. Sums over blocks and within a block are in fp64.
    """
    vocab_size = weights_NV.shape[1]
    size = 1 << ((vocab_size - 1).bit_length() // 2)
    whole = vocab_size // size
    sums_NB = weights_NV[:, : whole * size].unflatten(1, (whole, size)).sum(dim=2)
    if whole * size < vocab_size:
        sums_NB = torch.cat([sums_NB, weights_NV[:, whole * size :].sum(1, keepdim=True)], dim=1)
    cdf_NB = sums_NB.cumsum(dim=1, dtype=torch.float64)
    target_N1 = uniforms_N[:, None] * cdf_NB[:, -1:]
    block_N1 = _first_above(cdf_NB, target_N1)
    rest_N1 = target_N1 - torch.where(block_N1 > 0, cdf_NB.gather(1, (block_N1 - 1).clamp_(0)), 0.0)
    index_NS = block_N1 * size + torch.arange(size, device=weights_NV.device)
    inside_NS = weights_NV.gather(1, index_NS.clamp(max=vocab_size - 1))
    inside_NS.masked_fill_(index_NS >= vocab_size, 0.0)
    place_N1 = _first_above(inside_NS.cumsum(dim=1, dtype=torch.float64), rest_N1)
    return (block_N1 * size + place_N1).clamp_(max=vocab_size - 1).squeeze(1)


def _first_above(cdf_NK: Tensor, target_N1: Tensor) -> Tensor:
    """Index of the first value above the target, after the target is limited to below the total.

    The value at this index exceeds the previous one, so its weight is above 0 despite rounding.
    """
    below_total_N1 = torch.nextafter(cdf_NK[:, -1:], torch.zeros_like(target_N1))
    target_N1 = torch.minimum(target_N1, below_total_N1)
    index_N1 = torch.searchsorted(cdf_NK, target_N1, right=True)
    return index_N1.clamp_(max=cdf_NK.shape[1] - 1)  # only a NaN row gets past the end
