"""teacher=policy: scores are compared with those of the weights that the teacher should have."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.sglang.installed import sglang_installed
from cluster.inspect.audit import audit
from cluster.store.kept_groups import KeptGroups
from distill.types import Segment
from tests.conftest import TinyPair
from tests.e2e.harness import (
    distil,
    finish,
    metrics,
    opd_arguments,
    process_of,
    start,
    trained_groups,
    wait_until,
)
from tests.families import family_dir
from tests.rows import read_rows, write_rows

pytestmark = pytest.mark.e2e

T = 0.7
Weights = dict[str, torch.Tensor]


def opd(pair: TinyPair, out: Path, **settings: object) -> list[dict[str, float]]:
    """Synchronous run in this process that keeps all that it trained on."""
    given = {
        "teacher": "policy", "temperature": T, "steps": 12, "prompts_per_step": 8, "group_size": 4,
        "lr": 1e-3, "checkpoint_every": 100, "max_staleness": 0, "keep": "all",
    }  # fmt: skip
    return distil(pair, out, **given | settings)


def hinted(path: Path) -> str:
    return write_rows(
        path, *({"prompt": f"{a} + 1 =", "teacher_prompt": f"{a + 1}! {a} + 1 ="} for a in range(9))
    )


def weights(directory: str | Path) -> Weights:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def distribution(model: torch.nn.Module, before: list[int], sampled: list[int]) -> torch.Tensor:
    """log-probs (N, V) at T of the positions at which the tokens were sampled."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([before + sampled])).logits[0] / T
    return logits_TV.log_softmax(-1)[len(before) - 1 : -1]


def expect_scored(model: torch.nn.Module, context: list[int], segment: Segment) -> None:
    """Assert that the segment's teacher log-probs are the model's with the teacher's context."""
    sampled = segment.tokens_T[segment.first_action :].tolist()
    log_q_NV = distribution(model, context, sampled)
    expected = log_q_NV.gather(1, torch.tensor(sampled)[:, None]).flatten().tolist()
    assert segment.teacher_logprobs_T is not None
    assert segment.teacher_logprobs_T[segment.first_action :] == pytest.approx(expected, abs=2e-3)


def expect_followed(pair: TinyPair, out: Path, rule: Mapping[str, float]) -> set[int]:
    """Assert which weights scored the first group of each step of `hinted` prompts.

    Returns the teacher's versions, whose weights come from the checkpoints of the run.
    """
    tokenizer, versions = AutoTokenizer.from_pretrained(pair.student), versions_of(pair, out)
    found = set()
    kept = KeptGroups(out / "groups")
    for first, *_ in map(kept.of_step, kept.steps):
        model = AutoModelForCausalLM.from_pretrained(pair.student)
        [segment] = first.group.trajectories_G[0].segments
        version = segment.teacher_version
        assert version is not None and version <= first.version
        found.add(version)
        model.load_state_dict(at_version(versions, version, rule))
        expect_scored(model, teacher_context(tokenizer, segment), segment)
    return found


def expect_diverged(pair: TinyPair, out: Path, rule: Mapping[str, float]) -> None:
    """Assert that each step's divergence is that of all groups it trained on (kept with keep=all).

    It is between the weights at the step's begin and those of its teacher at that time.
    """
    tokenizer, versions = AutoTokenizer.from_pretrained(pair.student), versions_of(pair, out)
    student, teacher = (AutoModelForCausalLM.from_pretrained(pair.student) for _ in range(2))
    kept = KeptGroups(out / "groups")
    for version, step in enumerate(metrics(out)):
        student.load_state_dict(versions[version])
        teacher.load_state_dict(at_version(versions, version, rule))
        kls = []
        for each in kept.of_step(version + 1):
            for segment in each.group.segments():
                tokens, start = segment.tokens_T.tolist(), segment.first_action
                log_p_NV = distribution(student, tokens[:start], tokens[start:])
                log_q_NV = distribution(
                    teacher, teacher_context(tokenizer, segment), tokens[start:]
                )
                kls += (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1).tolist()
        assert len(kls) == step["train/tokens"]
        assert step["opd/divergence"] == pytest.approx(sum(kls) / len(kls), rel=2e-3, abs=1e-5)


def versions_of(pair: TinyPair, out: Path) -> list[Weights]:
    """Weights of each version of a run that has kept all its checkpoints."""
    steps = len(list((out / "checkpoints").glob("step-*")))
    checkpoints = [out / f"checkpoints/step-{step:06d}/model" for step in range(1, steps + 1)]
    return list(map(weights, [pair.student, *checkpoints]))


