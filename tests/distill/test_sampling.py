"""Temperatures: above 0 and never truncated in training, 0 and up in evaluation."""

import math
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distill.errors import ConfigError
from distill.sampling import EvalSampling, TrainSampling, check_temperature
from tests.refusals import refuses


@given(st.floats())
@example(0.0)
def test_training_takes_every_finite_temperature_above_zero_and_no_other(value: float) -> None:
    if math.isfinite(value) and value > 0:
        assert TrainSampling(temperature=value, max_new_tokens=1).temperature == value
    else:
        with refuses(ConfigError, "temperature"):
            TrainSampling(temperature=value, max_new_tokens=1)


@pytest.mark.parametrize("value", ["1.0", None, [1.0]])
def test_a_temperature_is_a_number(value: object) -> None:
    with refuses(ConfigError, "my.field"):
        check_temperature(value, "my.field")  # pyright: ignore[reportArgumentType]


def test_training_has_no_truncation_to_set() -> None:
    assert {field.name for field in fields(TrainSampling)} == {"temperature", "max_new_tokens"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("max_new_tokens", 0),
    ],
)
def test_evaluation_ranges(name: str, value: float) -> None:
    with refuses(ConfigError, name):
        EvalSampling(**{"temperature": 1.0, "max_new_tokens": 3, name: value})
