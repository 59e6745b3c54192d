"""`make gpu` on a CPU: its processes, results and exit code, and checks in their small form."""

import io
import json
import subprocess
import time
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import learner_checks, processes
from benchmarks.gpu.checks import CHECKS, Check
from benchmarks.gpu.child import outcome_of
from benchmarks.gpu.results import Results
from benchmarks.gpu.setting import Setting
from tests.bare_machine import bare_environment

ROOT = Path(__file__).resolve().parents[1]
PASSED = json.dumps({"status": "pass", "why": "", "numbers": {"ms": 2.5}, "seconds": 0.5})
# A process of checks that answers the first and ends, or answers none and hangs.
ENDS = f"import os, sys; os.write(int(sys.argv[1]), b'{PASSED}\\n'); os._exit(7)"
HANGS = "import time; time.sleep(600)"


def checked(tmp_path: Path, **settings: Any) -> str:
    """Text that the command prints."""
    console = Console(file=io.StringIO(), width=200)
    gpu.run_checks(gpu.GpuConfig(out=str(tmp_path), **settings), console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def small(tmp_path: Path) -> Setting:
    return Setting(device="cpu", size="tiny", scratch=str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_prints_the_questions(tmp_path: Path) -> None:
    printed = checked(tmp_path)
    assert all(check.question in printed for check in CHECKS.values())
    assert not list(tmp_path.iterdir())
    with pytest.raises(gpu.ConfigError):
        checked(tmp_path, device="cuda")
    with pytest.raises(gpu.ConfigError):
        checked(tmp_path, only="utilization")


@pytest.mark.parametrize(
    "name",
    [
        "full_divergence", "packed_attention", "profile", "weight_group", "plugin_cost",
        "digest_cost", "top_k_decode", "grouped_products",
    ],
)  # fmt: skip
def test_a_check_passes_in_its_small_form(small: Setting, name: str) -> None:
    outcome = outcome_of(name, small)
    assert (outcome["status"], outcome["why"]) == ("pass", "") and outcome["numbers"]


def test_a_check_detects_its_failure(small: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_checks, "TEMPERATURE", 1.0)  # of the plain calls alone
    outcome = outcome_of("full_divergence", small)
    assert outcome["status"] == "fail" and "and plain calls give" in outcome["why"]


def test_a_check_that_cannot_run_here_is_skipped(
    small: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = Check(part="pieces", question="?", needs=("no_such_package",))
    monkeypatch.setitem(CHECKS, "digest_cost", lacks)
    assert outcome_of("digest_cost", small)["status"] == "skipped"
    assert outcome_of("handles", small)["status"] == "skipped"  # it is for GPUs


def test_an_error_within_a_check_is_its_failure(small: Setting) -> None:
    unreadable = Setting(device="cpu", size="tiny", scratch="/dev/null")
    outcome = outcome_of("full_divergence", unreadable)
    assert outcome["status"] == "fail" and "NotADirectoryError" in outcome["why"]


def outcomes_of(
    program: str, out: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> dict[str, dict[str, Any]]:
    """Outcomes of three checks when every check process runs this program."""
    popen = processes.subprocess.Popen
    monkeypatch.setattr(
        processes.subprocess,
        "Popen",
        lambda command, **how: popen([command[0], "-c", program, *command[3:]], **how),
    )
    monkeypatch.setattr(processes, "LEAST_S", 0.1)
    setting = Setting(device="cpu", size="tiny", scratch=str(out))
    found: dict[str, dict[str, Any]] = {}
    names, end = ["plugin_cost", "digest_cost", "top_k_decode"], time.monotonic() + seconds
    processes.run_in_process(names, setting, out, end, found.__setitem__)
    return found


def test_a_check_that_ends_its_process_fails_and_the_next_has_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes_of(ENDS, tmp_path, monkeypatch, 60.0)
    assert [outcome["status"] for outcome in found.values()] == ["pass", "fail", "pass"]
    assert (
        found["plugin_cost"]["numbers"] == {"ms": 2.5} and "code 7" in found["digest_cost"]["why"]
    )


def test_a_check_that_hangs_fails_and_the_budget_ends_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes_of(HANGS, tmp_path, monkeypatch, 1.0)
    assert [outcome["status"] for outcome in found.values()] == ["fail", "skipped", "skipped"]


def test_results_are_appended_and_passed_checks_are_skipped(tmp_path: Path) -> None:
    first = Results(tmp_path, "cpu", "tiny")
    first.add("push_copy", processes.outcome("fail", "a | b", 3.0))
    first.add("push_copy", json.loads(PASSED))
    first.add("push_ipc", processes.outcome("skipped", "no SGLang", 0.0))
    again = Results(tmp_path, "cpu", "tiny")
    found = [again.status(name) for name in ("push_copy", "push_ipc", "profile")]
    assert found == ["pass", "skipped", None]
    assert "| `push_copy` | pass | ms 2.5 | 0 |" in again.table() and "a \\| b" not in again.table()
    assert Results(tmp_path, "cpu", "full").status("push_copy") is None
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3
    printed = checked(tmp_path, device="cpu", only="push_copy", resume=True)
    assert "| `push_copy` | pass |" in printed


def test_a_failed_check_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LEAST_S", 1e9)
    assert "`push_copy` | skipped" in checked(tmp_path, device="cpu", only="push_copy")
    failed = processes.outcome("fail", "off by 3", 1.0)
    monkeypatch.setattr(gpu, "run_in_process", lambda names, *rest: rest[-1](names[0], failed))
    with pytest.raises(gpu.ChecksFailed):
        checked(tmp_path, device="cpu", only="push_copy")


def test_every_check_is_in_the_docs() -> None:
    lines = (ROOT / "docs/gpu.md").read_text().splitlines()
    listed = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert listed == list(CHECKS)


@pytest.mark.slow
def test_the_kit_runs_on_a_machine_with_torch_and_transformers_alone(tmp_path: Path) -> None:
    packages, bare = tmp_path / "packages", tmp_path / "bare"
    packages.mkdir()
    venv.create(bare, symlinks=True)  # whose processes' own processes see no more than they do
    environment = bare_environment(packages)
    environment |= {"PYTHON": str(bare / "bin" / "python"), "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [ROOT / "benchmarks/gpu/kit.sh", "device=cpu", "size=tiny"],
        env=environment, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "out/results.jsonl").read_text().splitlines()
    found = {line["check"]: line["status"] for line in map(json.loads, lines)}
    for_gpus = {name for name, check in CHECKS.items() if check.cuda and not check.needs}
    skipped = {name for name, status in found.items() if status != "pass"}
    assert skipped == for_gpus | {"push_ipc"}
    assert set(found) >= {name for name, check in CHECKS.items() if not check.needs}
