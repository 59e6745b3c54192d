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

from distill.chat.responses import Response
from distill.errors import DataError, described
from distill.libraries import require_library
from distill.lookup import require_arguments, resolve_function
from distill.rewards.formats import json_schema, matches
from distill.rewards.math_equal import math_answer, math_equal
from distill.rewards.model_reward import ModelReward
from distill.rewards.program_tests import read_tests
from distill.rewards.unit_tests import tested, unit_tests
from distill.rewards.verdict import LONGEST_WORDS, Verdict
from distill.sandbox.bounded_calls import OverLimit, in_thread
from distill.sandbox.sandbox import require_sandbox

# (response, answer) -> reward
RewardFunction = Callable[[str, str], float]
# Value of `reward=`: a function, or a model that the run hosts.
Reward: TypeAlias = RewardFunction | ModelReward
# Longest call of a custom reward function, in seconds.
REWARD_TIMEOUT_S = 120.0
# Seconds after which the check of a source's answers stops, before the run.
ANSWERS_TIME_S = 20.0
# The squares of larger rewards may not be finite in float32.
LARGEST_REWARD = 1e9
# The reward thread returns fast results together, because waking the event loop takes longer than
# computing them: at the end of a batch, and after a call that ends at least so many seconds after
# the last return.
_RETURN_EVERY_S = 0.01

# A sign that is not a minus between two operands; digits with or without commas between thousands;
# a decimal part; an exponent. A dollar may precede the digits; a dot after them ends the sentence.
_NUMBER = re.compile(
    r"(?:(?<![\w)])(-))?(?:\$(-)?)?"
    r"((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
    r"([eE][+-]?\d{1,4}(?!\w))?"
)


async def judge(reward: RewardFunction, response: Response | str, answer: str) -> float:
    """Compute `reward(response, answer)` in this process's single thread for rewards.

    For a `Response`, the reward receives its `judged_text`. Rewards that are requested in one pass
    of the event loop, such as those of a group, go to the thread and back together.

    A reward may be slow and need not be thread-safe; the event loop continues meanwhile. Rewards
    that only compare texts (`_WITHOUT_THREAD`) do not use the thread. Each other reward has a time
    limit: `unit_tests` ends its sandbox; `math_equal`, `matches` and `json_schema` run in a child
    process that is ended; a custom function runs in this process, where it may keep models and
    connections, and is abandoned at its limit (`CheckedReward`).
    """
    return (await verdict(reward, response, answer)).reward


async def verdict(reward: RewardFunction, response: Response | str, answer: str) -> Verdict:
    """`judge` with feedback on the response, such as the right answer or the tests' errors."""
    text = response if isinstance(response, str) else judged_text(reward, response)
    if reward in _WITHOUT_THREAD:
        return _verdict(reward, text, answer)
    return await _thread.verdict(reward, text, answer)


def exact_match(response: str, answer: str) -> float:
    """1 if the response equals the answer, ignoring surrounding whitespace, else 0."""
    return float(response.strip() == answer.strip())


def last_number(response: str, answer: str) -> float:
    """1 if the last number in the response equals the last number in the answer, else 0.

    Numbers are compared as decimals: 18, 18.0 and $18 are equal, and so are 1,000, 1000 and 1e3.
    The answer may be a whole solution that ends in `#### 18`. If the response or the answer has no
    number, the reward is 0.
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
    """1 if the answer, without surrounding whitespace, occurs in the response, else 0."""
    return float(answer.strip() in response)


# Rewards that take less time than the way to the thread and back.
_WITHOUT_THREAD = (exact_match, last_number, contains)

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
# Module, feature, and argument of `pip install`; see `require_library`.
_LIBRARIES = {
    "math_equal": ("math_verify", "reward=math_equal", "math-verify"),
    "json_schema": ("jsonschema", "reward=json_schema", "jsonschema"),
}


def judged_text(reward: RewardFunction, response: Response) -> str:
    """The text of a response that a reward judges.

    Built-in rewards judge only the answer: a number in the thinking is not an answer, and a
    response that was cut off within its thinking has no answer. A custom function may read the
    thinking, and receives the whole response, with the marks around the thinking.
    """
    return response.answer if reward in _BUILT_IN.values() else response.text


# Extracts a response's answer, for rewards that can: responses with equal answers vote together.
_ANSWERS: dict[RewardFunction, Callable[[str], Hashable | None]] = {
    exact_match: str.strip,
    last_number: _last_number,
    math_equal: math_answer,
}


def answer_of(reward: Reward) -> Callable[[str], Hashable | None] | None:
    """Function that extracts a response's answer (None: no answer); None if the reward cannot."""
    return None if isinstance(reward, CheckedReward | ModelReward) else _ANSWERS.get(reward)


