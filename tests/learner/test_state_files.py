"""Checkpoints hold and read no pickles."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.run_files.fork import check_fork
from learner.checkpoint import CheckpointStore
from learner.config import LoraSettings, ShadowRule
from learner.plan import Part
from learner.state import read_tensors, tensor_sizes, write_tensors
from tests.conftest import TinyPair
from tests.learner.conftest import IMPORTANCE_SAMPLING, NewLearner, trainer_state
from tests.samples import training_row

ROWS = [training_row(3, 4, seed=i) for i in range(2)]


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}, {"shadow": ShadowRule(ema=0.9)}])
@pytest.mark.parametrize("copied", [False, True])
def test_a_checkpoint_is_read_without_unpickling(
    new_learner: NewLearner,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    copied: bool,
) -> None:
    learner = new_learner(**settings)
    learner.step(Part(rows_D=ROWS, loss=IMPORTANCE_SAMPLING))
    (learner.copied(tokenizer).write if copied else partial(learner.save, tokenizer=tokenizer))(
        tmp_path
    )
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".jinja", ".md"}
    again = new_learner(**settings)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    again.load_trainer_state(tmp_path)
    assert trainer_state(again) == trainer_state(learner)


def test_tensors_of_any_kind_come_back_from_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.state.FILE_BYTES", 64)
    state = {
        "step": torch.tensor(7.0), "wide": torch.randn(5, 9),
        "rounded": torch.randn(40).to(torch.bfloat16), "strided": torch.randn(6, 4).T,
        "empty": torch.zeros(0, 3),
    }  # fmt: skip
    write_tensors(str(tmp_path / "optimizer"), state, None)
    assert len(list((tmp_path / "optimizer").iterdir())) > 1
    assert tensor_sizes(str(tmp_path / "optimizer")) == {n: t.shape for n, t in state.items()}
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    read_tensors(str(tmp_path / "optimizer"), read, None)
    for name, tensor in state.items():
        assert torch.equal(read[name], tensor), name


class Evil:
    """Object that runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["optimizer/.metadata", "trainer.pt"])
def test_a_pickle_among_the_files_is_not_run(
    new_learner: NewLearner,
    tokenizer: PreTrainedTokenizerBase,
    tiny_pair: TinyPair,
    tmp_path: Path,
    name: str,
) -> None:
    learner = new_learner()
    store = CheckpointStore(tmp_path / "theirs", keep=1)

    def write(path: Path) -> None:
        learner.save(path, tokenizer)
        (path / name).write_bytes(pickle.dumps(Evil(tmp_path / "ran")))

    theirs = store.save(step=1, write=write, delivery={})
    check_fork(theirs, model=tiny_pair.student, tokenizer=tokenizer, lora=LoraSettings())
    new_learner().load_trainer_state(theirs.path)
    assert not (tmp_path / "ran").exists()
