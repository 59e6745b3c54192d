"""Calls of actors, on Ray or in this process: `ray.wait`, `ray.get`, `ray.put` and `ray.kill`."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from cluster.handles.local_actor import LocalActor, LocalReference


def wait(
    references: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Any], list[Any]]:
    """(those that are done, the others), once `num_returns` are or the time is over."""
    if not references:
        return [], []
    if not isinstance(references[0], LocalReference):
        return ray.wait(list(references), num_returns=num_returns, timeout=timeout)
    every = num_returns == len(references)
    concurrent.futures.wait(
        [reference.future for reference in references],
        timeout,
        concurrent.futures.ALL_COMPLETED if every else concurrent.futures.FIRST_COMPLETED,
    )
    done = [reference for reference in references if reference.future.done()]
    return done, [reference for reference in references if reference not in done]


def get(reference: Any, timeout: float | None = None) -> Any:
    """The value of a call.

    Raises:
        GetTimeoutError: it is not there in time.
        RayError: the actor died, or what the call raised (RayTaskError).
    """
    if not isinstance(reference, LocalReference):
        return ray.get(reference, timeout=timeout)
    concurrent.futures.wait([reference.future], timeout)
    if not reference.future.done():
        raise GetTimeoutError(f"no answer in {timeout} s")
    return reference.future.result()


def shared(value: Any, actors: Sequence[Any]) -> Any:
    """What to pass in place of `value` to many actors: it travels once to each of their nodes."""
    return ray.put(value) if actors and not isinstance(actors[0], LocalActor) else value


def kill(handle: Any, *, no_restart: bool = True) -> None:
    """Ends an actor at once, dead or alive."""
    if isinstance(handle, LocalActor):
        handle.end()
    else:
        ray.kill(handle, no_restart=no_restart)