# Feedback on a wrong response, by reward.
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
    if reward not in _EXPECTED:
        return Verdict(reward=earned)
    wrong = f"Wrong. {_EXPECTED[reward].format(answer)}"
    return Verdict(reward=earned, feedback="Right." if earned > 0 else wrong)


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
        # By event loop: with local=True, each actor in this process has its own loop.
        self._batches: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_RewardCall]] = (
            WeakKeyDictionary()
        )

    async def verdict(self, reward: RewardFunction, response: str, answer: str) -> Verdict:
        loop = asyncio.get_running_loop()
        call = _RewardCall(reward, response, answer, loop.create_future())
        batch = self._batches.setdefault(loop, [])
        batch.append(call)
        if len(batch) == 1:
            loop.call_soon(self._send, loop)
        return await call.future

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        self._executor.submit(self._compute, loop, self._batches.pop(loop))

    def _compute(self, loop: asyncio.AbstractEventLoop, batch: Sequence[_RewardCall]) -> None:
        results: list[tuple[_RewardCall, Verdict | BaseException]] = []
        returned = time.monotonic()
        for call in batch:
            if call.future.cancelled():
                continue
            try:
                result = _verdict(call.reward, call.response, call.answer)
            except BaseException as error:  # it is raised where the reward was requested
                result = error
            results.append((call, result))
            if time.monotonic() - returned > _RETURN_EVERY_S:
                loop.call_soon_threadsafe(_return, results)
                results, returned = [], time.monotonic()
        loop.call_soon_threadsafe(_return, results)


def _return(results: Sequence[tuple[_RewardCall, Verdict | BaseException]]) -> None:
    for call, result in results:
        if call.future.done():
            continue  # cancelled
        if isinstance(result, BaseException):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)


_thread = _RewardThread()


def _require_number(answer: str) -> None:
    if _last_number(answer) is None:
        raise DataError(
            f"the answer {answer[:80]!r} has no number, so no response can be right",
            field="answer",
        )


# Checks an answer without a response, for rewards that do not accept every text as an answer.
_READERS: dict[RewardFunction, Callable[[str], object]] = {
    last_number: _require_number,
    math_equal: partial(math_equal, ""),
    unit_tests: read_tests,
    matches: partial(matches, ""),
    json_schema: partial(json_schema, ""),
}


def check_answer(reward: Reward, answer: str | None) -> None:
    """Check that the reward can read an answer.

    A custom reward function is checked if it has an attribute `check_answer`: a function of the
    answer that raises an error if the answer cannot be read.

    Raises:
        DataError: the reward cannot read the answer.
    """
    if answer is None or isinstance(reward, ModelReward):
        return
    if isinstance(reward, CheckedReward):
        reward.check_answer(answer)
    elif (read := _READERS.get(reward)) is not None:
        read(answer)


def check_answers(reward: Reward, answers: Iterable[tuple[str, str | None]]) -> None:
    """Check that the reward can read the answers of (row, answer) pairs; equal answers once.

    The check stops after `ANSWERS_TIME_S`, so it may cover only a part of thousands of formulas.

    Raises:
        DataError: an answer cannot be read; the message has the first such row and their number.
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
        more = f" ({len(bad) - 1} more rows have such answers)" if len(bad) > 1 else ""
        raise DataError(
            f"{row}: {error}; correct it, or remove the row{more}", field=error.field
        ) from error


def load_reward(name: str, timeout_s: float = REWARD_TIMEOUT_S) -> Reward:
    """Load a built-in reward, a reward model, or the function at `package.module:function`.

    Args:
        timeout_s: time limit of a call of a custom function.

    Raises:
        ConfigError: the name is unknown, the object cannot be imported or called, the reward needs
            the sandbox and it cannot be created, or a library is not installed.
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
    """A custom reward function that must return finite numbers in time. Pickles by its name.

    The function may return (number, text): the text is feedback on the response for
    `teacher.feedback=`.

    The function runs in a thread of this process. If it is late, the thread cannot be ended and is
    abandoned. The next call uses a new thread, unless four abandoned threads still run.

    Raises:
        DataError: the function returned something else, raised, or was late; the message has its
            name and the answer.
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
                f"exceeded its limit ({error}) and still runs; limit its time in the "
                f"function, or raise reward.timeout_s={self.timeout_s:g}",
                answer,
            ) from None
        except BdbQuit:
            raise  # the user quit the debugger
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
                f"returned {returned!r}; it must return a finite number of at most "
                f"{LARGEST_REWARD:g} in size, or such a number and a text",
                answer,
            )
        return Verdict(reward=float(reward), feedback=words[:LONGEST_WORDS])

    def check_answer(self, answer: str) -> None:
        """Call the function's `check_answer`, if it has one."""
        check = getattr(self.function, "check_answer", None)
        if check is None:
            return
        try:
            in_thread(check, answer, timeout_s=self.timeout_s)
        except BaseException as error:  # the user's may raise anything, an exit too
            raise self._error(f"rejects the answer: {described(error)}", answer) from error

    def _error(self, what: str, answer: str) -> DataError:
        message = f"reward {self.name} {what} (for the answer {answer[:40]!r})"
        return DataError(message.encode(errors="backslashreplace").decode(), field="reward")

    def __reduce__(self) -> tuple[Callable[[str, float], Reward], tuple[str, float]]:
        return load_reward, (self.name, self.timeout_s)
