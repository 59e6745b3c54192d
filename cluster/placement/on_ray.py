"""Reservation of a Ray cluster's resources for all actors of a run. Not used with local=True."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.handles.node import node_id
from cluster.placement.placement_groups import Placement
from cluster.placement.prefetch import prefetch
from cluster.placement.roles import LEARNER, colocated, model_paths, placed_roles
from cluster.placement.shared_storage import require_same_directory, require_visible
from cluster.run_files.run_directory import RunDirectory


@contextmanager
def placed_on_ray(
    config: CommonConfig,
    directory: RunDirectory,
    *,
    resumes: bool,
    print_line: Callable[[str], None],
    poll: Callable[[], None],
) -> Iterator[Placement]:
    """Context manager that reserves resources for all actors, and downloads models to their nodes.

    Args:
        resumes: the run continues from a checkpoint in its directory.
        print_line, poll: see `Placement.reserve`.

    Raises:
        ConfigError: the cluster is too small, or has no free resources within the deadline; or a
            node does not have a model that its actors load, or has another `out/`.
        CheckpointError: a model cannot be downloaded to a node.
    """
    placement = Placement(
        placed_roles(config),
        colocate=colocated(config),
        name=directory.actor_name("place"),
    )
    try:
        placement.reserve(
            deadline_s=config.cluster.start_deadline_of(None), print_line=print_line, poll=poll
        )
        _require_visible(config, placement, directory, resumes)
        prefetch(_models_of_nodes(config, placement), print_line=print_line, poll=poll)
        yield placement
    finally:
        placement.release()


def _require_visible(
    config: CommonConfig, placement: Placement, directory: RunDirectory, resumes: bool
) -> None:
    """Raise ConfigError if a node does not have its actors' models, or has another `out/`."""
    models = model_paths(config)
    by_disk = isinstance(config, RolloutConfig) and config.weights.transport == "disk"
    reads_out = not config.only_keeps and (resumes or by_disk)
    for role in {LEARNER, *models}:
        if others := [node for node in placement.nodes(role) if node != node_id()]:
            require_visible(models.get(role, {}), others)
            if role == LEARNER or reads_out:
                require_same_directory("out", str(directory.path), others)


def _models_of_nodes(config: CommonConfig, placement: Placement) -> dict[str, set[str]]:
    """Models that each node loads, by node id."""
    models: dict[str, set[str]] = {}
    for role, paths in model_paths(config).items():
        for node in placement.nodes(role):
            models.setdefault(node, set()).update(paths.values())
    return models
