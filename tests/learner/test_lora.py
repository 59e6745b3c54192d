"""LoRA: only the adapter is trained; merged, disabled and saved states agree."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from distill.errors import CheckpointError, ConfigError
from distill.models.loading import load_causal_lm
from distill.objective.batching import TrainingRow, collate
from distill.objective.settings import ObjectiveConfig
from distill.weights.model_weights import TensorLayout
from learner.config import LoraSettings
from learner.export import RoundedUpdate, plain_weights
from learner.forward import Forward
from learner.lora import adapter_off, adapter_tensors, add_lora, check_lora, save_adapter
from tests.conftest import TinyPair
from tests.learner.conftest import NewLoop, World, naive_logprobs
from tests.refusals import refuses
from tests.samples import after_context, group

SETTINGS = LoraSettings(rank=3, alpha=7.0)


# A context long enough to be worth sharing; and contexts of which no two are alike.
CONTEXT_T = np.arange(40, 75, dtype=np.int32)
SHARED = after_context(CONTEXT_T, (3, 9, 5, 12), temperature=0.6)
APART = [row for n in (3, 9, 5, 12) for row in after_context(CONTEXT_T + n, [n], temperature=0.6)]


@pytest.fixture
def base(tiny_pair: TinyPair) -> str:
    """Checkpoint of two layers with tied embeddings."""
    return tiny_pair.teacher


def load(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_causal_lm(path, dtype=dtype, device="cpu").eval()


def trained_lora(
    base: str, settings: LoraSettings = SETTINGS, dtype: torch.dtype = torch.float32
) -> PeftModel:
    """Model with an adapter that moves every log-prob, as after training."""
    torch.manual_seed(5)
    lora = add_lora(load(base, dtype), settings)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.05)
    return lora


@pytest.fixture
def lora(base: str) -> PeftModel:
    return trained_lora(base)


@pytest.fixture
def saved(lora: PeftModel, tmp_path: Path) -> str:
    save_adapter(tmp_path / "adapter", lora, adapter_tensors(lora))
    return str(tmp_path / "adapter")


def plain(lora: PeftModel) -> PreTrainedModel:
    """Model that holds the adapter's layers."""
    model = lora.get_base_model()
    assert isinstance(model, PreTrainedModel)
    return model


@torch.no_grad()
def logprobs(model: PreTrainedModel, rows: list[TrainingRow] = SHARED) -> Tensor:
    return torch.cat([naive_logprobs(model, row) for row in rows])


