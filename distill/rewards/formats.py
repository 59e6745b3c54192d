"""Format rewards: a response matches a regular expression, or is JSON that fits a schema."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from distill.errors import DataError
from distill.json_values import loads
from distill.sandbox.bounded_calls import OverLimit, in_child

logger = logging.getLogger(__name__)

# A pattern that backtracks without end would block all later rewards.
_TIMEOUT_S = 1.0
# Time limit of the child process that reads patterns and schemas; it may have to wait for a core.
CHILD_TIMEOUT_S = 5.0


def matches(response: str, answer: str) -> float:
    r"""1 if the response, without surrounding whitespace, matches the regular expression `answer`.

    The whole response must match, as in `The answer is \d+\.`; a dot is any character, including
    line ends. A match that takes longer than a second counts as no match.

    Raises:
        DataError: the answer is not a regular expression.
    """
    return _in_child(_prepare, _matches, response.strip(), answer)


def json_schema(response: str, answer: str) -> float:
    """1 if the whole response is JSON that fits the JSON schema `answer`.

    A schema may refer (`$ref`) only to itself and to the drafts of JSON Schema: nothing is fetched.
    A check that takes longer than five seconds counts as a mismatch.

    Raises:
        DataError: the answer is not a JSON schema, or refers to something outside it.
    """
    return _in_child(_prepare_schemas, _fits, response, answer)


def _in_child(prepare: Any, check: Any, response: str, answer: str) -> float:
    try:
        return in_child(prepare, check, response, answer, timeout_s=CHILD_TIMEOUT_S)
    except OverLimit as error:
        logger.warning(f"a response could not be matched against {answer[:80]!r}: {error}")
        return 0.0


def _prepare() -> None:
    """Do nothing: importing this module is the preparation."""


def _prepare_schemas() -> None:
    from distill import json_schemas  # noqa: F401 - the preparation


def _matches(response: str, answer: str) -> float:
    try:
        pattern = compiled(answer)
    except ValueError as error:
        raise DataError(
            f"the answer {answer[:80]!r} is not a regular expression: {error}", field="answer"
        ) from error
    try:
        return float(pattern.fullmatch(response, timeout=_TIMEOUT_S) is not None)
    except (TimeoutError, MemoryError):
        return 0.0


@lru_cache(maxsize=256)
def compiled(pattern: str) -> regex.Pattern:
    """Compile a regular expression in which a dot is any character.

    Raises:
        ValueError: the pattern is not a regular expression, or is too large to be compiled.
    """
    try:
        return regex.compile(pattern, flags=regex.DOTALL)
    except regex.error as error:
        raise ValueError(str(error)) from error
    except (RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"it is nested too deeply, or too large ({type(error).__name__})"
        ) from error


def _fits(response: str, answer: str) -> float:
    from distill.json_schemas import own_schema

    validator = own_schema(answer)
    try:
        return float(validator.is_valid(loads(response)))
    except Exception:  # not JSON, or a value such as 10**400, for which jsonschema raises any error
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Required pattern of every response, and the reward for matching it."""

    pattern: str | None
    reward: float
