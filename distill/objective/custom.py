"""Advantages and losses of a user's own, `module:function`: found, held to their form, tried.

    advantage(rewards_P)                         a step's groups (`GroupRewards`) -> an array of
                                                 each group's advantages, shape (G,)
    loss(logprobs_N, old_N, advantages_N)        tensors of one micro-batch's trained tokens ->
                                                 each token's loss, shape (N,)

`old_N` are the log-probs that ratios are taken against; it and the advantages carry no gradient. A
token's loss may depend on that token alone: the loss of a step is a sum over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.errors import DataError, described
from distill.lookup import require_arguments, resolve_function
from distill.objective.group_rewards import GroupRewards
from distill.types import FloatArray

OwnAdvantage = Callable[[Sequence[GroupRewards]], list[FloatArray]]
OwnLoss = Callable[[Tensor, Tensor, Tensor], Tensor]

_TRIED_TOKENS = 8


@cache
def own_advantage(name: str) -> OwnAdvantage:
    """The advantages of `module:function`.

    Raises:
        ConfigError: it cannot be imported, or called so.
        DataError: when called: it raised, or returned something else.
    """
    function = resolve_function("advantage", name, ())
    require_arguments("advantage", name, function, "rewards_P")

    def advantages(rewards_P: Sequence[GroupRewards]) -> list[FloatArray]:
        try:
            made = [np.asarray(made_G, np.float32) for made_G in function(rewards_P)]
        except (Exception, SystemExit) as error:  # the user's may raise anything
            raise DataError(f"advantage={name} raised {described(error)}") from error
        wanted = [group.rewards_G.shape for group in rewards_P]
        if (shapes := [made_G.shape for made_G in made]) != wanted:
            raise DataError(
                f"advantage={name} returned arrays of shapes {shapes}; one array a group, of "
                f"shapes {wanted}, are wanted"
            )
        if not all(np.isfinite(made_G).all() for made_G in made):
            raise DataError(f"advantage={name} returned a number that is not finite")
        return made

    return advantages


@cache
def own_loss(name: str) -> OwnLoss:
    """The tokens' losses by `module:function`.

    Raises:
        ConfigError: it cannot be imported, or called so.
        DataError: when called: it raised, or returned something else.
    """
    function = resolve_function("loss", name, ())
    require_arguments("loss", name, function, "logprobs_N", "old_N", "advantages_N")

    def loss(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor) -> Tensor:
        try:
            made_N = function(logprobs_N, old_N, advantages_N)
        except (Exception, SystemExit) as error:  # the user's may raise anything
            raise DataError(f"loss={name} raised {described(error)}") from error
        if not isinstance(made_N, Tensor) or made_N.shape != logprobs_N.shape:
            raise DataError(
                f"loss={name} returned {_form(made_N)}; a tensor of the tokens' losses, of shape "
                f"{tuple(logprobs_N.shape)}, is wanted"
            )
        return made_N

    return loss


def _form(made: Any) -> str:
    if isinstance(made, Tensor):
        return f"a tensor of shape {tuple(made.shape)}"
    return f"a {type(made).__name__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageTrial:
    """An advantage, called with made-up rewards: two groups, in one of which all earn the same."""

    name: str
    group_size: int

    def __call__(self) -> None:
        members = np.arange(self.group_size)
        truncated_G = members % 3 == 2
        groups = [
            GroupRewards(
                rewards_G=rewards_G.astype(np.float64),
                lengths_G=members + 5,
                truncated_G=truncated_G,
                counted_G=np.ones(self.group_size, np.bool_),
            )
            for rewards_G in (members % 2, np.ones(self.group_size))
        ]
        own_advantage(self.name)(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTrial:
    """A loss, called with made-up tokens: advantages of both signs, ratios around 1.

    Raises:
        DataError: when called: a loss or a gradient that is not finite, no gradient, or a token
            whose loss depends on the others.
    """

    name: str

    def __call__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn_3N = torch.rand(3, _TRIED_TOKENS, generator=generator)
        logprobs_N = -0.3 - 3 * drawn_3N[0]
        old_N = logprobs_N + 0.4 * (drawn_3N[1] - 0.5)
        advantages_N = 2 * drawn_3N[2] - 1
        logprobs_N.requires_grad_()
        loss = own_loss(self.name)
        loss_N = loss(logprobs_N, old_N, advantages_N)
        if not loss_N.requires_grad:
            raise DataError(f"loss={self.name} does not depend on logprobs_N: it has no gradient")
        [gradient_N] = torch.autograd.grad(loss_N.sum(), logprobs_N)
        if not (loss_N.isfinite().all() and gradient_N.isfinite().all()):
            raise DataError(f"loss={self.name} has a loss or a gradient that is not finite")
        if not gradient_N.any():
            raise DataError(f"loss={self.name} has a gradient of 0 at every token")
        half = _TRIED_TOKENS // 2
        alone_N = loss(logprobs_N[:half], old_N[:half], advantages_N[:half])
        if not torch.allclose(alone_N, loss_N[:half]):
            raise DataError(
                f"loss={self.name} gives a token another loss beside other tokens: micro-batches "
                "would not add up. Return each token's own loss; dividing by the count of tokens "
                "is done afterwards (normalisation=)"
            )
