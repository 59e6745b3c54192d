"""Prompts without a checkable answer, whose responses a judge or a reward model rewards.

    mode=score    each response separately, by a rubric, in the environment's step
    mode=pairs    the responses of a group against each other, when all have ended

    env=actors.envs.judge_env:Judged env.judge_url=http://host:8000/v1 env.judge_model=NAME
    env.rubric=@FILE

The judge is a model behind an endpoint. It sees a row's `answer`, if any, as a reference. Rewards
are from 0 to 1.

    env=actors.envs.judge_env:Judged env.reward_model=DIR

The run's reward model is used instead, when all responses of a group have ended. The reward is the
score of the response; with mode=pairs, the mean probability that the response is preferred to
another one of the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import tanh
from pathlib import Path
from statistics import fmean
from typing import Any

import chz
import numpy as np

from actors.envs.judge import Judge, judge_address
from actors.rollout.text_endpoint import AnswerLimits
from actors.together import together
from distill.chat.template import Message
from distill.data.prompts import FIELDS, ChatStyle, Prompt, check_form
from distill.envs.base import EnvConfig, EnvContext, require_path
from distill.envs.chat import MessageEnv, MessageStep
from distill.envs.chat_config import ChatDataset, ChatEnvConfig, MessageProblem
from distill.envs.single_turn import facts_of
from distill.errors import ConfigError
from distill.model_paths import trained_model
from distill.rewards.model_reward import conversation, scores_of
from distill.rewards.token_rewards import phrase_bonuses
from distill.rules import above, at_least, needs, not_blank, not_with, one_of, setting

MODES = ("score", "pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem for the judge.

    Attributes:
        reference: reference answer; None if there is none.
        line: number of the problem's row, which seeds the choice of pairs.
    """

    judge: Judge
    rubric: str
    question: str
    reference: str | None
    line: int

    async def score(self, message: Message) -> float:
        """Reward of a single response."""
        return await self.judge.score(self.question, _answer(message), self.rubric, self.reference)

    async def compare(
        self, messages_G: Sequence[Sequence[Message]], *, max_pairs: int | None
    ) -> list[float]:
        """Reward of each member: the mean of its comparisons with other members."""
        answers_G = [_answer(messages[-1]) for messages in messages_G]
        if len(answers_G) < 2:
            raise _alone()
        pairs = balanced_pairs(len(answers_G), max_pairs, seed=self.line)
        preferences = await together(
            *(
                self.judge.prefer(
                    self.question, answers_G[a], answers_G[b], self.rubric, self.reference
                )
                for a, b in pairs
            )
        )
        earned_G: list[list[float]] = [[] for _ in answers_G]
        for (a, b), preference in zip(pairs, preferences, strict=True):
            earned_G[a].append(preference)
            earned_G[b].append(1 - preference)
        return [fmean(earned) for earned in earned_G]


async def scored(
    messages_G: Sequence[Sequence[Message]],
    models: Mapping[str, Any],
    *,
    prompt: Prompt,
    pairs: bool,
) -> list[float]:
    """Rewards of a group from the run's reward model.

    With `pairs`, the mean over the other members of P(a over b) = sigmoid(r_a - r_b), the model of
    Bradley & Terry (1952) with which the reward model was trained.
    """
    asked = [conversation(prompt, _answer(messages[-1])) for messages in messages_G]
    scores_G = await scores_of(models, asked)
    if not pairs:
        return scores_G
    if len(scores_G) < 2:
        raise _alone()
    return [
        fmean(_sigmoid(ours - theirs) for j, theirs in enumerate(scores_G) if j != i)
        for i, ours in enumerate(scores_G)
    ]


def _sigmoid(x: float) -> float:
    return 0.5 * (1 + tanh(x / 2))


def _alone() -> ConfigError:
    return ConfigError(
        "env.mode=pairs compares the responses of a group, and this group has one; give more "
        "samples, or env.mode=score",
    )


class Answered(MessageEnv):
    """One prompt and one response, which is scored if `case` is given, else compared later."""

    def __init__(self, prompt: Prompt, case: Case | None) -> None:
        self._prompt, self._case = prompt, case

    def initial_messages(self) -> Sequence[Message]:
        return self._prompt.messages

    async def step(self, message: Message) -> MessageStep:
        bonuses = self._prompt.bonuses
        return MessageStep(
            reward=0.0 if self._case is None else await self._case.score(message),
            oracle=partial(phrase_bonuses, bonuses=bonuses) if bonuses else None,
        )


