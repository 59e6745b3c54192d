"""Files and directories appear whole or not at all."""

import os
from pathlib import Path

import pytest

from distill.durable_files import whole_write, write_whole


def write(path: Path, text: str, *, directory: bool) -> None:
    if directory:
        path.mkdir()
        path = path / "file"
    path.write_text(text)


def text_of(path: Path) -> str:
    return (path / "file" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("directory", [False, True])
def test_a_block_that_raises_leaves_the_earlier_content(tmp_path: Path, directory: bool) -> None:
    path = tmp_path / "kept"
    for text in ("first", "second"):
        with whole_write(path) as partial:
            write(partial, text, directory=directory)
    assert text_of(path) == "second"
    with pytest.raises(ZeroDivisionError), whole_write(path) as partial:
        write(partial, "third", directory=directory)
        raise ZeroDivisionError
    assert text_of(path) == "second"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("left_directory", [False, True])
def test_the_remains_of_a_killed_writer_are_replaced(tmp_path: Path, left_directory: bool) -> None:
    path = tmp_path / "kept"
    write(tmp_path / ".kept.partial", "half", directory=left_directory)
    with whole_write(path) as partial:
        partial.write_text("whole")
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_name_and_content_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure leaves the file unchanged or complete."""
    path, seen, real = tmp_path / "kept", list[tuple[str, bool]](), os.fsync

    def fsync(descriptor: int) -> None:
        seen.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(path, b"whole")
    assert seen == [(f"{tmp_path}/.kept.partial", False), (str(tmp_path), True)]
    assert path.read_bytes() == b"whole"
