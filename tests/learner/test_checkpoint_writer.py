"""Checkpoints written from a copy have the state at the time of the copy."""

import hashlib
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

import learner.shard
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.checkpoint_writer import CheckpointWriter, Written
from learner.learner import Learner
from learner.plan import Part
from tests.learner.conftest import IMPORTANCE_SAMPLING, NewLearner
from tests.samples import training_row
from tests.waiting import DEADLINE_S

ROWS = [training_row(3, 5, seed=1), training_row(2, 4, seed=2)]


def train(learner: Learner) -> None:
    learner.step(Part(rows_D=ROWS, loss=IMPORTANCE_SAMPLING))


def hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """Digests of all files; of the moments by tensor, as the order in their headers varies."""
    digests = json.loads((checkpoint.path / "manifest.json").read_bytes())["sha256"]
    for file in (checkpoint.path / "optimizer").iterdir():
        del digests[f"optimizer/{file.name}"]
        for name, tensor in load_file(file).items():
            sha = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            digests[f"optimizer/{file.name}/{name}"] = sha
    return digests


@pytest.fixture
def trained(new_learner: NewLearner) -> Learner:
    made = new_learner()
    train(made)
    return made


NewWriter = Callable[..., CheckpointWriter]


@pytest.fixture
def new_writer(trained: Learner, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> NewWriter:
    def new(store: CheckpointStore | None = None) -> CheckpointWriter:
        store = store or CheckpointStore(tmp_path / "beside", keep=2)
        return CheckpointWriter(trained, tokenizer, store)

    return new


class Gate(CheckpointStore):
    """Store that writes nothing until it is opened, and records requests."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, keep=2)
        self.asked, self.open = threading.Semaphore(0), threading.Semaphore(0)

    def save(self, **settings: Any) -> Checkpoint:
        self.asked.release()
        assert self.open.acquire(timeout=DEADLINE_S)
        return super().save(**settings)


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}], ids=["whole", "adapter"])
def test_the_copy_is_the_state_that_was_copied(
    lora: dict[str, Any],
    new_learner: NewLearner,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    learner = new_learner(**lora, lr_schedule="cosine", total_steps=9)
    train(learner)
    write = partial(learner.save, tokenizer=tokenizer)
    expected = CheckpointStore(tmp_path / "at once", keep=1).save(step=1, write=write, delivery={})
    gate = Gate(tmp_path / "beside")
    writer = CheckpointWriter(learner, tokenizer, gate)
    assert writer.begin(1, {"watermark": 3}) is None
    train(learner)
    assert writer.written(wait=False) is None
    gate.open.release()
    written = writer.written(wait=True)
    assert written is not None and written.checkpoint.delivery == {"watermark": 3}
    assert hashes(written.checkpoint) == hashes(expected)
    assert writer.written(wait=False) == written, "an answer that got lost can be asked for again"
    gate.open.release()
    assert hashes(writer.save(2, {})) != hashes(expected)


def test_the_next_waits_for_the_one_before(new_writer: NewWriter, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    writer = new_writer(gate)
    writer.begin(1, {})
    assert gate.asked.acquire(timeout=DEADLINE_S)
    second = threading.Thread(target=writer.begin, args=(2, {}), daemon=True)
    second.start()
    assert not gate.asked.acquire(timeout=0.1) and gate.complete() == []
    gate.open.release()
    assert gate.asked.acquire(timeout=DEADLINE_S)
    assert [made.step for made in gate.complete()] == [1]
    second.join(timeout=DEADLINE_S)
    gate.open.release()
    written = writer.written(wait=True)
    assert written is not None and written.checkpoint.step == 2


def test_a_checkpoint_is_written_at_once_if_memory_is_short(
    new_writer: NewWriter,
    trained: Learner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers = sum(p.numel() for p in trained.model.parameters())
    copy = 12 * numbers + 4 * len(list(trained.model.parameters()))  # AdamW counts steps, too
    writer = new_writer()
    monkeypatch.setattr(learner.shard, "free_bytes", lambda _: 2 * copy - 1)
    for step in (1, 2):
        made = writer.begin(step, {})
        assert made is not None and made.step == step and writer.written(wait=True) is None
    lines = [line for line in caplog.records if line.name == "learner.checkpoint_writer"]
    assert len(lines) == 1
    monkeypatch.setattr(learner.shard, "free_bytes", lambda _: 2 * copy)
    assert writer.begin(3, {}) is None
    assert isinstance(writer.written(wait=True), Written)
