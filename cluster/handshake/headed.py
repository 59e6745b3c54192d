"""A teacher's engine and the learner's copy of its head, as one engine of the handshake.

In training, the teacher's distributions are the head's of the engine's hidden states. So these are
what is compared with the engine's own decode, at both temperatures, and what must follow the
temperature law; whatever the engine itself makes of T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cluster.handles.mailbox import with_states
from cluster.handshake.handshake import LearnerLogprobs, probe_row
from distill.engine import Engine, EngineInfo, Score, ScoreRequest
from distill.handshake.comparison import CalibrationReport, Comparison
from distill.sampling import UNSCALED


def naming_heads(report: CalibrationReport, heads: Mapping[str, str]) -> CalibrationReport:
    """The report, with the head as the cause where an engine disagrees with its own states.

    Args:
        heads: `setting=checkpoint` of the head, by name of the engine that gives the states.
    """

    def explained(comparison: Comparison) -> Comparison:
        for engine, head in heads.items():
            if comparison.party.startswith(f"{engine} ") and not (
                comparison.agrees or comparison.must_differ or comparison.diagnosis
            ):
                return replace(
                    comparison,
                    culprit=head,
                    diagnosis=f"the head of {head} is not the one of {engine}: give "
                    "the checkpoint that it serves. A head that it has quantised, or with an "
                    "adapter, is in no checkpoint; estimator=top_k needs none",
                )
        return comparison

    return replace(report, comparisons=tuple(map(explained, report.comparisons)))


class HeadedTeacher:
    """The part of `Engine` that the handshake asks of a teacher.

    Args:
        engine: gives the hidden states.
        logprobs: log q_T of rows by the head in the learner, of the states that rows hold.
    """

    def __init__(self, engine: Engine, logprobs: LearnerLogprobs) -> None:
        self._engine, self._logprobs = engine, logprobs

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self._engine.decode_score(requests)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Log-probs of each request's tokens at its temperatures, all by the head.

        Raises:
            EngineError: the engine gives no hidden states.
        """
        asked = [
            replace(
                request,
                temperatures=(UNSCALED,),
                states_N=np.ones(len(request.tokens_T) - request.start, np.bool_),
            )
            for request in requests
        ]
        rows_D = []
        scores = await with_states(await self._engine.score(asked))
        for request, score in zip(asked, scores, strict=True):
            row = probe_row(request.tokens_T, request.start, UNSCALED)
            rows_D.append(replace(row, teacher_states=score.states))
        pairs = list(zip(requests, rows_D, strict=True))
        at_each = [replace(row, temperature=t) for asked, row in pairs for t in asked.temperatures]
        found = iter(await self._logprobs(at_each))
        return [
            Score(logprobs_by_temperature=tuple(next(found) for _ in request.temperatures))
            for request in requests
        ]
