"""Files beside the weights are exported unchanged, or refused before a run."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.modeling_utils import PreTrainedModel

import isotherm
from distill.durable_files import is_full
from distill.errors import CheckpointError
from distill.models.loading import load_causal_lm, meta_causal_lm, stop_token_ids
from distill.models.model_files import check_model_files, generation_settings
from distill.models.twins import save_twin
from learner.export import check_export
from tests.families import SIZES
from tests.tiny import TinyPair, save_tokenizer

# Each is loaded by transformers; most are refused by its GenerationConfig.save_pretrained.
PUBLISHED: dict[str, dict[str, Any]] = {
    "temperature alone": {"eos_token_id": 1, "temperature": 0.6, "top_p": 0.9},
    "greedy at 1e-6": {"do_sample": False, "temperature": 1e-6},
    "negative padding": {"pad_token_id": -1},
    "top_k and scores": {"top_k": 20, "output_scores": True},
    "sampled": {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]},
    "unknown": {"_from_model_config": True, "transformers_version": "4.1", "made_by": "tümer"},
}
OF_CONFIG = [{"temperature": 0.6}, {"pad_token_id": -1}]


def copy_of(pair: TinyPair, path: Path) -> Path:
    shutil.copytree(pair.student, path)
    return path


def written(path: Path) -> dict[str, Any]:
    return json.loads((path / "generation_config.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_generation_settings_are_exported_unchanged(
    name: str, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    student = copy_of(tiny_pair, tmp_path / "student")
    (student / "generation_config.json").write_text(json.dumps(PUBLISHED[name]))
    with isotherm.Policy(str(student), device="cpu") as policy:
        saved = policy.save_state(tmp_path / "states") / "model"
        exported = policy.export(tmp_path / "exported")
    assert written(saved) == written(exported) == PUBLISHED[name]
    load_causal_lm(str(exported), dtype=torch.float32, device="cpu")
    twin = save_twin(str(student), tmp_path / "twin", seed=1)
    assert written(Path(twin.path)) == PUBLISHED[name]


@pytest.mark.parametrize("settings", OF_CONFIG, ids=str)
def test_settings_that_config_json_has_are_kept(
    settings: dict[str, Any], tiny_pair: TinyPair, tmp_path: Path
) -> None:
    student = copy_of(tiny_pair, tmp_path / "student")
    (student / "generation_config.json").unlink()
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps(config | settings))
    with isotherm.Policy(str(student), device="cpu") as policy:
        exported = policy.export(tmp_path / "exported")
    kept = written(exported)
    assert {name: kept.get(name, value) for name, value in settings.items()} == settings
    assert stop_token_ids(str(exported)) == stop_token_ids(str(student))
    save_twin(str(student), tmp_path / "twin", seed=1)


def test_stops_replace_the_ends_alone(tiny_pair: TinyPair, tmp_path: Path) -> None:
    student = copy_of(tiny_pair, tmp_path / "student")
    (student / "generation_config.json").write_text(json.dumps(PUBLISHED["temperature alone"]))
    settings = generation_settings(str(student), stops=(3, 5))
    assert settings == PUBLISHED["temperature alone"] | {"eos_token_id": [3, 5]}


def test_settings_that_cannot_be_loaded_are_refused(tiny_pair: TinyPair, tmp_path: Path) -> None:
    student = copy_of(tiny_pair, tmp_path / "student")
    (student / "generation_config.json").write_text('{"max_new_tokens": 0}')
    with pytest.raises(CheckpointError):
        stop_token_ids(str(student))


class Unsaved:
    """Tokenizer that loads and cannot be saved."""

    def save_pretrained(self, directory: Path) -> None:
        raise Exception("no merges")


def test_files_that_cannot_be_saved_are_refused_before_a_step(tiny_pair: TinyPair) -> None:
    with pytest.raises(CheckpointError):
        check_model_files(tiny_pair.student, Unsaved())  # pyright: ignore[reportArgumentType]


def test_an_export_that_fails_leaves_nothing(tiny_pair: TinyPair, tmp_path: Path) -> None:
    with isotherm.Policy(tiny_pair.student, device="cpu") as policy:
        policy.tokenizer = Unsaved()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(CheckpointError) as error:
            policy.export(tmp_path / "exported")
    assert "space" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_text_model_is_exported_within_its_outer_model(tmp_path: Path) -> None:
    origin, exported = tmp_path / "origin", tmp_path / "exported"
    outer = multimodal(origin)
    save_tokenizer(origin)
    with isotherm.Policy(str(origin), device="cpu") as policy:
        policy.export(exported)
    for directory in (origin, exported):
        config = json.loads((directory / "config.json").read_text())
        assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
        assert config["model_type"] == "qwen3_5" and config["vision_config"]["depth"] == 1
    found: Any = type(outer).from_pretrained(exported, output_loading_info=True)
    loaded, report = found
    assert not any(report.values())
    for name, tensor in outer.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_a_config_that_servers_would_not_read_is_refused_before_a_run(tmp_path: Path) -> None:
    multimodal(tmp_path)
    check_export(str(tmp_path))

    def of_an_unknown_kind(path: str) -> PreTrainedModel:
        """Text model whose config is no part of the outer config."""
        model = meta_causal_lm(path)
        model.config.__class__ = type("OtherConfig", (type(model.config),), {})
        return model

    with pytest.raises(CheckpointError):
        check_export(str(tmp_path), of_an_unknown_kind)


def multimodal(directory: Path) -> Qwen3_5ForConditionalGeneration:
    """Tiny model whose text model transformers loads alone, with its own config."""
    heads = {"linear_num_key_heads": 2, "linear_key_head_dim": 16}
    values = {"linear_num_value_heads": 2, "linear_value_head_dim": 16, "head_dim": 64}
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 4}
    config = Qwen3_5Config(
        text_config=SIZES | heads | values | layers,
        vision_config=vision | {"out_hidden_size": SIZES["hidden_size"]},
        dtype="float32",
    )
    model = Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(directory)
    return model


def test_full_disks_differ_from_other_errors() -> None:
    full = [OSError(errno.ENOSPC, "x"), OSError(errno.EDQUOT, "x")]
    full += [SafetensorError("I/O error: No space left on device (os error 28)")]
    wrapped = RuntimeError("the writer failed")
    wrapped.__cause__ = full[0]
    assert all(map(is_full, [*full, wrapped]))
    others = [OSError(errno.EIO, "x"), OSError(errno.EFBIG, os.strerror(errno.EFBIG))]
    assert not any(map(is_full, [*others, ValueError("bad"), "short write"]))
