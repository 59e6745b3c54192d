"""Canaries of a learner's frozen models: copies of teachers or their heads, adapters' bases.

    checksums   of every weight on the worker: the weights of a frozen model never change, so a
                single changed number is detected, whatever its effect on rows, and the changed
                tensor is named
    answers     log-probs of fixed rows by the forward pass of the loss: they reveal a wrong T, or a
                change of the computation, which leave the weights unchanged

If the models are sharded, each worker computes checksums of its shards, and all workers run the
rows together. cluster/runtime/canaries.py decides when canaries run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from distill.engine import EngineInfo, Score, ScoreRequest
from distill.handshake.canary import CanaryAnswers, CanaryRows, CanaryScores
from distill.models.loading import context_length, vocab_size
from distill.objective.batching import TrainingRow
from distill.objective.rows import row_to_score
from distill.states import HiddenStates
from distill.types import FloatArray, TokenArray, TopLogprobs
from distill.weights.digests import digest_of, tensor_checksum
from learner.sharding import local, stored
from learner.teachers import FrozenModel, LocalTeachers, TeacherHead

# Number of tokens at each position, besides the row's own, whose log-probs are compared. They are
# taken from the whole distribution, as for estimator=full.
_LISTED = 16
# Signature of `Teacher.read`: log-probs at T of each row's trained tokens, and of given tokens at
# the same positions.
Read = Callable[[Sequence[TrainingRow], TokenArray], list[tuple[FloatArray, FloatArray]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyQuestion:
    """Canary request to every worker.

    Attributes:
        filler: number of other rows in the batch; the canary rows are scored once for each entry.
        base: also check the model without its adapter, which is the reference.
    """

    temperature: float
    filler: tuple[int, ...] = (0,)
    base: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyAnswer:
    """A worker's canary results for one frozen model.

    Attributes:
        teacher: name of the teacher; None: the base of the adapter.
        digest: digest of all weights of the model on this worker.
        changed: names of tensors that have changed since the first request.
        scored: answers to the canary rows, one for each entry of `CopyQuestion.filler`.
    """

    teacher: str | None
    digest: str
    changed: tuple[str, ...]
    scored: CanaryAnswers


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
        read: Read,
        listed: int,
    ) -> None:
        self._teacher, self._model, self._read = teacher, model, read
        self._listed = listed
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
        """Compute the checksums, and score the canary rows once for each `question.filler`."""
        sums = self._checksums()
        if self._first is None:
            self._first = sums
        rows = CanaryRows.of(self._info, question.temperature, given=self._listed)
        answers = [self._answered(rows, filler) for filler in question.filler]
        return CopyAnswer(
            teacher=self._teacher,
            digest=digest_of(sums),
            changed=tuple(name for name, value in sums.items() if self._first.get(name) != value),
            scored=CanaryAnswers(self._info, rows, answers),
        )

    def _checksums(self) -> dict[str, str]:
        return {
            name: tensor_checksum(local(weight))
            for name, weight in stored(self._model)
            if not weight.requires_grad
        }

    def _answered(self, rows: CanaryRows, filler: int) -> CanaryScores:
        asked = rows.with_filler(filler)
        by_request = [training_rows(request, self._teacher or "") for request in asked]
        ids_K = np.empty(0, np.int32)
        if (given_NK := rows.requests[0].given_NK) is not None:
            ids_K = given_NK[0]
        rows_D = [row for made in by_request for row in made]
        found = dict(zip(map(id, rows_D), self._read(rows_D, ids_K), strict=True))
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


def watched(teachers: LocalTeachers, token_budget: int) -> list[WatchedModel]:
    """A worker's copies of teachers or their heads."""
    found = []
    for name, teacher in teachers.models.items():
        if isinstance(teacher, TeacherHead):
            model, config, read = teacher.projection, teacher.config, partial(_read_head, teacher)
        else:
            assert isinstance(teacher, FrozenModel)
            model, config = teacher.model, teacher.model.config
            read = partial(teacher.read, token_budget=token_budget)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        found.append(
            WatchedModel(
                name, teacher.path, model, config,
                dtype=dtype, read=read, listed=_LISTED,
            )
        )  # fmt: skip
    return found


def training_rows(request: ScoreRequest, teacher: str) -> list[TrainingRow]:
    """A row for each of the request's temperatures, with every token from `start` on trained."""
    mask_T = np.arange(len(request.tokens_T)) >= request.start
    made = (row_to_score(request.tokens_T, mask_T, T, "a canary") for T in request.temperatures)
    return [replace(row, teacher=teacher) for row in made]


def _read_head(
    head: TeacherHead, rows_B: Sequence[TrainingRow], ids_K: TokenArray
) -> list[tuple[FloatArray, FloatArray]]:
    """Log-probs at random hidden states, seeded by the row's tokens. No engine is called."""
    weight = head.projection.weight
    given_B = []
    for row in rows_B:
        generator = torch.Generator().manual_seed(int(row.tokens_T.sum()))
        states_NH = torch.randn(row.num_trained, weight.shape[1], generator=generator)
        states = HiddenStates.of(states_NH.to(weight.dtype))
        given_B.append(replace(row, teacher_states=states))
    return head.read(given_B, ids_K, token_budget=0)
