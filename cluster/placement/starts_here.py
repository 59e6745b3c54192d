"""The Ray of a run: one that it starts or a cluster that it joins, told without importing Ray."""

from __future__ import annotations

import os

from cluster.handles.node import is_connected


def starts_here() -> bool:
    """True if no cluster is named or connected, so that `connect` starts Ray on this machine."""
    return not is_connected() and os.environ.get("RAY_ADDRESS", "") in ("", "local")


def joins_cluster(*, local: bool) -> bool:
    """True if a run joins a cluster, whose GPUs are not this machine's. `local`: its setting."""
    return not local and not starts_here()
