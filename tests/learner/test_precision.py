"""Precisions of computation and state, and whether they fit into memory."""

import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import learner.memory
from distill.errors import ConfigError
from distill.objective.batching import collate
from distill.settings import changed
from learner.config import LearnerConfig, LearnerSettings
from learner.forward import Forward
from learner.learner import Learner
from learner.memory import (
    FROZEN,
    TRAINED,
    check_fits,
    check_offload_fits,
    estimate_memory,
    free_bytes,
)
from learner.optimizer import build_optimizer, move_moments_to_memory, offload_moments
from learner.plan import Part
from learner.sharding import local
from learner.teachers import LocalTeachers
from tests.conftest import TinyPair
from tests.learner.conftest import IMPORTANCE_SAMPLING, NewLearner, assert_same, gradients, untimed
from tests.samples import after_context, training_row

CONTEXT_T = np.arange(40, 110, dtype=np.int32)
# Rows that share a context, which is then run once, and rows that do not.
SHARED = after_context(CONTEXT_T, (3, 9, 20))
APART = [training_row(n, 2 * n, seed=n) for n in (2, 5, 20)]


@pytest.fixture(scope="module")
def model(tiny_pair: TinyPair) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_pair.teacher, dtype=torch.float32)


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(
    new_learner: NewLearner, model: PreTrainedModel
) -> None:
    batch = collate(SHARED + APART)
    with torch.no_grad():
        exact_N = Forward(deepcopy(model))(batch).logprobs_N
        half_N = Forward(deepcopy(model), dtype=torch.bfloat16)(batch).logprobs_N
    gap = (half_N - exact_N).abs()
    assert half_N.dtype == torch.float32 and 1e-4 < gap.mean() < 0.15

    half = new_learner(dtype="bfloat16")
    before = {name: p.detach().clone() for name, p in half.model.named_parameters()}
    metrics = half.step(Part(rows_D=SHARED, loss=IMPORTANCE_SAMPLING))
    assert np.isfinite(metrics["train/loss"]) and metrics["train/grad_norm"] > 0
    for name, parameter in half.model.named_parameters():
        assert parameter.dtype == torch.float32 and not torch.equal(parameter, before[name])


def test_the_estimate_counts_every_tensor_once(tiny_pair: TinyPair, model: PreTrainedModel) -> None:
    estimate = estimate_memory(tiny_pair.teacher)
    assert estimate is not None
    assert estimate.parameters == sum(p.numel() for p in model.parameters())  # tied: once
    assert estimate.bytes == TRAINED.bytes_per_parameter * estimate.parameters
    assert "parameters" in str(estimate) and "MiB" in str(estimate)
    assert estimate_memory("org/name-on-a-hub") is None


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = estimate_memory(tiny_pair.teacher)
    assert estimate is not None and free_bytes("cpu") > estimate.bytes
    monkeypatch.setattr(learner.memory, "free_bytes", lambda device: estimate.bytes)
    check_fits(tiny_pair.teacher, "cpu")
    monkeypatch.setattr(learner.memory, "free_bytes", lambda device: estimate.bytes - 1)
    config = LearnerConfig.of(model=tiny_pair.teacher, total_steps=1, device="cpu")
    with pytest.raises(ConfigError):
        Learner(config, str(tmp_path))
    check_fits(tiny_pair.teacher, "cpu", share=0.5)  # one of two workers on two machines
    check_fits(tiny_pair.teacher, "cpu", FROZEN)
    monkeypatch.setattr(learner.memory, "free_bytes", lambda device: estimate.bytes // 4 - 1)
    with pytest.raises(ConfigError):
        Learner(changed(config, lora_rank=2), str(tmp_path))
    with pytest.raises(ConfigError):
        LocalTeachers({"": tiny_pair.teacher}, dtype=torch.float32, device="cpu")
    LocalTeachers({"": tiny_pair.teacher}, dtype=torch.bfloat16, device="cpu")


def test_main_memory_is_asked_for_the_moments_that_there_are(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = estimate_memory(tiny_pair.teacher)
    assert estimate is not None
    half = TRAINED.moments * estimate.parameters // 2
    monkeypatch.setattr("distill.main_memory.free_main_memory", lambda: half)
    check_offload_fits(tiny_pair.teacher, TRAINED, workers=2, workers_here=1)
    check_offload_fits(tiny_pair.teacher, FROZEN, workers=1, workers_here=1)  # an adapter's base
    with pytest.raises(ConfigError):
        check_offload_fits(tiny_pair.teacher, TRAINED, workers=2, workers_here=2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_take_the_same_step(new_learner: NewLearner) -> None:
    eager, compiled = new_learner(), new_learner(compile=True)
    for rows in (SHARED, APART):  # other lengths: no new code
        part = Part(rows_D=rows, loss=IMPORTANCE_SAMPLING)
        expected, made = untimed(eager.step(part)), untimed(compiled.step(part))
        assert made == pytest.approx(expected, rel=1e-4, abs=1e-6)
    [layer] = compiled.model.model.layers
    assert layer._compiled_call_impl is not None
    eager.step(part)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled.step(part)
    assert_same(gradients(compiled), gradients(eager), share=1e-3)


@pytest.mark.parametrize("option", ["offload_optimizer", "liger"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the option is for CUDA, which is absent")
def test_on_cuda_the_step_is_the_same(tiny_pair: TinyPair, tmp_path: Path, option: str) -> None:
    if option == "liger":
        pytest.importorskip("liger_kernel", reason="pip install liger-kernel")
    made = []
    for changes in ({}, {option: True}):
        settings = {"model": tiny_pair.student, "total_steps": 3, "device": "cuda"} | changes
        learner = Learner(LearnerConfig.of(**settings), str(tmp_path))
        part = Part(rows_D=SHARED, loss=IMPORTANCE_SAMPLING)
        made.append([untimed(learner.step(part)) for _ in range(3)])
        if option == "offload_optimizer" and changes:
            for moments in learner.worker.optimizer.state.values():
                assert all(moment.device.type == "cpu" for moment in moments.values())
    for plain, other in zip(*made, strict=True):
        assert other == pytest.approx(plain, rel=1e-3, abs=1e-5)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Mesh of this process alone, on the CPU."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_share_of_the_moments_does_not_go_back_to_the_device_of_its_mesh(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's meta device stands for the GPUs of a mesh.

    The test shows that nothing moves a share there from main memory, not that CUDA copies it.
    """
    model = nn.Linear(4, 3)
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, LearnerSettings(lr=1e-5))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(mesh, "_device_type", "meta")
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    back = DTensor.from_local(local(moments[0]), mesh, moments[0].placements)
    assert back.device_mesh.device_type == local(back).device.type == "meta"  # torch's own way
    move_moments_to_memory(optimizer)
    for state in optimizer.state.values():
        assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].device_mesh is mesh
        assert {local(moment).device.type for moment in state.values()} == {"cpu"}


def test_the_moments_of_a_sharded_model_are_the_same_after_their_journey(mesh: DeviceMesh) -> None:
    def train(offload: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        fully_shard(model, mesh=mesh)
        optimizer = build_optimizer(model, LearnerSettings(lr=1e-5))
        if offload:
            offload_moments(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
            optimizer.step()
        moments = [t for state in optimizer.state.values() for t in state.values()]
        return [local(tensor).detach() for tensor in [*model.parameters(), *moments]]

    for moved, stayed in zip(train(True), train(False), strict=True):
        assert torch.equal(moved, stayed)
