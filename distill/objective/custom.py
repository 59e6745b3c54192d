"""Custom advantages, losses and divergences, `module:function`: lookup, checks and trial calls.

    advantage(rewards_P)                         a step's groups (`GroupRewards`) -> an array of
                                                 each group's advantages, shape (G,)
    loss(logprobs_N, old_N, advantages_N)        tensors of one micro-batch's trained tokens ->
                                                 each token's loss, shape (N,)
    divergence(log_p_NV, log_q_NV)               log-probs of student and teacher at one
                                                 temperature, one distribution per row -> the
                                                 divergence of each row, shape (N,)

`old_N` are the log-probs in the denominator of the ratios; `old_N` and the advantages carry no
gradient. A token's loss may depend only on that token, because the loss of a step is a sum over
micro-batches. The columns of a divergence are the vocabulary, or likely tokens and one bucket for
all other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
# Function of tensors whose first dimension is positions; it returns one number per position.
PerPosition = Callable[..., Tensor]

_TRIED_TOKENS, _TRIED_VOCABULARY = 8, 6
# Gradients below this are rounding errors of a constant function.
_NO_GRADIENT = 1e-6


@cache
def own_advantage(name: str) -> OwnAdvantage:
    """Custom advantage function `module:function`, with its results checked.

    Raises:
        ConfigError: the function cannot be imported, or does not accept these arguments.
        DataError: when called: the function raised, or returned something else.
    """
    function = resolve_function("baseline", name, ())
    require_arguments("baseline", name, function, "rewards_P")

    def advantages(rewards_P: Sequence[GroupRewards]) -> list[FloatArray]:
        try:
            made = [np.asarray(made_G, np.float32) for made_G in function(rewards_P)]
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise DataError(f"baseline={name} raised {described(error)}") from error
        wanted = [group.rewards_G.shape for group in rewards_P]
        if (shapes := [made_G.shape for made_G in made]) != wanted:
            raise DataError(
                f"baseline={name} returned arrays of shapes {shapes}; it must return one array per "
                f"group, of shapes {wanted}"
            )
        if not all(np.isfinite(made_G).all() for made_G in made):
            raise DataError(f"baseline={name} returned a number that is not finite")
        return made

    return advantages


@cache
def own_loss(name: str) -> PerPosition:
    """Custom loss function `module:function`, with its results checked.

    Raises:
        ConfigError: the function cannot be imported, or does not accept these arguments.
        DataError: when called: the function raised, or returned something else.
    """
    return _own("loss", name, "logprobs_N", "old_N", "advantages_N")


@cache
def own_divergence(name: str) -> PerPosition:
    """Custom divergence function `module:function`; it raises the same errors as `own_loss`."""
    return _own("divergence", name, "log_p_NV", "log_q_NV")


def _own(setting: str, name: str, *arguments: str) -> PerPosition:
    function = resolve_function(setting, name, ())
    require_arguments(setting, name, function, *arguments)
    return per_position(f"{setting}={name}", function)


def per_position(what: str, function: PerPosition) -> PerPosition:
    """Wrap a function so that each call checks the shape of its result.

    Raises:
        DataError: when called: the function raised, or its result is not a tensor with one number
            per position.
    """

    def checked(*tensors: Tensor) -> Tensor:
        try:
            made_N = function(*tensors)
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise DataError(f"{what} raised {described(error)}") from error
        wanted = tensors[0].shape[:1]
        if not isinstance(made_N, Tensor) or made_N.shape != wanted:
            raise DataError(
                f"{what} returned {_form(made_N)}; it must return a tensor with one number per "
                f"token, of shape {tuple(wanted)}"
            )
        return made_N

    return checked


def _form(made: Any) -> str:
    if isinstance(made, Tensor):
        return f"a tensor of shape {tuple(made.shape)}"
    return f"a {type(made).__name__}"


def try_advantage(name: str, group_size: int) -> None:
    """Call a custom advantage with invented rewards.

    Two groups; in one of them all members have the same reward.
    """
    members = np.arange(group_size)
    truncated_G = members % 3 == 2
    groups = [
        GroupRewards(
            rewards_G=rewards_G.astype(np.float64),
            lengths_G=members + 5,
            truncated_G=truncated_G,
            counted_G=np.ones(group_size, np.bool_),
        )
        for rewards_G in (members % 2, np.ones(group_size))
    ]
    own_advantage(name)(groups)


def try_loss(name: str) -> None:
    """Call a custom loss with invented tokens: advantages of both signs, ratios around 1.

    Raises:
        DataError: a loss or a gradient that is not finite, no gradient, or a token whose loss
            depends on the others.
    """
    generator = torch.Generator().manual_seed(0)
    drawn_3N = torch.rand(3, _TRIED_TOKENS, generator=generator)
    logprobs_N = (-0.3 - 3 * drawn_3N[0]).requires_grad_()
    old_N = logprobs_N.detach() + 0.4 * (drawn_3N[1] - 0.5)
    advantages_N = 2 * drawn_3N[2] - 1
    loss = own_loss(name)
    _try(f"loss={name}", loss, (logprobs_N, old_N, advantages_N), logprobs_N)


def try_divergence(name: str) -> None:
    """Call a custom divergence with random distributions. Raises the same errors as `try_loss`."""
    generator = torch.Generator().manual_seed(0)
    drawn_2NV = torch.randn(2, _TRIED_TOKENS, _TRIED_VOCABULARY, generator=generator)
    logits_NV = (3 * drawn_2NV[0]).requires_grad_()
    log_p_NV, log_q_NV = logits_NV.log_softmax(1), (3 * drawn_2NV[1]).log_softmax(1)
    divergence = own_divergence(name)
    _try(f"divergence={name}", divergence, (log_p_NV, log_q_NV), logits_NV)


def _try(what: str, function: PerPosition, tensors: Sequence[Tensor], learnt: Tensor) -> None:
    """Raise DataError for values without a usable gradient, or that depend on other tokens."""
    made_N = function(*tensors)
    if not made_N.requires_grad:
        raise DataError(f"{what} does not depend on its first argument: it has no gradient")
    [gradient] = torch.autograd.grad(made_N.sum(), learnt, retain_graph=True)
    if not (made_N.isfinite().all() and gradient.isfinite().all()):
        raise DataError(f"{what} has a value or a gradient that is not finite")
    if gradient.abs().max() < _NO_GRADIENT:
        raise DataError(f"{what} has a gradient of 0 at every token")
    half = _TRIED_TOKENS // 2
    alone_N = function(*(tensor[:half] for tensor in tensors))
    if not torch.allclose(alone_N, made_N[:half], atol=1e-6):
        raise DataError(
            f"{what} returns values of tokens that depend on other tokens, so the sum over "
            "micro-batches would be wrong. Return the value of each token alone; the division by "
            "the number of tokens is done afterwards (normalisation=)"
        )
