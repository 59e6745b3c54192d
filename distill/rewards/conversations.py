"""Encoding of conversations for a reward model, as in its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distill.chat.template import answered
from distill.data.example_encoder import ExampleEncoder
from distill.data.prompts import Prompt
from distill.data.row_conversion import LongRows, TooLong
from distill.errors import DataError
from distill.models.loading import context_length, ends_of, vocab_size
from distill.models.reward import check_reward_config
from distill.rewards.model_reward import RewardInput, conversation
from distill.tokenizer import load_tokenizer
from distill.types import TokenArray


class ConversationEncoder:
    """Encodes conversations with the reward model's tokenizer and chat template.

    A chat is rendered with the response as its last message. A plain text is encoded unchanged,
    followed by the response and the EOS. `recipe=reward_model` encodes its training data likewise.
    """

    def __init__(self, path: str) -> None:
        """
        Raises:
            CheckpointError: there is no reward model, or no tokenizer, at `path`.
        """
        config, tokenizer = check_reward_config(path), load_tokenizer(path)
        self.context_length = context_length(config)
        self._encoder = ExampleEncoder(
            tokenizer=tokenizer,
            vocab_size=vocab_size(config),
            max_length=self.context_length,
            stop_ids=ends_of(path, tokenizer),
            exact=False,  # a policy with another tokenizer may write text that this one lacks
        )

    def __call__(self, given: RewardInput) -> TokenArray:
        """Encode a conversation.

        Raises:
            DataError: the text cannot be encoded, or exceeds the model's context.
        """
        response = given.response
        if isinstance(response, str) and not given.messages:
            return self._encoder.completion(given.prompt, response).tokens_T
        messages = answered(given.messages, response)
        tools = None if given.tools is None else list(given.tools)
        [chain] = self._encoder.conversation(messages, tools, context=len(messages) - 1)
        return chain.tokens_T


def accepted_prompts(
    path: str,
    source: str,
    prompts_P: Sequence[Prompt],
    max_new_tokens: int,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    long: LongRows,
) -> list[Prompt]:
    """Prompts of `source` after which the reward model at `path` has room for a response.

    Loads the model's config and tokenizer, but no weights.

    Args:
        long: treatment of the other prompts.

    Raises:
        CheckpointError: the checkpoint is not a reward model.
        DataError: the model cannot read a prompt; the message has its row, and the reason.
    """
    encoder = ConversationEncoder(path)

    def checked(_line: int, prompt: Prompt) -> Prompt:
        given = conversation(prompt, "?")
        try:
            length = len(encoder(replace(given, tools=tools) if tools else given))
        except TooLong as error:
            length = error.length
        except DataError as error:
            raise DataError(f"the reward model {path}: {error}") from error
        if length + max_new_tokens > encoder.context_length:
            raise TooLong(
                f"the prompt has {length:,} tokens to the reward model {path}, and "
                f"max_new_tokens={max_new_tokens} more exceed its context of "
                f"{encoder.context_length:,}; shorten the prompt, or lower max_new_tokens",
                length=length,
                field="sampling.max_new_tokens",
            )
        return prompt

    rows = [(prompt.line, prompt) for prompt in prompts_P]
    return long.converted(source, rows, checked)
