"""Analyses of a replayed step: another learning rate, and attribution of the gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

import numpy as np
from torch import Tensor

from distill.objective.batching import TrainingRow
from distill.objective.rows import rows_by_group
from distill.objective.settings import Normalisation
from distill.objective.whole_groups import LocalGroups
from distill.types import TokenArray, TopLogprobs, TrajectoryGroup
from learner.optimizer import read_trainer, write_trainer
from learner.plan import Part
from learner.policy_loss import TeacherSamplesLoss
from learner.rollouts import KeptRollouts, Rollouts

if TYPE_CHECKING:
    from learner.checkpoint import Checkpoint
    from learner.loop import PolicyLoop

# Decodes tokens to text.
Decode = Callable[[TokenArray], str]
# Number of responses with the largest shares whose gradient is attributed to single tokens, which
# takes a backward pass per token.
_TAKEN_APART = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientShare:
    """Share of the step's gradient that is due to a group, a member of it, or a token.

    Attributes:
        text: text of the prompt, the response, or the token.
        member: index of the member in its group; None for a whole group.
        token: index among the tokens that the member sampled; None for a whole response.
    """

    share: float
    text: str
    group: int
    member: int | None = None
    token: int | None = None

    @property
    def where(self) -> str:
        member = "" if self.member is None else f", trajectory {self.member}"
        token = "" if self.token is None else f", token {self.token}"
        return f"group {self.group}{member}{token}"

    def link(self, step: int) -> str:
        """URL fragment of the place in the report's page (cluster/inspect/report/links.js)."""
        place = {"step": step, "group": self.group, "member": self.member, "token": self.token}
        return urlencode({name: at for name, at in place.items() if at is not None})


def with_lr(checkpoint: Checkpoint, was: float, now: float) -> Checkpoint:
    """Change the peak rate of the checkpoint's schedule in place, from `was` to `now`."""
    state = read_trainer(checkpoint.path)
    if was != now and state.schedule is not None:
        changed = {
            name: [rate / was * now for rate in state.schedule[name]]
            for name in ("base_lrs", "_last_lr")
        }
        write_trainer(checkpoint.path, replace(state, schedule={**state.schedule, **changed}))
    return checkpoint


def attribute_gradient(
    loop: PolicyLoop, groups_P: Sequence[TrajectoryGroup], decode: Decode, number: int
) -> dict[str, list[GradientShare]]:
    """Rank the prompts, responses and tokens with the largest shares of the step's gradient G.

    The share of a part g of G is g . G / |G|^2. Shares sum to 1; a negative share opposes the step.
    Tokens are ranked only if the loss has a separate term for each. Several substeps are treated as
    one.

    Args:
        loop: policy loop in the state before the step.
        number: number of prompts, responses and tokens that are returned.
    """
    trained = _trained(loop, groups_P)
    if not trained.groups_P:
        return {}
    by_group = list(rows_by_group(trained.groups_P, trained.rows_D))
    shares = _GradientShares(loop, by_group)
    of_prompts, of_responses = [], []
    for group, rows in by_group:
        rest, total = iter(rows), 0.0
        for g, member in enumerate(group.trajectories_G):
            own = _SampledRows(group.by_teacher, [next(rest) for _ in member.segments])
            share = shares.of(own)
            total += share
            text = decode(np.concatenate([row.tokens_T[row.loss_mask_T] for row in own.rows_D]))
            of_responses.append(
                (GradientShare(share=share, text=text, group=group.group_id, member=g), own)
            )
        first = group.trajectories_G[0].segments[0]
        prompt = decode(first.tokens_T[: first.first_action])
        of_prompts.append(GradientShare(share=total, text=prompt, group=group.group_id))
    of_responses.sort(key=lambda pair: -abs(pair[0].share))
    found = {
        "prompts": _largest(of_prompts, number),
        "responses": [response for response, _ in of_responses[:number]],
    }
    objective = loop.loss.objective
    if objective.loss != "gspo" and not objective.kl_discount_factor:
        apart = of_responses[:_TAKEN_APART]
        tokens = [
            token for response, rows in apart for token in shares.of_tokens(response, rows, decode)
        ]
        found[f"tokens of the first {len(apart)} responses"] = _largest(tokens, number)
    return found


