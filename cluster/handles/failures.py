"""Classification of Ray's errors: the reason of a failed call, and which actors are dead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.handles import calls, errors
from distill.errors import EngineLost

# Seconds in which an actor must answer a ping after a failed call.
_PING_S = 5.0


def is_death(error: BaseException) -> bool:
    """True if the called actor is dead; False if the call raised an error."""
    return isinstance(error, errors.RayActorError) and not isinstance(error, errors.RayTaskError)


def root_cause(error: BaseException) -> BaseException:
    """Original error, raised in the actor or in an actor that it has called, at any depth."""
    while isinstance(error, errors.RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return error


def reason_of(error: BaseException) -> str:
    """Line with the reason of an actor's death or failure.

    For a lost server the whole message, because the reason is in the end of the server's log.
    """
    cause = root_cause(error)
    if isinstance(cause, EngineLost):
        return str(cause)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if not lines:
        return type(cause).__name__
    # The reason is the last line of a constructor's traceback, and the first line of other deaths.
    last = isinstance(cause, errors.RayActorError) and "creation task" in lines[0]
    return lines[-1 if last else 0]


def dead_among(actors: Mapping[str, Any]) -> list[str]:
    """Names of the dead actors. An actor that is only busy is not dead."""
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
