"""Environments that a policy acts in. Each is used once: make one, run one episode, discard it.

    EnvConfig -> EnvDataset -> EnvGroupBuilder -> G Envs

Settings create a dataset, which is a list of problems; a builder creates a group of environments
that start from the same problem. A dataset and its builders must pickle, because workers may be on
other machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import chz

from distill.chat.responses import response_text
from distill.chat.template import Message
from distill.data.feedback import FeedbackContext, Outcome
from distill.data.order import MixedPart, MixedStream, part_of
from distill.data.prompts import ChatStyle, Prompt, PromptContext, load_prompts
from distill.data.sources import Source
from distill.engine import Sample, SamplingModel
from distill.errors import ConfigError, DataError, IsothermError, described
from distill.lookup import known_names
from distill.rewards.model_reward import ModelReward
from distill.rewards.registry import Reward, RewardFunction, check_answers
from distill.text.foreign import neutralised
from distill.types import FloatArray, StopReason, TokenArray

# Name under which environments query the teacher of a run that has one.
TEACHER = "teacher"


class QueriedModels(dict[str, Any]):
    """The models that environments may query, by name: see `EnvGroupBuilder.make_envs`.

    Raises:
        DataError: no model has the name.
    """

    def __missing__(self, name: str) -> NoReturn:
        raise DataError(
            f"the environment queries models[{name!r}], which is not a model that it may query "
            f"here; {known_names(name, self)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The environment's answer to one sample.

    Attributes:
        reward: reward of the turn; an episode's reward is the sum over its turns.
        observation_T: all tokens that the model sees next; None ends the episode.
        bonuses_T: one reward per sampled token; None: no such rewards.
        trained: False excludes the turn from training: it is context, and has no loss.
        stop_reason: reason why the episode ends; None: that of the last sample.
        metrics: metrics of the episode so far; later turns overwrite values of earlier turns.
        feedback: feedback on the episode for a teacher whose context has `{feedback}`
            (`distill.data.feedback`); the last feedback that is not empty is used.
    """

    reward: float = 0.0
    observation_T: TokenArray | None = None
    bonuses_T: FloatArray | None = None
    trained: bool = True
    stop_reason: StopReason | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One turn: the observation, the sample, and the rewards of its single tokens."""

    observation_T: TokenArray
    sample: Sample
    bonuses_T: FloatArray | None
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """Record of one environment from its first turn, if it had one, to its end.

    Attributes:
        first_messages: see `Env`.
        first_tools: schemas of the tools that `first_messages` were rendered with; None: the
            problem's.
        failure: reason why the episode is not trained, and counts as wrong in evaluations; empty:
            it did not fail; None: episodes of this environment cannot fail by themselves.
    """

    turns: tuple[Turn, ...]
    reward: float
    stop_reason: StopReason
    metrics: Mapping[str, float]
    feedback: str = ""
    first_messages: Sequence[Message] = ()
    first_tools: Sequence[Mapping[str, Any]] | None = None
    failure: str | None = None


class Env(ABC):
    """Environment of one episode.

    `starts`: True if the first observation does not wait for another member of the group. Members
    that start from the same observation are sampled together.
    `first_messages`: messages of the first observation, if it is a chat.
    """

    starts: bool = True
    first_messages: Sequence[Message] = ()

    @abstractmethod
    async def initial_observation(self) -> TokenArray | None:
        """Tokens that the model sees before its first turn, or None if it never has a turn."""

    @abstractmethod
    async def step(self, sample: Sample) -> StepResult: ...

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release the episode's resources; called once, however the episode ended."""


