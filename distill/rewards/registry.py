"""Task rewards: plain functions from a response and a reference answer to a number."""

from __future__ import annotations

import asyncio
import re
import time
from bdb import BdbQuit
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from distill.chat.thinking import Response
from distill.errors import DataError, described
from distill.libraries import require_library
from distill.lookup import require_arguments, resolve_function
from distill.rewards.formats import json_schema, matches
from distill.rewards.math_equal import math_answer, math_equal
from distill.rewards.model_reward import ModelReward
from distill.rewards.program_tests import read_tests
from distill.rewards.unit_tests import tested, unit_tests
from distill.rewards.verdict import LONGEST_WORDS, Verdict, against
from distill.sandbox.bounded_calls import OverLimit, in_thread
from distill.sandbox.sandbox import require_sandbox

# (response, answer) -> reward
RewardFunction = Callable[[str, str], float]
# What `reward=` names: a function, or a model that the run hosts.
Reward: TypeAlias = RewardFunction | ModelReward
# Seconds that one call of a user's reward may take.
REWARD_TIMEOUT_S = 120.0
# Seconds that the answers of a source are read for before the run.
ANSWERS_TIME_S = 20.0
# Beyond, the squares of rewards are no finite float32.
LARGEST_REWARD = 1e9
# The reward thread returns quick results together, because waking the event loop costs more than
# they do: at a batch's end, and after each call that ends so many seconds after the last return.
_RETURN_EVERY_S = 0.01

# A sign that is no minus between two operands; digits with or without commas between thousands; a
# decimal part; an exponent. A dollar may stand before the digits; a dot after them only ends the
# sentence.
_NUMBER = re.compile(
    r"(?:(?<![\w)])(-))?(?:\$(-)?)?"
    r"((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
    r"([eE][+-]?\d{1,4}(?!\w))?"
)


async def judge(reward: RewardFunction, response: Response | str, answer: str) -> float:
    """`reward(response, answer)`, in the one thread that this process has for rewards.

    Of a `Response` the reward is given its `judged_text`. Rewards that are requested in one pass of
    the event loop, such as those of a group, go to the thread and back together.

    A reward may take long and need not be thread-safe, and what else the process does goes on
    meanwhile. Those that only compare texts (`_AT_ONCE`) take no thread. Each of the others has a
    limit: `unit_tests` ends its sandbox; `math_equal`, `matches` and `json_schema` run in a child
    process that is ended; a user's stays in this process, where it may keep models and connections,
    and is given up (`CheckedReward`).
    """
    return (await verdict(reward, response, answer)).reward


async def verdict(reward: RewardFunction, response: Response | str, answer: str) -> Verdict:
    """`judge`, and what is to be said of the response: what is right, or what the tests found."""
    text = response if isinstance(response, str) else judged_text(reward, response)
    if reward in _AT_ONCE:
        return _verdict(reward, text, answer)
    return await _thread.verdict(reward, text, answer)


def exact_match(response: str, answer: str) -> float:
    """1 if the response equals the answer, surrounding whitespace aside, else 0."""
    return float(response.strip() == answer.strip())


def last_number(response: str, answer: str) -> float:
    """1 if the last number in the response is the last in the answer, else 0.

    Compared as decimals: 18, 18.0 and $18 are the same, and so are 1,000, 1000 and 1e3. The answer
    may be a whole solution that ends in `#### 18`. A response or an answer without a number earns
    0.
    """
    given = _last_number(response)
    return float(given is not None and given == _last_number(answer))


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not numbers:
        return None
    minus, minus_after_dollar, digits, exponent = numbers[-1]
    return Decimal((minus or minus_after_dollar) + digits.replace(",", "") + exponent)


def contains(response: str, answer: str) -> float:
    """1 if the answer, surrounding whitespace aside, occurs in the response, else 0."""
    return float(answer.strip() in response)


# The way to the thread and back takes longer than these do.
_AT_ONCE = (exact_match, last_number, contains)

DEFAULT_REWARD = "exact_match"
_BUILT_IN: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "contains": contains,
    "math_equal": math_equal,
    "unit_tests": unit_tests,
    "matches": matches,
    "json_schema": json_schema,
}
# Module, setting, and what pip installs it by.
_LIBRARIES = {
    "math_equal": ("math_verify", "reward=math_equal", "math-verify"),
    "json_schema": ("jsonschema", "reward=json_schema", "jsonschema"),
}


