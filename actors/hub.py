"""Models on the Hugging Face hub: sizes, missing files in this machine's cache, and downloads."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePath

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import disable_progress_bars

from distill.errors import CheckpointError, first_line
from distill.gpu import gib
from distill.models.loading import weight_files

# Files that engines and learners read; those of other frameworks stay on the hub.
_READ = {".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken"}
_ANSWER_S = 20.0
# Seconds between two progress lines of a download.
_SAY_EVERY_S = 10.0


def on_hub(model: str) -> bool:
    """True if `model` is a name on the hub: there is no such path on this machine."""
    return not Path(model).exists()


def fetch_missing(models: Collection[str], print_line: Callable[[str], None]) -> None:
    """Download the models that are not in this machine's cache; local paths are skipped.

    Args:
        print_line: prints a line about progress.

    Raises:
        CheckpointError: as for `download`.
    """
    for name in sorted(filter(on_hub, set(models))):
        if size := missing_bytes(name):
            print_line(f"downloading {name} ({gib(size)} GiB)")
            download(name, print_line)


@lru_cache
def size_on_hub(model: str) -> int:
    """Size of a model on the hub in bytes; 0 for a local path, or if the hub does not report it."""
    try:
        return sum(_index(model).values()) if on_hub(model) else 0
    except CheckpointError:
        return 0


def missing_bytes(name: str) -> int:
    """Size of a model in bytes if a file is missing in this machine's cache, else 0.

    Raises:
        CheckpointError: the hub does not report the size: no network, no such model, or no access.
    """
    return 0 if _is_cached(name) else sum(_index(name).values())


def download(name: str, print_line: Callable[[str], None]) -> None:
    """Download a model into this machine's cache; files that are already there are kept.

    Args:
        print_line: prints a line about progress, called every ten seconds.

    Raises:
        CheckpointError: the disk is too small, or a file cannot be downloaded.
    """
    sizes = _index(name)
    place = Path(constants.HF_HUB_CACHE)
    place.mkdir(parents=True, exist_ok=True)
    lacking, free = sum(sizes.values()) - _arrived(name), shutil.disk_usage(place).free
    if lacking > free:
        raise CheckpointError(
            f"{name} needs {gib(lacking)} GiB more at {place}, which has {gib(free)} GiB free; "
            "set HF_HOME to a directory with more space"
        )
    disable_progress_bars()
    with _printing_progress(name, sum(sizes.values()), print_line):
        try:
            snapshot_download(name, allow_patterns=list(sizes))
        except Exception as error:  # the library's own, its HTTP library's, OSError: no common base
            raise _not_downloaded(name, error) from error


@contextmanager
def _printing_progress(name: str, size: int, print_line: Callable[[str], None]) -> Iterator[None]:
    over = threading.Event()

    def lines() -> None:
        while not over.wait(_SAY_EVERY_S):
            print_line(f"{name}: {gib(_arrived(name))} of {gib(size)} GiB downloaded")

    threading.Thread(target=lines, daemon=True, name=f"download of {name}").start()
    try:
        yield
    finally:
        over.set()


def _arrived(name: str) -> int:
    """Bytes of the model in this machine's cache, incomplete files included."""
    folder = repo_folder_name(repo_id=name, repo_type="model")
    blobs = Path(constants.HF_HUB_CACHE) / folder / "blobs"
    return sum(blob.stat().st_size for blob in blobs.glob("*") if blob.is_file())


def _is_cached(name: str) -> bool:
    files = weight_files(name)
    if not files:
        return False
    index = files[0].parent / constants.SAFETENSORS_INDEX_FILE
    if not index.exists():
        return True
    return {file.name for file in files} >= set(
        json.loads(index.read_text())["weight_map"].values()
    )


@lru_cache
def _index(name: str) -> dict[str, int]:
    """Sizes in bytes of the files to download, by name."""
    try:
        info = HfApi().model_info(name, files_metadata=True, timeout=_ANSWER_S)
    except Exception as error:  # as in `download`
        raise _not_downloaded(name, error) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    read = _READ if any(file.endswith(".safetensors") for file in sizes) else {*_READ, ".bin"}
    return {
        file: size
        for file, size in sizes.items()
        if PurePath(file).suffix in read and "/" not in file
    }


def _not_downloaded(name: str, error: Exception) -> CheckpointError:
    why = first_line(error).rstrip(".")
    return CheckpointError(f"{name} cannot be downloaded: {why}. {download_remedy(name)}")


def download_remedy(*names: str) -> str:
    commands = " and ".join(f"`hf download {name}`" for name in names)
    return f"Run {commands} with the same HF_HOME, or give a directory"
