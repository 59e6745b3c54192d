"""A policy trained by hand has the numbers of a run: steps, samples and files."""

import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import isotherm
from distill.objective.batching import TrainingRow
from distill.tokenizer import load_tokenizer
from isotherm import policy as policy_module
from isotherm.losses import Loss
from learner.learner import Learner
from tests.conftest import TinyPair
from tests.learner.conftest import assert_same, gradients_of
from tests.naive import naive_logprobs
from tests.refusals import refuses
from tests.samples import TEMPERATURE, demonstration, training_row
from tests.weights import gather_all

ROWS = [training_row(2 + i, 3 + 2 * i, seed=i, temperature=TEMPERATURE + 0.3 * i) for i in range(6)]
PAIRS = [
    replace(row, reference_logprobs_T=row.behaviour_logprobs_T, advantages_T=ones)
    for row in ROWS
    for ones in [np.ones(len(row), np.float32)]
]


def importance_sampling(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor) -> Tensor:
    return -(logprobs_N - old_N).exp() * advantages_N


def own_reverse_kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dim=1)


SEQUENCES = isotherm.ObjectiveConfig(loss="dro", normalisation="sequence", kl_coef=0.0)
LOSSES: dict[str, Loss] = {
    "cross_entropy": "cross_entropy", "ppo": "ppo", "over sequences": SEQUENCES,
    "pairs": isotherm.PreferenceLoss(beta=0.3),
    "a function": lambda logprobs_N, _old_N, advantages_N: -advantages_N * logprobs_N,
    "its name": f"{__name__}:importance_sampling",
}  # fmt: skip


@pytest.fixture
def new_policy(tiny_pair: TinyPair) -> Iterator[Callable[..., isotherm.Policy]]:
    made: list[isotherm.Policy] = []

    def new(model: str = tiny_pair.student, **settings: Any) -> isotherm.Policy:
        defaults = {"lr": 1e-2, "max_grad_norm": 1e9, "token_budget": 64, "device": "cpu"}
        made.append(isotherm.Policy(model, **defaults | settings))
        return made[-1]

    yield new
    for policy in made:
        policy.close()


def weights_of(policy: isotherm.Policy) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in policy.learner.model.named_parameters()}


