"""What the slow tier says of files that fail once, twice, or have no time."""

from __future__ import annotations

import pytest

from tests import slow_tier


def played(
    monkeypatch: pytest.MonkeyPatch, codes: dict[str, list[int | None]], limit_s: str
) -> tuple[int, list[str]]:
    """The exit code, and the files in the order they ran in; each answers its codes in turn."""
    ran: list[str] = []

    def run(file: str, limit_s: float) -> int | None:
        ran.append(file)
        return codes[file].pop(0)

    monkeypatch.setattr(slow_tier, "slow_files", lambda: sorted(codes))
    monkeypatch.setattr(slow_tier, "rotated", lambda files, commit: list(files))
    monkeypatch.setattr(slow_tier, "run", run)
    return slow_tier.main([limit_s]), ran


def test_a_file_that_passes_at_its_second_try_is_named_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = played(monkeypatch, {"a": [1, 0], "b": [0]}, "60")
    assert (code, ran) == (0, ["a", "a", "b"])
    assert "unsteady: ['a']; failed: none" in capsys.readouterr().out


def test_a_file_that_fails_twice_fails_the_tier(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = played(monkeypatch, {"a": [0], "b": [1, 2]}, "60")
    assert (code, ran) == (1, ["a", "b", "b"])
    assert "failed: ['b']" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = played(monkeypatch, {"a": [0], "b": [0]}, "0")
    assert (code, ran) == (0, [])
    assert "left out for lack of time: ['a', 'b']" in capsys.readouterr().out
