"""Slow rewards run one at a time while the rest of the process continues."""

import asyncio
import threading

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.data.prompts import Prompt
from distill.envs.single_turn import SingleTurnGroupBuilder
from tests.samples import sample

# Only against hangs.
DEADLINE_S = 60.0


def test_rewards_are_computed_one_at_a_time_beside_everything_else(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    begun, may_end = threading.Semaphore(0), threading.Semaphore(0)
    at_work, at_once = 0, []

    def reward(_response: str, _answer: str) -> float:
        nonlocal at_work
        at_work += 1
        at_once.append(at_work)
        begun.release()
        assert may_end.acquire(timeout=DEADLINE_S)
        at_work -= 1
        return 1.0

    prompt = Prompt(tokens_T=np.array([3], np.int32), answer="4", line=1)
    builder = SingleTurnGroupBuilder(
        prompt=prompt, tokenizer=tokenizer, group_size=3, reward=reward
    )

    async def judge() -> list[float]:
        steps = [asyncio.create_task(env.step(sample(5))) for env in builder.make_envs({})]
        for _ in steps:  # the event loop goes on while a reward blocks
            while not begun.acquire(blocking=False):
                await asyncio.sleep(0.01)
            may_end.release()
        return [result.reward for result in await asyncio.gather(*steps)]

    assert asyncio.run(asyncio.wait_for(judge(), DEADLINE_S)) == [1.0] * 3
    assert at_once == [1, 1, 1]
