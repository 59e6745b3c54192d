"""Comparison of several parties' log-probs of the same tokens at T: the handshake's arithmetic.

Pure: chooses probes, compares numbers, and reports which party is wrong and why. The parties are
queried by cluster/handshake/handshake.py. Their tokenizers, vocabularies and stop tokens are
compared in `distill/handshake/identity.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from distill.engine import EngineInfo
from distill.errors import CalibrationError
from distill.sampling import UNSCALED
from distill.types import FloatArray, TokenArray

# Largest |difference| allowed at T >= 1, in nats. A logit's error is divided by T like the logit,
# so T < 1 allows 1/T times as much. float32: prefill and decode sum in different orders, which
# moves a log-prob by about 1e-5. bfloat16 keeps 8 bits: between two kernels, and against float32,
# random models of up to 6 layers differed by up to 0.84 on single tokens and by 0.10 in the mean.
# float16 keeps 3 bits more than bfloat16.
TOLERANCE = {"float32": 1e-3, "float16": 0.2, "bfloat16": 1.5}
# Allowed mean |difference|, as a share of the largest. Rounding moves a few tokens far; a wrong
# temperature or wrong weights move every token. The mean for bfloat16 is thus 0.15, where an
# unscaled log-prob is off by tenths to tens.
MEAN_SHARE = 0.1

NUM_PROBES = 8
PROBE_NEW_TOKENS = 12
# Number of last tokens of a probe that the decode path scores: a server needs one request for each.
REFERENCE_POSITIONS = 4
# A second temperature distinguishes a party that scales by T from one that is right at T by chance.
SECOND_TEMPERATURE_FACTOR = 1.5
# A server that takes the log of a float32 softmax returns -inf for a logit this far below the
# largest. So all log-probs below this value count as equal to it.
FLOOR = -80.0


def looser_dtype(*dtypes: str) -> str:
    """The dtype that allows the larger difference."""
    return max(dtypes, key=TOLERANCE.__getitem__)


def tolerance_at(dtype: str, temperature: float) -> float:
    """Allowed difference of two kernels' log-probs, nats; T < 1 scales rounding errors up, too."""
    return TOLERANCE[dtype] / min(temperature, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of two parties' log-probs of the same tokens at one temperature.

    Attributes:
        must_differ: the reference is at another temperature, so a party that agrees ignores T.
        diagnosis: known mistake that explains the disagreement exactly; empty if none does.
        culprit: name of the party that made this mistake, which may not be `party`.
    """

    party: str
    reference: str
    temperature: float
    num_tokens: int
    max_gap: float
    mean_gap: float
    tolerance: float
    must_differ: bool = False
    diagnosis: str = ""
    culprit: str = ""

    @property
    def mean_tolerance(self) -> float:
        return self.tolerance * MEAN_SHARE

    @property
    def agrees(self) -> bool:
        if not math.isfinite(self.max_gap):
            return False
        same = self.max_gap <= self.tolerance and self.mean_gap <= self.mean_tolerance
        return same != self.must_differ

    def message(self) -> str:
        """Message: the mismatch, its size, and where to look for the cause."""
        where = f"{self.party} disagrees with {self.reference} at temperature {self.temperature:g}"
        if not math.isfinite(self.max_gap):
            found = f"some of the log-probs of {self.num_tokens} tokens are not finite"
        elif self.must_differ:
            found = (
                f"the two are the same to {self.max_gap:.3g} nats on {self.num_tokens} tokens, "
                "so it ignores the requested temperature"
            )
        else:
            found = (
                f"up to {self.max_gap:.3g} nats on {self.num_tokens} tokens (mean "
                f"{self.mean_gap:.3g}; allowed {self.tolerance:.3g}, mean "
                f"{self.mean_tolerance:.3g}), so the reverse KL would be a different objective"
            )
        remedy = self.diagnosis or "check its weights, precision and temperature handling"
        return f"{where}: {found}. {remedy[0].upper()}{remedy[1:]}"


@dataclass(frozen=True, slots=True, eq=False)
class Suspicion:
    """A known mistake of a party, which explains a disagreement if it predicts the log-probs.

    Attributes:
        diagnosis: description of the mistake, with a remedy.
        logprobs_N: log-probs that the party reported.
        mistaken_N: log-probs that it would report if it made the mistake.
    """

    culprit: str
    diagnosis: str
    logprobs_N: FloatArray
    mistaken_N: FloatArray


def compare(
    party: str,
    logprobs_N: FloatArray,
    reference: str,
    reference_logprobs_N: FloatArray,
    *,
    temperature: float,
    dtype: str,
    must_differ: bool = False,
    suspicions: Sequence[Suspicion] = (),
) -> Comparison:
    """Compare `party` with `reference`; both arrays cover the same tokens in the same order.

    With `must_differ` the reference is at another temperature: a party that ignores T agrees with
    it, and passes all other comparisons with itself. The first suspicion that fits explains a
    disagreement.
    """
    floored = [np.maximum(values_N, FLOOR) for values_N in (logprobs_N, reference_logprobs_N)]
    max_gap, mean_gap = gaps(*floored)
    comparison = Comparison(
        party=party,
        reference=reference,
        temperature=temperature,
        num_tokens=len(logprobs_N),
        max_gap=max_gap,
        mean_gap=mean_gap,
        tolerance=tolerance_at(dtype, temperature),
        must_differ=must_differ,
    )
    return _explained(comparison, suspicions)


def compare_with_law(
    party: str,
    difference_N: FloatArray,
    unscaled_difference_N: FloatArray,
    *,
    temperature: float,
    dtype: str,
    server: bool,
) -> Comparison:
    """Check that log-prob differences scale as 1/T; catches engines that are consistently wrong.

    Two tokens a, b in one context: log p_T(a) - log p_T(b) = (z_a - z_b) / T. The normaliser
    cancels, so the difference at T is the difference at T = 1, divided by T.

    Args:
        difference_N: log p(a) - log p(b) as returned for T, one entry per pair.
        unscaled_difference_N: log p(a) - log p(b) of the same pairs as returned for T = 1.
        server: True if the party is an SGLang server, which has its own possible mistakes.
    """
    expected_N = unscaled_difference_N / np.float32(temperature)
    max_gap, mean_gap = gaps(difference_N, expected_N)
    comparison = Comparison(
        party=party,
        reference="the temperature law",
        temperature=temperature,
        num_tokens=len(difference_N),
        max_gap=max_gap,
        mean_gap=mean_gap,
        tolerance=2 * tolerance_at(dtype, temperature),  # each side is a difference of two
    )
    if not distinguishes_t(temperature):
        return comparison
    return _explained(
        comparison,
        [
            Suspicion(
                party, not_divided(party, server=server), difference_N, unscaled_difference_N
            ),
            Suspicion(
                party,
                divided_twice(party, server=server),
                difference_N,
                expected_N / np.float32(temperature),
            ),
        ],
    )


def distinguishes_t(temperature: float) -> bool:
    """True if T is far enough from 1 for a wrong temperature to show in the log-probs."""
    return abs(temperature - UNSCALED) > 0.05


def not_divided(prefill: str, *, server: bool) -> str:
    """Diagnosis for log-probs of given tokens that are at T = 1; `server`: by an SGLang server."""
    found = f"the log-probs of {prefill} are not divided by T: "
    if not server:
        return found + (
            "its model gives every sampled token a probability of 0 or 1, at any T; check its "
            "weights"
        )
    return found + (
        "an SGLang server does this without isotherm's plugin; install isotherm where the server "
        "runs, and restart it with ISOTHERM_SGLANG_PLUGIN=1 in its environment"
    )


def divided_twice(party: str, *, server: bool) -> str:
    """Diagnosis for log-probs that are at T * T; `server`: by an SGLang server."""
    found = f"the log-probs of {party} are divided by T twice"
    if not server:
        return found
    return f"{found}: check whether another patch, or an option of the server, also divides by T"


def decode_not_divided(decode: str, *, server: bool) -> str:
    """Diagnosis for sampled tokens' log-probs that are at T = 1; `server`: by an SGLang server."""
    found = f"the log-probs of {decode} look like T = 1"
    if not server:
        return found
    return f"{found}: unset SGLANG_RETURN_ORIGINAL_LOGPROB on its server, and restart it"


def other_weights(engine: str, arbiter: str) -> str:
    return (
        f"{engine} agrees with itself, so its weights differ from those of the {arbiter}: a "
        "checkpoint of another run, or an incomplete push"
    )


def gaps(a_N: FloatArray, b_N: FloatArray) -> tuple[float, float]:
    """The largest and the mean |difference|; NaN if a value is not finite."""
    assert a_N.shape == b_N.shape and len(a_N) > 0
    with np.errstate(invalid="ignore"):
        gap_N = np.abs(a_N.astype(np.float64) - b_N)
    return float(gap_N.max()), float(gap_N.mean())


def _explained(comparison: Comparison, suspicions: Sequence[Suspicion]) -> Comparison:
    if comparison.agrees:
        return comparison
    for suspicion in suspicions:
        max_gap, mean_gap = gaps(suspicion.logprobs_N, suspicion.mistaken_N)
        if max_gap <= comparison.tolerance and mean_gap <= comparison.mean_tolerance:
            return replace(comparison, diagnosis=suspicion.diagnosis, culprit=suspicion.culprit)
    return comparison


def probe_prompts(vocab_size: int, context_length: int, seed: int = 0) -> list[TokenArray]:
    """Seeded prompts of up to 24 random ids, valid for any model and in no training data.

    A prompt fills at most half of a short context, so that there is room to sample.
    """
    rng = np.random.default_rng(seed)
    longest = max(1, min(24, context_length // 2))
    return [
        rng.integers(0, vocab_size, size=rng.integers(min(4, longest), longest + 1)).astype(
            np.int32
        )
        for _ in range(NUM_PROBES)
    ]


def probe_pairs(vocab_size: int, apart_from: Sequence[int] = ()) -> tuple[TokenArray, TokenArray]:
    """Two different tokens per probe prompt, seeded, for the temperature law.

    Tokens in `apart_from` are never chosen: they count as one event, and the log-prob of several
    tokens together does not follow the law.
    """
    rng = np.random.default_rng(1)
    ids_V = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), np.asarray(apart_from, np.int32))
    a_P = rng.integers(0, len(ids_V), size=NUM_PROBES)
    b_P = (a_P + rng.integers(1, len(ids_V), size=NUM_PROBES)) % len(ids_V)
    return ids_V[a_P], ids_V[b_P]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """Report of one handshake.

    Attributes:
        differences: facts that differ; if there are any, no log-probs were requested.
        parties: each engine's description of itself, by name.
    """

    comparisons: tuple[Comparison, ...]
    differences: tuple[str, ...] = ()
    parties: Mapping[str, EngineInfo] = field(default_factory=dict)

    @property
    def failures(self) -> list[Comparison]:
        return [comparison for comparison in self.comparisons if not comparison.agrees]

    @property
    def agrees(self) -> bool:
        return not self.failures and not self.differences

    @property
    def largest_gap(self) -> float:
        """Largest gap among the comparisons whose parties must agree."""
        return max(c.max_gap for c in self.comparisons if not c.must_differ)

    def verdict(self) -> str:
        if self.differences:
            return "no agreement on vocabulary, tokenizer or stop tokens"
        if self.failures:
            worst = self._worst()
            return (
                f"no agreement: {len(self.failures)} of {len(self.comparisons)} comparisons "
                f"failed; {worst.culprit or worst.party} disagrees"
            )
        return (
            f"agreement: {len(self.comparisons)} comparisons, the largest gap "
            f"{self.largest_gap:.1e} nats"
        )

    def require_agreement(self) -> None:
        """Raise CalibrationError with the party that is wrong, by how much, and the remedy."""
        if not self.agrees:
            raise CalibrationError(self.message())

    def message(self) -> str:
        return "; ".join(self.differences) or self._worst().message()

    def _worst(self) -> Comparison:
        """The failure to report: not finite, else one with a diagnosis, else the largest."""
        return max(
            self.failures,
            key=lambda c: (not math.isfinite(c.max_gap), bool(c.diagnosis), c.max_gap),
        )

    def to_json(self) -> dict[str, Any]:
        """The report as valid JSON; numbers that are not finite become strings."""
        return {
            "agrees": self.agrees,
            "verdict": self.verdict(),
            "differences": list(self.differences),
            "parties": {
                name: asdict(info) | {"tokenizer": info.tokenizer and info.tokenizer.digest()}
                for name, info in self.parties.items()
            },
            "comparisons": [
                {name: _jsonable(value) for name, value in asdict(c).items()} | {"agrees": c.agrees}
                for c in self.comparisons
            ],
        }


def _jsonable(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def concatenated(arrays: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate(list(arrays)).astype(np.float32)
