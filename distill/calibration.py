"""The handshake's arithmetic: do several parties give the same tokens the same log-probs at T?

Pure: it chooses probes, compares numbers and says who is off. Asking the parties is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from distill.errors import CalibrationError
from distill.types import FloatArray, TokenArray

# Largest |difference| allowed, in nats. float32: prefill and decode order their sums differently,
# which moves a log-prob by about 1e-5; an unscaled log-prob is off by tenths to tens. bfloat16
# rounds logits to 8 bits: values near 16 move by up to 0.06, a difference of two by twice that.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}

NUM_PROBES = 8
PROBE_NEW_TOKENS = 12
# A second temperature tells 'scaled by T' from 'right by accident at T'.
SECOND_TEMPERATURE_FACTOR = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two parties on the same tokens at one temperature."""

    party: str
    reference: str
    temperature: float
    num_tokens: int
    max_gap: float
    mean_gap: float
    tolerance: float
    must_differ: bool = False

    @property
    def agrees(self) -> bool:
        if self.must_differ:
            return self.max_gap > self.tolerance
        return self.max_gap <= self.tolerance  # False for NaN

    def complaint(self) -> str:
        """What is wrong, by how much, and what to look at."""
        where = f"{self.party} disagrees with {self.reference} at temperature {self.temperature:g}"
        if self.must_differ:
            return (
                f"{where}: the two are the same to {self.max_gap:.3g} nats on {self.num_tokens} "
                "tokens, so it ignores the temperature it is asked for; check its server's settings"
            )
        return (
            f"{where}: up to {self.max_gap:.3g} nats on {self.num_tokens} tokens (mean "
            f"{self.mean_gap:.3g}, allowed {self.tolerance:g}). Its log-probs are not "
            "log softmax(z / T) of the same model, so the reverse KL would be another objective; "
            "check its weights, precision and temperature handling"
        )


def compare(
    party: str,
    logprobs_N: FloatArray,
    reference: str,
    reference_logprobs_N: FloatArray,
    *,
    temperature: float,
    dtype: str,
    must_differ: bool = False,
) -> Comparison:
    """Compares `party` with `reference`; both arrays cover the same tokens in the same order.

    With `must_differ` the reference is at another temperature: a party that ignores T agrees with
    it, and with itself in everything else.
    """
    assert logprobs_N.shape == reference_logprobs_N.shape and len(logprobs_N) > 0
    gap_N = np.abs(logprobs_N.astype(np.float64) - reference_logprobs_N)
    return Comparison(
        party=party,
        reference=reference,
        temperature=temperature,
        num_tokens=len(gap_N),
        max_gap=float(gap_N.max()),
        mean_gap=float(gap_N.mean()),
        tolerance=TOLERANCE[dtype],
        must_differ=must_differ,
    )


def probe_prompts(vocab_size: int, context_length: int, seed: int = 0) -> list[TokenArray]:
    """Seeded prompts of random ids, up to 24 tokens: any model takes them, none has seen them.

    They fill at most half of a short context, so that there is room to sample.
    """
    rng = np.random.default_rng(seed)
    longest = max(1, min(24, context_length // 2))
    return [
        rng.integers(0, vocab_size, size=rng.integers(min(4, longest), longest + 1)).astype(
            np.int32
        )
        for _ in range(NUM_PROBES)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """Every comparison of one handshake."""

    comparisons: tuple[Comparison, ...]

    @property
    def agrees(self) -> bool:
        return all(comparison.agrees for comparison in self.comparisons)

    def require_agreement(self) -> None:
        """Raises CalibrationError naming the party furthest off, and by how much."""
        if self.agrees:
            return
        worst = max(
            (comparison for comparison in self.comparisons if not comparison.agrees),
            key=lambda comparison: np.nan_to_num(comparison.max_gap, nan=np.inf),
        )
        raise CalibrationError(worst.complaint())

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(c), "agrees": c.agrees} for c in self.comparisons]
        return {"agrees": self.agrees, "comparisons": rows}


def concatenated(arrays: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate(list(arrays)).astype(np.float32)
