"""Advantages of samples over a step, length penalties, and custom functions."""

import math
import textwrap
from collections.abc import Iterable
from fractions import Fraction
from functools import partial
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import ConfigError, DataError
from distill.objective.custom import try_advantage, try_divergence, try_loss
from distill.objective.divergences import divergence
from distill.objective.group_rewards import GroupRewards
from distill.objective.losses import token_losses
from distill.objective.reward_advantages import sample_advantages
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.rewards.length import LengthRules
from distill.types import StopReason, TrajectoryGroup
from tests.refusals import refuses
from tests.samples import segment, trajectory

# Rewards of three groups; those in brackets were cut off.
GROUPS: list[list[float | list[float]]] = [[1.0, 0.0, [5.0], 2.0], [3.0, 3.0, 3.0], [[7.0], 4.0]]


def step() -> list[TrajectoryGroup]:
    made = []
    for g, rewards in enumerate(GROUPS):
        members = []
        for i, reward in enumerate(rewards):
            cut = isinstance(reward, list)
            members.append(
                trajectory(
                    segment(2, 1 + i, seed=i),
                    reward=reward[0] if isinstance(reward, list) else reward,
                    stop=StopReason.LENGTH if cut else StopReason.EOS,
                    reward_counts=not cut,
                )
            )
        made.append(TrajectoryGroup(group_id=g, trajectories_G=tuple(members), source=f"s{g}"))
    return made


def counted(rewards: list[float | list[float]]) -> list[float]:
    return [reward for reward in rewards if not isinstance(reward, list)]


def by_hand(objective: ObjectiveConfig, g: int, i: int) -> float:
    reward = GROUPS[g][i]
    if isinstance(reward, list):
        return 0.0
    others = counted(GROUPS[g])
    if objective.baseline == "global":
        others = [r for rewards in GROUPS for r in counted(rewards)]
    baseline, scale = fmean(others), pstdev(others) + 1e-6 if objective.scale_by_std else 1.0
    if objective.baseline == "leave_one_out":
        rest = list(others)
        rest.remove(reward)
        baseline = fmean(rest) if rest else reward
    return objective.reward_coef * (reward - baseline) / scale


@pytest.mark.parametrize("by_std", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "global"])
def test_rewards_that_do_not_count_are_in_no_baseline(baseline: Any, by_std: bool) -> None:
    objective = ObjectiveConfig(
        kl_coef=0.0, reward_coef=2.0, baseline=baseline, scale_by_std=by_std
    )
    made = sample_advantages([GroupRewards.of(group) for group in step()], objective)
    for g, advantages_G in enumerate(made):
        expected = [by_hand(objective, g, i) for i in range(len(GROUPS[g]))]
        assert advantages_G.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    on_rows = [row.advantages_T[-1] for row in policy_rows(step(), objective)]
    assert on_rows == [advantage for advantages_G in made for advantage in advantages_G]


def test_a_step_without_a_reward_that_counts_has_no_signal() -> None:
    [group] = [group for group in step() if group.group_id == 2]
    alone = TrajectoryGroup(group_id=0, trajectories_G=group.trajectories_G[:1])
    for baseline in ("mean", "leave_one_out", "global"):
        objective = ObjectiveConfig(kl_coef=0.0, reward_coef=1.0, baseline=baseline)
        [made_G] = sample_advantages([GroupRewards.of(alone)], objective)
        assert made_G.tolist() == [0.0]
    assert alone.constant_reward == 7.0


def test_a_group_is_constant_by_the_rewards_that_count() -> None:
    assert [group.constant_reward for group in step()] == [None, 3.0, 4.0]


SEGMENT = segment(2, 2)


def rewarded(rewards: Iterable[float]) -> TrajectoryGroup:
    members = tuple(trajectory(SEGMENT, reward=float(reward)) for reward in rewards)
    return TrajectoryGroup(group_id=0, trajectories_G=members)


BASELINES = ("mean", "leave_one_out", "global")


