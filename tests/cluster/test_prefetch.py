"""Downloads to nodes before actors start; for the hub itself see tests/actors/test_hub.py."""

from pathlib import Path

import pytest
import ray

from cluster.placement.prefetch import prefetch
from distill.errors import CheckpointError

pytestmark = pytest.mark.e2e


def fail() -> None:
    raise AssertionError("a node was asked")


def test_paths_are_not_downloaded(ray_cluster: None, tmp_path: Path) -> None:
    prefetch({"no such node": [str(tmp_path)]}, print_line=print, poll=fail)


def test_a_node_that_cannot_download_is_named(ray_cluster: None) -> None:
    """The tests' nodes are offline."""
    [node] = ray.nodes()
    with pytest.raises(CheckpointError) as raised:
        prefetch({node["NodeID"]: ["someone/large"]}, print_line=print, poll=fail)
    assert node["NodeManagerAddress"] in str(raised.value)
