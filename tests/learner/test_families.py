"""Families of models: trained a step, pushed, scored, saved and loaded, or refused by name."""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from actors.embedded.engine import EmbeddedEngine
from distill.engine import ScoreRequest
from distill.errors import CheckpointError
from distill.models.attention_probe import shares_prefixes
from distill.models.checkpoint_names import pushed_shapes, units_of
from distill.models.loading import load_causal_lm, load_config, read_tensors, tensor_shapes
from distill.objective.batching import TrainingRow
from distill.routing import MixtureShape
from distill.tokenizer import load_tokenizer
from distill.types import FloatArray
from distill.weights.lending import LentByWorkers
from distill.weights.model_weights import Weights, names_of, plan_buckets
from distill.weights.shared_memory import SharedTensors
from learner.checkpoint import CheckpointStore
from learner.config import LearnerConfig
from learner.export import check_export
from learner.initial_weights import InitialWeights
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from learner.process_group import WorkerGroup
from tests.families import FAMILIES, MTP_LAYER, family_dir
from tests.learner.routing import other_experts
from tests.learner.two_workers import on_workers
from tests.samples import training_row
from tests.tiny import SIZES, VOCAB_SIZE
from tests.weights import gather_all, shared

T = 0.7
ROWS = [training_row(3 + i, 9 + 4 * i, seed=i, temperature=T) for i in range(4)]
FUSED = [name for name, family in FAMILIES.items() if family.fused]

Directory = Callable[[str], str]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    made: dict[str, str] = {}
    root = tmp_path_factory.mktemp("families")

    def of(name: str) -> str:
        if name not in made:
            made[name] = family_dir(root, name)
        return made[name]

    return of


def config(path: str, **settings: Any) -> LearnerConfig:
    return LearnerConfig.of(
        model=path, total_steps=4, device="cpu", max_grad_norm=1e9,
        **{"lr": 1e-2, "token_budget": 4096} | settings,
    )  # fmt: skip


def trained(
    path: str, tmp_path: Path, rows: Sequence[TrainingRow] = ROWS, **settings: Any
) -> Learner:
    learner = Learner(config(path, **settings), str(tmp_path / "failed"))
    learner.step(Part(rows_D=rows, loss=cross_entropy_loss))
    return learner


def scored_by(engine: EmbeddedEngine) -> list[FloatArray]:
    requests = [
        ScoreRequest(tokens_T=row.tokens_T, start=row.first_trained, temperatures=(T,))
        for row in ROWS
    ]
    scores = asyncio.run(engine.score(requests))
    return [score.logprobs_by_temperature[0] for score in scores]


@torch.no_grad()
def scored_by_transformers(path: str) -> list[FloatArray]:
    model = load_causal_lm(path, dtype=torch.float32, device="cpu").eval()
    return [logprobs_of(model, row) for row in ROWS]


def logprobs_of(model: Any, row: TrainingRow) -> FloatArray:
    ids_1T = torch.from_numpy(row.tokens_T.astype(np.int64))[None]
    log_p_TV = torch.log_softmax(model(ids_1T, use_cache=False).logits[0].float() / T, dim=-1)
    chosen_T = log_p_TV[:-1].gather(1, ids_1T[0, 1:, None])[:, 0]
    return chosen_T[row.first_trained - 1 :].numpy()


def expect_close(ours: list[FloatArray], theirs: list[FloatArray], atol: float = 1e-3) -> None:
    for mine_N, other_N in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine_N, other_N, atol=atol)


