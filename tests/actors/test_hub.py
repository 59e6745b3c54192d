"""Models named on the hub, fetched from a server with part of the hub's API."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from actors.hub import fetch_missing, missing_bytes, size_on_hub
from cluster.config.early_checks import require_hub
from distill.errors import CheckpointError
from distill.models.loading import tensor_shapes
from tests.actors.serving import serving_in_a_thread
from tests.tiny import tiny_model_dir

_COMMIT = "a" * 40
_numbers = itertools.count()


class Hub:
    """Hub with one model, the files of a directory; `asked` has methods and paths in order."""

    def __init__(self, directory: Path) -> None:
        self.name = f"someone/tiny-{next(_numbers)}"  # sizes are remembered by name
        self.files = {file.name: file.read_bytes() for file in directory.iterdir()}
        self.asked: list[tuple[str, str]] = []
        self.gone: set[str] = set()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, request.path))
        data = self.answer(request.path)
        headers = {"X-Repo-Commit": _COMMIT, "ETag": f'"{_etag(data or b"")}"'}
        return web.Response(status=404 if data is None else 200, body=data, headers=headers)

    def answer(self, path: str) -> bytes | None:
        """Body of the path, or None for 404."""
        file = path.removeprefix(f"/{self.name}/resolve/").partition("/")[2]
        if file in self.files and file not in self.gone:
            return self.files[file]
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": _etag(data)}
            for name, data in self.files.items()
        ]
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
            for name, data in self.files.items()
        ]
        index = f"/api/models/{self.name}"
        info = {"id": self.name, "sha": _COMMIT, "siblings": siblings}
        if path in (index, f"{index}/revision/main"):
            return json.dumps(info).encode()
        return json.dumps(tree).encode() if path == f"{index}/tree/{_COMMIT}" else None


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of two shards, with files that nothing reads."""
    directory = tmp_path_factory.mktemp("hub") / "model"
    whole = tiny_model_dir(directory.parent / "tiny", seed=0, hidden_size=32, layers=1)
    shutil.copytree(whole, directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        part = {name: tensors[name] for name in names if weight_map[name] == shard}
        save_file(part, directory / shard, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "tf_model.h5").write_bytes(b"another framework's")
    return directory


@pytest.fixture
def served(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub in place of HF_ENDPOINT, and an empty cache."""
    hub = Hub(model)
    with serving_in_a_thread(hub.handle) as url:
        place = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def test_only_needed_files_are_fetched_and_only_once(served: Hub, model: Path) -> None:
    lines: list[str] = []
    fetch_missing([served.name, str(model)], lines.append)
    assert len(lines) == 1 and served.name in lines[0]
    assert tensor_shapes(served.name) == tensor_shapes(str(model))
    fetched = [path.rpartition("/")[2] for method, path in served.asked if method == "GET"]
    assert fetched.count("model-0.safetensors") == 1 and "tf_model.h5" not in fetched
    before = list(served.asked)
    fetch_missing([served.name], lines.append)
    assert served.asked == before and len(lines) == 1 and missing_bytes(served.name) == 0


def test_a_hub_that_is_out_of_reach_is_found_before_models_load(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_hub("some/model")
    fetch_missing([served.name], print)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    require_hub(served.name)
    with pytest.raises(CheckpointError):
        require_hub("some/model")


def test_a_model_with_a_lost_shard_is_not_whole(served: Hub, tmp_path: Path) -> None:
    fetch_missing([served.name], print)
    [shard] = (tmp_path / "cache").rglob("snapshots/*/model-1.safetensors")
    shard.unlink()
    read = sum(len(data) for file, data in served.files.items() if "tf_model" not in file)
    assert missing_bytes(served.name) == size_on_hub(served.name) == read
    fetch_missing([served.name], print)
    assert shard.exists() and missing_bytes(served.name) == 0


def no_room(monkeypatch: pytest.MonkeyPatch, _served: Hub) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))


def lost_file(_monkeypatch: pytest.MonkeyPatch, served: Hub) -> None:
    served.gone.add("model-1.safetensors")


def offline(monkeypatch: pytest.MonkeyPatch, _served: Hub) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("trouble", [no_room, lost_file, offline])
def test_a_model_that_cannot_be_fetched_is_refused(
    served: Hub, monkeypatch: pytest.MonkeyPatch, trouble: Callable[..., None]
) -> None:
    trouble(monkeypatch, served)
    with pytest.raises(CheckpointError):
        fetch_missing([served.name], print)
