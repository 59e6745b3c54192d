"""The main job on real SGLang servers: training, refusals, and deaths of servers."""

import asyncio
import json
import re
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from actors.sglang import server as sglang_server
from actors.sglang.config import SglangConfig
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from cluster.calibrate import main as calibrate
from cluster.inspect.audit import audit
from cluster.train import main
from tests.conftest import TinyPair
from tests.e2e.harness import (
    distil,
    events,
    interrupt,
    metrics,
    opd_arguments,
    process_of,
    run,
    start,
    trained_groups,
    wait_until,
)
from tests.families import family_dir, undecided
from tests.rows import read_rows, write_rows
from tests.tiny import save_tokenizer, tiny_model_dir
from tests.waiting import DEADLINE_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed"),
]


@pytest.mark.usefixtures("ray_cluster")
def test_opd_on_sglang_servers_trains_on_their_log_probs(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = opd_arguments(
        tiny_pair, out, engine="sglang", steps=4, prompts_per_step=8, group_size=4, lr=1e-3,
        checkpoint_every=100,
    )  # fmt: skip
    assert main(["recipe=opd", *arguments]) == 0, capsys.readouterr()
    assert "engine    sglang" in capsys.readouterr().out
    assert trained_groups(out) == list(range(4 * 8))
    steps = metrics(out)
    assert steps[0]["train/logprob_gap"] < 1e-3, "the server's log-probs are not the learner's"
    assert all(step["opd/bias"] != 0 for step in steps), "the bias meter shows nothing at T = 0.7"
    assert max(step["staleness/max"] for step in steps) <= 1
    report = json.loads((out / "calibration.json").read_text())
    assert report["agrees"] is True
    gaps = [row["max_gap"] for row in report["comparisons"] if not row["must_differ"]]
    assert len(gaps) >= 8 and max(gaps) <= 1e-3
    temperatures = {round(row["temperature"], 6) for row in report["comparisons"]}
    assert temperatures == {0.7, 1.05}
    assert {path.name for path in (out / "logs").glob("*.log")} == {"policy-0.log", "teacher-0.log"}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mixture_is_trained_with_the_servers_routing(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    """Half-precision policy servers with one rank and two route otherwise than the float32 learner.

    Handshake and weight probe compare without replay, and would refuse such a model.
    """
    pair = replace(
        tiny_pair,
        student=family_dir(tmp_path / "student", "qwen3_moe"),
        teacher=family_dir(tmp_path / "teacher", "qwen3_moe", seed=2),
    )
    undecided(pair.student)
    out = tmp_path / "run"
    arguments = opd_arguments(
        pair, out, engine="sglang", dtype="bfloat16", learner_dtype="float32", steps=2,
        group_size=4, max_new_tokens=24, max_staleness=0, eval_size=0, handshake=False,
        policy_server_flags=f"--tp-size {ranks}", lr=1e-5, verify_every=0,
    )  # fmt: skip
    assert main(["recipe=opd", *arguments]) == 0, capsys.readouterr()
    assert "routing_replay=True" in capsys.readouterr().out, "the default for mixtures"
    first, second = metrics(out)
    assert min(first["train/routing_mismatch"], second["train/routing_mismatch"]) > 0.05
    assert first["train/logprob_gap"] < 0.5 * first["train/logprob_gap_unreplayed"]
    assert second["train/logprob_gap"] < 0.5 * first["train/logprob_gap_unreplayed"], "after a push"


@pytest.mark.slow
def test_evaluation_on_an_sglang_server(tiny_pair: TinyPair, tmp_path: Path) -> None:
    reports = {}
    for engine in ("sglang", "embedded"):
        output = run(
            "cluster.evaluate", f"model={tiny_pair.student}", f"prompts={tiny_pair.prompts}",
            "max_new_tokens=8", f"engine={engine}", "device=cpu", f"out={tmp_path / engine}",
        )  # fmt: skip
        assert f"engine: {engine}" in output
        reports[engine] = json.loads((tmp_path / engine).read_text())
    assert reports["sglang"] == reports["embedded"], "greedy answers depend on the engine"


@pytest.mark.slow
def test_calibrate_refuses_a_server_that_does_not_scale(
    tiny_pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    arguments = [
        f"student={tiny_pair.student}", f"teacher={tiny_pair.teacher}", "temperature=0.7",
        "engine=sglang", "device=cpu", f"out={tmp_path / 'c.json'}",
    ]  # fmt: skip
    assert calibrate(arguments) == 3
    printed = capsys.readouterr()
    words = " ".join((printed.out + printed.err).split())
    assert "plugin" in words and "nats" in words
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["agrees"] is False
    assert max(row["max_gap"] for row in report["comparisons"]) > 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_top_k_of_the_student_on_servers(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """One server names the tokens as it samples, the other scores them.

    In the first two steps the teacher samples itself, at its own log q_T.
    """
    steps = distil(
        tiny_pair, tmp_path / "run", local=False, engine="sglang", estimator="top_k",
        teacher_top_k=16, divergence="jsd", top_k_from="student", max_staleness=0, sft_steps=2,
    )  # fmt: skip
    assert [step.get("teacher_samples/share") for step in steps] == [1, 1, *[None] * 4]
    assert all(step["teacher_samples/forward_kl"] > 0.1 for step in steps[:2])
    for step in steps[2:]:
        # Of a partition, so between zero and the whole divergence, which is less than the KL.
        assert 0 < step["opd/divergence"] < 2 * step["opd/reverse_kl"]


# Administrative requests of one turn: the learner's step is between release and the first resume.
_SLEEP = ["pause_generation", "release_memory_occupation"]
_WAKE = [
    "resume_memory_occupation", "begin_weight_update", "update_weights_from_tensor",
    "end_weight_update", "resume_memory_occupation", "continue_generation",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_engines_sleep_while_the_learner_computes(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """With samples in flight; the order comes from the server's own log."""
    out = tmp_path / "run"
    steps = distil(
        tiny_pair, out, local=False, engine="sglang", colocate="sleep", max_staleness=1, steps=5,
        verify_every=1, eval_every=2, max_new_tokens=16,
        policy_server_flags="--log-level-http info",
    )  # fmt: skip
    assert len(steps) == 5 and trained_groups(out) == list(range(5 * 4))
    assert all(step["time/sleep"] > 0 for step in steps)
    # Whatever the weights of its time said of it: a stale sample is further off than that.
    fresh = [step for step in steps if step["staleness/max"] == 0]
    assert fresh and all(step["train/logprob_gap"] < 1e-3 for step in fresh)
    assert {step["push/proven"] for step in steps if "push/proven" in step} == {1.0}
    log = (out / "logs/policy-0.log").read_text()
    # Batches are the scheduler's own lines: what it has sampled may be answered after it is paused.
    lines = re.findall(r'"(?:POST|GET) /(\w+)[^"]*" 200|((?:Prefill|Decode) batch)', log)
    asked = [path or batch for path, batch in lines]
    turns = [path for path in asked if path in {*_SLEEP, *_WAKE}]
    first = turns.index("release_memory_occupation") - 1
    assert turns[first:] == (_SLEEP + _WAKE) * 5
    for i, path in enumerate(asked):
        if path == "release_memory_occupation":
            end = asked.index("end_weight_update", i)
            assert not any("batch" in each for each in asked[i:end]), "a sleeping server sampled"


def launcher_of(engine: str, out: Path) -> psutil.Process:
    [launcher] = [
        child
        for child in psutil.Process(process_of(engine, out)).children(recursive=True)
        if "actors.sglang.launch" in child.cmdline()
    ]
    return launcher


def output_after_death(engine: str, out: Path, process: subprocess.Popen[str]) -> str:
    """Kill an engine's server; end the run three steps later and return its output."""
    launcher_of(engine, out).kill()
    wait_until(lambda: bool(events(out, "restart")), process)
    again = len(metrics(out))
    wait_until(lambda: len(metrics(out)) >= again + 3, process)
    return interrupt(process)


@pytest.mark.slow
@pytest.mark.parametrize("pushed", [{}, {"weights": "adapter", "lora.rank": 4}])
def test_a_dead_policy_server_is_restarted(
    tiny_pair: TinyPair, tmp_path: Path, pushed: dict[str, object]
) -> None:
    """The new server serves only current weights, after its own handshake."""
    out = tmp_path / "run"
    arguments = opd_arguments(
        tiny_pair, out, engine="sglang", checkpoint_every=2, max_staleness=0, **pushed
    )
    process = start("cluster.train", "recipe=opd", *arguments, "steps=5000")
    wait_until(lambda: len(metrics(out)) >= 3, process)
    before = len(metrics(out))
    output = output_after_death("policy engine 0", out, process)
    assert "policy engine 0 died" in output and "its handshake agrees to" in output
    steps = metrics(out)
    assert len(steps) > before
    # Nothing is stale, so whatever was sampled, before or after, came from the present weights.
    assert all(step["train/logprob_gap"] < 1e-3 for step in steps)
    assert trained_groups(out) == list(range(len(steps) * 4))
    assert audit(out / "ledger.jsonl").problems == []


def sleeps(out: Path, role: str, index: int = 0) -> bool:
    """True if the last request of the server's log released its memory."""
    log = (out / f"logs/{role.replace(' ', '-')}-{index}.log").read_text()
    asked = re.findall(r'"POST /(\w+)[^"]*" 200', log)
    turns = [path for path in asked if path in {"release_memory_occupation", _WAKE[-1]}]
    return turns[-1:] == ["release_memory_occupation"]


@pytest.mark.slow
@pytest.mark.parametrize("gpus, dies", [("shared", "teacher a"), ("policy", "policy")])
def test_engines_take_turns_and_recover_from_a_death_while_asleep(
    tiny_pair: TinyPair, tmp_path: Path, gpus: str, dies: str
) -> None:
    """Real servers verify their weights at each wake-up."""
    second = tiny_model_dir(tmp_path, seed=7)
    save_tokenizer(second)
    rows = read_rows(tiny_pair.prompts)
    named = [row | {"teacher": "ab"[i % 2]} for i, row in enumerate(rows)]
    prompts = write_rows(tmp_path / "prompts.jsonl", *named)
    out, log = tmp_path / "run", "--log-level-http info"
    arguments = opd_arguments(
        replace(tiny_pair, prompts=prompts), out, engine="sglang", max_staleness=0,
        checkpoint_every=2, steps=5000, verify_every=2,
        **{
            "teachers.a.model": tiny_pair.teacher, "teachers.b.model": second,
            "teacher.gpus": gpus, "teacher.server_flags": log, "policy.server_flags": log,
        },
    )  # fmt: skip
    arguments = [each for each in arguments if not each.startswith("teacher=")]
    process = start("cluster.train", "recipe=opd", *arguments)
    wait_until(lambda: len(metrics(out)) >= 3, process)
    wait_until(lambda: sleeps(out, dies), process)
    output = output_after_death(f"{dies} engine 0", out, process)
    assert f"{dies} engine 0 died" in output and "has moved" not in output
    assert [event["who"] for event in events(out, "death")] == [f"{dies} engine 0"]
    steps = metrics(out)
    assert trained_groups(out) == list(range(len(steps) * 4))
    assert all(step["opd/reverse_kl"] > 0.1 for step in steps)
    assert all(step["train/logprob_gap"] < 1e-3 for step in steps), "an awakening's weights"
    assert {step["push/proven"] for step in steps if "push/proven" in step} == {1.0}
    assert sum(step["turns/changes"] for step in steps) > len(steps)
    assert all(0 <= step["turns/proof"] <= step["turns/seconds"] for step in steps)
    assert audit(out / "ledger.jsonl").problems == []


def has_turn(pid: int, out: Path, index: int) -> bool:
    """True if the process holds the lock of this set of GPUs in the kernel's list of locks."""
    turn = str(out / f"logs/gpus-{index}.turn")
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if str(file.readlink()) == turn:
                locks = Path(f"/proc/{pid}/fdinfo/{file.name}").read_text()
                if re.search(r"^lock:.* WRITE .* 0 0$", locks, re.MULTILINE):
                    return True
    return False


def killed_in_its_turn(who: str, out: Path, index: int, process: subprocess.Popen[str]) -> None:
    """Kill an actor that has the turn on a set of GPUs; return three steps later."""
    victim = psutil.Process(process_of(who, out))

    def stopped() -> bool:
        if has_turn(victim.pid, out, index):
            victim.suspend()
            if has_turn(victim.pid, out, index):
                return True
            victim.resume()
        return False

    wait_until(stopped, process)
    if "learner" in who:
        assert all(sleeps(out, role, index) for role in ("policy", "teacher"))
    restarts = len(events(out, "restart"))
    victim.kill()
    wait_until(lambda: len(events(out, "restart")) > restarts, process)
    again = metrics(out)[-1]["step"]
    wait_until(lambda: metrics(out)[-1]["step"] >= again + 3, process)


@pytest.mark.slow
def test_learner_policy_and_teacher_take_turns_and_survive_deaths(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """Two learner workers; each shares its GPU with a policy and a teacher server."""
    out, log = tmp_path / "run", "--log-level-http info"
    arguments = opd_arguments(
        tiny_pair, out, engine="sglang", colocate="sleep", max_staleness=1,
        checkpoint_every=2, steps=5000, verify_every=2,
        **{
            "teacher.gpus": "policy", "learner.workers": 2, "policy.engines": 2,
            "teacher.engines": 2, "teacher.server_flags": log, "policy.server_flags": log,
        },
    )  # fmt: skip
    process = start("cluster.train", "recipe=opd", *arguments)
    wait_until(lambda: len(metrics(out)) >= 3, process)
    engines = ["policy engine 1", "teacher engine 1"]
    for who in ["learner worker 1", *engines]:
        killed_in_its_turn(who, out, 1, process)
    output = interrupt(process)
    first, *others = [event["who"] for event in events(out, "death")]
    # The worker's heartbeat and the leader's call both find it.
    assert first in ("learner", "learner worker 1") and others == engines, output
    assert "learner worker 1 died" in output and "has moved" not in output
    steps = metrics(out)
    assert trained_groups(out) == list(range(len(steps) * 4))
    assert all(step["time/sleep"] > 0 and step["opd/reverse_kl"] > 0.1 for step in steps)
    fresh = [step for step in steps if step["staleness/max"] == 0]
    assert fresh and all(step["train/logprob_gap"] < 1e-3 for step in fresh)
    assert {step["push/proven"] for step in steps if "push/proven" in step} == {1.0}
    assert audit(out / "ledger.jsonl").problems == []


class ExternalTeacher:
    """Server that the run does not own; its replacement has the same port and keys."""

    def __init__(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model, self._monkeypatch = model, monkeypatch
        with sglang_server.claim_port("127.0.0.1") as claim:
            address = claim.getsockname()

        def claim_again(_host: str) -> socket.socket:
            again = socket.socket()
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(address)
            return again

        monkeypatch.setattr(sglang_server, "claim_port", claim_again)
        keys = cycle([secrets.token_urlsafe(), secrets.token_urlsafe()])
        made = SimpleNamespace(
            token_urlsafe=lambda _length: next(keys), token_bytes=secrets.token_bytes
        )
        monkeypatch.setattr(sglang_server, "secrets", made)
        self._engine: HostedSglangEngine | None = None

    def start(self) -> str:
        config = SglangConfig(model=self._model, device="cpu", start_deadline_s=DEADLINE_S)
        engine = HostedSglangEngine(config)
        self._engine = engine

        async def ready() -> None:
            await engine.info()
            await engine._client.close()

        asyncio.run(ready())
        self._monkeypatch.setenv("ISOTHERM_TEACHER_API_KEY", engine.server.api_key)
        return engine.server.url

    def stop(self) -> None:
        if self._engine is not None and self._engine.server is not None:
            self._engine.server.stop()
        self._engine = None


@pytest.fixture
def external_teacher(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ExternalTeacher]:
    teacher = ExternalTeacher(tiny_pair.teacher, monkeypatch)
    yield teacher
    teacher.stop()


@pytest.mark.slow
def test_an_external_teacher_goes_away_and_comes_back(
    tiny_pair: TinyPair,
    tmp_path: Path,
    external_teacher: ExternalTeacher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "run"
    url = external_teacher.start()
    arguments = opd_arguments(tiny_pair, out, teacher=url, sft_steps=2)

    with monkeypatch.context() as other:
        other.setenv("ISOTHERM_TEACHER_API_KEY", "another")
        output = run("cluster.train", "recipe=opd", *arguments, code=2)
    assert "refused the key" in output and not out.exists()

    process = start("cluster.train", "recipe=opd", *arguments, "steps=5000")
    wait_until(lambda: len(metrics(out)) >= 3, process)
    external_teacher.stop()
    wait_until(lambda: bool(events(out, "death")), process)
    assert "cannot be reached" in events(out, "death")[0]["why"]
    external_teacher.start()
    wait_until(lambda: bool(events(out, "restart")), process)
    done = len(metrics(out))
    wait_until(lambda: len(metrics(out)) >= done + 3, process)
    output = interrupt(process)
    assert "teacher engine 0 serves again" in output, output
    lines = metrics(out)
    assert trained_groups(out) == list(range(len(lines) * 4))
    assert audit(out / "ledger.jsonl").problems == []
    assert lines[0]["teacher_samples/forward_kl"] > 0.1, "it did not sample the warm-up"


@pytest.mark.slow
def test_a_rehearsal_asks_a_teacher_elsewhere_one_canary(
    tiny_pair: TinyPair, tmp_path: Path, external_teacher: ExternalTeacher
) -> None:
    url = external_teacher.start()
    arguments = opd_arguments(tiny_pair, tmp_path / "run", teacher=url, dry_run="rehearse")
    run("cluster.train", "recipe=opd", *arguments)
    report = json.loads((tmp_path / "run-rehearsal" / "rehearsal.json").read_text())
    found = {each["what"]: each for each in report["outcomes"]}
    assert found["teacher, external"]["works"]
    assert "isotherm's plugin in the server" in found["teacher, external"]["detail"]
    assert found["twin of teacher"]["works"]
