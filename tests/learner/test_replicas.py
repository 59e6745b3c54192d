"""Two replicas of two workers take the steps of four workers that share one model (HSDP)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distill.tokenizer import load_tokenizer
from distill.weights.lending import LentByWorkers
from distill.weights.model_weights import names_of, plan_buckets
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.plan import Part
from learner.sharding import local
from tests.families import family_dir
from tests.learner.conftest import untimed
from tests.learner.test_sharding import (
    LOSSES,
    PPO,
    ROWS,
    STEPS,
    accumulated,
    config,
    save,
    teacher,
    train,
)
from tests.learner.two_workers import on_workers
from tests.weights import numbers

FIRST, LAST = STEPS[:3], [STEPS[1], *STEPS[7:]]
WORKERS = 4
FSDP = ("_allgather_base_", "_reduce_scatter_base_")


def story(learner: Learner, given: dict[str, Any]) -> dict[str, Any]:
    """Steps of several losses, a checkpoint, and one more step of several micro-batches."""
    results: dict[str, Any] = {"reference": learner.reference_logprobs(given["reference"], ROWS)}
    learner.drop_reference()
    metrics = train(learner, FIRST)
    results["half"] = save(learner, given["root"], load_tokenizer(given["reference"]))
    step = [Part(rows_D=ROWS, loss=PPO)]
    results["collectives"] = collectives_of(lambda: metrics.extend(train(learner, [step])))
    results["metrics"] = metrics
    results["prints"] = learner.fingerprints()
    results["weights"] = numbers(learner.weights())
    results["teacher"] = teacher(learner)
    results["lent"] = lent_by_all(learner)
    results["numbers"] = sum(p.numel() for p in learner.model.parameters())
    results["held"] = sum(local(p).numel() for p in learner.model.parameters())
    trained = [local(p).numel() for p in learner.model.parameters() if p.requires_grad]
    results["trained"] = [size for size in trained if size]
    results["accumulated"] = untimed(accumulated(learner))
    return results


def collectives_of(run: Callable[[], object]) -> dict[str, Any]:
    """Sizes (whole, of a shard) of this worker's gathers and scatters, and of its sums."""
    summed: list[int] = []
    all_reduce = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        summed.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch, torch.profiler.profile(record_shapes=True) as seen:
        patch.setattr(dist, "all_reduce", noted)
        run()
    made = {
        name: [
            sorted(map(math.prod, event.input_shapes[:2]), reverse=True)
            for event in seen.events() or ()
            if event.name == f"c10d::{name}"
        ]
        for name in FSDP
    }
    return made | {"summed": summed}


def lent_by_all(learner: Learner) -> list[dict[str, np.ndarray]]:
    """Weights as each worker has gathered them."""
    weights = learner.weights()
    assert isinstance(weights, LentByWorkers)
    taken: list[dict[str, np.ndarray]] = [{} for _ in range(learner.workers)]
    for bucket in plan_buckets(weights.layouts):
        lent = weights.lend(names_of(bucket), [1] * learner.workers)
        for read, [handle] in zip(taken, lent, strict=True):
            tensors: Any = handle
            read |= {name: t.numpy().copy() for name, t in tensors.unpack().items()}
    weights.take_back()
    return taken


def resumed_story(learner: Learner, given: dict[str, Any]) -> dict[str, Any]:
    learner.load_trainer_state(given["half"].path)
    metrics = train(learner, LAST)
    return {"metrics": metrics, "weights": numbers(learner.weights()), "teacher": teacher(learner)}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert mine.keys() == other.keys()
        for name in untimed(mine).keys() - {"train/padding_share"}:
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
    for what in ("weights", "teacher"):
        for name, expected in theirs[what].items():
            np.testing.assert_allclose(ours[what][name], expected, atol=1e-5, err_msg=name)


def result_of(replicas: int, family: str, root: Path, **settings: Any) -> dict[str, Any]:
    path = family_dir(root / f"{family}-{replicas}", family)
    return on_workers(
        story, config(path, token_budget=30, lr=1e-3, **settings), root / "failed", LOSSES,
        {"reference": path, "root": str(root / f"{family}-{replicas}" / "checkpoints")},
        workers=WORKERS, replicas=replicas,
    )  # fmt: skip


