"""A checkpoint loads whole or is refused by name."""

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import BloomConfig

from distill.errors import CheckpointError, ConfigError
from distill.lookup import path_meant
from distill.model_paths import check_model_path
from distill.models.checkpoint_values import CheckpointValues
from distill.models.loading import (
    context_length,
    load_causal_lm,
    load_config,
    meta_causal_lm,
    read_tensors,
    read_weights,
    stop_token_ids,
    tensor_shapes,
    vocab_size,
    weight_files,
)
from tests.tiny import EOS, VOCAB_SIZE, tiny_model_dir


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), seed=0, hidden_size=32, layers=1)


@pytest.fixture
def copy(intact: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "model"))


def load(path: Path | str, dtype: torch.dtype = torch.float32):
    return load_causal_lm(str(path), dtype=dtype, device="cpu")


def test_every_weight_comes_back(intact: str) -> None:
    model, stored = load(intact), load_file(Path(intact) / "model.safetensors")
    loaded = dict(model.named_parameters())
    assert set(loaded) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name
    config = load_config(intact)
    assert (vocab_size(config), context_length(config)) == (VOCAB_SIZE, 128)


def test_ends_outside_the_vocabulary_are_left_out(copy: Path) -> None:
    ends = {"eos_token_id": [EOS, VOCAB_SIZE - 1, VOCAB_SIZE, -1]}
    (copy / "generation_config.json").write_text(json.dumps(ends))
    assert stop_token_ids(str(copy)) == {EOS, VOCAB_SIZE - 1}


def test_the_precision_asked_for(intact: str) -> None:
    model = load(intact, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_hub_name_is_read_from_the_cache(
    intact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push compares its tensors with those of the checkpoint that the server loaded by name."""
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    shutil.copytree(intact, repository / "snapshots/abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))  # as HF_HUB_CACHE= does
    assert tensor_shapes("someone/tiny") == tensor_shapes(intact)
    assert weight_files("someone/other") == weight_files(f"{tmp_path}/none/of/it") == []
    with pytest.raises(CheckpointError):
        tensor_shapes("someone/other")


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"model_type": "no-such-model"}', '{"model_type": 3}']
)
def test_a_corrupt_config(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(CheckpointError):
        load(copy)


def test_a_config_without_a_context_length() -> None:
    with pytest.raises(CheckpointError):
        context_length(BloomConfig())


def read_by_tensor(path: Path) -> None:
    model = meta_causal_lm(str(path), dtype=torch.float32)
    for _ in CheckpointValues(model, str(path)).read():
        pass


in_both_ways = pytest.mark.parametrize("load", [load, read_by_tensor])


@in_both_ways
@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_weights_cut_short(copy: Path, kept: int, load: Callable[[Path], object]) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError):
        load(copy)


@in_both_ways
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("instead", [{}, {"model.norm.weight": torch.ones(5)}], ids=len)
def test_a_tensor_that_is_missing_or_of_another_shape(
    copy: Path, name: str, instead: dict[str, torch.Tensor], load: Callable[[Path], object]
) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | instead, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        load(copy)


def test_a_file_that_cannot_be_mapped(copy: Path) -> None:
    """A terabyte file of which only the header is on disk: its tensors are listed, not read."""
    entry = {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}
    header = json.dumps({"large": entry}).encode()
    with (copy / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 40))
    assert tensor_shapes(str(copy)) == {"large": (1 << 40,)}
    with pytest.raises(CheckpointError):
        read_weights(str(copy))
    with pytest.raises(CheckpointError):
        read_tensors(str(copy), ["large"])


def test_a_model_too_large_for_main_memory(intact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * sum(map(prod, tensor_shapes(intact).values()))
    free = [needed]
    monkeypatch.setattr("distill.main_memory.free_main_memory", lambda: free[0])
    load(intact, torch.bfloat16)
    with pytest.raises(ConfigError):
        load(intact, torch.float32)
    free[0] -= 1
    with pytest.raises(ConfigError):
        load(intact, torch.bfloat16)


def test_no_weights_and_a_missing_shard(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        load(copy)
    shards = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": shards})
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError):
        load(copy)


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
    assert path_meant("models/teacher") == path_meant("models/stand.jsonl") == ""
