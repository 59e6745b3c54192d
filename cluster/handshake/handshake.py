"""The handshake: every party scores the same probe tokens, at T and at a second temperature.

    policy   decode: log-probs it reports for the probe tokens it samples
             prefill: for the same tokens, given        decode reference: one position at a time
    learner  forward, on each policy engine's probes: the arbiter of its decode and its prefill
    teacher  prefill and decode reference, on the policy's probes, as in training
             the learner's own copy of it, where it has one (estimator=full)

Both temperatures are mixed in one batch. Parties that ignore T, or divide by it twice, in
everything they do agree with themselves; so each must also differ from itself at another T, and
keep the temperature law (`distill.handshake.comparison.compare_with_law`). Every engine of a pool
is asked.

The same function serves a restart: `handshake(policies={name: engine}, teachers={}, ...)` once the
engine holds the learner's weights, or any healthy policy engine and the restarted teacher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from cluster.handshake.engine_answers import (
    EngineAnswers,
    HandshakeProbe,
    Plan,
    examine,
    sample_probes,
)
from distill.engine import Engine, EngineInfo
from distill.handshake.comparison import (
    CalibrationReport,
    Comparison,
    Suspicion,
    compare,
    looser,
    other_weights,
)
from distill.handshake.identity import fact_differences
from distill.objective.batching import TrainingRow
from distill.objective.rows import row_to_score
from distill.tokenizer import TokenizerProbe
from distill.types import FloatArray, TokenArray

# log p_T of each row's trained tokens, from the learner
LearnerLogprobs = Callable[[Sequence[TrainingRow]], Awaitable[list[FloatArray]]]


async def handshake(
    *,
    policies: Mapping[str, Engine],
    teachers: Mapping[str, Engine],
    learner: LearnerLogprobs,
    tokenizer: TokenizerProbe,
    temperature: float,
    learner_dtype: str,
    copies: Mapping[str, LearnerLogprobs] | None = None,
) -> CalibrationReport:
    """Asks every party and compares. Judging the report is the caller's.

    Args:
        policies: at least one, by the name to call it in the report; all hold the learner's
            weights.
        teachers: none, or more.
        tokenizer: what the run's own tokenizer makes of the known texts.
        learner_dtype: what the learner computes in.
        copies: of teachers, in the learner's process, by the name of the engine that serves the
            same model.
    """
    assert policies, "the probes are a policy engine's samples"
    policy_infos, teacher_infos = await asyncio.gather(_infos(policies), _infos(teachers))
    infos = {**policy_infos, **teacher_infos}
    differences = fact_differences(policy_infos, teacher_infos, tokenizer)
    if differences:
        return CalibrationReport(comparisons=(), differences=tuple(differences), parties=infos)
    plan = Plan.of(list(infos.values()), temperature)
    examined = await asyncio.gather(
        *(
            _examine_policy(name, engine, plan, policy_infos[name], learner, learner_dtype)
            for name, engine in policies.items()
        )
    )
    comparisons = [comparison for _, found in examined for comparison in found]
    probes, _ = examined[0]
    answers = await asyncio.gather(
        *(
            examine(name, engine, plan, probes, teacher_infos[name].dtype)
            for name, engine in teachers.items()
        )
    )
    comparisons += [comparison for of_one in answers for comparison in of_one.comparisons()]
    rows_D = [probe_row(p.tokens_T, p.start, p.temperature) for p in probes]
    for of_one in answers:
        if copy := (copies or {}).get(of_one.name):
            comparisons += _against_copy(of_one, await copy(rows_D))
    return CalibrationReport(comparisons=tuple(comparisons), parties=infos)


async def _infos(engines: Mapping[str, Engine]) -> dict[str, EngineInfo]:
    infos = await asyncio.gather(*(engine.info() for engine in engines.values()))
    return dict(zip(engines, infos, strict=True))


async def _examine_policy(
    name: str,
    engine: Engine,
    plan: Plan,
    info: EngineInfo,
    learner: LearnerLogprobs,
    learner_dtype: str,
) -> tuple[list[HandshakeProbe], list[Comparison]]:
    """The probes that the engine sampled, and all comparisons of it."""
    probes = await sample_probes(engine, plan)
    answers, learnt = await asyncio.gather(
        examine(name, engine, plan, probes, info.dtype),
        learner([probe_row(p.tokens_T, p.start, p.temperature) for p in probes]),
    )
    return probes, answers.comparisons() + _against_learner(answers, learnt, learner_dtype)


def _against_learner(
    answers: EngineAnswers, learnt: Sequence[FloatArray], learner_dtype: str
) -> list[Comparison]:
    """The learner's forward is the arbiter: what it trains on is held against it."""
    decode = [probe.decode_T for probe in answers.probes]
    lawful = all(law.agrees for law in answers.laws())
    comparisons = []
    for part in ("decode", "prefill"):
        for t in answers.temperatures:
            decode_N, prefill_N = answers.at(t, decode), answers.at(t, answers.prefill)
            mistakes = answers.mistakes(t, f"{answers.name} decode", decode, last=None)
            if lawful:  # else both may be wrong in the same way, and the weights right
                why = other_weights(answers.name)
                mistakes.append(Suspicion(answers.name, why, decode_N, prefill_N))
            comparisons.append(
                compare(
                    f"{answers.name} {part}",
                    decode_N if part == "decode" else prefill_N,
                    "learner",
                    answers.at(t, learnt),
                    temperature=t,
                    dtype=looser(answers.dtype, learner_dtype),
                    suspicions=mistakes,
                )
            )
    return comparisons


def _against_copy(answers: EngineAnswers, copied: Sequence[FloatArray]) -> list[Comparison]:
    """Comparison of a teacher's engine with the learner's copy of it, on the probes."""
    return [
        compare(
            f"the learner's copy of {answers.name}",
            answers.at(t, copied),
            f"{answers.name} prefill",
            answers.at(t, answers.prefill),
            temperature=t,
            dtype=answers.dtype,  # the copy's as well
        )
        for t in answers.temperatures
    ]


def probe_row(tokens_T: TokenArray, start: int, temperature: float) -> TrainingRow:
    """A row for the learner to score from `start` on."""
    mask_T = np.arange(len(tokens_T)) >= start
    return row_to_score(tokens_T, mask_T, temperature, "handshake probe")
