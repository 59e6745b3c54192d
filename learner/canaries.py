"""Canaries of a learner's frozen models: copies of teachers or their heads, adapters' bases.

    checksums   of every weight on the worker: they never change for a frozen model, so a single
                changed number is detected, whatever its effect on rows, and its tensor is named
    answers     log-probs of fixed rows by the forward pass of the loss: they reveal a wrong T, or a
                change of the computation, which leave the weights unchanged

If the models are sharded, each worker computes checksums of its shards, and all workers run the
rows together. cluster/runtime/canaries.py decides when canaries run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from distill.engine import EngineInfo, Score, ScoreRequest
from distill.handshake.canary import CanaryRows, CanaryScores
from distill.models.loading import context_length, vocab_size
from distill.objective.batching import TrainingRow, split_by_token_budget
from distill.states import HiddenStates
from distill.types import FloatArray, TopLogprobs
from distill.weights.digests import digest_of, tensor_checksum
from learner.frozen import FrozenModel, LocalTeachers, Teacher, TeacherHead
from learner.sharding import local, stored

# Number of tokens at each position, besides the row's own, whose log-probs are compared. They are
# taken from the whole distribution, as for estimator=full.
_LISTED = 16
# Log-probs of rows at T, by the row's id: of the row's tokens, and of listed tokens (may be empty).
Run = Callable[[Sequence[TrainingRow], CanaryRows], Mapping[int, tuple[FloatArray, FloatArray]]]
# log p_T of the trained tokens of batches, one array for each row.
BaseLogprobs = Callable[[Sequence[list[TrainingRow]]], list[list[FloatArray]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyQuestion:
    """Canary request to every worker.

    Attributes:
        company: numbers of other rows in the batch; the canary rows are scored once for each.
        base: also check the model without its adapter, which is the reference.
    """

    temperature: float
    company: tuple[int, ...] = (0,)
    base: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyAnswer:
    """A worker's canary results for one frozen model.

    Attributes:
        teacher: name of the teacher; None: the base of the adapter.
        digest: digest of all weights of the model on this worker.
        changed: names of tensors that have changed since the first request.
        rows: canary rows that were scored.
        answers: results, one for each entry of `CopyQuestion.company`.
    """

    teacher: str | None
    info: EngineInfo
    digest: str
    changed: tuple[str, ...]
    rows: CanaryRows
    answers: list[CanaryScores]


class WatchedModel:
    """A frozen model with its canaries; stores the checksums of the first request."""

    def __init__(
        self,
        teacher: str | None,
        path: str,
        model: nn.Module,
        config: Any,
        *,
        dtype: str,
        run: Run,
        listed: int,
    ) -> None:
        self._teacher, self._model, self._run, self._listed = teacher, model, run, listed
        self._info = EngineInfo(
            kind="in the learner",
            model=path,
            vocab_size=vocab_size(config),
            context_length=context_length(config),
            weight_version=0,
            dtype=dtype,
            eos_token_ids=None,
            tokenizer=None,
            temperature_scaling="in the learner",
        )
        self._first: dict[str, str] | None = None

    def answer(self, question: CopyQuestion) -> CopyAnswer:
        """Compute the checksums, and score the canary rows once for each `question.company`."""
        sums = self._checksums()
        if self._first is None:
            self._first = sums
        rows = CanaryRows.of(self._info, question.temperature, given=self._listed)
        return CopyAnswer(
            teacher=self._teacher,
            info=self._info,
            digest=digest_of(sums),
            changed=tuple(name for name, value in sums.items() if self._first.get(name) != value),
            rows=rows,
            answers=[self._answered(rows, company) for company in question.company],
        )

    def _checksums(self) -> dict[str, str]:
        return {
            name: tensor_checksum(local(weight))
            for name, weight in stored(self._model)
            if not weight.requires_grad
        }

    def _answered(self, rows: CanaryRows, company: int) -> CanaryScores:
        asked = rows.with_company(company)
        by_request = [training_rows(request, self._teacher or "") for request in asked]
        found = self._run([row for made in by_request for row in made], rows)
        scores = []
        for request, made in zip(asked[: len(rows.requests)], by_request, strict=False):
            parts = [found[id(row)] for row in made]
            top = None
            if request.given_NK is not None:
                top = TopLogprobs(ids_NK=request.given_NK, logprobs_NK=parts[0][1])
            scores.append(
                Score(logprobs_by_temperature=tuple(own_N for own_N, _ in parts), top=top)
            )
        return rows.answer(scores)


class Base(NamedTuple):
    """A model without its adapter; `dtype` is the compute precision."""

    model: PreTrainedModel
    path: str
    dtype: str
    logprobs: BaseLogprobs


def watched(
    teachers: LocalTeachers | None, base: Base | None, token_budget: int
) -> list[WatchedModel]:
    """Frozen models of a worker: its copies of teachers or their heads, and its adapter's base."""
    found = []
    for name, teacher in ({} if teachers is None else teachers.models).items():
        if isinstance(teacher, TeacherHead):
            model, config, dtype = (
                teacher.projection,
                teacher.config,
                teacher.projection.weight.dtype,
            )
            run = partial(_by_head, teacher, token_budget)
        else:
            assert isinstance(teacher, FrozenModel)
            model, config, dtype = teacher.model, teacher.model.config, teacher.model.dtype
            run = partial(_by_teacher, teacher, token_budget)
        found.append(
            WatchedModel(
                name,
                teacher.path,
                model,
                config,
                dtype=str(dtype).removeprefix("torch."),
                run=run,
                listed=_LISTED,
            )
        )
    if base is not None:
        run = partial(_by_base, base.logprobs, token_budget)
        model, path = base.model, base.path
        found.append(
            WatchedModel(None, path, model, model.config, dtype=base.dtype, run=run, listed=0)
        )
    return found


