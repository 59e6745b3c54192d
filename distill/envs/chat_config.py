"""Settings of chat environments: `env=package.module:Class env.field=value`."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import chz

from distill.chat.template import Message, render_messages
from distill.chat.tool_calls import detect_format
from distill.data.row_conversion import TooLong
from distill.engine import SamplingModel
from distill.envs.base import (
    Env,
    EnvConfig,
    EnvContext,
    EnvGroupBuilder,
    Episode,
    ListedDataset,
    ProblemFacts,
    only_teacher,
)
from distill.envs.chat import (
    ChatEnv,
    ChatLimits,
    ChatSetting,
    Condensing,
    MessageEnv,
    counts,
    offered_tools,
)
from distill.errors import ConfigError, DataError
from distill.libraries import require_library
from distill.rules import above, at_least, needs, setting
from distill.sampling import EvalSampling
from distill.text.chunks import require_splitter
from distill.text.condense import (
    INSTRUCTION,
    LEAST_CHUNK,
    Condenser,
    KeywordCondenser,
    ModelCondenser,
    load_condenser,
)
from distill.tools.base import Tool
from distill.tools.calls import ToolLimits
from distill.tools.read_block import Blocks, ReadBlock
from distill.types import shared_fields

# (the messages of each member; empty for one that never had a turn) -> additional reward of each
Compare = Callable[[Sequence[Sequence[Message]]], Awaitable[Sequence[float]]]
# As `Compare`, with the models that environments may query, by name, as second argument.
CompareBy = Callable[[Sequence[Sequence[Message]], Mapping[str, Any]], Awaitable[Sequence[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageProblem(ProblemFacts):
    """One problem. Its other fields are those of `ProblemFacts`.

    Attributes:
        make: creates a single-use environment. Must pickle.
        make_group: creates the environments of a whole group, which share state; used instead of
            `make` if given. Must pickle.
        compare: rewards the members of a group after all have ended; see
            `EnvGroupBuilder.group_rewards`. Must pickle.
        compare_by: as `compare`, and receives the models that may be queried.
        line: the problem's row in a file.
        num_tokens: number of tokens of the first observation, if known.
    """

    make: Callable[[], MessageEnv]
    make_group: Callable[[int], Sequence[MessageEnv]] | None = None
    compare: Compare | None = None
    compare_by: CompareBy | None = None
    line: int | None = None
    num_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ChatGroupBuilder(EnvGroupBuilder):
    """Builder of G environments on the same problem."""

    problem: MessageProblem
    setting: ChatSetting
    group_size: int

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        problem, hint_T = self.problem, self.problem.teacher_tokens_T
        if problem.make_group is None:
            envs_G = [problem.make() for _ in range(self.group_size)]
        else:
            envs_G = problem.make_group(self.group_size)
        context = None if hint_T is None else len(hint_T)
        return [ChatEnv(env, self.setting, models, teacher_context=context) for env in envs_G]

    async def group_rewards(
        self, envs_G: Sequence[Env], episodes_G: Sequence[Episode]
    ) -> Sequence[float]:
        compare, compare_by = self.problem.compare, self.problem.compare_by
        if compare is None and compare_by is None:
            return await super().group_rewards(envs_G, episodes_G)
        messages_G, models = [], {}
        for env, episode in zip(envs_G, episodes_G, strict=True):
            assert isinstance(env, ChatEnv), "make_envs makes no others"
            messages_G.append(env.conversation.openai_messages if episode.turns else ())
            models = env.models
        if compare_by is not None:
            return await compare_by(messages_G, models)
        assert compare is not None
        return await compare(messages_G)


class ChatDataset(ListedDataset):
    """Dataset of problems whose episodes are exchanges of messages."""

    def __init__(
        self,
        problems_P: Sequence[MessageProblem],
        setting: ChatSetting,
        *,
        answer: Callable[[str], Hashable | None] | None,
        longest_prompt: int,
    ) -> None:
        """
        Args:
            problems_P: problems that have a line.
            answer: extracts a response's answer; see `EnvDataset.answer`.
            longest_prompt: largest number of tokens that a problem begins with.
        """
        super().__init__(problems_P)
        self._setting, self._longest_prompt, self.answer = setting, longest_prompt, answer

    def builder(self, problem: int, group_size: int) -> ChatGroupBuilder:
        chosen = self.problems_P[problem]
        facts = shared_fields(ProblemFacts, chosen)
        facts["pays_bonuses"] = chosen.pays_bonuses or self._setting.malformed_penalty > 0
        return ChatGroupBuilder(
            **facts, problem=chosen, setting=self._setting, group_size=group_size
        )

    def longest_row(self, max_new_tokens: int) -> int:
        return self._setting.limits.longest_row(self._longest_prompt, max_new_tokens)


# With `env.condenser` set to this name, the policy itself condenses.
BY_POLICY = "model"
_CONDENSED = needs("condenser", remedy="give a condenser, such as keywords")
_BY_POLICY = needs("condenser", BY_POLICY)
_TOOL_TIMEOUT_S, _TOOL_MAX_TOKENS = 30.0, 512


@chz.chz
class ChatConfig(EnvConfig):
    """Settings of all environments whose episodes are exchanges of messages."""

    max_turns: int = setting(
        at_least(1), default=8, doc="maximum number of turns of the model in an episode"
    )
    max_tokens: int | None = chz.field(
        default=None,
        doc="maximum number of tokens before a turn of the model; default: the models' context",
    )
    time_s: float = setting(
        above(0),
        default=600.0,
        doc="maximum duration of an episode in seconds, checked between turns",
    )
    tool_timeout_s: float = setting(
        above(0), default=_TOOL_TIMEOUT_S, doc="time limit of a tool call in seconds"
    )
    tool_max_tokens: int = setting(
        at_least(1),
        default=_TOOL_MAX_TOKENS,
        doc="maximum length of a tool's answer in tokens; the rest is cut, with a note",
    )
    malformed_penalty: float = setting(
        at_least(0, "the penalty is subtracted from the reward"),
        default=0.0,
        doc="penalty on the tokens of a turn for each tool call that cannot be parsed",
    )
    condenser: str | None = chz.field(
        default=None,
        doc="how a history longer than max_tokens is shortened: keywords; model (the policy "
        "itself, greedily and untrained); or package.module:function of (text, focus, max_tokens); "
        "default: the episode ends",
    )
    condense_to: int | None = setting(
        at_least(1),
        _CONDENSED,
        default=None,
        doc="maximum length of a condensed history in tokens; default: half of max_tokens",
    )
    keep_last: int = setting(
        at_least(1), _CONDENSED, default=2, doc="number of last messages that are never condensed"
    )
    recall: bool = setting(
        _CONDENSED,
        default=False,
        doc="list each condensed message as <block_N>, and give the model a tool, read_block, that "
        "returns a message in full",
    )
    condenser_tokens: int | None = setting(
        at_least(1),
        _BY_POLICY,
        default=None,
        doc="condenser=model: maximum length of its answers in tokens, including reasoning; "
        "default: max_new_tokens",
    )
    condenser_temperature: float = setting(
        at_least(0),
        _BY_POLICY,
        default=0.0,
        doc="condenser=model: temperature of its answers; 0: greedy",
    )
    condenser_prompt: str | None = setting(
        _BY_POLICY,
        default=None,
        doc="condenser=model: instruction, to which the latest message and the text are appended; "
        "default: to summarise",
    )

    def _counts_and(self, *own: str, tools: bool = False) -> Collection[str]:
        """Names of the counts of every episode of messages, and of an environment's own metrics."""
        condenses = self.condenser is not None
        return {*counts(tools=tools or self.recall, condenses=condenses), *own}

    def toolbox(self) -> Sequence[Tool]:
        """The tools of these environments; the chat template must support tool calls."""
        return ()

    def chat_setting(self, setting: EnvContext) -> ChatSetting:
        """Check these settings and combine them with the run's, for all episodes.

        Raises:
            ConfigError: limits leave no room, there are tools but the template does not support
                them, there are settings of tools but no tools, or a library is not installed.
        """
        tools = [*self.toolbox()]
        if self.recall:
            tools.append(ReadBlock(Blocks(setting.tokenizer)))
        if tools:
            what = f"env={type(self).__name__} with tools"
            require_library("jsonschema", what, "jsonschema", "env")
        else:
            self._refuse_tool_settings()
        return ChatSetting(
            tokenizer=setting.tokenizer,
            tool_format=detect_format(setting.tokenizer) if tools else None,
            tool_names=frozenset(tool.name for tool in tools),
            limits=self._limits(setting),
            malformed_penalty=self.malformed_penalty,
            condensing=self._condensing(setting),
        )

    def _refuse_tool_settings(self) -> None:
        for name, default in (
            ("tool_timeout_s", _TOOL_TIMEOUT_S),
            ("tool_max_tokens", _TOOL_MAX_TOKENS),
            ("malformed_penalty", 0.0),
        ):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"env.{name}={getattr(self, name)} changes nothing: {type(self).__name__} has "
                    "no tools; leave it out"
                )

    def _limits(self, setting: EnvContext) -> ChatLimits:
        longest = setting.context_length if self.max_tokens is None else self.max_tokens
        if not setting.max_new_tokens < longest <= setting.context_length:
            raise ConfigError(
                f"env.max_tokens={longest} must be above max_new_tokens={setting.max_new_tokens}, "
                f"the longest turn, and at most the models' context of {setting.context_length}"
            )
        return ChatLimits(
            max_turns=self.max_turns,
            max_tokens=longest,
            teacher_tokens=setting.teacher_room - setting.max_new_tokens,
            time_s=self.time_s,
            tools=ToolLimits(timeout_s=self.tool_timeout_s, max_tokens=self.tool_max_tokens),
        )

    def _condensing(self, setting: EnvContext) -> Condensing | None:
        if self.condenser is None:
            return None
        require_splitter(f"env.condenser={self.condenser}")
        longest = self._limits(setting).max_tokens
        target = longest // 2 if self.condense_to is None else self.condense_to
        if not 0 < target <= longest - setting.max_new_tokens:
            raise ConfigError(
                f"env.condense_to={target} must leave room for a turn of "
                f"max_new_tokens={setting.max_new_tokens} in {longest} tokens; lower one of them"
            )
        return Condensing(
            condenser=self._condenser(setting, target),
            max_tokens=target,
            keep_last=self.keep_last,
            recall=self.recall,
        )

    def _condenser(self, setting: EnvContext, target: int) -> Callable[[Any], Condenser]:
        assert self.condenser is not None
        if self.condenser != BY_POLICY:
            return partial(_fixed_condenser, load_condenser(self.condenser, setting.tokenizer))
        sampling = EvalSampling(
            temperature=self.condenser_temperature,
            max_new_tokens=self.condenser_tokens or setting.max_new_tokens,
        )
        room = setting.context_length - sampling.max_new_tokens
        if target < LEAST_CHUNK:
            raise ConfigError(
                f"env.condense_to={target} is too short for condenser={BY_POLICY}, which "
                f"summarises chunks of at least {LEAST_CHUNK} tokens; raise it, or env.max_tokens"
            )
        if room < 2 * LEAST_CHUNK:
            raise ConfigError(
                f"env.condenser_tokens={sampling.max_new_tokens} leaves no room for the "
                f"text in the models' context of {setting.context_length}; lower it"
            )
        return partial(
            ModelCondenser,
            tokenizer=setting.tokenizer,
            sampling=sampling,
            instruction=self.condenser_prompt or INSTRUCTION,
            chunk_tokens=min(target, room // 2),
        )


def _fixed_condenser(condenser: Condenser, _policy: object) -> Condenser:
    return condenser


@chz.chz
class ChatEnvConfig(ChatConfig):
    """Base class of a custom `env=package.module:YourClass`: define its fields, and `problems`."""

    @abstractmethod
    def problems(self, path: str | None, setting: EnvContext) -> Sequence[MessageProblem]:
        """Load the problems; `path` is the run's `prompts`, or `eval.source`."""

    def answer(self, setting: EnvContext) -> Callable[[str], Hashable | None] | None:
        """Function that extracts the answer of a last turn, so that several responses can vote.

        None if they cannot vote.
        """
        return None

    def __call__(self, path: str | None, setting: EnvContext) -> ChatDataset:
        chat = self.chat_setting(setting)
        problems = self.problems(path, setting)
        unnamed = any(not problem.teacher for problem in problems)
        teacher = only_teacher(setting) if unnamed else ""

        def named(line: int, problem: MessageProblem) -> tuple[MessageProblem, int]:
            problem = replace(problem, line=line, teacher=problem.teacher or teacher)
            return self._checked(problem, chat, setting)

        checked = setting.long.converted(
            path or type(self).__name__,
            [(each.line or number, each) for number, each in enumerate(problems, 1)],
            named,
            threads=1,  # environments may be of a custom class, which need not be safe in threads
        )
        return ChatDataset(
            [problem for problem, _ in checked],
            chat,
            answer=self.answer(setting),
            longest_prompt=max((length for _, length in checked), default=0),
        )

    def _checked(
        self, problem: MessageProblem, chat: ChatSetting, setting: EnvContext
    ) -> tuple[MessageProblem, int]:
        """The problem with its feedback, and the number of its tokens before the first turn.

        Raises:
            TooLong: a model has no room for a first turn, also if the messages are condensed.
            ConfigError: a tool is missing in `toolbox`.
        """
        problem = self._with_feedback(problem, chat, setting)
        length = problem.num_tokens
        if length is None:
            env = problem.make()
            self._require_named(env.tools, chat.tool_names)
            length = first_length(env, chat)
        if problem.teacher_tokens_T is not None:
            _require_teacher_room(len(problem.teacher_tokens_T), chat)
        if chat.condensing is None:
            require_room("the chat", length, chat, setting.max_new_tokens)
        elif length >= chat.limits.max_tokens:
            asyncio.run(_condensed(length, problem.make(), chat, chat.condensing))
        return problem, length

    def _with_feedback(
        self, problem: MessageProblem, chat: ChatSetting, setting: EnvContext
    ) -> MessageProblem:
        """Add the teacher's context on feedback to a problem if the run sets teacher.feedback."""
        if setting.feedback is None or problem.feedback is not None:
            return problem
        if problem.teacher_tokens_T is not None:
            raise ConfigError(
                f"problems of env={type(self).__name__} set the teacher's context, and so does "
                "teacher.feedback; leave one of them out",
                field="teacher.feedback",
            )
        env = problem.make()
        feedback = setting.feedback_on(
            env.initial_messages(),
            teacher=problem.teacher,
            answer=problem.answer,
            tools=schemas_of(env, chat),
        )
        return replace(problem, feedback=feedback)

    def _require_named(self, tools: Sequence[Tool], named: Collection[str]) -> None:
        """Raise ConfigError for an environment's tool that `toolbox` does not return."""
        unnamed = {tool.name for tool in tools}.difference(named)
        if unnamed:
            raise ConfigError(
                f"{type(self).__name__}: its environments have the tool {min(unnamed)!r}, which "
                f"{type(self).__name__}.toolbox() does not return; return all of them there",
                field="env",
            )


async def _condensed(
    length: int, env: MessageEnv, chat: ChatSetting, condensing: Condensing
) -> None:
    """Raise TooLong if an episode's initial messages cannot be condensed."""
    # Only the messages that must be kept can be too long, and they are the same for all condensers.
    keywords = KeywordCondenser(tokenizer=chat.tokenizer)
    by_keywords = replace(condensing, condenser=partial(_fixed_condenser, keywords))
    schemas = [tool.schema for tool in offered_tools(env, chat)]
    try:
        await by_keywords(env.initial_messages(), chat.tokenizer, schemas, {})
    except DataError as error:
        raise TooLong(
            f"the chat begins with {length:,} tokens of env.max_tokens={chat.limits.max_tokens}, "
            f"and env.condense_to={condensing.max_tokens} cannot hold them condensed: {error}",
            length=length,
            field="env.condense_to",
        ) from error


def first_length(env: MessageEnv, chat: ChatSetting) -> int:
    """Number of tokens that the model sees before its first turn."""
    schemas = schemas_of(env, chat)
    return len(render_messages(chat.tokenizer, env.initial_messages(), tools=schemas))


def schemas_of(env: MessageEnv, chat: ChatSetting) -> Sequence[Mapping[str, Any]] | None:
    """Schemas of the environment's tools for the chat template, or None if there are none."""
    return [tool.schema for tool in offered_tools(env, chat)] or None


def _require_teacher_room(length: int, chat: ChatSetting) -> None:
    """Raise TooLong if a teacher has no room for a first turn after its `length` tokens."""
    if length > chat.limits.teacher_tokens:
        raise TooLong(
            f"the teacher sees {length:,} tokens in place of the prompt, but has room for "
            f"{chat.limits.teacher_tokens:,} before a turn; shorten them, or lower max_new_tokens",
            length=length,
            field="sampling.max_new_tokens",
        )


def require_room(what: str, length: int, chat: ChatSetting, max_new_tokens: int) -> None:
    """Raise TooLong if a first turn after the `length` tokens of `what` has no room."""
    if length + max_new_tokens > chat.limits.max_tokens:
        raise TooLong(
            f"{what} begins with {length:,} tokens, and max_new_tokens={max_new_tokens} more "
            f"exceed the limit of {chat.limits.max_tokens:,} (env.max_tokens or the models' "
            "context); shorten the system prompt or the problem, or give env.condenser",
            length=length,
            field="sampling.max_new_tokens",
        )
