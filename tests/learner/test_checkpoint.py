"""Checkpoints are complete or absent after any death; a resumed run is the same run."""

import hashlib
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.run_files.fork import check_fork
from distill.durable_files import digest
from distill.errors import CheckpointError
from distill.objective.batching import Batch
from distill.objective.losses import Metrics, StepCounts
from distill.tokenizer import load_tokenizer
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.config import LearnerSettings, LoraSettings, ShadowRule
from learner.forward import Forward, LossFunction
from learner.learner import Learner
from learner.optimizer import (
    build_optimizer,
    build_schedule,
    read_tensors,
    read_trainer,
    tensor_sizes,
    write_tensors,
)
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from tests.conftest import TinyPair
from tests.learner.conftest import IMPORTANCE_SAMPLING, NewLearner, trainer_state, untimed
from tests.samples import training_row
from tests.tiny import save_tokenizer
from tests.waiting import DEADLINE_S

ROWS = [training_row(2 + i, 4, seed=i) for i in range(8)]
MOMENTS = "optimizer/shard-00001-model-00001-of-00001.safetensors"
# A forked child starts at once; it must only write files and end.
fork = multiprocessing.get_context("fork")


def train(
    learner: Learner, first: int, steps: int, loss: LossFunction = IMPORTANCE_SAMPLING
) -> list[dict[str, float]]:
    """Steps from `first` on, each on a pair of rows that follows from its number."""
    return [
        untimed(learner.step(Part(rows_D=[ROWS[step % 8], ROWS[(3 * step + 1) % 8]], loss=loss)))
        for step in range(first, first + steps)
    ]


@pytest.fixture
def learner(new_learner: NewLearner) -> Learner:
    made = new_learner()
    train(made, 0, 1)
    return made


@pytest.fixture
def save(learner: Learner, tokenizer: PreTrainedTokenizerBase):
    def save_step(
        store: CheckpointStore, step: int, wide: PreTrainedTokenizerBase | None = None
    ) -> Checkpoint:
        return store.save(
            step=step,
            write=partial(learner.save, tokenizer=wide or tokenizer),
            delivery={"watermark": 4 * step, "set_aside": {"2": f"after {step}"}},
        )

    return save_step


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


def test_a_saved_state_is_restored(
    store: CheckpointStore,
    save,
    learner: Learner,
    new_learner: NewLearner,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert store.latest() is None
    made = save(store, 3)
    found = CheckpointStore(store.root, keep=2).latest()
    assert found is not None and found == made
    assert (found.step, found.delivery) == (3, {"watermark": 12, "set_aside": {"2": "after 3"}})
    model = AutoModelForCausalLM.from_pretrained(found.model_dir)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, learner.model.get_parameter(name)), name
    assert load_tokenizer(found.model_dir).get_vocab() == tokenizer.get_vocab()
    again, rng = new_learner(), torch.get_rng_state()
    torch.manual_seed(5)
    again.load_trainer_state(found.path)
    assert torch.equal(torch.get_rng_state(), rng)
    state, expected = trainer_state(again), trainer_state(learner)
    assert state["schedule"] == expected["schedule"]
    assert state["moments"] == expected["moments"] and any(expected["moments"].values())


def test_seals_equal_digests_of_orjson_output(store: CheckpointStore) -> None:
    """Seals are written without orjson, which `local=True` does not need."""
    delivery = {
        "watermark": 2**40,
        "set_aside": {"2": 'it\u2019s "\u0007\u00e9\U0001f600\x7f\n\\'},
        "above": [3],
    }
    made = store.save(step=1, write=lambda path: (path / "a").touch(), delivery=delivery)
    manifest = orjson.loads((made.path / "manifest.json").read_bytes())
    seal = manifest.pop("seal")
    written = orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS)
    assert seal == made.seal == hashlib.sha256(written).hexdigest()


def test_the_newest_are_kept(store: CheckpointStore, save) -> None:
    for step in (9, 10, 100, 1_000_000):
        save(store, step)
        latest = store.latest()
        assert latest is not None and latest.step == step
    assert names(store) == ["step-000100", "step-1000000"]


