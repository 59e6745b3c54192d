"""Reward models: loss and gradient, position of the score, saved files, several workers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.data.held_out import HeldOut
from distill.data.preferences import scored_row
from distill.errors import CheckpointError
from distill.models.reward import (
    HEAD_WEIGHT,
    load_reward_model,
    meta_reward_model,
    padding_token,
    start_reward_model,
)
from distill.objective.batching import TrainingRow, collate
from distill.tokenizer import load_tokenizer
from learner.config import LearnerConfig
from learner.export import check_export
from learner.forward import Forward
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import reward_model_loss
from learner.supervised import RowStream
from tests.conftest import TinyPair
from tests.learner.conftest import (
    NewLearner,
    NewSupervisedLoop,
    assert_same,
    gradients,
    gradients_of,
    untimed,
)
from tests.learner.two_workers import on_workers
from tests.samples import answer_pair, demonstration
from tests.tiny import EOS, PAD, SIZES, VOCAB_SIZE, save_tokenizer, token_id

NUM_PAIRS = 4


# The last context is worth running once for both answers.
PLAIN_ROWS = [
    row for i, n in enumerate((2, 5, 8, 80)) for row in answer_pair(n, (3 + 4 * i, 6), 4 * i)
]
ROWS = [scored_row(row, PAD) for row in PLAIN_ROWS]


def naive_score(model: PreTrainedModel, row: TrainingRow) -> Tensor:
    """Score of the row alone, without padding, by transformers' own class."""
    return model(input_ids=torch.tensor([row.tokens_T.tolist()])).logits[0, 0]