def _trained(loop: PolicyLoop, groups_P: Sequence[TrajectoryGroup]) -> KeptRollouts:
    """Groups that the loop would train on, with their rows."""
    source = LocalGroups()
    weights = loop.rollouts.teacher_weights
    rollouts = Rollouts(loop.learner, source, loop.loss, weights)
    plan = rollouts.plan(source.taken(groups_P).groups_P)
    rollouts.hold(plan)
    if loop.base_is_reference and plan.groups_P:
        rollouts.add_reference()
    rollouts.build(plan)
    for part in chain.from_iterable(plan.updates):
        rollouts.before_update(part)
    return rollouts.kept(plan, [group.group_id for group in plan.groups_P])


def _largest(shares: Sequence[GradientShare], number: int) -> list[GradientShare]:
    return sorted(shares, key=lambda each: -abs(each.share))[:number]


class _SampledRows(NamedTuple):
    """Rows of samples that all come from the policy, or all from the teacher."""

    by_teacher: bool
    rows_D: Sequence[TrainingRow]


class _GradientShares:
    """Shares of the gradient of a step's loss.

    The policy's samples and the teacher's are averaged separately, and weighted by their shares of
    the step's groups (`learner.rollouts`).
    """

    def __init__(
        self,
        loop: PolicyLoop,
        by_group: Sequence[tuple[TrajectoryGroup, Sequence[TrainingRow]]],
    ) -> None:
        self._loop = loop
        self._normalisation: Normalisation = loop.loss.objective.normalisation
        parts: dict[bool, list[TrainingRow]] = {}
        groups: Counter[bool] = Counter()
        for group, rows in by_group:
            parts.setdefault(group.by_teacher, []).extend(rows)
            groups[group.by_teacher] += 1
        self._coefs = {  # weight of a token or sequence, by part
            kind: groups[kind] / groups.total() / self._count(rows) for kind, rows in parts.items()
        }
        self._whole = self._gradient(*(_SampledRows(kind, rows) for kind, rows in parts.items()))
        self._squared = max(_product(self._whole, self._whole), 1e-30)

    def of(self, rows: _SampledRows) -> float:
        return _product(self._gradient(rows), self._whole) / self._squared

    def of_tokens(
        self, response: GradientShare, rows: _SampledRows, decode: Decode
    ) -> list[GradientShare]:
        places = [(row, int(t)) for row in rows.rows_D for t in np.flatnonzero(row.loss_mask_T)]
        return [
            replace(
                response,
                share=self.of(_SampledRows(rows.by_teacher, [_of_one_token(row, t)])),
                text=decode(row.tokens_T[t : t + 1]),
                token=n,
            )
            for n, (row, t) in enumerate(places)
        ]

    def _gradient(self, *parts: _SampledRows) -> dict[str, Tensor]:
        """Gradient, by parameter name, of the part of the step's loss that is due to these rows."""
        learner = self._loop.learner
        for kind, rows_D in parts:
            loss = TeacherSamplesLoss(normalisation=self._normalisation)
            coef = self._coefs[kind] * self._count(rows_D)
            learner.forward_backward(
                Part(rows_D=rows_D, loss=loss if kind else self._loop.loss, coef=coef)
            )
        gradient = {
            name: parameter.grad.detach().clone()
            for name, parameter in learner.model.named_parameters()
            if parameter.grad is not None
        }
        learner.zero_grad()
        return gradient

    def _count(self, rows_D: Sequence[TrainingRow]) -> int:
        """Number of items over which the loss is averaged: tokens or sequences."""
        if self._normalisation == "token":
            return sum(row.num_trained for row in rows_D)
        return sum(row.ends_sequence for row in rows_D)


def _product(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return float(sum((first[name].double() * second[name].double()).sum() for name in first))


def _of_one_token(row: TrainingRow, t: int) -> TrainingRow:
    """Copy of a row that trains only token `t`; the length of its sequence is unchanged."""
    only_T = np.zeros(len(row), bool)
    only_T[t] = True
    top = row.teacher_top
    if top is not None:
        one_N = np.flatnonzero(row.loss_mask_T) == t
        top = TopLogprobs(ids_NK=top.ids_NK[one_N], logprobs_NK=top.logprobs_NK[one_N])
    others = replace(row.other_rows, tokens=row.other_rows.tokens + row.num_trained - 1)
    return replace(row, loss_mask_T=only_T, teacher_top=top, ends_sequence=True, other_rows=others)
