"""Questions that are answered with tools: the model calls, reads, and answers in the end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import chz

from distill.bonuses import phrase_bonuses
from distill.envs.base import Setting, require_path
from distill.envs.chat import MessageEnv, MessageStep
from distill.envs.chat_config import ChatEnvConfig, MessageProblem
from distill.envs.single_turn import facts_of
from distill.prompts import ChatStyle, Prompt
from distill.renderer import Message
from distill.rewards import RewardFunction, answer_of, judge
from distill.tools.base import Tool
from distill.tools.load import load_tools


class Question(MessageEnv):
    """Ends with the first turn that calls no tool, which `reward` holds against the answer."""

    def __init__(self, prompt: Prompt, tools: Sequence[Tool], reward: RewardFunction) -> None:
        self._prompt, self.tools, self._reward = prompt, tools, reward

    def initial_messages(self) -> Sequence[Message]:
        return self._prompt.messages

    async def step(self, message: Message) -> MessageStep:
        answer = self._prompt.answer
        reward = 0.0
        if answer is not None:
            reward = await judge(self._reward, message.get("content") or "", answer)
        bonuses = self._prompt.bonuses
        oracle = partial(phrase_bonuses, bonuses=bonuses) if bonuses else None
        return MessageStep(reward=reward, oracle=oracle)


@chz.chz
class ToolUse(ChatEnvConfig):
    """env=ToolUse: prompts that are answered with tools, as chats."""

    tools: str = chz.field(
        default="calculator",
        doc="commas between: calculator, python (a sandbox), retrieval:DIR (a search in text "
        "files), or package.module:function of yours",
    )
    system: str | None = chz.field(default=None, doc="what the system says, before every prompt")

    def toolbox(self) -> Sequence[Tool]:
        return load_tools(self.tools)

    def problems(self, path: str | None, setting: Setting) -> Sequence[MessageProblem]:
        tools = self.toolbox()
        style = ChatStyle(system=self.system, tools=[tool.schema for tool in tools])
        return [
            MessageProblem(
                make=partial(Question, prompt, tools, setting.reward),
                line=prompt.line,
                num_tokens=len(prompt.tokens_T),
                **facts_of(prompt),
            )
            for prompt in setting.prompts(require_path(path, "ToolUse"), style)
        ]

    def answer(self, setting: Setting) -> Callable[[str], Hashable | None] | None:
        return answer_of(setting.reward)
