"""Questions that are answered with tools: the model calls tools, reads results, and answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial

import chz

from distill.chat.responses import Response
from distill.chat.template import Message
from distill.data.prompts import FIELDS, ChatStyle, Prompt, check_form
from distill.envs.base import EnvContext, require_path
from distill.envs.chat import MessageEnv, MessageStep
from distill.envs.chat_config import ChatEnvConfig, MessageProblem
from distill.envs.single_turn import facts_of, format_field, format_of, format_reward_field
from distill.rewards.formats import Format
from distill.rewards.model_reward import ModelReward, score_chats
from distill.rewards.registry import RewardFunction, answer_of, verdict
from distill.rewards.token_rewards import phrase_bonuses
from distill.rewards.verdict import Verdict
from distill.tools.base import Tool
from distill.tools.load import load_tools, require_tools


class Question(MessageEnv):
    """Environment that ends with the first turn without a tool call, which `reward` judges.

    If `reward` is None, a reward model scores the whole chat later.
    """

    def __init__(
        self, prompt: Prompt, tools: Sequence[Tool], reward: RewardFunction | None, format: Format
    ) -> None:
        self._prompt, self.tools, self._reward, self._format = prompt, tools, reward, format

    def initial_messages(self) -> Sequence[Message]:
        return self._prompt.messages

    async def step(self, message: Message) -> MessageStep:
        answer, earned = self._prompt.answer, Verdict(reward=0.0)
        response = Response.of(message)
        if self._reward is not None and answer is not None:
            earned = await verdict(self._reward, response, answer)
        metrics = await format_of(response.text, self._format)
        bonuses = self._prompt.bonuses
        oracle = partial(phrase_bonuses, bonuses=bonuses) if bonuses else None
        bonus = self._format.reward * metrics.get("format", 0.0)
        return MessageStep(
            reward=earned.reward,
            oracle=oracle,
            bonus=bonus,
            metrics=metrics,
            feedback=earned.feedback,
        )

    async def unfinished(self) -> MessageStep:
        return MessageStep(metrics={} if self._format.pattern is None else {"format": 0.0})


@chz.chz
class ToolUse(ChatEnvConfig):
    """env=ToolUse: prompts that are answered with tools, as chats."""

    row_fields = FIELDS
    check_row = staticmethod(check_form)
    takes_reward_model = True

    tools: str = chz.field(
        default="calculator",
        doc="tools, separated by commas: calculator, python (a sandbox), retrieval:DIR (a search "
        "in text files), or package.module:function",
    )
    system: str | None = chz.field(default=None, doc="system message, placed before every prompt")
    format: str | None = format_field()
    format_reward: float = format_reward_field()

    @property
    def metric_names(self) -> Collection[str]:
        return self._counts_and(*["format"] * bool(self.format), tools=True)

    def check_here(self) -> None:
        require_tools(self.tools)

    def toolbox(self) -> Sequence[Tool]:
        return load_tools(self.tools)

    def new_env(self) -> Callable[..., Question]:
        """Constructor of an episode's environment, with the arguments of `Question`."""
        return Question

    def problems(self, path: str | None, setting: EnvContext) -> Sequence[MessageProblem]:
        tools, new_env = self.toolbox(), self.new_env()
        format = Format(pattern=self.format, reward=self.format_reward)
        schemas = [tool.schema for tool in tools]
        source = require_path(path, "ToolUse")
        prompts_P = setting.prompts(source, ChatStyle(system=self.system, tools=schemas))
        reward, scored = setting.reward, {}
        if isinstance(reward, ModelReward):
            from distill.rewards.conversations import accepted_prompts  # torch: not for workers

            prompts_P = accepted_prompts(
                reward.path, source, prompts_P, setting.max_new_tokens, schemas, long=setting.long
            )
            scored = {"compare_by": partial(score_chats, tools=schemas), "judged": True}
            reward = None
        return [
            MessageProblem(
                make=partial(new_env, prompt, tools, reward, format),
                line=prompt.line,
                num_tokens=len(prompt.tokens_T),
                **(facts_of(prompt, format) | scored),
            )
            for prompt in prompts_P
        ]

    def answer(self, setting: EnvContext) -> Callable[[str], Hashable | None] | None:
        return answer_of(setting.reward)
