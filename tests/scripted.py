"""Scripted policy: plays episodes with real tokens and learns nothing."""

import asyncio
import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.rollout.episode import play_group
from distill.chat.template import encode_chat
from distill.engine import GenerateRequest, Sample, SamplingModel
from distill.envs.base import EnvContext, Episode
from distill.envs.games.two_player import TwoPlayerConfig
from distill.rewards.model_reward import ModelReward
from distill.rewards.registry import REWARD_TIMEOUT_S, RewardFunction, exact_match, load_reward
from distill.sampling import TrainSampling
from distill.types import StopReason
from examples.show.chat_worlds import (
    DIGITS_APART,
    Row,
    product_rows,
    products,
    train_chat_tokenizer,
)
from tests.samples import TEMPERATURE

# Against hangs only.
GAME_S = 60.0
# (turn, text that the model sees) -> the model's text.
Script = Callable[[int, str], str]


def trained_tokenizer(book: Iterable[Row], apart: str) -> PreTrainedTokenizerBase:
    """Chat tokenizer trained on this book; leaves no files."""
    with TemporaryDirectory() as directory:
        return train_chat_tokenizer(Path(directory), book, apart)


@cache
def chat_tokenizer() -> PreTrainedTokenizerBase:
    return trained_tokenizer(product_rows(products(50, 0), guesses=0.3), DIGITS_APART)


def setting(
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int = 512,
    max_new_tokens: int = 48,
    reward: RewardFunction = exact_match,
    **changes: object,
) -> EnvContext:
    return EnvContext(
        tokenizer=tokenizer, vocab_size=len(tokenizer), context_length=context_length,
        max_new_tokens=max_new_tokens, reward=reward,
        **changes,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


class Scripted:
    """Engine that samples `script(turn, seen)`, or the texts in turn, cut to `max_new_tokens`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, script: Script | Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._script = script if callable(script) else lambda turn, _seen: script[turn]
        self.seen: list[str] = []
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        return [self._sample(request) for _ in range(request.num_samples)]

    def _sample(self, request: GenerateRequest) -> Sample:
        seen = str(self._tokenizer.decode(request.prompt_tokens_T.tolist()))
        text = str(self._script(len(self.seen), seen))
        self.seen.append(seen)
        self.requests.append(request)
        eos: Any = self._tokenizer.eos_token_id
        ids_T = np.append(encode_chat(self._tokenizer, text), eos)
        cut = len(ids_T) > request.sampling.max_new_tokens
        ids_T = ids_T[: request.sampling.max_new_tokens].astype(np.int32)
        return Sample(
            tokens_T=ids_T,
            logprobs_T=np.full(len(ids_T), -0.5, np.float32),
            versions_T=np.zeros(len(ids_T), np.int32),
            stop_reason=StopReason.LENGTH if cut else StopReason.EOS,
        )


def play_game(
    config: TwoPlayerConfig,
    room: EnvContext,
    policy: SamplingModel,
    *,
    problem: int = 0,
    group_size: int = 2,
    models: Mapping[str, SamplingModel] | None = None,
) -> list[Episode]:
    """Play episodes of a group of two-player games; the data set is pickled and unpickled first."""
    dataset = pickle.loads(pickle.dumps(config(None, room)))
    sampling = TrainSampling(temperature=TEMPERATURE, max_new_tokens=room.max_new_tokens)
    builder = dataset.builder(problem, group_size)

    async def play() -> list[Episode]:
        played = play_group(policy, builder, sampling, group_id=0, seed=0, models=models)
        return await asyncio.wait_for(played, GAME_S)

    return asyncio.run(play())


def call(name: str, arguments: Mapping[str, object] | str) -> str:
    """Tool call as the tokenizer's template writes it."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def game_metrics(*, won: int = 0, illegal: int = 0) -> dict[str, int]:
    """Expected metrics of a decided game whose turns broke no prefix and were not cut."""
    return {"won": won, "drawn": 0, "illegal": illegal, "prefix_breaks": 0, "cut_turns": 0}


def load_function(name: str, timeout_s: float = REWARD_TIMEOUT_S) -> RewardFunction:
    """Reward function of this name; it must not be a model that a run would host."""
    reward = load_reward(name, timeout_s)
    assert not isinstance(reward, ModelReward)
    return reward
