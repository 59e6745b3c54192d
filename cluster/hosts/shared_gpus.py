"""Engines of several GPUs on the GPUs of as many learner workers.

Ray gives an actor the GPUs of one bundle, and each worker has a bundle of its own with one GPU. An
engine's actor is in the first of its bundles. A task in each of the others reports the GPU there,
and the engine's process sees all of them before its server starts. Rank i of the server then
computes on the GPU of worker i of the group, and opens the weights that this worker lends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from cluster.handles.node import actor_gpus
from cluster.hosts.deferred import Early
from cluster.placement.places import Places

Made = TypeVar("Made")


def early_on_all_gpus(
    places: Places, role: str, index: int, make: Callable[[], Any]
) -> Early | Any:
    """`make` for a setting of a deferred class, run with the GPUs of all of a member's bundles.

    Returns an `Early`, or a reference to one, which Ray resolves where it is an actor's argument.
    """
    if places.span(role) == 1:
        return Early(make)
    import ray  # which a run in this process does without

    task: Any = ray.remote(_own_gpus)
    others = [
        task.options(**places.options(role, index, part)).remote()
        for part in range(1, places.span(role))
    ]
    together: Any = ray.remote(_early)
    return together.options(num_cpus=0).remote(make, *others)


def _early(make: Callable[[], Any], *others: str) -> Early:
    return Early(partial(_on_all_of, others, make))


def _on_all_of(others: Sequence[str], make: Callable[[], Made]) -> Made:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([_own_gpus(), *others])
    return make()


def _own_gpus() -> str:
    """Ids of the GPUs that Ray has given this process."""
    return ",".join(actor_gpus())
