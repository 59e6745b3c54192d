"""Frozen models in the learner's process: teachers with their whole distribution, references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from distill.models.loading import load_causal_lm, resolve_device
from distill.models.logprobs import Event, as_outcomes, kept_until_backward, model_width
from distill.objective.batching import Batch, TrainingRow, collate, split_by_token_budget
from distill.objective.objectives import TeacherDistribution
from distill.privileged import in_context
from distill.types import FloatArray, TokenArray
from learner.config import TOKEN_BUDGET, LearnerConfig
from learner.forward import Forward
from learner.memory import FROZEN, Holding, check_fits


class LocalTeachers:
    """Frozen models by name; each scores the rows that name it, at the rows' own temperature."""

    def __init__(
        self, models: Mapping[str, str], *, dtype: torch.dtype, device: str, event: Event = ()
    ) -> None:
        """`models` are checkpoints by the teachers' names; `event`, tokens that are one outcome.

        Raises:
            CheckpointError: one cannot be loaded.
            ConfigError: one does not fit into memory.
        """
        self._device = device
        self._forwards: dict[str, Forward] = {}
        self.models: dict[str, tuple[str, PreTrainedModel]] = {}  # by name, with their checkpoints
        for name, path in models.items():
            check_fits(path, device, Holding(f"a teacher's weights in {dtype}", dtype.itemsize))
            model = load_causal_lm(path, dtype=dtype, device=device).requires_grad_(False)
            self._forwards[name] = Forward(model, event=event)
            self.models[name] = path, model

    @torch.no_grad()
    def distribution_of(self, batch: Batch) -> TeacherDistribution:
        """log q_T of slices of the batch's trained tokens, by the batch's teacher.

        The teacher runs once over the batch, to its hidden states; its distributions are made a
        chunk of positions at a time beside the learner's own.
        """
        teacher = self._forwards[batch.rows[0].teacher]
        assert len({row.teacher for row in batch.rows}) == 1, "a batch has one teacher"
        hidden_NH = teacher.hidden(collate([as_seen(row) for row in batch.rows], self._device))

        @torch.no_grad()
        def log_q(positions: slice) -> torch.Tensor:
            with torch.autocast(hidden_NH.device.type, enabled=False):  # not as the learner's is
                return teacher.head.log_distribution(
                    hidden_NH[positions], batch.temperature_N[positions]
                )

        elements = len(batch.tokens_N) * model_width(teacher.head.projection)
        return kept_until_backward(log_q, elements)

    def read(
        self, rows_B: Sequence[TrainingRow], ids_K: TokenArray
    ) -> list[tuple[FloatArray, FloatArray]]:
        """(log q_T of each row's trained tokens, of the tokens `ids_K` there): (N,) and (N, K), off
        the distribution that the loss is given."""
        batch = collate(rows_B, self._device)
        log_q = self.distribution_of(batch)
        event = self._forwards[rows_B[0].teacher].head.event
        columns_N = as_outcomes(batch.tokens_N, event)
        columns_K = torch.from_numpy(ids_K.astype(np.int64)).to(batch.tokens_N.device)
        found, start = [], 0
        for row in rows_B:  # one at a time: its positions times the vocabulary
            here, start = slice(start, start + row.num_trained), start + row.num_trained
            log_q_NV = log_q(here)
            own_N = log_q_NV.gather(1, columns_N[here, None]).squeeze(1)
            listed_NK = log_q_NV.index_select(1, columns_K)
            found.append((own_N.cpu().numpy(), listed_NK.cpu().numpy()))
        return found

    @torch.no_grad()
    def logprobs(self, name: str, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """log q_T of each row's trained tokens by the teacher of that name: one array per row."""
        forward = self._forwards[name]
        return [forward(collate([row], self._device)).logprobs_N.cpu().numpy() for row in rows_D]


class FrozenReference:
    """A frozen model on one device, without optimizer; computes in the learner's precision."""

    def __init__(self, config: LearnerConfig) -> None:
        """Raises:
        CheckpointError: it cannot be loaded.
        ConfigError: it does not fit into memory.
        """
        self._device = resolve_device(config.device)
        check_fits(config.model, self._device, FROZEN)
        model = load_causal_lm(config.model, dtype=torch.float32, device=self._device)
        self._forward = Forward(
            model.requires_grad_(False),
            dtype=getattr(torch, config.dtype),
            event=() if config.stops is None else config.stops.event,
        )
        self._token_budget = config.token_budget or TOKEN_BUDGET[self._device.partition(":")[0]]

    @torch.no_grad()
    def logprobs(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """log p_T of each row's trained tokens: one array per row."""
        by_row: dict[int, FloatArray] = {}
        for rows_B in split_by_token_budget(rows_D, self._token_budget):
            logprobs_N = self._forward(collate(rows_B, self._device)).logprobs_N.cpu().numpy()
            ends = np.cumsum([row.num_trained for row in rows_B])[:-1]
            parts = np.split(logprobs_N, ends)
            by_row |= {id(row): part_N for row, part_N in zip(rows_B, parts, strict=True)}
        return [by_row[id(row)] for row in rows_D]


def as_seen(row: TrainingRow) -> TrainingRow:
    """The row as its teacher sees it: with the privileged context, where there is one.

    Its trained tokens are the row's own, in the same order. Which experts the engine sent them to
    is forgotten: a teacher routes by itself.
    """
    row = row if row.experts_TLK is None else replace(row, experts_TLK=None)
    context_T = row.teacher_context_T
    if context_T is None:
        return row

    def behind(values_T: np.ndarray) -> np.ndarray:
        nothing_T = np.zeros(len(context_T), values_T.dtype)
        return in_context(values_T, nothing_T, row.teacher_replaces)

    return replace(
        row,
        tokens_T=in_context(row.tokens_T, context_T, row.teacher_replaces),
        loss_mask_T=behind(row.loss_mask_T),
        advantages_T=behind(row.advantages_T),
        behaviour_logprobs_T=behind(row.behaviour_logprobs_T),
        proximal_logprobs_T=None,
        reference_logprobs_T=None,
        teacher_context_T=None,
        teacher_replaces=0,
        sampled_kl_coef_T=None,
        clipped_kl_coef_T=None,
        teacher_gaps_T=None,
    )
