"""Evaluation on a model-free engine: rewards, and KL to the teacher of each prompt."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from actors.rollout.evaluator import EvaluatedResponse, Evaluator, summarise
from distill.data.prompts import Prompt
from distill.engine import GenerateRequest, Sample
from distill.envs.single_turn import PromptDataset
from distill.errors import DataError, EngineLost
from distill.rewards.registry import RewardFunction, answer_of, exact_match, last_number
from distill.sampling import EvalSampling, TrainSampling
from distill.types import StopReason, TokenArray
from tests.actors.prefix_engine import PrefixEngine
from tests.refusals import refuses
from tests.samples import TEMPERATURE, ids
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()

POLICY = PrefixEngine(0)
SAMPLING = TrainSampling(temperature=TEMPERATURE, max_new_tokens=6)
SERVING = EvalSampling(temperature=TEMPERATURE, max_new_tokens=6)
PROMPTS = [
    Prompt(tokens_T=ids(3, 4, 5), answer="a", line=1),
    Prompt(tokens_T=ids(6, 7), answer="bb", line=2),
    Prompt(tokens_T=ids(8), answer=None, line=4),
]


def evaluator_of(prompts_P: list[Prompt], reward: RewardFunction = exact_match) -> Evaluator:
    return Evaluator(PromptDataset(prompts_P, TOKENIZER, reward), TOKENIZER)


def test_prompts_with_an_answer_are_rewarded() -> None:
    judged: list[tuple[str, str]] = []

    def reward(response: str, answer: str) -> float:
        judged.append((response, answer))
        return 0.25 * len(answer)

    responses = asyncio.run(evaluator_of(PROMPTS, reward).respond(POLICY, SERVING))
    assert [response.line for response in responses] == [1, 2, 4]
    assert [response.correct for response in responses] == [0.25, 0.5, None]
    assert judged == [(responses[0].text, "a"), (responses[1].text, "bb")]
    assert [response.answer for response in responses] == ["a", "bb", None]
    metrics = summarise(responses)
    assert metrics == {
        "eval/response_length": 6, "eval/eos_share": 0, "eval/accuracy": pytest.approx(0.375),
        "eval/accuracy_low": 0,  # two prompts give almost no information
        "eval/accuracy_high": 1,
    }  # fmt: skip
    evaluator = evaluator_of(PROMPTS, reward)
    evaluation = asyncio.run(evaluator.evaluate(POLICY, SERVING, keep=2))
    assert evaluation.metrics == metrics and evaluation.responses == responses[:2]
    assert asyncio.run(evaluator.evaluate(POLICY, SERVING)).responses == []
    assert asyncio.run(evaluator.evaluate(POLICY, SERVING, keep=None)).responses == responses


class Recorder(PrefixEngine):
    """Policy that records the sampling settings of each request."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asked: list[tuple[float, float, int]] = []

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        sampling = request.sampling
        top_p = sampling.top_p if isinstance(sampling, EvalSampling) else 1.0
        self.asked.append((sampling.temperature, top_p, sampling.max_new_tokens))
        return await super().generate(request)


def test_the_engine_is_asked_at_the_evaluation_s_own_temperature() -> None:
    evaluator, policy = evaluator_of(PROMPTS), Recorder()
    serving = EvalSampling(temperature=0.25, top_p=0.9, max_new_tokens=5)
    asyncio.run(evaluator.evaluate(policy, serving))
    assert policy.asked == [(0.25, 0.9, 5)] * len(PROMPTS)
    policy.asked.clear()
    asyncio.run(evaluator.reverse_kl(policy, {"": POLICY}, SAMPLING))
    assert policy.asked == [(TEMPERATURE, 1.0, 6)] * len(PROMPTS)


def test_an_error_of_user_code_has_its_problem_and_line() -> None:
    def reward(_response: str, answer: str) -> float:
        return {"a": 1.0}[answer]

    with pytest.raises(DataError) as raised:
        asyncio.run(evaluator_of(PROMPTS, reward).evaluate(POLICY, SERVING))
    line = reward.__code__.co_firstlineno + 1
    assert f"KeyError: 'bb' ({__file__}:{line})" in str(raised.value)
    assert str(raised.value).endswith("in the environment or reward of problem 2")