_JUDGES = not_with("reward_model", why="a reward model uses no rubric, and compares every pair")


@chz.chz
class Judged(ChatEnvConfig):
    """env=actors.envs.judge_env:Judged: prompts as chats, rewarded by a judge."""

    judges = False
    row_fields = FIELDS
    check_row = staticmethod(check_form)

    judge_url: str | None = setting(
        _JUDGES,
        default=None,
        doc="judge: an OpenAI-compatible endpoint, http://host:port/v1; if it needs a key, set "
        "the environment variable ISOTHERM_JUDGE_API_KEY",
    )
    judge_model: str | None = setting(
        not_blank("give the judge model's name at that endpoint"),
        _JUDGES,
        default=None,
        doc="name of the judge's model at judge_url",
    )
    rubric: str | None = setting(
        not_blank("give the criteria of a good answer, or @FILE"),
        _JUDGES,
        default=None,
        doc="criteria of a good answer, for the judge; or @FILE",
    )
    reward_model: str | None = chz.field(
        default=None,
        munger=lambda _, path: path and trained_model(path),
        doc="instead of judge_url, judge_model and rubric: a checkpoint of recipe=reward_model, "
        "loaded by the run",
    )
    mode: str = setting(
        one_of(*MODES),
        default="score",
        doc="score: each response alone; pairs: the responses of a group are compared with one "
        "another (evaluations use score)",
    )
    max_pairs: int | None = setting(
        needs("mode", "pairs"),
        _JUDGES,
        default=None,
        doc="mode=pairs: maximum number of comparisons in a group, each response in equally "
        "many; a comparison is two requests; default: every pair",
    )
    judge_timeout_s: float = setting(
        above(0), _JUDGES, default=120.0, doc="time limit of a request to the judge in seconds"
    )
    judge_max_concurrent: int = setting(
        at_least(1),
        _JUDGES,
        default=16,
        doc="maximum number of concurrent requests to the judge, per rollout worker",
    )
    judge_wait_s: float = setting(
        above(0),
        _JUDGES,
        default=600.0,
        doc="time limit in seconds of all tries of a request, while the judge is busy, fails or is "
        "unreachable, for example because it is restarted",
    )
    judge_max_tokens: int = setting(
        at_least(1),
        _JUDGES,
        default=1024,
        doc="maximum length of a verdict in tokens; a judge that reasons first needs more",
    )
    judge_max_chars: int = setting(
        at_least(1),
        _JUDGES,
        default=20_000,
        doc="maximum number of characters of a response in the judge's prompt, which states how "
        "many are left out",
    )
    system: str | None = chz.field(default=None, doc="system message before every prompt")

    @chz.validate
    def _check_judge(self) -> None:
        if self.reward_model is None:
            self.judge()

    @property
    def own_reward_model(self) -> str | None:
        return self.reward_model

    def judge(self) -> Judge:
        """Create the judge, without a request.

        Raises:
            ConfigError: a setting of the judge is missing or invalid.
        """
        for name in ("judge_url", "judge_model", "rubric"):
            if getattr(self, name) is None:
                raise ConfigError(
                    f"env.{name} is missing: a judge needs env.judge_url, env.judge_model and "
                    "env.rubric; or give env.reward_model=DIR",
                    field=f"env.{name}",
                )
        assert self.judge_url is not None and self.judge_model is not None
        return Judge(
            address=judge_address(self.judge_url, self.judge_model),
            limits=AnswerLimits(
                attempt_s=self.judge_timeout_s, all_s=self.judge_wait_s, max_unusable=2
            ),
            max_concurrent=self.judge_max_concurrent,
            max_tokens=self.judge_max_tokens,
            max_chars=self.judge_max_chars,
        )

    def check_group(self, group_size: int) -> None:
        if self.mode != "pairs":
            return
        if group_size < 2:
            raise ConfigError(
                f"group_size={group_size} must be at least 2 with env.mode=pairs: the responses of "
                "a group are compared",
                field="sampling.group_size",
            )
        least = group_size // 2 if group_size % 2 == 0 else group_size
        if self.max_pairs is not None and self.max_pairs < min(least, _all_pairs(group_size)):
            raise ConfigError(
                f"env.max_pairs={self.max_pairs} must be at least {least} for "
                f"group_size={group_size}, so that each response is in equally many",
            )

    @property
    def metric_names(self) -> Collection[str]:
        return self._counts_and()

    def evaluation(self) -> EnvConfig:
        """Use mode=score in evaluations, where a problem may have a single response."""
        if self.mode == "score":
            return self
        return chz.replace(self, mode="score", max_pairs=None)

    def __call__(self, path: str | None, setting: EnvContext) -> ChatDataset:
        """Read the prompts, and check the judge by its list of models and one verdict."""
        dataset = super().__call__(path, setting)
        if self.reward_model is None:
            asyncio.run(self._try_judge())
        return dataset

    async def _try_judge(self) -> None:
        assert self.rubric is not None
        judge = self.judge()
        await judge.check()
        await judge.try_verdict(read_rubric(self.rubric), pairs=self.mode == "pairs")

    def problems(self, path: str | None, setting: EnvContext) -> Sequence[MessageProblem]:
        source = require_path(path, "Judged")
        prompts_P = setting.prompts(source, ChatStyle(system=self.system))
        if self.reward_model is not None:
            # Imported here alone, because it imports torch.
            from distill.rewards.conversations import accepted_prompts

            prompts_P = accepted_prompts(
                self.reward_model, source, prompts_P, setting.max_new_tokens, long=setting.long
            )
            return [self._rewarded(prompt) for prompt in prompts_P]
        assert self.rubric is not None
        judge, rubric = self.judge(), read_rubric(self.rubric)
        return [self._problem(prompt, judge, rubric) for prompt in prompts_P]

    def _rewarded(self, prompt: Prompt) -> MessageProblem:
        return MessageProblem(
            make=partial(Answered, prompt, None),
            compare_by=partial(scored, prompt=prompt, pairs=self.mode == "pairs"),
            line=prompt.line,
            num_tokens=len(prompt.tokens_T),
            **{**facts_of(prompt), "judged": True},
        )

    def _problem(self, prompt: Prompt, judge: Judge, rubric: str) -> MessageProblem:
        case = Case(
            judge=judge,
            rubric=rubric,
            question=as_text(prompt.messages),
            reference=prompt.answer,
            line=prompt.line,
        )
        pairs = self.mode == "pairs"
        return MessageProblem(
            make=partial(Answered, prompt, None if pairs else case),
            compare=partial(case.compare, max_pairs=self.max_pairs) if pairs else None,
            line=prompt.line,
            num_tokens=len(prompt.tokens_T),
            **{**facts_of(prompt), "judged": True},
        )


