"""Agents for tests: programs that ask through the `openai` library, and clients in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.envs.agent_endpoint import AgentEndpoint
from actors.rollout.episode import rollout_group
from distill.engine import Sampler
from distill.envs.asking import Ask, AskingEnv
from distill.envs.base import Env, EnvGroupBuilder, Episode
from distill.sampling import TrainSampling
from distill.types import StopReason, TrajectoryGroup
from tests.samples import TEMPERATURE

# What a test does with the endpoint of an episode.
Client = Callable[[AgentEndpoint], Awaitable[None]]

CALCULATE = """
import json, sys
from openai import OpenAI

TOOL = {SCHEMA}

def solve(problem):
    client, messages = OpenAI(), list(problem["messages"])
    while True:
        turn = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        said = turn.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return {"answer": said.content}
        for call in said.tool_calls:
            expression = json.loads(call.function.arguments)["expression"]
            result = str(eval(expression))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

if __name__ == "__main__":
    print(json.dumps(solve(json.load(sys.stdin))))
"""


@dataclass
class ServedEnv(AskingEnv):
    """An episode that a client in this process plays."""

    client: Client
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    max_turns: int

    async def play(self, ask: Ask) -> Episode:
        async with AgentEndpoint(
            ask, self.tokenizer, max_tokens=self.max_tokens, max_turns=self.max_turns
        ) as endpoint:
            await endpoint.while_served(_awaited(self.client(endpoint)))
        return Episode(
            turns=tuple(endpoint.turns),
            reward=0.0,
            stop_reason=endpoint.limit or StopReason.EOS,
            metrics={
                "rewritten": endpoint.histories.rewritten,
                "unmatched": endpoint.histories.unmatched,
                "breaks": endpoint.histories.prefix_breaks,
            },
        )


async def _awaited(result: Awaitable[None]) -> None:
    await result


@dataclass(frozen=True, kw_only=True)
class ServedBuilder(EnvGroupBuilder):
    """One such episode."""

    env: ServedEnv

    def make_envs(self, models: Mapping[str, Sampler]) -> Sequence[Env]:
        return [self.env]


def served(
    client: Client,
    policy: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int = 4096,
    max_turns: int = 100,
    max_new_tokens: int = 48,
) -> TrajectoryGroup:
    """The group of the one episode that the client plays."""
    env = ServedEnv(client, tokenizer, max_tokens, max_turns)
    sampling = TrainSampling(temperature=TEMPERATURE, max_new_tokens=max_new_tokens)
    return asyncio.run(rollout_group(policy, ServedBuilder(env=env), sampling, group_id=0, seed=0))


def sdk(endpoint: AgentEndpoint, **settings: Any) -> openai.AsyncOpenAI:
    """The `openai` library's client of the endpoint."""
    given = {"api_key": endpoint.key, "max_retries": 0} | settings
    return openai.AsyncOpenAI(base_url=endpoint.base_url, **given)