def in_portions(weights: Weights, nbytes: int) -> dict[str, Tensor]:
    """Weights as a transport takes them: one bucket at a time, copied before the next."""
    made: dict[str, Tensor] = {}
    for bucket in plan_buckets(weights.layouts, nbytes):
        portion = weights.gather(names_of(bucket))
        assert portion.keys() == set(names_of(bucket))
        made |= {name: tensor.clone() for name, tensor in portion.items()}
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_one_step_pushed_scored_and_saved(
    name: str, directory: Directory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = directory(name)
    check_export(path)
    before = scored_by_transformers(path)
    engine = EmbeddedEngine(model_path=path, device="cpu", threads=1)
    expect_close(scored_by(engine), before)

    learner = trained(path, tmp_path)
    expected = learner.logprobs(ROWS)
    assert max(np.abs(a - b).max() for a, b in zip(before, expected, strict=True)) > 0.05
    weights = learner.weights()
    shapes = {layout.name: layout.shape for layout in weights.layouts}
    tied = {"lm_head.weight"} - shapes.keys()
    pushed = pushed_shapes(path)
    assert shapes == {name: pushed[name] for name in pushed.keys() - tied}
    for nbytes in (1 << 12, 1 << 20):
        bundle = shared(in_portions(weights, nbytes))
        asyncio.run(engine.load_weights(bundle, version=1))
        expect_close(scored_by(engine), expected)

    final = tmp_path / "final"
    learner.export(final, load_tokenizer(path))
    assert tensor_shapes(str(final)).keys() - tied == tensor_shapes(path).keys() - tied
    expect_close(scored_by_transformers(str(final)), expected)
    check_export(str(final))  # another run can begin from it
    processor = "preprocessor_config.json"
    assert (final / processor).exists() == (Path(path) / processor).exists()


@pytest.mark.parametrize("name", FAMILIES)
def test_values_equal_those_of_save_pretrained(
    name: str, directory: Directory, tmp_path: Path
) -> None:
    learner = trained(directory(name), tmp_path)
    learner.model.save_pretrained(tmp_path / "theirs")
    theirs = read_tensors(str(tmp_path / "theirs"), tensor_shapes(str(tmp_path / "theirs")))
    ours = in_portions(learner.weights(), 1 << 12)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    whole = gather_all(learner.weights())
    assert all(torch.equal(ours[name], whole[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_read_one_by_one_equal_the_loaded_model(
    name: str, dtype: torch.dtype, directory: Directory
) -> None:
    path = directory(name)
    loaded = load_causal_lm(path, dtype=dtype, device="cpu")
    alone = WorkerGroup(None, "cpu")
    initial = InitialWeights(path, alone, dtype=dtype)
    assert initial.probe() == shares_prefixes(loaded)
    initial.fill(alone)
    for ours, theirs in (
        (initial.model.state_dict(), loaded.state_dict()),
        (dict(initial.model.named_buffers()), dict(loaded.named_buffers())),
    ):
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key
    assert initial.model.config.to_dict() == loaded.config.to_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in loaded.state_dict().items()}
    assert units_of(initial.model, shapes) == units_of(loaded, shapes)


def test_an_interrupted_push_leaves_no_old_weights(directory: Directory, tmp_path: Path) -> None:
    learner = trained(directory("qwen3_moe"), tmp_path)
    weights = learner.weights()
    experts = [layout.name for layout in weights.layouts if ".experts." in layout.name]
    weights.gather(experts[:1])  # the others of its unit are made, and wait
    learner.step(Part(rows_D=ROWS, loss=cross_entropy_loss))
    fused = dict(learner.model.named_parameters())
    gate_up_EIH = fused["model.layers.0.mlp.experts.gate_up_proj"].detach()
    key = "model.layers.0.mlp.experts.1.gate_proj.weight"
    assert torch.equal(weights.gather([key])[key], gate_up_EIH[1].chunk(2)[0])


def test_weights_that_the_class_ignores_are_kept_unchanged(
    directory: Directory, tmp_path: Path
) -> None:
    path = directory("deepseek_v3")
    mtp = {name for name in tensor_shapes(path) if name.startswith(f"model.layers.{MTP_LAYER}.")}
    assert len(mtp) > 20 and not mtp & pushed_shapes(path).keys()
    learner = trained(path, tmp_path)
    assert not mtp & {layout.name for layout in learner.weights().layouts}
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    tokenizer = load_tokenizer(path)
    saved = store.save(step=1, write=partial(learner.save, tokenizer=tokenizer), delivery={})
    resumed = Learner(config(path).resumed(saved), str(tmp_path / "failed"))
    store.save(step=2, write=partial(resumed.save, tokenizer=tokenizer), delivery={})
    assert not saved.path.exists()  # of which the run went on
    resumed.export(tmp_path / "final", tokenizer)
    there, here = read_tensors(path, mtp), read_tensors(str(tmp_path / "final"), mtp)
    assert there.keys() == here.keys() == mtp
    for name in mtp:
        assert there[name].dtype == here[name].dtype and torch.equal(there[name], here[name])


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("deepseek_v3", {"gate.weight", "gate.e_score_correction_bias"}),
        ("qwen3_moe", {"gate.weight"}),
        ("gpt_oss", {"router.weight", "router.bias"}),
        ("llama", set()),
    ],
)
def test_routers_are_pushed_unrounded(
    name: str, exact: set[str], directory: Directory, tmp_path: Path
) -> None:
    learner = trained(directory(name), tmp_path)
    weights, whole = learner.weights(torch.bfloat16), gather_all(learner.weights())
    rounded = in_portions(weights, 1 << 14)
    kept = {layout.name for layout in weights.layouts if layout.dtype == "float32"}
    assert {".".join(name.split(".")[-2:]) for name in kept} == exact
    dtypes = [layout.dtype for layout in weights.layouts]
    assert [dtype for dtype, _ in groupby(dtypes)] == list(dict.fromkeys(dtypes)), "few buckets"
    for key, tensor in rounded.items():
        assert torch.equal(tensor, whole[key] if key in kept else whole[key].bfloat16())
    engine = EmbeddedEngine(model_path=directory(name), device="cpu", dtype="bfloat16", threads=1)
    asyncio.run(engine.load_weights(shared(rounded), version=1))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_an_adapter_is_merged_into_the_checkpoint_s_tensors(
    name: str, directory: Directory, tmp_path: Path
) -> None:
    path = directory(name)
    learner = trained(path, tmp_path, lora_rank=2)
    learner.step(Part(rows_D=ROWS, loss=cross_entropy_loss))  # the first moves B alone, from zero
    engine = EmbeddedEngine(model_path=path, device="cpu", threads=1)
    bundle = shared(in_portions(learner.weights(), 1 << 12))
    asyncio.run(engine.load_weights(bundle, version=1))
    expect_close(scored_by(engine), learner.logprobs(ROWS))
    assert {layout.name for layout in learner.weights().layouts} == pushed_shapes(path).keys()


def lent_by_the_second(weights: Weights, bucket_bytes: int) -> dict[str, torch.Tensor]:
    """Whole tensors of the checkpoint that the second worker lends."""
    made: dict[str, torch.Tensor] = {}
    assert isinstance(weights, LentByWorkers)
    for bucket in plan_buckets(weights.layouts, bucket_bytes):
        nothing, [handle] = weights.lend(names_of(bucket), [0, 1])
        assert not nothing and isinstance(handle, SharedTensors)
        made |= {name: tensor.clone() for name, tensor in handle.unpack().items()}
    weights.take_back()
    return made


def sharded_story(learner: Learner, given: dict[str, Any]) -> dict[str, Any]:
    learner.step(Part(rows_D=given["rows"], loss=cross_entropy_loss))
    tensors = in_portions(learner.weights(), 1 << 13)
    lent = lent_by_the_second(learner.weights(), 1 << 13)
    assert lent.keys() == tensors.keys()
    assert all(torch.equal(lent[name], tensor) for name, tensor in tensors.items())
    learner.export(Path(given["final"]), load_tokenizer(given["path"]))
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "gemma3_multimodal" else pytest.mark.slow)
        for name in FUSED
    ],
)
def test_sharded_weights_are_exported_whole(
    name: str, directory: Directory, tmp_path: Path
) -> None:
    """After a step of several micro-batches, none of which runs the layers of a vision tower."""
    path, final = directory(name), tmp_path / "final"
    replays = MixtureShape.of(load_config(path)) is not None
    rows = other_experts(path, ROWS) if replays else ROWS
    given = {"path": path, "final": str(final), "rows": rows}
    # A small step, so that rounding of tiny gradients does not matter.
    settings: dict[str, Any] = {"lr": 1e-5, "replays_routing": replays, "token_budget": 30}
    weights = on_workers(
        sharded_story, config(path, **settings), tmp_path, (cross_entropy_loss,), given
    )
    alone = gather_all(trained(path, tmp_path, rows, **settings).weights())
    assert weights.keys() == alone.keys()
    for key in alone:
        np.testing.assert_allclose(weights[key], alone[key].numpy(), atol=1e-4)
    assert tensor_shapes(str(final)) == tensor_shapes(path)
    saved = read_tensors(str(final), weights)
    assert all(np.array_equal(saved[key].numpy(), weights[key]) for key in weights)