def judged_text(reward: RewardFunction, response: Response) -> str:
    """The text of a response that a reward judges.

    Built-in rewards judge the answer alone: a number in a thought is no answer, and a response that
    was cut off within its thinking has none. A user's function may look at the thinking too, and is
    given all of the response, with the marks around the thinking.
    """
    return response.answer if reward in _BUILT_IN.values() else response.text


# What a response answers, where a reward knows: responses that answer the same vote together.
_ANSWERS: dict[RewardFunction, Callable[[str], Hashable | None]] = {
    exact_match: str.strip,
    last_number: _last_number,
    math_equal: math_answer,
}


def answer_of(reward: Reward) -> Callable[[str], Hashable | None] | None:
    """Finds the answer in a response (None: there is none); None for a reward that cannot."""
    return None if isinstance(reward, CheckedReward | ModelReward) else _ANSWERS.get(reward)


# What a wrong response should have been, by its reward.
_EXPECTED: dict[RewardFunction, str] = {
    exact_match: "The right answer is: {}",
    last_number: "The right answer is: {}",
    math_equal: "The right answer is: {}",
    contains: "It should contain: {}",
    matches: "It should match the regular expression: {}",
    json_schema: "It should be JSON, and fit the schema: {}",
}


def _verdict(reward: RewardFunction, response: str, answer: str) -> Verdict:
    if isinstance(reward, CheckedReward):
        return reward.verdict(response, answer)
    if reward is unit_tests:
        return tested(response, answer)
    earned = reward(response, answer)
    expected = _EXPECTED.get(reward)
    return Verdict(reward=earned) if expected is None else against(earned, expected.format(answer))


class _RewardCall(NamedTuple):
    """A requested verdict."""

    reward: RewardFunction
    response: str
    answer: str
    future: asyncio.Future[Verdict]