def test_an_error_of_a_loaded_reward_has_its_problem() -> None:
    def reward(_response: str, answer: str) -> float:
        if answer == "bb":
            raise DataError("reward m:f raised KeyError (file.py:3)")
        return 1.0

    with refuses(DataError, None, names="problem 2"):
        asyncio.run(evaluator_of(PROMPTS, reward).evaluate(POLICY, SERVING))


def test_an_engine_error_is_raised_unchanged() -> None:
    def lost(_response: str, _answer: str) -> float:
        raise EngineLost("it is gone")

    with pytest.raises(EngineLost):
        asyncio.run(evaluator_of(PROMPTS, lost).evaluate(POLICY, SERVING))


def test_several_responses_give_pass_at_k_and_a_vote() -> None:
    answers = {1: ["so 3", "3.0", "4", "none"], 2: ["7", "8", "9", "8"], 3: ["?", "?", "?", "?"]}
    right = {1: "3", 2: "9", 3: "1"}
    responses = [
        EvaluatedResponse(
            prompt="",
            line=line, sample=i, text=text, final_text=text, stop_reason=StopReason.EOS,
            num_tokens=1, num_turns=1, metrics={}, correct=last_number(text, right[line]),
        )
        for line, texts in answers.items()
        for i, text in enumerate(texts)
    ]  # fmt: skip
    metrics = summarise(responses, answer_of(last_number))
    assert metrics["eval/accuracy"] == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    assert metrics["eval/pass@2"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6 + 0) / 3)
    assert metrics["eval/pass@4"] == pytest.approx(2 / 3)
    assert metrics["eval/majority@4"] == pytest.approx(1 / 3)  # 3 wins, 8 wins, nobody votes
    assert not any(name.startswith("eval/majority") for name in summarise(responses))
    fewer = summarise(responses[1:], answer_of(last_number))  # a player of a game may never move
    assert fewer["eval/pass@4"] == pytest.approx((1 + 0) / 2)


def test_each_prompt_is_sampled_as_often_as_asked() -> None:
    sampling = replace(SERVING, num_samples=3)
    responses = asyncio.run(evaluator_of(PROMPTS).respond(POLICY, sampling))
    assert [(each.line, each.sample) for each in responses] == [
        (line, sample) for line in (1, 2, 4) for sample in range(3)
    ]
    assert len({each.text for each in responses[:3]}) > 1


@pytest.mark.parametrize("hint_T", [None, ids(50, 51)])
def test_reverse_kl_is_the_mean_gap_to_each_prompts_teacher(hint_T: TokenArray | None) -> None:
    maths, code = PrefixEngine(1), PrefixEngine(2)
    prompts = [
        replace(PROMPTS[0], teacher="maths"),
        replace(PROMPTS[1], teacher="code", teacher_tokens_T=hint_T),
        replace(PROMPTS[2], teacher="maths"),
    ]
    teachers = {"maths": maths, "code": code}
    evaluator = evaluator_of(prompts)
    metrics = asyncio.run(evaluator.reverse_kl(POLICY, teachers, SAMPLING, num_samples=2))
    value = metrics["eval/reverse_kl"]
    assert metrics["eval/reverse_kl_low"] < value < metrics["eval/reverse_kl_high"]
    assert (len(maths.scored), len(code.scored)) == (2, 1)
    gaps = []
    for engine in (maths, code):
        for request in (request for call in engine.scored for request in call):
            context_T = request.tokens_T[: request.start]
            if hint_T is not None and engine is code:
                np.testing.assert_array_equal(context_T, hint_T)
                context_T = PROMPTS[1].tokens_T
            for t in range(request.start, len(request.tokens_T)):
                token = request.tokens_T[t]
                sampled_T = request.tokens_T[request.start : t]
                log_p_V = POLICY.distribution_V(np.append(context_T, sampled_T), TEMPERATURE)
                log_q_V = engine.distribution_V(request.tokens_T[:t], TEMPERATURE)
                gaps.append(log_p_V[token] - log_q_V[token])
    assert len(gaps) == 3 * 2 * 6
    assert value == pytest.approx(np.mean(gaps), abs=1e-5)
    assert value > 0.1
