"""The handshake's verdict: who is off, by how much, and that NaN never agrees."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from distill.calibration import (
    TOLERANCE,
    CalibrationReport,
    Comparison,
    compare,
    concatenated,
    probe_prompts,
)
from distill.errors import CalibrationError


def compared(*gaps: float, party: str = "teacher prefill", dtype: str = "float32") -> Comparison:
    """`party` against a reference of -2 everywhere, off by `gaps`."""
    reference = np.full(len(gaps), -2, np.float32)
    return compare(
        party,
        reference + np.array(gaps, np.float32),
        "teacher decode",
        reference,
        temperature=0.7,
        dtype=dtype,
    )


def test_gaps_written_out() -> None:
    comparison = compared(0.25, -0.5, 0.0)
    assert comparison.max_gap == 0.5
    assert comparison.mean_gap == 0.25
    assert comparison.num_tokens == 3
    assert not comparison.agrees


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_tolerance_is_the_precision_s(dtype: str) -> None:
    assert compared(0.9 * TOLERANCE[dtype], dtype=dtype).agrees
    assert not compared(1.1 * TOLERANCE[dtype], dtype=dtype).agrees


@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_agrees(gap: float) -> None:
    assert not compared(0.0, gap, dtype="bfloat16").agrees


def test_agreement_passes() -> None:
    report = CalibrationReport(comparisons=(compared(1e-5), compared(0.0)))
    assert report.agrees
    report.require_agreement()


def test_the_party_furthest_off_is_named() -> None:
    report = CalibrationReport(
        comparisons=(
            compared(0.002, party="learner"),
            compared(4.0, 0.0, party="teacher prefill"),
            compared(0.0, party="policy prefill"),
        )
    )
    with pytest.raises(CalibrationError) as error:
        report.require_agreement()
    assert "teacher prefill disagrees with teacher decode at temperature 0.7" in str(error.value)
    assert "up to 4 nats on 2 tokens (mean 2, allowed 0.001)" in str(error.value)
    assert error.value.exit_code == 3


def test_nan_is_furthest_off() -> None:
    report = CalibrationReport(
        comparisons=(compared(9.0), compared(math.nan, party="learner"), compared(1.0))
    )
    with pytest.raises(CalibrationError, match=r"learner disagrees .* up to nan nats"):
        report.require_agreement()


def test_the_report_as_json() -> None:
    report = CalibrationReport(comparisons=(compared(0.0), compared(0.5)))
    came = json.loads(json.dumps(report.to_json()))
    assert came["agrees"] is False
    assert [row["agrees"] for row in came["comparisons"]] == [True, False]
    assert came["comparisons"][1] == {
        "party": "teacher prefill",
        "reference": "teacher decode",
        "temperature": 0.7,
        "num_tokens": 1,
        "max_gap": 0.5,
        "mean_gap": 0.5,
        "tolerance": 0.001,
        "must_differ": False,
        "agrees": False,
    }


def test_a_party_that_ignores_the_temperature_is_told_from_one_that_heeds_it() -> None:
    def heeds(gap: float) -> CalibrationReport:
        comparison = replace(compared(gap), must_differ=True)
        return CalibrationReport(comparisons=(comparison,))

    heeds(0.5).require_agreement()
    with pytest.raises(CalibrationError, match="ignores the temperature"):
        heeds(0.0).require_agreement()
    with pytest.raises(CalibrationError):
        heeds(math.nan).require_agreement()


def test_probes_are_seeded_and_inside_the_vocabulary() -> None:
    probes = probe_prompts(11, 64, seed=3)
    assert all(4 <= len(tokens) <= 24 for tokens in probes)
    assert set(np.concatenate(probes).tolist()) == set(range(11))
    assert [p.tolist() for p in probes] == [p.tolist() for p in probe_prompts(11, 64, seed=3)]
    assert [p.tolist() for p in probes] != [p.tolist() for p in probe_prompts(11, 64, seed=4)]


@pytest.mark.parametrize("context_length", [2, 3, 16, 30])
def test_probes_leave_room_to_sample_in_a_short_context(context_length: int) -> None:
    assert all(1 <= len(p) <= context_length // 2 for p in probe_prompts(11, context_length))


def test_nothing_compared_is_no_agreement() -> None:
    with pytest.raises(AssertionError):
        compared()


def test_concatenated_keeps_the_order() -> None:
    joined = concatenated([np.array([1.0]), np.array([2.0, 3.0])])
    assert joined.tolist() == [1, 2, 3] and joined.dtype == np.float32