def training_rows(request: ScoreRequest, teacher: str) -> list[TrainingRow]:
    """A row for each of the request's temperatures, with every token from `start` on trained."""
    nothing_T = np.zeros(len(request.tokens_T), np.float32)
    return [
        TrainingRow(
            tokens_T=request.tokens_T,
            loss_mask_T=np.arange(len(request.tokens_T)) >= request.start,
            advantages_T=nothing_T,
            behaviour_logprobs_T=nothing_T,
            temperature=temperature,
            source="a canary",
            teacher=teacher,
        )
        for temperature in request.temperatures
    ]


def _by_teacher(
    teacher: Teacher, token_budget: int, rows_D: Sequence[TrainingRow], asked: CanaryRows
) -> dict[int, tuple[FloatArray, FloatArray]]:
    ids_K = np.empty(0, np.int32)
    if (given_NK := asked.requests[0].given_NK) is not None:
        ids_K = given_NK[0]
    found = {}
    for rows_B in split_by_token_budget(rows_D, token_budget):
        read = teacher.read(rows_B, ids_K)
        found |= {id(row): values for row, values in zip(rows_B, read, strict=True)}
    return found


def _by_head(
    head: TeacherHead, token_budget: int, rows_D: Sequence[TrainingRow], asked: CanaryRows
) -> dict[int, tuple[FloatArray, FloatArray]]:
    """Log-probs at drawn hidden states, alike for the same tokens: no engine is asked for any."""
    weight = head.projection.weight
    given_D = []
    for row in rows_D:
        generator = torch.Generator().manual_seed(int(row.tokens_T.sum()))
        states_NH = torch.randn(row.num_trained, weight.shape[1], generator=generator)
        states = HiddenStates.of(states_NH.to(weight.dtype))
        given_D.append(replace(row, teacher_states=states))
    found = _by_teacher(head, token_budget, given_D, asked)
    return {id(row): found[id(own)] for row, own in zip(rows_D, given_D, strict=True)}


def _by_base(
    logprobs: BaseLogprobs,
    token_budget: int,
    rows_D: Sequence[TrainingRow],
    _asked: CanaryRows,
) -> dict[int, tuple[FloatArray, FloatArray]]:
    batches = list(split_by_token_budget(rows_D, token_budget))
    nothing = np.empty(0, np.float32)
    return {
        id(row): (logprobs_N, nothing)
        for rows_B, made in zip(batches, logprobs(batches), strict=True)
        for row, logprobs_N in zip(rows_B, made, strict=True)
    }
