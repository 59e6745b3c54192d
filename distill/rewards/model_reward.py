"""Rewards of a reward model: `reward=model:DIR`.

No model is loaded here. The run hosts the reward model, and environments send conversations to it:
it is one of the `models` that they receive (`EnvGroupBuilder.make_envs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill.chat.template import Message
from distill.data.prompts import Prompt
from distill.errors import ConfigError
from distill.model_paths import trained_model

# Prefix of the checkpoint in `reward=`.
PREFIX = "model:"
# Name of the reward model among the models that environments may query.
REWARD_MODEL = "reward_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """A response and its context: a chat, or the text `prompt` if `messages` is empty.

    Attributes:
        response: the text; in a chat the assistant's message, with its tool calls.
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
    """Input for a chat up to the assistant's last message; later results of tools are dropped."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return RewardInput(response=messages[last], messages=messages[:last], tools=tools or None)


async def scores_of(models: Mapping[str, Any], conversations: Sequence[RewardInput]) -> list[float]:
    """Score conversations, in order, with the run's reward model, which is one of the `models`.

    Raises:
        DataError: the model's tokenizer, template or context cannot accept a conversation.
    """
    return await models[REWARD_MODEL].rewards(conversations)


async def score_chats(
    messages_G: Sequence[Sequence[Message]],
    models: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]],
) -> list[float]:
    """Score the whole chats of a group; `tools` are the schemas for the chat template."""
    return await scores_of(models, [whole_chat(messages, tools) for messages in messages_G])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReward:
    """`reward=model:DIR`: scores of a checkpoint, instead of a function of an answer."""

    path: str

    @classmethod
    def named(cls, name: str) -> ModelReward | None:
        """The reward model of that name; None if the name has no prefix `model:`.

        Raises:
            ConfigError: the name has no checkpoint.
            CheckpointError: the checkpoint's run does not have it.
        """
        if not name.startswith(PREFIX):
            return None
        path = name.removeprefix(PREFIX)
        if not path.strip():
            raise ConfigError(
                f"reward={name} lacks a checkpoint; write reward={PREFIX}DIR",
                field="reward.function",
            )
        return cls(path=trained_model(path))
