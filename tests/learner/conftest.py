"""Learners on the tiny student, loops around them, and reference values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.data.held_out import HeldOut
from distill.objective.batching import TrainingRow
from distill.objective.rows import RowMeta
from distill.objective.settings import ObjectiveConfig
from distill.objective.whole_groups import LocalGroups
from distill.records import StepGroups, TrainedGroups
from distill.types import TrajectoryGroup
from distill.weights.model_weights import Weights
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.config import LearnerConfig, Precision
from learner.forward import LossFunction
from learner.learner import Learner
from learner.loop import PolicyLoop
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss
from learner.supervised import RowStream, SupervisedLoop
from learner.teachers import LocalTeachers
from tests.conftest import TinyPair
from tests.weights import gather_all

NewLearner = Callable[..., Learner]
NewLoop = Callable[..., PolicyLoop]
NewSupervisedLoop = Callable[..., SupervisedLoop]

IMPORTANCE_SAMPLING = PolicyObjectiveLoss(objective=ObjectiveConfig())


@pytest.fixture
def new_learner(tiny_pair: TinyPair, tmp_path: Path) -> NewLearner:
    """new_learner(model=, token_budget=, total_steps=, dtype=, lora=, **optimizer).

    Gradients are not clipped by default.
    """

    def new(
        *,
        model: str = tiny_pair.student,
        token_budget: int = 4096,
        total_steps: int = 10,
        dtype: Precision = "float32",
        compile: bool = False,
        **learner: object,
    ) -> Learner:
        settings = {"lr": 1e-2, "max_grad_norm": 1e9} | learner
        config = LearnerConfig.of(
            model=model, total_steps=total_steps, token_budget=token_budget, device="cpu",
            dtype=dtype, compile=compile, **settings,
        )  # fmt: skip
        return Learner(config, str(tmp_path / "failed"))

    return new


@pytest.fixture
def plain_model(tiny_pair: TinyPair) -> PreTrainedModel:
    """The learners' first weights in transformers."""
    return AutoModelForCausalLM.from_pretrained(tiny_pair.student, dtype=torch.float32).eval()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


class World(LocalGroups):
    """Both ends of the loop in memory: provides groups, receives weights, records the order."""

    def __init__(
        self,
        groups: Sequence[TrajectoryGroup],
        set_aside: Mapping[int, str] | None = None,
        per_step: int = 2,
        replaced: Mapping[int, float] | None = None,
    ) -> None:
        """`set_aside` and `replaced` are returned with the first groups."""
        super().__init__()
        self.groups, self.per_step = list(groups), per_step
        self.set_aside = dict(set_aside or {})
        self.replaced = dict(replaced or {})
        self.events: list[str] = []
        self.published: list[tuple[int, dict[str, bytes]]] = []

    def take(self, trained: TrainedGroups) -> StepGroups:
        taken, self.groups = self.groups[: self.per_step], self.groups[self.per_step :]
        assert len(taken) == self.per_step, "the loop asks for more than a step's groups"
        self.events.append(f"take {[made.group_id for made in taken]}")
        set_aside, self.set_aside = self.set_aside, {}
        replaced, self.replaced = self.replaced, {}
        return self.taken(taken, set_aside=set_aside, replaced=replaced)

    def publish(self, weights: Weights, version: int, trained: TrainedGroups) -> dict[str, float]:
        self.watermark = trained.watermark
        self.events.append(f"publish {version}")
        copied = {
            name: t.contiguous().view(torch.uint8).numpy().tobytes()
            for name, t in gather_all(weights).items()
        }
        self.published.append((version, copied))
        return {"push/bytes": sum(map(len, copied.values()))}


@pytest.fixture
def new_loop(
    new_learner: NewLearner, tokenizer: PreTrainedTokenizerBase, store: CheckpointStore
) -> NewLoop:
    """new_loop(world, objective, teachers=, learner={...}, resume_from=, and loop settings)."""

    def new(
        world: World,
        objective: ObjectiveConfig,
        *,
        teachers: LocalTeachers | None = None,
        learner: Mapping[str, object] | None = None,
        resume_from: Checkpoint | None = None,
        **settings: Any,
    ) -> PolicyLoop:
        start = {"model": resume_from.model_dir} if resume_from else {}
        return PolicyLoop(
            learner=new_learner(**{"lr_schedule": "linear"} | dict(learner or {}) | start),
            tokenizer=tokenizer, source=world, publish=world.publish, store=store,
            loss=PolicyObjectiveLoss(objective=objective, teachers=teachers),
            resume_from=resume_from, **settings,
        )  # fmt: skip

    return new


@pytest.fixture
def new_supervised_loop(
    new_learner: NewLearner, tokenizer: PreTrainedTokenizerBase, store: CheckpointStore
) -> NewSupervisedLoop:
    """new_supervised_loop(stream, loss, held_out=, resume_from=, **learner)."""

    def new(
        stream: RowStream,
        loss: LossFunction,
        *,
        held_out: Sequence[HeldOut] = (),
        resume_from: Checkpoint | None = None,
        **learner: object,
    ) -> SupervisedLoop:
        start = {"model": resume_from.model_dir} if resume_from else {}
        return SupervisedLoop(
            learner=new_learner(**start, **learner), tokenizer=tokenizer, stream=stream, loss=loss,
            store=store, held_out=held_out, resume_from=resume_from,
        )  # fmt: skip

    return new