def read_rubric(given: str) -> str:
    """Return the rubric, or the text of its file if the setting is @FILE.

    Raises:
        ConfigError: the file cannot be read, or is blank.
    """
    if not given.startswith("@"):
        return given
    try:
        text = Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"env.rubric={given} cannot be read ({error}); give @FILE, or the rubric itself",
        ) from error
    if not text.strip():
        raise ConfigError(f"env.rubric={given} is blank; give the criteria of a good answer")
    return text


def balanced_pairs(group_size: int, max_pairs: int | None, *, seed: int) -> list[tuple[int, int]]:
    """Choose all pairs of members, or up to `max_pairs` with each member in equally many pairs.

    The members are arranged in a circle in a seeded random order. Each is paired with its nearest
    neighbours, and with the opposite member if the number of pairs per member is odd.
    """
    if max_pairs is None or max_pairs >= _all_pairs(group_size):
        each = group_size - 1
    else:
        each = 2 * max_pairs // group_size
        each -= group_size * each % 2
    circle = np.random.default_rng([group_size, seed]).permutation(group_size).tolist()
    steps = range(1, each // 2 + 1)
    pairs = [
        (circle[i], circle[(i + step) % group_size]) for step in steps for i in range(group_size)
    ]
    if each % 2:
        across = group_size // 2
        pairs += [(circle[i], circle[i + across]) for i in range(across)]
    return pairs


def _all_pairs(group_size: int) -> int:
    return group_size * (group_size - 1) // 2


def as_text(messages: Sequence[Message]) -> str:
    """Format a chat for the judge. A single message has no role header."""
    if len(messages) == 1:
        return str(messages[0].get("content") or "")
    return "\n\n".join(f"[{each['role']}]\n{each.get('content') or ''}" for each in messages)


def _answer(message: Message) -> str:
    return str(message.get("content") or "").strip()
