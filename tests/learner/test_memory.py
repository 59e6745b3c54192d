"""Memory plans: estimates against measurements, and changes of plans that do not fit."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from distill.errors import ConfigError
from distill.gpu import CONTEXT_BYTES, GIB, headroom
from distill.models.autocast import cast_grouped_products
from distill.models.shared_prefix import SharedPrefixModel
from distill.objective.settings import ObjectiveConfig
from distill.settings import changed
from learner.config import LearnerConfig, Precision
from learner.learner import Learner
from learner.memory import FROZEN, LearnerMemory, room_bytes
from learner.pass_memory import ModelSize, PassMemory, PassPlan, PassRequest
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss
from learner.process_group import WorkerGroup
from learner.teachers import FrozenModel
from tests.conftest import TinyPair
from tests.families import FAMILIES
from tests.refusals import refuses
from tests.samples import training_row

LENGTH = 192
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 256,
    "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SHAPES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, intermediate_size=384, num_key_value_heads=1, head_dim=32),
    "qwen3, wide heads": Qwen3Config(
        **SIZES, intermediate_size=320, num_key_value_heads=2, head_dim=64
    ),
    "llama": LlamaConfig(**SIZES, intermediate_size=352, num_key_value_heads=4),
    "llama, grouped heads": LlamaConfig(**SIZES, intermediate_size=448, num_key_value_heads=1),
}
_HEADS: dict[str, Any] = {"head_dim": 32}
MIXTURE = Qwen3MoeConfig(
    **SIZES, **_HEADS, num_key_value_heads=1,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96,
)  # fmt: skip
QWEN3_8B = Qwen3Config(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
# Usable bytes of an 80 GB GPU, less what stays free of it.
ROOM = int(78.06 * GIB) - headroom(int(78.06 * GIB))


def kept(config: PreTrainedConfig, layers: int, dtype: Precision, workers: int) -> int:
    """Bytes that autograd keeps of a row's activations, without weights and copies of them."""
    config.num_hidden_layers = layers
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * layers
    model = AutoModelForCausalLM.from_config(config)
    autocast = dtype == "bfloat16" and workers == 1
    cast_grouped_products("cpu")  # as the learner does
    if dtype == "bfloat16" and not autocast:
        model.to(torch.bfloat16)  # as FSDP gathers the weights
    found: dict[int, tuple[Tensor, int]] = {}

    def note(tensor: Tensor) -> Tensor:
        if LENGTH in tensor.shape:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    tokens_1T = torch.arange(LENGTH)[None] % config.vocab_size
    with (
        torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        _hidden_1TH = SharedPrefixModel(model).hidden_padded(tokens_1T)
    return sum(size for _, size in found.values())


def memory_of(
    config: PreTrainedConfig, dtype: Precision, workers: int, device: str = "cpu", **changes: Any
) -> PassMemory:
    sizes = {"parameters": 0, "query_norm": isinstance(config, Qwen3Config)} | changes
    size = ModelSize(config=config, **sizes)
    return PassMemory.of(size, dtype=dtype, device=device, workers=workers)


@pytest.mark.parametrize(
    "dtype, workers", [("float32", 1), ("bfloat16", 1), ("bfloat16", 2)], ids=str
)
@pytest.mark.parametrize("name", SHAPES)
def test_the_estimate_of_a_layer_s_activations(name: str, dtype: Precision, workers: int) -> None:
    config = SHAPES[name]
    two, four = (kept(config, layers, dtype, workers) for layers in (2, 4))
    estimate = memory_of(config, dtype, workers)
    assert estimate.in_layer == pytest.approx((four - two) / 2 / LENGTH, rel=0.03)


@pytest.mark.parametrize(
    "dtype, workers", [("float32", 1), ("bfloat16", 1), ("bfloat16", 2)], ids=str
)
def test_the_estimate_bounds_the_activations_of_experts(dtype: Precision, workers: int) -> None:
    two, four = (kept(MIXTURE, layers, dtype, workers) for layers in (2, 4))
    estimate = memory_of(MIXTURE, dtype, workers, query_norm=True)
    assert 1.0 < estimate.in_layer / ((four - two) / 2 / LENGTH) < 1.15


@cache
def parameters() -> int:
    """Parameters of Qwen3-8B."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(QWEN3_8B)
    return sum(p.numel() for p in model.parameters())


def on_gpus(
    config: PreTrainedConfig, parameters: int, workers: int, **changes: Any
) -> LearnerMemory:
    """Memory of a bfloat16 learner on this many GPUs."""
    query_norm = isinstance(config, Qwen3Config)
    size = ModelSize(config=config, parameters=parameters, query_norm=query_norm)
    return LearnerMemory(model=size, dtype="bfloat16", device="cuda", workers=workers, **changes)


def plan(workers: int, free: int, **asked: Any) -> PassPlan | None:
    """Qwen3-8B on this many GPUs with this much memory each."""
    memory = on_gpus(QWEN3_8B, parameters(), workers)
    return memory.plan(free, PassRequest(**asked))


def test_qwen3_8b_on_four_gpus_recomputes_its_layers() -> None:
    memory = memory_of(QWEN3_8B, "bfloat16", 4, device="cuda", parameters=parameters())
    assert 110 * GIB < memory.bytes(16_384, checkpointing=False) < 160 * GIB
    assert memory.bytes(16_384, checkpointing=True) < 20 * GIB
    assert plan(4, ROOM) == PassPlan(16_384, gradient_checkpointing=True)
    roomy = plan(4, 240 * GIB)
    assert roomy == PassPlan(16_384, gradient_checkpointing=False, reduces_once=True)
    assert plan(4, 80 * GIB, token_budget=2048) == PassPlan(2048, gradient_checkpointing=False)


def test_whole_gradients_are_kept_where_nothing_else_gets_less() -> None:
    """The gradients of 8B are 30.5 GiB on each worker, for any number of workers."""
    assert plan(8, ROOM) == PassPlan(16_384, gradient_checkpointing=True, reduces_once=True)
    assert plan(8, 60 * GIB) == PassPlan(16_384, gradient_checkpointing=True)
    alone = plan(1, 400 * GIB)
    assert alone is not None and not alone.reduces_once


def test_a_smaller_budget_where_recomputing_is_not_enough() -> None:
    chosen = plan(4, 43 * GIB)
    assert (
        chosen is not None
        and chosen.gradient_checkpointing
        and 1024 <= chosen.token_budget < 16_384
    )
    forbidden = plan(4, 60 * GIB, gradient_checkpointing=False)
    assert (
        forbidden is not None
        and not forbidden.gradient_checkpointing
        and forbidden.token_budget < 16_384
    )


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"token_budget": 16_384, "gradient_checkpointing": False}, "learner.token_budget"),
        ({"token_budget": 1 << 19}, "learner.token_budget"),
        ({"longest_rows": 1 << 19}, "sampling.max_new_tokens"),
    ],
)
def test_explicit_settings_that_do_not_fit_are_refused(asked: dict[str, Any], field: str) -> None:
    with refuses(ConfigError, field):
        plan(4, 80 * GIB, **asked)


QWEN3_32B = Qwen3Config(
    vocab_size=151_936, hidden_size=5120, intermediate_size=25_600, num_hidden_layers=64,
    num_attention_heads=64, num_key_value_heads=8, head_dim=128,
)  # fmt: skip
LLAMA_70B = LlamaConfig(
    vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8,
)  # fmt: skip


@pytest.mark.parametrize(
    "config, billions, workers, rows, needed_gib, remedies",
    [
        (QWEN3_32B, 32.76, 8, 17_408, 26.1, {"offload_optimizer=True", "learner.workers=16"}),
        (LLAMA_70B, 70.55, 16, 16_896, 41.7, {"learner.workers=32 offload_optimizer=True"}),
        (QWEN3_8B, 8.19, 2, 33_792, 22.1, {"offload_optimizer=True", "learner.workers=4"}),
    ],
    ids=["32B", "70B", "8B"],
)
def test_the_longest_row_must_fit_with_any_budget(
    config: PreTrainedConfig,
    billions: float,
    workers: int,
    rows: int,
    needed_gib: float,
    remedies: set[str],
) -> None:
    memory = on_gpus(config, int(billions * 1e9), workers)
    asked = PassRequest(longest_rows=rows)
    passes = memory.passes
    assert passes is not None
    assert passes.bytes(rows, checkpointing=True) / GIB == pytest.approx(needed_gib, rel=0.01)
    with refuses(ConfigError, "sampling.max_new_tokens") as refused:
        memory.plan(ROOM, asked)
    proposed = str(refused.value).partition(" Use ")[2].split(", or ")
    assert remedies <= set(proposed)
    for remedy in remedies:  # all of them hold
        settings = dict(setting.split("=") for setting in remedy.split())
        many, offloads = settings.get("learner.workers", workers), "offload_optimizer" in settings
        assert replace(memory, workers=int(many), offloads=offloads).plan(ROOM, asked)
    for text in set(proposed) - remedies:  # 70 B leave no room for a row
        shorter = PassRequest(longest_rows=int(re.sub(r"\D", "", text)))
        assert memory.plan(ROOM, shorter)


def test_one_replica_may_have_room_where_two_have_none() -> None:
    one = on_gpus(QWEN3_32B, int(32.76e9), 16)
    two, asked = replace(one, replicas=2), PassRequest(longest_rows=17_408)
    assert two.during_update == replace(one, workers=8).during_update
    with refuses(ConfigError, "sampling.max_new_tokens", names="learner.replicas=1"):
        two.plan(ROOM, asked)
    assert one.plan(ROOM, asked)


def test_a_mixtures_layer_is_whole_with_its_gradients() -> None:
    """In addition to its states, torch's tracker finds 10.3 GiB for two layers of 30B-A3B on eight
    workers at 16384 tokens, without logits; later passes have the other layers' inputs, too.
    """
    heads: dict[str, Any] = {"num_attention_heads": 32, "head_dim": 128, "num_key_value_heads": 4}
    config = Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, num_hidden_layers=48, **heads,
    )  # fmt: skip
    passes = memory_of(config, "bfloat16", 8, device="cuda", parameters=30_532_122_624)
    inputs = 46 * 2048 * 2 * 16_384
    assert 10.3 * GIB + inputs < passes.bytes(16_384, checkpointing=True) < 15 * GIB + inputs


def test_reducing_embedding_and_head_takes_memory_for_any_number_of_tokens() -> None:
    """Eight bytes per parameter of both; peaks of two gloo workers on a CPU were 8.3 bytes."""
    sharded, alone = (
        memory_of(QWEN3_8B, "bfloat16", workers, device="cuda", parameters=0) for workers in (4, 1)
    )
    both = 2 * 151_936 * 4096
    assert sharded.bytes(64, checkpointing=True) == 8 * both
    assert sharded.bytes(16_384, checkpointing=True) > 8 * both
    assert alone.bytes(64, checkpointing=True) < 3 * both


def test_an_update_leaves_some_of_a_gpu_free() -> None:
    """30B-A3B: six workers would fill 76.9 of 78.06 GiB."""
    assert [headroom(size * GIB) / GIB for size in (12, 24, 80, 140)] == [0.75, 1.5, 4, 4]
    eight, six = (on_gpus(QWEN3_8B, 30_532_122_624, workers, offloads=True) for workers in (8, 6))
    assert six.during_update / GIB == pytest.approx(76.8, abs=0.2)
    eight.require_room(ROOM, "30B-A3B")
    with pytest.raises(ConfigError):
        six.require_room(ROOM, "30B-A3B")


GPT_OSS_20B = GptOssConfig(num_hidden_layers=24, num_local_experts=32)


def test_eager_attention_holds_the_scores_of_all_pairs() -> None:
    memory = on_gpus(GPT_OSS_20B, 20_914_757_184, 8)
    passes = memory.passes
    assert passes is not None
    assert passes.scores * 8192**2 == 8 * GIB  # 64 heads, 2 bytes
    long, short = (passes.bytes(16_384, checkpointing=True, row=row) for row in (16_384, 2048))
    assert (long - short) == 5 * (32 - 4) * GIB
    kept = passes.bytes(2048, checkpointing=False) - passes.bytes(2048, checkpointing=True)
    assert kept > 23 * 2 * GIB / 2, "two tensors of half a GiB of every layer but one"
    plan = memory.plan(ROOM, PassRequest(longest_rows=4096))
    assert plan is not None and plan.gradient_checkpointing and plan.token_budget == 8192
    with refuses(ConfigError, "sampling.max_new_tokens"):
        replace(memory, offloads=True).plan(ROOM, PassRequest(longest_rows=16_384))
    assert memory_of(QWEN3_8B, "bfloat16", 2).scores == 0
    capped = memory_of(FAMILIES["gemma2"].config(), "bfloat16", 2)
    assert capped.scores == 4 * 4, "a softmax in float32, of four heads"


def test_a_learner_short_of_memory_recomputes_and_comes_to_the_same(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [training_row(5, 40, seed=seed) for seed in range(4)]
    config = LearnerConfig.of(model=tiny_pair.teacher, total_steps=1, device="cpu")
    plenty = Learner(config, str(tmp_path))
    passes = plenty.worker.passes
    assert passes == PassPlan(4096, gradient_checkpointing=False)
    size = ModelSize.of(tiny_pair.teacher)
    assert size is not None
    memory = LearnerMemory(model=size, dtype="float32", device="cpu")
    one_pass = memory.passes
    assert one_pass is not None
    room = memory.held + one_pass.bytes(2048, checkpointing=True)
    monkeypatch.setattr("learner.memory.free_bytes", lambda device: room)
    short = Learner(config, str(tmp_path))
    assert short.worker.passes == PassPlan(2048, gradient_checkpointing=True)
    assert any(getattr(m, "gradient_checkpointing", False) for m in short.model.modules())
    loss = PolicyObjectiveLoss(objective=ObjectiveConfig())
    ours, theirs = (made.step(Part(rows_D=rows, loss=loss)) for made in (short, plenty))
    for name in ("train/loss", "train/grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
    with refuses(ConfigError, "learner.token_budget"):
        Learner(changed(config, token_budget=4096), str(tmp_path))


def test_workers_share_the_memory_of_a_model_and_its_teachers() -> None:
    quarter = on_gpus(QWEN3_8B, 8 << 30, 4, offloads=True)
    assert quarter.held == 32 * GIB, "16 bytes a parameter, a quarter of them"
    assert quarter.during_update == 33 * GIB and quarter.outside_passes == 17 * GIB
    assert quarter.between_steps == 9 * GIB
    third = on_gpus(QWEN3_8B, 9, 3, holding=FROZEN, frozen=5)
    assert third.held == 12 + 2, "rounded up"


def test_a_frozen_model_needs_no_more_than_its_room(tiny_pair: TinyPair) -> None:
    load = partial(FrozenModel, tiny_pair.teacher, WorkerGroup(None, "cpu"), dtype=torch.float32)
    needed = 4 * sum(p.numel() for p in load(device="cpu").model.parameters())
    load(device="cpu", room=needed)
    with refuses(ConfigError, None):
        load(device="cpu", room=needed - 1)


def test_a_shared_gpu_is_shared_before_the_others_have_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.memory.gpu_bytes", lambda: 79 * GIB)
    assert room_bytes("cuda", 0.2) == 15 * GIB - CONTEXT_BYTES, "4 GiB of 79 stay free"
    assert room_bytes("cuda", 0.2, reserved=3 * GIB) == 12 * GIB - CONTEXT_BYTES
    assert room_bytes("cuda", 0.2, reserved=20 * GIB) == 0
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 2 * GIB)  # a teacher's copy
    assert room_bytes("cuda", 0.2, reserved=3 * GIB) == 10 * GIB - CONTEXT_BYTES
