"""Losses of `Policy.forward_backward`: ours by name, and functions of log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from distill.errors import ConfigError, DataError
from distill.lookup import known_names
from distill.objective.batching import Batch, TrainingRow
from distill.objective.losses import Metrics, StepCounts
from distill.objective.settings import AUTO, LossName, ObjectiveConfig
from learner.dpo import PreferenceLoss
from learner.forward import Forward, LossFunction
from learner.policy_loss import PolicyObjectiveLoss, cross_entropy_loss

# Of the log-probs of a batch's trained tokens (N,), each at its row's T, and the batch: the *sum*
# of its tokens' losses.
TokenLossFunction = Callable[[Tensor, Batch], Tensor]
Loss = str | ObjectiveConfig | PreferenceLoss | TokenLossFunction
# The divisor of an update: the number of these in all the rows since the update before.
Unit = Literal["token", "sequence", "pair"]

_POLICY_LOSSES = get_args(LossName)
_NAMES = ("cross_entropy", *_POLICY_LOSSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionLoss:
    """The `LossFunction` of somebody's function; a mean over the trained tokens."""

    function: TokenLossFunction

    def __call__(
        self, forward: Forward, batch: Batch, counts: StepCounts
    ) -> tuple[Tensor, Metrics]:
        stats = forward(batch)
        loss = self.function(stats.logprobs_N, batch)
        if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.requires_grad:
            raise DataError(
                f"the loss function returned {_described(loss)}; return a scalar tensor that "
                "depends on the log-probs: the sum of the tokens' losses"
            )
        return loss / counts.tokens, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLoss:
    """A loss, what its rows are counted in, and how many of them stay together."""

    function: LossFunction
    unit: Unit
    rows_per_unit: int = 1

    def count(self, rows_D: Sequence[TrainingRow]) -> int:
        """Number of units among the rows."""
        if self.unit == "token":
            return sum(row.num_trained for row in rows_D)
        return sum(row.ends_sequence for row in rows_D) // self.rows_per_unit


def choose_loss(loss: Loss) -> ChosenLoss:
    """The loss that is meant.

    Raises:
        ConfigError: an unknown name, or an objective that needs more than rows have.
    """
    if isinstance(loss, ObjectiveConfig):
        if loss.estimator in ("full", AUTO):
            raise ConfigError(
                f"estimator={loss.estimator} is for isotherm.run, which has teachers in its "
                "learner; use estimator=sampled or top_k"
            )
        return ChosenLoss(function=PolicyObjectiveLoss(objective=loss), unit=loss.normalisation)
    if isinstance(loss, PreferenceLoss):
        return ChosenLoss(function=loss, unit="pair", rows_per_unit=2)
    if callable(loss):
        return ChosenLoss(function=FunctionLoss(function=loss), unit="token")
    if loss == "cross_entropy":
        return ChosenLoss(function=cross_entropy_loss, unit="token")
    if loss not in _POLICY_LOSSES:
        raise ConfigError(
            f"loss={loss!r} is unknown; {known_names(loss, _NAMES)}; or an ObjectiveConfig, a "
            "PreferenceLoss, a function of (log-probs, batch)"
        )
    # The rows' advantages are the whole signal: no row has a teacher's distribution.
    return choose_loss(ObjectiveConfig(loss=loss, kl_coef=0.0))


def _described(loss: object) -> str:
    if not isinstance(loss, Tensor):
        return f"a {type(loss).__name__}"
    return f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
