"""Answers of several engines, each waited for under one deadline, each failure with its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from distill.errors import EngineError

# Once one engine has failed, the others have this long to say whether they have, too, seconds.
GRACE_S = 5.0
_POLL_S = 0.25


def values(
    pending: Mapping[str, Any],
    what: str,
    timeout_s: float,
    problem: Callable[[], str | None] = lambda: None,
) -> dict[str, Any]:
    """The value of each engine's call, by the engine's name.

    Args:
        what: the calls have in common, for the errors.
        problem: asked now and then; an answer counts as an engine's failure does.

    Raises:
        EngineError: names every engine that refused, died, or did not answer.
    """
    deadline = time.monotonic() + timeout_s
    names = {reference: name for name, reference in pending.items()}
    found: dict[str, Any] = {}
    errors: list[str] = []
    while names:
        left = deadline - time.monotonic()
        if left <= 0:
            late = ", ".join(names.values())
            errors.append(f"no answer from {late}" + ("" if errors else f" in {timeout_s:.0f} s"))
            break
        ready, _ = ray.wait(list(names), num_returns=1, timeout=min(_POLL_S, left))
        had_errors = bool(errors)
        for reference in ready:
            name = names.pop(reference)
            try:
                found[name] = ray.get(reference)
            except RayError as error:
                errors.append(_explained(name, error))
        if (own := problem()) and own not in errors:
            errors.append(own)
        if errors and not had_errors:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if errors:
        raise EngineError(f"{what} failed: {'; '.join(errors)}")
    return found


def _explained(name: str, error: RayError) -> str:
    if isinstance(error, RayActorError):
        return f"{name} died"
    cause: BaseException = error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, Exception):
        cause = cause.cause
    return f"{name}: {cause}"
