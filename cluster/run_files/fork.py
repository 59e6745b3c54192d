"""`fork_from=RUN[:STEP]`: a run that starts from a checkpoint of another run.

The new run counts its steps from 0. Its first checkpoint, step 0, contains the other run's weights
(`write_start`), so a resume of the new run, or a restart of its learner, does not need the other
run. Schedules and random numbers are not copied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.config.common import CommonConfig
from cluster.config.files import at_path
from cluster.config.run_record import RunRecord
from distill.errors import ConfigError, DataError
from distill.models.loading import load_config
from distill.tokenizer import first_difference, load_tokenizer
from distill.types import Tokenizer
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.config import LoraSettings
from learner.lora import check_same_form
from learner.optimizer import TrainerState, write_trainer

# Fields of a model's config that do not affect its computation, or that a run sets itself.
_PASSED_OVER = (
    *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
    *("eos_token_id", "bos_token_id", "pad_token_id", "num_labels", "id2label", "label2id"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Checkpoint of another run from which a run starts.

    Attributes:
        run, run_id: directory and id of the other run.
        moments: True if AdamW's moments are copied as well.
    """

    run: Path
    run_id: str
    checkpoint: Checkpoint
    moments: bool

    @property
    def described(self) -> str:
        moments = "with AdamW's moments" if self.moments else "with fresh moments"
        return f"the weights of step {self.checkpoint.step} of {self.run}, {moments}"

    def to_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "run_id": self.run_id,
            "step": self.checkpoint.step,
            "seal": self.checkpoint.seal,
            "moments": self.moments,
        }

    def begin(self, store: CheckpointStore, delivery: Mapping[str, Any]) -> Checkpoint:
        """Write the first checkpoint of the new run.

        Args:
            delivery: data state of a checkpoint before the first step.

        Raises:
            CheckpointError: it could not be written, or the other run has deleted its checkpoint.
        """
        write = partial(write_start, self.checkpoint.path, moments=self.moments)
        return store.save(step=0, write=write, delivery=delivery)


def find_fork(
    config: CommonConfig,
    *,
    tokenizer: Tokenizer,
    print_line: Callable[[str], None],
) -> Fork | None:
    """Find and check the checkpoint that `fork_from` names; None if it is not set. Writes nothing.

    Args:
        print_line: prints messages about damaged checkpoints that are skipped.

    Raises:
        ConfigError: `fork_from` is not a run, has no such checkpoint, or trained another model.
        CheckpointError: the checkpoints of the run, or the one of the step, are damaged.
    """
    if config.fork_from is None:
        return None
    path, step = _parts(config.fork_from)
    run = path.resolve()
    if run == Path(config.out).resolve():
        raise ConfigError(
            f"fork_from={config.fork_from} is out= itself: give another out=, or leave fork_from "
            "out to resume that run"
        )
    recipe, their = config.recipe, _record(run, config.fork_from)
    checkpoint = _checkpoint(run, step, config.fork_from, print_line)
    if "reward_model" in (recipe, their.recipe) and recipe != their.recipe:
        remedy = f"Give model={checkpoint.model_dir} in place of fork_from="
        raise ConfigError(
            f"fork_from={config.fork_from} is a run of recipe={their.recipe}, but this is a run "
            f"of recipe={recipe}: only one of them has a reward model's head. "
            + ("Choose another run" if their.recipe == "reward_model" else remedy)
        )
    model = config.model.path
    check_fork(checkpoint, model=model, tokenizer=tokenizer, lora=config.lora)
    if config.lora.trains_adapter:
        _check_base(their.settings, config.fork_from, model)
    # The first checkpoint of a fork without moments has none.
    moments = recipe == their.recipe and (checkpoint.path / "optimizer").is_dir()
    return Fork(
        run=run,
        run_id=their.run_id,
        checkpoint=checkpoint,
        moments=moments,
    )


def _parts(fork_from: str) -> tuple[Path, int | None]:
    """Run directory and step that `fork_from` names; the step is None if it is not given."""
    run, colon, step = fork_from.rpartition(":")
    if not colon or Path(fork_from).exists():
        return Path(fork_from), None
    if step == "best":
        best = CheckpointStore(Path(run) / "checkpoints", keep=1).best()
        if best is None:
            why = f"{run} has no best checkpoint (set keep_best=); write RUN:STEP, or RUN"
            raise _refused(fork_from, why)
        return Path(run), best.step
    if not step.isdecimal():
        raise _refused(fork_from, f"{step!r} is not a step; write RUN:STEP, RUN:best, or RUN")
    return Path(run), int(step)