def test_a_partly_removed_checkpoint_is_removed_with_the_next(
    store: CheckpointStore, save, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(path: Path, **_: object) -> None:
        (path / "trainer.json").unlink()
        raise KeyboardInterrupt

    for step in (1, 2):
        save(store, step)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", dies)
        save(store, 3)
    save(store, 4)
    assert names(store) == ["step-000003", "step-000004"]


def test_a_saved_step_is_not_written_again(store: CheckpointStore, save) -> None:
    first = save(store, 1)
    written = (first.path / "manifest.json").stat().st_mtime_ns
    assert save(store, 1) == first
    assert (first.path / "manifest.json").stat().st_mtime_ns == written
    (first.path / "trainer.json").write_bytes(b"")  # unless it is broken
    assert store_intact(save(store, 1))


def store_intact(checkpoint: Checkpoint) -> bool:
    AutoModelForCausalLM.from_pretrained(checkpoint.model_dir)
    return bool(read_trainer(checkpoint.path).schedule)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def write(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def edit(**fields: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("model/model.safetensors", cut),
        ("model/model.safetensors", Path.unlink),
        ("model/tokenizer.json", cut),
        ("model/config.json", Path.unlink),
        ("trainer.json", cut),
        (MOMENTS, cut),
        (MOMENTS, Path.unlink),
        ("manifest.json", Path.unlink),
        ("manifest.json", cut),
        ("manifest.json", write("[]")),
        ("manifest.json", write("{}")),
        ("manifest.json", write('{"sizes": {}}')),
        ("manifest.json", write('{"sizes": [1], "step": 2, "delivery": {}}')),
        ("manifest.json", edit(step=3)),
        ("manifest.json", edit(delivery={"watermark": 0, "set_aside": {}})),
        ("manifest.json", edit(sha256={})),
        ("manifest.json", edit(seal="x")),
    ],
)
def test_an_incomplete_or_edited_checkpoint_is_passed_over(
    store: CheckpointStore, save, name: str, harm: Callable[[Path], object]
) -> None:
    first, second = save(store, 1), save(store, 2)
    harm(second.path / name)
    assert store.latest() == first
    shutil.rmtree(first.path)
    with pytest.raises(CheckpointError):
        store.latest()


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["model/model.safetensors", "model/config.json", "trainer.json", MOMENTS]
)
def test_a_flipped_bit_is_detected_and_reported(store: CheckpointStore, save, name: str) -> None:
    first, second = save(store, 1), save(store, 2)
    written = digest(second.path / name)
    flip(second.path / name)
    lines: list[str] = []
    fresh = CheckpointStore(store.root, keep=2)
    assert fresh.latest(lines.append) == first
    [line] = lines
    there = digest(second.path / name)
    for part in ("step-000002", name, there, written, "step 1"):
        assert part in line
    shutil.rmtree(first.path)
    with pytest.raises(CheckpointError):
        fresh.latest()


def test_a_damaged_checkpoint_is_renamed_and_not_reused(store: CheckpointStore, save) -> None:
    first, second = save(store, 1), save(store, 2)
    flip(second.path / "trainer.json")
    fresh = CheckpointStore(store.root, keep=1)
    assert fresh.latest(lambda _: None) == first
    again = save(fresh, 2)  # damaged, with its full size: written again
    assert fresh.latest(pytest.fail) == again and store_intact(again)
    flip(again.path / "trainer.json")
    save(CheckpointStore(store.root, keep=9), 1)
    fresh.latest(lambda _: None)
    fresh.set_aside_after(1)
    assert names(store) == ["step-000001", "step-000002.damaged"]


def test_files_and_their_directories_are_synced_before_the_manifest(
    tmp_path: Path, store: CheckpointStore, save
) -> None:
    """The order of fsync calls, by the descriptors' names."""
    asked: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        asked.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    os.fsync = fsync
    try:
        save(store, 1)
    finally:
        os.fsync = real
    partial = str(store.root / ".step-000001.partial")
    manifest = asked.index(f"{partial}/.manifest.json.partial")
    for name in ("model/model.safetensors", "model", "optimizer", "trainer.json", "."):
        assert str(Path(partial, name)) in asked[:manifest], name
    assert asked[manifest + 1 :] == [partial, str(store.root), str(store.root.parent)]


@pytest.mark.parametrize("name", ["trainer.json", MOMENTS])
def test_a_corrupt_trainer_state_is_named(
    store: CheckpointStore, save, learner: Learner, name: str
) -> None:
    made = save(store, 1).path
    (made / name).write_bytes(b"\0" * (made / name).stat().st_size)
    with pytest.raises(CheckpointError):
        learner.load_trainer_state(made)


# Deaths


def die_at(countdown: int, action: Callable[[], object]) -> None:
    """Run `action`, and kill this process just before its `countdown`-th change of a file."""
    changes = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
    left = countdown

    def on_event(event: str, arguments: tuple) -> None:
        nonlocal left
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in changes:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)
    action()


def exit_code(target: Callable[..., object], *arguments: object) -> int:
    process = fork.Process(target=target, args=arguments)
    process.start()
    process.join(timeout=DEADLINE_S)  # a child that hangs must not hang the tests
    if process.exitcode is None:
        process.kill()
        pytest.fail("the forked child did not end")
    return process.exitcode


