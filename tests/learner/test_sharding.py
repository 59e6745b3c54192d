"""Two workers have the losses, weights and checkpoints of one process."""

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.embedded.engine import EmbeddedEngine
from cluster.handles import calls
from cluster.handles.local_actor import LocalActor
from cluster.weights.publisher import Publisher
from cluster.weights.transport import PushSettings
from distill.engine import WeightSource
from distill.errors import CheckpointError, EngineError, NonFiniteError
from distill.gpu import CONTEXT_BYTES
from distill.gpu_turn import GpuTurn
from distill.objective.batching import OtherRows
from distill.objective.settings import ObjectiveConfig
from distill.records import TrainedGroups
from distill.tokenizer import load_tokenizer
from distill.weights.lending import LenderPlace, LentByWorkers
from distill.weights.model_weights import names_of, plan_buckets, total_bytes
from distill.weights.shared_memory import SharedTensors
from learner import memory as learner_memory
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.checkpoint_writer import CheckpointWriter
from learner.config import LearnerConfig, Precision, ShadowRule
from learner.forward import LossFunction
from learner.learner import Learner
from learner.memory import LearnerMemory
from learner.pass_memory import ModelSize
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss, PreferenceLoss, cross_entropy_loss
from learner.process_group import WorkerGroup
from learner.sharding import local
from tests.conftest import TinyPair
from tests.learner.conftest import untimed
from tests.learner.test_checkpoint_writer import hashes
from tests.learner.two_workers import on_workers
from tests.samples import after_context, training_row
from tests.weights import gather_all, numbers, shared

PPO = PolicyObjectiveLoss(objective=ObjectiveConfig(loss="ppo", entropy_coef=0.01))
PAIRS = PreferenceLoss(beta=0.5, sft_coef=0.1)
ROWS = [training_row(2 + i, 2 + 3 * (i % 5), seed=i, temperature=0.5 + 0.1 * i) for i in range(12)]
PREFERENCES = [
    replace(row, reference_logprobs_T=np.full(len(row), -3.0, np.float32)) for row in ROWS[:6]
]
# One row is most of the step's tokens; and a step with fewer rows than workers.
UNEVEN = [training_row(3, 60, seed=40), training_row(2, 2, seed=41), training_row(2, 3, seed=42)]
# A context that pays to share; one worker gets two of the rows and shares it, the other gets one.
CONTEXT_T = np.arange(40, 110, dtype=np.int32)
SHARED = after_context(CONTEXT_T, (3, 9, 20))
# A sequence of several rows, which the workers share out.
JOINED = PolicyObjectiveLoss(
    objective=ObjectiveConfig(loss="gspo", normalisation="sequence", kl_discount_factor=0.9)
)
# The averaged teacher with its own context, and its whole distribution.
OWN = PolicyObjectiveLoss(objective=ObjectiveConfig(estimator="full"), own_teacher=True)
TOLD = [
    replace(
        row, teacher_context_T=np.arange(30, 35 + i, dtype=np.int32), teacher_replaces=2 + i,
        teacher_coef=1.0,
    )
    for i, row in enumerate(ROWS[:7])
]  # fmt: skip
LOSSES = (PPO, cross_entropy_loss, PAIRS, JOINED, OWN)
SEGMENTS = [
    replace(
        row, sampled_kl_coef_T=np.full(len(row), 0.5, np.float32), ends_sequence=i % 3 == 2,
        other_rows=OtherRows(tokens=7 + i, log_ratio=0.1 * i, future_kl=0.3),
    )
    for i, row in enumerate(ROWS[:6])
]  # fmt: skip
STEPS: list[list[Part]] = [
    [Part(rows_D=ROWS, loss=PPO)],
    [Part(rows_D=ROWS[:7], loss=PPO), Part(rows_D=ROWS[7:], loss=cross_entropy_loss, coef=0.3)],
    [Part(rows_D=PREFERENCES, loss=PAIRS, rows_per_unit=2)], [Part(rows_D=UNEVEN, loss=PPO)],
    [Part(rows_D=SHARED, loss=PPO)], [Part(rows_D=ROWS[:1], loss=PPO)],
    [Part(rows_D=ROWS[3:9], loss=PPO)], [Part(rows_D=SEGMENTS, loss=JOINED)],
    [Part(rows_D=TOLD, loss=OWN)],
]  # fmt: skip
HALF = 3


