"""Bias and variance of every estimator, exact: expectations are finite sums, nothing is sampled.

Includes estimators of other systems that isotherm refuses, to quantify the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from distill.objective.settings import ObjectiveConfig
from tests.enumeration import (
    ESTIMATORS,
    TEMPERATURES,
    Estimator,
    World,
    clipped_kl,
    error,
    k1,
    k2,
    k3,
    mean_gradient,
    reverse_kl,
    total_variance,
)

# The temperature at which inference engines score given tokens by default.
_UNSCALED = 1.0
# In addition to the clip that the tests use. Gaps go up to 3.6, 1.8 and 0.8 nats at T = 0.5, 1, 2.
_MORE_CLIPS = (1.0, 2.0)
_REFUSED_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1 as a loss": k1,
    "k2 as a loss": k2,
    "k3 as a loss": k3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorRow:
    """One estimator at one temperature. Biases are |E g - truth| / |truth| for different truths.

    Attributes:
        refused: True if isotherm refuses the estimator.
        bias: towards the gradient that it claims: of the sequence's KL, or of its divergence per
            state.
        bias_sequence: towards the gradient of KL(p_T || q_T) of whole sequences.
        bias_state: towards the gradient of the reverse KL per state, with fixed state frequencies.
        variance: trace of the covariance of one response's gradient, over the squared norm of the
            gradient that it claims.
    """

    temperature: float
    estimator: str
    refused: bool
    bias: float
    bias_sequence: float
    bias_state: float
    variance: float


def measure_estimators() -> list[dict[str, Any]]:
    """`EstimatorRow`s as dictionaries, by temperature; refused ones last."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        return [asdict(row) for T in TEMPERATURES for row in _at(world, T)]


def _at(world: World, T: float) -> list[EstimatorRow]:
    sequence, state = world.sequence_gradient(T, T), world.state_gradient(T, reverse_kl)
    probability_R = world.probabilities(T)

    def row(name: str, gradients_RW: Tensor, claimed: Tensor, refused: bool) -> EstimatorRow:
        mean = mean_gradient(gradients_RW, probability_R)
        variance = total_variance(gradients_RW, probability_R)
        return EstimatorRow(
            temperature=T,
            estimator=name,
            refused=refused,
            bias=error(mean, claimed),
            bias_sequence=error(mean, sequence),
            bias_state=error(mean, state),
            variance=variance / claimed.square().sum().item(),
        )

    def ours(name: str, estimator: Estimator, teacher_T: float) -> EstimatorRow:
        gradients_RW = world.gradients_by_response(estimator.objective, T, teacher_T)
        refused = teacher_T != T
        label = f"{name}, teacher unscaled" if refused else name
        return row(label, gradients_RW, world.claimed_gradient(estimator, T), refused)

    rows = [ours(name, estimator, T) for name, estimator in ESTIMATORS.items()]
    rows += [
        ours(
            f"sampled, kl_clip={clip}",
            Estimator(ObjectiveConfig(kl_clip=clip), clipped_kl(clip)),
            T,
        )
        for clip in _MORE_CLIPS
    ]
    if T != _UNSCALED:
        rows += [
            ours(name, estimator, _UNSCALED)
            for name, estimator in ESTIMATORS.items()
            if estimator.objective.estimator == "sampled" and not estimator.objective.kl_clip
        ]
    return rows + [
        row(name, world.naive_gradients_by_response(token_loss, T), state, True)
        for name, token_loss in _REFUSED_LOSSES.items()
    ]


def estimators_table(rows: list[dict[str, Any]]) -> Table:
    """Console table of `measure_estimators`."""
    table = Table(title="gradient of one response: bias and variance, exact, relative to the truth")
    for header in ("T", "estimator", "bias", "to sequence KL", "to state KL", "variance"):
        table.add_column(header, justify="left" if header == "estimator" else "right")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        figures = (row["bias"], row["bias_sequence"], row["bias_state"])
        table.add_row(
            f"{row['temperature']:g}",
            row["estimator"] + (" (refused)" if row["refused"] else ""),
            *(f"{figure:.3f}" for figure in figures),
            f"{row['variance']:.2f}",
            end_section=after is not None and after["temperature"] != row["temperature"],
        )
    return table