@pytest.mark.parametrize("by_std", [False, True])
@pytest.mark.parametrize("baseline", BASELINES)
@settings(max_examples=15)
@given(
    reward=st.floats(-1e6, 1e6) | st.sampled_from([0.1, 0.7, 1.1, 10.1, 100.3]),
    size=st.integers(2, 24),
    ulps=st.lists(st.integers(-2, 2), min_size=24, max_size=24),
)
def test_rewards_that_differ_by_rounding_have_no_advantage(
    baseline: Any, by_std: bool, reward: float, size: int, ulps: list[int]
) -> None:
    exact = np.full(size, reward, np.float32)
    rounded = exact + np.array(ulps[:size], np.float32) * np.spacing(exact)
    objective = ObjectiveConfig(reward_coef=2.0, baseline=baseline, scale_by_std=by_std)
    for rewards_G in (rounded, [reward] * size):
        groups = [rewarded(rewards_G)] * 2
        assert all(group.constant_reward is not None for group in groups)
        made = sample_advantages([GroupRewards.of(group) for group in groups], objective)
        assert not np.concatenate(made).any()


@pytest.mark.parametrize("baseline", BASELINES)
@settings(max_examples=15)
@given(
    base=st.floats(-1e3, 1e3),
    steps=st.lists(st.integers(0, 3), min_size=2, max_size=24).filter(lambda s: len(set(s)) > 1),
)
def test_rewards_that_differ_by_more_are_scaled_as_numbers_without_rounding(
    baseline: Any, base: float, steps: list[int]
) -> None:
    rewards = [base + 0.01 * step for step in steps]
    group = rewarded(rewards)
    assert group.constant_reward is None
    objective = ObjectiveConfig(reward_coef=1.0, baseline=baseline, scale_by_std=True)
    [made_G] = sample_advantages([GroupRewards.of(group)], objective)
    exact = list(map(Fraction, rewards))
    centred = [each - sum(exact) / len(exact) for each in exact]
    factor = len(exact) / (len(exact) - 1) if baseline == "leave_one_out" else 1.0
    spread = math.sqrt(sum(each * each for each in centred) / len(exact)) + 1e-6
    expected = [factor * float(each) / spread for each in centred]
    assert made_G.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@given(reward=st.floats(-1e3, 1e3), size=st.integers(2, 24))
def test_a_user_s_function_sees_rewards_whose_mean_is_no_noise(reward: float, size: int) -> None:
    rewards_G = GroupRewards.of(rewarded([reward] * size)).rewards_G
    centred_G = rewards_G - rewards_G.mean()
    assert np.abs(centred_G / (rewards_G.std() + 1e-6)).max() < 1e-5


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (60, 0.0), (70, 0.25), (80, 0.5), (100, 1.0), (130, 1.0)]
)
def test_the_penalty_grows_through_the_buffer(length: int, penalty: float) -> None:
    rules = LengthRules(max_new_tokens=100, overlong_buffer=40)
    assert rules.penalty(length) == pytest.approx(penalty)