@pytest.fixture
def write(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Callable[[Learner], str]:
    """write(learner): save the model and return its directory."""

    def written(learner: Learner) -> str:
        path = tmp_path / f"written-{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        learner.save(path, tokenizer)
        return str(path / "model")

    return written


def load(path: str) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(path).eval()


@pytest.mark.parametrize(("budget", "packing"), [(1, False), (4096, False), (100, True)])
def test_the_loss_and_its_gradient_against_naive_ones(
    new_learner: NewLearner, write: Callable[[Learner], str], budget: int, packing: bool
) -> None:
    learner = new_learner(reward_padding=PAD, token_budget=budget, packing=packing)
    model = load(write(learner))
    total, scores = torch.zeros(()), []
    for i in range(0, len(PLAIN_ROWS), 2):
        chosen, rejected = (naive_score(model, row) for row in PLAIN_ROWS[i : i + 2])
        total = total - (1 / (1 + (rejected - chosen).exp())).log() / NUM_PAIRS
        scores.append((chosen.item(), rejected.item()))
    total.backward()
    metrics = learner.step(Part(rows_D=ROWS, loss=reward_model_loss, rows_per_unit=2))
    assert_same(gradients(learner), gradients_of(model), share=1e-4)
    assert metrics["train/loss"] == pytest.approx(total.item(), rel=1e-4)
    scores_P2 = np.array(scores)
    assert metrics["reward_model/accuracy"] == np.mean(scores_P2[:, 0] > scores_P2[:, 1])
    margins_P = scores_P2[:, 0] - scores_P2[:, 1]
    assert metrics["reward_model/margin"] == pytest.approx(margins_P.mean(), abs=1e-5)
    for side, scores_P in zip(("chosen", "rejected"), scores_P2.T, strict=True):
        assert metrics[f"reward_model/{side}_mean"] == pytest.approx(scores_P.mean(), abs=1e-5)
        assert metrics[f"reward_model/{side}_std"] == pytest.approx(scores_P.std(), abs=1e-4)


ARCHITECTURES = {
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "tied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=8),
    "phi3": Phi3Config(**SIZES),
    "mistral": MistralConfig(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
    "gpt2": GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=4, n_positions=64),
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_score_is_read_at_the_row_s_end_in_any_batch(family: str, tmp_path: Path) -> None:
    """Every architecture, tied or not; transformers reads the same score, padded or not."""
    path = str(tmp_path)
    AutoModelForCausalLM.from_config(ARCHITECTURES[family]).save_pretrained(path)
    check_export(path, meta_reward_model, fresh=(HEAD_WEIGHT,))
    padding = 7  # no row ends with it, though some hold it
    rows = [demonstration(4, n, seed=n) for n in (3, 9, 5)]
    rows = [replace(row, tokens_T=np.append(row.tokens_T[:-1], np.int32(9))) for row in rows]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = start_reward_model(path, padding=padding, device="cpu")
    model.save_pretrained(tmp_path / "reward")
    theirs = load(str(tmp_path / "reward"))
    assert theirs.config.pad_token_id == padding and theirs.config.num_labels == 1
    forward = Forward(model)
    padded = [scored_row(row, padding) for row in rows]
    with torch.no_grad():
        together = forward.scores(collate(padded))
        alone = torch.cat([forward.scores(collate([row])) for row in padded])
        expected = torch.stack([naive_score(theirs, row) for row in rows])
        width = max(map(len, rows))
        given = [[*row.tokens_T.tolist(), *[padding] * (width - len(row))] for row in rows]
        mask = torch.tensor([[i < len(row) for i in range(width)] for row in rows]).long()
        batched = theirs(input_ids=torch.tensor(given), attention_mask=mask).logits[:, 0]
    for scores in (together, alone, batched):
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    assert expected.unique().numel() == len(rows)


# Padding


def test_a_padding_that_ends_rows_is_not_taken(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    unknown = token_id(tokenizer, "<unk>")
    assert padding_token(tokenizer, 160, {EOS}) == PAD
    tokenizer.pad_token = tokenizer.eos_token
    assert padding_token(tokenizer, 160, {EOS}) == PAD  # by its name
    assert padding_token(tokenizer, 160, {EOS, PAD}) == unknown
    with pytest.raises(CheckpointError):
        padding_token(tokenizer, 160, {EOS, PAD, unknown})


# Other models


def test_labels_are_no_reward(tiny_pair: TinyPair, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_pair.student, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError):
        load_reward_model(str(tmp_path), dtype=torch.float32, device="cpu")


# The loop


def test_held_out_rows_are_evaluated_by_source(
    new_supervised_loop: NewSupervisedLoop, write: Callable[[Learner], str]
) -> None:
    loop = new_supervised_loop(
        RowStream(ROWS, batch_size=2, seed=0, rows_per_unit=2), reward_model_loss,
        held_out=[HeldOut(name="a", rows_D=ROWS[:6]), HeldOut(name="b", rows_D=ROWS[6:])],
        token_budget=60, reward_padding=PAD,
    )  # fmt: skip
    model = load(write(loop.learner))
    evaluated = loop.evaluate()
    assert untimed(loop.evaluate()) == untimed(evaluated)
    with torch.no_grad():
        scores = torch.stack([naive_score(model, row) for row in PLAIN_ROWS]).view(-1, 2)
    losses = -torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1])
    right = (scores[:, 0] > scores[:, 1]).float()
    for name, where in (("", slice(None)), ("/source=a", slice(3)), ("/source=b", slice(3, 4))):
        assert evaluated[f"validation/loss{name}"] == pytest.approx(
            losses[where].mean().item(), rel=1e-4
        )
        accuracy = evaluated[f"validation/accuracy{name}"]
        assert accuracy == pytest.approx(right[where].mean().item())


# Two workers


def story(learner: Learner, given: dict[str, Any]) -> dict[str, Any]:
    part = Part(rows_D=ROWS, loss=reward_model_loss, rows_per_unit=2)
    results: dict[str, Any] = {"before": learner.evaluate(part)}
    results["losses"] = [learner.step(part)["train/loss"] for _ in range(3)]
    results["after"] = learner.evaluate(part)
    path = Path(given["path"])
    path.mkdir()
    learner.save(path, load_tokenizer(given["tokenizer"]))
    return results


@pytest.mark.slow
def test_two_workers_are_one_learner(tiny_pair: TinyPair, tmp_path: Path) -> None:
    config = LearnerConfig.of(
        model=tiny_pair.student, total_steps=3, token_budget=100, device="cpu", lr=3e-3,
        reward_padding=PAD,
    )  # fmt: skip
    results = on_workers(
        story, config, tmp_path / "scratch", (reward_model_loss,),
        {"path": str(tmp_path / "two"), "tokenizer": tiny_pair.student},
    )  # fmt: skip
    alone = Learner(config, str(tmp_path / "failed"))
    expected = story(alone, {"path": str(tmp_path / "one"), "tokenizer": tiny_pair.student})
    assert results["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    for when in ("before", "after"):
        assert results[when] == pytest.approx(expected[when], rel=1e-3, abs=1e-4)
    one, two = (load(str(tmp_path / name / "model")).state_dict() for name in ("one", "two"))
    assert one.keys() == two.keys() and HEAD_WEIGHT in one
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)
