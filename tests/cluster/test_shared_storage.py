"""Paths that a node lacks, and directories that are not shared."""

import os
from pathlib import Path

import pytest
import ray

from cluster.placement import shared_storage as visible
from cluster.placement.shared_storage import require_same_directory, require_visible
from distill.errors import ConfigError
from tests.refusals import refuses

pytestmark = pytest.mark.e2e


@pytest.fixture
def node(ray_cluster: None) -> str:
    return ray.get_runtime_context().get_node_id()


def elsewhere(monkeypatch: pytest.MonkeyPatch, here: Path, there: Path) -> None:
    """Make the node see `there` under the name of `here`, as with a disk of another machine."""
    exists, read = os.path.exists, Path.read_text

    def moved(path: str) -> str:
        return str(path).replace(str(here), str(there))

    monkeypatch.setattr(
        visible, "exist_here", lambda paths: [exists(moved(path)) for path in paths]
    )
    monkeypatch.setattr(
        visible, "read_here", lambda path: read(Path(moved(path))) if exists(moved(path)) else None
    )


def test_paths_on_every_node_are_accepted(node: str, tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    require_visible({"student": str(tmp_path / "student")}, [node])
    require_same_directory("out", str(tmp_path), [node])
    assert [path.name for path in tmp_path.iterdir()] == ["student"], "the probe was left behind"


def test_hub_names_and_urls_are_not_checked(ray_cluster: None) -> None:
    require_visible({"student": "Qwen/Qwen3-0.6B", "teacher": "http://host:1"}, ["no such node"])


def test_a_path_that_a_node_lacks_is_named(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for path in (here / "student", here / "teacher", there / "student"):
        path.mkdir(parents=True)
    elsewhere(monkeypatch, here, there)
    with refuses(ConfigError, "teacher", names=ray.nodes()[0]["NodeManagerAddress"]):
        require_visible({name: str(here / name) for name in ("student", "teacher")}, [node])


def test_a_directory_that_is_not_shared_is_refused(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    elsewhere(monkeypatch, here, there)
    with refuses(ConfigError, "out"):
        require_same_directory("out", str(here), [node])
    assert not list(here.iterdir())


def test_a_node_that_does_not_answer_is_named(ray_cluster: None, tmp_path: Path) -> None:
    lost = "ab" * 28
    with refuses(ConfigError, "student", names=lost):
        require_visible({"student": str(tmp_path)}, [lost], deadline_s=5)


def test_storage_that_hangs_is_refused_at_the_deadline(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it waits for a writer, as a dead mount waits for its server
    read = Path.read_text
    monkeypatch.setattr(visible, "read_here", lambda _: read(pipe))
    with refuses(ConfigError, "out"):
        require_same_directory("out", str(tmp_path), [node], deadline_s=1)
