"""Agents: programs that run their own loop and call the policy through OpenAI's API.

    env=Agent env.command='python my_agent.py'          or a command in any language
    env=Agent env.command=my_agent:solve                a function, called in a kept process

Each episode runs the program once. The program receives the problem (a row of the prompts) as JSON
on stdin, or as the function's argument, and OPENAI_BASE_URL and OPENAI_API_KEY of the episode's
endpoint. The result is JSON on the last line of stdout, or the return value of the function:

    0.5                                      the reward
    "Paris"                                  an answer, which `reward=` compares with the row's
    {"reward": 0.5, "metrics": {"tests": 3}}
    {"answer": "Paris"}
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import chz

from actors.envs.agent_process import AgentFailed, AgentProgram
from actors.envs.agent_requests import ClientSampling
from distill.chat.template import check_text
from distill.data.answers import answer_text
from distill.data.feedback import FeedbackContext
from distill.data.prompts import prompt_key, teacher_named
from distill.data.row_files import located
from distill.engine import SamplingModel
from distill.envs.asking import Ask, AskingEnv
from distill.envs.base import (
    Env,
    EnvConfig,
    EnvContext,
    EnvGroupBuilder,
    Episode,
    ListedDataset,
    ProblemFacts,
    require_path,
)
from distill.errors import DataError, kind_of
from distill.json_values import is_number
from distill.rewards.registry import RewardFunction, verdict
from distill.rewards.verdict import LONGEST_WORDS, Verdict
from distill.rules import above, at_least, setting
from distill.types import StopReason, TokenArray, Tokenizer, shared_fields

if TYPE_CHECKING:
    from actors.envs.agent_endpoint import AgentEndpoint

logger = logging.getLogger(__name__)

_RESULT = frozenset({"reward", "answer", "metrics", "feedback"})
_logged: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProblem(ProblemFacts):
    """One problem of an agent.

    Attributes:
        row: the row that the agent receives.
        line: number of the row in its source.
    """

    row: Mapping[str, Any]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSetting:
    """Settings that all episodes share. Instances must be picklable.

    Attributes:
        max_tokens: exclusive upper limit of the prompt tokens of each turn.
        max_turns: maximum number of samples in an episode.
    """

    program: AgentProgram
    tokenizer: Tokenizer
    reward: RewardFunction
    max_tokens: int
    max_turns: int
    client_sampling: ClientSampling

    @classmethod
    def of(cls, limits: AgentLimits, program: AgentProgram, setting: EnvContext) -> AgentSetting:
        """Create the settings from those of an environment and its context."""
        return cls(
            program=program,
            tokenizer=setting.tokenizer,
            reward=setting.reward_function(),
            max_tokens=setting.context_length,
            max_turns=limits.max_turns,
            client_sampling=limits.client_sampling,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """Result of an agent's episode: a reward, or an answer to be judged."""

    reward: float = 0.0
    answer: str | None = None
    metrics: Mapping[str, float]
    feedback: str = ""

    @classmethod
    def read(cls, value: object) -> AgentResult:
        """Parse a result in one of the forms that this module's docstring lists.

        Raises:
            AgentFailed: the value has another form.
        """
        if is_number(value):
            return cls(reward=float(value), metrics={})  # pyright: ignore[reportArgumentType]
        if isinstance(value, str):
            return cls(answer=value, metrics={})
        if not isinstance(value, dict) or not value.keys() <= _RESULT:
            names = ", ".join(sorted(_RESULT))
            raise AgentFailed(
                f"gave {json.dumps(value)[:200]} as its result; a result is a number, a text, or "
                f"an object of {names}"
            )
        reward, answer = value.get("reward"), value.get("answer")
        metrics, feedback = value.get("metrics") or {}, value.get("feedback") or ""
        if not (reward is None or is_number(reward)):
            raise AgentFailed(f"gave the reward {json.dumps(reward)[:200]}, which is not a number")
        if not isinstance(metrics, dict) or not all(map(is_number, metrics.values())):
            raise AgentFailed(
                f"gave the metrics {json.dumps(metrics)[:200]}, which are not all numbers"
            )
        return cls(
            reward=0.0 if reward is None else float(reward),
            answer=None if answer is None or reward is not None else str(answer),
            metrics={name: float(number) for name, number in metrics.items()},
            feedback=str(feedback)[:LONGEST_WORDS],
        )


