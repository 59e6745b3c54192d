"""Canaries: fixed rows that a frozen model scores repeatedly, and how far its answers may differ.

Pure: rows, answers, the differences that repeated answers allow, drifts.
cluster/runtime/canaries.py decides which models are queried, and when.

    rows        random tokens, scored at T (and unscaled) and at 1.5 T. Like training requests, they
                ask for listed tokens and hidden states, so that the model runs the same passes
    allowed     largest permitted difference of a later answer, measured on the first answers, which
                are repeated in batches of different composition
    drift       difference of a later answer from the first one; never from the previous one, so
                that slow changes add up
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from distill.engine import EngineInfo, Score, ScoreRequest
from distill.handshake.comparison import (
    FLOOR,
    MEAN_SHARE,
    SECOND_TEMPERATURE_FACTOR,
    concatenated,
    distinguishes_t,
    gaps,
    not_divided,
    probe_prompts,
    tolerance_at,
)
from distill.sampling import UNSCALED
from distill.states import HiddenStates, joined
from distill.types import FloatArray, TokenArray

NUM_ROWS = 4
_SEED = 19
# Number of extra rows sent with each of the first requests, because batches of different shapes
# round differently.
FILLER_ROWS = (0, 0, 6, 24)
_LONGEST_FILLER = 128
# Allowed difference of a later answer, as a multiple of the largest difference among the first
# answers: later batches have shapes that were not tried...
_ALLOWED_TIMES = 4.0
# ...but at least this share of the difference that the handshake allows between two kernels, even
# if the measured differences are smaller. (In bfloat16 one step of a logit of 16 is 0.125.)
_ALLOWED_SHARE = 1 / 8
# A model whose weights are all 0 gives every token a log-prob of -ln V. It is recognised by
# log-probs that span less than the first number and whose mean is within the second of -ln V, in
# nats.
_ALL_ALIKE, _NEAR_UNIFORM = 1e-3, 0.05
# Number of outcomes of the fixed head that hidden states are compared through.
_OUTCOMES = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CanaryRows:
    """Requests of one model's canaries: two per row, at temperatures (T, 1) and (1.5 T,)."""

    requests: tuple[ScoreRequest, ...]
    temperature: float
    vocab_size: int
    context_length: int

    @classmethod
    def of(
        cls,
        info: EngineInfo,
        temperature: float,
        *,
        given: int = 0,
        top_k: int = 0,
        states: bool = False,
        number: int = NUM_ROWS,
    ) -> CanaryRows:
        """Build `number` rows for one model, with the extras of training requests.

        Args:
            given: number of given tokens per position.
            top_k: number of top tokens per position.
            states: True if they ask for hidden states.
        """
        prompts = probe_prompts(info.vocab_size, info.context_length, seed=_SEED)
        rows = sorted(prompts, key=len)[-number:]
        ids_K = _some_ids(info, given) if info.scores_given else ()
        requests = []
        for tokens_T in rows:
            positions = len(tokens_T) - 1
            given_NK = np.tile(ids_K, (positions, 1)) if len(ids_K) else None
            requests += [
                ScoreRequest(
                    tokens_T=tokens_T,
                    start=1,  # all positions, so that none is answered from a cached prefix
                    temperatures=(temperature, UNSCALED),
                    given_NK=given_NK,
                    top_k=top_k,
                    states_N=np.ones(positions, np.bool_) if states else None,
                ),
                ScoreRequest(
                    tokens_T=tokens_T,
                    start=1,
                    temperatures=(temperature * SECOND_TEMPERATURE_FACTOR,),
                ),
            ]
        return cls(
            requests=tuple(requests),
            temperature=temperature,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
        )

    def with_filler(self, number: int) -> list[ScoreRequest]:
        """The canaries' requests, and `number` requests of random tokens after them."""
        rng = np.random.default_rng([_SEED, number])
        longest = max(2, min(_LONGEST_FILLER, self.context_length // 2))
        lengths = rng.integers(2, longest + 1, size=number)
        return [
            *self.requests,
            *(
                ScoreRequest(
                    tokens_T=rng.integers(0, self.vocab_size, size=length).astype(np.int32),
                    start=1,
                    temperatures=(self.temperature, UNSCALED),
                )
                for length in lengths
            ),
        ]

    def answer(self, scores: Sequence[Score]) -> CanaryScores:
        """Build the answer from the canaries' scores, which come first in `scores`."""
        own = scores[: len(self.requests)]
        at_T, at_other = own[0::2], own[1::2]
        return CanaryScores(
            at_T_N=_values([score.logprobs_by_temperature[0] for score in at_T]),
            unscaled_N=_values([score.logprobs_by_temperature[1] for score in at_T]),
            at_other_N=_values([score.logprobs_by_temperature[0] for score in at_other]),
            listed_N=_values(
                [s.top.logprobs_NK.reshape(-1) for s in at_T if s.top is not None]
                or [np.empty(0, np.float32)]
            ),
            states_N=_by_fixed_head([s.states for s in at_T if s.states is not None]),
        )


def _some_ids(info: EngineInfo, number: int) -> TokenArray:
    """Seeded ids to request at every position; only the first id of a stop event may occur."""
    ids_V = np.setdiff1d(np.arange(info.vocab_size, dtype=np.int32), info.stop_event[1:])
    return np.random.default_rng(_SEED).choice(ids_V, min(number, len(ids_V)), replace=False)


def _by_fixed_head(parts: Sequence[HiddenStates]) -> FloatArray:
    """Reduce hidden states to numbers on the scale of log-probs; any change of a state shows.

    At each position: the log of the state's root mean square (RMS), and log-probs of `_OUTCOMES`
    outcomes by a seeded head applied to state / RMS. The teacher's own head is not available here.
    """
    if not parts:
        return np.empty(0, np.float32)
    states_NH = joined(parts, "cpu").double().numpy()
    hidden = states_NH.shape[1]
    head_HK = np.random.default_rng(_SEED).standard_normal((hidden, _OUTCOMES)) / math.sqrt(hidden)
    with np.errstate(divide="ignore", invalid="ignore"):  # a state of 0 gives NaN, which is a fault
        size_N1 = np.sqrt(np.square(states_NH).mean(1, keepdims=True))
        logits_NK = states_NH / size_N1 @ head_HK
        logprobs_NK = logits_NK - np.log(np.exp(logits_NK).sum(1, keepdims=True))
        return np.hstack([np.log(size_N1), logprobs_NK]).astype(np.float32).reshape(-1)


def _values(arrays: Sequence[FloatArray]) -> FloatArray:
    return np.maximum(concatenated(arrays), np.float32(FLOOR))  # NaN is kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CanaryScores:
    """Log-probs of the canaries' tokens at T, unscaled and at 1.5 T.

    `listed_N`: log-probs at T of the given and top tokens. `states_N`: numbers computed from the
    hidden states (`_by_fixed_head`). Both are empty if the rows do not request them.
    """

    at_T_N: FloatArray
    unscaled_N: FloatArray
    at_other_N: FloatArray
    listed_N: FloatArray
    states_N: FloatArray

    @property
    def logprobs_N(self) -> FloatArray:
        return np.concatenate([self.at_T_N, self.unscaled_N, self.at_other_N, self.listed_N])


class Gaps(NamedTuple):
    """Differences between two answers, or their limits; NaN if a value is not finite.

    Attributes:
        largest, mean: |difference| of log-probs, in nats.
        states: largest |difference| of `CanaryScores.states_N`.
    """

    largest: float
    mean: float
    states: float

    @classmethod
    def of(cls, a: CanaryScores, b: CanaryScores) -> Gaps:
        with np.errstate(invalid="ignore"):
            states_N = np.abs(a.states_N.astype(np.float64) - b.states_N)
        return cls(*gaps(a.logprobs_N, b.logprobs_N), float(states_N.max(initial=0.0)))

    @classmethod
    def between_kernels(cls, dtype: str, temperature: float) -> Gaps:
        """Limits for two replicas of one model: those of the handshake for two kernels."""
        most = tolerance_at(dtype, temperature)
        return cls(most, most * MEAN_SHARE, tolerance_at(dtype, UNSCALED))  # states have no T

    def within(self, allowed: Gaps) -> bool:
        return all(gap <= most for gap, most in zip(self, allowed, strict=True))


def allowed(measured: float, most: float) -> float:
    """Limit for later answers, from the largest gap among the first ones and the kernels' limit."""
    return min(most, max(_ALLOWED_TIMES * measured, _ALLOWED_SHARE * most))


class Drift(NamedTuple):
    """Gaps between an answer and its reference; `why` describes a mismatch, "" if there is none."""

    gap: float
    mean: float
    why: str


def judge(answer: CanaryScores, first: CanaryScores, allowed: Gaps, rows: CanaryRows) -> Drift:
    """Compare an answer with a reference: the model's first answer, or its replicas' answers."""
    found = Gaps.of(answer, first)
    why = ""
    if not math.isfinite(found.largest):
        why = "some of its log-probs are not finite"
    elif not found._replace(states=0.0).within(allowed):
        why = (
            f"up to {found.largest:.3g} nats (mean {found.mean:.3g}; allowed "
            f"{allowed.largest:.3g}, mean {allowed.mean:.3g}): "
            f"{_cause(answer, first, allowed, rows)}"
        )
    elif not found.within(allowed):
        why = (
            f"its hidden states moved by {found.states:.3g} (allowed {allowed.states:.3g}), and "
            "its log-probs by an allowed amount"
        )
    return Drift(found.largest, found.mean, why)


@dataclass(frozen=True, eq=False)
class CanaryAnswers:
    """Answers of a model to the same rows, in batches of many shapes; the first: the reference."""

    info: EngineInfo
    rows: CanaryRows
    answers: Sequence[CanaryScores]

    @cached_property
    def measured(self) -> Gaps:
        """Largest differences of these answers from the first one."""
        found = [Gaps.of(answer, self.answers[0]) for answer in self.answers]
        return Gaps(*map(max, zip(*found, strict=True)))

    @cached_property
    def allowed(self) -> Gaps:
        """Limits for the differences of later answers from the first one."""
        most = Gaps.between_kernels(self.info.dtype, self.rows.temperature)
        return Gaps(*map(allowed, self.measured, most))

    def judge(self, answer: CanaryScores) -> Drift:
        return judge(answer, self.answers[0], self.allowed, self.rows)

    @property
    def nondeterministic(self) -> str:
        """Description of an answer that differs from the first one; "" if none does."""
        reasons = (drift.why for drift in map(self.judge, self.answers) if drift.why)
        return next((f"scores the same rows differently: {each}" for each in reasons), "")

    def described(self) -> dict[str, Any]:
        return {
            "kind": self.info.kind,
            "model": self.info.model,
            "dtype": self.info.dtype,
            "scaling": self.info.temperature_scaling,
            "answers": len(self.answers),
            "measured": self.measured.largest,
            "allowed": self.allowed.largest,
        }


def _cause(answer: CanaryScores, first: CanaryScores, allowed: Gaps, rows: CanaryRows) -> str:
    """Fault that explains an answer which differs from the first one."""
    if empty := _empty(answer, rows):
        return empty
    undivided = float(np.abs(answer.at_T_N - first.unscaled_N).max())
    if distinguishes_t(rows.temperature) and undivided <= allowed.largest:
        return "its logits are no longer divided by T"
    return "it has other weights than at first, or computes differently"


def _empty(answer: CanaryScores, rows: CanaryRows) -> str:
    """Description of the fault if the answer is that of an all-zero model."""
    values_N, uniform = answer.at_T_N, -math.log(rows.vocab_size)
    if np.ptp(values_N) < _ALL_ALIKE and abs(float(values_N.mean()) - uniform) < _NEAR_UNIFORM:
        return f"every log-prob is -ln {rows.vocab_size}, so its weights are empty"
    return ""


def first_fault(answer: CanaryScores, rows: CanaryRows) -> str:
    """Fault that a server's first answer shows, with the remedy; "" if there is none.

    A server that divides by T twice is found by the handshake only, because its log-probs do depend
    on T.
    """
    if not (np.isfinite(answer.logprobs_N).all() and np.isfinite(answer.states_N).all()):
        return (
            "some of its log-probs or hidden states are not finite: its weights, or its numbers, "
            "are broken"
        )
    if empty := _empty(answer, rows):
        return f"{empty}: load them, and restart it"
    undivided_N = np.abs(answer.at_T_N - answer.unscaled_N)
    unmoved_N = np.abs(answer.at_T_N - answer.at_other_N)
    # Both requests go to the same engine, so log-probs that ignore T are equal.
    ignored = tolerance_at("float32", rows.temperature)
    if (
        distinguishes_t(rows.temperature) and undivided_N.max() <= ignored
    ) or unmoved_N.max() <= ignored:
        return not_divided("its prefill", server=True)
    return ""


def outliers(
    answers: Mapping[str, CanaryScores], allowed: Gaps, rows: CanaryRows
) -> dict[str, str]:
    """Descriptions of the replicas of one model that differ from the median, by name.

    Of two that differ, both are reported.
    """
    if len(answers) < 2:
        return {}
    if len(answers) == 2:
        references = dict(zip(answers, list(answers.values())[::-1], strict=True))
    else:
        middle = CanaryScores(
            **{
                each.name: np.median(
                    [getattr(answer, each.name) for answer in answers.values()], axis=0
                ).astype(np.float32)
                for each in fields(CanaryScores)
            }
        )
        references = dict.fromkeys(answers, middle)
    found = {n: judge(answer, references[n], allowed, rows).why for n, answer in answers.items()}
    return {name: why for name, why in found.items() if why}
