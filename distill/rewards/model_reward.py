"""Rewards of a reward model: `reward=model:DIR`. Conversations go to its actor, scores come back.

Who rewards has no model here: environments ask the one that the run hosts, among the `models` that
they are given (`EnvGroupBuilder.make_envs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from distill.chat.template import Message
from distill.data.prompts import Prompt
from distill.errors import ConfigError
from distill.model_paths import trained_model

# Of `reward=`, before the checkpoint.
PREFIX = "model:"
# Name of the reward model among the models that environments may ask.
REWARD_MODEL = "reward_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """A response, and what it answers: a chat, or a plain text where `messages` is empty.

    `response` is the text, or in a chat the message with its tool calls.
    """

    response: str | Message
    prompt: str = ""
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] | None = None


def conversation(prompt: Prompt, response: str | Message) -> RewardInput:
    return RewardInput(
        response=response, prompt=prompt.text, messages=prompt.messages, tools=prompt.tools
    )


def whole_chat(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> RewardInput:
    """A chat to the last thing that the assistant said: results of tools behind it answer it."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return RewardInput(response=messages[last], messages=messages[:last], tools=tools or None)


class RewardScorer(Protocol):
    """A reward model that is loaded somewhere."""

    async def rewards(self, conversations: Sequence[RewardInput]) -> list[float]:
        """The score of each, in order.

        Raises:
            DataError: one that the model's tokenizer, template or context does not take.
        """
        ...


async def scores_of(models: Mapping[str, Any], conversations: Sequence[RewardInput]) -> list[float]:
    """The scores by the run's reward model, which is among the `models`."""
    scorer = cast(RewardScorer, models[REWARD_MODEL])
    return await scorer.rewards(conversations)


async def score_chats(
    messages_G: Sequence[Sequence[Message]],
    models: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]],
) -> list[float]:
    """Scores of a group's whole chats, with the `tools` as the templates are given them."""
    return await scores_of(models, [whole_chat(messages, tools) for messages in messages_G])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReward:
    """`reward=model:DIR`: scores of a checkpoint, no function of an answer."""

    path: str

    @classmethod
    def named(cls, name: str) -> ModelReward | None:
        """The reward of that name, if it is a model's.

        Raises:
            ConfigError: it names no checkpoint, or one that its run does not keep.
        """
        if not name.startswith(PREFIX):
            return None
        path = name.removeprefix(PREFIX)
        if not path.strip():
            raise ConfigError(
                f"reward={name} names no checkpoint; write reward={PREFIX}DIR",
                field="reward.function",
            )
        return cls(path=trained_model(path))
