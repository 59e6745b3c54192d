"""Errors a user can act on, each with the exit code it ends a program with."""

from __future__ import annotations

import traceback


class IsothermError(ValueError):
    """Error that the user can put right. The message names the field, the value and the remedy."""

    exit_code = 1


class ConfigError(IsothermError):
    """A setting that cannot work, found before anything expensive starts."""

    exit_code = 2


class DataError(IsothermError):
    """Data that cannot be used: a malformed file, or a record that breaks its type's rules."""

    exit_code = 2


class CheckpointError(IsothermError):
    """A checkpoint that is missing, corrupt, or belongs to another run or model."""

    exit_code = 2


class CalibrationError(IsothermError):
    """The parties score the same tokens differently: the objective would not be the one named."""

    exit_code = 3


class EngineError(RuntimeError):
    """An engine answered wrongly or not at all: non-finite log-probs, lengths, a bad state."""


class EngineLost(EngineError):
    """An engine that is gone, hangs, or must be restarted. Another one may answer the request."""


class NonFiniteError(RuntimeError):
    """The learner met a NaN or an infinity. The offending rows are on disk, where it says."""


def described(error: BaseException) -> str:
    """An error of somebody's code and where it was raised: KeyError: 'answer' (my_env.py:14)."""
    message = (str(error).splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"