@dataclass(frozen=True, kw_only=True)
class ProblemFacts:
    """Facts of a problem that do not depend on how its episodes are played.

    Attributes:
        teacher: the name of the teacher that scores the group; empty if teachers have no names.
        tag: the kind of the group's problem, for metrics by kind.
        teacher_tokens_T: the teacher's tokens in place of the initial observation, in every segment
            that begins with it; None: the same tokens.
        feedback: maker of the teacher's context from each episode's outcome; None: the context does
            not depend on the outcome.
        judged: True if rewards are meaningful.
        pays_bonuses: True if single tokens may earn rewards.
        answer: the correct answer, if it is known.
        prompt_key: equal for problems with the same prompt, which are held out together; None: no
            other problem has this prompt.
    """

    teacher: str = ""
    tag: str | None = None
    teacher_tokens_T: TokenArray | None = None
    feedback: FeedbackContext | None = None
    judged: bool = True
    pays_bonuses: bool = False
    answer: str | None = None
    prompt_key: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class EnvGroupBuilder(ProblemFacts, ABC):
    """Builder of the single-use environments of one group. Must pickle."""

    @property
    def may_give_feedback(self) -> bool:
        """True if `StepResult.feedback` may be set in this group."""
        return True

    @property
    def hinted(self) -> bool:
        """True if the teacher's context differs from the policy's."""
        return self.teacher_tokens_T is not None or self.feedback is not None

    @property
    def single_prompt(self) -> Prompt | None:
        """The prompt, if an episode is one response to it and models can be queried with its text.

        None if an episode is more than that, or the prompt has no text.
        """
        return None

    def teacher_context_T(self, episode: Episode) -> TokenArray | None:
        """The teacher's tokens in place of the episode's first observation; None: the same tokens.

        The episode must have ended, and must have had a turn.

        Raises:
            DataError: the teacher's chat template refuses the feedback.
        """
        if self.feedback is None:
            return self.teacher_tokens_T
        turns, tokenizer = episode.turns, self.feedback.tokenizer
        responses = [response_text(tokenizer, turn.observation_T, turn.sample) for turn in turns]
        longest = max(len(turn.observation_T) + len(turn.sample.tokens_T) for turn in turns)
        return self.feedback.with_messages(episode.first_messages, episode.first_tools).context_T(
            Outcome(
                reward=episode.reward,
                response=neutralised("\n".join(responses), tokenizer),
                feedback=episode.feedback,
            ),
            later=longest - len(turns[0].observation_T),
        )

    @abstractmethod
    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        """Create the group's environments.

        Args:
            models: models that environments may query, by name: `policy`, the run's `teacher` (or
                its teachers by their names), its `reference` if `EnvConfig.queried_models` names
                it, and its `reward_model` (`distill.rewards.model_reward.scores_of`).
        """

    async def group_rewards(
        self, envs_G: Sequence[Env], episodes_G: Sequence[Episode]
    ) -> Sequence[float]:
        """Additional reward of each member after all have ended, for example from a comparison."""
        return [0.0] * len(episodes_G)


class EnvDataset(ABC):
    """Problems, numbered from 0. Must pickle."""

    # Extracts a response's answer, so that several responses can vote; None: not possible.
    answer: Callable[[str], Hashable | None] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def builder(self, problem: int, group_size: int) -> EnvGroupBuilder: ...

    def longest_row(self, max_new_tokens: int) -> int:
        """Number of tokens of an episode's longest row, as far as it is known before the run.

        Args:
            max_new_tokens: length of the longest turn.
        """
        return max_new_tokens

    def subset(self, problems: Sequence[int]) -> EnvDataset:
        """Dataset of some of the problems, in that order.

        The subset is sent to other processes, so it must not hold the other problems.
        """
        return Subset(self, problems)

    def line(self, problem: int) -> int:
        """The problem's row in its source, from 1, or its number if there is no source."""
        return problem + 1

    def label(self, problem: int) -> str:
        """Text that names the problem's row in messages, with its source if there are several."""
        return str(self.line(problem))

    @property
    def parts(self) -> Sequence[MixedPart]:
        """The sources of the problems, one after another, as they are mixed."""
        return [MixedPart(size=len(self))]

    def source(self, problem: int) -> str:
        """Name of the problem's source; empty if there is only one."""
        return self.parts[part_of(self.parts, problem)[0]].name


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvContext(PromptContext):
    """Facts of the run for which an environment is built.

    Attributes:
        reward: judges a response against an answer; a reward model only with `takes_reward_model`.
    """

    reward: Reward

    def reward_function(self) -> RewardFunction:
        """`reward`, for an environment that accepts only functions."""
        assert not isinstance(self.reward, ModelReward), "takes_reward_model is False"
        return self.reward

    def prompts(self, path: str, chat: ChatStyle | None = None) -> list[Prompt]:
        """Load the prompts of a source, render them, and check that they fit the models' contexts.

        Raises:
            DataError: see `load_prompts`; or the reward cannot read an answer.
        """
        prompts = load_prompts(path, self, chat)
        self.check_answers(path, ((prompt.line, prompt.answer) for prompt in prompts))
        return prompts

    def check_answers(self, path: str, answers: Iterable[tuple[int, str | None]]) -> None:
        """Check that `reward` can read all answers, given as (row number, answer) pairs.

        Raises:
            DataError: the reward cannot read an answer; the message names the source and the row.
        """
        check_answers(self.reward, ((f"{path}:{line}", answer) for line, answer in answers))