def assert_same_story(hybrid: dict[str, Any], plain: dict[str, Any]) -> None:
    assert_same(hybrid, plain)
    assert hybrid["accumulated"] == pytest.approx(plain["accumulated"], rel=1e-5, abs=1e-7)
    for what in ("gradient", "weights"):
        ours, theirs = (
            {n: norm for n, (_, norm) in t["prints"][what].items()} for t in (hybrid, plain)
        )
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)
    for ours_N, theirs_N in zip(hybrid["reference"], plain["reference"], strict=True):
        np.testing.assert_allclose(ours_N, theirs_N, atol=1e-5)
    for lent in hybrid["lent"]:
        assert lent.keys() == hybrid["weights"].keys()
        for name, tensor in lent.items():  # to the last bit, in both replicas
            np.testing.assert_array_equal(tensor, hybrid["weights"][name], err_msg=name)
    for results, share in ((plain, 1 / 4), (hybrid, 1 / 2)):
        assert results["held"] == pytest.approx(share * results["numbers"], rel=0.02)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def results(scratch: Path) -> dict[int, dict[str, Any]]:
    """Results of a mixture's run by number of replicas."""
    return {replicas: result_of(replicas, "qwen3_moe", scratch) for replicas in (1, 2)}


def test_two_replicas_take_the_steps_of_one(results: dict[int, dict[str, Any]]) -> None:
    assert_same_story(results[2], results[1])


def test_replicas_exchange_gradients_alone_once_a_step(results: dict[int, dict[str, Any]]) -> None:
    plain, hybrid = (results[replicas]["collectives"] for replicas in (1, 2))
    for name in FSDP:
        assert [whole for whole, _ in plain[name]] == [whole for whole, _ in hybrid[name]]
        assert {whole / shard for whole, shard in plain[name]} == {WORKERS}
        assert {whole / shard for whole, shard in hybrid[name]} == {WORKERS / 2}
    assert len(plain["_allgather_base_"]) >= 3 * len(plain["_reduce_scatter_base_"])
    assert hybrid["summed"] == [*results[2]["trained"], *plain["summed"]]
    assert set(plain["summed"]) == {1}
    # What a node of two workers sends in float32, in MB, by rings: docs/learner.md has the numbers.
    wholes = [whole for name in FSDP for whole, _ in plain[name]]
    sent = [4e-6 * 3 / 4 * sum(wholes), 4e-6 * 2 * sum(results[2]["trained"])]
    assert sent == pytest.approx([4.41, 0.87], abs=0.01)


def test_a_checkpoint_has_each_shard_once(results: dict[int, dict[str, Any]]) -> None:
    sizes = [
        sum(
            each.stat().st_size for each in (results[replicas]["half"].path / "optimizer").iterdir()
        )
        for replicas in (1, 2)
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


@pytest.fixture(scope="module")
def alone(results: dict[int, dict[str, Any]], scratch: Path) -> dict[str, Any]:
    """One worker that resumes from the checkpoint of one replica."""
    return resumed_story(Learner(resumed_config(results[1]), str(scratch / "failed")), results[1])


def resumed_config(results: dict[str, Any]) -> LearnerConfig:
    return config(results["half"].model_dir, lr=1e-3)


@pytest.mark.parametrize(
    "replicas_before, workers, replicas",
    [
        (2, 2, 1),
        pytest.param(2, 2, 2, marks=pytest.mark.slow),
        pytest.param(1, 4, 2, marks=pytest.mark.slow),
    ],
    ids=["from 2x2 to 1x2", "from 2x2 to 2x1", "from 1x4 to 2x2"],
)
def test_other_numbers_of_workers_and_replicas_resume(
    replicas_before: int,
    workers: int,
    replicas: int,
    results: dict[int, dict[str, Any]],
    alone: dict[str, Any],
    scratch: Path,
) -> None:
    before = results[replicas_before]
    resumed = on_workers(
        resumed_story, resumed_config(before), scratch / "failed", LOSSES, before,
        workers=workers, replicas=replicas,
    )  # fmt: skip
    assert_same(resumed, alone)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"lora.rank": 4}, {}], ids=["adapter", "whole"])
def test_replicas_of_a_tied_model(settings: dict[str, Any], tmp_path: Path) -> None:
    plain, hybrid = (result_of(replicas, "llama_tied", tmp_path, **settings) for replicas in (1, 2))
    assert_same_story(hybrid, plain)
