"""What a response looks like: a pattern that it matches, a schema that its JSON fits."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from distill.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

# A pattern that backtracks without end would hold up every reward after it.
_TIMEOUT_S = 1.0


def matches(response: str, answer: str) -> float:
    r"""1 if the response, surrounding whitespace aside, matches the regular expression `answer`.

    All of it must, as in `<think>.*</think>\s*\d+`; a dot is any character, line ends too. What
    takes longer than a second to match does not.

    Raises:
        DataError: the answer is no regular expression.
    """
    try:
        found = regex.fullmatch(answer, response.strip(), flags=regex.DOTALL, timeout=_TIMEOUT_S)
    except regex.error as error:
        raise DataError(f"the answer {answer[:80]!r} is no regular expression: {error}") from error
    except TimeoutError:
        logger.warning(f"matching {answer[:80]!r} took longer than {_TIMEOUT_S} s: no match")
        return 0.0
    return float(found is not None)


def json_schema(response: str, answer: str) -> float:
    """1 if the response is JSON and nothing else, and fits the JSON schema `answer`.

    Raises:
        DataError: the answer is no JSON schema.
    """
    try:
        schema = json.loads(answer)
        Draft202012Validator.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise DataError(f"the answer {answer[:80]!r} is no JSON schema: {error}") from error
    try:
        return float(Draft202012Validator(schema).is_valid(json.loads(response)))
    except (ValueError, RecursionError):  # no JSON, or brackets in brackets without end
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What every response should look like, and what one earns that does.

    Raises:
        ConfigError: no regular expression, a negative reward, or one without a pattern.
    """

    pattern: str | None
    reward: float

    def __post_init__(self) -> None:
        if not 0 <= self.reward < float("inf"):
            raise ConfigError(f"env.format_reward={self.reward} must be 0 or more, and finite")
        if self.pattern is None:
            if self.reward:
                raise ConfigError(
                    f"env.format_reward={self.reward} changes nothing without env.format; give the "
                    "regular expression that a response should match"
                )
            return
        try:
            regex.compile(self.pattern)
        except regex.error as error:
            raise ConfigError(
                f"env.format={self.pattern!r} is no regular expression: {error}"
            ) from error
