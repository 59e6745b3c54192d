"""A checkpoint loads whole or is refused by name: heads, tiny twins, files beside the weights."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
)
from transformers.modeling_utils import PreTrainedModel

import isotherm
from distill.durable_files import is_full
from distill.errors import CheckpointError, ConfigError
from distill.lookup import path_meant
from distill.model_paths import check_model_path
from distill.models import twins
from distill.models.checkpoint_values import CheckpointValues
from distill.models.head import check_head, in_dtype, load_head
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
from distill.models.model_files import check_model_files, generation_settings
from distill.models.twins import save_twin, shrunken
from distill.tokenizer import load_tokenizer
from learner.export import check_export
from tests.families import FAMILIES, SIZES, family_dir
from tests.refusals import refuses
from tests.tiny import EOS, VOCAB_SIZE, TinyPair, save_tokenizer, tiny_model_dir


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


def test_a_hub_name_is_cached(intact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_link_to_nowhere_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("student").symlink_to("gone")
    for path in ("student", "./student", str(tmp_path / "student")):
        with pytest.raises(CheckpointError, match="gone"):
            check_model_path(path)
    check_model_path("organisation/student")  # of the hub


def test_a_checkpoint_within_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.json").touch()
    with pytest.raises(CheckpointError, match=str(tmp_path / "inner")):
        check_model_path(str(tmp_path))


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


_PHI: dict[str, Any] = SIZES | {"num_key_value_heads": 4}
HEADS: dict[str, Callable[[], PretrainedConfig]] = {
    "tied": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "its own": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "soft cap": lambda: Gemma2Config(**SIZES, head_dim=32, final_logit_softcapping=2.0),
    "logit scale": lambda: CohereConfig(**SIZES, logit_scale=0.25),
    "scaling": lambda: GraniteConfig(**SIZES, logits_scaling=8.0),
    "bias": lambda: PhiConfig(**_PHI),
}


@pytest.fixture(params=HEADS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEADS[request.param]())
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "model")
    return model.eval(), str(tmp_path / "model")


@torch.no_grad()
def test_it_makes_the_logits_that_its_model_makes(made: tuple[Any, str]) -> None:
    model, path = made
    ids_1T = torch.arange(10)[None]
    hidden_TH = model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0]
    head, config = load_head(path, device="cpu")
    torch.testing.assert_close(head(hidden_TH), logits_TV)
    assert check_head(path, "teacher.head") == (SIZES["vocab_size"], SIZES["hidden_size"])
    half = in_dtype(head, config, torch.bfloat16)(hidden_TH.bfloat16())
    torch.testing.assert_close(half, logits_TV, atol=0.05 * logits_TV.abs().max().item(), rtol=0)


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, seed=1)
    config = AutoConfig.from_pretrained(path)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(path)
    with refuses(ConfigError, "teacher.head"):
        check_head(path, "teacher.head")


# Published sizes of some that are large.
LARGE: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}


@torch.no_grad()
def gap_between_temperatures(model: Any, temperature: float = 0.7) -> float:
    """Mean |log p_T - log p_1.5T| of tokens that the model samples at T."""
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.arange(3, 9)[None]
    gaps: list[float] = []
    for _ in range(12):
        logits_V = model(ids_1T).logits[0, -1]
        by_T, by_other = (
            (logits_V / each).log_softmax(-1) for each in (temperature, 1.5 * temperature)
        )
        token = int(torch.multinomial(by_T.exp(), 1, generator=generator))
        gaps.append(abs(float(by_T[token] - by_other[token])))
        ids_1T = torch.cat([ids_1T, torch.tensor([[token]])], dim=1)
    return sum(gaps) / len(gaps)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_twin_is_of_the_family_and_small(name: str, tmp_path: Path) -> None:
    source = family_dir(tmp_path, name)
    twin = save_twin(source, tmp_path / "twin", seed=3)
    made, config = load_config(twin.path), load_config(source)
    assert type(made) is type(config) and vocab_size(made) == vocab_size(config)
    assert stop_token_ids(twin.path) == stop_token_ids(source)
    assert load_tokenizer(twin.path).get_vocab() == load_tokenizer(source).get_vocab()
    model = load_causal_lm(twin.path, dtype=torch.float32, device="cpu")
    assert gap_between_temperatures(model) > 0.05, "any temperature would fit its log-probs"
    assert type(model).__name__ in twin.description


def test_sizes_shrink_and_kinds_of_layers_are_kept() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 12
    config = Qwen3Config(
        **LARGE, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        layer_types=kinds, sliding_window=4096, use_sliding_window=True,
    )  # fmt: skip
    small = shrunken(config)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert (small.num_hidden_layers, small.hidden_size, small.head_dim) == (2, 128, 64)
    assert (small.num_attention_heads, small.num_key_value_heads) == (2, 1)
    assert (small.vocab_size, small.sliding_window) == (151936, 4096)
    assert config.hidden_size == 4096, "the model's own config is left alone"
    published = AutoConfig.for_model("llama", **LARGE, num_attention_heads=32)
    assert shrunken(published).num_key_value_heads == 2, "as many as heads, as there"


def test_two_seeds_are_two_models(tiny_pair: TinyPair, tmp_path: Path) -> None:
    paths = [save_twin(tiny_pair.student, tmp_path / str(s), seed=s).path for s in (1, 2)]
    first, second = (load_causal_lm(p, dtype=torch.float32, device="cpu") for p in paths)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_a_reward_model_keeps_its_head(tiny_pair: TinyPair, tmp_path: Path) -> None:
    twin = save_twin(tiny_pair.student, tmp_path / "twin", seed=1, reward=True)
    assert "SequenceClassification" in twin.description


def test_a_family_that_does_not_shrink_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "LARGEST", 10_000)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=160, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    save_tokenizer(tmp_path / "gpt2")
    with pytest.raises(CheckpointError):
        save_twin(str(tmp_path / "gpt2"), tmp_path / "twin", seed=1)
    assert not (tmp_path / "twin").exists()


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
def test_generation_settings_are_unchanged(name: str, tiny_pair: TinyPair, tmp_path: Path) -> None:
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
def test_settings_are_kept(settings: dict[str, Any], tiny_pair: TinyPair, tmp_path: Path) -> None:
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