class AgentEpisode(AskingEnv):
    """Episode that an agent plays."""

    def __init__(self, problem: AgentProblem, setting: AgentSetting) -> None:
        self._problem, self._setting = problem, setting

    async def play(self, ask: Ask) -> Episode:
        from actors.envs.agent_endpoint import AgentEndpoint  # aiohttp: only agents need it

        setting = self._setting
        async with AgentEndpoint(
            ask,
            setting.tokenizer,
            max_tokens=setting.max_tokens,
            max_turns=setting.max_turns,
            client_sampling=setting.client_sampling,
        ) as endpoint:
            try:
                result = AgentResult.read(await self._run(endpoint))
                earned = await self._judged(result)
            except AgentFailed as error:
                return self._failed(endpoint, f"the agent {setting.program.command!r} {error}")
        if not endpoint.turns:
            return self._failed(
                endpoint,
                f"the agent {setting.program.command!r} sent no request to the model; its client "
                "must use OPENAI_BASE_URL and OPENAI_API_KEY",
            )
        episode = _episode(endpoint)
        return replace(
            episode,
            reward=earned.reward,
            metrics={**result.metrics, **episode.metrics},
            feedback=result.feedback or earned.feedback,
        )

    async def _run(self, endpoint: AgentEndpoint) -> object:
        """Run the agent and return its result. An engine error ends the agent and is raised."""
        given = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.key}
        return await endpoint.while_served(self._setting.program.run(self._problem.row, given))

    async def _judged(self, result: AgentResult) -> Verdict:
        if result.answer is None:
            return Verdict(reward=result.reward)
        if self._problem.answer is None:
            raise AgentFailed("gave an answer, but the row has no `answer` to compare it with")
        return await verdict(self._setting.reward, result.answer, self._problem.answer)

    def _failed(self, endpoint: AgentEndpoint, reason: str) -> Episode:
        """Episode of an agent without a result.

        If the last request was refused because of a limit of the episode, the episode is trained
        with a reward of 0. Otherwise it is a failure.
        """
        episode = _episode(endpoint)
        if endpoint.limit is not None and endpoint.turns:
            return replace(episode, feedback=f"It was ended by a limit ({endpoint.limit}).")
        if (kind := kind_of(reason)) not in _logged:
            _logged.add(kind)
            logger.warning("an episode failed: %s", reason)
        return replace(episode, failure=reason)


def _episode(endpoint: AgentEndpoint) -> Episode:
    turns, histories, first = tuple(endpoint.turns), endpoint.histories, endpoint.first
    last = turns[-1].sample.stop_reason if turns else StopReason.DONE
    return Episode(
        turns=turns,
        reward=0.0,
        stop_reason=endpoint.limit or last,
        metrics={
            "agent/rewritten": float(histories.rewritten),
            "agent/unmatched": float(histories.unmatched),
            "prefix_breaks": float(histories.prefix_breaks),
        },
        first_messages=first.messages if first else (),
        first_tools=first.tools if first else None,
        failure="",
    )


@dataclass(frozen=True, kw_only=True)
class AgentGroupBuilder(EnvGroupBuilder):
    """Builder of G episodes on the same problem."""

    problem: AgentProblem
    setting: AgentSetting
    group_size: int

    @property
    def may_give_feedback(self) -> bool:
        return self.setting.program.may_give_feedback

    def teacher_context_T(self, episode: Episode) -> TokenArray | None:
        """See `EnvGroupBuilder`. None also if the first request has no user message."""
        if not any(message["role"] == "user" for message in episode.first_messages):
            return None
        return super().teacher_context_T(episode)

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        return [AgentEpisode(self.problem, self.setting) for _ in range(self.group_size)]