CODE = """
    import numpy as np

    SEEN = []

    def lengths(rewards_P):
        SEEN[:] = rewards_P
        return [group.lengths_G for group in rewards_P]

    def raises(rewards_P):
        raise KeyError("bank")

    def one_short(rewards_P):
        return [group.rewards_G[1:] for group in rewards_P]

    def divided(rewards_P):
        return [group.rewards_G / 0 * np.nan for group in rewards_P]

    def takes_two(rewards_P, more):
        return rewards_P

    def pg(logprobs_N, old_N, advantages_N):
        return -(logprobs_N - old_N).exp() * advantages_N

    def detached(logprobs_N, old_N, advantages_N):
        return -logprobs_N.detach() * advantages_N

    def over_the_batch(logprobs_N, old_N, advantages_N):
        return -logprobs_N * (advantages_N - advantages_N.mean())

    def summed(logprobs_N, old_N, advantages_N):
        return (-logprobs_N * advantages_N).sum()

    def infinite(logprobs_N, old_N, advantages_N):
        return logprobs_N / 0

    def nothing(logprobs_N, old_N, advantages_N):
        return 0 * logprobs_N

    def tv(log_p_NV, log_q_NV):
        return (log_p_NV.exp() - log_q_NV.exp()).abs().sum(1) / 2

    def of_teacher(log_p_NV, log_q_NV):
        return log_q_NV.exp().sum(1)

    def mass(log_p_NV, log_q_NV):
        return log_p_NV.exp().sum(1)

    def averaged(log_p_NV, log_q_NV):
        return tv(log_p_NV, log_q_NV) * tv(log_p_NV, log_q_NV).mean()

    def scalar(log_p_NV, log_q_NV):
        return tv(log_p_NV, log_q_NV).sum()
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("own")
    (directory / "own_objectives.py").write_text(textwrap.dedent(CODE))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield "own_objectives"


def with_advantage(name: str) -> ObjectiveConfig:
    return ObjectiveConfig(kl_coef=0.0, reward_coef=0.5, baseline=name)


def test_a_custom_advantage_gets_all_results(own: str) -> None:
    facts = [GroupRewards.of(group) for group in step()]
    made = sample_advantages(facts, with_advantage(f"{own}:lengths"))
    assert [made_G.tolist() for made_G in made] == [[0.5, 1, 0, 2], [0.5, 1, 1.5], [0, 1]]
    import own_objectives  # pyright: ignore[reportMissingImports]

    first = own_objectives.SEEN[0]
    assert first.rewards_G.tolist() == [1, 0, 5, 2] and first.source == "s0"
    assert first.truncated_G.tolist() == [False, False, True, False]
    try_advantage(f"{own}:lengths", group_size=4)


@pytest.mark.parametrize("name", ["raises", "one_short", "divided"])
def test_bad_results_of_a_custom_advantage_are_refused(own: str, name: str) -> None:
    with refuses(DataError, "baseline"), np.errstate(all="ignore"):
        try_advantage(f"{own}:{name}", group_size=4)


def test_functions_are_found_and_can_be_called_so_or_are_refused(own: str) -> None:
    for trial, field in (
        (partial(try_advantage, f"{own}:takes_two", group_size=2), "baseline"),
        (partial(try_advantage, f"{own}:misspelt", group_size=2), "baseline"),
        (partial(try_loss, f"{own}:raises"), "loss"),
        (partial(try_loss, "no_such_module:loss"), "loss"),
    ):
        with refuses(ConfigError, field):
            trial()


def test_a_custom_loss_returns_the_tokens_losses(own: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs_N, old_N, advantages_N = torch.randn(3, 6, generator=generator)
    logprobs_N.requires_grad_()

    def losses(loss: str) -> tuple[list[float], list[float]]:
        how = ObjectiveConfig(loss=loss)
        made = token_losses(logprobs_N, old_N, advantages_N, how, lambda values_N: values_N)
        assert not made.side_N.any()
        [gradient_N] = torch.autograd.grad(made.loss_N.sum(), logprobs_N)
        return made.loss_N.tolist(), gradient_N.tolist()

    assert losses(f"{own}:pg") == losses("importance_sampling")
    try_loss(f"{own}:pg")


@pytest.mark.parametrize("name", ["detached", "over_the_batch", "summed", "infinite", "nothing"])
def test_bad_results_of_a_custom_loss_are_refused(own: str, name: str) -> None:
    with pytest.raises(DataError):
        try_loss(f"{own}:{name}")


def test_a_custom_divergence_is_one_per_state(own: str) -> None:
    how = ObjectiveConfig(estimator="full", divergence=f"{own}:tv")
    try_divergence(how.divergence)
    drawn = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(2)).log_softmax(2)
    made_N = divergence(drawn[0], drawn[1], how.divergence, 0.5)
    expected = [
        sum(abs(math.exp(p) - math.exp(q)) for p, q in zip(*each, strict=True)) / 2
        for each in zip(drawn[0].tolist(), drawn[1].tolist(), strict=True)
    ]
    assert made_N.tolist() == pytest.approx(expected, abs=1e-6)
    top = ObjectiveConfig(estimator="top_k", divergence=f"{own}:tv")
    assert top.support == "union" and not top.samples_tail and not top.has_advantages
    with pytest.raises(ConfigError):
        ObjectiveConfig(divergence=f"{own}:tv", estimator="sampled")


@pytest.mark.parametrize("name", ["of_teacher", "mass", "averaged", "scalar"])
def test_bad_results_of_a_custom_divergence_are_refused(own: str, name: str) -> None:
    with pytest.raises(DataError):
        try_divergence(f"{own}:{name}")