def config(model: str, **changes: Any) -> LearnerConfig:
    optimizer = {"lr": 3e-3, "lr_schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    settings = {"total_steps": len(STEPS), "token_budget": 400, "device": "cpu"}
    settings |= {"shadow": ShadowRule(ema=0.5)}
    return LearnerConfig.of(model=model, max_grad_norm=0.5, **optimizer | settings | changes)


def save(learner: Learner, root: str, tokenizer: PreTrainedTokenizerBase) -> Checkpoint:
    store = CheckpointStore(root, keep=1)
    return store.save(step=HALF, write=partial(learner.save, tokenizer=tokenizer), delivery={})


def train(learner: Learner, steps: list[list[Part]]) -> list[dict[str, float]]:
    made = []
    for version, parts in enumerate(steps, 1):
        made.append(learner.step(*parts))
        learner.follow(version)
    return made


def teacher(learner: Learner) -> dict[str, np.ndarray]:
    with learner.as_teacher():
        return numbers(learner.weights())


def accumulated(learner: Learner) -> dict[str, float]:
    """A step in three calls: rows twice, then the update."""
    count = 0
    for rows in (ROWS[:5], ROWS[5:]):
        tokens = sum(row.num_trained for row in rows)
        learner.forward_backward(Part(rows_D=rows, loss=PPO, coef=tokens))
        count += tokens
    return learner.optim_step(count)


def lent_by_both(learner: Learner) -> list[dict[str, np.ndarray]]:
    """All weights in bfloat16, in several buckets, as each worker lends them to a reader."""
    weights = learner.weights(torch.bfloat16)
    taken: list[dict[str, np.ndarray]] = [{}, {}]
    handle: Any = None
    assert isinstance(weights, LentByWorkers)
    buckets = plan_buckets(weights.layouts, 8 << 10)
    assert len(buckets) >= 2
    assert learner.lender_places() == [LenderPlace.own("cpu")] * 2
    for bucket in buckets:
        assert list(map(len, weights.lend(names_of(bucket), [0, 1]))) == [0, 1]
        for read, (handle, *others) in zip(
            taken, weights.lend(names_of(bucket), [1, 2]), strict=True
        ):
            assert isinstance(handle, SharedTensors) and len(others) < 2
            read |= {name: t.float().numpy().copy() for name, t in handle.unpack().items()}
    weights.take_back()
    with pytest.raises(EngineError), handle.held():
        pass
    return taken


class Refuses(EmbeddedEngine):
    """Refuse version 1 once, after `may`."""

    may, refused = threading.Event(), False

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        if version == 1 and not self.refused:
            while not self.may.is_set():
                await asyncio.sleep(0.01)
            self.refused = True
            raise EngineError("not now")
        return await super().load_weights(weights, version)


def pushed_beside(learner: Learner, half: Checkpoint) -> list[Any]:
    """Checksums of two engines after pushes that are concurrent with steps.

    One refuses a push when both workers have gone on; the other has all that was pushed.
    """
    engines = [
        LocalActor(kind, model_path=half.model_dir, device="cpu", dtype="bfloat16", threads=1)
        for kind in (Refuses, EmbeddedEngine)
    ]
    settings = PushSettings(
        choice="shared_memory", served=False, device="cpu", directory="", model=half.model_dir,
        temperature=0.7, dtype="float32", probe_every=0, prove_every=0, timeout_s=300,
    )  # fmt: skip
    beside: list[int] = []
    publish = Publisher(
        {"engine": engines[0]}, settings, learner.logprobs,
        on_overlap=lambda version, _: beside.append(version),
    )  # fmt: skip
    publish(learner.weights(torch.bfloat16), 0, TrainedGroups())
    train(learner, STEPS[HALF : HALF + 1])
    publish(learner.weights(torch.bfloat16), 1, TrainedGroups())
    pushed = {n: t.clone() for n, t in gather_all(learner.weights(torch.bfloat16)).items()}
    train(learner, STEPS[HALF + 1 : HALF + 2])
    assert beside == [0, 1]
    Refuses.may.set()
    publish.wait()
    calls.get(engines[1].load_weights.remote(shared(pushed), 1))
    now = gather_all(learner.weights(torch.bfloat16))
    assert any(not torch.equal(pushed[name], tensor) for name, tensor in now.items())
    return [calls.get(engine.weight_checksums.remote()) for engine in engines]


def two_workers_story(learner: Learner, given: dict[str, Any]) -> dict[str, Any]:
    """Start from one worker's checkpoint, continue, fail, save."""
    learner.load_trainer_state(given["half"])
    results: dict[str, Any] = {"metrics": train(learner, STEPS[HALF:])}
    results["teacher"] = teacher(learner)
    results["weights"] = numbers(learner.weights())
    results["logprobs"] = learner.logprobs(ROWS)
    results["bytes"] = total_bytes(learner.weights())
    halved = learner.weights(torch.bfloat16)
    results["halved"] = total_bytes(halved)
    results["rounded"] = {name: t.float().numpy() for name, t in gather_all(halved).items()}
    results["lent"] = lent_by_both(learner)
    results["held"] = sum(local(p).numel() for p in learner.model.parameters())
    results["non finite"] = learner.weights().first_non_finite()
    bad = replace(ROWS[1], advantages_T=np.full(len(ROWS[1]), 3e38, np.float32))
    try:
        learner.step(Part(rows_D=[ROWS[0], bad, ROWS[2]], loss=PPO))
    except NonFiniteError as error:
        results["failed"] = str(error)
    results["after failure"] = numbers(learner.weights())
    results["accumulated"] = accumulated(learner)
    learner.load_trainer_state(given["half"])
    results["pushed beside"] = pushed_beside(learner, given["checkpoint"])
    local(learner.model.get_parameter("model.norm.weight").detach()).fill_(float("nan"))
    results["spoilt"] = learner.weights().first_non_finite()
    return results


def first_half_story(learner: Learner, given: dict[str, Any]) -> Checkpoint:
    """Save at the half, and check that every worker's random state is restored."""
    train(learner, STEPS[:HALF])
    half = save(learner, given["root"], load_tokenizer(given["tokenizer"]))
    states = [each["cpu"] for each in learner.on_all("rng_state")]
    assert not torch.equal(states[0], states[1]), "the workers would drop the same units"
    learner.on_all("set_rng_state", {"cpu": torch.Generator().manual_seed(9).get_state()})
    learner.load_trainer_state(half.path)
    for restored, state in zip(learner.on_all("rng_state"), states, strict=True):
        assert torch.equal(restored["cpu"], state)
    beside = save_beside(learner, given)
    assert hashes(beside) == hashes(half)
    return half


def save_beside(learner: Learner, given: dict[str, Any]) -> Checkpoint:
    """Save the same state from a copy while all workers step, after a failed try."""
    tokenizer = load_tokenizer(given["tokenizer"])
    root = Path(given["root"]).with_name("beside")
    root.write_text("no directory can be made here")
    writer = CheckpointWriter(learner, tokenizer, CheckpointStore(root, keep=1))
    writer.begin(HALF, {})
    with pytest.raises(CheckpointError):
        writer.written(wait=True)
    root.unlink()
    assert writer.begin(HALF, {}) is None
    train(learner, STEPS[HALF : HALF + 2])
    written = writer.written(wait=True)
    assert written is not None
    return written.checkpoint


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def alone(tiny_pair: TinyPair, scratch: Path) -> Iterator[dict[str, Any]]:
    """One worker's run, saved at the half."""
    learner = Learner(config(tiny_pair.student), str(scratch / "failed"))
    metrics = train(learner, STEPS[:HALF])
    half = save(learner, str(scratch / "alone"), load_tokenizer(tiny_pair.student))
    metrics += train(learner, STEPS[HALF:])
    yield {
        "metrics": metrics, "half": half, "teacher": teacher(learner),
        "weights": numbers(learner.weights()), "logprobs": learner.logprobs(ROWS),
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "accumulated": accumulated(learner),
    }  # fmt: skip


@pytest.fixture(scope="module")
def together(alone: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Two workers that resume from one worker's checkpoint."""
    half: Checkpoint = alone["half"]
    return on_workers(
        two_workers_story, config(half.model_dir), scratch / "failed", LOSSES,
        {"half": half.path, "checkpoint": half},
    )  # fmt: skip


def test_two_workers_take_the_steps_of_one(alone: dict[str, Any], together: dict[str, Any]) -> None:
    for theirs, ours in zip(alone["metrics"][HALF:], together["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in untimed(ours).keys() - {"train/padding_share"}:  # cut into other batches
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    assert together["weights"].keys() == alone["weights"].keys()
    for name, theirs in alone["weights"].items():
        np.testing.assert_allclose(together["weights"][name], theirs, atol=1e-5, err_msg=name)
    for name, theirs in alone["teacher"].items():
        np.testing.assert_allclose(together["teacher"][name], theirs, atol=1e-5, err_msg=name)
        assert np.abs(theirs - alone["weights"][name]).max() > 1e-4, name
    for ours, theirs in zip(together["logprobs"], alone["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_gradients_accumulate_over_calls_alike(
    alone: dict[str, Any], together: dict[str, Any]
) -> None:
    assert untimed(together["accumulated"]) == pytest.approx(
        untimed(alone["accumulated"]), rel=1e-5
    )


def test_each_worker_holds_its_share(alone: dict[str, Any], together: dict[str, Any]) -> None:
    assert together["held"] <= 0.51 * alone["parameters"]
    assert together["bytes"] == 4 * alone["parameters"]


def test_weights_are_rounded_to_the_push_precision(together: dict[str, Any]) -> None:
    assert together["halved"] == together["bytes"] / 2
    for name, weight in together["weights"].items():
        rounded = torch.from_numpy(weight).bfloat16().float().numpy()
        np.testing.assert_array_equal(together["rounded"][name], rounded)


def test_each_worker_lends_whole_weights(together: dict[str, Any]) -> None:
    for read in together["lent"]:
        assert read.keys() == together["rounded"].keys()
        for name, tensor in read.items():
            np.testing.assert_array_equal(tensor, together["rounded"][name])


def test_an_engine_that_refused_a_concurrent_push_gets_its_weights(
    together: dict[str, Any],
) -> None:
    refused, whole = together["pushed beside"]
    assert refused == whole


def test_a_step_that_is_not_finite_changes_no_worker(together: dict[str, Any]) -> None:
    assert together["failed"]
    for name, before in together["weights"].items():
        np.testing.assert_array_equal(together["after failure"][name], before)
    assert together["non finite"] is None
    assert together["spoilt"] == "model.norm.weight"


def test_one_worker_resumes_from_the_checkpoint_of_two(
    alone: dict[str, Any], tiny_pair: TinyPair, scratch: Path
) -> None:
    given = {"root": str(scratch / "together"), "tokenizer": tiny_pair.student}
    frugal = config(tiny_pair.student, gradient_checkpointing=True, packing=True)
    half: Checkpoint = on_workers(first_half_story, frugal, scratch / "failed", LOSSES, given)
    exported = AutoModelForCausalLM.from_pretrained(half.model_dir, dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(alone["half"].model_dir, dtype=torch.float32)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(exported.get_parameter(name), parameter, atol=1e-5, rtol=0)
    parts = sorted(path.name[:11] for path in (half.path / "optimizer").iterdir())
    assert parts == ["shard-00001", "shard-00002"]
    learner = Learner(config(half.model_dir), str(scratch / "failed"))
    learner.load_trainer_state(half.path)
    metrics = train(learner, STEPS[HALF:])
    assert metrics[-1]["train/loss"] == pytest.approx(alone["metrics"][-1]["train/loss"], rel=1e-5)
    for name, theirs in alone["weights"].items():
        np.testing.assert_allclose(
            numbers(learner.weights())[name], theirs, atol=1e-5, err_msg=name
        )


def reductions_story(learner: Learner, given: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the reduce-scatters in a step of several micro-batches.

    Also: a gradient that is accumulated over two calls.
    """
    with torch.profiler.profile(record_shapes=True) as profiled:
        metrics = learner.step(Part(rows_D=ROWS, loss=PPO))
    layers = learner.model.config.num_hidden_layers
    taken = [
        math.prod(event.input_shapes[1])
        for event in profiled.events() or ()
        if event.name == "c10d::_reduce_scatter_base_"
    ]
    return {
        "metrics": untimed(metrics), "units": layers + 1,
        "parameters": sum(p.numel() for p in learner.model.parameters()), "taken": taken,
        "weights": numbers(learner.weights()), "accumulated": untimed(accumulated(learner)),
    }  # fmt: skip


def with_little_room(config: LearnerConfig, group: WorkerGroup) -> Sequence[LossFunction]:
    """The losses, on a machine with room for a pass and half of a model's gradients."""
    size = ModelSize.of(config.model)
    assert size is not None
    memory = LearnerMemory(model=size, dtype=config.dtype, device="cpu", workers=group.size)
    passes = memory.passes
    assert passes is not None and config.learner.token_budget is not None
    of_pass = passes.bytes(config.learner.token_budget, checkpointing=False)
    each = memory.outside_passes - CONTEXT_BYTES + of_pass + memory.whole_gradients // 2
    learner_memory.free_bytes = lambda _device: group.size * each
    return LOSSES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_summed_once_a_step_where_whole_ones_fit(
    dtype: Precision, tiny_pair: TinyPair, scratch: Path
) -> None:
    """Whole gradients are float32 in either precision, so only the order of sums differs."""
    small = config(tiny_pair.student, token_budget=30, shadow=None, dtype=dtype)
    once, often = (
        on_workers(reductions_story, small, scratch / "failed", losses, {})
        for losses in (LOSSES, partial(with_little_room, small))
    )
    assert sum(once["taken"]) == pytest.approx(once["parameters"], rel=0.01)
    assert len(once["taken"]) == once["units"]
    micro_batches, rest = divmod(len(often["taken"]), often["units"])
    assert micro_batches >= 4 and rest == 0
    assert sum(often["taken"]) == micro_batches * sum(once["taken"])
    for name in ("metrics", "accumulated"):
        assert once[name] == pytest.approx(often[name], rel=1e-5, abs=1e-7), name
    for name, theirs in often["weights"].items():
        np.testing.assert_allclose(once["weights"][name], theirs, atol=1e-5, err_msg=name)


def turns_story(learner: Learner, given: dict[str, Any]) -> None:
    """An engine has the turn on the last worker's GPU, and gives it up after the first wait."""
    first, last = (GpuTurn(Path(path)) for path in given["turns"])
    assert last.acquire(0)
    with pytest.raises(EngineError):
        learner.acquire_turn(0.1)
    assert first.acquire(0), "the learner kept a turn that it does not use"
    first.release()
    last.release()
    learner.acquire_turn(60)
    assert not first.acquire(0) and not last.acquire(0)
    first.release()
    last.release()
    train(learner, STEPS[:1])
    learner.release_memory()
    assert first.acquire(0) and last.acquire(0)


def test_a_learner_takes_the_turns_of_all_its_workers_and_workers_on_one_server_have_one(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    first, last = (str(tmp_path / f"gpus-{i}.turn") for i in range(2))
    learner = config(tiny_pair.student, gpu_turns=[first, first, last])
    on_workers(turns_story, learner, tmp_path, LOSSES, {"turns": (first, last)}, workers=3)
