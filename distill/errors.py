"""Error classes; those that a user can act on have the exit code that they end a program with."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

# Name of a setting at the start of a message: `learner.lr=-1 must be above 0`.
_NAMED = re.compile(r"([\w.-]+)=")


class IsothermError(ValueError):
    """Error that the user can correct. The message names the field, the value and the remedy.

    `field` is the setting, column or key of the data that is wrong, by default the name in a
    message that begins with `NAME=`; None without one. `value` is its value.
    """

    exit_code = 1

    def __init__(self, message: str, *, field: str | None = None, value: object = None) -> None:
        super().__init__(message)
        named = _NAMED.match(message)
        self.field = named[1] if field is None and named else field
        self.value = value


class ConfigError(IsothermError):
    """A setting that cannot work, detected before anything expensive starts."""

    exit_code = 2


class DataError(IsothermError):
    """Data that cannot be used: a malformed file, or a record that breaks its type's rules."""

    exit_code = 2


class CheckpointError(IsothermError):
    """A checkpoint that is missing, corrupt, or belongs to another run or model."""

    exit_code = 2


class CalibrationError(IsothermError):
    """Parties that score the same tokens differently: the objective would not be the one named."""

    exit_code = 3


class EngineError(RuntimeError):
    """A missing or wrong answer of an engine: non-finite log-probs, wrong lengths, a bad state."""


class EngineLost(EngineError):
    """An engine that is gone, hangs, or must be restarted. Another may answer the request."""


class NonFiniteError(RuntimeError):
    """A NaN or an infinity in the learner. The message names the file with the offending rows."""


# Directories of code that is not the user's: this project, Python's library, installed packages.
_PROJECT = Path(__file__).resolve().parents[1]
_NOT_USERS = (
    *(str(_PROJECT / name) for name in ("actors", "cluster", "distill", "isotherm", "learner")),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    "<frozen",
)
_TYPE, _LINE = re.compile(r"\b(?!times:)(\w+): "), re.compile(r"\([^()]+:\d+\)")


def first_line(error: BaseException) -> str:
    """First line of the error's message, or the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def described(error: BaseException) -> str:
    """An error and the user's line that raised it: `KeyError: 'answer' (my_env.py:14)`.

    The message of an IsothermError is complete, and is returned unchanged. Half a surrogate pair,
    which UTF-8 cannot encode, is escaped.
    """
    message = (str(error).splitlines() or [""])[0].encode("utf-8", "backslashreplace").decode()
    if isinstance(error, IsothermError):
        return message
    frames = users_frames(error) or traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of the error's traceback that are in the user's own files, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)]


def kind_of(description: str) -> str:
    """Kind of a described error: its type and line if it names them, else its first characters."""
    named = _TYPE.search(description)
    line = named and _LINE.search(description, named.end())
    return f"{named[1]} {line[0]}" if named and line else description[:60]