def _refused(fork_from: str, why: str) -> ConfigError:
    return ConfigError(f"fork_from={fork_from}: {why}")


def _record(run: Path, fork_from: str) -> RunRecord:
    try:
        record = RunRecord.of_run(run)
        problem = f"{run / 'config.json'} is missing, or was not written by a run"
    except DataError as error:
        record, problem = None, str(error)
    if record is None or not (record.recipe and record.run_id):
        why = f"it is no run: {problem}; give the out= of a run, RUN or RUN:STEP"
        raise _refused(fork_from, why)
    return record


def _checkpoint(
    run: Path, step: int | None, fork_from: str, print_line: Callable[[str], None]
) -> Checkpoint:
    store = CheckpointStore(run / "checkpoints", keep=1)
    found = store.latest(print_line) if step is None else store.of_step(step)
    if found is not None:
        return found
    kept = ", ".join(str(each.step) for each in store.complete())
    if not kept:
        why = f"{run} has no checkpoint yet; it writes one every checkpoint.every= steps"
    else:
        why = (
            f"{run} keeps no checkpoint of step {step}; it has those of steps {kept} (keep_every= "
            "and keep_best= keep more)"
        )
    raise _refused(fork_from, why)


def _check_base(settings: Mapping[str, Any], fork_from: str, model: str) -> None:
    """Raise ConfigError if the adapter has another base model, as far as paths show it."""
    theirs = at_path(settings, "model.path")
    if not isinstance(theirs, str) or not Path(theirs).exists():
        return  # a hub name, or a directory that has moved
    if Path(theirs).resolve() != Path(model).resolve():
        raise ConfigError(
            f"model={model}, but the adapter of fork_from={fork_from} was trained on {theirs}; "
            f"give model={theirs}",
            field="model.path",
        )


def check_fork(
    checkpoint: Checkpoint,
    *,
    model: str,
    tokenizer: Tokenizer,
    lora: LoraSettings,
) -> None:
    """Check that a model, its tokenizer and its adapter match those of the checkpoint.

    Raises:
        ConfigError: they differ; the message has the field, both values, and the remedy.
        CheckpointError: one of them cannot be read.
    """
    saved = checkpoint.model_dir
    ours, theirs = _shape(model), _shape(saved)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"model={model} is not the model of {checkpoint.path}: its {name} is "
                f"{ours.get(name)!r}, and {theirs.get(name)!r} there. Give the model= of that run",
                field="model.path",
            )
    if difference := first_difference(tokenizer, load_tokenizer(saved), "here", "there"):
        raise ConfigError(
            f"the tokenizer of model={model} differs from that of {checkpoint.path}: "
            f"{difference}. Give the model= of that run",
            field="model.path",
        )
    adapter = Path(checkpoint.adapter_dir)
    if lora.trains_adapter and not adapter.is_dir():
        raise ConfigError(
            f"{checkpoint.path} is a fully trained model, but lora.rank={lora.rank} would train "
            f"an adapter on model={model}, without its weights. Leave out the adapter, or start "
            f"from model={saved} instead",
            field="lora.rank",
        )
    if adapter.is_dir() and not lora.trains_adapter:
        raise ConfigError(
            f"{checkpoint.path} holds an adapter, but lora.rank= is not given: give that run's "
            f"lora.rank=, or, to train all weights, start from model={saved} (the adapter merged) "
            "instead",
            field="lora.rank",
        )
    if lora.trains_adapter:
        check_same_form(lora, model, str(adapter))


def _shape(model: str) -> dict[str, Any]:
    config = load_config(model).to_dict()
    return {
        name: value
        for name, value in config.items()
        if name not in _PASSED_OVER and not name.startswith("_")
    }


def write_start(checkpoint: Path, path: Path, *, moments: bool) -> None:
    """Write the checkpoint of step 0 from another checkpoint's files.

    These are the model, the adapter and, if requested, AdamW's moments. Files are hard links if
    both paths are on the same file system, else copies.

    Raises:
        OSError: a file could not be written, or the other checkpoint no longer exists.
    """
    for name in ("model", "adapter", *(["optimizer"] if moments else [])):
        if (checkpoint / name).is_dir() or name == "model":
            shutil.copytree(checkpoint / name, path / name, copy_function=_link_or_copy)
    write_trainer(path, TrainerState(moments=moments))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or a file system without hard links
        shutil.copy2(source, target)
