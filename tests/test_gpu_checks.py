"""`make gpu` on a CPU: its report and its exit code, and the checks whose small form is quick."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.gpu import __main__ as gpu
from tests.gpu import learner_checks
from tests.gpu.checks import Check
from tests.gpu.child import outcome_of
from tests.gpu.setting import Failed, Setting


def checked(tmp_path: Path, **settings: object) -> tuple[dict, str]:
    """The report, and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    gpu.run_checks(gpu.GpuConfig(out=str(tmp_path), **settings), console)
    return json.loads((tmp_path / "gpu.json").read_text()), console.file.getvalue()  # pyright: ignore


@pytest.fixture
def small(tmp_path: Path) -> Setting:
    return Setting(device="cpu", size="tiny", scratch=str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_it_would_do(tmp_path: Path) -> None:
    report, printed = checked(tmp_path)
    assert {check["status"] for check in report["checks"].values()} == {"skipped"}
    assert set(report["checks"]) == set(gpu.CHECKS) and report["machine"]["gpus"] == []
    assert all(check.what in printed for check in gpu.CHECKS.values())
    with pytest.raises(gpu.ConfigError, match="device=cuda and torch sees no GPU"):
        checked(tmp_path, device="cuda")
    with pytest.raises(gpu.ConfigError, match="utilization"):
        checked(tmp_path, only="utilization")


@pytest.mark.parametrize(
    "name", ["full_divergence", "bfloat16_step", "long_attention", "packed_attention"]
)
def test_a_check_passes_in_its_small_form(small: Setting, name: str) -> None:
    outcome = outcome_of(name, small)
    assert (outcome["status"], outcome["why"]) == ("pass", "") and outcome["numbers"]


def test_a_check_sees_what_it_is_there_for(small: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_checks, "TEMPERATURE", 1.0)  # of the plain calls alone
    outcome = outcome_of("full_divergence", small)
    assert outcome["status"] == "fail" and "and plain calls give" in outcome["why"]


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "error, status, why",
    [
        (Failed("off by 3"), "fail", "off by 3"),
        (RuntimeError("CUDA error"), "fail", "RuntimeError: CUDA error"),
    ],
)
def test_what_a_check_raises_is_its_outcome(
    small: Setting, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str, why: str
) -> None:
    monkeypatch.setitem(gpu.CHECKS, "push", Check(lambda _: _raise(error)))  # pyright: ignore
    outcome = outcome_of("push", small)
    assert (outcome["status"], outcome["why"]) == (status, why)


@pytest.mark.parametrize(
    "program, budget_s, why",
    [
        ("import os; print('{}'); os._exit(7)", 600.0, "it ended with code 7"),
        ("print('no outcome')", 600.0, "it ended with code 0"),
        ("import time; time.sleep(600)", 2.0, "not done after"),
    ],
)
def test_a_child_without_an_outcome_has_failed_and_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, budget_s: float, why: str
) -> None:
    popen = gpu.subprocess.Popen
    monkeypatch.setattr(
        gpu.subprocess, "Popen", lambda command, **how: popen([command[0], "-c", program], **how)
    )
    monkeypatch.setattr(gpu, "_LEAST_S", 0.5)
    with pytest.raises(gpu.ChecksFailed, match="failed: push"):
        checked(tmp_path, device="cpu", only="push", budget_s=budget_s)
    report = json.loads((tmp_path / "gpu.json").read_text())
    [outcome] = report["checks"].values()
    assert outcome["status"] == "fail" and why in outcome["why"]


def test_the_budget_ends_the_rest(tmp_path: Path) -> None:
    report, _ = checked(tmp_path, device="cpu", only="push,utilisation", budget_s=1.0)
    assert [check["status"] for check in report["checks"].values()] == ["skipped"] * 2
    assert "budget_s= are over" in report["checks"]["push"]["why"]
