"""Creation of actors from plain classes: `ray.remote` is applied to them here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cluster.config.common import CommonConfig
from cluster.handles.local_actor import LocalActor
from cluster.handles.node import node_id


def maker(config: CommonConfig) -> Callable[..., Any]:
    """Creates an actor from a plain class, Ray's options, and the arguments of the class."""
    return _in_this_process if config.local else _on_ray


def _on_ray(plain: type, options: Mapping[str, Any], *arguments: Any, **settings: Any) -> Any:
    import ray

    own = dict(options)
    groups = own.pop("concurrency_groups", None)  # Ray takes them with the class only
    remote: Any = ray.remote
    actor_class = remote(concurrency_groups=groups)(plain) if groups else remote(plain)
    return actor_class.options(**own).remote(*arguments, **settings)


def _in_this_process(
    plain: type, _options: Mapping[str, Any], *arguments: Any, **settings: Any
) -> LocalActor:
    return LocalActor(plain, *arguments, **settings)


def here() -> dict[str, Any]:
    """Options of an actor that takes nothing, on the node of whoever asks."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": strategy}