def at_version(versions: list[Weights], version: int, rule: Mapping[str, float]) -> Weights:
    """Weights of the teacher when the student has had the versions up to that one."""
    if "teacher_ema" in rule:
        return averaged(versions[: version + 1], rule["teacher_ema"])
    return versions[version - version % int(rule.get("teacher_lag", 1))]


def teacher_context(tokenizer: Any, segment: Segment) -> list[int]:
    """Context of the teacher before the response of a segment of `hinted` prompts."""
    prompt = tokenizer.decode(segment.tokens_T[: segment.first_action])
    return tokenizer.encode(f"{int(prompt.split()[0]) + 1}! {prompt}")


def averaged(versions: list[Weights], ema: float) -> Weights:
    """Average written out, from the first weights on."""
    newest = len(versions) - 1
    mixed = {name: ema**newest * values for name, values in versions[0].items()}
    for i in range(1, newest + 1):
        for name, values in versions[i].items():
            mixed[name] = mixed[name] + (1 - ema) * ema ** (newest - i) * values
    return mixed


def expect_no_canaries(out: Path) -> None:
    events = {line["event"] for line in read_rows(out / "ledger.jsonl")}
    assert not events & {"scorer", "ask", "canary"}, "a teacher that moves was canaried"
    found = [e for e in read_rows(out / "events.jsonl") if e["event"] == "finding"]
    assert not [each for each in found if each["name"] == "scorer_moved"]
    certificate = json.loads((out / "certificate.json").read_text())
    assert not certificate["proven"] and "teacher=policy" in certificate["verdict"]


def test_a_policy_teaches_itself_with_the_result_of_each_answer(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """The live policy scores its samples, with the answer and the result in its context."""
    out, text = tmp_path / "run", "{answer}{outcome}{prompt}"
    rows = ({"prompt": f"{a} + 1 =", "answer": "e"} for a in range(9))
    steps = opd(
        tiny_pair, out, prompts=write_rows(tmp_path / "prompts.jsonl", *rows), reward="contains",
        teacher_feedback=text,
    )  # fmt: skip
    kls = [step["opd/reverse_kl"] for step in steps]
    assert kls[0] > 0.1, "what it was told changed nothing"
    assert sum(kls[-4:]) < 0.8 * sum(kls[:4])
    assert all(step["opd/teacher_age"] == 0 for step in steps), "an older policy scored"
    assert all(step["opd/unhinted_segments"] == 0 for step in steps)
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.student)
    student = AutoModelForCausalLM.from_pretrained(tiny_pair.student)
    kept = KeptGroups(out / "groups")
    for trajectory in kept[0].group.trajectories_G:
        [segment] = trajectory.segments
        prompt = tokenizer.decode(segment.tokens_T[: segment.first_action])
        outcome = "right" if trajectory.reward >= 1 else "wrong"
        expect_scored(student, tokenizer.encode(f"e{outcome}{prompt}"), segment)
    versions = {segment.teacher_version for each in kept for segment in each.group.segments()}
    assert versions == set(range(12))
    expect_no_canaries(out)


