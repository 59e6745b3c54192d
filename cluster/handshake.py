"""The handshake: policy decode, policy prefill, learner, and teacher score the same probe tokens.

Two temperatures, mixed in one batch. What an engine reports for tokens it samples (decode) is held
against what it reports for the same tokens given (prefill), and against the learner's forward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from distill.batching import TrainingRow
from distill.calibration import (
    PROBE_NEW_TOKENS,
    SECOND_TEMPERATURE_FACTOR,
    CalibrationReport,
    Comparison,
    compare,
    concatenated,
    probe_prompts,
)
from distill.interfaces import Engine, GenerateRequest, ScoreRequest
from distill.sampling import TrainSampling
from distill.types import FloatArray, TokenArray

# log p_T of each row's trained tokens, from the learner
LearnerLogprobs = Callable[[Sequence[TrainingRow]], Awaitable[list[FloatArray]]]


async def handshake(
    *, policy: Engine, teacher: Engine, learner: LearnerLogprobs, temperature: float
) -> CalibrationReport:
    """Asks every party and compares. Judging the report is the caller's."""
    policy_info, teacher_info = await asyncio.gather(policy.info(), teacher.info())
    prompts = probe_prompts(
        min(policy_info.vocab_size, teacher_info.vocab_size),
        min(policy_info.context_length, teacher_info.context_length),
    )
    temperatures = (temperature, temperature * SECOND_TEMPERATURE_FACTOR)
    comparisons: list[Comparison] = []
    for name, engine, dtype in (
        ("policy", policy, policy_info.dtype),
        ("teacher", teacher, teacher_info.dtype),
    ):
        probes = await _sample_probes(engine, prompts, temperatures)
        given = await _prefill(engine, probes, [probe[0] for probe in probes])
        parties = {f"{name} prefill": given}
        if name == "policy":
            parties["learner"] = await learner([_row(probe) for probe in probes])
        else:
            # The teacher has no learner to be held against: that it heeds T is asked directly.
            other = [sum(temperatures) - probe[0] for probe in probes]
            comparisons.append(
                compare(
                    name,
                    concatenated(given),
                    "itself at another T",
                    concatenated(await _prefill(engine, probes, other)),
                    temperature=temperature,
                    dtype=dtype,
                    must_differ=True,
                )
            )
        comparisons += _against_decode(parties, f"{name} decode", probes, temperatures, dtype)
    return CalibrationReport(comparisons=tuple(comparisons))


# temperature, whole chain, first sampled position, log-probs that decode reported
_Probe = tuple[float, TokenArray, int, FloatArray]


async def _prefill(
    engine: Engine, probes: Sequence[_Probe], temperatures: Sequence[float]
) -> list[FloatArray]:
    """Log-probs of each probe's sampled tokens, given, at a temperature of its own."""
    requests = [
        ScoreRequest(tokens_T=tokens_T, start=start, temperatures=(temperature,))
        for (_, tokens_T, start, _), temperature in zip(probes, temperatures, strict=True)
    ]
    return [score.logprobs_by_temperature[0] for score in await engine.score(requests)]


async def _sample_probes(
    engine: Engine, prompts: Sequence[TokenArray], temperatures: Sequence[float]
) -> list[_Probe]:
    async def one(i: int, prompt_T: TokenArray, temperature: float) -> _Probe:
        sampling = TrainSampling(temperature=temperature, max_new_tokens=PROBE_NEW_TOKENS)
        [sample] = await engine.generate(
            GenerateRequest(prompt_tokens_T=prompt_T, sampling=sampling, num_samples=1, seed=i)
        )
        tokens_T = np.concatenate([prompt_T, sample.tokens_T])
        return temperature, tokens_T, len(prompt_T), sample.logprobs_T

    return await asyncio.gather(
        *(one(i, prompt_T, t) for t in temperatures for i, prompt_T in enumerate(prompts))
    )


def _against_decode(
    parties: dict[str, list[FloatArray]],
    reference: str,
    probes: Sequence[_Probe],
    temperatures: Sequence[float],
    dtype: str,
) -> list[Comparison]:
    comparisons = []
    for party, logprobs in parties.items():
        for temperature in temperatures:
            at_T = [i for i, probe in enumerate(probes) if probe[0] == temperature]
            comparisons.append(
                compare(
                    party,
                    concatenated([logprobs[i] for i in at_T]),
                    reference,
                    concatenated([probes[i][3] for i in at_T]),
                    temperature=temperature,
                    dtype=dtype,
                )
            )
    return comparisons


def _row(probe: _Probe) -> TrainingRow:
    temperature, tokens_T, start, _ = probe
    mask_T = np.arange(len(tokens_T)) >= start
    zeros_T = np.zeros(len(tokens_T), np.float32)
    return TrainingRow(
        tokens_T=tokens_T,
        loss_mask_T=mask_T,
        weights_T=zeros_T,
        behaviour_logprobs_T=zeros_T,
        temperature=temperature,
        source="handshake probe",
    )