class AgentDataset(ListedDataset):
    """Problems of an agent."""

    def __init__(self, problems_P: Sequence[AgentProblem], setting: AgentSetting) -> None:
        super().__init__(problems_P)
        self._setting = setting

    def builder(self, problem: int, group_size: int) -> AgentGroupBuilder:
        chosen = self.problems_P[problem]
        facts = shared_fields(ProblemFacts, chosen)
        row = json.dumps(chosen.row, sort_keys=True, default=str)
        facts["prompt_key"] = prompt_key(row.encode())
        return AgentGroupBuilder(
            **facts, problem=chosen, setting=self._setting, group_size=group_size
        )

    def longest_row(self, max_new_tokens: int) -> int:
        return min(self._setting.max_tokens, self._setting.max_turns * max_new_tokens)


@chz.chz
class AgentLimits(EnvConfig):
    """Settings of all environments whose episodes an agent plays."""

    max_turns: int = setting(
        at_least(1), default=64, doc="maximum number of the model's answers in an episode"
    )
    time_s: float = setting(
        above(0),
        default=600.0,
        doc="time limit of an agent in seconds; a longer episode is ended and fails",
    )
    memory_mb: int = setting(
        at_least(64), default=4096, doc="memory limit of each process of an agent in MB"
    )
    client_sampling: ClientSampling = chz.field(
        default="force",
        doc="treatment of an agent's requests whose temperature, top_p, penalties, seed or "
        "similar parameters differ from the run's. force: use the run's values, and log it; "
        "refuse: answer with error 400",
    )


@chz.chz
class Agent(AgentLimits):
    """env=Agent: a program that owns its loop, and asks the policy through OpenAI's API."""

    command: str = chz.field(
        doc="the agent: a command line, such as 'python my_agent.py', or module:function; it "
        "receives the problem's row as JSON on stdin (or as its argument), and "
        "OPENAI_BASE_URL and OPENAI_API_KEY; it prints (or returns) its reward or its "
        "answer as JSON (docs/recipes/agents.md)",
    )

    def check_here(self) -> None:
        self._program().check()

    @staticmethod
    def check_row(row: Mapping[str, Any]) -> None:
        for name in ("teacher_prompt", "teacher_messages"):
            if row.get(name) is not None:
                raise DataError(
                    f"`{name}`: an agent writes its own prompts, so the row cannot set the "
                    "teacher's prompt; use teacher.feedback, or leave the field out",
                    field=name,
                )

    def __call__(self, path: str | None, setting: EnvContext) -> AgentDataset:
        self.check_here()
        source = require_path(path, "Agent")
        problems_P = []
        for number, row in setting.read(source):
            with located(f"{source}:{number}"):
                problems_P.append(_problem(row, number, setting))
        setting.check_answers(source, ((each.line, each.answer) for each in problems_P))
        return AgentDataset(problems_P, AgentSetting.of(self, self._program(), setting))

    def _program(self) -> AgentProgram:
        return AgentProgram(
            command=self.command,
            directory=os.getcwd(),
            time_s=self.time_s,
            memory_mb=self.memory_mb,
        )


def _problem(row: Mapping[str, Any], number: int, setting: EnvContext) -> AgentProblem:
    if not row:
        raise DataError("the row is empty; give the agent a problem")
    Agent.check_row(row)
    answer, teacher = answer_text(row.get("answer")), teacher_named(row, setting.teachers)
    return AgentProblem(
        row=row,
        line=number,
        answer=answer,
        teacher=teacher,
        tag=None if row.get("tag") is None else check_text(row, "tag"),
        feedback=feedback_on_agent(setting, teacher, answer),
    )


def feedback_on_agent(
    setting: EnvContext, teacher: str, answer: str | None
) -> FeedbackContext | None:
    """Feedback context for an agent's episodes, whose first messages the agent writes.

    Raises:
        DataError: see `EnvContext.feedback_on`.
    """
    example = [{"role": "user", "content": ""}]
    return setting.feedback_on(example, teacher=teacher, answer=answer)
