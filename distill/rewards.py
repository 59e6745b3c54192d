"""Task rewards: plain functions from a response and a reference answer to a number."""

from __future__ import annotations

import asyncio
import math
import pickle
import re
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from distill.errors import DataError
from distill.formats import json_schema, matches
from distill.maths import math_answer, math_equal
from distill.names import resolve_function
from distill.sandbox import require_sandbox
from distill.unit_tests import unit_tests

# (response, answer) -> reward
RewardFunction = Callable[[str, str], float]
# One thread: see `judge`.
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")

# A sign that is no minus between two operands; digits with or without commas between thousands; a
# decimal part. A dollar may stand before the digits; a dot after them only ends the sentence.
_NUMBER = re.compile(
    r"(?:(?<![\w)])(-))?(?:\$(-)?)?"
    r"((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
)


async def judge(reward: RewardFunction, response: str, answer: str) -> float:
    """`reward(response, answer)`, in the one thread that this process has for rewards.

    A reward may take long and need not be thread-safe, and what else the process does goes on
    meanwhile.
    """
    return await asyncio.get_running_loop().run_in_executor(_THREAD, reward, response, answer)


def exact_match(response: str, answer: str) -> float:
    """1 if the response equals the answer, surrounding whitespace aside, else 0."""
    return float(response.strip() == answer.strip())


def last_number(response: str, answer: str) -> float:
    """1 if the last number in the response is the last in the answer, else 0.

    Compared as decimals: 18, 18.0, $18, and 1,000 and 1000 are the same. The answer may be a whole
    solution that ends in `#### 18`. A response or an answer without a number earns 0.
    """
    given = _last_number(response)
    return float(given is not None and given == _last_number(answer))


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not numbers:
        return None
    minus, minus_after_dollar, digits = numbers[-1]
    return Decimal((minus or minus_after_dollar) + digits.replace(",", ""))


def contains(response: str, answer: str) -> float:
    """1 if the answer, surrounding whitespace aside, occurs in the response, else 0."""
    return float(answer.strip() in response)


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


# What a response answers, where a reward knows: responses that answer the same vote together.
_ANSWERS: dict[RewardFunction, Callable[[str], Hashable | None]] = {
    exact_match: str.strip,
    last_number: _last_number,
    math_equal: math_answer,
}


def answer_of(reward: RewardFunction) -> Callable[[str], Hashable | None] | None:
    """Finds the answer in a response (None: there is none); None for a reward that cannot."""
    return None if isinstance(reward, CheckedReward) else _ANSWERS.get(reward)


# Rewards whose answers can be no answers, which is seen without a response.
_PARSED = (matches, json_schema)


def check_answer(reward: RewardFunction, answer: str | None) -> None:
    """Raises DataError for an answer that the reward cannot read, where that is quickly told."""
    if answer is not None and reward in _PARSED:
        reward("", answer)


def load_reward(name: str) -> RewardFunction:
    """A built-in reward by its name, or the function at `package.module:function`, checked.

    Raises:
        ConfigError: an unknown name, something that cannot be imported or called, or a sandbox that
            is needed and cannot be made.
    """
    if name in _BUILT_IN:
        if name == "unit_tests":
            require_sandbox()
        return _BUILT_IN[name]
    function = resolve_function("reward", name, _BUILT_IN)
    return CheckedReward(name=name, function=function)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedReward:
    """A user's reward function, held to finite numbers. It pickles by its name.

    Raises:
        DataError: the function returned something else.
        RuntimeError: it raised what no other process could be told.
    """

    name: str
    function: Callable[[str, str], Any]

    def __call__(self, response: str, answer: str) -> float:
        try:
            reward = self.function(response, answer)
        except Exception as error:
            if _travels(error):
                raise
            text = str(error).encode(errors="backslashreplace").decode()
            # Without its cause, which would travel along in the traceback's text.
            raise RuntimeError(
                f"reward {self.name} raised {type(error).__name__}: {text}"
            ).with_traceback(error.__traceback__) from None
        if not isinstance(reward, Real | np.bool_) or not math.isfinite(reward):
            raise DataError(
                f"reward {self.name} returned {reward!r} for the answer {answer[:40]!r}; it must "
                "return a finite number"
            )
        return float(reward)

    def __reduce__(self) -> tuple[Callable[[str], RewardFunction], tuple[str]]:
        return load_reward, (self.name,)


def _travels(error: Exception) -> bool:
    """Whether another process can be handed this error; many classes of errors do not unpickle."""
    try:
        str(error).encode()
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
