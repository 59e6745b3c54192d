"""Learners of several Ray actors: trained, killed, and resumed with another number of them."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cluster.inspect.audit import audit
from cluster.train import main
from learner.config import LoraSettings
from learner.lora import adapter_tensors, add_lora, save_adapter
from tests.conftest import TinyPair
from tests.e2e.broken_worker import BREAKS, BROKEN
from tests.e2e.harness import (
    distil,
    events,
    finish,
    metrics,
    opd_arguments,
    process_of,
    run,
    start,
    train,
    trained_groups,
    wait_until,
)
from tests.e2e.objectives import FAILS_ON_A_WORKER, FAILURE, POLICY_GRADIENT
from tests.families import family_dir
from tests.rows import write_rows
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.e2e


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 12)[None]).logits


def opd(pair: TinyPair, out: Path, **changes: Any) -> list[dict[str, float]]:
    """Synchronous, on Ray."""
    return distil(pair, out, **{"steps": 3, "max_staleness": 0, "local": False} | changes)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_an_adapter_on_two_replicas_resumes_with_one_worker(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """The handshake and the probe of every push check the engines' merged weights."""
    base = AutoModelForCausalLM.from_pretrained(tiny_pair.student, dtype=torch.float32)
    before = logits(base)
    torch.manual_seed(0)
    adapter = add_lora(base, LoraSettings(rank=4))
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.05)
    save_adapter(tmp_path / "adapter", adapter, adapter_tensors(adapter))
    begun = logits(adapter)
    assert (begun - before).abs().max() > 1e-2

    lora = {"lora_adapter": str(tmp_path / "adapter"), "reference_kl_coef": 0.1, "lr": 3e-4}
    out = tmp_path / "run"
    replicas = {"learner_workers": 4, "learner_replicas": 2}
    opd(tiny_pair, out, **replicas, **lora)
    steps = opd(tiny_pair, out, steps=5, **lora)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert trained_groups(out) == list(range(20))
    assert all(abs(step["reference/kl"]) > 1e-4 for step in steps)  # the reference is the base
    assert all(step["push/probe_gap"] < 1e-4 for step in steps[1:])
    final = logits(AutoModelForCausalLM.from_pretrained(out / "final"))
    assert 1e-3 < (final - begun).abs().max() < (final - before).abs().max()
    base = AutoModelForCausalLM.from_pretrained(tiny_pair.student, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(out / "adapter"))
    torch.testing.assert_close(logits(adapted), final, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_share_of_scores_trains_alike_on_two_workers_of_a_mixture(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """Long answers, too: groups without an engine's scores train alike on every worker."""
    mixtures = {
        "student": family_dir(tmp_path / "student", "qwen3_moe"),
        "teacher": family_dir(tmp_path / "teacher", "qwen3_moe", seed=2),
    }
    learnt = {}
    # A custom loss reads the engine's scores of all groups. Advantages are 0, so it adds nothing.
    for scored, loss in (("some", "importance_sampling"), ("all", POLICY_GRADIENT)):
        out = tmp_path / scored
        given = {"estimator": "full", "loss": loss, "prompts_per_step": 12, "learner_workers": 2}
        given |= {"smoke_test": False}
        given |= {"max_new_tokens": 48, **mixtures}
        steps = opd(tiny_pair, out, **given)
        assert all(step["opd/reverse_kl"] > 0 and step["opd/divergence"] > 0 for step in steps)
        assert audit(out / "ledger.jsonl").problems == []
        learnt[scored] = AutoModelForCausalLM.from_pretrained(out / "final").state_dict()
    for name, tensor in learnt["all"].items():
        torch.testing.assert_close(tensor, learnt["some"][name], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_preferences_on_two_workers_with_the_base_as_reference(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    pairs = [{"prompt": f"q{i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(6)]
    data = write_rows(tmp_path / "pairs.jsonl", *pairs)
    shared = {"model": tiny_pair.student, "data": data, "batch_size": 6, "lr": 1e-2}
    made = []
    for workers in (1, 2):
        out = tmp_path / f"of {workers}"
        settings = {"learner_workers": workers, "local": workers == 1}
        made.append(train("dpo", out, **shared, steps=3, lora_rank=4, seed=1, **settings))
    alone, together = made
    assert alone[0]["train/loss"] == pytest.approx(together[0]["train/loss"], rel=1e-5)
    for steps in made:
        assert steps[0]["dpo/margin"] == pytest.approx(0, abs=1e-5)
        assert steps[-1]["dpo/margin"] > 1e-3


@pytest.mark.slow
def test_a_dead_worker_resets_all_to_the_checkpoint(tiny_pair: TinyPair, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = opd_arguments(tiny_pair, out, steps=20, eval_size=1, learner_workers=2, keep=4)
    process = start("cluster.train", "recipe=opd", *arguments)
    wait_until(lambda: len(metrics(out)) >= 5, process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process_of("learner worker 1", out), signal.SIGKILL)
    output = finish(process)
    assert "learner worker 1" in output, output
    assert [event["who"] for event in events(out, "restart")] == ["learner"]
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert not alive
    assert [step["step"] for step in metrics(out)] == list(range(1, 21))
    assert trained_groups(out) == list(range(80))
    assert audit(out / "ledger.jsonl").problems == []
    output = run("cluster.replay", f"out={out}", "step=20")
    assert "step 20 agrees" in " ".join(output.split()), output


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_worker_resets_the_workers_that_wait_for_it(
    rank: int, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed worker's process lives, so no collective of the leader fails.

    The leader must not wait for it until `cluster.no_progress_s`, which exceeds the harness's own
    deadline.
    """
    out, failure = tmp_path / "run", tmp_path / "failure"
    monkeypatch.setenv(FAILURE, str(failure))
    arguments = opd_arguments(
        tiny_pair, out, steps=12, eval_size=1, learner_workers=2, loss=FAILS_ON_A_WORKER
    )
    process = start("cluster.train", "recipe=opd", *arguments)
    wait_until(lambda: len(metrics(out)) >= 3, process)
    whole = failure.with_name("whole")
    whole.write_text(str(rank))
    whole.rename(failure)
    output = finish(process)
    assert not failure.exists(), output
    assert [event["who"] for event in events(out, "restart")] == ["learner"]
    [death] = events(out, "death")
    assert f"worker {rank} has a broken disk" in death["why"]
    assert [step["step"] for step in metrics(out)] == list(range(1, 13))


@pytest.mark.slow
def test_any_failed_call_of_the_learner_resumes_from_the_checkpoint(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores, a push, a canary, and the copy for a checkpoint."""
    out, broken = tmp_path / "run", tmp_path / "broken"
    broken.mkdir()
    monkeypatch.setenv(BROKEN, str(broken))
    calls = ["logprobs", "first_non_finite", "canary", "copy_moments"]
    (broken / calls[0]).touch()
    arguments = opd_arguments(
        tiny_pair, out, steps=40, eval_size=1, estimator="full", loss=BREAKS, verify_every=3
    )
    process = start("cluster.train", "recipe=opd", *arguments)
    for i, call in enumerate(calls[1:], 1):
        wait_until(
            lambda i=i: len(events(out, "restart")) == i and len(metrics(out)) >= 4 * i, process
        )
        (broken / call).touch()
    finish(process)
    assert [event["who"] for event in events(out, "restart")] == ["learner"] * len(calls)
    for call, death in zip(calls, events(out, "death"), strict=True):
        assert f"{call} has a broken disk" in death["why"]
    assert [step["step"] for step in metrics(out)] == list(range(1, 41))
    assert trained_groups(out) == list(range(160))
    assert audit(out / "ledger.jsonl").problems == []


@pytest.mark.slow
def test_a_supervised_run_survives_a_learner_failure(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """The final weights are the same with and without the failure."""
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(30)]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    made = []
    for name in ("struck", "whole"):
        out = tmp_path / name
        arguments = [
            "recipe=sft", f"model={tiny_pair.student}", f"data={data}", f"out={out}", "steps=200",
            "batch_size=4", "checkpoint_every=20", "lr=1e-3",
        ]  # fmt: skip
        if name == "struck":
            process = start("cluster.train", *arguments)
            wait_until(lambda out=out: len(metrics(out)) >= 25, process)
            os.kill(process_of("learner", out), signal.SIGKILL)
            finish(process)
        else:
            assert main([*arguments, "local=True"]) == 0
        assert [step["step"] for step in metrics(out)] == list(range(1, 201))
        assert len(events(out, "restart")) == (name == "struck")
        made.append(logits(AutoModelForCausalLM.from_pretrained(out / "final")))
    torch.testing.assert_close(*made, atol=1e-5, rtol=1e-5)


def test_one_step_is_traced_and_pushes_have_the_engines_precision(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    changes = {"steps": 3, "trace_step": 2, "dtype": "bfloat16", "local": True}
    opd(tiny_pair, out, **changes)
    parameters = AutoModelForCausalLM.from_pretrained(tiny_pair.student).num_parameters()
    assert {step["push/bytes"] for step in metrics(out)} == {2 * parameters}
    spans = {event["name"] for event in json.loads((out / "trace.json").read_text())["traceEvents"]}
    assert {"wait", "learn", "forward", "backward", "optimizer", "push"} <= spans
    for step in metrics(out):
        parts = step["time/forward"] + step["time/backward"] + step["time/optimizer"]
        assert 0 < parts <= step["time/learn"]
