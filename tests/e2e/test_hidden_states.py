"""`teacher.head=`: a served teacher's distributions from its hidden states and its head."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.sglang.installed import sglang_installed
from actors.sglang.server import SglangServer
from cluster.queue.journal import read_journal
from cluster.train import main
from distill.models.loading import load_causal_lm
from tests.conftest import TinyPair
from tests.e2e.harness import (
    distil,
    events,
    finish,
    metrics,
    opd_arguments,
    process_of,
    run,
    start,
    trained_groups,
    wait_until,
)
from tests.rows import read_rows, write_rows
from tests.tiny import save_tokenizer, tiny_model_dir
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.e2e
needs_sglang = pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed")

STEPS = 20
SETTINGS: dict[str, object] = {
    "estimator": "full", "steps": STEPS, "lr": 1e-3, "max_staleness": 0, "eval_size": 0,
    "checkpoint_every": 100,
}  # fmt: skip


def kls(steps: list[dict[str, float]]) -> list[float]:
    return [step["opd/divergence"] for step in steps]


def arrived(out: Path) -> int:
    """Number of deliveries so far."""
    return sum(event["event"] == "put" for event in read_journal(out / "ledger.jsonl"))


@pytest.fixture(scope="module")
def by_copy(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """KL of each step, with a whole copy of the teacher in the learner."""
    out = tmp_path_factory.mktemp("by_copy") / "run"
    return kls(distil(tiny_pair, out, **SETTINGS))


@pytest.mark.usefixtures("ray_cluster")
def test_the_head_alone_gives_the_divergences_of_the_whole_teacher(
    tiny_pair: TinyPair, tmp_path: Path, by_copy: list[float]
) -> None:
    """Two learner workers fetch the states of their own rows."""
    out = tmp_path / "run"
    settings = SETTINGS | {"learner_workers": 2, "teacher.head": tiny_pair.teacher}
    assert by_copy[-1] < 0.6 * by_copy[0]
    found = kls(distil(tiny_pair, out, local=False, **settings))
    assert found == pytest.approx(by_copy, rel=1e-3)
    assert trained_groups(out) == list(range(STEPS * 4))
    report = json.loads((out / "calibration.json").read_text())
    assert "teacher engine 0 without the learner's head" in {
        row["party"] for row in report["comparisons"]
    }
    certificate = json.loads((out / "certificate.json").read_text())
    assert report["agrees"] and "copy of teacher" in json.dumps(certificate)


def test_two_teachers_of_different_hidden_sizes(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """Each row has the states of its own teacher; a whole copy of one is for comparison."""
    small = tiny_model_dir(tmp_path, seed=7, hidden_size=32)
    save_tokenizer(small)
    rows = read_rows(tiny_pair.prompts)
    named = [row | {"teacher": ("small", "large")[i % 2]} for i, row in enumerate(rows)]
    prompts = write_rows(tmp_path / "prompts.jsonl", *named)
    made = {}
    for heads in ((), ("small",), ("small", "large")):
        models = {"small": small, "large": tiny_pair.teacher}
        settings: dict[str, Any] = {f"teachers.{name}.model": path for name, path in models.items()}
        settings |= {f"teachers.{name}.head": models[name] for name in heads}
        out = tmp_path / f"run-{len(heads)}"
        arguments = opd_arguments(
            replace(tiny_pair, prompts=prompts), out, local=True, **SETTINGS | {"steps": 4}
        )
        arguments = [each for each in arguments if not each.startswith("teacher=")]
        assert main(["recipe=opd", *arguments, *(f"{n}={v}" for n, v in settings.items())]) == 0
        made[heads] = kls(metrics(out))
    whole, one, both = made.values()
    assert one == pytest.approx(whole, rel=1e-3) and both == pytest.approx(whole, rel=1e-3)


def test_a_head_that_differs_from_the_served_teacher_is_refused(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head is, for example, that of the checkpoint before quantisation."""
    model = load_causal_lm(tiny_pair.teacher, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        head: Any = model.get_output_embeddings()
        head_VH = head.weight
        step_V1 = head_VH.abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
        head_VH.copy_((head_VH / step_V1).round() * step_V1)
    served = tmp_path / "served"
    shutil.copytree(tiny_pair.teacher, served)
    model.save_pretrained(served)
    arguments = opd_arguments(
        tiny_pair, tmp_path / "run", local=True, **SETTINGS | {"teacher": str(served)},
        **{"teacher.head": tiny_pair.teacher},
    )  # fmt: skip
    assert main(["recipe=opd", *arguments]) == 3
    [error] = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert f"teacher.head={tiny_pair.teacher}" in error


@pytest.mark.slow
def test_rows_are_rescored_after_the_death_of_a_teacher_with_their_states(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = {"max_staleness": 4, "groups_in_flight": 16, "prompts_per_step": 4}
    arguments = opd_arguments(
        tiny_pair, out, **SETTINGS | settings, **{"teacher.head": tiny_pair.teacher}
    )
    process = start("cluster.train", "recipe=opd", *arguments)
    wait_until(lambda: len(metrics(out)) >= 3, process)
    learner = process_of("learner", out)
    os.kill(learner, signal.SIGSTOP)  # groups arrive meanwhile, and none is fetched
    before = arrived(out)
    wait_until(lambda: arrived(out) >= before + 4, process)
    os.kill(process_of("teacher engine 0", out), signal.SIGKILL)

    def starts() -> list[str]:
        return [event["who"] for event in events(out, "start")]

    wait_until(lambda: starts().count("teacher engine 0") == 2, process)  # Ray knows by then
    os.kill(learner, signal.SIGCONT)
    finish(process)
    assert trained_groups(out) == list(range(STEPS * 4))
    journal = list(read_journal(out / "ledger.jsonl"))
    lost = [i for event in journal if event["event"] == "lost" for i in event["ids"]]
    assert lost, "nothing was lost: nothing is tested"
    attempts = {event["id"]: event["attempt"] for event in journal if event["event"] == "put"}
    assert all(attempts[group_id] > 1 for group_id in lost)


@pytest.fixture
def stock(tiny_pair: TinyPair, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a stock SGLang server of the teacher, without isotherm's plugin."""
    flags = (
        f"--model-path {tiny_pair.teacher} --device cpu --dtype float32 --attention-backend "
        "torch_native --sampling-backend pytorch --grammar-backend none --max-total-tokens 16384 "
        f"--max-running-requests 64 --context-length 128 --skip-server-warmup {request.param}"
    )
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "none"}
    server = SglangServer(
        flags.split(), environment=environment, log_path=tmp_path / "server.log",
        start_deadline_s=DEADLINE_S,
    )  # fmt: skip
    try:
        asyncio.run(server.ready())
        os.environ["ISOTHERM_TEACHER_API_KEY"] = server.api_key
        yield server.url
    finally:
        os.environ.pop("ISOTHERM_TEACHER_API_KEY", None)
        server.stop()


@pytest.mark.slow
@needs_sglang
@pytest.mark.parametrize(
    "stock",
    ["--enable-return-hidden-states", "--enable-return-hidden-states --chunked-prefill-size 48"],
    ids=["", "rows of one chunk each"],
    indirect=True,
)
def test_a_stock_server_teaches_at_any_temperature(
    tiny_pair: TinyPair, tmp_path: Path, by_copy: list[float], stock: str
) -> None:
    out = tmp_path / "run"
    arguments = opd_arguments(
        tiny_pair, out, **SETTINGS | {"teacher": stock}, **{"teacher.head": tiny_pair.teacher}
    )
    run("cluster.train", "recipe=opd", *arguments)
    assert kls(metrics(out)) == pytest.approx(by_copy, rel=1e-3)
    report = json.loads((out / "calibration.json").read_text())
    assert report["agrees"] and {round(row["temperature"], 6) for row in report["comparisons"]} == {
        0.7,
        1.05,
    }


@pytest.mark.slow
@needs_sglang
@pytest.mark.parametrize(
    ("stock", "remedy"),
    [
        ("", "--enable-return-hidden-states"),
        ("--enable-return-hidden-states --chunked-prefill-size 8", "--chunked-prefill-size -1"),
    ],
    ids=["no flag", "short chunks"],
    indirect=["stock"],
)
def test_servers_without_states_of_whole_rows_are_refused(
    tiny_pair: TinyPair, tmp_path: Path, stock: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = opd_arguments(
        tiny_pair, out, **SETTINGS | {"teacher": stock}, **{"teacher.head": tiny_pair.teacher}
    )
    assert main(["recipe=opd", *arguments]) == 2
    assert remedy in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
@needs_sglang
@pytest.mark.usefixtures("ray_cluster")
def test_servers_of_the_run_return_hidden_states(
    tiny_pair: TinyPair, tmp_path: Path, by_copy: list[float]
) -> None:
    settings = SETTINGS | {"engine": "sglang", "teacher.head": tiny_pair.teacher}
    found = kls(distil(tiny_pair, tmp_path / "run", local=False, **settings))
    assert found[0] == pytest.approx(by_copy[0], rel=0.5), "servers sample otherwise"
    assert found[-1] < 0.6 * found[0]
