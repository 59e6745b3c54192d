"""Pushes of the adapter alone to real SGLang servers."""

import json
from pathlib import Path

import pytest

from actors.sglang.installed import sglang_installed
from cluster.inspect.audit import audit
from cluster.train import main
from tests.conftest import TinyPair
from tests.e2e.harness import metrics, opd_arguments, trained_groups

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed"),
]


@pytest.mark.usefixtures("ray_cluster")
def test_opd_pushes_the_adapter_alone(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two versions in flight, an evaluation engine, and a second job that resumes."""
    out = tmp_path / "run"

    def arguments(steps: int) -> list[str]:
        return opd_arguments(
            tiny_pair, out, engine="sglang", steps=steps, prompts_per_step=4, group_size=4,
            lr=3e-2, **{"lora.rank": 4}, weights="adapter", max_staleness=1, checkpoint_every=2,
            eval_engines=1, eval_every=2,
        )  # fmt: skip

    assert main(["recipe=opd", *arguments(4)]) == 0, capsys.readouterr()
    assert "weights=adapter" in capsys.readouterr().out
    assert main(["recipe=opd", *arguments(6)]) == 0, capsys.readouterr()
    assert trained_groups(out) == list(range(6 * 4))
    steps = metrics(out)
    whole = sum(file.stat().st_size for file in (out / "final").glob("*.safetensors"))
    assert all(step["push/bytes"] < whole / 2 for step in steps)
    assert max(step["staleness/max"] for step in steps) == 1, "never two versions in flight"
    on_policy = [step["train/logprob_gap"] for step in steps if step["staleness/max"] == 0]
    assert on_policy and max(on_policy) < 1e-3
    proven = [step["push/probe_gap"] for step in steps if step.get("push/void") == 0]
    assert proven and max(proven) < 1e-3
    report = json.loads((out / "calibration.json").read_text())
    assert report["agrees"] is True
    assert not audit(out / "ledger.jsonl").problems
