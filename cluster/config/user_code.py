"""Trial of user code before a run: a custom environment, reward, advantage, loss or divergence.

Built-in code is not tried. The cause of a failure may be the problem and not the code, so after a
failure the other problems are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.rollout.tryout import EpisodeTrial, RewardTrial, TrialImpossible, Trials, tried
from cluster.config.on_policy import RolloutConfig
from cluster.config.rollout_checks import RolloutInputs
from distill.envs.base import TEACHER, EnvGroupBuilder, EnvStream
from distill.envs.single_turn import SingleTurnGroupBuilder
from distill.errors import ConfigError
from distill.objective.custom import (
    own_advantage,
    own_divergence,
    own_loss,
    try_advantage,
    try_divergence,
    try_loss,
)
from distill.objective.settings import is_own
from distill.rewards.model_reward import REWARD_MODEL
from distill.rewards.registry import CheckedReward

# Number of the run's first groups from which problems are chosen.
_LOOKED_AT = 32
# Number of problems that are tried, responses in addition to the right one, and seconds after which
# no further trial starts.
_TRIED = 4
_RESPONSES = ("", "0", "no answer")
_ENOUGH_S = 10.0
# Seconds for the child process to start, in addition to the time limit of a reward.
START_S = 30.0
_OURS = ("distill.", "actors.")
_WAY_OUT = "Correct it, or start without this trial: rollout.smoke_test=False"


def try_user_code(
    config: RolloutConfig, inputs: RolloutInputs, print_line: Callable[[str], None]
) -> None:
    """Play the run's first problems in a separate process, without a model.

    Each problem gets the right response, wrong ones and an empty one, because all of them occur in
    a run.

    Raises:
        ConfigError: the environment or the reward fails on two problems (or on the only one), or
            does not end. The message has the error, file and line, problem and response.
    """
    if not config.rollout.smoke_test or not _has_user_code(config):
        return
    timeout_s = config.reward.timeout_s + START_S
    plays = [
        _Play(
            problem=problem,
            label=f"in the environment or reward of {problem}, tried before the run with the "
            f"response {response!r}",
            trial=_trial(config, inputs, builder, response),
        )
        for problem, builder in _problems(config, inputs)
        for response in dict.fromkeys([builder.answer or "", *_RESPONSES])
    ]
    try:
        first = _first_failure(plays, timeout_s)
        if first is None:
            return
        problem, failed = first
        others = [play for play in plays if play.problem != problem]
        if not others or _first_failure(others, timeout_s) is not None:
            raise ConfigError(f"{failed}. {_WAY_OUT}", field="rollout.smoke_test")
        print_line(f"{failed}. Other problems passed, so the run starts")
    except TrialImpossible as error:
        print_line(f"{plays[0].problem} is not tried before the run: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Play:
    """One problem with one response. `label`: both, for messages."""

    problem: str
    label: str
    trial: Callable[[], None]


def _first_failure(plays: Sequence[_Play], timeout_s: float) -> tuple[str, str] | None:
    """First problem that fails, with its error, or None. First, all are played in one process.

    Raises:
        ConfigError: a play does not end.
        TrialImpossible: the plays cannot be sent to another process.
    """
    together = Trials(trials={play.label: play.trial for play in plays}, enough_s=_ENOUGH_S)
    try:
        wrong = tried(together, timeout_s)
    except TimeoutError:
        wrong = ""
    if wrong is None:
        return None
    for play in plays:
        if play.label in wrong:
            return play.problem, wrong
    for play in plays:  # the process hung or died without reporting the play
        try:
            wrong = tried(play.trial, timeout_s)
        except TimeoutError:
            raise ConfigError(
                f"did not end within {timeout_s:g} s (reward.timeout_s= and {START_S:g}): code "
                f"{play.label}. {_WAY_OUT}",
                field="reward.timeout_s",
            ) from None
        if wrong is not None:
            return play.problem, f"{wrong}, {play.label}"
    return None


def try_own_objective(config: RolloutConfig, print_line: Callable[[str], None]) -> None:
    """Try custom advantage, loss and divergence functions on made-up numbers, in another process.

    Raises:
        ConfigError: a function cannot be imported or called with the objective's arguments, raises,
            does not end, or returns a result of the wrong form.
    """
    objective = config.objective
    trials: list[tuple[str, Callable[[], None]]] = []
    if is_own(objective.baseline):
        own_advantage(objective.baseline)
        trial = partial(try_advantage, objective.baseline, config.sampling.group_size)
        trials.append((f"baseline={objective.baseline}", trial))
    if is_own(objective.loss):
        own_loss(objective.loss)
        trials.append((f"loss={objective.loss}", partial(try_loss, objective.loss)))
    if is_own(objective.divergence):
        own_divergence(objective.divergence)
        trial = partial(try_divergence, objective.divergence)
        trials.append((f"divergence={objective.divergence}", trial))
    for setting, trial in trials if config.rollout.smoke_test else ():
        try:
            wrong = tried(trial, START_S)
        except TrialImpossible as error:
            print_line(f"{setting} is not tried before the run: {error}")
            continue
        except TimeoutError:
            wrong = f"{setting} did not end within {START_S:g} s"
        if wrong is not None:
            raise ConfigError(
                f"{wrong}; it was tried on made-up numbers before the run. {_WAY_OUT}",
                field=f"objective.{setting.partition('=')[0]}",
            )


def _has_user_code(config: RolloutConfig) -> bool:
    own_env = not type(config.env).__module__.startswith(_OURS)
    return own_env or isinstance(config.reward.load(), CheckedReward)


def _problems(
    config: RolloutConfig, inputs: RolloutInputs
) -> Iterator[tuple[str, EnvGroupBuilder]]:
    """The run's first training problems, by name; only judged ones, if any."""
    stream = EnvStream(
        inputs.train,
        group_size=config.sampling.group_size,
        seed=config.seed,
        title=config.problems_title(config.data.source),
    )
    found = {stream.describe(g): stream.builder(g) for g in range(_LOOKED_AT)}
    judged = {name: builder for name, builder in found.items() if builder.judged}
    yield from list((judged or found).items())[:_TRIED]


def _trial(
    config: RolloutConfig, inputs: RolloutInputs, builder: EnvGroupBuilder, response: str
) -> Callable[[], None]:
    if isinstance(builder, SingleTurnGroupBuilder) and isinstance(builder.reward, CheckedReward):
        # The environment is built in, so only the reward is tried, without the tokenizer.
        return RewardTrial(reward=builder.reward, response=response, answer=builder.answer or "")
    tokenizer, ends = inputs.tokenizer, inputs.stops.ids
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    tokens_T = np.array([*tokenizer.encode(response, add_special_tokens=False), end], np.int32)
    return EpisodeTrial(
        builder=builder,
        tokens_T=tokens_T,
        max_new_tokens=config.sampling.max_new_tokens,
        models=[
            *(name or TEACHER for name in config.teacher_models()),
            *config.env.queried_models,
            REWARD_MODEL,
        ],
    )
