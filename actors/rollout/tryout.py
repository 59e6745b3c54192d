"""Trial of user code before a run: an environment or a reward, on one problem, without a model.

The trial runs in a child process, because user code may exit, hang or exhaust memory. The parent
reports the result.

    parent                                                       child
    tried(trial, timeout_s)  -- sys.path; the trial, pickled -->  trial()
                             <-- the error, or None ------------

A trial is a callable that can be pickled: `RewardTrial`; `EpisodeTrial`, in which every turn of
every member of the group has the same tokens; or `Trials`, several of them in one process. That
fixed policy is the only model: a trial ends, as passed, when an environment calls another model.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from actors.rollout.episode import play_group
from distill.engine import GenerateRequest, Sample, SamplingModel
from distill.envs.base import Env, EnvGroupBuilder, Episode, QueriedModels
from distill.errors import DataError, IsothermError, described
from distill.rewards.registry import RewardFunction, judge
from distill.sampling import EvalSampling
from distill.sandbox.bounded_calls import child_command
from distill.sandbox.guard import guarded, lifeline
from distill.types import StopReason, TokenArray

# Characters of a crashed child's output that an error message shows.
_TAIL_CHARS = 200


class TrialImpossible(Exception):
    """The trial cannot be sent to another process; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrial:
    """Trial of a reward function with a response and an answer."""

    reward: RewardFunction
    response: str
    answer: str

    def __call__(self) -> None:
        asyncio.run(judge(self.reward, self.response, self.answer))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeTrial:
    """Trial of the episodes of a group.

    Attributes:
        tokens_T: the tokens of every turn; the last token ends the turn.
        models: names of the models, besides the policy, that environments may sample from.
    """

    builder: EnvGroupBuilder
    tokens_T: TokenArray
    max_new_tokens: int
    models: Sequence[str]

    def __call__(self) -> None:
        asked: list[str] = []
        builder = _WithoutModels(
            inner=self.builder,
            models=QueriedModels(
                {name: _NoModel(name, asked) for name in (*self.models, "policy")}
            ),
        )
        sampling = EvalSampling(temperature=0.0, max_new_tokens=self.max_new_tokens)
        try:
            asyncio.run(
                play_group(_FixedPolicy(self.tokens_T), builder, sampling, group_id=0, seed=0)
            )
        except BaseException:
            if not asked:  # else the environment reached its first call of a model: it passes
                raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Several trials in sequence. The first failure stops them; its message includes the label.

    Attributes:
        trials: trials by label; the label is appended to the error message.
        enough_s: seconds after the start of the first trial from which on no further trial starts,
            because user code may be slow.
    """

    trials: Mapping[str, Callable[[], None]]
    enough_s: float

    def __call__(self) -> None:
        end = time.monotonic() + self.enough_s
        for label, trial in self.trials.items():
            if time.monotonic() < end and (wrong := _wrong(trial)) is not None:
                raise DataError(f"{wrong}, {label}")


class _FixedPolicy:
    """A policy that always returns the same tokens."""

    def __init__(self, tokens_T: TokenArray) -> None:
        self._tokens_T = tokens_T

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        most = request.sampling.max_new_tokens
        tokens_T = self._tokens_T[:most]
        sample = Sample(
            tokens_T=tokens_T,
            logprobs_T=np.zeros(len(tokens_T), np.float32),
            versions_T=np.zeros(len(tokens_T), np.int32),
            stop_reason=StopReason.LENGTH if len(self._tokens_T) > most else StopReason.EOS,
        )
        return [sample] * request.num_samples


class _NoModel:
    """Placeholder for a model: records the access to any attribute, and raises RuntimeError."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.__name, self.__asked = name, asked

    def __getattr__(self, attribute: str) -> Any:
        self.__asked.append(self.__name)
        raise RuntimeError(f"{self.__name} does not run yet")


@dataclass(frozen=True, kw_only=True)
class _WithoutModels(EnvGroupBuilder):
    """Wraps a group builder; its environments get `models` in place of the run's models."""

    inner: EnvGroupBuilder
    models: Mapping[str, Any]

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        return self.inner.make_envs(self.models)

    async def group_rewards(
        self, envs_G: Sequence[Env], episodes_G: Sequence[Episode]
    ) -> Sequence[float]:
        return await self.inner.group_rewards(envs_G, episodes_G)


def tried(trial: Callable[[], None], timeout_s: float) -> str | None:
    """Run the trial in a child process and describe its error, with file and line.

    Returns None if the trial raised nothing.

    Raises:
        TrialImpossible: the trial cannot be pickled, or cannot be imported by another process.
        TimeoutError: the trial took longer than `timeout_s`.
    """
    try:
        sent = pickle.dumps(trial)
    except Exception as error:  # of any type: pickling runs user code
        raise TrialImpossible(f"it cannot be pickled: {error}") from error
    with TemporaryFile() as given, TemporaryFile() as answer, TemporaryFile() as printed:
        given.write(sent)
        given.seek(0)
        # Files, not pipes: processes that user code starts may hold a pipe open indefinitely.
        child = subprocess.Popen(
            guarded(child_command(__name__)),
            stdin=given,
            stdout=answer,
            stderr=printed,
            start_new_session=True,
            pass_fds=(lifeline(),),
            # Breakpoints are skipped: the child has no terminal.
            env={**os.environ, "PYTHONBREAKPOINT": "0"},
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            child.terminate()
            child.wait()
        answer.seek(0)
        printed.seek(0)
        try:
            reply = json.loads(answer.read())
        except ValueError:
            return f"the process ended ({_ending(code)}){_last_line(printed.read())}"
    if reply["lost"] is not None:
        raise TrialImpossible(reply["lost"])
    return reply["wrong"]


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _last_line(printed: bytes) -> str:
    lines = printed.decode(errors="replace").strip().splitlines()
    return f"; it printed: {lines[-1][-_TAIL_CHARS:]}" if lines else ""


def main() -> None:
    """Entry point of the child: writes the result to stdout; output of user code goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    lost = wrong = None
    try:
        trial = pickle.load(sys.stdin.buffer)
    except Exception as error:  # a module that cannot be imported, for example
        lost = described(error)
    else:
        wrong = _wrong(trial)
    os.write(answer, json.dumps({"lost": lost, "wrong": wrong}).encode())
    os._exit(0)  # user threads must not keep the process alive


def _wrong(trial: Callable[[], None]) -> str | None:
    try:
        trial()
    except IsothermError as error:
        return str(error)
    except BaseException as error:  # user code may raise anything
        return described(error)
    return None
