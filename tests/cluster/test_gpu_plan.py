"""The plan of GPU memory for a student of 8 B and a teacher of 32 B, with sparse files."""

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

from cluster.config.files import read_settings
from cluster.config.opd import OpdConfig
from cluster.config.recipes import make
from cluster.placement.device_choice import with_device
from cluster.placement.engines import RunEngines, by_turns
from cluster.placement.layout import describe_layout
from cluster.placement.roles import placed_roles
from distill.errors import ConfigError
from distill.gpu import GIB, part_bytes
from distill.settings import changed
from distill.stops import StopTokens
from tests.refusals import refuses

Opd = Callable[..., OpdConfig]
PRESET = Path(__file__).parents[2] / "examples/configs/opd-benchmark.yaml"


def hollow(directory: Path, kind: type = Qwen3Config, **shape: Any) -> str:
    """A checkpoint with true config, names and shapes in sparse files."""
    common = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
    config = kind(**common | {"num_key_value_heads": 8} | shape)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    directory.mkdir()
    config.save_pretrained(directory)
    for i, names in enumerate(batched(state, 32)):
        header, end = {}, 0
        for name in names:
            offsets = [end, end := end + state[name].numel() * 2]
            header[name] = {
                "dtype": "BF16", "shape": list(state[name].shape), "data_offsets": offsets,
            }  # fmt: skip
        text = json.dumps(header).encode()
        with open(directory / f"model-{i}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    return str(directory)


def batched(names: Iterable[str], size: int) -> Iterator[list[str]]:
    listed = list(names)
    return (listed[i : i + size] for i in range(0, len(listed), size))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("hollow")
    return {
        "student": hollow(
            root / "8b", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
            num_attention_heads=32,
        ),
        "teacher": hollow(
            root / "32b", hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
            num_attention_heads=64,
        ),
    }  # fmt: skip


@pytest.fixture
def eight(opd: Opd, pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Opd:
    """eight(**changes): learner and policy share eight GPUs, a teacher has four others."""
    monkeypatch.setattr("actors.config.sglang_installed", lambda: True)
    monkeypatch.setattr("actors.config.require_sglang", lambda: None)

    def settings(**changes: object) -> OpdConfig:
        return opd(
            **pair
            | {
                "device": "cuda", "gpu_memory_gib": 79.0, "engine": "sglang", "learner_workers": 8,
                "policy_engines": 8, "colocate": "sleep", "gpus_per_actor": 0.5,
                "teacher_server_flags": "--tp-size 4",
            }
            | changes
        )  # fmt: skip

    return settings


def line(config: OpdConfig, role: str) -> str:
    lines = describe_layout(config).splitlines()
    [found] = [line for line in lines if line.startswith(f"  {role} ")]
    return found


def numbers(text: str, *names: str) -> list[float]:
    return [float(re.search(rf"{name} (\d+\.\d)", text)[1]) for name in names]  # pyright: ignore


@pytest.mark.parametrize(("dtype", "held"), [("bfloat16", 1.4), ("float32", 4.3)])
def test_every_worker_has_the_whole_head_of_a_served_teacher(
    eight: Opd, pair: dict[str, str], tmp_path: Path, dtype: str, held: float
) -> None:
    """151,936 x 5,120, in the dtype of the checkpoint."""
    head, teacher = tmp_path / "head", Path(pair["teacher"])
    head.mkdir()
    for path in teacher.glob("*.safetensors"):  # a copy would not be sparse
        (head / path.name).symlink_to(path)
    config = json.loads((teacher / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    learner = line(eight(**{"estimator": "full", "teacher.head": str(head)}), "learner")
    assert numbers(learner, "weights", "copies of teachers") == [3.8, held]


def test_memory_depends_on_the_workers_of_a_replica(eight: Opd) -> None:
    alone = eight(estimator="full")
    twice = eight(estimator="full", learner_workers=16, learner_replicas=2, policy_engines=16)
    assert line(twice, "learner") == line(alone, "learner")


def test_workers_share_the_copy_of_a_teacher(eight: Opd) -> None:
    """32.8 B parameters of 2 bytes on eight GPUs, which reduce the memory of awake engines too."""
    config = eight(estimator="full")
    learner = line(config, "learner")
    assert numbers(learner, "weights", "copies of teachers", "gradients") == [3.8, 7.6, 3.8]
    assert " of 61.4" in line(config, "policy")  # 69.0 without the copy
    [row] = [each for each in describe_layout(config).splitlines() if each.startswith("learner ")]
    assert "22.9 GiB" in row  # 15.3 without
    with pytest.raises(ConfigError):
        describe_layout(eight(estimator="full", learner_workers=1, policy_engines=1))


def test_teachers_that_take_turns_have_whole_gpus_less_the_memory_of_sleepers(
    eight: Opd, pair: dict[str, str]
) -> None:
    models = {f"teachers.{name}.model": pair["teacher"] for name in ("a", "b", "c")}
    config = eight(teacher=None, **models, **{"teacher.gpus": "shared"})
    for name in ("a", "b", "c"):
        planned = line(config, f"teacher {name}")
        # 32.8 B parameters of 2 bytes on four GPUs; 4 GiB stay free, and sleepers keep 2 x 3.
        assert numbers(planned, "weights") == [15.3] and " of 69.0" in planned
        assert "15.3 of main memory" in planned
    assert "needs    28 CPU, 12 GPU" in describe_layout(config).splitlines()


def test_learner_policy_and_teacher_may_take_turns_on_the_same_gpus(eight: Opd) -> None:
    two = {"policy_server_flags": "--tp-size 2", "teacher_server_flags": "--tp-size 2"}
    config = eight(policy_engines=4, **two, **{"teacher.engines": 4, "teacher.gpus": "policy"})
    checked, _ = with_device(changed(config, dry_run=True))
    assert checked.cluster.device == "cuda"
    learner = line(config, "learner")
    # Of 79 GiB, 4 stay free, and two engines that sleep keep 3 each.
    assert " of 69.0; " in learner and learner.endswith(" at rest")
    [resting] = numbers(learner.split(";")[1], "")
    for role, weights in (("policy", 7.6), ("teacher", 30.5)):
        planned = line(config, role)
        assert numbers(planned, "weights") == [weights]
        [room] = numbers(planned.split("=")[1], "of")
        # One engine sleeps, and the learner rests; a bucket of 1.2 GiB may be lent.
        assert room == pytest.approx(79 - 4 - 3 - resting - 1.2, abs=0.11)
    assert "needs    24 CPU, 8 GPU" in describe_layout(config).splitlines()
    worker = by_turns(config.policy_learner(None, StopTokens(ids=(1,))), config)
    assert part_bytes(79 * GIB, worker.gpu_part, worker.gpu_taken) == 69 * GIB
    with pytest.raises(ConfigError):
        describe_layout(changed(config, gpu_memory_gib=40.0))


def test_sleeping_engines_leave_the_gpu_to_the_learner(eight: Opd) -> None:
    config = eight()
    learner, policy = line(config, "learner"), line(config, "policy")
    # 8.19 B parameters: 4 bytes each of weights and gradients on eight GPUs, 8 of moments.
    assert numbers(learner, "weights", "gradients", "moments") == [3.8, 3.8, 7.6]
    assert "main memory" in learner and learner.endswith("of 72.0")
    assert numbers(policy, "weights") == [15.3] and policy.endswith("; 3.0 asleep")
    # Less the weights, context and lent bucket of the resting learner, and 4 GiB that stay free.
    assert " of 69.0" in policy
    assert "1.2 GiB more on each GPU" in describe_layout(config)
    by_memory = eight(weights="shared_memory")
    assert " of 70.2" in line(by_memory, "policy")
    assert "122 GiB; by shared_memory" in describe_layout(by_memory)
    tokens = int(re.search(r"\((\d+) tokens\)", policy)[1])  # pyright: ignore
    assert 300_000 < tokens < 400_000
    engine = RunEngines(config).policy(config.model.path, "")
    assert engine.sleeps and engine.gpu_share == 1 and engine.gpu_reserved > 4 * GIB
    assert not RunEngines(config).evaluation(config.model.path, "").sleeps
    alone = config.policy_learner(None, StopTokens(ids=(1,)))
    worker = by_turns(alone, config)
    assert worker.learner.offload_optimizer
    assert part_bytes(79 * GIB, worker.gpu_part, worker.gpu_taken) == 72 * GIB


def test_actors_may_take_turns_on_two_thirds_of_a_gpu(eight: Opd, tmp_path: Path) -> None:
    small = hollow(
        tmp_path / "small", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16,
    )  # fmt: skip
    config = eight(
        student=small, teacher=small, gpus_per_actor=1 / 3, learner_workers=1, policy_engines=1,
        teacher_server_flags="",
    )  # fmt: skip
    learner, policy = line(config, "learner"), line(config, "policy")
    assert RunEngines(config).policy(config.model.path, "").gpu_share == pytest.approx(2 / 3)
    shared = config.policy_learner(None, StopTokens(ids=(1,)))
    assert part_bytes(79 * GIB, shared.gpu_part, shared.gpu_taken) == 25 * GIB
    assert learner.endswith("of 47.0"), "two thirds of 76 GiB, less 3 of the sleeping engine"
    assert float(re.findall(r" of ([0-9.]+);", policy)[0]) < 50


def test_an_engine_of_two_gpus_shares_those_of_two_workers(eight: Opd) -> None:
    config = eight(policy_server_flags="--tp-size 2", policy_engines=4)
    placed = {role.name: role for role in placed_roles(config)}
    policy, learner = placed["policy"], placed["learner"]
    assert (policy.count, policy.span, policy.needed) == (4, 2, {"CPU": 1, "GPU": 0.5})
    assert (learner.count, learner.span, learner.needed) == (8, 1, {"CPU": 1, "GPU": 0.5})
    assert placed["teacher"].span == 1
    # Half of the weights on each GPU, and as much room as for an engine of one GPU.
    assert numbers(line(config, "policy"), "weights") == [7.6]
    assert line(config, "policy").split(" of ")[1] == line(eight(), "policy").split(" of ")[1]
    assert re.search(r"^needs +17 CPU, 12 GPU$", describe_layout(config), re.MULTILINE)
    for weights in ("auto", "ipc"):
        checked, _ = with_device(changed(config, weights=weights, dry_run=True))
        assert checked.cluster.device == "cuda"


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"teacher_server_flags": ""}, "32b"),
        ({"gpu_memory_gib": 24.0}, "8b"),
        ({"learner_workers": 1, "policy_engines": 1}, "123.1 GiB"),
        ({"token_budget": 1 << 20, "gradient_checkpointing": True}, "token_budget=1048576"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(eight: Opd, changes: dict, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        describe_layout(eight(**changes))
    assert named in str(refused.value)


def test_the_longest_row_is_planned_for(eight: Opd) -> None:
    planned = line(eight(), "learner")
    assert "passes 14.2 (16384 tokens recomputed) + whole gradients 30.5 " in planned
    assert "whole gradients" not in line(eight(gpu_memory_gib=60.0), "learner")
    alone = eight(colocate="no", gpus_per_actor=1.0, learner_workers=2, policy_engines=1)
    describe_layout(alone, longest_rows=8192)
    with refuses(ConfigError, "sampling.max_new_tokens"):
        describe_layout(alone, longest_rows=32_768)
    describe_layout(changed(alone, offload_optimizer=True), longest_rows=32_768)


def test_the_plan_without_a_known_gpu_has_no_sizes(
    eight: Opd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.placement.gpu_plan.gpu_bytes", lambda: None)
    config = eight(gpu_memory_gib=None)
    [memory] = [each for each in describe_layout(config).splitlines() if each.startswith("memory ")]
    assert "gpu_memory_gib=" in memory and "GiB" not in memory
    assert "cache (147456 bytes a token)" in line(config, "policy")


def test_the_plan_names_missing_kernels_for_linear_attention(
    eight: Opd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = hollow(
        tmp_path / "hybrid", Qwen3NextConfig, hidden_size=64, intermediate_size=64,
        num_hidden_layers=4, num_attention_heads=4, num_experts=4, moe_intermediate_size=32,
    )  # fmt: skip
    config = eight(student=hybrid, colocate="no", gpus_per_actor=1.0)
    missing = "isotherm[linear-attention]"
    for installed in (False, True):
        monkeypatch.setattr(
            "cluster.placement.gpu_plan.has_linear_attention_kernels", lambda it=installed: it
        )
        assert (missing in describe_layout(config)) is not installed
    assert "that SGLang sizes" in line(config, "policy")
    monkeypatch.setattr("cluster.placement.gpu_plan.has_linear_attention_kernels", lambda: False)
    assert missing not in describe_layout(eight())


@pytest.mark.usefixtures("eight")
def test_the_preset_of_the_benchmark_fits_eight_gpus_of_80_gb(
    pair: dict[str, str], tmp_path: Path
) -> None:
    """Qwen3-8B, and teachers of 32 B and 30 B (3 B active) by turns: 2 + 4 + 2 GPUs."""
    mixture = hollow(
        tmp_path / "30b", Qwen3MoeConfig, hidden_size=2048, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4,
    )  # fmt: skip
    settings = dict(read_settings(str(PRESET)))
    del settings["recipe"]
    models = {"math": {"model": pair["teacher"]}, "code": {"model": mixture}}
    given = {"student": pair["student"], "teachers": models, "gpu_memory_gib": 78.06}
    config = make("opd", **settings | given | {"out": str(tmp_path / "out")})
    planned = describe_layout(config, longest_rows=1024 + 16_384)
    assert re.search(r"^needs +10 CPU, 8 GPU$", planned, re.MULTILINE)
    assert all(line in planned for line in written_plan()), planned


def written_plan() -> list[str]:
    """Lines of the memory plan in docs/benchmarks/yardstick.md."""
    page = (PRESET.parents[2] / "docs/benchmarks/yardstick.md").read_text().splitlines()
    first = next(i for i, line in enumerate(page) if line.startswith("    memory "))
    return [line.removeprefix("    ") for line in page[first : first + 5]]
