"""Calls of actors, on Ray or in this process (`ray.wait`, `ray.get`, ...), and why they failed.

Ray is imported lazily, by the functions that receive Ray objects.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from cluster.handles import errors
from cluster.handles.local_actor import LocalActor, LocalReference
from distill.errors import EngineLost

# The run's asyncio actors wait for objects in threads, where Ray warns of a blocked event loop.
os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")

# Seconds in which an actor must answer a ping after a failed call.
_PING_S = 5.0

Value = TypeVar("Value")


def wait(
    references: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Any], list[Any]]:
    """Wait until `num_returns` are done or the timeout has passed; return (done, not done)."""
    if not references:
        return [], []
    if not isinstance(references[0], LocalReference):
        import ray

        return ray.wait(list(references), num_returns=num_returns, timeout=timeout)
    every = num_returns == len(references)
    concurrent.futures.wait(
        [reference.future for reference in references],
        timeout,
        concurrent.futures.ALL_COMPLETED if every else concurrent.futures.FIRST_COMPLETED,
    )
    done = [reference for reference in references if reference.future.done()]
    return done, [reference for reference in references if reference not in done]


def ended(references: Iterable[Any]) -> list[Any]:
    """References of the calls that have ended."""
    pending = list(references)
    return wait(pending, num_returns=len(pending), timeout=0)[0]


async def end_of(reference: Any) -> None:
    """Wait until a call has ended, with a value or an error, which `get` then returns or raises."""
    with suppress(Exception):
        await reference


def get(reference: Any, timeout: float | None = None) -> Any:
    """Wait for a call and return its value.

    Raises:
        GetTimeoutError: the call did not end in time.
        RayError: the actor died, or the call raised an error (RayTaskError).
    """
    if not isinstance(reference, LocalReference):
        import ray

        return ray.get(reference, timeout=timeout)
    concurrent.futures.wait([reference.future], timeout)
    if not reference.future.done():
        raise errors.GetTimeoutError(f"no answer within {timeout} s")
    return reference.future.result()


def put(value: Any) -> Any:
    import ray

    return ray.put(value)


def shared(value: Any, actors: Sequence[Any]) -> Any:
    """Argument that passes `value` to many actors; on Ray it is sent once to each node."""
    return put(value) if actors and not isinstance(actors[0], LocalActor) else value


def in_store(value: Any) -> bool:
    """True if `value` is a reference to an object in Ray's store."""
    return isinstance(value, getattr(sys.modules.get("ray"), "ObjectRef", ()))


def kill(handle: Any, *, no_restart: bool = True) -> None:
    """Kill an actor immediately. The actor may already be dead."""
    if isinstance(handle, LocalActor):
        handle.end()
    else:
        import ray

        ray.kill(handle, no_restart=no_restart)


def is_alive(handle: Any) -> bool:
    """True unless Ray is restarting the actor, or the actor is dead for good."""
    import ray._private.state

    return ray._private.state.actors(handle._actor_id.hex()).get("State") == "ALIVE"


def this_actor() -> Any:
    """Handle of the Ray actor that runs in this process; None in other processes."""
    import ray

    try:
        return ray.get_runtime_context().current_actor
    except RuntimeError:
        return None


def in_thread(call: Callable[[], Value], name: str) -> concurrent.futures.Future[Value]:
    """Call a function in a new daemon thread with this name.

    A daemon thread does not keep the process alive while it waits for an actor that hangs.
    """
    future: concurrent.futures.Future[Value] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again by `result()`
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


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
    answered, _ = wait(list(pings), num_returns=len(pings), timeout=_PING_S)
    return [pings[ping] for ping in answered if _died(ping)]


def _died(ping: Any) -> bool:
    try:
        get(ping, timeout=0)
    except errors.RayActorError:
        return True
    return False