@chz.chz
class EnvConfig(ABC):
    """Settings of an environment: `env=package.module:Class env.field=value`.

    `reads_prompts` and `judges` declare which settings of the run it uses: the files `prompts` and
    `eval.source`, and `reward`. A setting that it does not use is rejected.
    """

    # Prefix of the names of the environment's fields on the command line.
    within: ClassVar[str] = "env."
    reads_prompts: ClassVar[bool] = True
    judges: ClassVar[bool] = True
    # True if `reward` may be a reward model: a `ModelReward`, which is not a function.
    takes_reward_model: ClassVar[bool] = False
    # Fields of a row that the environment reads, for `columns.FIELD=`; None: any field.
    row_fields: ClassVar[Collection[str] | None] = None

    @property
    def queried_models(self) -> Sequence[str]:
        """Models that a run has to have because the environments query them: `reference`."""
        return ()

    @property
    def own_reward_model(self) -> str | None:
        """Checkpoint of the reward model that the environments query, if `reward` names none."""
        return None

    @property
    def metric_names(self) -> Collection[str] | None:
        """Names of all metrics of its episodes; None: they are known only in the run."""
        return None

    def evaluation(self) -> EnvConfig:
        """The environment of evaluations."""
        return self

    def check_here(self) -> None:  # noqa: B027 - most name no files or modules
        """Raise ConfigError if a program, module or file that a field names does not exist.

        The check reads no rows, and imports nothing that takes seconds.
        """

    @staticmethod  # noqa: B027 - rows of a custom form
    def check_row(row: Mapping[str, Any]) -> None:
        """Raise DataError for a row without the fields that the environment reads."""

    def check_group(self, group_size: int) -> None:  # noqa: B027 - most accept any
        """Raise ConfigError for a group size that the environment does not support."""

    @abstractmethod
    def __call__(self, path: str | None, setting: EnvContext) -> EnvDataset:
        """Load the problems of the source at `path`, which is None if the environment reads none.

        `setting.read(path)` returns the rows of any kind of source.

        Raises:
            ConfigError, DataError: the message has the field or file, the value and the remedy.
        """


def problems_of(env: EnvConfig, path: str | None, setting: EnvContext) -> EnvDataset:
    """Call `env(path, setting)`; convert unexpected exceptions of a custom class to ConfigError.

    Raises:
        ConfigError, DataError: see `EnvConfig.__call__`.
    """
    try:
        return env(path, setting)
    except IsothermError:
        raise
    except Exception as error:  # a custom class may raise anything
        raise ConfigError(
            f"env={type(env).__name__} cannot create its problems: {described(error)}"
        ) from error


class ListedDataset(EnvDataset):
    """Dataset whose problems are a list; each has its row in the source as `line`."""

    def __init__(self, problems_P: Sequence[Any]) -> None:
        self.problems_P = problems_P

    def __len__(self) -> int:
        return len(self.problems_P)

    def subset(self, problems: Sequence[int]) -> EnvDataset:
        chosen = copy(self)
        chosen.problems_P = [self.problems_P[p] for p in problems]
        return chosen

    def line(self, problem: int) -> int:
        return self.problems_P[problem].line


