"""The handshake: every party scores the same probe tokens, at T and at a second temperature.

    policy   decode: log-probs reported for the tokens that are sampled
             prefill: log-probs of given probes         decode reference: one position at a time
    learner  forward on the probes: the reference for every policy engine
    teacher  prefill and decode reference on the probes, as in training
             the learner's copy of the teacher, if there is one (estimator=full). If the learner
             has only the teacher's head, that head's log-probs of the engine's hidden states take
             the place of prefill, and the engine's own prefill is compared with these log-probs
             (`HeadedTeacher`)

In a run without a learner (rollout_only=True), the first policy engine's prefill is the reference,
which that engine's decode path verifies.

The first policy engine samples the probes: one set, which the learner scores once for any number of
engines. The decode of that engine is compared with the learner. The decode of any other engine is
compared with that engine's prefill of its own samples; its prefill is compared with the learner.

Both temperatures are mixed in one batch. A party that always ignores T, or always divides by T
twice, agrees with itself. So each party must also differ from itself at another T, and satisfy the
temperature law (`distill.handshake.comparison.compare_with_law`). All engines of a pool are checked
concurrently, with a deadline for each of their `PARTS`.

The same function checks restarted engines: `handshake(policies={name: engine}, teachers={}, ...)`
once the engine holds the learner's weights, or any healthy policy engine and the restarted teacher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cluster.handles.mailbox import with_states
from cluster.handshake.engine_answers import (
    EngineAnswers,
    Plan,
    Prefills,
    examine,
    prefill,
    sample_probes,
)
from distill.engine import EngineInfo, Score, ScoreRequest, ScoringModel
from distill.errors import EngineLost
from distill.handshake.comparison import (
    CalibrationReport,
    Comparison,
    Suspicion,
    compare,
    looser_dtype,
    other_weights,
)
from distill.handshake.identity import fact_differences
from distill.lookup import listed
from distill.objective.batching import TrainingRow
from distill.objective.rows import row_to_score
from distill.sampling import UNSCALED
from distill.tokenizer import TokenizerProbe
from distill.types import FloatArray, TokenArray

Value = TypeVar("Value")

# Longest time for one of an engine's `PARTS` (info, sampling, scoring), seconds. An engine's first
# requests may compile kernels.
ENGINE_DEADLINE_S = 600.0
PARTS = 3

# log p_T of each row's trained tokens, from the learner
LearnerLogprobs = Callable[[Sequence[TrainingRow]], Awaitable[list[FloatArray]]]


class Copy(NamedTuple):
    """Another source of a teacher's distributions; `title` is its name in reports."""

    title: str
    logprobs: LearnerLogprobs


class EnginesSilent(EngineLost):
    """Raised when engines did not answer in time; `names` lists them."""

    def __init__(self, names: Sequence[str], deadline_s: float) -> None:
        super().__init__(f"{listed(names)} did not answer the handshake within {deadline_s:g} s")
        self.names = tuple(names)


