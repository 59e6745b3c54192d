"""Warm-up by an endpoint that returns only text, in whole runs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.inspect.audit import audit
from cluster.store.kept_groups import KeptGroups
from distill.types import TrajectoryGroup
from tests.actors.text_server import API_KEY, MODEL, Says, TextServer, running_text_server
from tests.conftest import TinyPair
from tests.e2e.harness import (
    distil,
    finish,
    metrics,
    opd_arguments,
    run,
    start,
    trained_groups,
    wait_until,
)
from tests.rows import write_rows

pytestmark = pytest.mark.e2e


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextServer]:
    monkeypatch.setenv("ISOTHERM_ENDPOINT_API_KEY", API_KEY)
    with running_text_server() as server:
        server.script = answered
        yield server


def answered(body: dict[str, Any]) -> Says:
    """The sum; truncated for a first number of 3, and far too long for 2."""
    a, b = map(int, re.findall(r"\d+", body["messages"][-1]["content"]))
    return [Says(f" {a + b}!"), Says(f" {a + b}!"), Says("ab" * 99), Says("yes", "length")][a]


EXPECTED = {0: r" \d!<eos>", 1: r" \d!<eos>", 2: "abababab", 3: "ye"}


def opd(pair: TinyPair, out: Path, server: TextServer, **settings: Any) -> list[dict[str, float]]:
    given = {
        "steps": 5, "prompts_per_step": 8, "eval_size": 0, "checkpoint_every": 100,
        "max_staleness": 0, "keep": "all", "sft_steps": 3, "samples_from": f"{MODEL}@{server.url}",
    }  # fmt: skip
    return distil(pair, out, **given | settings)


def expect_written(pair: TinyPair, group: TrajectoryGroup, end: str = "<eos>") -> None:
    """Assert that the group's tokens are those of the text and end where it did."""
    tokenizer = AutoTokenizer.from_pretrained(pair.student)
    for member in group.trajectories_G:
        [segment] = member.segments
        [(start, stop)] = segment.action_spans
        prompt, text = (
            tokenizer.decode(part)
            for part in (segment.tokens_T[:start], segment.tokens_T[start:stop])
        )
        expected = EXPECTED[int(prompt[0])].replace("<eos>", end)
        assert re.fullmatch(expected, text), (prompt, text)
        assert member.stop_reason.value == ("eos" if text.endswith(end) else "length")
        assert segment.teacher_logprobs_T is None


def test_a_warm_up_from_text_precedes_scoring_by_the_teacher(
    tiny_pair: TinyPair, tmp_path: Path, server: TextServer
) -> None:
    out = tmp_path / "run"
    server.failures = [Says("early"), 503, Says(""), 429]
    steps = opd(tiny_pair, out, server)
    assert [step.get("teacher_samples/share", 0) for step in steps] == [1, 1, 1, 0, 0]
    learnt = [step["teacher_samples/nll"] for step in steps[:3]]
    assert learnt[2] < 0.8 * learnt[0], "what it wrote is not learnt"
    assert not any("teacher_samples/forward_kl" in step for step in steps), "nobody knows log q"
    assert [("opd/reverse_kl" in step) for step in steps] == [False] * 3 + [True] * 2
    kept = [each.group for each in KeptGroups(out / "groups")]
    assert [(g.by_teacher, g.as_text) for g in kept] == [(g.group_id < 24,) * 2 for g in kept]
    for group in kept[:24]:
        expect_written(tiny_pair, group)
    assert len(server.chats) == 1 + 24 * 2 + 3, "one to see that it answers, and what failed"
    assert all(body["temperature"] == 0.7 for body in server.chats)
    assert audit(out / "ledger.jsonl", steps=5).problems == []
    proven = json.loads((out / "certificate.json").read_text())
    assert not proven["proven"] and proven["groups"]["unwatched"] == 24
    assert any(MODEL in limit and server.url in limit for limit in proven["limits"])
    for path in out.rglob("*"):
        assert not path.is_file() or API_KEY.encode() not in path.read_bytes(), path


def test_one_teacher_writes_and_another_samples_with_the_run_s_stop_tokens(
    tiny_pair: TinyPair, tmp_path: Path, server: TextServer
) -> None:
    rows = [{"prompt": f"{a} + {b} =", "teacher": name} for a in range(4) for b, name in NAMED]
    prompts = write_rows(tmp_path / "prompts.jsonl", *rows)
    teachers = {
        "words": {"model": tiny_pair.teacher, "samples_from": f"{MODEL}@{server.url}"},
        "tokens": {"model": tiny_pair.teacher},
    }
    out = tmp_path / "run"
    steps = opd(
        tiny_pair, out, server, teacher=None, teachers=teachers, samples_from=None,
        prompts=prompts, sft_steps=0, sample_share=0.5, steps=3,
        stop_tokens="z",
    )  # fmt: skip
    kept = [each.group for each in KeptGroups(out / "groups")]
    assert {(g.teacher, g.by_teacher, g.as_text) for g in kept} == {
        ("words", True, True), ("words", False, False),
        ("tokens", True, False), ("tokens", False, False),
    }  # fmt: skip
    for group in kept:
        if group.as_text:
            expect_written(tiny_pair, group, end="z")
    assert all(step["teacher_samples/share"] == 0.5 for step in steps)
    assert audit(out / "ledger.jsonl", steps=3).problems == []


NAMED = [(1, "words"), (2, "tokens"), (3, "words")]


def test_a_self_teaching_student_is_warmed_up_by_another_model(
    tiny_pair: TinyPair, tmp_path: Path, server: TextServer
) -> None:
    rows = [
        {"prompt": f"{a} + {b} =", "teacher_prompt": f"({a}{b}) {a} + {b} ="}
        for a in range(4)
        for b in range(3)
    ]
    prompts = write_rows(tmp_path / "prompts.jsonl", *rows)
    server.script = lambda body: Says("yes")
    steps = opd(
        tiny_pair, tmp_path / "run", server, teacher="policy", estimator="auto", sft_steps=2,
        steps=4, prompts=prompts,
    )  # fmt: skip
    assert [step.get("teacher_samples/share", 0) for step in steps] == [1, 1, 0, 0]
    assert all(step["opd/divergence"] > 0 for step in steps[2:])
    seen = {body["messages"][0]["content"] for body in server.chats}
    assert seen <= {row["teacher_prompt"] for row in rows}, "it is shown the hint"


@pytest.mark.slow
def test_a_warm_up_on_ray_survives_an_absent_endpoint(
    tiny_pair: TinyPair, tmp_path: Path, server: TextServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    given = {
        "sft_steps": 4, "samples_from": f"{MODEL}@{server.url}", "steps": 6,
        "rollout_workers": 2, "eval_size": 0,
    }  # fmt: skip
    arguments = opd_arguments(tiny_pair, out, **given)
    with monkeypatch.context() as other:
        other.setenv("ISOTHERM_ENDPOINT_API_KEY", "another-key")
        output = run("cluster.train", "recipe=opd", *arguments, code=2)
    assert not out.exists(), output
    assert "another-key" not in output and API_KEY not in output

    process = start("cluster.train", "recipe=opd", *arguments)
    wait_until(lambda: len(server.chats) > 4, process)
    server.script = lambda body: 503
    asked = len(server.chats)
    wait_until(lambda: len(server.chats) > asked + 40, process)
    server.script = answered
    finish(process)
    assert trained_groups(out) == list(range(6 * 4))
    assert [line.get("teacher_samples/share", 0) for line in metrics(out)] == [1, 1, 1, 1, 0, 0]
    assert audit(out / "ledger.jsonl", steps=6).problems == []
