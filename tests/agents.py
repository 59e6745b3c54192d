"""Agents for tests: programs that use the `openai` library, and clients in this process."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import openai
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.envs.agent_endpoint import AgentEndpoint
from actors.envs.agent_requests import ClientSampling
from actors.rollout.episode import rollout_group
from distill.engine import GenerateRequest, Sample, SamplingModel
from distill.envs.asking import Ask, AskingEnv
from distill.envs.base import Env, EnvGroupBuilder, Episode
from distill.sampling import TrainSampling
from distill.types import StopReason, TrajectoryGroup
from tests.samples import TEMPERATURE

# Client of an episode's endpoint.
Client = Callable[[AgentEndpoint], Awaitable[None]]

CALCULATE = """
import json, sys
from openai import OpenAI

TOOL = {SCHEMA}

def solve(problem):
    client, messages = OpenAI(), list(problem["messages"])
    while True:
        turn = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = turn.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return {"answer": message.content}
        for call in message.tool_calls:
            expression = json.loads(call.function.arguments)["expression"]
            result = str(eval(expression))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

if __name__ == "__main__":
    print(json.dumps(solve(json.load(sys.stdin))))
"""


@dataclass
class ServedEnv(AskingEnv):
    """Environment whose episode a client in this process plays."""

    client: Client
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    max_turns: int
    client_sampling: ClientSampling

    async def play(self, ask: Ask) -> Episode:
        async with AgentEndpoint(
            ask,
            self.tokenizer,
            max_tokens=self.max_tokens,
            max_turns=self.max_turns,
            client_sampling=self.client_sampling,
        ) as endpoint:
            await endpoint.while_served(_awaited(self.client(endpoint)))
        return Episode(
            turns=tuple(endpoint.turns), reward=0.0, stop_reason=endpoint.limit or StopReason.EOS,
            metrics={
                "rewritten": endpoint.histories.rewritten,
                "unmatched": endpoint.histories.unmatched,
                "breaks": endpoint.histories.prefix_breaks,
            },
        )  # fmt: skip


async def _awaited(result: Awaitable[None]) -> None:
    await result


@dataclass(frozen=True, kw_only=True)
class ServedBuilder(EnvGroupBuilder):
    """Group of one `ServedEnv` episode."""

    env: ServedEnv

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        return [self.env]


def served(
    client: Client,
    policy: SamplingModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int = 4096,
    max_turns: int = 100,
    max_new_tokens: int = 48,
    client_sampling: ClientSampling = "force",
) -> TrajectoryGroup:
    """Group of one episode that the client plays."""
    env = ServedEnv(client, tokenizer, max_tokens, max_turns, client_sampling)
    sampling = TrainSampling(temperature=TEMPERATURE, max_new_tokens=max_new_tokens)
    return asyncio.run(rollout_group(policy, ServedBuilder(env=env), sampling, group_id=0, seed=0))


def sdk(endpoint: AgentEndpoint, **settings: Any) -> openai.AsyncOpenAI:
    """`openai` client of the endpoint."""
    given = {"api_key": endpoint.key, "max_retries": 0} | settings
    return openai.AsyncOpenAI(base_url=endpoint.base_url, **given)


class Noise:
    """Sample random tokens after a random number of loop iterations, and keep all of them.

    Args:
        special: share of the tokens, except the last, that are added tokens but no stop token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, seed: int, *, special: float = 0.0
    ) -> None:
        added = set(tokenizer.added_tokens_decoder)
        self._plain = [i for i in range(len(tokenizer)) if i not in added]
        self._end = tokenizer.get_vocab()[str(tokenizer.eos_token)]
        self._added = sorted(added - {self._end})
        self._random = np.random.default_rng(seed)
        self._special = special
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        for _ in range(self._random.integers(0, 6)):
            await asyncio.sleep(0)
        return [self._sample(request) for _ in range(request.num_samples)]

    def _sample(self, request: GenerateRequest) -> Sample:
        words = self._random.choice(self._plain, self._random.integers(1, 6))
        others = self._random.choice(self._added, len(words))
        words = np.where(self._random.random(len(words)) < self._special, others, words)
        tokens_T = np.array([*words, self._end], np.int32)
        self.sampled.append((tuple(request.prompt_tokens_T.tolist()), tuple(tokens_T.tolist())))
        return Sample(
            tokens_T=tokens_T, logprobs_T=-self._random.random(len(tokens_T)).astype(np.float32),
            versions_T=np.zeros(len(tokens_T), np.int32), stop_reason=StopReason.EOS,
        )  # fmt: skip


def assert_trained_as_sampled(
    group: TrajectoryGroup, sampled: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Assert that each token of (prompt, sample) is trained once, after its own context."""
    trained = [
        (tuple(segment.tokens_T[:t].tolist()), int(segment.tokens_T[t]))
        for segment in group.segments()
        for t in np.flatnonzero(segment.action_mask_T)
    ]
    expected = [
        ((*prompt, *tokens[:t]), token)
        for prompt, tokens in sampled
        for t, token in enumerate(tokens)
    ]
    assert sorted(trained) == sorted(expected)


class Said(NamedTuple):
    """Text of one side of a conversation."""

    role: str
    text: str


async def _chat(client: openai.AsyncOpenAI, chat: Sequence[Said]) -> str:
    messages: Any = [{"role": message.role, "content": message.text} for message in chat]
    turn = await client.chat.completions.create(model="m", messages=messages)
    return turn.choices[0].message.content or ""


async def _respond(client: openai.AsyncOpenAI, chat: Sequence[Said]) -> str:
    items: Any = [{"role": message.role, "content": message.text} for message in chat]
    return (await client.responses.create(model="m", input=items)).output_text


async def _complete(client: openai.AsyncOpenAI, chat: Sequence[Said]) -> str:
    prompt = "".join(
        message.text if message.role == "assistant" else f"{message.text}:" for message in chat
    )
    return (await client.completions.create(model="m", prompt=prompt)).choices[0].text


# Answer to a conversation, by API.
TALKS: dict[str, Callable[[openai.AsyncOpenAI, Sequence[Said]], Awaitable[str]]] = {
    "chat": _chat, "responses": _respond, "completions": _complete,
}  # fmt: skip
