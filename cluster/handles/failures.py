"""Classification of Ray's errors: why a call failed, and which actors are dead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.handles import calls, errors
from distill.errors import EngineLost

# How long an actor may take to prove that it is alive when a call has failed, seconds.
_PING_S = 5.0


def is_death(error: BaseException) -> bool:
    """True if the actor that was asked is gone, as opposed to having raised something itself."""
    return isinstance(error, errors.RayActorError) and not isinstance(error, errors.RayTaskError)


def root_cause(error: BaseException) -> BaseException:
    """The error first raised: in the actor, or in one that it had called, and so on."""
    while isinstance(error, errors.RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return error


def reason_of(error: BaseException) -> str:
    """The line of an actor's death or failure that has the reason.

    Of a lost server the whole message: the reason is in the end of its log.
    """
    cause = root_cause(error)
    if isinstance(cause, EngineLost):
        return str(cause)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if not lines:
        return type(cause).__name__
    # A constructor's traceback ends with what went wrong; other deaths say it first.
    last = isinstance(cause, errors.RayActorError) and "creation task" in lines[0]
    return lines[-1 if last else 0]


def dead_among(actors: Mapping[str, Any]) -> list[str]:
    """Names of the actors that no longer answer. Actors that are merely busy are not dead."""
    pings = {actor.__ray_ready__.remote(): name for name, actor in actors.items()}
    if not pings:
        return []
    answered, _ = calls.wait(list(pings), num_returns=len(pings), timeout=_PING_S)
    return [pings[ping] for ping in answered if _died(ping)]


def _died(ping: Any) -> bool:
    try:
        calls.get(ping, timeout=0)
    except errors.RayActorError:
        return True
    return False
