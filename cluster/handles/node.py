"""Facts about this process's node and cluster, from Ray or, without Ray, from this machine.

The functions do not import Ray. A run either starts Ray or joins a cluster.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_LOOPBACK = "127.0.0.1"


def _connected_ray() -> Any:
    """The module `ray` if this process is connected to a cluster; else None. Imports nothing.

    The module may be incomplete while another thread imports it, for the classes of a call's error.
    """
    ray: Any = sys.modules.get("ray")
    return ray if hasattr(ray, "is_initialized") and ray.is_initialized() else None


def is_connected() -> bool:
    return _connected_ray() is not None


def node_id() -> str:
    """Ray's id of this node; "this process" without Ray."""
    ray = _connected_ray()
    return "this process" if ray is None else ray.get_runtime_context().get_node_id()


def node_address() -> str:
    """Address by which other nodes reach this one; the loopback without Ray."""
    ray = _connected_ray()
    return _LOOPBACK if ray is None else ray.util.get_node_ip_address()


def actor_gpus() -> list[str]:
    """Ids of the GPUs that Ray gave to this actor."""
    ray = _connected_ray()
    return [] if ray is None else [str(gpu) for gpu in ray.get_gpu_ids()]


def nodes_alive() -> int:
    """Number of the cluster's nodes that are alive; 1 without Ray."""
    ray = _connected_ray()
    return 1 if ray is None else sum(node["Alive"] for node in ray.nodes())


def starts_here() -> bool:
    """True if no cluster is named or connected, so that `connect` starts Ray on this machine."""
    return not is_connected() and os.environ.get("RAY_ADDRESS", "") in ("", "local")


def joins_cluster(*, local: bool) -> bool:
    """True if a run joins a cluster, whose GPUs are not this machine's."""
    return not local and not starts_here()
