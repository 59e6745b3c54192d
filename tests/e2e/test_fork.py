"""fork_from=: runs that begin from another run's checkpoint, in one process each."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.inspect.audit import audit
from cluster.train import main
from tests.conftest import TinyPair
from tests.e2e.harness import evaluations, metrics, opd_arguments, trained_groups
from tests.rows import write_rows

pytestmark = pytest.mark.e2e


def of(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / name).read_text())


def fork_arguments(pair: TinyPair, out: Path, **changes: object) -> list[str]:
    settings = {"steps": 2, "local": True, "checkpoint_every": 1, "keep_last": 1}
    return ["recipe=opd", *opd_arguments(pair, out, **settings | changes)]


def test_a_fork_begins_with_the_weights_and_resumes_by_itself(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(fork_arguments(tiny_pair, first, lr=1e-2)) == 0
    for named in (tmp_path, f"{first}:1", f"{first}:new", f"{first}:best", second):
        assert main(fork_arguments(tiny_pair, second, fork_from=named)) == 2
        assert f"fork_from={named}" in capsys.readouterr().err and not second.exists()

    fork = {"fork_from": f"{first}:2", "lr": 1e-4, "warmup_steps": 4}
    assert main([*fork_arguments(tiny_pair, second, **fork), "dry_run=True"]) == 0
    plan = f"start     the weights of step 2 of {first}, with AdamW's moments"
    assert plan in capsys.readouterr().out and not second.exists()
    assert main(fork_arguments(tiny_pair, second, **fork)) == 0, capsys.readouterr()
    # the engines have the weights before the first step
    before, after = of(second, "summary.json")["eval before"], of(first, "summary.json")
    # to what batches of other company round
    assert before["eval/reverse_kl"] == pytest.approx(after["eval after"]["eval/reverse_kl"], 1e-6)
    steps = metrics(second)
    assert [step["step"] for step in steps] == [1, 2] and trained_groups(second) == list(range(8))
    assert [step["train/lr"] for step in steps] == pytest.approx([2.5e-5, 5e-5])
    origin = of(second, "summary.json")["forked_from"]
    assert origin == of(second, "config.json")["forked_from"]
    assert origin["run"] == str(first) and (origin["step"], origin["moments"]) == (2, True)
    assert origin["run_id"] == of(first, "config.json")["run_id"]
    assert not audit(second / "ledger.jsonl").problems

    shutil.rmtree(first)  # the fork has copies
    assert main([*fork_arguments(tiny_pair, second, **fork), "fork_from=None"]) == 2
    assert f"fork_from was '{first}:2' there and is None now" in capsys.readouterr().err
    assert main(fork_arguments(tiny_pair, second, **fork | {"steps": 3})) == 0
    assert trained_groups(second) == list(range(12))
    assert of(second, "summary.json")["forked_from"] == origin
    assert [line["step"] for line in evaluations(second)][:2] == [0, 0]


def test_a_fork_that_dies_before_its_first_checkpoint_starts_again(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(fork_arguments(tiny_pair, first, lr=1e-2, eval_size=0)) == 0
    keep = {"eval_size": 0, "keep_last": 3}
    arguments = fork_arguments(tiny_pair, second, fork_from=first, **keep)
    with monkeypatch.context() as patch:
        patch.setattr("cluster.run.Run.one_step", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(arguments)
    start = AutoModelForCausalLM.from_pretrained(second / "checkpoints/step-000000/model")
    trained = AutoModelForCausalLM.from_pretrained(first / "final")
    assert all(map(torch.equal, start.parameters(), trained.parameters()))
    shutil.rmtree(first)
    assert main(arguments) == 0
    assert trained_groups(second) == list(range(8)) and not audit(second / "ledger.jsonl").problems


@pytest.mark.slow
def test_an_adapter_of_sft_is_forked_into_opd_and_sft(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(6)]
    data = write_rows(tmp_path / "data.jsonl", *rows)
    first, longer, second = (tmp_path / name for name in ("sft", "sft2", "opd"))
    sft = [
        "recipe=sft", f"model={tiny_pair.student}", f"data={data}", "steps=2", "batch_size=2",
        "lora_rank=4", "lr=3e-3", "local=True",
    ]  # fmt: skip
    assert main([*sft, f"out={first}"]) == 0
    assert main([*sft, f"out={longer}", f"fork_from={first}", "batch_size=3"]) == 0
    assert of(longer, "summary.json")["forked_from"]["moments"] is True
    assert metrics(longer)[0]["train/loss"] < metrics(first)[0]["train/loss"]
    assert main(fork_arguments(tiny_pair, second, fork_from=first, lora_rank=8)) == 2
    assert "lora.rank" in capsys.readouterr().err
    assert main(fork_arguments(tiny_pair, second, fork_from=first, lora_rank=4)) == 0
    assert of(second, "summary.json")["forked_from"]["moments"] is False
    begun = AutoModelForCausalLM.from_pretrained(first / "final")
    student = AutoModelForCausalLM.from_pretrained(tiny_pair.student)
    ended = AutoModelForCausalLM.from_pretrained(second / "final")
    name = "model.layers.0.self_attn.q_proj.weight"
    moved = (begun.get_parameter(name) - student.get_parameter(name)).abs().max()
    assert (ended.get_parameter(name) - begun.get_parameter(name)).abs().max() > 0
    assert (ended.get_parameter(name) - student.get_parameter(name)).abs().max() > moved / 4


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_several_workers_fork_a_run_of_one(tiny_pair: TinyPair, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(fork_arguments(tiny_pair, first, lr=1e-2)) == 0
    fork = {"fork_from": first, "learner_workers": 2, "local": False}
    assert main(fork_arguments(tiny_pair, second, **fork)) == 0
    before, after = of(second, "summary.json")["eval before"], of(first, "summary.json")
    assert before["eval/reverse_kl"] == pytest.approx(after["eval after"]["eval/reverse_kl"])
    assert all(step["push/probe_gap"] < 1e-4 for step in metrics(second)[1:])