@pytest.mark.parametrize("name", LOSSES)
def test_calls_add_up_to_one(new_policy: Callable[..., isotherm.Policy], name: str) -> None:
    rows = PAIRS if name == "pairs" else ROWS
    parts, union = new_policy(), new_policy()
    for some in (rows[:2], rows[2:]):
        parts.forward_backward(some, LOSSES[name])
    metrics = union.forward_backward(rows, LOSSES[name])
    assert_same(gradients_of(parts.learner.model), gradients_of(union.learner.model), 1e-6)
    stepped, expected = parts.optim_step(), union.optim_step()
    assert stepped["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)
    # AdamW's first step is the gradient's sign times lr: what rounding turns is next to nothing
    assert_same(weights_of(parts), weights_of(union), 1e-5)
    again = union.forward_backward(rows, LOSSES[name])
    assert again["train/loss"] < metrics["train/loss"]
    assert parts.steps == union.steps == 1


def test_a_step_by_hand_is_the_learners_own(new_policy: Callable[..., isotherm.Policy]) -> None:
    from learner.plan import Part
    from learner.policy_loss import PolicyObjectiveLoss

    by_hand, whole = new_policy(weight_decay=0.1), new_policy(weight_decay=0.1)
    for _ in range(2):
        made = by_hand.forward_backward(ROWS, "ppo") | by_hand.optim_step()
        loss = PolicyObjectiveLoss(objective=isotherm.ObjectiveConfig(loss="ppo", kl_coef=0.0))
        expected = whole.learner.step(Part(rows_D=ROWS, loss=loss))
        for name in made:
            if not name.startswith("time/"):
                assert made[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert_same(weights_of(by_hand), weights_of(whole), 1e-5)


def test_an_equal_function_has_the_gradient(new_policy: Callable[..., isotherm.Policy]) -> None:
    ours, theirs = new_policy(), new_policy()
    expected = ours.forward_backward(ROWS, "importance_sampling")
    made = theirs.forward_backward(ROWS, importance_sampling)
    assert_same(gradients_of(theirs.learner.model), gradients_of(ours.learner.model), 1e-6)
    assert made["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)


def test_a_loss_over_distributions_asks_a_teacher(
    new_policy: Callable[..., isotherm.Policy], tiny_pair: TinyPair
) -> None:
    ours, theirs = new_policy(), new_policy()
    for policy, name in ((ours, "reverse_kl"), (theirs, f"{__name__}:own_reverse_kl")):
        whole = isotherm.ObjectiveConfig(estimator="full", divergence=name)
        metrics = policy.forward_backward(ROWS, whole, teacher=tiny_pair.teacher)
        assert metrics["opd/divergence"] > 0.01
        with pytest.raises(isotherm.ConfigError):
            policy.forward_backward(ROWS, whole)
        with pytest.raises(isotherm.ConfigError):
            policy.forward_backward(ROWS, "ppo", teacher=tiny_pair.teacher)
    assert_same(gradients_of(theirs.learner.model), gradients_of(ours.learner.model), 1e-6)


def test_misuse_is_refused(new_policy: Callable[..., isotherm.Policy], tiny_pair: TinyPair) -> None:
    policy = new_policy()
    sampling = {"temperature": 0.7, "max_new_tokens": 3}
    for prompt in (["a", "b"], [], [1, 2]):
        with pytest.raises(isotherm.ConfigError):
            policy.sample(prompt, **sampling)  # pyright: ignore
    [completion] = policy.sample("1 +", **sampling)
    with pytest.raises(isotherm.ConfigError):
        policy.forward_backward([completion], "ppo")  # pyright: ignore
    with pytest.raises(isotherm.DataError):
        completion.row(np.ones(len(completion.tokens_T) + 1))
    with pytest.raises(isotherm.DataError):
        policy.logprobs([1, 999_999], temperature=1.0)
    row = ROWS[0]
    with pytest.raises(isotherm.DataError):
        policy.forward_backward([replace(row, tokens_T=row.tokens_T + 999_999)], "ppo")
    with pytest.raises(isotherm.IsothermError):
        policy.sampler.logprobs([1, 999_999], temperature=1.0)
    with pytest.raises(isotherm.IsothermError):
        policy.sample(np.array([1, 999_999]), **sampling)
    with pytest.raises(isotherm.ConfigError):
        new_policy(device="gpu")
    policy.close()
    with pytest.raises(isotherm.EngineError):
        policy.sample("1 +", **sampling)
    with pytest.raises(isotherm.CheckpointError) as refused:
        isotherm.Sampler("/nope")
    assert "/opt" not in str(refused.value)


def test_samples_are_at_t_and_learner_and_sampler_score_alike(
    new_policy: Callable[..., isotherm.Policy],
) -> None:
    policy = new_policy()
    made = policy.sample("1 + 2 =", temperature=0.7, max_new_tokens=6, num_samples=3)
    assert len(made) == 3 and all(each.temperature == 0.7 for each in made)
    for each in made:
        for scorer in (policy, policy.sampler):
            scored_N = scorer.logprobs(each.chain_T, temperature=0.7, start=each.start)
            np.testing.assert_allclose(scored_N, each.logprobs_T, atol=1e-4)
        unlike_N = policy.logprobs(each.chain_T, temperature=1.3, start=each.start)
        assert np.abs(unlike_N - each.logprobs_T).max() > 0.05
    other = policy.sample("1 + 2 =", temperature=0.7, max_new_tokens=6, num_samples=3)
    assert [each.text for each in other] != [each.text for each in made]
    same = policy.sample("1 + 2 =", temperature=0.7, max_new_tokens=6, num_samples=3, seed=0)
    assert [each.text for each in same] == [each.text for each in made]
    batched = policy.sample_batch(["0 + 2 =", "1 + 2 ="], temperature=0.7, max_new_tokens=6, seed=8)
    for prompt, seed, [each] in zip(["0 + 2 =", "1 + 2 ="], [8, 9], batched, strict=True):
        alone = policy.sample(prompt, temperature=0.7, max_new_tokens=6, seed=seed)
        assert [each.text] == [one.text for one in alone]
    own, hot = policy.sampler.score(made), policy.sampler.score(made, temperature=1.3)
    for each, own_N, hot_N in zip(made, own, hot, strict=True):
        np.testing.assert_allclose(own_N, each.logprobs_T, atol=1e-4)
        assert np.abs(hot_N - each.logprobs_T).max() > 0.05
    [greedy] = policy.sample([{"role": "user", "content": "hi"}], temperature=0, max_new_tokens=2)
    with pytest.raises(isotherm.ConfigError):
        greedy.row(1.0)


def test_a_push_makes_samples_on_policy(new_policy: Callable[..., isotherm.Policy]) -> None:
    policy = new_policy()
    [before] = policy.sample("1 + 2 =", temperature=0.7, max_new_tokens=6)
    rows = [policy.supervised_row("1 + 2 =", "3"), before.row(1.0)]
    policy.forward_backward(rows, "cross_entropy")
    policy.optim_step()
    stale_N = policy.sampler.logprobs(before.chain_T, temperature=0.7, start=before.start)
    np.testing.assert_allclose(stale_N, before.logprobs_T, atol=1e-4)
    for version in (1, 2):
        policy.push()
        assert policy.version == policy.sampler.version == version
    [after] = policy.sample("1 + 2 =", temperature=0.7, max_new_tokens=6)
    assert set(after.sample.versions_T) == {2}
    own_N = policy.logprobs(after.chain_T, temperature=0.7, start=after.start)
    np.testing.assert_allclose(own_N, after.logprobs_T, atol=1e-4)
    assert np.abs(policy.logprobs(before.chain_T, temperature=0.7)[-1] - before.logprobs_T[-1]) > 0


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_restored_state_continues_bit_for_bit(
    new_policy: Callable[..., isotherm.Policy], tmp_path: Path, lora_rank: int | None
) -> None:
    def train(policy: isotherm.Policy, rows: list[TrainingRow]) -> dict[str, float]:
        policy.forward_backward(rows, "ppo")
        return policy.optim_step()

    settings = {"lora_rank": lora_rank, "lr_schedule": "linear", "total_steps": 4}
    policy = new_policy(**settings)
    train(policy, ROWS[:3])
    assert policy.save_state(tmp_path / "states") == tmp_path / "states" / "step-000001"
    torch.manual_seed(9)
    policy.save_state(tmp_path / "states")  # another state of the same step
    drawn = torch.rand(3)
    expected = train(policy, ROWS[3:])
    other = new_policy(**settings)
    other.forward_backward(ROWS[:1], "ppo")  # is dropped
    other.load_state(tmp_path / "states")
    assert other.steps == 1 and other.version == 1
    assert torch.equal(torch.rand(3), drawn)
    resumed = train(other, ROWS[3:])
    for name in ("train/grad_norm", "train/lr"):
        assert resumed[name] == pytest.approx(expected[name], rel=1e-4)
    merged, theirs = (gather_all(each.learner.weights()) for each in (policy, other))
    assert_same(dict(theirs), dict(merged), 1e-5)
    with pytest.raises(isotherm.CheckpointError):
        other.load_state(tmp_path)


@pytest.mark.parametrize("other", ["model", "adapter"])
def test_a_state_of_another_model_is_refused_and_changes_nothing(
    new_policy: Callable[..., isotherm.Policy], tiny_pair: TinyPair, tmp_path: Path, other: str
) -> None:
    settings = {"model": tiny_pair.teacher} if other == "model" else {"lora_rank": 2}
    new_policy(**settings).save_state(tmp_path)
    policy = new_policy()
    before = weights_of(policy)
    policy.forward_backward(ROWS, "ppo")
    with refuses(isotherm.ConfigError, "model.path" if other == "model" else "lora.rank"):
        policy.load_state(tmp_path)
    assert_same(weights_of(policy), before, 0)
    assert policy.optim_step()["train/grad_norm"] > 0


def test_a_state_is_loaded_after_the_old_weights_are_freed(
    new_policy: Callable[..., isotherm.Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = new_policy()
    policy.forward_backward(ROWS, "ppo")
    policy.save_state(tmp_path)
    old = [weakref.ref(parameter) for parameter in policy.learner.model.parameters()]
    held: list[int] = []

    def load(*arguments: Any) -> Learner:
        held.append(sum(each() is not None for each in old))
        return Learner(*arguments)

    monkeypatch.setattr(policy_module, "Learner", load)
    policy.load_state(tmp_path)
    assert held == [0]


def test_transformers_loads_it(new_policy: Callable[..., isotherm.Policy], tmp_path: Path) -> None:
    policy = new_policy(lora_rank=2)
    policy.forward_backward([demonstration(2, 9, seed=1)], "cross_entropy")
    policy.optim_step()
    model = AutoModelForCausalLM.from_pretrained(policy.export(tmp_path / "a" / "final"))
    [made] = policy.sample("1 + 2 =", temperature=0.7, max_new_tokens=6)
    own_N = policy.logprobs(made.chain_T, temperature=0.7, start=made.start)
    expected_N = naive_logprobs(model, made.chain_T, made.start, 0.7)
    np.testing.assert_allclose(own_N, expected_N, atol=1e-4)
    with pytest.raises(isotherm.CheckpointError):
        policy.export(tmp_path / "a" / "final")


def test_invalid_calls_leave_no_gradient(new_policy: Callable[..., isotherm.Policy]) -> None:
    policy = new_policy()
    before = weights_of(policy)
    with pytest.raises(isotherm.ConfigError):
        policy.forward_backward(ROWS, "pppo")
    with pytest.raises(isotherm.ConfigError):
        policy.optim_step()
    with pytest.raises(isotherm.DataError):
        policy.forward_backward(ROWS, lambda logprobs_N, *_: logprobs_N[:2])
    policy.forward_backward(ROWS[:1], "ppo")
    with pytest.raises(isotherm.ConfigError):
        policy.forward_backward(ROWS, SEQUENCES)
    with pytest.raises(isotherm.NonFiniteError):
        policy.forward_backward(ROWS, lambda logprobs_N, *_: logprobs_N / 0)
    with pytest.raises(isotherm.ConfigError):
        policy.optim_step()
    assert all(p.grad is None for p in policy.learner.model.parameters())
    assert_same(weights_of(policy), before, 0)
    with pytest.raises(isotherm.ConfigError):
        new_policy(lr_schedule="linear")
    with pytest.raises(isotherm.ConfigError):
        new_policy(learning_rate=1)


def test_samples_and_rows_end_where_recipes_stop(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """A base model's configs name one stop token, its chat tokenizer another."""
    model = tmp_path / "model"
    shutil.copytree(tiny_pair.student, model)
    tokenizer = load_tokenizer(str(model))
    own: Any = tokenizer.eos_token_id
    tokenizer.eos_token = "4"
    tokenizer.save_pretrained(model)
    with isotherm.Policy(str(model), device="cpu") as policy:
        four: Any = tokenizer.convert_tokens_to_ids("4")
        assert set(policy.sampler.stops.ids) == {own, four}
        assert policy.supervised_row("1+1=", "2").tokens_T[-1] == four
        samples = policy.sample("1+1=", temperature=2.0, max_new_tokens=30, num_samples=20)
        assert not any(np.isin(each.tokens_T[:-1], [own, four]).any() for each in samples)
    five = tokenizer.convert_tokens_to_ids("5")
    with isotherm.Sampler(str(model), device="cpu", stop_tokens=str(five)) as sampler:
        assert sampler.stops.ids == (five,)
        samples = sampler.sample("1+1=", temperature=2.0, max_new_tokens=30, num_samples=20)
        assert not any(np.isin(each.tokens_T[:-1], [five]).any() for each in samples)
