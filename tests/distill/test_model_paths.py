"""Paths of models that are not there: refused before a hub is asked, with what was meant."""

from pathlib import Path

import pytest

from distill.errors import CheckpointError
from distill.model_paths import check_model_path, directory_meant


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


def test_a_directory_of_nearly_the_name_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/student").mkdir(parents=True)
    assert directory_meant("models/studnt") == "; did you mean 'models/student'?"
    assert directory_meant("modles") == "; did you mean 'models'?"
    assert directory_meant("models/student") == directory_meant("models/teacher") == ""
