"""A start from another run's checkpoint: inherited state, and refusals."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.run_files.fork import check_fork, write_start
from distill.errors import ConfigError
from distill.tokenizer import load_tokenizer
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.config import LoraSettings
from learner.plan import Part
from tests.conftest import TinyPair
from tests.learner.conftest import IMPORTANCE_SAMPLING, NewLearner, trainer_state
from tests.refusals import refuses
from tests.samples import training_row
from tests.tiny import save_tokenizer

ROWS = [training_row(3, 4, seed=i) for i in range(2)]
FULL, LORA = LoraSettings(), {"rank": 4, "targets": "q_proj,v_proj"}


@pytest.fixture
def trained(new_learner: NewLearner, tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    def make(**settings: Any) -> Checkpoint:
        learner = new_learner(**settings)
        learner.step(Part(rows_D=ROWS, loss=IMPORTANCE_SAMPLING))
        store = CheckpointStore(tmp_path / "theirs", keep=1)
        return store.save(
            step=7, write=partial(learner.save, tokenizer=tokenizer), delivery={"num_rows": 3}
        )

    return make


@pytest.fixture
def checked(tiny_pair: TinyPair, tokenizer: PreTrainedTokenizerBase):
    def check(checkpoint: Checkpoint, model: str = tiny_pair.student, **lora: Any) -> None:
        check_fork(checkpoint, model=model, tokenizer=tokenizer, lora=LoraSettings(**lora))

    return check


@pytest.mark.parametrize("moments", [True, False])
def test_a_fork_inherits_weights_and_moments_only(
    trained, new_learner: NewLearner, tmp_path: Path, moments: bool
) -> None:
    theirs = trained(lr=1e-2)
    weights = AutoModelForCausalLM.from_pretrained(theirs.model_dir)
    before = new_learner()
    before.load_trainer_state(theirs.path)
    store = CheckpointStore(tmp_path / "ours", keep=1)
    write = partial(write_start, theirs.path, moments=moments)
    store.save(step=0, write=write, delivery={})
    shutil.rmtree(theirs.path)  # the other run goes on, and drops it
    start = store.latest()
    assert start is not None
    learner = new_learner(model=start.model_dir, lr=5e-4, warmup_steps=5)
    fresh = trainer_state(learner)
    learner.load_trainer_state(start.path)
    for name, parameter in learner.model.named_parameters():
        assert torch.equal(parameter, weights.get_parameter(name)), name
    taken = trainer_state(learner)
    assert taken["schedule"] == fresh["schedule"]
    assert taken["moments"] == (trainer_state(before) if moments else fresh)["moments"]
    metrics = learner.step(Part(rows_D=ROWS, loss=IMPORTANCE_SAMPLING))
    assert metrics["train/lr"] == pytest.approx(1e-4)  # the first of its own five warm-up steps


def test_another_model_or_tokenizer_is_refused(
    trained, checked, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    checkpoint = trained()
    checked(checkpoint)
    with refuses(ConfigError, "model.path"):
        checked(checkpoint, tiny_pair.teacher)
    save_tokenizer(tmp_path / "other", alphabet="abc")
    with refuses(ConfigError, "model.path"):
        check_fork(
            checkpoint, model=tiny_pair.student, tokenizer=load_tokenizer(str(tmp_path / "other")),
            lora=FULL,
        )  # fmt: skip
    with refuses(ConfigError, "lora.rank"):
        checked(checkpoint, **LORA)


def test_an_adapter_of_another_form_is_refused(trained, checked) -> None:
    checkpoint = trained(lora=LoraSettings(**LORA))
    checked(checkpoint, **LORA)
    checked(checkpoint, adapter=checkpoint.adapter_dir)  # as that run may have begun
    for name, other in {"rank": 8, "alpha": 3.0, "targets": "q_proj"}.items():
        with refuses(ConfigError, f"lora.{name}"):
            checked(checkpoint, **LORA | {name: other})
    with refuses(ConfigError, "lora.rank"):
        checked(checkpoint)
