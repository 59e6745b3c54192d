"""Check, before a run starts, that its nodes have the files in its settings."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distill.errors import ConfigError, first_line

_SHARED = (
    "put it on storage that every node mounts at the same path (NFS, a shared disk), or in the "
    "nodes' image"
)


def require_visible(
    paths: Mapping[str, str], nodes: Sequence[str], *, deadline_s: float = 60.0
) -> None:
    """Raise ConfigError if a path is missing on one of the nodes.

    Args:
        paths: paths by setting. Those that do not exist here, such as hub names and URLs, are
            skipped.
        nodes: Ray's node ids.
    """
    local = {
        name: str(Path(path).absolute()) for name, path in paths.items() if Path(path).exists()
    }
    if not local:
        return
    seen_by = ask_nodes(exist_here, (list(local.values()),), nodes, ", ".join(local), deadline_s)
    for node, seen in seen_by.items():
        for (name, path), exists in zip(local.items(), seen, strict=True):
            if not exists:
                raise ConfigError(
                    f"{name}={path} does not exist on the Ray node {ip_of(node)}, which reads it: "
                    f"{_SHARED}"
                )


def require_same_directory(
    name: str, directory: str, nodes: Sequence[str], *, deadline_s: float = 60.0
) -> None:
    """Raise ConfigError if `directory`, which must exist here, is not the same on every node.

    A path that exists on every node may be on each node's own disk, so a random word is written
    here and read there.
    """
    word = secrets.token_hex(16)
    file = Path(directory).absolute() / f".visible-{secrets.token_hex(4)}"
    file.write_text(word)
    try:
        read_by = ask_nodes(read_here, (str(file),), nodes, name, deadline_s)
    finally:
        file.unlink(missing_ok=True)
    for node, read in read_by.items():
        if read != word:
            raise ConfigError(
                f"{name}={directory} on the Ray node {ip_of(node)} is not the driver's directory "
                f"(or cannot be read there), but both write to it: {_SHARED}"
            )


def exist_here(paths: list[str]) -> list[bool]:
    return [os.path.exists(path) for path in paths]


def read_here(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def on_node(function: Any, node: str) -> Any:
    """The function as a task on a Ray node, which needs no free resources."""
    return ray.remote(function).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )


def ask_nodes(
    function: Any, arguments: tuple[Any, ...], nodes: Iterable[str], what: str, deadline_s: float
) -> dict[str, Any]:
    """Run the function on each node; return the results by node.

    Raises:
        ConfigError: a node did not answer within the deadline: it is lost, or its mount hangs.
    """
    asked = {node: on_node(function, node).remote(*arguments) for node in dict.fromkeys(nodes)}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=deadline_s)
    answers = {}
    for node, reference in asked.items():
        try:
            answers[node] = ray.get(reference, timeout=0)
        except GetTimeoutError as error:
            ray.cancel(reference, force=True)
            raise ConfigError(
                f"{what} was not checked on the Ray node {ip_of(node)} within {deadline_s:.0f} "
                "s; check that its storage is mounted and responds",
                field=what,
            ) from error
        except RayError as error:
            raise ConfigError(
                f"{what} could not be checked on the Ray node {ip_of(node)}: "
                f"{first_line(error)}. Each node needs the run's code and packages: submit a job "
                "with --working-dir, in one image",
                field=what,
            ) from error
    return answers


def ip_of(node: str) -> str:
    return next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node), node)
