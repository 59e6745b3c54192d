"""Creation of actors from plain classes; `ray.remote` is applied here.

Classes of engines are `deferred`. Ray loads an actor's class in every process that receives a
handle of the actor, and with a class all imports of its module. Without deferral a rollout worker
that only calls the embedded engine would load torch and transformers: seconds and hundreds of
megabytes for each of many workers.

Engines of several GPUs run on the GPUs of the same number of learner workers
(`early_setting_on_gpus`). Ray gives an actor the GPUs of one bundle, and each worker has its own
bundle with one GPU. An engine's actor is in the first of its bundles. A task in each of the others
reports the GPU there, and the engine's process sees all of them before its server starts. Rank i of
the server then computes on the GPU of worker i of the group, and opens the weights that this worker
lends.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.handles.local_actor import LocalActor
from cluster.handles.node import actor_gpus, node_id
from cluster.process_memory import long_lived

if TYPE_CHECKING:  # every process that receives a handle imports this module
    from cluster.config.common import CommonConfig
    from cluster.placement.places import Places


def maker(config: CommonConfig) -> Callable[..., Any]:
    """Return a function that creates an actor from a plain class, Ray's options and arguments."""
    return _local_maker if config.cluster.local else _on_ray


def _on_ray(plain: type, options: Mapping[str, Any], *arguments: Any, **settings: Any) -> Any:
    import ray

    own = dict(options)
    groups = own.pop("concurrency_groups", None)  # Ray accepts them only with the class
    remote: Any = ray.remote
    actor_class = remote(concurrency_groups=groups)(plain) if groups else remote(plain)
    return actor_class.options(**own).remote(*arguments, **settings)


def _local_maker(
    plain: type, _options: Mapping[str, Any], *arguments: Any, **settings: Any
) -> LocalActor:
    return LocalActor(plain, *arguments, **settings)


def local_node_options() -> dict[str, Any]:
    """Options of an actor that reserves nothing, on the caller's node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": strategy}


@dataclass(frozen=True, slots=True)
class EarlySetting:
    """Setting of a deferred class that is made before the class is imported.

    It may start a process, such as a server, that loads during the import. `make` itself must
    import little.
    """

    make: Callable[[], Any]


def deferred(plain: type) -> type:
    """Class with the public methods of `plain`, whose module is imported with the first instance.

    Ray sends it by value, so its methods hold the names of module and class, never the class. If
    `plain` cannot be imported by name (in `__main__`, or nested), it is returned unchanged and sent
    by value itself.
    """
    module, name = plain.__module__, plain.__qualname__
    if module == "__main__" or "." in name:
        return plain

    def make(self: Any, *arguments: Any, **settings: Any) -> None:
        made = {
            n: value.make() if isinstance(value, EarlySetting) else value
            for n, value in settings.items()
        }
        with long_lived():
            hosted = importlib.import_module(module)
        self.plain = getattr(hosted, name)(*arguments, **made)

    methods = {
        called: _forwarding_method(called, inspect.iscoroutinefunction(method))
        for called, method in inspect.getmembers(plain, inspect.isfunction)
        if not called.startswith("_")
    }
    doc = f"`{module}.{name}`, in the process that hosts it."
    return type(name, (), {"__init__": make, "__doc__": doc, "__module__": module, **methods})


def _forwarding_method(name: str, asynchronous: bool) -> Any:
    """Method that calls the hosted object's method."""

    async def awaited(self: Any, *given: Any, **named: Any) -> Any:
        return await getattr(self.plain, name)(*given, **named)

    def called(self: Any, *given: Any, **named: Any) -> Any:
        return getattr(self.plain, name)(*given, **named)

    return awaited if asynchronous else called


def early_setting_on_gpus(
    places: Places, role: str, index: int, make: Callable[[], Any]
) -> EarlySetting | Any:
    """`make` for a setting of a deferred class, run with the GPUs of all of a member's bundles.

    Returns an `EarlySetting`, or a reference to one, which Ray resolves as an argument of the
    actor.
    """
    if places.span(role) == 1:
        return EarlySetting(make)
    import ray  # not needed by a run in this process

    task: Any = ray.remote(_own_gpus)
    others = [
        task.options(**places.options(role, index, part)).remote()
        for part in range(1, places.span(role))
    ]
    together: Any = ray.remote(_early_setting)
    return together.options(num_cpus=0).remote(make, *others)


def _early_setting(make: Callable[[], Any], *others: str) -> EarlySetting:
    return EarlySetting(partial(_on_all_of, others, make))


def _on_all_of(others: Sequence[str], make: Callable[[], Any]) -> Any:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([_own_gpus(), *others])
    return make()


def _own_gpus() -> str:
    """Ids of the GPUs that Ray has given this process."""
    return ",".join(actor_gpus())
