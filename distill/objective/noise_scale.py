"""The gradient's noise scale: how many samples a step needs before noise outweighs its direction.

McCandlish et al. 2018 (arXiv 1812.06162), equation 2.8: B_simple = tr(Sigma) / |G|^2, where Sigma
is the covariance of one sample's gradient and G the true gradient. Samples of one prompt are
correlated, so Sigma is split into a part `within` prompts and a part `between` prompts (an analysis
of variance with equal groups).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

# Common group sizes.
_GROUP_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """Unbiased estimates from the gradients of P prompts with G samples each.

    Attributes:
        signal: estimate of |G|^2; 0 or below if the noise exceeds the signal.
        within, between: traces of the covariance within a prompt and between prompts' means.
        between_error: standard error of `between`, from the spread of its terms over prompts. A
            prompt's component along the signal counts as spread, so the error is overestimated.
        prompts: number of prompts measured.
        group_size: number of samples of each prompt.
    """

    signal: float
    within: float
    between: float
    between_error: float
    prompts: int
    group_size: int

    @property
    def samples(self) -> float:
        """B_simple, as a number of samples of different prompts; infinite if `signal` <= 0."""
        return (self.within + self.between) / self.signal if self.signal > 0 else math.inf

    def best_group_size(self, prompt_cost: float) -> int:
        """Group size with the least noise for its cost (Cochran, Sampling Techniques, 10.3).

        Args:
            prompt_cost: cost of a prompt in samples: tokens of a prompt / tokens of a response.
        """
        if self.between <= 0:
            return _GROUP_SIZES[-1]
        ideal = math.sqrt(max(self.within, 0.0) / self.between * prompt_cost)
        return min(_GROUP_SIZES, key=lambda size: abs(math.log(size) - math.log(max(ideal, 0.1))))

    def prompts_for(self, group_size: int) -> float:
        """Number of prompts at which the noise of a step is as large as its signal."""
        noise = max(self.between, 0.0) + max(self.within, 0.0) / group_size
        return noise / self.signal if self.signal > 0 else math.inf


def noise_scale(
    *,
    squared_PG: Sequence[Sequence[float]],
    squared_means_P: Sequence[float],
    squared_mean: float,
) -> NoiseScale:
    """Estimate the noise scale from squared norms of gradients.

    Args:
        squared_PG: squared norm of each sample's gradient; at least 2 prompts, 2 samples each.
        squared_means_P: squared norm of the mean gradient of each prompt.
        squared_mean: squared norm of the mean of all gradients.
    """
    prompts, group_size = len(squared_PG), len(squared_PG[0])
    assert prompts > 1 and group_size > 1
    within_P = [
        (sum(squared_G) - group_size * of_mean) / (group_size - 1)
        for squared_G, of_mean in zip(squared_PG, squared_means_P, strict=True)
    ]
    within = sum(within_P) / prompts
    terms_P = [
        of_mean - in_prompt / group_size
        for of_mean, in_prompt in zip(squared_means_P, within_P, strict=True)
    ]
    of_means = (sum(squared_means_P) - prompts * squared_mean) / (prompts - 1)
    return NoiseScale(
        signal=squared_mean - of_means / prompts,
        within=within,
        between=of_means - within / group_size,
        between_error=stdev(terms_P) / math.sqrt(prompts),
        prompts=prompts,
        group_size=group_size,
    )