class _RewardThread:
    """The thread of this process that computes rewards, one at a time."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        # By event loop: with local=True each actor of this process has its own.
        self._batches: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_RewardCall]] = (
            WeakKeyDictionary()
        )

    async def verdict(self, reward: RewardFunction, response: str, answer: str) -> Verdict:
        loop = asyncio.get_running_loop()
        asked = _RewardCall(reward, response, answer, loop.create_future())
        batch = self._batches.setdefault(loop, [])
        batch.append(asked)
        if len(batch) == 1:
            loop.call_soon(self._send, loop)
        return await asked.future

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        self._executor.submit(self._compute, loop, self._batches.pop(loop))

    def _compute(self, loop: asyncio.AbstractEventLoop, batch: Sequence[_RewardCall]) -> None:
        results: list[tuple[_RewardCall, Verdict | BaseException]] = []
        returned = time.monotonic()
        for asked in batch:
            if asked.future.cancelled():
                continue
            try:
                result = _verdict(asked.reward, asked.response, asked.answer)
            except BaseException as error:  # it is raised where the reward was requested
                result = error
            results.append((asked, result))
            if time.monotonic() - returned > _RETURN_EVERY_S:
                loop.call_soon_threadsafe(_return, results)
                results, returned = [], time.monotonic()
        loop.call_soon_threadsafe(_return, results)


def _return(results: Sequence[tuple[_RewardCall, Verdict | BaseException]]) -> None:
    for asked, result in results:
        if asked.future.done():
            continue  # cancelled
        if isinstance(result, BaseException):
            asked.future.set_exception(result)
        else:
            asked.future.set_result(result)


_thread = _RewardThread()


def _require_number(answer: str) -> None:
    if _last_number(answer) is None:
        raise DataError(
            f"the answer {answer[:80]!r} has no number, so no response could be right",
            field="answer",
        )


# Reads an answer without a response, for rewards to which not every text is an answer.
_READS: dict[RewardFunction, Callable[[str], object]] = {
    last_number: _require_number,
    math_equal: partial(math_equal, ""),
    unit_tests: read_tests,
    matches: partial(matches, ""),
    json_schema: partial(json_schema, ""),
}


def check_answer(reward: Reward, answer: str | None) -> None:
    """Read an answer as the reward would, without a response.

    A user's reward takes part if it has an attribute `check_answer`, a function of the answer that
    raises an error for one that cannot be read.

    Raises:
        DataError: the reward cannot read the answer.
    """
    if answer is None or isinstance(reward, ModelReward):
        return
    if isinstance(reward, CheckedReward):
        reward.check_answer(answer)
    elif (read := _READS.get(reward)) is not None:
        read(answer)


def check_answers(reward: Reward, answers: Iterable[tuple[str, str | None]]) -> None:
    """Read the answers of (row, answer) pairs as the reward would; equal answers once.

    Reading stops after `ANSWERS_TIME_S`: of thousands of long formulas it reads a part.

    Raises:
        DataError: names the first row whose answer cannot be read, and how many there are.
    """
    ends = time.monotonic() + ANSWERS_TIME_S
    rows_of: dict[str, list[str]] = defaultdict(list)
    for row, answer in answers:
        if answer is not None:
            rows_of[answer].append(row)
    bad: list[tuple[str, DataError]] = []
    for answer, rows in rows_of.items():
        if time.monotonic() > ends:
            break
        try:
            check_answer(reward, answer)
        except DataError as error:
            bad += [(row, error) for row in rows]
    if bad:
        row, error = bad[0]
        more = f" (and so it is in {len(bad) - 1} more rows)" if len(bad) > 1 else ""
        raise DataError(
            f"{row}: {error}; correct it, or leave the row out{more}", field=error.field
        ) from error


def load_reward(name: str, timeout_s: float = REWARD_TIMEOUT_S) -> Reward:
    """A built-in reward by its name, a reward model, or the function at `package.module:function`.

    Args:
        timeout_s: of a call of a user's function.

    Raises:
        ConfigError: an unknown name, something that cannot be imported or called, a sandbox that
            is needed and cannot be made, or a library that is not installed.
    """
    if name in _BUILT_IN:
        if name == "unit_tests":
            require_sandbox()
        if name in _LIBRARIES:
            require_library(*_LIBRARIES[name], "reward.function")
        return _BUILT_IN[name]
    if (model := ModelReward.named(name)) is not None:
        return model
    function = resolve_function("reward.function", name, _BUILT_IN)
    require_arguments("reward.function", name, function, "response", "answer")
    return CheckedReward(name=name, function=function, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedReward:
    """A user's reward function, held to finite numbers and to a time. It pickles by its name.

    It may return (number, words): what is to be said of the response, for `teacher.feedback=`.

    It runs in a thread of this process; when it is late nothing can end that thread, which is given
    up. The next call has a new one, until four still run.

    Raises:
        DataError: the function returned something else, raised, or was late; with its name and
            the answer.
    """

    name: str
    function: Callable[[str, str], Any]
    timeout_s: float = REWARD_TIMEOUT_S

    def __call__(self, response: str, answer: str) -> float:
        return self.verdict(response, answer).reward

    def verdict(self, response: str, answer: str) -> Verdict:
        try:
            returned = in_thread(self.function, response, answer, timeout_s=self.timeout_s)
        except OverLimit as error:
            raise self._error(
                f"is late ({error}), and goes on; give it a limit of its own, or more time: "
                f"reward.timeout_s={self.timeout_s:g}",
                answer,
            ) from None
        except BdbQuit:
            raise  # the user left the debugger
        except BaseException as error:  # the user's may raise anything, an exit too
            # As text: the error may be of a class that other processes do not have.
            raise self._error(f"raised {described(error)}", answer) from error
        reward, words = returned, ""
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], str):
            reward, words = returned
        if not isinstance(reward, Real | np.bool_) or not (
            abs(reward) <= LARGEST_REWARD  # pyright: ignore[reportOperatorIssue] - a Real has it
        ):
            raise self._error(
                f"returned {returned!r}; it must return a finite number, of at most "
                f"{LARGEST_REWARD:g} in size, or that and a text",
                answer,
            )
        return Verdict(reward=float(reward), feedback=words[:LONGEST_WORDS])

    def check_answer(self, answer: str) -> None:
        """Call the function's own `check_answer`, if it has one."""
        check = getattr(self.function, "check_answer", None)
        if check is None:
            return
        try:
            in_thread(check, answer, timeout_s=self.timeout_s)
        except BaseException as error:  # the user's may raise anything, an exit too
            raise self._error(f"refuses it: {described(error)}", answer) from error

    def _error(self, what: str, answer: str) -> DataError:
        told = f"reward {self.name} {what} (for the answer {answer[:40]!r})"
        return DataError(told.encode(errors="backslashreplace").decode(), field="reward")

    def __reduce__(self) -> tuple[Callable[[str, float], Reward], tuple[str, float]]:
        return load_reward, (self.name, self.timeout_s)
