"""Chains of sums: right links, training texts, and the reward of the environment."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from cluster.demos.arithmetic import Problem, Problems, train_tokenizer
from distill.engine import Sample
from distill.envs.base import EnvContext
from distill.errors import ConfigError
from distill.rewards.registry import exact_match
from distill.types import StopReason
from examples.opd_vs_rl.chain import (
    LINK_TOKENS,
    PROMPT_TOKENS,
    Chain,
    Rewarded,
    chain_of,
    prompt_of,
    right_links,
    write_starts,
)
from tests.refusals import refuses

START = Problem(47, 85)
PROMPT = "740=580="


def book_chain(links: int = 400, *, forget_carry: float = 0.0, random_links: float = 0.0) -> str:
    rng = np.random.default_rng(1)
    return chain_of(START, links, rng, forget_carry=forget_carry, random_links=random_links)[0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    problems = Problems.split(held_out=9, seed=0).held_out
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"), problems)


def test_a_link_is_the_sum_of_the_two_before_it() -> None:
    assert prompt_of(START) == PROMPT
    assert book_chain(4) == PROMPT + "231=711=940=660="
    assert len(PROMPT) == PROMPT_TOKENS


def test_only_right_links_of_a_blotted_text_are_trained() -> None:
    rng = np.random.default_rng(1)
    text, learnt = chain_of(START, 400, rng, forget_carry=0.0, random_links=0.5)
    right = right_links(PROMPT, text[PROMPT_TOKENS:], 400)
    assert 150 < len(learnt) < 250
    assert all(stop - start == LINK_TOKENS for start, stop in learnt)
    assert all(right[start // LINK_TOKENS - 2] for start, _ in learnt)
    assert sum(right) < len(learnt) + 20  # a blotted link is seldom right


@pytest.mark.parametrize(("rewarded", "reward"), [("links", 2 / 3), ("chain", 0.0)])
def test_the_reward_is_the_share_of_links_or_for_all_of_them(
    rewarded: Rewarded, reward: float, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    write_starts(tmp_path / "prompts.jsonl", [START])

    def setting(max_new_tokens: int) -> EnvContext:
        return EnvContext(
            tokenizer=tokenizer, vocab_size=len(tokenizer), context_length=20,
            max_new_tokens=max_new_tokens, reward=exact_match,
        )  # fmt: skip

    path = str(tmp_path / "prompts.jsonl")
    dataset = Chain(rewarded=rewarded)(path, setting(12))
    [env, _] = dataset.builder(0, 2).make_envs({})
    seen_T = asyncio.run(env.initial_observation())
    assert seen_T is not None and tokenizer.decode(seen_T.tolist()) == PROMPT
    ids = np.array(tokenizer.encode("231=701=930=", add_special_tokens=False), np.int32)
    sample = Sample(
        tokens_T=ids, logprobs_T=np.zeros(len(ids), np.float32),
        versions_T=np.zeros(len(ids), np.int32), stop_reason=StopReason.LENGTH,
    )  # fmt: skip
    result = asyncio.run(env.step(sample))
    assert result.reward == pytest.approx(reward)
    assert result.metrics == pytest.approx({"links": 2 / 3, "all_right": 0.0})
    assert result.observation_T is None
    with refuses(ConfigError, "max_new_tokens"):
        Chain()(path, setting(6))
