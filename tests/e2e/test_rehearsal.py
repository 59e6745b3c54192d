"""A complete rehearsal, and one of a run that would fail."""

import json
from pathlib import Path

import pytest

from tests.conftest import TinyPair
from tests.e2e.harness import metrics, opd_arguments, run
from tests.rows import write_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_rehearsal_with_a_death_of_every_actor(tiny_pair: TinyPair, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = opd_arguments(tiny_pair, out, recipe="opd", dry_run="rehearse")
    output = run("cluster.train", *arguments)
    assert not out.exists(), "the run itself is not begun"
    report = json.loads((tmp_path / "run-rehearsal" / "rehearsal.json").read_text())
    assert report["status"] == "works"
    found = {each["what"]: each for each in report["outcomes"]}
    died = ["rollout", "policy", "teacher", "evaluator", "queue", "learner"]
    for what in [*(f"death: {who}" for who in died), "resume", "final", "audit", "handshake"]:
        assert found[what]["works"], found[what]
    assert "WOULD BREAK" not in output and "at full size:" in output
    # The run itself begins after it.
    run("cluster.train", *opd_arguments(tiny_pair, out, recipe="opd", steps=1, local=True))


def test_a_teacher_that_lags_is_rehearsed_with_its_engines(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{a} =", "teacher_prompt": f"{a}! {a} ="} for a in range(9)]
    prompts = write_rows(tmp_path / "prompts.jsonl", *rows)
    arguments = opd_arguments(
        tiny_pair, tmp_path / "run", recipe="opd", dry_run="rehearse", teacher="policy",
        teacher_lag=50, estimator="auto", prompts=prompts,
    )  # fmt: skip
    run("cluster.train", *arguments)
    directory = tmp_path / "run-rehearsal"
    report = json.loads((directory / "rehearsal.json").read_text())
    assert report["status"] == "works"
    found = {each["what"]: each for each in report["outcomes"]}
    for what in ("death: teacher", "death: learner", "resume", "handshake", "push"):
        assert found[what]["works"], found[what]
    assert "twin of teacher" not in found and "teacher" in found["push"]["detail"]
    steps = metrics(directory / "run")
    handed = [step["step"] for step in steps if "push/teacher_seconds" in step]
    assert handed and all(step % 2 == 0 for step in handed), "it has not moved"
    lines = "\n".join(report["full_size"]["lines"])
    assert "as much to 1 teacher engine after every 50 steps" in lines
    assert "by the learner (estimator=full)" in lines


def test_a_rehearsal_of_a_failing_run_fails(tiny_pair: TinyPair, tmp_path: Path) -> None:
    arguments = opd_arguments(
        tiny_pair, tmp_path / "run", recipe="opd", dry_run="rehearse", smoke_test=False,
        reward="tests.e2e.rewards:broken",
    )  # fmt: skip
    output = run("cluster.train", *arguments, code=1)
    assert "FAILS" in output and "the rehearsal failed" in output
    report = json.loads((tmp_path / "run-rehearsal" / "rehearsal.json").read_text())
    assert report["status"] == "failed"