class Watched:
    """Record a learner's calls, the parts of each update, the rows of each part, and scores."""

    def __init__(self, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.updates: list[tuple[Part, ...]] = []
        self.scored: list[Sequence[np.ndarray]] = []
        self.rows: list[list[TrainingRow]] = []
        self._step, self._worker = learner.step, learner.worker
        self._score = self._worker.rollouts.score
        self._skip_update = learner.skip_update
        monkeypatch.setattr(learner, "skip_update", self._on_skip_update)
        monkeypatch.setattr(learner, "step", self._on_step)
        monkeypatch.setattr(self._worker.rollouts, "score", self._on_score)

    def _on_step(self, *parts: Part) -> dict[str, float]:
        self.calls.append("step")
        self.updates.append(parts)
        for part in parts:
            named = [row.place if isinstance(row, RowMeta) else row for row in part.rows_D]
            self.rows.append(self._worker.resolve_rows(named))
        return self._step(*parts)

    def _on_skip_update(self) -> None:
        self.calls.append("skip_update")
        self._skip_update()

    def _on_score(self, rows_D: Sequence[TrainingRow]) -> Sequence[np.ndarray]:
        self.calls.append("logprobs")
        self.scored.append(self._score(rows_D))
        return self.scored[-1]


def gradients(learner: Learner) -> dict[str, Tensor]:
    return gradients_of(learner.model)


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: gradient_of(p).clone() for name, p in model.named_parameters()}


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def weights(learner: Learner) -> dict[str, bytes]:
    return {name: p.detach().numpy().tobytes() for name, p in learner.model.named_parameters()}


def adjusted(learner: Learner) -> dict[str, Tensor]:
    """Copies of the parameters that the learner trains."""
    named = learner.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


def assert_same(made: dict[str, Tensor], expected: dict[str, Tensor], share: float) -> None:
    """Assert equal tensors, up to `share` of the largest value of all."""
    largest = max(value.abs().max().item() for value in expected.values())
    assert made.keys() == expected.keys() and largest > 0
    for name, value in expected.items():
        torch.testing.assert_close(made[name], value, rtol=0, atol=share * largest)


def naive_distribution(model: PreTrainedModel, row: TrainingRow) -> Tensor:
    """log p_T at the row's trained tokens, shape (trained, V), from all logits of the row alone."""
    logits_TV = model(input_ids=torch.tensor([row.tokens_T.tolist()])).logits[0]
    trained_N = np.flatnonzero(row.loss_mask_T)
    return torch.log_softmax(logits_TV[trained_N - 1] / row.temperature, dim=1)


def naive_logprobs(model: PreTrainedModel, row: TrainingRow) -> Tensor:
    """log p_T of the row's trained tokens, shape (trained,)."""
    tokens_N = torch.tensor(row.tokens_T[row.loss_mask_T].tolist())
    return naive_distribution(model, row).gather(1, tokens_N[:, None]).squeeze(1)


def trained(rows: Sequence[TrainingRow], name: str) -> np.ndarray:
    """Array of the rows at their trained tokens, in float64."""
    return np.concatenate([getattr(row, name)[row.loss_mask_T] for row in rows]).astype(np.float64)


def own_advantages(
    rows: Sequence[TrainingRow], logprobs_N: np.ndarray, discount: float = 0.0
) -> np.ndarray:
    """Advantages of trained tokens, with the learner's log-probs in the teacher's terms."""
    advantages_N, coef_N, behaviour_N = (
        trained(rows, name)
        for name in ("advantages_T", "sampled_kl_coef_T", "behaviour_logprobs_T")
    )
    row_N = np.repeat(np.arange(len(rows)), [row.num_trained for row in rows])
    made_N = advantages_N.copy()
    for n in range(len(made_N)):
        for later in range(n, len(made_N)):
            if row_N[later] == row_N[n]:
                moved = logprobs_N[later] - behaviour_N[later]
                made_N[n] -= discount ** (later - n) * coef_N[later] * moved
    return made_N


def near_policy(learner: Learner, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The rows as if sampled and begun by policies near the learner's."""
    rng = np.random.default_rng(0)

    def moved(row: TrainingRow, logprobs_N: np.ndarray) -> np.ndarray:
        moved_T = np.zeros(len(row), np.float32)
        moved_T[row.loss_mask_T] = logprobs_N + rng.normal(0, 0.6, len(logprobs_N))
        return moved_T

    return [
        replace(
            row,
            behaviour_logprobs_T=moved(row, logprobs_N),
            proximal_logprobs_T=moved(row, logprobs_N),
        )
        for row, logprobs_N in zip(rows, learner.logprobs(rows), strict=True)
    ]


def trainer_state(learner: Learner) -> dict[str, Any]:
    """State of a learner besides its weights."""
    worker = learner.worker
    return {
        "schedule": worker.schedule.state_dict(),
        "moments": {
            name: {key: value.numpy().tobytes() for key, value in worker.optimizer.state[p].items()}
            for name, p in worker.model.named_parameters()
        },
    }


def untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics that a second run repeats."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith("time/") and name not in ("train/tflops_per_s", "tokens_per_s")
    }