def test_hint_bonus_of_right_answers(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """Each token of a right answer earns log q - log mu, by the kept rollouts."""
    out = tmp_path / "run"
    rows = ({"prompt": f"{a} + 1 =", "answer": "(?s).*[a-m].*"} for a in range(9))
    steps = opd(
        tiny_pair, out, prompts=write_rows(tmp_path / "prompts.jsonl", *rows), reward="matches",
        teacher_feedback="{answer}!{prompt}", kl_coef=0.0, hint_bonus_coef=0.1, group_size=8,
        keep="all", steps=3, estimator="auto",
    )  # fmt: skip
    right = wrong = 0
    for kept in KeptGroups(out / "groups"):
        for trajectory, advantages_T in zip(
            kept.group.trajectories_G, kept.advantages_S, strict=True
        ):
            [segment] = trajectory.segments
            won = trajectory.reward >= 1
            right, wrong = right + won, wrong + (not won)
            assert segment.teacher_logprobs_T is not None
            gaps_T = segment.teacher_logprobs_T - segment.behaviour_logprobs_T
            np.testing.assert_allclose(
                advantages_T, 0.1 * gaps_T * won * segment.action_mask_T, rtol=1e-3, atol=2e-4
            )
    assert right and wrong and all(step["train/grad_norm"] > 0 for step in steps)


@pytest.mark.parametrize("rule", [{"teacher_lag": 3}, {"teacher_ema": 0.8}], ids=["lag", "ema"])
def test_a_teacher_follows_the_policy_across_a_resume(
    tiny_pair: TinyPair, tmp_path: Path, rule: dict[str, Any]
) -> None:
    out = tmp_path / "run"
    settings: dict[str, Any] = {
        "prompts": hinted(tmp_path / "prompts.jsonl"), "checkpoint_every": 1, "verify_every": 1,
        "keep_last": 8, "lr": 3e-3,
    }  # fmt: skip
    opd(tiny_pair, out, **settings, **rule, steps=5)
    steps = opd(tiny_pair, out, **settings, **rule, steps=7)
    lags = "teacher_lag" in rule
    assert [s["opd/teacher_age"] for s in steps] == ([0, 1, 2, 0, 1, 2, 0] if lags else [0] * 7)
    handed = [step for step in range(1, 8) if not lags or step % 3 == 0]
    assert [s["step"] for s in steps if "push/teacher_seconds" in s] == handed
    proven = [s["push/teacher_proven"] for s in steps if "push/teacher_proven" in s]
    assert proven and set(proven) == {1.0}, "not all is proven by checksums"
    assert expect_followed(tiny_pair, out, rule) == ({0, 3, 6} if lags else set(range(7)))
    calibration = json.loads((out / "calibration.json").read_text())
    against = {each["party"]: each["reference"] for each in calibration["comparisons"]}
    assert against["the learner's copy of teacher engine 0"] == "teacher engine 0 prefill"
    expect_no_canaries(out)


@pytest.mark.parametrize(
    "rule",
    [
        {"teacher_ema": 0.8},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"teacher_lag": 2}, marks=pytest.mark.slow),
    ],
    ids=["ema", "live", "lag"],
)
def test_a_mixture_teaches_itself(tmp_path: Path, rule: dict[str, Any]) -> None:
    """Experts are pushed, averaged and routed; each answer is routed as its engine did."""
    pair = TinyPair(student=family_dir(tmp_path, "qwen3_moe"), teacher="", prompts="")
    out = tmp_path / "run"
    steps = opd(
        pair, out, prompts=hinted(tmp_path / "prompts.jsonl"), checkpoint_every=1, steps=4,
        keep_last=8, keep="all", verify_every=1,
        estimator="auto", prompts_per_step=4, router_aux_coef=0.01, **rule,
    )  # fmt: skip
    assert all(step["train/routing_mismatch"] < 0.01 for step in steps), "not replayed, or wrong"
    assert all(step["train/router_aux"] > 1 for step in steps)
    expect_followed(pair, out, rule)
    expect_diverged(pair, out, rule)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [{"teacher_lag": 3}, {"teacher_ema": 0.8}], ids=["lag", "ema"])
def test_a_teacher_that_follows_the_policy_survives_deaths_on_ray(
    tiny_pair: TinyPair, tmp_path: Path, rule: dict[str, Any]
) -> None:
    """The engine dies and gets the teacher's weights again; the learner resumes with them."""
    out = tmp_path / "run"
    arguments = opd_arguments(
        tiny_pair, out, teacher="policy", prompts=hinted(tmp_path / "prompts.jsonl"), steps=14,
        checkpoint_every=1, keep_last=20, keep="all", verify_every=1, **rule,
    )  # fmt: skip
    process = start("cluster.train", "recipe=opd", *arguments)
    for step, victim in ((2, "teacher engine 0"), (6, "learner")):
        wait_until(lambda step=step: len(metrics(out)) >= step, process)
        os.kill(process_of(victim, out), signal.SIGKILL)
    finish(process)
    assert trained_groups(out) == list(range(14 * 4))
    assert audit(out / "ledger.jsonl", steps=14).problems == []
    assert len(expect_followed(tiny_pair, out, rule)) > 3
    expect_no_canaries(out)


@pytest.mark.slow
@pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed")
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("rule", [{}, {"teacher_ema": 0.8}], ids=["live", "ema"])
def test_a_policy_teaches_itself_on_sglang_servers(
    tiny_pair: TinyPair, tmp_path: Path, rule: dict[str, Any]
) -> None:
    """With estimator=full the servers score as well, and the learner has the distribution."""
    out = tmp_path / "run"
    distil(
        tiny_pair, out, local=False, engine="sglang", teacher="policy", max_staleness=0, steps=4,
        prompts=hinted(tmp_path / "prompts.jsonl"), checkpoint_every=1, keep_last=8,
        keep="all", verify_every=1, estimator="full", **rule,
    )  # fmt: skip
    followed = {"teacher_lag": 1} | rule  # the live one is at each version what the student is
    assert expect_followed(tiny_pair, out, followed) == {0, 1, 2, 3}
    expect_diverged(tiny_pair, out, followed)
    logs = {path.name for path in (out / "logs").glob("*.log")}
    assert logs == {"policy-0.log", *(["teacher-0.log"] if rule else [])}
    expect_no_canaries(out)
