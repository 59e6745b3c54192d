"""One engine's answers to the handshake's probes, and their internal consistency."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distill.engine import EngineInfo, GenerateRequest, ScoreRequest, ScoringModel
from distill.handshake.comparison import (
    PROBE_NEW_TOKENS,
    REFERENCE_POSITIONS,
    SECOND_TEMPERATURE_FACTOR,
    Comparison,
    Suspicion,
    compare,
    compare_with_law,
    concatenated,
    decode_not_divided,
    distinguishes_t,
    divided_twice,
    not_divided,
    probe_pairs,
    probe_prompts,
)
from distill.sampling import UNSCALED, TrainSampling
from distill.types import FloatArray, TokenArray, shared_fields


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Probes that every engine can process: token ids, lengths and temperatures.

    Attributes:
        pairs: tokens (a, b) for the temperature law, one pair per prompt.
        event: stop tokens that count as one outcome; every probe contains one of them.
    """

    prompts: list[TokenArray]
    temperatures: tuple[float, float]
    new_tokens: int
    pairs: tuple[TokenArray, TokenArray]
    event: tuple[int, ...] = ()

    @classmethod
    def of(cls, infos: Sequence[EngineInfo], temperature: float) -> Plan:
        vocab_size = min(info.vocab_size for info in infos)
        context_length = min(info.context_length for info in infos)
        event = infos[0].stop_event
        return cls(
            prompts=probe_prompts(vocab_size, context_length),
            temperatures=(temperature, temperature * SECOND_TEMPERATURE_FACTOR),
            new_tokens=max(1, min(PROBE_NEW_TOKENS, context_length // 2 - bool(event))),
            pairs=probe_pairs(vocab_size, apart_from=event),
            event=event,
        )

    def other(self, temperature: float) -> float:
        first, second = self.temperatures
        return second if temperature == first else first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HandshakeProbe:
    """A prompt, and tokens that a policy engine sampled after it."""

    temperature: float
    tokens_T: TokenArray
    start: int
    decode_T: FloatArray  # log-probs reported while sampling; sampled tokens only


async def sample_probes(engine: ScoringModel, plan: Plan) -> list[HandshakeProbe]:
    """Sample once from the policy engine for every prompt, at both temperatures.

    If stop tokens count as one outcome, a stop token (each in turn) is appended to a sample that
    did not stop, with its log-prob from the decode path.
    """

    async def one(i: int, prompt_T: TokenArray, temperature: float) -> HandshakeProbe:
        sampling = TrainSampling(temperature=temperature, max_new_tokens=plan.new_tokens)
        [sample] = await engine.generate(
            GenerateRequest(prompt_tokens_T=prompt_T, sampling=sampling, num_samples=1, seed=i)
        )
        tokens_T = np.concatenate([prompt_T, sample.tokens_T])
        decode_T = sample.logprobs_T
        if plan.event and tokens_T[-1] not in plan.event:
            tokens_T = np.append(tokens_T, np.int32(plan.event[i % len(plan.event)]))
            stopping = ScoreRequest(
                tokens_T=tokens_T, start=len(tokens_T) - 1, temperatures=(temperature,)
            )
            [score] = await engine.decode_score([stopping])
            decode_T = np.concatenate([decode_T, score.logprobs_by_temperature[0]])
        return HandshakeProbe(
            temperature=temperature, tokens_T=tokens_T, start=len(prompt_T), decode_T=decode_T
        )

    return await asyncio.gather(
        *(one(i, prompt_T, t) for t in plan.temperatures for i, prompt_T in enumerate(plan.prompts))
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefills:
    """One engine's prefill of some probes; lists hold one array per probe.

    Attributes:
        prefill: log-probs of the sampled tokens at each probe's temperature T.
        at_other: their log-probs at the plan's other temperature.
        unscaled: their log-probs at T = 1.
        at_T_squared: their log-probs at T * T, as an engine that divides by T twice would report.
    """

    name: str
    info: EngineInfo
    probes: Sequence[HandshakeProbe]
    prefill: list[FloatArray]
    at_other: list[FloatArray]
    unscaled: list[FloatArray]
    at_T_squared: list[FloatArray]

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(probe.temperature for probe in self.probes))

    @property
    def decode(self) -> list[FloatArray]:
        return [probe.decode_T for probe in self.probes]

    def at(
        self, temperature: float, arrays: Sequence[FloatArray], last: int | None = None
    ) -> FloatArray:
        """Concatenate the probes' values at a temperature; only the `last` of each, if given."""
        by_probe = zip(self.probes, arrays, strict=True)
        first = 0 if last is None else -last
        return concatenated(
            [a[first:] for probe, a in by_probe if probe.temperature == temperature]
        )

    def possible_mistakes(
        self, temperature: float, decode: str, logprobs: Sequence[FloatArray], last: int | None
    ) -> list[Suspicion]:
        """Wrong uses of T that could explain a disagreement between prefill and `decode`."""
        if not distinguishes_t(temperature):
            return []
        prefill, server = f"{self.name} prefill", self.info.is_server
        ways = [
            (prefill, not_divided(prefill, server=server), self.prefill, self.unscaled),
            (decode, decode_not_divided(decode, server=server), logprobs, self.unscaled),
            (decode, divided_twice(decode, server=server), logprobs, self.at_T_squared),
        ]
        return [
            Suspicion(
                who, why, self.at(temperature, found, last), self.at(temperature, mistaken, last)
            )
            for who, why, found, mistaken in ways
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineAnswers(Prefills):
    """One engine's answers to the handshake.

    Attributes:
        reference: log-probs of each probe's last tokens from the decode path.
        pairs: log p(a) - log p(b) of two tokens after each prompt, by temperature.
        stops: log p of two tokens of the stop event after each prompt; None without an event.
    """

    reference: list[FloatArray]
    pairs: dict[float, FloatArray]
    stops: tuple[FloatArray, FloatArray] | None = None

    def comparisons(self) -> list[Comparison]:
        """Compare with itself at another T, with the temperature law and with its decode path."""
        return [
            self._compare_temperatures(),
            *self.laws(),
            *(self._against_reference(t) for t in self.temperatures),
            *([] if self.stops is None else [self._one_event(*self.stops)]),
        ]

    def _compare_temperatures(self) -> Comparison:
        prefill, given_N = f"{self.name} prefill", concatenated(self.prefill)
        unscaled_N = concatenated(self.unscaled)
        diagnosis = not_divided(prefill, server=self.info.is_server)
        return compare(
            prefill,
            given_N,
            "itself at another T",
            concatenated(self.at_other),
            temperature=self.temperatures[0],
            dtype="float32",  # the same engine twice: one that ignores T returns equal values
            must_differ=True,
            suspicions=[Suspicion(prefill, diagnosis, given_N, unscaled_N)],
        )

    def _one_event(self, one_N: FloatArray, another_N: FloatArray) -> Comparison:
        """Compare two stop tokens: each must have the log-prob of the stop event as a whole."""
        return compare(
            f"{self.name} prefill of a stop token",
            one_N,
            "another stop token",
            another_N,
            temperature=self.temperatures[0],
            dtype=self.dtype,
        )

    def laws(self) -> list[Comparison]:
        return [
            compare_with_law(
                f"{self.name} prefill",
                self.pairs[temperature],
                self.pairs[UNSCALED],
                temperature=temperature,
                dtype=self.dtype,
                server=self.info.is_server,
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
            suspicions=self.possible_mistakes(temperature, decode, self.reference, last),
        )


async def examine(
    name: str, engine: ScoringModel, plan: Plan, probes: Sequence[HandshakeProbe], info: EngineInfo
) -> EngineAnswers:
    one_by_one = [
        ScoreRequest(
            tokens_T=probe.tokens_T,
            start=max(probe.start, len(probe.tokens_T) - REFERENCE_POSITIONS),
            temperatures=(probe.temperature,),
        )
        for probe in probes
    ]
    given, reference_scores, pairs, stops = await asyncio.gather(
        prefill(name, engine, plan, probes, info),
        engine.decode_score(one_by_one),
        _pair_differences(engine, plan),
        _two_stops(engine, plan),
    )
    return EngineAnswers(
        **shared_fields(Prefills, given),
        reference=[score.logprobs_by_temperature[0] for score in reference_scores],
        pairs=pairs,
        stops=stops,
    )


async def prefill(
    name: str, engine: ScoringModel, plan: Plan, probes: Sequence[HandshakeProbe], info: EngineInfo
) -> Prefills:
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
    scores = await engine.score(given)
    at_T, at_other, unscaled, at_T_squared = (
        [score.logprobs_by_temperature[k] for score in scores] for k in range(4)
    )
    return Prefills(
        name=name,
        info=info,
        probes=probes,
        prefill=at_T,
        at_other=at_other,
        unscaled=unscaled,
        at_T_squared=at_T_squared,
    )


async def _pair_differences(engine: ScoringModel, plan: Plan) -> dict[float, FloatArray]:
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


async def _two_stops(engine: ScoringModel, plan: Plan) -> tuple[FloatArray, FloatArray] | None:
    """log p of the event's first and last token after each prompt; None without an event."""
    if not plan.event:
        return None
    requests = [
        ScoreRequest(
            tokens_T=np.append(prompt_T, np.int32(stop)),
            start=len(prompt_T),
            temperatures=plan.temperatures[:1],
        )
        for stop in (plan.event[0], plan.event[-1])
        for prompt_T in plan.prompts
    ]
    scores = await engine.score(requests)
    found = concatenated([score.logprobs_by_temperature[0] for score in scores])
    return found[: len(plan.prompts)], found[len(plan.prompts) :]
