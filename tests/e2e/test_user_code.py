"""Environments and rewards that end or hold up the process they run in."""

import re
from pathlib import Path

import pytest

from cluster.inspect.audit import audit
from cluster.train import main
from tests.conftest import TinyPair
from tests.e2e.harness import distil, events, opd_arguments
from tests.rows import write_rows


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_reward_that_kills_its_worker_costs_its_own_group_and_no_other(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    unanswered = write_rows(tmp_path / "eval.jsonl", {"prompt": "1 + 1 ="})
    out = tmp_path / "run"
    distil(
        tiny_pair, out, local=False, steps=5, max_staleness=1, eval_source=unanswered,
        reward="tests.e2e.rewards:kills_at_zero",
    )  # fmt: skip
    life = audit(out / "ledger.jsonl")
    assert life.problems == [] and life.trained == 20
    [reason] = life.set_aside.values()
    assert "problem 1 of env=SingleTurn" in reason
    assert "reward=tests.e2e.rewards:kills_at_zero" in reason
    assert 3 <= len(events(out, "death")) <= 5


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_reward_that_kills_the_evaluator_ends_the_run_by_its_name(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "0 + 0 =", "answer": "0"}]
    held_out = write_rows(tmp_path / "eval.jsonl", *rows)
    out = tmp_path / "run"
    arguments = opd_arguments(
        tiny_pair, out, eval_source=held_out, reward="tests.e2e.rewards:kills_at_zero"
    )
    assert main(["recipe=opd", *arguments]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and "its actor died or hung 2 times" in said
    source = f"env=SingleTurn prompts={held_out} reward=tests.e2e.rewards:kills_at_zero"
    assert re.search(rf"in the code of problems? (1, )?2(, 1)? of {source}", said)
    assert len(events(out, "death")) == 2