class Subset(EnvDataset):
    """Some of a dataset's problems, by number."""

    def __init__(self, dataset: EnvDataset, problems: Sequence[int]) -> None:
        self._dataset, self._problems = dataset, list(problems)
        self.answer = dataset.answer

    def __len__(self) -> int:
        return len(self._problems)

    def builder(self, problem: int, group_size: int) -> EnvGroupBuilder:
        return self._dataset.builder(self._problems[problem], group_size)

    def longest_row(self, max_new_tokens: int) -> int:
        return self._dataset.longest_row(max_new_tokens)

    def line(self, problem: int) -> int:
        return self._dataset.line(self._problems[problem])

    def label(self, problem: int) -> str:
        return self._dataset.label(self._problems[problem])


class Mixture(EnvDataset):
    """Problems of several sources, one source after another.

    Args:
        datasets: the problems of each source.
        sources: names and weights, in the same order.
    """

    def __init__(self, datasets: Sequence[EnvDataset], sources: Sequence[Source]) -> None:
        self._datasets, self._sources = list(datasets), list(sources)
        self._parts = [
            MixedPart(name=source.name, size=len(dataset), weight=source.weight)
            for dataset, source in zip(datasets, sources, strict=True)
        ]
        self.answer = datasets[0].answer  # depends on the reward only: the same in all datasets

    @property
    def parts(self) -> Sequence[MixedPart]:
        return self._parts

    def __len__(self) -> int:
        return sum(part.size for part in self.parts)

    def builder(self, problem: int, group_size: int) -> EnvGroupBuilder:
        source, inner = part_of(self.parts, problem)
        return self._datasets[source].builder(inner, group_size)

    def longest_row(self, max_new_tokens: int) -> int:
        return max(dataset.longest_row(max_new_tokens) for dataset in self._datasets)

    def line(self, problem: int) -> int:
        source, inner = part_of(self.parts, problem)
        return self._datasets[source].line(inner)

    def label(self, problem: int) -> str:
        source, inner = part_of(self.parts, problem)
        return f"{self._sources[source].place}:{self._datasets[source].label(inner)}"


def mixture(datasets: Sequence[EnvDataset], sources: Sequence[Source]) -> EnvDataset:
    """The problems of all sources; a single dataset is returned unchanged."""
    return datasets[0] if len(datasets) == 1 else Mixture(datasets, sources)


class EnvStream:
    """A run's endless, seeded sequence of groups: maps a group id to the problem at that position.

    The position is the group id, so a resumed run continues with the same problems.
    """

    def __init__(
        self, dataset: EnvDataset, *, group_size: int, seed: int, title: str = "the data"
    ) -> None:
        self._dataset, self._group_size, self._title = dataset, group_size, title
        self._order = MixedStream(dataset.parts, seed)

    def builder(self, group_id: int) -> EnvGroupBuilder:
        return self._dataset.builder(self._order.index(group_id), self._group_size)

    def source(self, group_id: int) -> str:
        """Name of the source of the group's problem; empty if there is only one."""
        return self._dataset.source(self._order.index(group_id))

    def describe(self, group_id: int) -> str:
        """Text that names the group's problem in messages."""
        return f"problem {self._dataset.label(self._order.index(group_id))} of {self._title}"


def only_teacher(setting: EnvContext) -> str:
    """Name of the teacher of problems that name no teacher.

    Raises:
        ConfigError: there are several teachers.
    """
    if len(setting.teachers) > 1:
        raise ConfigError(
            f"several teachers are given ({', '.join(sorted(setting.teachers))}), but this "
            "environment's problems do not name a teacher; give one teacher",
            field="teachers",
        )
    return next(iter(setting.teachers), "")


def require_path(path: str | None, env: str) -> str:
    """Return the path of the file of problems; raise ConfigError if it is None."""
    if path is None:
        raise ConfigError(f"env={env} needs a file of problems; give prompts=FILE.jsonl")
    return path