@pytest.mark.parametrize("first_death", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_complete_checkpoint_survives_a_kill_between_any_two_writes(
    tmp_path: Path, save, first_death: int
) -> None:
    """Before every second write."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    first = save(store, 1)
    kept = tmp_path / "kept"
    shutil.copytree(first.path, kept)
    found, code = list[int](), -signal.SIGKILL
    for countdown in range(first_death, 200, 2):
        code = exit_code(die_at, countdown, lambda: save(store, 2))
        latest = store.latest()
        assert latest is not None and store_intact(latest)
        found.append(latest.step)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        again = save(store, 2)  # the resumed run writes over what was left
        assert store.latest() == again and not list(store.root.glob(".*.partial"))
        shutil.rmtree(store.root)
        store.root.mkdir()
        shutil.copytree(kept, first.path)
    assert code == 0 and len(found) > 5
    assert found == sorted(found) and set(found) == {1, 2}


def save_with_limit(limit: int, action: Callable[[], object], answer) -> None:
    """Save in a child in which no file may grow past `limit` bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        action()
        answer.send("saved")
    except CheckpointError as error:
        answer.send(str(error))


@pytest.mark.parametrize("full_at", ["model/model.safetensors", MOMENTS, "tokenizer.json"])
def test_a_full_disk_leaves_the_earlier_checkpoint(
    store: CheckpointStore, save, tmp_path: Path, full_at: str
) -> None:
    first = save(store, 1)
    changes: dict[str, object] = {}
    if full_at == "tokenizer.json":  # larger than all the rest
        save_tokenizer(tmp_path / "wide", alphabet="".join(map(chr, range(0x4E00, 0x9FFF))))
        changes = {"wide": load_tokenizer(str(tmp_path / "wide"))}
        limit = (tmp_path / "wide" / full_at).stat().st_size - 1
        assert limit > (first.path / "model/model.safetensors").stat().st_size
    else:
        limit = (first.path / full_at).stat().st_size - 1
    answer, theirs = fork.Pipe(duplex=False)
    assert exit_code(save_with_limit, limit, lambda: save(store, 2, **changes), theirs) == 0
    message = answer.recv()
    assert "step-000002" in message and str(first.path) in message
    assert names(store) == ["step-000001"]
    assert store.latest() == first and store_intact(first)
    assert save(store, 2, **changes).step == 2  # with room again


# Resuming


def random_loss(forward: Forward, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
    """Custom loss that depends on torch's random state."""
    loss, metrics = cross_entropy_loss(forward, batch, counts)
    return loss * torch.rand(()), metrics


def test_a_resumed_run_is_bit_for_bit_the_same_run(
    new_learner: NewLearner, tokenizer: PreTrainedTokenizerBase, store: CheckpointStore
) -> None:
    settings = {"lr_schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "total_steps": 6}
    straight = new_learner(**settings)
    expected = train(straight, 0, 6, random_loss)

    before = new_learner(**settings)
    made = train(before, 0, 3, random_loss)
    checkpoint = store.save(step=3, write=partial(before.save, tokenizer=tokenizer), delivery={})
    after = new_learner(model=checkpoint.model_dir, **settings)
    after.load_trainer_state(checkpoint.path)
    made += train(after, 3, 3, random_loss)

    assert made == expected
    for name, parameter in straight.model.named_parameters():
        assert torch.equal(after.model.get_parameter(name), parameter), name

    forgetful = new_learner(model=checkpoint.model_dir, **settings)
    assert train(forgetful, 3, 3, random_loss) != expected[3:]  # the state matters


def with_unused_layer(learner: Learner) -> Learner:
    """Add a weight that no pass uses, like that of a vision tower."""
    worker = learner.worker
    torch.manual_seed(0)
    worker.model.model.register_module("tower", torch.nn.Linear(3, 2))
    settings = LearnerSettings(lr=1e-2, weight_decay=0.1)
    worker.optimizer = build_optimizer(worker.model, settings)
    worker.set_schedule(build_schedule(worker.optimizer, settings, 6).state_dict())
    return learner


def test_a_run_with_a_weight_without_a_gradient_resumes(
    new_learner: NewLearner, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    settings = {"weight_decay": 0.1, "total_steps": 6}
    straight = with_unused_layer(new_learner(**settings))
    expected = train(straight, 0, 4)
    before = with_unused_layer(new_learner(**settings))
    made = train(before, 0, 2)
    path = str(tmp_path / "optimizer")
    before.worker.save_optimizer(path)
    after = with_unused_layer(new_learner(**settings))
    after.model.load_state_dict(before.model.state_dict())
    after.worker.load_optimizer(path)
    tower = after.model.model.tower
    assert not after.worker.optimizer.state.keys() & set(tower.parameters())
    made += train(after, 2, 2)
    assert made == expected
    for name, parameter in straight.model.named_parameters():
        assert torch.equal(after.model.get_parameter(name), parameter), name
    # its first gradient comes later: fresh moments, as in a run that never stopped
    for learner in (straight, after):
        for parameter in learner.model.model.tower.parameters():
            parameter.grad = torch.ones_like(parameter)
        learner.worker.optim_step(1.0)
    for name, parameter in straight.model.named_parameters():
        assert torch.equal(after.model.get_parameter(name), parameter), name


def test_moments_of_which_a_part_is_missing_are_refused(
    learner: Learner, new_learner: NewLearner, tmp_path: Path
) -> None:
    learner.worker.optimizer.state[learner.model.lm_head.weight].pop("exp_avg_sq")
    learner.worker.save_optimizer(str(tmp_path / "optimizer"))
    with pytest.raises(CheckpointError):
        new_learner().worker.load_optimizer(str(tmp_path / "optimizer"))


PAIR = [training_row(3, 4, seed=i) for i in range(2)]


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
    learner.step(Part(rows_D=PAIR, loss=IMPORTANCE_SAMPLING))
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
    monkeypatch.setattr("learner.optimizer.FILE_BYTES", 64)
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
