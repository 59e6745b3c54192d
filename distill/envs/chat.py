"""Chat environments: write the environment's messages, and the rest is done here.

MessageEnv      yours: the first messages, what comes back to a turn, what it earns
ChatEnv         renders them by the model's own template, reads tool calls, runs the tools,
                keeps the limits, condenses what grows too long; tokens stay as sampled
ChatEnvConfig   `env=package.module:Class`: its settings, and the list of problems
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

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
from distill.types import FloatArray, StopReason, TokenArray

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# (sampled tokens, tokenizer) -> float32, the reward of each token
Oracle: TypeAlias = "Callable[[TokenArray, PreTrainedTokenizerBase], FloatArray]"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStep:
    """The environment's answer to a turn of the assistant's.

    Attributes:
        reward: adds up over the episode.
        messages: what the model sees next; none end the episode.
        afresh: the messages take the place of all that was said, instead of following it.
        bonus: a reward of this very turn, spread over its tokens.
        oracle: rewards of the turn's tokens, one each, such as `phrase_bonuses` and
            `key_fact_bonuses` give. The advantages of the tokens have both kinds in them.
        stop_reason: why the episode ends; None: as the turn did.
        metrics: of the episode so far.
        feedback: as `distill.envs.base.StepResult` has it.
    """

    reward: float = 0.0
    messages: Sequence[Message] = ()
    afresh: bool = False
    bonus: float = 0.0
    oracle: Oracle | None = None
    stop_reason: StopReason | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""


class MessageEnv(ABC):
    """One episode, in messages of OpenAI's chat format.

    `tools` are what the model may call. `starts`: `start` waits for no other member of the group.
    `ends_when_cut`: a turn cut off by `max_new_tokens` is the last, whatever `step` answers.
    """

    tools: Sequence[Tool] = ()
    starts: bool = True
    ends_when_cut: bool = False

    async def start(self, models: Mapping[str, SamplingModel]) -> None:  # noqa: B027 - most need nothing
        """Called first. `models` may be asked; see `EnvGroupBuilder.make_envs`."""

    @abstractmethod
    def initial_messages(self) -> Sequence[Message]:
        """The messages before the model's first turn; none: it never has one."""

    @abstractmethod
    async def step(self, message: Message) -> MessageStep:
        """Answers a turn that calls no tool, or one that a limit cut off.

        `content` is the answer, without the thinking, which is in `reasoning_content`; `text` is
        the whole turn as it was sampled. A turn that was cut off within its thinking or within a
        tool call has no answer.
        """

    async def unfinished(self) -> float:
        """Reward of an episode that a limit has cut off."""
        return 0.0

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Releases the episode's resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLimits:
    """Limits of an episode.

    Attributes:
        max_turns: most turns of the model's.
        max_tokens: the model sees fewer before each of its turns.
        teacher_tokens: the most that a teacher with a privileged context may see before a turn, so
            that it has room for the turn.
        time_s: seconds, looked at between turns.
    """

    max_turns: int
    max_tokens: int
    teacher_tokens: int
    time_s: float
    tools: ToolLimits

    def longest_row(self, first: int, max_new_tokens: int) -> int:
        """Tokens of the longest row of an episode that begins with `first` tokens: those that the
        model sees before its last turn, and that turn. What others say is not counted."""
        before = min(self.max_tokens - 1, first + (self.max_turns - 1) * max_new_tokens)
        return before + max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensing:
    """Condenses a history when the next observation exceeds the limit: see `condense_history`.

    `condenser` is made of the models that may be asked. `recall`: the model has a tool by which it
    reads what was condensed.
    """

    condenser: Callable[[Mapping[str, SamplingModel]], Condenser]
    max_tokens: int
    keep_last: int
    recall: bool = False

    async def __call__(
        self,
        messages: Sequence[Message],
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]],
        models: Mapping[str, SamplingModel],
        blocks: Blocks | None = None,
    ) -> Sequence[Message]:
        return await condense_history(
            messages,
            condenser=self.condenser(models),
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
        tool_format: how the model writes calls; None where there are no tools.
        tool_names: of every tool that an episode may have.
        malformed_penalty: see `ChatConfig`.
        condensing: what becomes of a history that is too long; None: the episode ends.
    """

    tokenizer: PreTrainedTokenizerBase
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
    """The environment's tools, and read_block where what is condensed can be read."""
    if setting.condensing is None or not setting.condensing.recall:
        return list(env.tools)
    return [*env.tools, ReadBlock(blocks or Blocks(setting.tokenizer))]


class ChatEnv(Env):
    """A `MessageEnv` as tokens."""

    def __init__(
        self,
        env: MessageEnv,
        setting: ChatSetting,
        models: Mapping[str, SamplingModel],
        *,
        teacher_context: int | None = None,
    ) -> None:
        """`teacher_context` is the length of what the teacher sees in place of the prompt."""
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
        assert self._conversation is not None, "initial_observation comes first"
        return self._conversation

    async def step(self, sample: Sample) -> StepResult:
        turn = self.conversation.said(sample)
        self._turns += 1
        cut = sample.stop_reason is StopReason.LENGTH
        self._counts["cut_turns"] += cut
        unread = len(turn.malformed) + sum(isinstance(c.arguments, str) for c in turn.calls)
        bonus = 0.0 if cut else -self._setting.malformed_penalty * unread
        if not cut and (turn.calls or turn.malformed):
            answered = await self._call(turn)
        else:
            answered = await self._env.step(self.conversation.response.message)
        reward, ended, told = answered.reward, answered.stop_reason, answered.feedback
        goes_on = bool(answered.messages) and ended is None
        if goes_on:
            last = cut and self._env.ends_when_cut
            ended = StopReason.LENGTH if last else await self._go_on(answered)
            goes_on = ended is None
            if not goes_on:
                reward += await self._env.unfinished()
                told = f"{told}\nIt was cut off by a limit ({ended}) before its end.".lstrip()
        self._counts["prefix_breaks"] = len(self.conversation.prefix_breaks)
        return StepResult(
            reward=reward,
            observation_T=self.conversation.observation_T if goes_on else None,
            bonuses_T=self._bonuses_T(sample, answered, bonus),
            stop_reason=ended,
            metrics=self._counts | dict(answered.metrics),
            feedback=told,
        )

    async def _call(self, turn: ParsedTurn) -> MessageStep:
        """The tools' results, and error messages for calls that cannot be parsed; the feedback is
        what went wrong."""
        outcomes = await run_calls(
            turn.calls, self._tools, self._setting.limits.tools, self._setting.tokenizer
        )
        self._counts["tool_calls"] += len(turn.calls) + len(turn.malformed)
        errors = sum(outcome.error is not None for outcome in outcomes) + len(turn.malformed)
        self._counts["tool_errors"] += errors
        for name in ("seconds", "truncated", "neutralised"):
            total = sum(float(getattr(outcome, name)) for outcome in outcomes)
            self._counts[f"tool_{name}"] += total
        told = [{"role": "user", "content": text} for text in turn.malformed]
        failed = [outcome.message["content"] for outcome in outcomes if outcome.error is not None]
        return MessageStep(
            messages=[*(outcome.message for outcome in outcomes), *told],
            feedback="\n".join([*failed, *turn.malformed])[-LONGEST_WORDS:],
        )

    async def _go_on(self, answered: MessageStep) -> StopReason | None:
        """Adds the messages to the conversation, or returns the limit that ends the episode."""
        limits = self._setting.limits
        if self._turns >= limits.max_turns:
            return StopReason.TURNS
        if time.monotonic() - self._started >= limits.time_s:
            return StopReason.TIME
        if answered.afresh:
            self.conversation.replace(answered.messages)
        else:
            self.conversation.hear(answered.messages)
        if len(self.conversation.observation_T) < self._max_tokens:
            return None
        if self._setting.condensing is None:
            return StopReason.LENGTH
        try:
            await self._condense()
        except TooLongToCondense:  # a tool's answer, say
            return StopReason.LENGTH
        return None

    async def _condense(self) -> None:
        """Raises TooLongToCondense where what must stay is too long already."""
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
