"""Downloads of models from the hub, once per node, before actors load them.

Otherwise every actor of a node would download the same files, within its own start deadline. Models
that are paths, and models in a node's cache, are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from actors.hub import download, download_remedy, missing_bytes, on_hub
from cluster.placement.shared_storage import ask_nodes, ip_of, on_node
from distill.errors import CheckpointError, first_line
from distill.gpu import gib
from distill.pace import downloading_s

# Deadline for nodes to look into their caches, and to request sizes from the hub, seconds.
_LOOK_S = 120.0
# Constant part of a download's deadline, seconds.
_BEGIN_S = 120.0
_POLL_S = 0.5


def prefetch(
    models: Mapping[str, Collection[str]],
    *,
    print_line: Callable[[str], None],
    poll: Callable[[], None],
) -> None:
    """Download to each node those files of its models that are not in its cache.

    Args:
        models: paths, and names on the hub, by the id of the Ray node that loads them.
        print_line: called with a line for each download.
        poll: called twice a second; it may raise.

    Raises:
        ConfigError: a node does not answer.
        CheckpointError: a download failed, or exceeded its deadline.
    """
    downloads = _planned(models)
    for each in downloads:
        print_line(str(each))
    began = time.monotonic()
    tasks = {on_node(_download, each.node).remote(each.names): each for each in downloads}
    try:
        while tasks:
            poll()
            done, _ = ray.wait(list(tasks), timeout=_POLL_S)
            for task in done:
                tasks.pop(task).require_done(task)
            for each in tasks.values():
                if time.monotonic() - began > each.deadline_s:
                    raise each.late()
    finally:
        for task in tasks:
            ray.cancel(task, force=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Download:
    """Models that are missing on a node, and their size."""

    node: str
    names: list[str]
    nbytes: int

    @property
    def deadline_s(self) -> float:
        return _BEGIN_S + downloading_s(self.nbytes)

    def __str__(self) -> str:
        return (
            f"downloading {', '.join(self.names)} ({gib(self.nbytes)} GiB) to {ip_of(self.node)}, "
            f"in {self.deadline_s:.0f} s at most"
        )

    def require_done(self, task: ray.ObjectRef) -> None:
        try:
            error = ray.get(task)
        except RayError as lost:
            raise self.failed(first_line(lost)) from lost
        if error is not None:
            raise self.failed(error)

    def late(self) -> CheckpointError:
        return self.failed(
            f"{gib(self.nbytes)} GiB were not downloaded within {self.deadline_s:.0f} s. "
            + download_remedy(*self.names)
        )

    def failed(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"the Ray node {ip_of(self.node)} could not download its models: {why}"
        )


def _planned(models: Mapping[str, Collection[str]]) -> list[_Download]:
    names = {node: sorted(filter(on_hub, set(paths))) for node, paths in models.items()}
    nodes = [node for node in names if names[node]]
    if not nodes:
        return []
    every = sorted({name for each in names.values() for name in each})
    downloads = []
    for node, found in ask_nodes(_missing_bytes, (every,), nodes, "models", _LOOK_S).items():
        lacking = [name for name in names[node] if found[name]]
        for name in lacking:
            if isinstance(why := found[name], str):
                raise _Download(node=node, names=[name], nbytes=0).failed(why)
        if lacking:
            nbytes = sum(found[name] for name in lacking)
            downloads.append(_Download(node=node, names=lacking, nbytes=nbytes))
    return downloads


# Functions that run on nodes. They return errors, because Ray would wrap a raised error.


def _missing_bytes(names: list[str]) -> dict[str, int | str]:
    """Bytes of each model that are missing in this node's cache, or an error message."""
    found: dict[str, int | str] = {}
    for name in names:
        try:
            found[name] = missing_bytes(name)
        except CheckpointError as error:
            found[name] = str(error)
    return found


def _download(names: list[str]) -> str | None:
    try:
        for name in names:
            download(name, lambda line: print(line, flush=True))
    except CheckpointError as error:
        return str(error)
    return None
