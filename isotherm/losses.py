"""Losses of `Policy.forward_backward`: built-in losses by name, and functions of log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from distill.errors import ConfigError, DataError
from distill.lookup import known_names
from distill.objective.batching import Batch, TrainingRow
from distill.objective.custom import per_position
from distill.objective.losses import Metrics, StepCounts
from distill.objective.settings import AUTO, LossName, ObjectiveConfig, is_own
from learner.forward import Forward, LossFunction
from learner.policy_loss import PolicyObjectiveLoss, PreferenceLoss, cross_entropy_loss
from learner.teachers import LocalTeachers

# (logprobs_N, old_N, advantages_N) of trained tokens -> loss of each token, (N,). The signature is
# that of the setting loss=module:function (`distill.objective.custom`).
TokenLossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
Loss = str | ObjectiveConfig | PreferenceLoss | TokenLossFunction
# The gradient of an update is divided by the number of these units in all rows since the last one.
LossUnit = Literal["token", "sequence", "pair"]

_POLICY_LOSSES = get_args(LossName)
_NAMES = ("cross_entropy", *_POLICY_LOSSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionLoss:
    """The `LossFunction` of a custom function: its mean over the trained tokens."""

    function: TokenLossFunction

    def __call__(
        self, forward: Forward, batch: Batch, counts: StepCounts
    ) -> tuple[Tensor, Metrics]:
        logprobs_N = forward(batch).logprobs_N
        function = per_position(f"loss={_name(self.function)}", self.function)
        loss_N = function(logprobs_N, batch.behaviour_logprobs_N, batch.advantages_N)
        if not loss_N.requires_grad:
            raise DataError(
                f"loss={_name(self.function)} does not depend on the log-probs of its first "
                "argument: it has no gradient"
            )
        return loss_N.sum() / counts.tokens, {}


def _name(function: TokenLossFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLoss:
    """A loss, the unit of its mean, and the number of rows that form one unit."""

    function: LossFunction
    unit: LossUnit
    rows_per_unit: int = 1

    def count(self, rows_D: Sequence[TrainingRow]) -> int:
        """Number of units among the rows."""
        if self.unit == "token":
            return sum(row.num_trained for row in rows_D)
        return sum(row.ends_sequence for row in rows_D) // self.rows_per_unit


def choose_loss(loss: Loss, teacher: LocalTeachers | None = None) -> ChosenLoss:
    """Convert the `loss` argument of `forward_backward` to a loss function.

    Args:
        teacher: computes the distributions for estimator=full.

    Raises:
        ConfigError: an unknown name, an objective that needs data that rows do not have, or a
            teacher that the loss does not use.
    """
    whole = isinstance(loss, ObjectiveConfig) and loss.estimator == "full" and loss.kl_coef > 0
    if teacher is not None and not whole:
        raise ConfigError(
            "teacher= changes nothing with this loss; give loss=ObjectiveConfig(estimator='full')"
        )
    if isinstance(loss, ObjectiveConfig):
        if loss.estimator == AUTO:
            raise ConfigError("objective.estimator=auto is for isotherm.run; name the estimator")
        if whole and teacher is None:
            raise ConfigError(
                "objective.estimator=full needs the teacher's distributions: give forward_backward "
                "a teacher=DIR, or use estimator=sampled or top_k"
            )
        function = PolicyObjectiveLoss(objective=loss, teachers=teacher)
        return ChosenLoss(function=function, unit=loss.normalisation)
    if isinstance(loss, PreferenceLoss):
        return ChosenLoss(function=loss, unit="pair", rows_per_unit=2)
    if callable(loss):
        return ChosenLoss(function=FunctionLoss(function=loss), unit="token")
    if loss == "cross_entropy":
        return ChosenLoss(function=cross_entropy_loss, unit="token")
    if loss not in _POLICY_LOSSES and not is_own(loss):
        raise ConfigError(
            f"loss={loss!r} is unknown; {known_names(loss, _NAMES)}; or an ObjectiveConfig, a "
            "PreferenceLoss, a function of (logprobs_N, old_N, advantages_N)"
        )
    # No row has a teacher's distribution, so the rows' advantages are the only signal.
    return choose_loss(ObjectiveConfig(loss=loss, kl_coef=0.0))
