"""The policy loop: one step a call, each group once, every version published before it returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import chz
import numpy as np
import pytest
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.errors import ConfigError, NonFiniteError
from distill.metrics import group_metrics
from distill.rows import policy_rows
from distill.types import TrajectoryGroup
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.loop import ObjectiveConfig, PolicyLoop
from tests.learner.conftest import NewLearner
from tests.samples import group

OBJECTIVE = ObjectiveConfig(kl_coef=0.5, kl_discount_factor=0.9, reward_coef=1.0)


class World:
    """Both ends of the loop in memory: hands out groups, receives weights, keeps the order."""

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        self.groups = list(groups)
        self.events: list[str] = []
        self.published: list[tuple[int, dict[str, bytes]]] = []

    def take(self, num_groups: int) -> list[TrajectoryGroup]:
        taken, self.groups = self.groups[:num_groups], self.groups[num_groups:]
        assert len(taken) == num_groups, "the loop asks for more than a step's groups"
        self.events.append(f"take {[made.group_id for made in taken]}")
        return taken

    def publish(self, weights: Mapping[str, Tensor], version: int) -> dict[str, float]:
        self.events.append(f"publish {version}")
        copied = {name: tensor.detach().numpy().tobytes() for name, tensor in weights.items()}
        self.published.append((version, copied))
        return {"push/bytes": sum(map(len, copied.values()))}


def weights(loop: PolicyLoop) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in loop.learner.model.named_parameters()}


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


@pytest.fixture
def new_loop(new_learner: NewLearner, tokenizer: PreTrainedTokenizerBase, store: CheckpointStore):
    def new(
        world: World, *, groups_per_step: int = 2, resume_from: Checkpoint | None = None
    ) -> PolicyLoop:
        start = {"model": resume_from.model_dir} if resume_from else {}
        return PolicyLoop(
            learner=new_learner(schedule="linear", **start),
            tokenizer=tokenizer,
            source=world,
            publish=world.publish,
            store=store,
            objective=OBJECTIVE,
            groups_per_step=groups_per_step,
            resume_from=resume_from,
        )

    return new


def test_what_happens_in_which_order(new_loop) -> None:
    world = World([group(i) for i in range(4)])
    loop = new_loop(world)
    loop.publish()
    first = weights(loop)
    loop.step()
    second = weights(loop)
    loop.step()
    assert world.events == ["publish 0", "take [0, 1]", "publish 1", "take [2, 3]", "publish 2"]
    assert world.published == [(0, first), (1, second), (2, weights(loop))]
    assert len({tuple(sent.items()) for _, sent in world.published}) == 3


def test_a_step_s_metrics(new_loop) -> None:
    groups = [group(0, version=0), group(1, members=3, version=0), group(2), group(3, version=1)]
    loop = new_loop(World(groups))
    for step in (1, 2):
        taken = groups[2 * step - 2 : 2 * step]
        metrics = loop.step()
        assert metrics["step"] == metrics["weight_version"] == loop.step_count == step
        assert (metrics["groups/first"], metrics["groups/last"]) == (2 * step - 2, 2 * step - 1)
        assert metrics["train/tokens"] == sum(made.num_actions for made in taken)
        for name, value in group_metrics(taken, version=step - 1).items():
            assert metrics[name] == value, name
        parts = metrics["time/wait"] + metrics["time/learn"] + metrics["time/push"]
        assert 0 < parts <= metrics["time/step"] * (1 + 1e-9)
        assert metrics["tokens_per_s"] == metrics["train/tokens"] / metrics["time/step"]
        assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["staleness/max"] == 1 and 0 < metrics["staleness/mean"] < 1


def test_the_loss_is_the_objective_s(new_loop) -> None:
    groups = [group(0), group(1, members=3)]
    loop = new_loop(World(groups))
    rows = policy_rows(groups, **chz.asdict(OBJECTIVE))
    logprobs_N, behaviour_N, weights_N = (
        np.concatenate(parts).astype(np.float64)
        for parts in (
            loop.learner.logprobs(rows),
            [row.behaviour_logprobs_T[row.loss_mask_T] for row in rows],
            [row.weights_T[row.loss_mask_T] for row in rows],
        )
    )
    expected = -(np.exp(logprobs_N - behaviour_N) * weights_N).mean()
    assert loop.step()["train/loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("second", [[0, 2], [2, 1], [2, 2]])
def test_a_group_trained_twice_stops_the_run_before_the_weights(new_loop, second) -> None:
    world = World([group(i) for i in (0, 1, *second)])
    loop = new_loop(world)
    loop.step()
    before = weights(loop)
    with pytest.raises(AssertionError, match=r"would be trained twice|name one twice"):
        loop.step()
    assert weights(loop) == before and loop.step_count == 1
    assert world.events[-1] == f"take {second}"
    assert loop.save().delivery == {"watermark": 2, "beyond": []}


def test_a_failed_step_counts_no_group(new_loop) -> None:
    world = World([group(i) for i in range(2)])
    loop = new_loop(world)
    next(loop.learner.model.parameters()).data.fill_(math.nan)
    with pytest.raises(NonFiniteError):
        loop.step()
    assert loop.step_count == 0 and world.published == []
    assert loop.save().delivery == {"watermark": 0, "beyond": []}


def test_a_resumed_loop_is_the_same_loop(new_loop) -> None:
    groups = [group(i, version=i // 2) for i in range(8)]
    straight = new_loop(World(groups))
    expected = [straight.step() for _ in range(4)]

    loop = new_loop(World(groups[:4]))
    made = [loop.step() for _ in range(2)]
    checkpoint = loop.save()
    assert (checkpoint.step, checkpoint.delivery) == (2, {"watermark": 4, "beyond": []})
    resumed = new_loop(World(groups[4:]), resume_from=checkpoint)
    made += [resumed.step() for _ in range(2)]

    assert weights(resumed) == weights(straight)
    for before, after in zip(expected, made, strict=True):
        for name in before.keys() - {"tokens_per_s"}:
            assert after[name] == before[name] or name.startswith("time/"), name


def test_a_resumed_loop_remembers_what_it_trained(new_loop) -> None:
    loop = new_loop(World([group(i) for i in range(2)]))
    loop.step()
    resumed = new_loop(World([group(i) for i in (1, 2)]), resume_from=loop.save())
    with pytest.raises(AssertionError, match="group 1 would be trained twice"):
        resumed.step()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"kl_coef": 0.0}, "kl_coef=0 leaves the teacher out"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0 must be 0 or above"),
        ({"kl_coef": math.nan}, "kl_coef=nan"),
        ({"kl_coef": math.inf}, "kl_coef=inf"),
        ({"reward_coef": math.nan}, "reward_coef=nan"),
        ({"reward_coef": -0.1}, "reward_coef=-0.1"),
        ({"kl_discount_factor": 1.1}, r"kl_discount_factor=1.1 must be in \[0, 1\]"),
        ({"kl_discount_factor": math.nan}, "kl_discount_factor=nan"),
    ],
)
def test_objectives_that_cannot_work_are_refused(setting: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ObjectiveConfig(**setting)
