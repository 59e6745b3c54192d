"""The handshake: every party scores the same probe tokens, at T and at a second temperature.

    policy   decode: log-probs it reports for the probe tokens it samples
             prefill: for the same tokens, given        decode reference: one position at a time
    learner  forward, on each policy engine's probes: the arbiter of its decode and its prefill
    teacher  prefill and decode reference, on the policy's probes, as in training

Both temperatures are mixed in one batch. Parties that ignore T, or divide by it twice, in
everything they do agree with themselves; so each must also differ from itself at another T, and
keep the temperature law (`distill.calibration.compare_with_law`). Every engine of a pool is asked.

The same function serves a restart: `handshake(policies={name: engine}, teachers={}, ...)` once the
engine holds the learner's weights, or any healthy policy engine and the restarted teacher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distill.batching import TrainingRow
from distill.calibration import (
    PROBE_NEW_TOKENS,
    REFERENCE_POSITIONS,
    SECOND_TEMPERATURE_FACTOR,
    CalibrationReport,
    Comparison,
    Suspicion,
    compare,
    compare_with_law,
    concatenated,
    decode_not_divided,
    divided_twice,
    is_telling,
    looser,
    not_divided,
    other_weights,
    probe_pairs,
    probe_prompts,
)
from distill.interfaces import Engine, EngineInfo, GenerateRequest, ScoreRequest
from distill.party_facts import fact_differences
from distill.sampling import UNSCALED, TrainSampling
from distill.tokenizer import TokenizerProbe
from distill.types import FloatArray, TokenArray

# log p_T of each row's trained tokens, from the learner
LearnerLogprobs = Callable[[Sequence[TrainingRow]], Awaitable[list[FloatArray]]]
# What the learner computes in; see learner/learner.py.
LEARNER_DTYPE = "float32"


async def handshake(
    *,
    policies: Mapping[str, Engine],
    teachers: Mapping[str, Engine],
    learner: LearnerLogprobs,
    tokenizer: TokenizerProbe,
    temperature: float,
    learner_dtype: str = LEARNER_DTYPE,
) -> CalibrationReport:
    """Asks every party and compares. Judging the report is the caller's.

    Args:
        policies: at least one, by the name to call it in the report; all hold the learner's
            weights.
        teachers: none, or more.
        tokenizer: what the run's own tokenizer makes of the known texts.
    """
    assert policies, "the probes are a policy engine's samples"
    policy_infos, teacher_infos = await asyncio.gather(_infos(policies), _infos(teachers))
    infos = {**policy_infos, **teacher_infos}
    differences = fact_differences(policy_infos, teacher_infos, tokenizer)
    if differences:
        return CalibrationReport(comparisons=(), differences=tuple(differences), parties=infos)
    plan = _Plan.of(list(infos.values()), temperature)
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
            _examine(name, engine, plan, probes, teacher_infos[name].dtype)
            for name, engine in teachers.items()
        )
    )
    comparisons += [comparison for of_one in answers for comparison in of_one.comparisons()]
    return CalibrationReport(comparisons=tuple(comparisons), parties=infos)


async def _infos(engines: Mapping[str, Engine]) -> dict[str, EngineInfo]:
    infos = await asyncio.gather(*(engine.info() for engine in engines.values()))
    return dict(zip(engines, infos, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """What is asked of every engine alike: ids, lengths and temperatures that suit them all.

    Attributes:
        pairs: tokens (a, b) for the temperature law, one pair a prompt.
    """

    prompts: list[TokenArray]
    temperatures: tuple[float, float]
    new_tokens: int
    pairs: tuple[TokenArray, TokenArray]

    @classmethod
    def of(cls, infos: Sequence[EngineInfo], temperature: float) -> _Plan:
        vocab_size = min(info.vocab_size for info in infos)
        context_length = min(info.context_length for info in infos)
        return cls(
            prompts=probe_prompts(vocab_size, context_length),
            temperatures=(temperature, temperature * SECOND_TEMPERATURE_FACTOR),
            new_tokens=max(1, min(PROBE_NEW_TOKENS, context_length // 2)),
            pairs=probe_pairs(vocab_size),
        )

    def other(self, temperature: float) -> float:
        first, second = self.temperatures
        return second if temperature == first else first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Probe:
    """A prompt and what a policy engine sampled after it at `temperature`."""

    temperature: float
    tokens_T: TokenArray
    start: int
    decode_T: FloatArray  # as reported, of the sampled tokens only


async def _sample_probes(engine: Engine, plan: _Plan) -> list[_Probe]:
    async def one(i: int, prompt_T: TokenArray, temperature: float) -> _Probe:
        sampling = TrainSampling(temperature=temperature, max_new_tokens=plan.new_tokens)
        [sample] = await engine.generate(
            GenerateRequest(prompt_tokens_T=prompt_T, sampling=sampling, num_samples=1, seed=i)
        )
        return _Probe(
            temperature=temperature,
            tokens_T=np.concatenate([prompt_T, sample.tokens_T]),
            start=len(prompt_T),
            decode_T=sample.logprobs_T,
        )

    return await asyncio.gather(
        *(one(i, prompt_T, t) for t in plan.temperatures for i, prompt_T in enumerate(plan.prompts))
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answers:
    """What one engine answered about the probes; lists hold an array a probe.

    Attributes:
        prefill: of the sampled tokens, at each probe's T; `at_other` at the plan's other one,
            `unscaled` at T = 1, `twice` at T * T, which is what dividing twice would give.
        reference: of each probe's last tokens, by the decode path.
        pairs: log p(a) - log p(b) of two tokens after each prompt, by temperature.
    """

    name: str
    dtype: str
    probes: Sequence[_Probe]
    prefill: list[FloatArray]
    at_other: list[FloatArray]
    unscaled: list[FloatArray]
    twice: list[FloatArray]
    reference: list[FloatArray]
    pairs: dict[float, FloatArray]

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(probe.temperature for probe in self.probes))

    def at(
        self, temperature: float, arrays: Sequence[FloatArray], last: int | None = None
    ) -> FloatArray:
        """Those of the probes at this temperature, end to end; of each the `last`, or all."""
        by_probe = zip(self.probes, arrays, strict=True)
        first = 0 if last is None else -last
        return concatenated(
            [a[first:] for probe, a in by_probe if probe.temperature == temperature]
        )

    def comparisons(self) -> list[Comparison]:
        """The engine against another T, the temperature law, and its own decode path."""
        return [
            self._heeds_temperature(),
            *self.laws(),
            *(self._against_reference(t) for t in self.temperatures),
        ]

    def _heeds_temperature(self) -> Comparison:
        prefill, given_N = f"{self.name} prefill", concatenated(self.prefill)
        unscaled_N = concatenated(self.unscaled)
        return compare(
            prefill,
            given_N,
            "itself at another T",
            concatenated(self.at_other),
            temperature=self.temperatures[0],
            dtype="float32",  # one engine, asked twice: what ignores T comes back as it was
            must_differ=True,
            suspicions=[Suspicion(prefill, not_divided(prefill), given_N, unscaled_N)],
        )

    def laws(self) -> list[Comparison]:
        return [
            compare_with_law(
                f"{self.name} prefill",
                self.pairs[temperature],
                self.pairs[UNSCALED],
                temperature=temperature,
                dtype=self.dtype,
            )
            for temperature in self.temperatures
        ]

    def _against_reference(self, temperature: float) -> Comparison:
        decode, last = f"{self.name} decode reference", REFERENCE_POSITIONS
        return compare(
            f"{self.name} prefill",
            self.at(temperature, self.prefill, last),
            decode,
            self.at(temperature, self.reference, last),
            temperature=temperature,
            dtype=self.dtype,
            suspicions=self.mistakes(temperature, decode, self.reference, last),
        )

    def mistakes(
        self, temperature: float, decode: str, logprobs: Sequence[FloatArray], last: int | None
    ) -> list[Suspicion]:
        """How T may have been mistaken, in prefill or in what `decode` says of the same tokens."""
        if not is_telling(temperature):
            return []
        prefill = f"{self.name} prefill"
        ways = [
            (prefill, not_divided(prefill), self.prefill, self.unscaled),
            (decode, decode_not_divided(decode), logprobs, self.unscaled),
            (decode, divided_twice(decode), logprobs, self.twice),
        ]
        return [
            Suspicion(
                who, why, self.at(temperature, found, last), self.at(temperature, mistaken, last)
            )
            for who, why, found, mistaken in ways
        ]


async def _examine(
    name: str, engine: Engine, plan: _Plan, probes: Sequence[_Probe], dtype: str
) -> _Answers:
    given = [
        ScoreRequest(
            tokens_T=probe.tokens_T,
            start=probe.start,
            temperatures=(
                probe.temperature, plan.other(probe.temperature), UNSCALED, probe.temperature**2,
            ),
        )
        for probe in probes
    ]  # fmt: skip
    one_by_one = [
        ScoreRequest(
            tokens_T=probe.tokens_T,
            start=max(probe.start, len(probe.tokens_T) - REFERENCE_POSITIONS),
            temperatures=(probe.temperature,),
        )
        for probe in probes
    ]
    given_scores, reference_scores, pairs = await asyncio.gather(
        engine.score(given), engine.decode_score(one_by_one), _pair_differences(engine, plan)
    )
    prefill, at_other, unscaled, twice = (
        [score.logprobs_by_temperature[k] for score in given_scores] for k in range(4)
    )
    return _Answers(
        name=name,
        dtype=dtype,
        probes=probes,
        prefill=prefill,
        at_other=at_other,
        unscaled=unscaled,
        twice=twice,
        reference=[score.logprobs_by_temperature[0] for score in reference_scores],
        pairs=pairs,
    )


async def _pair_differences(engine: Engine, plan: _Plan) -> dict[float, FloatArray]:
    """log p(a) - log p(b) after each prompt, at the plan's temperatures and at T = 1."""
    temperatures = (*plan.temperatures, UNSCALED)
    requests = [
        ScoreRequest(
            tokens_T=np.append(prompt_T, token), start=len(prompt_T), temperatures=temperatures
        )
        for token_of_pair in (0, 1)
        for prompt_T, token in zip(plan.prompts, plan.pairs[token_of_pair], strict=True)
    ]
    scores = await engine.score(requests)
    logprobs_NK = np.array([score.logprobs_by_temperature for score in scores])[:, :, 0]
    a_NK, b_NK = np.split(logprobs_NK, 2)
    return dict(zip(temperatures, (a_NK - b_NK).T, strict=True))


async def _examine_policy(
    name: str,
    engine: Engine,
    plan: _Plan,
    info: EngineInfo,
    learner: LearnerLogprobs,
    learner_dtype: str,
) -> tuple[list[_Probe], list[Comparison]]:
    """The probes that the engine sampled, and all comparisons of it."""
    probes = await _sample_probes(engine, plan)
    answers, learnt = await asyncio.gather(
        _examine(name, engine, plan, probes, info.dtype),
        learner([probe_row(p.tokens_T, p.start, p.temperature) for p in probes]),
    )
    return probes, answers.comparisons() + _against_learner(answers, learnt, learner_dtype)


def _against_learner(
    answers: _Answers, learnt: Sequence[FloatArray], learner_dtype: str
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


def probe_row(tokens_T: TokenArray, start: int, temperature: float) -> TrainingRow:
    """A row for the learner to score from `start` on; it is never trained."""
    zeros_T = np.zeros(len(tokens_T), np.float32)
    return TrainingRow(
        tokens_T=tokens_T,
        loss_mask_T=np.arange(len(tokens_T)) >= start,
        weights_T=zeros_T,
        behaviour_logprobs_T=zeros_T,
        temperature=temperature,
        source="handshake probe",
    )
