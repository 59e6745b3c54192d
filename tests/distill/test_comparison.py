"""The handshake's verdict: the wrong party and its gap; NaN never agrees."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distill.engine import EngineInfo
from distill.errors import CalibrationError
from distill.handshake.comparison import (
    MEAN_SHARE,
    NUM_PROBES,
    TOLERANCE,
    CalibrationReport,
    Comparison,
    Suspicion,
    compare,
    compare_with_law,
    probe_pairs,
    probe_prompts,
)
from distill.handshake.identity import fact_differences
from distill.tokenizer import TokenizerProbe
from distill.types import FloatArray
from tests.samples import engine_info


def compared(
    *gaps: float,
    party: str = "teacher prefill",
    dtype: str = "float32",
    temperature: float = 1.2,
    must_differ: bool = False,
    suspicions: Sequence[Suspicion] = (),
) -> Comparison:
    """`party` against a reference of -2 everywhere, with these gaps."""
    reference = np.full(len(gaps), -2, np.float32)
    return compare(
        party, reference + np.array(gaps, np.float32), "teacher decode", reference,
        temperature=temperature, dtype=dtype, must_differ=must_differ, suspicions=suspicions,
    )  # fmt: skip


def compared_with(logprobs_N: FloatArray, reference_N: FloatArray) -> Comparison:
    return compare("a", logprobs_N, "b", reference_N, temperature=1.2, dtype="float32")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("temperature", "times"), [(0.5, 2), (1.0, 1), (2.0, 1)])
def test_the_tolerance_is_the_precision_s_over_t(
    dtype: str, temperature: float, times: float
) -> None:
    allowed, others = times * TOLERANCE[dtype], [0.0] * 19
    assert compared(0.9 * allowed, *others, dtype=dtype, temperature=temperature).agrees
    assert not compared(1.1 * allowed, *others, dtype=dtype, temperature=temperature).agrees


def test_a_small_gap_everywhere_is_worse_than_an_outlier() -> None:
    outlier = compared(0.9, *[0.0] * 19, dtype="bfloat16")
    everywhere = compared(*[0.2] * 20, dtype="bfloat16")
    assert outlier.agrees and not everywhere.agrees
    assert outlier.tolerance == everywhere.tolerance == TOLERANCE["bfloat16"]
    assert everywhere.mean_tolerance == pytest.approx(MEAN_SHARE * TOLERANCE["bfloat16"])


@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf])
def test_non_finite_values_never_agree(gap: float) -> None:
    assert not compared(0.0, gap, dtype="bfloat16").agrees


def test_log_probs_too_small_for_a_float32_softmax_are_all_alike() -> None:
    reference = np.full(2, -200, np.float32)
    assert compared_with(np.array([-np.inf, -95], np.float32), reference).agrees
    assert not compared_with(np.array([-np.inf, -30], np.float32), reference).agrees


def test_json_has_no_constants_that_json_lacks() -> None:
    report = CalibrationReport(comparisons=(compared(math.nan), compared(math.inf)))
    rows = json.loads(json.dumps(report.to_json(), allow_nan=False))["comparisons"]
    assert [row["max_gap"] for row in rows] == ["nan", "inf"]


def test_a_matching_explanation_comes_first() -> None:
    reference = np.array([-2, -3], np.float32)
    mistaken = np.array([-5, -1], np.float32)

    def judged(found_N: FloatArray) -> Comparison:
        return compare(
            "a", found_N, "b", reference, temperature=0.5, dtype="float32",
            suspicions=[
                Suspicion("b", "it is upside down", found_N, -mistaken),
                Suspicion("c", "it was mistaken", found_N, mistaken),
            ],
        )  # fmt: skip

    explained, unexplained = judged(mistaken), judged(reference - 9)
    assert explained.diagnosis == "it was mistaken" and not explained.agrees
    assert explained.culprit == "c"
    assert explained.message().endswith("It was mistaken")
    assert unexplained.diagnosis == ""
    assert judged(reference).agrees and judged(reference).diagnosis == ""
    report = CalibrationReport(comparisons=(unexplained, explained))
    assert "2 of 2" in report.verdict() and "; c " in report.verdict()
    with pytest.raises(CalibrationError):
        report.require_agreement()


Z = np.array([[3.0, 1.0, -2.0], [0.5, -4.0, 9.0]], np.float32)


def pair_differences(temperature: float) -> FloatArray:
    """log p(a) - log p(b) of the softmax itself, with its normaliser."""
    p_NV = np.exp(Z / temperature)
    log_p_NV = np.log(p_NV / p_NV.sum(axis=1, keepdims=True))
    return log_p_NV[:, 0] - log_p_NV[:, 2]


@pytest.mark.parametrize(
    ("temperature", "used", "diagnosis"),
    [
        *((temperature, temperature, "") for temperature in (0.5, 0.9, 1.0, 1.7)),
        (0.5, 1.0, "not divided by T"),
        (0.5, 0.25, "divided by T twice"),
        (0.5, 0.7, ""),
        (1.0, 0.2, ""),  # at T = 1 neither mistake shows
    ],
)
def test_the_law_holds_of_a_softmax_at_the_temperature_that_was_asked(
    temperature: float, used: float, diagnosis: str
) -> None:
    law = compare_with_law(
        "a", pair_differences(used), pair_differences(1.0),
        temperature=temperature, dtype="float32", server=True,
    )  # fmt: skip
    assert law.num_tokens == 2 and law.agrees == (used == temperature)
    assert law.max_gap < 1e-5 or not law.agrees
    assert diagnosis in law.diagnosis and bool(diagnosis) == bool(law.diagnosis)


def info(**changes: Any) -> EngineInfo:
    return engine_info(**{"vocab_size": 10, "tokenizer": OURS} | changes)


OURS = TokenizerProbe(texts=((1, 2), (3,)), chat=(4, 5))


@pytest.mark.parametrize(
    ("policy", "teacher", "difference"),
    [
        ({}, {}, None),
        ({}, {"vocab_size": 11}, None),
        ({}, {"vocab_size": 9}, "teacher 0 has a vocabulary of 9, smaller than policy 0's 10"),
        ({"vocab_size": 11}, {"vocab_size": 11}, "policy 1 has a vocabulary of 11 and policy 0"),
        ({}, {"eos_token_ids": (1, 2)}, "teacher 0 ends at token ids [1, 2] and policy 0 at [1]"),
        ({"eos_token_ids": ()}, {}, "policy 1 ends at token ids [] and policy 0 at [1]"),
        ({}, {"eos_token_ids": None}, None),
        ({"tokenizer": None}, {"tokenizer": None}, None),
        ({}, {"tokenizer": replace(OURS, chat=None)}, None),
        ({}, {"tokenizer": replace(OURS, chat=(4,))}, None),
        ({"tokenizer": replace(OURS, texts=((1, 2), (9,)))}, {}, "as [9], the run's tokenizer as"),
    ],
)
def test_facts_that_differ(
    policy: dict[str, Any], teacher: dict[str, Any], difference: str | None
) -> None:
    policies = {"policy 0": info(), "policy 1": info(**policy)}
    found = fact_differences(policies, {"teacher 0": info(**teacher)}, OURS)
    assert len(found) == (difference is not None)
    assert difference is None or difference in found[0]


def test_a_party_that_ignores_the_temperature_is_detected() -> None:
    def heeds(gap: float) -> CalibrationReport:
        return CalibrationReport(comparisons=(compared(gap, must_differ=True),))

    heeds(0.5).require_agreement()
    with pytest.raises(CalibrationError):
        heeds(0.0).require_agreement()
    with pytest.raises(CalibrationError):
        heeds(math.nan).require_agreement()


def test_probes_are_seeded_and_inside_the_vocabulary() -> None:
    probes = probe_prompts(11, 64, seed=3)
    assert all(4 <= len(tokens) <= 24 for tokens in probes)
    assert set(np.concatenate(probes).tolist()) == set(range(11))
    assert [p.tolist() for p in probes] == [p.tolist() for p in probe_prompts(11, 64, seed=3)]
    assert [p.tolist() for p in probes] != [p.tolist() for p in probe_prompts(11, 64, seed=4)]


def test_a_pair_is_of_two_tokens_of_the_vocabulary() -> None:
    for vocab_size in (2, 3, 500):
        a_P, b_P = probe_pairs(vocab_size)
        assert len(a_P) == len(b_P) == NUM_PROBES and (a_P != b_P).all()
        assert {*a_P.tolist(), *b_P.tolist()} <= set(range(vocab_size))
