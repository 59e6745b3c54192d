"""The gradient's noise scale: how many samples a step needs before noise outweighs its direction.

McCandlish et al. 2018 (arXiv 1812.06162), equation 2.8: B_simple = tr(Sigma) / |G|^2, where Sigma
is the covariance of one sample's gradient and G the true one. Samples of one prompt are alike, so
Sigma is split: `within` prompts and `between` them (an analysis of variance with equal groups).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

# Groups that anybody samples.
_GROUP_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """Unbiased estimates from the gradients of P prompts, G samples each.

    Attributes:
        signal: |G|^2; 0 or less where the noise hides it.
        within, between: traces of the covariance within a prompt and between prompts' means.
        between_error: standard error of `between`, from the spread of its terms over prompts. A
            prompt's part along the signal counts as spread, so it is rather too large.
        prompts, group_size: of the measurement.
    """

    signal: float
    within: float
    between: float
    between_error: float
    prompts: int
    group_size: int

    @property
    def samples(self) -> float:
        """B_simple, in samples of prompts of their own; infinite where no signal was seen."""
        return (self.within + self.between) / self.signal if self.signal > 0 else math.inf

    def best_group_size(self, prompt_cost: float) -> int:
        """The one that makes the least noise for its price (Cochran, Sampling Techniques, 10.3).

        Args:
            prompt_cost: of a prompt, in samples: its tokens over those of a response.
        """
        if self.between <= 0:
            return _GROUP_SIZES[-1]
        ideal = math.sqrt(max(self.within, 0.0) / self.between * prompt_cost)
        return min(_GROUP_SIZES, key=lambda size: abs(math.log(size) - math.log(max(ideal, 0.1))))

    def prompts_for(self, group_size: int) -> float:
        """Prompts at which the noise of a step is as large as its signal."""
        noise = max(self.between, 0.0) + max(self.within, 0.0) / group_size
        return noise / self.signal if self.signal > 0 else math.inf


def noise_scale(
    *,
    squared_PG: Sequence[Sequence[float]],
    squared_means_P: Sequence[float],
    squared_mean: float,
) -> NoiseScale:
    """From squared norms: of each sample's gradient, of each prompt's mean, of the mean of all.

    Needs two prompts and two samples of each, at least.
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