def merged_model(lora: PeftModel, base: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' own model of the merged weights."""
    model = load(base, dtype)
    tensors = {name: lazy.make(None).clone() for name, lazy in plain_weights(plain(lora)).items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, "only the tied head is left out"
    return model


def adapter_gradients(lora: PeftModel, *, checkpointing: bool = False) -> dict[str, Tensor]:
    forward = Forward(plain(lora), gradient_checkpointing=checkpointing)
    logprobs_N = forward(collate(SHARED)).logprobs_N
    (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).sum().backward()
    return {name: p.grad for name, p in lora.named_parameters() if p.grad is not None}


def test_gradients_reach_the_adapter_of_every_linear_and_nothing_else(
    lora: PeftModel, base: str
) -> None:
    trained = {name: p for name, p in lora.named_parameters() if p.requires_grad}
    linears = [
        name
        for name, module in load(base).named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    assert len(linears) == 2 * 7
    assert trained.keys() == {
        f"base_model.model.{name}.lora_{part}.default.weight" for name in linears for part in "AB"
    }
    gradients = adapter_gradients(lora)
    assert gradients.keys() == trained.keys()
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def test_checkpointing_leaves_the_gradients_as_they_are(lora: PeftModel, base: str) -> None:
    """No input of a recomputed layer needs a gradient if embeddings are frozen."""
    expected = adapter_gradients(lora)
    other = trained_lora(base)
    gradients = adapter_gradients(other, checkpointing=True)
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name], atol=1e-5 * largest, rtol=0)


def test_a_fresh_adapter_changes_no_value_and_is_drawn_by_the_seed(base: str) -> None:
    def fresh(seed: int) -> PeftModel:
        torch.manual_seed(seed)
        return add_lora(load(base), LoraSettings(rank=3))

    lora = fresh(3)
    assert torch.equal(logprobs(plain(lora)), logprobs(load(base)))
    first, again, other = (adapter_tensors(made) for made in (lora, fresh(3), fresh(4)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if ".lora_A" in name)
    assert lora.peft_config["default"].lora_alpha == 6  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("rows", [SHARED, APART], ids=["shared", "apart"])
def test_log_probs_with_the_adapter_are_those_of_the_merged_model(
    lora: PeftModel, base: str, rows: list[TrainingRow]
) -> None:
    expected_N = logprobs(merged_model(lora, base), rows)
    forward = Forward(plain(lora))
    positions: list[int] = []
    plain(lora).get_input_embeddings().register_forward_hook(
        lambda _module, inputs, _output: positions.append(inputs[0].numel())
    )
    with torch.no_grad():
        made_N = forward(collate(rows)).logprobs_N
    assert_close(made_N, expected_N, atol=1e-5, rtol=1.3e-6)  # of log-probs down to -15
    assert (sum(positions) < sum(map(len, rows))) == (rows is SHARED)


def test_merging_is_lazy_and_keeps_the_base(lora: PeftModel, base: str) -> None:
    before = {name: tensor.clone() for name, tensor in lora.state_dict().items()}
    expected = {
        name: TensorLayout.of(name, tensor) for name, tensor in load(base).state_dict().items()
    }
    del expected["lm_head.weight"]
    made = plain_weights(plain(lora))
    assert {name: lazy.layout for name, lazy in made.items()} == expected
    norm = made["model.norm.weight"].make(None)
    assert norm.data_ptr() == plain(lora).get_parameter("model.norm.weight").data_ptr()
    assert not any(lazy.make(None).requires_grad for lazy in made.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in lora.state_dict().items())
    # Later tensors are of the weights at that time.
    query = made["model.layers.1.self_attn.q_proj.weight"]
    earlier = query.make(None)
    with torch.no_grad():
        lora.get_parameter(
            "base_model.model.model.layers.1.self_attn.q_proj.lora_B.default.weight"
        ).zero_()
    assert not torch.equal(query.make(None), earlier)
    assert torch.equal(query.make(None), load(base).get_parameter(query.layout.name))


def test_a_base_of_less_precision_has_a_float32_adapter_and_merges_in_its_own(base: str) -> None:
    lora = add_lora(load(base, torch.bfloat16), SETTINGS)
    assert {tensor.dtype for tensor in adapter_tensors(lora).values()} == {torch.float32}
    layer = plain(lora).get_submodule("model.layers.0.mlp.up_proj")
    weight = layer.get_parameter("base_layer.weight").float()
    with torch.no_grad():
        up = layer.get_parameter("lora_B.default.weight").normal_()
        delta = 7 / 3 * up @ layer.get_parameter("lora_A.default.weight")
    made = plain_weights(plain(lora))["model.layers.0.mlp.up_proj.weight"]
    assert made.layout == TensorLayout.of(made.layout.name, weight.bfloat16())
    assert torch.equal(made.make(None), (weight + delta).bfloat16())


def test_a_disabled_adapter_is_the_base_and_is_enabled_after_a_failure(
    lora: PeftModel, base: str
) -> None:
    forward = Forward(plain(lora))
    batch = collate(SHARED)
    with torch.no_grad():
        expected_N = Forward(load(base))(batch).logprobs_N
        on_N = forward(batch).logprobs_N
    trained = {name for name, p in lora.named_parameters() if p.requires_grad}
    with pytest.raises(RuntimeError), adapter_off(lora):
        with torch.no_grad():
            assert torch.equal(forward(batch).logprobs_N, expected_N)
        assert {name for name, p in lora.named_parameters() if p.requires_grad} == trained
        raise RuntimeError("inside")
    with torch.no_grad():
        assert torch.equal(forward(batch).logprobs_N, on_N)
    assert not torch.equal(on_N, expected_N)
    assert {name for name, p in lora.named_parameters() if p.requires_grad} == trained


def test_peft_reads_a_saved_adapter(lora: PeftModel, base: str, saved: str) -> None:
    assert {path.name for path in Path(saved).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    theirs = PeftModel.from_pretrained(load(base), saved)
    assert torch.equal(logprobs(plain(theirs)), logprobs(plain(lora)))
    config = json.loads((Path(saved) / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base and config["r"] == 3
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_training_continues_from_a_saved_adapter(lora: PeftModel, base: str, saved: str) -> None:
    settings = LoraSettings(adapter=saved)
    check_lora(settings, base)
    continued = add_lora(load(base), settings)
    assert torch.equal(logprobs(plain(continued).eval()), logprobs(plain(lora)))
    trained = {name for name, p in continued.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in lora.named_parameters() if p.requires_grad}


def test_an_adapter_that_peft_saved_is_read(base: str, tmp_path: Path) -> None:
    """Another scale rule, other ranks for some layers, and targets by a pattern."""
    config = LoraConfig(
        r=4, lora_alpha=5, use_rslora=True, init_lora_weights="gaussian",
        target_modules=r".*\.(q_proj|up_proj)", rank_pattern={"layers.1.mlp.up_proj": 2},
        lora_dropout=0.5,
    )  # fmt: skip
    theirs = get_peft_model(load(base), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.05)
    theirs.save_pretrained(str(tmp_path))
    settings = LoraSettings(adapter=str(tmp_path))
    check_lora(settings, base)
    ours = add_lora(load(base), settings)
    assert torch.equal(logprobs(plain(ours)), logprobs(plain(theirs).eval()))
    assert_close(logprobs(merged_model(ours, base)), logprobs(plain(ours)), atol=1e-5, rtol=1.3e-6)
    assert not any(isinstance(module, nn.Dropout) for module in ours.modules())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("targets", ["q_proj,qproj", "embed_tokens", "_proj", "q_proj,lm_head"])
def test_targets_that_the_model_cannot_have(base: str, targets: str) -> None:
    with refuses(ConfigError, "lora.targets"):
        check_lora(LoraSettings(rank=2, targets=targets), base)


def test_a_rank_above_the_model_s_width_is_refused(base: str) -> None:
    width = AutoConfig.from_pretrained(base).hidden_size
    check_lora(LoraSettings(rank=width), base)
    with refuses(ConfigError, "lora.rank"):
        check_lora(LoraSettings(rank=width + 1), base)


def test_a_model_without_linears(tmp_path: Path) -> None:
    """GPT-2's matrices are transposed, in layers of another type."""
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError):
        check_lora(SETTINGS, str(tmp_path))


def test_an_adapter_of_another_base_is_refused_before_weights_are_loaded(
    saved: str, base: str, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr("learner.lora.load_file", fail)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    check_lora(LoraSettings(adapter=saved), base)
    assert torch.equal(torch.get_rng_state(), state)
    with refuses(ConfigError, "lora.adapter", names="layers.0.self_attn.q_proj.lora_A"):
        check_lora(LoraSettings(adapter=saved), tiny_pair.student)


def edit_config(saved: str, **changes: object) -> None:
    path = Path(saved) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut_short(saved: str) -> None:
    path = Path(saved) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled_alone(saved: str) -> None:
    path = Path(saved) / "adapter_model.safetensors"
    torch.save(load_file(path), Path(saved) / "adapter_model.bin")
    path.unlink()


def of_another_method(saved: str) -> None:
    shutil.rmtree(saved)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1))
    get_peft_model(model, IA3Config()).save_pretrained(saved)


Spoil = Callable[[str], object]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda s: Path(s, "adapter_config.json").unlink(), CheckpointError),
        (lambda s: Path(s, "adapter_config.json").write_text("[]"), CheckpointError),
        (shutil.rmtree, CheckpointError),
        (cut_short, CheckpointError),
        (pickled_alone, CheckpointError),
        (of_another_method, ConfigError),
        (lambda s: edit_config(s, use_dora=True), ConfigError),
        (lambda s: edit_config(s, bias="all"), ConfigError),
        (lambda s: edit_config(s, init_lora_weights="pissa"), ConfigError),
        (lambda s: edit_config(s, modules_to_save=["lm_head"]), ConfigError),
        (lambda s: edit_config(s, of_tomorrow=2), ConfigError),
        (lambda s: edit_config(s, r=2), ConfigError),
        (lambda s: edit_config(s, r="three"), ConfigError),
        (lambda s: edit_config(s, target_modules=["query"]), ConfigError),
        (lambda s: edit_config(s, target_modules=["q_proj"]), ConfigError),
        (lambda s: edit_config(s, target_modules=["embed_tokens"]), ConfigError),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_adapters_that_are_refused(
    saved: str, base: str, spoil: Spoil, error: type[Exception]
) -> None:
    spoil(saved)
    settings = LoraSettings(adapter=saved)
    for attempt in (lambda: check_lora(settings, base), lambda: add_lora(load(base), settings)):
        with pytest.raises(error):
            attempt()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("off_first", [False, True])
def test_sharded_weights_are_made_whole(lora: PeftModel, base: str, off_first: bool) -> None:
    """Gradients arrive, even if the first pass was without the adapter."""
    expected = {name: lazy.make(None).clone() for name, lazy in plain_weights(plain(lora)).items()}
    adapter = {name: tensor.clone() for name, tensor in adapter_tensors(lora).items()}
    gradients = adapter_gradients(trained_lora(base))
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in plain(lora).get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(plain(lora), mesh=mesh, mp_policy=policy)
    assert all(isinstance(parameter, DTensor) for parameter in lora.parameters())
    tokens_BT = collate(SHARED).tokens_BT
    if off_first:
        with torch.no_grad(), adapter_off(lora):
            plain(lora)(input_ids=tokens_BT)
    made = plain_weights(plain(lora))
    assert made.keys() == expected.keys()
    for name, lazy in made.items():
        tensor = lazy.make(None)
        assert lazy.layout == TensorLayout.of(name, expected[name])
        assert type(tensor) is Tensor and torch.equal(tensor, expected[name])
    for name, tensor in adapter_tensors(lora).items():
        assert type(tensor) is Tensor and torch.equal(tensor, adapter[name])
    plain(lora)(input_ids=tokens_BT).logits.square().mean().backward()
    arrived = {name: p.grad.dtype for name, p in lora.named_parameters() if p.grad is not None}
    assert arrived == dict.fromkeys(gradients, torch.float32)


# Mixtures of experts

MIXTURE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = MIXTURE | {
    "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
@pytest.mark.parametrize(
    ("config", "adapted"),
    [
        (Qwen3MoeConfig(**MIXTURE), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (
            Qwen3NextConfig(**QWEN3_NEXT),
            {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj",
             "shared_expert_gate"},
        ),
    ],
    ids=["qwen3_moe", "qwen3_next"],
)  # fmt: skip
def test_experts_of_a_mixture_are_not_adapted_and_a_warning_is_logged(
    config: PreTrainedConfig, adapted: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config.save_pretrained(tmp_path)
    share = check_lora(LoraSettings(rank=2), str(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    chosen = [m.weight.numel() for n, m in linears.items() if n.rpartition(".")[2] in adapted]
    assert share == pytest.approx(sum(chosen) / sum(p.numel() for p in model.parameters()))
    [warning] = [line for line in caplog.records if line.name == "learner.lora"]
    assert f"{100 * share:.1f} %" in warning.getMessage()
    if isinstance(config, Qwen3NextConfig):
        with refuses(ConfigError, "lora.targets"):
            check_lora(LoraSettings(rank=2, targets="up_proj,gate_proj"), str(tmp_path))


# Loss by rounding


def on_the_grid(base: str, directory: Path) -> str:
    """The checkpoint in bfloat16, as on hubs."""
    load(base, torch.bfloat16).save_pretrained(directory)
    return str(directory)


def naive_lost_share(before: dict[str, Tensor], merged: dict[str, Tensor]) -> float:
    """Lost share by sums over whole models, in float64."""
    arrived = wanted = 0.0
    for name, weight in before.items():
        delta = merged[name].double() - weight.double()
        rounded = merged[name].bfloat16().double() - weight.bfloat16().double()
        arrived += float((delta * rounded).sum())
        wanted += float((delta * delta).sum())
    return 1 - arrived / wanted


@pytest.mark.parametrize("std", [1e-5, 3e-4, 0.05])
def test_the_lost_share_equals_that_of_the_whole_update(
    base: str, tmp_path: Path, std: float
) -> None:
    start = on_the_grid(base, tmp_path / "grid")
    lora, rounded = trained_lora(start, LoraSettings(rank=4)), RoundedUpdate()
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if ".lora_B." in name:
                parameter.mul_(std / 0.05)
    made = plain_weights(plain(lora), rounded)
    for _ in range(2):  # a repeated push counts once
        for lazy in made.values():
            lazy.make(torch.bfloat16)
    merged = {name: lazy.make(None).clone() for name, lazy in made.items()}
    before = {name: t for name, t in load(start).state_dict().items() if name in merged}
    expected = naive_lost_share(before, merged)
    assert rounded.lost_share == pytest.approx(expected, abs=1e-4)
    low, high = {1e-5: (0.9, 1.0), 3e-4: (0.05, 0.95), 0.05: (-0.01, 0.01)}[std]
    assert low <= expected <= high


def take_pushes(new_loop: NewLoop, start: str, lr: float, **settings: Any) -> list[float]:
    loop = new_loop(
        World([group(i) for i in range(9)], per_step=1), ObjectiveConfig(reward_coef=1.0),
        learner={"model": start, "lora_rank": 16, "lr": lr, "lr_schedule": "constant"}, **settings,
    )  # fmt: skip
    return [loop.step()["push/lost_share"] for _ in range(9)]


def test_pushes_report_the_lost_share(new_loop: NewLoop, base: str, tmp_path: Path) -> None:
    start = on_the_grid(base, tmp_path / "grid")
    slow = take_pushes(new_loop, start, 1e-6, push_dtype=torch.bfloat16)
    assert min(slow) > 0.5 and slow[0] > 0.9
    quick = take_pushes(new_loop, start, 1e-3, push_dtype=torch.bfloat16)
    assert quick[-1] < 0.1 < quick[0] + 0.1
    assert set(take_pushes(new_loop, start, 1e-6)) == {0.0}
