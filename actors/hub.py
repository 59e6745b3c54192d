"""Models that are named on the Hugging Face hub: what this machine's cache lacks, and downloads."""

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
# Between two lines about a download, seconds.
_SAY_EVERY_S = 10.0


def on_hub(model: str) -> bool:
    """True if the model is named on the hub: there is no such path here."""
    return not Path(model).exists()


def fetch_missing(models: Collection[str], say: Callable[[str], None]) -> None:
    """Download what this machine's cache lacks of the models; paths among them are left alone.

    Raises:
        CheckpointError: as `download`.
    """
    for name in sorted(filter(on_hub, set(models))):
        if size := missing_bytes(name):
            say(f"downloading {name} ({gib(size)} GiB)")
            download(name, say)


@lru_cache
def size_on_hub(model: str) -> int:
    """Size of a model on the hub; 0 for a path, and where the hub does not tell."""
    try:
        return sum(_index(model).values()) if on_hub(model) else 0
    except CheckpointError:
        return 0


def missing_bytes(name: str) -> int:
    """Size of a model of which this machine's cache lacks a file; 0 if it lacks none.

    Raises:
        CheckpointError: the hub does not tell: no network, no such model, or no access.
    """
    return 0 if _is_cached(name) else sum(_index(name).values())


def download(name: str, say: Callable[[str], None]) -> None:
    """Fetch a model into this machine's cache; what is there of it already is kept.

    `say` gets a line about the progress every ten seconds.

    Raises:
        CheckpointError: the disk is too small, or the hub does not give all files.
    """
    sizes = _index(name)
    place = Path(constants.HF_HUB_CACHE)
    place.mkdir(parents=True, exist_ok=True)
    lacking, free = sum(sizes.values()) - _arrived(name), shutil.disk_usage(place).free
    if lacking > free:
        raise CheckpointError(
            f"{name} needs {gib(lacking)} GiB more at {place}, which has {gib(free)} GiB free; "
            "HF_HOME names another place"
        )
    disable_progress_bars()
    with _saying(name, sum(sizes.values()), say):
        try:
            snapshot_download(name, allow_patterns=list(sizes))
        except Exception as error:  # of its HTTP library, of its own, OSError: no class in common
            raise _not_downloaded(name, error) from error


@contextmanager
def _saying(name: str, size: int, say: Callable[[str], None]) -> Iterator[None]:
    over = threading.Event()

    def lines() -> None:
        while not over.wait(_SAY_EVERY_S):
            say(f"{name}: {gib(_arrived(name))} of {gib(size)} GiB downloaded")

    threading.Thread(target=lines, daemon=True, name=f"download of {name}").start()
    try:
        yield
    finally:
        over.set()


def _arrived(name: str) -> int:
    """Bytes of the model in this machine's cache, those of files that are not whole included."""
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
    """Sizes of the files to fetch, by name."""
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
