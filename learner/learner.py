"""One model, its optimizer, and the optimizer step. Knows nothing of where rows come from."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.batching import Batch, TrainingRow, collate, split_by_token_budget
from distill.cpu_linear import use_onednn
from distill.errors import CheckpointError, NonFiniteError
from distill.losses import Metrics, StepCounts, finish_metrics
from distill.models import load_causal_lm, resolve_device
from distill.tensors import PackedTensors
from learner.config import TOKEN_BUDGET, LearnerConfig
from learner.forward import Forward
from learner.memory import check_fits
from learner.optimizer import build_optimizer, build_schedule

# Runs the forward pass over a micro-batch and returns its share of the step's loss, and metrics as
# `distill.losses` has them.
LossFunction = Callable[[Forward, Batch, StepCounts], tuple[Tensor, Metrics]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Rows under one loss. An optimizer step has one, or several: distillation beside SFT, say.

    Attributes:
        rows_per_unit: rows that follow one another and stay in one micro-batch: 2 for pairs.
        coef: what its loss is multiplied by.
    """

    rows_D: Sequence[TrainingRow]
    loss: LossFunction
    rows_per_unit: int = 1
    coef: float = 1.0


class Learner:
    """Applies losses to rows. Weights, gradients and moments are fp32, whatever it computes in.

    Raises:
        CheckpointError: the starting checkpoint cannot be loaded.
        ConfigError: it does not fit into memory.
    """

    def __init__(self, config: LearnerConfig, dump_dir: str) -> None:
        """`dump_dir` receives the rows of a step that turned non-finite."""
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.device = resolve_device(config.device)
        check_fits(config.model, self.device)
        self.model = load_causal_lm(config.model, dtype=torch.float32, device=self.device)
        if config.dtype == "float32":
            use_onednn(self.model)
        self.model.train()
        self._config = config
        self._token_budget = config.token_budget or TOKEN_BUDGET[self.device.partition(":")[0]]
        self._dump_dir = Path(dump_dir)
        self._forward = Forward(
            self.model,
            dtype=getattr(torch, config.dtype),
            gradient_checkpointing=config.gradient_checkpointing,
        )
        self._optimizer = build_optimizer(self.model, config.optimizer)
        self._schedule = build_schedule(self._optimizer, config.optimizer, config.total_steps)

    def step(self, *parts: Part) -> dict[str, float]:
        """One optimizer step over all rows, accumulated in micro-batches under the token budget.

        Returns `train/*` metrics, and those of the parts' losses.

        Raises:
            NonFiniteError: a loss or the gradient norm is NaN or infinite. The weights are as
                before the step, and the offending rows are in `dump_dir`.
        """
        rows_D = [row for part in parts for row in part.rows_D]
        made: dict[str, float] = defaultdict(float)
        padded = 0
        self._optimizer.zero_grad(set_to_none=True)
        for part in parts:
            padded += self._accumulate(part, made)
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self._config.optimizer.max_grad_norm
        ).item()
        if not math.isfinite(grad_norm):
            raise self._non_finite(f"the gradient norm is {grad_norm}", rows_D)
        lr = self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        self._schedule.step()
        return finish_metrics(made) | {
            "train/grad_norm": grad_norm,
            "train/lr": lr,
            "train/tokens": sum(row.num_trained for row in rows_D),
            # of the padded micro-batches, before shared contexts are taken out of them
            "train/padding_share": 1 - sum(len(row) for row in rows_D) / padded,
        }

    def _accumulate(self, part: Part, made: dict[str, float]) -> int:
        """Adds the part's gradients, and its metrics to `made`; returns the tokens it padded to."""
        counts = StepCounts(sum(row.num_trained for row in part.rows_D), len(part.rows_D))
        padded = 0
        for rows_B in split_by_token_budget(part.rows_D, self._token_budget, part.rows_per_unit):
            batch = collate(rows_B, self.device)
            loss, metrics = part.loss(self._forward, batch, counts)
            loss = part.coef * loss
            if not math.isfinite(loss.item()):
                raise self._non_finite(f"the loss is {loss.item()}", rows_B)
            loss.backward()
            padded += batch.tokens_BT.numel()
            made["train/loss"] += loss.item()
            for name, value in metrics.items():
                if name.endswith("_max"):
                    made[name] = max(made.get(name, -math.inf), value.item())
                elif name.endswith("_min"):
                    made[name] = min(made.get(name, math.inf), value.item())
                else:
                    made[name] += value.item()
        return padded

    @torch.no_grad()
    def logprobs(self, rows_D: Sequence[TrainingRow]) -> list[np.ndarray]:
        """log p_T of each row's trained tokens under the present weights, one array a row."""
        self.model.eval()
        by_row: dict[int, np.ndarray] = {}
        for rows_B in split_by_token_budget(rows_D, self._token_budget):
            logprobs_N = self._forward(collate(rows_B, self.device)).logprobs_N.cpu().numpy()
            ends = np.cumsum([row.num_trained for row in rows_B])[:-1]
            for row, part_N in zip(rows_B, np.split(logprobs_N, ends), strict=True):
                by_row[id(row)] = part_N
        self.model.train()
        return [by_row[id(row)] for row in rows_D]

    def tensors(self) -> dict[str, Tensor]:
        """The present weights themselves, on the learner's device; the next step changes them.

        Each stored tensor once: a tied lm_head is left to its embedding.
        """
        tensors, seen = {}, set()
        for name, parameter in self.model.state_dict().items():
            if parameter.data_ptr() not in seen:
                seen.add(parameter.data_ptr())
                tensors[name] = parameter
        return tensors

    def weights(self) -> PackedTensors:
        """`tensors` as buffers in main memory: views of them where they are there already."""
        return PackedTensors.pack(self.tensors())

    def trainer_state(self) -> dict[str, Any]:
        """Everything besides the weights that the next step depends on."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }

    def load_trainer_state(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError if the state was written for another model."""
        try:
            self._optimizer.load_state_dict(state["optimizer"])
            self._schedule.load_state_dict(state["schedule"])
            torch.set_rng_state(state["torch_rng"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the optimizer state does not fit this model: {error}"
            ) from error
        for parameter, moments in self._optimizer.state.items():  # torch does not look at shapes
            if moments["exp_avg"].shape != parameter.shape:
                raise CheckpointError(
                    f"the optimizer state does not fit this model: moments of shape "
                    f"{tuple(moments['exp_avg'].shape)} for weights of {tuple(parameter.shape)}"
                )

    def _non_finite(self, what: str, rows: Sequence[TrainingRow]) -> NonFiniteError:
        self._dump_dir.mkdir(parents=True, exist_ok=True)
        path = self._dump_dir / "non_finite_rows.npz"
        arrays = {}
        for i, row in enumerate(rows):
            for name in ("tokens_T", "loss_mask_T", "weights_T", "behaviour_logprobs_T"):
                arrays[f"row{i}/{name}"] = getattr(row, name)
            arrays[f"row{i}/temperature"] = np.array(row.temperature)
            arrays[f"row{i}/source"] = np.array(row.source)
        np.savez(path, **arrays)
        return NonFiniteError(
            f"{what}; training stops before the weights are touched. The {len(rows)} rows are in "
            f"{path} (numpy.load); a lower lr or an earlier checkpoint is the usual remedy"
        )
