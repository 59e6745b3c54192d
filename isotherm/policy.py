"""Policy for hand-written training loops: sample, score, step, save, and push to its sampler."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cluster.config.arguments import built
from cluster.config.files import by_name
from cluster.run_files.fork import check_fork
from cluster.weights.publisher import Publisher
from cluster.weights.transport import PushSettings
from distill.data.example_encoder import ExampleEncoder
from distill.data.sft_rows import supervised_row
from distill.durable_files import disk_remedy, whole_write
from distill.errors import CheckpointError, ConfigError, DataError
from distill.models.loading import context_length, vocab_size
from distill.models.model_files import check_model_files
from distill.objective.batching import TrainingRow
from distill.objective.rows import row_to_score
from distill.records import TrainedGroups
from distill.sampling import UNSCALED, Sampling
from distill.types import FloatArray, TokenArray
from isotherm.losses import Loss, LossUnit, choose_loss
from isotherm.sampler import Completion, Prompt, Sampler, Samples
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.plan import Part
from learner.teachers import LocalTeachers

_PUSH_TIMEOUT_S = 3600.0


class Policy(Samples):
    """A model with an optimizer, and a sampler with the model's weights as of the last `push`.

    Attributes:
        sampler: a copy of the model in this process, used by `sample`.
        learner: the learner, for methods that this class does not wrap.
        version: version of the weights in the sampler, which is the number of pushes.
        steps: number of optimizer steps so far, including those of a loaded state.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        sampler_dtype: str = "float32",
        stop_tokens: str = "",
        **settings: Any,
    ) -> None:
        """
        Args:
            model: Hugging Face checkpoint directory (or hub name) to start from.
            sampler_dtype: dtype of the sampler's weights and activations.
            stop_tokens: see `Sampler`; `supervised_row` ends with one of them.
            settings: settings of the learner (`learner.config.LearnerConfig`): lr, max_grad_norm,
                lora_rank, token_budget, dtype, seed, threads, ...; a schedule needs total_steps.

        Raises:
            CheckpointError: the checkpoint cannot be loaded.
            ConfigError: a value out of range, or the model does not fit into memory.
        """
        self._config = _learner_config(model, device, settings)
        self._dump_dir = str(Path(tempfile.gettempdir()) / f"isotherm-failed-{os.getpid()}")
        self.learner = Learner(self._config, self._dump_dir)
        seed = self._config.seed
        self.sampler = Sampler(
            model, dtype=sampler_dtype, device=device, seed=seed, stop_tokens=stop_tokens
        )
        self.tokenizer = self.sampler.tokenizer
        check_model_files(model, self.tokenizer)
        self.version = self.steps = 0
        self._accumulated: dict[LossUnit, int] = defaultdict(int)
        self._teachers: dict[str, LocalTeachers] = {}
        if self._config.lora.adapter is not None:
            self.push()  # the sampler's checkpoint lacks the adapter

    # rollouts

    def _sampled(
        self, prompts: Sequence[Prompt], sampling: Sampling, num_samples: int, seed: int | None
    ) -> list[list[Completion]]:
        return self.sampler._sampled(prompts, sampling, num_samples, seed)

    def logprobs(self, tokens: npt.ArrayLike, *, temperature: float, start: int = 1) -> FloatArray:
        """log p_T of given tokens from index `start` to the end, under the learner's weights.

        Raises:
            ConfigError, DataError: the temperature is not above 0, or there is nothing to score.
        """
        tokens_T = np.asarray(tokens, np.int32)
        self._check_tokens(tokens_T)
        row = row_to_score(tokens_T, np.arange(len(tokens_T)) >= start, temperature, "tokens")
        return self.learner.logprobs([row])[0]

    def supervised_row(self, prompt: str, completion: str) -> TrainingRow:
        """Row for loss="cross_entropy": the prompt, and the completion with EOS, which are trained.

        Raises:
            DataError: there is no EOS, the text cannot be encoded, or it exceeds the context.
        """
        chain = self._encoder.written_completion(prompt, completion, "completion")
        return supervised_row(chain, f"prompt {prompt[:20]!r}")

    @cached_property
    def _encoder(self) -> ExampleEncoder:
        config = self.learner.model.config
        return ExampleEncoder(
            tokenizer=self.tokenizer,
            vocab_size=vocab_size(config),
            max_length=context_length(config),
            stop_ids=self.sampler.stops.ids,
        )

    # training

    def forward_backward(
        self, batch: Sequence[TrainingRow], loss: Loss, *, teacher: str | None = None
    ) -> dict[str, float]:
        """Add the gradient of the batch's loss to the gradient accumulated since `optim_step`.

        Args:
            loss: "cross_entropy"; a policy loss over the rows' advantages, "importance_sampling",
                "ppo", "cispo", "dro" or "gspo", or an `ObjectiveConfig` with its settings; a
                `PreferenceLoss`, over pairs of rows; or a function (logprobs_N, old_N,
                advantages_N) -> loss of each token (N,), as for `loss=module:function` of a run.
                Large batches are split into micro-batches, and the function is called for each.
            teacher: checkpoint of the teacher for `ObjectiveConfig(estimator="full")`. It is loaded
                once.

        Returns the loss's metrics, including `train/loss`, as means over this batch.

        Raises:
            ConfigError: an unknown loss, or a loss that is a mean over another unit than that of an
                earlier call since `optim_step`.
            NonFiniteError: a loss is NaN or infinite. The accumulated gradient is dropped.
        """
        if not batch:
            raise ConfigError("the batch is empty; give at least one row", field="batch")
        for i, row in enumerate(batch):
            if not isinstance(row, TrainingRow):
                raise ConfigError(
                    f"batch[{i}] is a {type(row).__name__}, not a TrainingRow; a completion makes "
                    "one: completion.row(advantages=...)",
                    field="batch",
                )
            self._check_tokens(row.tokens_T)
        chosen = choose_loss(loss, None if teacher is None else self._teacher(teacher))
        if others := self._accumulated.keys() - {chosen.unit}:
            raise ConfigError(
                f"loss={loss} is a mean over {chosen.unit}s, and the gradients that have "
                f"accumulated are means over {others.pop()}s: they cannot be averaged together. "
                "Call optim_step between them"
            )
        count = chosen.count(batch)
        part = Part(
            rows_D=batch, loss=chosen.function, rows_per_unit=chosen.rows_per_unit, coef=count
        )
        try:
            metrics = self.learner.forward_backward(part)
        except Exception:
            self._drop_gradient()
            raise
        self._accumulated[chosen.unit] += count
        return metrics | {"train/loss": metrics["train/loss"] / count}

    def _teacher(self, path: str) -> LocalTeachers:
        if path not in self._teachers:
            self._teachers[path] = LocalTeachers(
                {"": path},
                dtype=torch.float32,
                device=self.learner.device,
                packing=self._config.learner.packing,
            )
        return self._teachers[path]

    def _check_tokens(self, tokens_T: TokenArray) -> None:
        """Raise DataError if tokens are not in the model's vocabulary."""
        size = vocab_size(self.learner.model.config)
        if len(tokens_T) and not 0 <= tokens_T.min() <= tokens_T.max() < size:
            raise DataError(
                f"token ids from {tokens_T.min()} to {tokens_T.max()} are given, but the model "
                f"has ids from 0 to {size - 1}; encode the text with this model's tokenizer"
            )

    def optim_step(self) -> dict[str, float]:
        """Take one AdamW step with the accumulated gradient, and drop the gradient.

        Several `forward_backward` calls are equal to one call with all their rows. The sampler's
        weights do not change until `push`.

        Returns `train/grad_norm`, `train/lr`, and `time/optimizer` in seconds.

        Raises:
            ConfigError: no gradient has accumulated.
            NonFiniteError: the gradient is not finite. The weights are unchanged.
        """
        if not self._accumulated:
            raise ConfigError("no gradient has accumulated; call forward_backward first")
        [count] = self._accumulated.values()
        self._accumulated.clear()
        metrics = self.learner.optim_step(count)
        self.steps += 1
        return metrics

    def _drop_gradient(self) -> None:
        self._accumulated.clear()
        self.learner.zero_grad()

    def push(self) -> dict[str, float]:
        """Copy the current weights to the sampler, as the next version; return `push/*` metrics.

        Raises:
            NonFiniteError, EngineError: the weights are not finite, or the push failed.
        """
        metrics = self._publisher(self.learner.weights(), self.version + 1, TrainedGroups())
        self.version += 1
        return metrics

    @cached_property
    def _publisher(self) -> Publisher:
        settings = PushSettings(
            choice="shared_memory",
            served=False,
            device=self.learner.device,
            directory="",
            model=self._config.model,
            temperature=UNSCALED,
            dtype=self._config.dtype,
            probe_every=0,  # a probe scores rows at the T of a run; there is no such T here
            prove_every=0,  # one process: the sampler copies the weights directly
            timeout_s=_PUSH_TIMEOUT_S,
        )
        engines = {"the sampler": self.sampler.engine}
        return Publisher(engines, settings, self._scores)

    def _scores(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        return self.learner.logprobs(rows_D)

    # files

    def save_state(self, directory: str | Path, *, keep: int = sys.maxsize) -> Path:
        """Write weights, optimizer moments, schedule and RNG to `directory/step-N`; return this.

        The layout is that of a run's checkpoints (`learner.checkpoint`). The gradient accumulated
        since `optim_step` is not saved.

        Args:
            keep: number of newest states to keep in the directory.

        Raises:
            CheckpointError: the state could not be written. Earlier states are unchanged.
        """
        store = CheckpointStore(directory, keep)
        return store.save(
            step=self.steps,
            write=partial(self.learner.save, tokenizer=self.tokenizer),
            # The id distinguishes states with the same number of steps: each is written.
            delivery={"next_seed": self.sampler.next_seed, "id": uuid.uuid4().hex},
        ).path

    def load_state(self, directory: str | Path) -> Checkpoint:
        """Continue from the newest intact state in `directory`, and push its weights.

        The directory is that of `save_state`, or the checkpoints/ of a run. The accumulated
        gradient is dropped.

        Raises:
            CheckpointError: there is no intact state in the directory.
            ConfigError: the state is of another model or another kind of adapter. The policy is
                unchanged.
        """
        found = CheckpointStore(directory, keep=1).latest()
        if found is None:
            raise CheckpointError(
                f"{directory} holds no saved state (step-N directories); save_state writes them"
            )
        config = self._config
        check_fork(found, model=config.model, tokenizer=self.tokenizer, lora=config.lora)
        self._accumulated.clear()
        del self.learner  # two learners may not fit into memory
        self.learner = Learner(config.resumed(found), self._dump_dir)
        self.learner.load_trainer_state(found.path)
        self.steps = found.step
        self.sampler.next_seed = found.delivery.get("next_seed", self.sampler.next_seed)
        self.push()
        return found

    def export(self, directory: str | Path) -> Path:
        """Write the model and its tokenizer in the format of a run's final/. An adapter is merged.

        Raises:
            CheckpointError: the directory exists, or cannot be written.
        """
        path = Path(directory)
        if path.exists():
            raise CheckpointError(f"{path} exists; choose another directory, or remove it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_write(path) as partial:
                self.learner.export(partial, self.tokenizer)
        except Exception as error:  # OSError; safetensors and tokenizers raise other classes
            raise CheckpointError(f"cannot write {path}: {error}. {disk_remedy(error)}") from error
        return path

    def close(self) -> None:
        """Close the sampler. The memory is freed when this object is garbage-collected."""
        self.sampler.close()


def _learner_config(model: str, device: str, settings: dict[str, Any]) -> LearnerConfig:
    all_settings = {"total_steps": 1, "model": model, "device": device} | settings
    made = built(LearnerConfig, by_name(LearnerConfig, all_settings))
    if "total_steps" not in settings and made.learner.lr_schedule != "constant":
        raise ConfigError(
            f"learner.lr_schedule={made.learner.lr_schedule} ends at total_steps=; give "
            "total_steps= as well"
        )
    return made