def scored_by(engine: ScoringModel) -> LearnerLogprobs:
    """Use an engine that is known to hold the learner's weights as `LearnerLogprobs`."""

    async def logprobs(rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        scores = await engine.score(score_requests(rows_D))
        return [score.logprobs_by_temperature[0] for score in scores]

    return logprobs


def score_requests(rows_D: Sequence[TrainingRow]) -> list[ScoreRequest]:
    """Requests for the log-probs of the rows' trained tokens, each at its row's temperature."""
    return [
        ScoreRequest(
            tokens_T=row.tokens_T, start=row.first_trained, temperatures=(row.temperature,)
        )
        for row in rows_D
    ]


async def handshake(
    *,
    policies: Mapping[str, ScoringModel],
    teachers: Mapping[str, ScoringModel],
    learner: LearnerLogprobs | None,
    tokenizer: TokenizerProbe,
    temperature: float,
    learner_dtype: str,
    copies: Mapping[str, Copy] | None = None,
    deadline_s: float = ENGINE_DEADLINE_S,
) -> CalibrationReport:
    """Collect the answers of every party and compare them. The caller evaluates the report.

    Args:
        policies: policy engines, at least one, by their name in the report; all hold the learner's
            weights.
        teachers: teacher engines, by their name in the report. Each answers for its info, prefill
            and decode reference.
        learner: log-probs from the learner. None in a run without a learner: the first policy
            engine is the reference for the others.
        tokenizer: encodings of the known texts by the run's own tokenizer.
        copies: other sources of a teacher's distributions, by the name of the teacher's engine.
        deadline_s: longest time for each of an engine's `PARTS`, seconds.

    Raises:
        EnginesSilent: engines did not answer in time.
    """
    assert policies, "the probes are a policy engine's samples"
    engines = {**policies, **teachers}
    infos = await _of_each({name: engine.info() for name, engine in engines.items()}, deadline_s)
    policy_infos, teacher_infos = ({n: infos[n] for n in part} for part in (policies, teachers))
    differences = fact_differences(policy_infos, teacher_infos, tokenizer)
    if differences:
        return CalibrationReport(comparisons=(), differences=tuple(differences), parties=infos)
    plan = Plan.of(list(infos.values()), temperature)
    first, *others = policies
    probes = (await _of_each({first: sample_probes(policies[first], plan)}, deadline_s))[first]
    rows_D = [probe_row(p.tokens_T, p.start, p.temperature) for p in probes]
    parts = {n: examine(n, e, plan, probes, infos[n]) for n, e in engines.items()}
    by_themselves = {n: _own_samples(n, policies[n], plan, infos[n]) for n in others}
    asked = _of_each(parts, deadline_s), _of_each(by_themselves, deadline_s)
    if learner is None:
        answers, sampled = await asyncio.gather(*asked)
        arbiter = _Arbiter(first, f"{first} prefill", answers[first].prefill, infos[first].dtype)
    else:
        learnt, answers, sampled = await asyncio.gather(learner(rows_D), *asked)
        arbiter = _Arbiter("learner", "learner", learnt, learner_dtype)
    comparisons: list[Comparison] = []
    for name, of_one in answers.items():
        comparisons += of_one.comparisons()
        if name in policies:
            own = sampled.get(name, of_one)
            comparisons += _against_arbiter(of_one, own, arbiter)
    for name in teachers:
        if copy := (copies or {}).get(name):
            comparisons += _against_copy(answers[name], copy.title, await copy.logprobs(rows_D))
    return CalibrationReport(comparisons=tuple(comparisons), parties=infos)


@dataclass(frozen=True, slots=True)
class _Arbiter:
    """Reference for every policy engine: the learner, or the first policy engine.

    Attributes:
        holder: the party that holds the weights, for error messages.
        name: name of the reference in the report.
    """

    holder: str
    name: str
    logprobs: Sequence[FloatArray]
    dtype: str


async def _of_each(
    parts: Mapping[str, Coroutine[Any, Any, Value]], deadline_s: float
) -> dict[str, Value]:
    """Run the coroutines concurrently and return their results by engine name.

    Raises EnginesSilent if some did not end within `deadline_s`.
    """
    if not parts:
        return {}
    tasks = {name: asyncio.create_task(part) for name, part in parts.items()}
    try:
        await asyncio.wait(tasks.values(), timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        found = {name: task.result() for name, task in tasks.items() if task.done()}
    finally:
        for task in tasks.values():
            task.cancel()
    if late := [name for name in parts if name not in found]:
        raise EnginesSilent(late, deadline_s)
    return found


async def _own_samples(name: str, engine: ScoringModel, plan: Plan, info: EngineInfo) -> Prefills:
    return await prefill(name, engine, plan, await sample_probes(engine, plan), info)


def _against_arbiter(answers: EngineAnswers, own: Prefills, arbiter: _Arbiter) -> list[Comparison]:
    """Comparisons of a policy engine's decode and prefill with the arbiter.

    Args:
        own: the engine's prefill of its own samples. The samples of the first engine are the
            probes, so its decode is compared with the arbiter; the decode of any other engine is
            compared with that engine's prefill.
    """
    name, dtype = answers.name, looser_dtype(answers.dtype, arbiter.dtype)
    lawful = all(law.agrees for law in answers.laws())
    decoded, given = [], []
    for t in answers.temperatures:
        decode_N, prefill_N = own.at(t, own.decode), own.at(t, own.prefill)
        possible_mistakes = own.possible_mistakes(t, f"{name} decode", own.decode, last=None)
        if lawful:  # otherwise decode and prefill may share an error with right weights
            possible_mistakes.append(
                Suspicion(name, other_weights(name, arbiter.holder), decode_N, prefill_N)
            )
        comparing = partial(compare, temperature=t, dtype=dtype, suspicions=possible_mistakes)
        learnt_N = answers.at(t, arbiter.logprobs)
        held = (arbiter.name, learnt_N) if own is answers else (f"{name} prefill", prefill_N)
        decoded.append(comparing(f"{name} decode", decode_N, *held))
        if arbiter.name != f"{name} prefill":
            given_N = answers.at(t, answers.prefill)
            given.append(comparing(f"{name} prefill", given_N, arbiter.name, learnt_N))
    return decoded + given


def _against_copy(
    answers: EngineAnswers, title: str, copied: Sequence[FloatArray]
) -> list[Comparison]:
    return [
        compare(
            title,
            answers.at(t, copied),
            f"{answers.name} prefill",
            answers.at(t, answers.prefill),
            temperature=t,
            dtype=answers.dtype,  # the copy has the same dtype
        )
        for t in answers.temperatures
    ]


def probe_row(tokens_T: TokenArray, start: int, temperature: float) -> TrainingRow:
    """Row whose tokens from `start` on are scored."""
    mask_T = np.arange(len(tokens_T)) >= start
    return row_to_score(tokens_T, mask_T, temperature, "handshake probe")


def naming_heads(report: CalibrationReport, heads: Mapping[str, str]) -> CalibrationReport:
    """Name the head as the cause of an unexplained disagreement of an engine that returns states.

    Heads are given as `setting=checkpoint`, by name of the engine.
    """

    def explained(comparison: Comparison) -> Comparison:
        for engine, head in heads.items():
            if comparison.party.startswith(f"{engine} ") and not (
                comparison.agrees or comparison.must_differ or comparison.diagnosis
            ):
                return replace(
                    comparison,
                    culprit=head,
                    diagnosis=f"the head of {head} is not the head of {engine}: give the "
                    "checkpoint that it serves. If it quantises the head or adds an "
                    "adapter, no checkpoint has that head; use estimator=top_k, which "
                    "needs none",
                )
        return comparison

    return replace(report, comparisons=tuple(map(explained, report.comparisons)))


class HeadedTeacher:
    """The part of `Engine` that the handshake uses, for a teacher whose head is in the learner.

    In training, the learner computes the teacher's distributions from the engine's hidden states
    with this head. So the log-probs of the head are compared with the engine's own decode, at both
    temperatures, and must follow the temperature law, however the engine itself applies T.

    Args:
        engine: engine that returns the hidden states.
        logprobs: log q_T of rows, computed by the learner from the hidden states in the rows.
    """

    def __init__(self, engine: ScoringModel, logprobs: LearnerLogprobs) -> None:
        self._engine, self._logprobs = engine, logprobs

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self._engine.decode_score(requests)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Log-probs of each request's tokens at its temperatures, computed with the head.

        Raises:
            EngineError: the engine returns no hidden states.
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
