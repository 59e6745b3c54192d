"""Names of settings: modules by their former paths."""

from __future__ import annotations

import importlib

import pytest

from distill.lookup import _FORMER, current_name, resolve


@pytest.mark.parametrize("former", list(_FORMER))
def test_a_former_path_is_the_module_that_it_became(former: str) -> None:
    now = _FORMER[former]
    assert now not in _FORMER or now == former
    assert importlib.util.find_spec(now) is not None
    assert current_name(f"{former}:Name") == f"{now}:Name"
    assert current_name(f"{former}.Name") == f"{now}.Name"
    assert current_name(f"{now}:Name") == f"{now}:Name"


@pytest.mark.parametrize("text", ["", "exact_match", "a: b", "FILE.jsonl", "http://a:1/b.c"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert current_name(text) == text


def test_a_function_is_found_by_the_former_path_of_its_module() -> None:
    found = resolve("reward", "distill." + "maths:math_equal", ())
    assert found is resolve("reward", "distill.rewards.math_equal:math_equal", ())
