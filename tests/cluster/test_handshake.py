"""The handshake on real engines: one party made to score wrongly is the one that is named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from actors.config import EngineConfig
from cluster.handshake import handshake
from distill.batching import TrainingRow
from distill.calibration import CalibrationReport
from distill.errors import CalibrationError
from distill.interfaces import Engine, EngineInfo, GenerateRequest, Sample, Score, ScoreRequest
from distill.types import FloatArray
from learner.config import LearnerConfig
from learner.learner import Learner
from tests.conftest import TinyPair

T = 0.6


class Unscaled:
    """An engine whose prefill, and decode if asked, report log softmax(z) whatever T is named."""

    def __init__(self, engine: Engine, *, decode_too: bool = False) -> None:
        self._engine, self._decode_too = engine, decode_too

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self._engine.score([replace(r, temperatures=(1.0,)) for r in requests])

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        samples = await self._engine.generate(request)
        if not self._decode_too:
            return samples
        start = len(request.prompt_tokens_T)
        chains = [np.concatenate([request.prompt_tokens_T, s.tokens_T]) for s in samples]
        scores = await self.score(
            [ScoreRequest(tokens_T=c, start=start, temperatures=(1.0,)) for c in chains]
        )
        return [
            replace(sample, logprobs_T=score.logprobs_by_temperature[0])
            for sample, score in zip(samples, scores, strict=True)
        ]


def shake(tiny_pair: TinyPair, tmp_path, wrong: str | None) -> CalibrationReport:
    """One handshake of fresh parties, with `wrong` spoilt."""

    def engine(model: str) -> Engine:
        config = EngineConfig(model=model, device="cpu")
        return config.engine_class(**config.arguments())

    model = tiny_pair.teacher if wrong == "learner's weights" else tiny_pair.student
    learner = Learner(LearnerConfig(model=model, total_steps=1, device="cpu"), str(tmp_path))

    async def logprobs(rows: Sequence[TrainingRow]) -> list[FloatArray]:
        if wrong == "learner's temperature":
            rows = [replace(row, temperature=1.0) for row in rows]
        return learner.logprobs(rows)

    async def run() -> CalibrationReport:
        policy, teacher = engine(tiny_pair.student), engine(tiny_pair.teacher)
        if wrong in ("policy", "policy entirely"):
            policy = Unscaled(policy, decode_too=wrong == "policy entirely")
        if wrong in ("teacher", "teacher entirely"):
            teacher = Unscaled(teacher, decode_too=wrong == "teacher entirely")
        return await handshake(policy=policy, teacher=teacher, learner=logprobs, temperature=T)

    return asyncio.run(run())


def test_right_parties_agree_at_two_temperatures(tiny_pair: TinyPair, tmp_path) -> None:
    report = shake(tiny_pair, tmp_path, wrong=None)
    report.require_agreement()
    *agreeing, heeds = sorted(report.comparisons, key=lambda c: c.must_differ)
    assert heeds.must_differ and heeds.party == "teacher" and heeds.max_gap > 0.1
    found = {(c.party, c.reference, round(c.temperature, 6)) for c in agreeing}
    assert found == {
        (party, reference, round(temperature, 6))
        for party, reference in (
            ("policy prefill", "policy decode"),
            ("learner", "policy decode"),
            ("teacher prefill", "teacher decode"),
        )
        for temperature in (T, 1.5 * T)
    }
    assert all(c.num_tokens >= 8 and c.max_gap < 1e-4 for c in agreeing)


@pytest.mark.parametrize(
    ("wrong", "party"),
    [
        ("policy", "policy prefill"),
        ("policy entirely", "learner"),
        ("learner's temperature", "learner"),
        ("learner's weights", "learner"),
        ("teacher", "teacher prefill"),
        ("teacher entirely", "teacher"),
    ],
)
def test_the_wrong_party_is_named(tiny_pair: TinyPair, tmp_path, wrong: str, party: str) -> None:
    report = shake(tiny_pair, tmp_path, wrong)
    off = {comparison.party for comparison in report.comparisons if not comparison.agrees}
    if wrong == "teacher":  # whose prefill, besides, cannot tell one T from another
        off -= {"teacher"}
    assert off == {party}
    with pytest.raises(CalibrationError, match=f"{party} disagrees with .* at temperature 0\\."):
        report.require_agreement()
