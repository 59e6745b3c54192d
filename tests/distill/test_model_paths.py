"""Missing model paths are refused before a hub is asked, with the nearest name."""

from pathlib import Path

import pytest

from distill.errors import CheckpointError
from distill.lookup import path_meant
from distill.model_paths import check_model_path


def test_a_link_to_nowhere_is_not_taken_for_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("student").symlink_to("gone")
    for path in ("student", "./student", str(tmp_path / "student")):
        with pytest.raises(CheckpointError, match="gone"):
            check_model_path(path)
    check_model_path("organisation/student")  # of the hub


@pytest.mark.parametrize("path", ["qwen", "./qwen", "a/b/c", "~/qwen"])
def test_other_names_are_directories(path: str) -> None:
    with pytest.raises(CheckpointError):
        check_model_path(path)


def test_the_nearest_path_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/student").mkdir(parents=True)
    Path("models/rows.jsonl").touch()
    assert "'models/student'" in path_meant("models/studnt")
    assert "'models'" in path_meant("modles") and "'models/rows.jsonl'" in path_meant(
        "models/row.jsonl"
    )
    assert path_meant("models/row.jsonl", "*/") == path_meant("models/student") == ""
    assert path_meant("models/teacher") == ""
