"""The demo's display: curves keep their shape, and a log gets a line every ten seconds."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from cluster.demos.display import StageDisplay, spark


def test_a_spark_is_means_of_its_values_from_zero_to_the_largest() -> None:
    assert spark([8, 6, 4, 2, 0], width=16) == "█▆▅▃▁"
    assert spark([9, 7, 4, 4, 1, 1], width=3) == "█▅▂"
    assert spark([0, 0], width=4) == "▁▁"


def test_a_log_gets_a_line_in_ten_seconds_with_all_stages_that_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    stages = StageDisplay(Console(file=out, width=200))
    with stages.shown():
        stages.add("teacher", "learns", 10, "train/loss", "loss")
        stages.add("student", "learns", 20, "train/loss", "loss")
        for second in range(1, 21):
            clock[0] = 100.0 + second
            stages.see("teacher", [{"step": min(second, 10), "train/loss": 0.5}])
            stages.see("student", [{"step": second, "train/loss": 0.25}])
    first, second = out.getvalue().splitlines()
    assert "student step 9/20" in first and "0:00:12 left" in first
    assert "student step 19/20" in second and "teacher" not in second