_HEADS: dict[str, Any] = {"head_dim": 8}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
FUSED_CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **_MOE, **_HEADS, moe_intermediate_size=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**SIZES, **_MOE),
}


def saved(model: PreTrainedModel, directory: Path, **settings: Any) -> str:
    model.save_pretrained(directory, **settings)
    return str(directory)


def new(config: PretrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", FUSED_CONFIGS)
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_fused_experts_are_taken(name: str, max_shard_size: str, tmp_path: Path) -> None:
    path = saved(new(FUSED_CONFIGS[name]), tmp_path, max_shard_size=max_shard_size)
    assert not any("gate_up_proj" in stored for stored in tensor_shapes(path))
    check_export(path)
    as_in_memory = saved(new(FUSED_CONFIGS[name]), tmp_path / "fused", save_original_format=False)
    assert any("gate_up_proj" in stored for stored in tensor_shapes(as_in_memory))
    check_export(as_in_memory)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    path = saved(new(FUSED_CONFIGS["mixtral"]), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        check_export(path)


def test_a_checkpoint_of_the_base_model_alone_is_taken(tmp_path: Path) -> None:
    base = new(
        GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    ).base_model
    assert isinstance(base, PreTrainedModel)
    saved(base, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["GPT2Model"]
    assert "h.0.ln_1.weight" in load_file(tmp_path / "model.safetensors")
    check_export(str(tmp_path))


def test_another_shape_is_named(tmp_path: Path) -> None:
    path = saved(new(LlamaConfig(**SIZES)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(CheckpointError):
        check_export(path)
