"""Chat environments: a custom environment defines messages; this module handles their tokens.

MessageEnv      a custom class: the first messages, and the reply to and reward of each turn
ChatEnv         renders messages with the model's template, parses tool calls, runs tools,
                enforces limits, condenses long histories; sampled tokens are kept as sampled
ChatEnvConfig   `env=package.module:Class`: the settings, and the list of problems
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from distill.chat.conversation import Conversation
from distill.chat.template import Message
from distill.chat.tool_calls import ParsedTurn
from distill.chat.tool_formats import ToolFormat
from distill.engine import Sample, SamplingModel
from distill.envs.base import Env, StepResult
from distill.rewards.verdict import LONGEST_WORDS
from distill.text.condense import Condenser, TooLongToCondense, condense_history
from distill.tools.base import Tool
from distill.tools.calls import ToolLimits, run_calls
from distill.tools.read_block import Blocks, ReadBlock
from distill.types import FloatArray, StopReason, TokenArray, Tokenizer

# (sampled tokens, tokenizer) -> float32, the reward of each token
Oracle: TypeAlias = "Callable[[TokenArray, Tokenizer], FloatArray]"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStep:
    """The environment's answer to a turn of the assistant.

    Attributes:
        reward: reward of the turn; an episode's reward is the sum over its turns.
        messages: messages that the model sees next; empty ends the episode.
        replaces_history: if True, `messages` replace the history instead of following it.
        bonus: reward of this turn alone, spread over its tokens.
        oracle: computes one reward per token of the turn, such as `phrase_bonuses` and
            `key_fact_bonuses`. The tokens' advantages include `bonus` and these rewards.
        stop_reason: reason why the episode ends; None: that of the turn.
        metrics: metrics of the episode so far.
        feedback: see `distill.envs.base.StepResult`.
    """

    reward: float = 0.0
    messages: Sequence[Message] = ()
    replaces_history: bool = False
    bonus: float = 0.0
    oracle: Oracle | None = None
    stop_reason: StopReason | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""


class MessageEnv(ABC):
    """One episode, in messages of OpenAI's chat format.

    Attributes:
        tools: tools that the model may call.
        starts: True if `start` does not wait for another member of the group.
        ends_when_cut: if True, a turn cut off by `max_new_tokens` ends the episode, even if `step`
            returns further messages.
    """

    tools: Sequence[Tool] = ()
    starts: bool = True
    ends_when_cut: bool = False

    async def start(self, models: Mapping[str, SamplingModel]) -> None:  # noqa: B027 - most need nothing
        """Prepare the episode; called first.

        Args:
            models: models that the environment may query; see `EnvGroupBuilder.make_envs`.
        """

    @abstractmethod
    def initial_messages(self) -> Sequence[Message]:
        """Messages before the model's first turn; empty if the model never has a turn."""

    @abstractmethod
    async def step(self, message: Message) -> MessageStep:
        """Answer a turn that calls no tool, or that was cut off by a limit.

        In `message`, `content` is the answer without the thinking, `reasoning_content` the
        thinking, and `text` the whole turn as sampled. A turn that was cut off within its thinking
        or within a tool call has no answer.
        """

    async def unfinished(self) -> MessageStep:
        """Reward, metrics and feedback of an episode that was cut off by a limit."""
        return MessageStep()

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release the episode's resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLimits:
    """Limits of an episode.

    Attributes:
        max_turns: maximum number of the model's turns.
        max_tokens: exclusive upper bound of the tokens that the model sees before a turn.
        teacher_tokens: maximum number of tokens that a teacher with a privileged context sees
            before a turn, so that the turn fits.
        time_s: maximum duration in seconds, checked between turns.
        tools: limits of tool calls.
    """

    max_turns: int
    max_tokens: int
    teacher_tokens: int
    time_s: float
    tools: ToolLimits

    def longest_row(self, first: int, max_new_tokens: int) -> int:
        """Number of tokens of the longest row of an episode that begins with `first` tokens.

        The row has the tokens before the last turn, and that turn. Messages of the environment
        after the first observation are not counted.
        """
        before = min(self.max_tokens - 1, first + (self.max_turns - 1) * max_new_tokens)
        return before + max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensing:
    """Condense a history when the next observation exceeds the limit: see `condense_history`.

    Attributes:
        condenser: creates the condenser from the policy, if it may be queried.
        max_tokens: maximum number of tokens of the condensed history.
        keep_last: number of last messages that are never condensed.
        recall: True if the model has a tool that reads the original of a condensed message.
    """

    condenser: Callable[[SamplingModel | None], Condenser]
    max_tokens: int
    keep_last: int
    recall: bool = False

    async def __call__(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        models: Mapping[str, SamplingModel],
        blocks: Blocks | None = None,
    ) -> Sequence[Message]:
        return await condense_history(
            messages,
            condenser=self.condenser(models.get("policy")),
            tokenizer=tokenizer,
            max_tokens=self.max_tokens,
            keep_last=self.keep_last,
            tools=tools or None,
            keep_blocks=None if blocks is None else blocks.keep,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSetting:
    """Settings that all episodes of a run share.

    Attributes:
        tool_format: format in which the model writes calls; None if there are no tools.
        tool_names: names of all tools that an episode may have.
        malformed_penalty: see `ChatConfig`.
        condensing: condenses a history that is too long; None: the episode ends.
    """

    tokenizer: Tokenizer
    tool_format: ToolFormat | None
    tool_names: frozenset[str]
    limits: ChatLimits
    malformed_penalty: float
    condensing: Condensing | None


def counts(*, tools: bool, condenses: bool) -> dict[str, float]:
    """Metrics of every episode of messages, at its start."""
    names = ["cut_turns", "prefix_breaks", *["condensed"] * condenses]
    if tools:
        names += ["tool_calls", "tool_errors", "tool_seconds", "tool_truncated", "tool_neutralised"]
    return dict.fromkeys(names, 0.0)


def offered_tools(
    env: MessageEnv, setting: ChatSetting, blocks: Blocks | None = None
) -> list[Tool]:
    """The environment's tools, and `read_block` if condensed messages can be recalled."""
    if setting.condensing is None or not setting.condensing.recall:
        return list(env.tools)
    return [*env.tools, ReadBlock(blocks or Blocks(setting.tokenizer))]


class ChatEnv(Env):
    """Token-level environment of a `MessageEnv`."""

    def __init__(
        self,
        env: MessageEnv,
        setting: ChatSetting,
        models: Mapping[str, SamplingModel],
        *,
        teacher_context: int | None = None,
    ) -> None:
        """`teacher_context`: number of tokens that the teacher sees in place of the prompt."""
        self._env, self._setting, self.models = env, setting, models
        self._teacher_context = teacher_context
        self._max_tokens = setting.limits.max_tokens
        self.starts = env.starts
        recalls = setting.condensing is not None and setting.condensing.recall
        self._blocks = Blocks(setting.tokenizer) if recalls else None
        offered = offered_tools(env, setting, self._blocks)
        self._tools = {tool.name: tool for tool in offered}
        self._schemas = [tool.schema for tool in offered]
        self._conversation: Conversation | None = None
        self._started = time.monotonic()
        self._turns = 0
        self._counts = counts(tools=bool(offered), condenses=setting.condensing is not None)

    async def initial_observation(self) -> TokenArray | None:
        await self._env.start(self.models)
        messages = self._env.initial_messages()
        if not messages:
            return None
        self._conversation = Conversation(
            self._setting.tokenizer,
            messages,
            tools=self._schemas,
            tool_format=self._setting.tool_format,
        )
        self._started = time.monotonic()
        if len(self._conversation.observation_T) >= self._max_tokens:
            await self._condense()
        self.first_messages = self._conversation.messages
        if self._teacher_context is not None:
            limits, prompt = self._setting.limits, len(self._conversation.observation_T)
            teacher_room = limits.teacher_tokens + 1 - (self._teacher_context - prompt)
            self._max_tokens = min(self._max_tokens, teacher_room)
        return self._conversation.observation_T

    async def close(self) -> None:
        await self._env.close()

    @property
    def conversation(self) -> Conversation:
        assert self._conversation is not None, "call initial_observation() first"
        return self._conversation

    async def step(self, sample: Sample) -> StepResult:
        turn = self.conversation.add_sample(sample)
        self._turns += 1
        cut = sample.stop_reason is StopReason.LENGTH
        self._counts["cut_turns"] += cut
        unread = len(turn.malformed) + sum(isinstance(c.arguments, str) for c in turn.calls)
        bonus = 0.0 if cut else -self._setting.malformed_penalty * unread
        if not cut and (turn.calls or turn.malformed):
            answered = await self._call(turn)
        else:
            answered = await self._env.step(self.conversation.response.message)
        reward, ended, feedback = answered.reward, answered.stop_reason, answered.feedback
        metrics = answered.metrics
        continues = bool(answered.messages) and ended is None
        if continues:
            last = cut and self._env.ends_when_cut
            ended = StopReason.LENGTH if last else await self._continue(answered)
            continues = ended is None
            if not continues:
                end = await self._env.unfinished()
                reward, metrics = reward + end.reward, {**metrics, **end.metrics}
                cause = f"It was cut off by a limit ({ended}) before its end."
                feedback = "\n".join(filter(None, (feedback, end.feedback, cause)))
        self._counts["prefix_breaks"] = len(self.conversation.prefix_breaks)
        return StepResult(
            reward=reward,
            observation_T=self.conversation.observation_T if continues else None,
            bonuses_T=self._bonuses_T(sample, answered, bonus),
            stop_reason=ended,
            metrics={**self._counts, **metrics},
            feedback=feedback,
        )

    async def _call(self, turn: ParsedTurn) -> MessageStep:
        """Run the calls. The messages are results, and errors for calls that cannot be parsed.

        The feedback consists of the errors.
        """
        outcomes = await run_calls(
            turn.calls, self._tools, self._setting.limits.tools, self._setting.tokenizer
        )
        self._counts["tool_calls"] += len(turn.calls) + len(turn.malformed)
        errors = sum(outcome.error is not None for outcome in outcomes) + len(turn.malformed)
        self._counts["tool_errors"] += errors
        for name in ("seconds", "truncated", "neutralised"):
            total = sum(float(getattr(outcome, name)) for outcome in outcomes)
            self._counts[f"tool_{name}"] += total
        unparsed = [{"role": "user", "content": text} for text in turn.malformed]
        failed = [outcome.message["content"] for outcome in outcomes if outcome.error is not None]
        return MessageStep(
            messages=[*(outcome.message for outcome in outcomes), *unparsed],
            feedback="\n".join([*failed, *turn.malformed])[-LONGEST_WORDS:],
        )

    async def _continue(self, answered: MessageStep) -> StopReason | None:
        """Add the messages to the conversation, or return the limit that ends the episode."""
        limits = self._setting.limits
        if self._turns >= limits.max_turns:
            return StopReason.TURNS
        if time.monotonic() - self._started >= limits.time_s:
            return StopReason.TIME
        if answered.replaces_history:
            self.conversation.replace(answered.messages)
        else:
            self.conversation.add_messages(answered.messages)
        if len(self.conversation.observation_T) < self._max_tokens:
            return None
        if self._setting.condensing is None:
            return StopReason.LENGTH
        try:
            await self._condense()
        except TooLongToCondense:  # for example, a tool's answer
            return StopReason.LENGTH
        return None

    async def _condense(self) -> None:
        """Raise TooLongToCondense if the messages that must be kept are too long already."""
        condensing = self._setting.condensing
        if condensing is None:
            return  # the engine refuses a prompt without room for an answer
        messages, tokenizer = self.conversation.messages, self._setting.tokenizer
        self.conversation.replace(
            await condensing(messages, tokenizer, self._schemas, self.models, self._blocks)
        )
        self._counts["condensed"] += 1

    def _bonuses_T(self, sample: Sample, answered: MessageStep, bonus: float) -> FloatArray | None:
        bonus += answered.bonus
        if not bonus and answered.oracle is None:
            return None
        length = len(sample.tokens_T)
        bonuses_T = np.full(length, bonus / length, np.float32)
        if answered.oracle is not None:
            bonuses_T += answered.oracle(sample.tokens_T, self._setting.tokenizer)
        return bonuses_T
