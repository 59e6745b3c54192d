"""Environments and rewards that end or block the process they run in."""

from pathlib import Path

import pytest

from cluster.inspect.audit import audit
from tests.conftest import TinyPair
from tests.e2e.harness import distil, events
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
