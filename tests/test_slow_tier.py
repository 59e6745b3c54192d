"""Result of the slow tier for files that fail once or twice."""

import pytest

from tests import slow_tier


@pytest.mark.parametrize(
    ("results", "code", "printed"),
    [
        ({"a": [False, True], "b": [True]}, 0, "unsteady: ['a']; failed: none"),
        ({"a": [True], "b": [False, False]}, 1, "unsteady: none; failed: ['b']"),
    ],
)
def test_a_file_fails_the_tier_if_it_fails_twice(
    results: dict[str, list[bool]],
    code: int,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(slow_tier, "slow_files", lambda: sorted(results))
    monkeypatch.setattr(slow_tier, "passes", lambda file: results[file].pop(0))
    assert slow_tier.main([]) == code
    assert printed in capsys.readouterr().out
    assert not any(results.values()), "each was asked as often as expected"
