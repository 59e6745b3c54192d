"""The rehearsal's parts: its settings, its deaths, and what it says of the full size."""

import asyncio
import json
import math
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.config.opd import OpdConfig
from cluster.config.rollout_checks import check_rollout
from cluster.rehearsal import strikes
from cluster.rehearsal.external_server import check_server
from cluster.rehearsal.full_size import full_size
from cluster.rehearsal.rehearse import rehearse
from cluster.rehearsal.small import STEPS_AT_MOST, small_run
from cluster.rehearsal.strikes import Strikes
from cluster.run_files import out_directory
from cluster.run_files.out_directory import claimed_directory
from cluster.runtime.driver import Signals
from distill.errors import ConfigError
from distill.settings import changed
from tests.actors.misbehaving_server import API_KEY, MisbehavingServer
from tests.refusals import refuses
from tests.rows import write_rows

Opd = Callable[..., OpdConfig]


def test_the_small_run_keeps_what_is_the_users_and_drops_what_is_the_machines(
    opd: Opd, tmp_path: Path
) -> None:
    given = opd(
        loss="ppo", prompts_per_step=64, group_size=8, max_staleness=2, policy_engines="3..6",
        colocate="share", gpus_per_actor=0.5, wandb="offline", compile=True,
        policy_server_flags="--log-level debug", learner_workers=3, teacher=None,
        teachers={
            "near": {"model": str(opd().teacher.model), "weight": 2.0},
            "far": {"model": "http://far:30000"},
        },
    )  # fmt: skip
    small = small_run(given, tmp_path / "small")
    config = small.config
    assert isinstance(config, OpdConfig)
    assert (config.objective.loss, config.sampling.temperature, config.queue.max_staleness) == (
        "ppo", 0.7, 2,
    )  # fmt: skip
    assert (config.data.source, config.seed, config.objective.kl_coef) == (
        given.data.source, given.seed, 1.0,
    )  # fmt: skip
    assert (config.data.batch_size, config.sampling.group_size, config.steps) == (
        4, 4, STEPS_AT_MOST,
    )  # fmt: skip
    assert (config.policy.engines, config.learner.workers, config.cluster.device) == (2, 2, "cpu")
    assert small.stand_ins == {"teachers.far": "http://far:30000"}
    assert config.teachers["near"].weight == 2.0
    paths = [config.model.path, *(teacher.model for teacher in config.teachers.values())]
    assert all(path.startswith(str(tmp_path / "small" / "twins")) for path in paths)
    assert {
        "cluster.colocate", "cluster.gpus_per_actor", "tracking.wandb", "learner.compile",
        "policy.server_flags",
    } == set(small.left_out)  # fmt: skip


def elsewhere(spoil: Callable[[Any], Any] = lambda answer: answer) -> MisbehavingServer:
    """A teacher that runs elsewhere, as far as an introduction and a canary look."""
    server = MisbehavingServer()
    server.introduces = {
        "/server_info": {"max_req_input_len": 65, "tokenizer_path": "a", "dtype": "float32"},
        "/v1/tokenize": {"tokens": [[1], [2]]},
    }
    server.spoil = spoil
    return server


def asked(server: MisbehavingServer, key: str, deadline_s: float = 60.0) -> tuple[bool, str]:
    """Result of a rehearsal's check of the server, from another thread than the server's."""

    async def ask() -> tuple[bool, str]:
        async with server.running():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ISOTHERM_TEACHER_API_KEY", key)
                return await asyncio.to_thread(
                    check_server,
                    server.url,
                    0.7,
                    given=0,
                    top_k=0,
                    states=False,
                    deadline_s=deadline_s,
                )

    return asyncio.run(ask())


def all_alike(logprob: float, answers: Any) -> Any:
    """The answers, each of whose log-probs is this one."""
    for answer in answers if isinstance(answers, list) else [answers]:
        for row in answer.get("meta_info", {}).get("input_token_logprobs", [])[1:]:
            row[0] = logprob
    return answers


def test_a_teacher_elsewhere_is_asked_one_canary() -> None:
    server = elsewhere()
    works, said = asked(server, API_KEY)
    assert works and "at T=0.7" in said and "vocabulary 50" in said, said
    # Of what asks for log-probs the first is the introduction, which looks for the plugin.
    introduction, *canary = server.scored
    assert introduction == [2] and len(canary[0]) == 2, "one row, at T and at 1.5 T"
    assert len(set(canary[0])) == 1 and all(length == [canary[0][0]] for length in canary[1:])


@pytest.mark.parametrize(
    ("spoil", "key", "pattern"),
    [
        (lambda answer: answer, "another", "refused the key"),
        # A stock server's: no T divides them.
        (
            partial(all_alike, -0.5),
            API_KEY,
            "not divided by T.*install isotherm where the server runs",
        ),
        (partial(all_alike, -math.log(50)), API_KEY, "weights are empty"),
        (lambda answer: "nonsense", API_KEY, "cannot score"),
    ],
)
def test_what_is_wrong_with_it_is_said_with_the_remedy(
    spoil: Callable[[Any], Any], key: str, pattern: str
) -> None:
    works, said = asked(elsewhere(spoil), key)
    assert not works and re.search(pattern, said), said


def test_nobody_there_and_one_that_hangs() -> None:
    works, said = check_server("http://127.0.0.1:9", 0.7, given=0, top_k=0, states=False)
    assert not works and "cannot be reached" in said
    server = elsewhere()
    server.failures = ["hang"]
    works, said = asked(server, API_KEY, deadline_s=0.5)
    assert not works and "did not answer within 0.5 s" in said


def test_two_rehearsals_do_not_share_a_directory(
    opd: Opd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_directory, "OTHER_JOB_S", 0.0)
    config = opd(dry_run="rehearse")
    place = Path(f"{config.out}-rehearsal")
    with claimed_directory(place, "rehearsal", print):
        (place / "twins").mkdir()
        with refuses(ConfigError, "out", names=str(place)):
            rehearse(config, Console())
        assert (place / "twins").exists()


class Stage:
    """Made-up actors, which return when they are told to."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.killed = path, []
        path.touch()
        names = ["opd-1/rollout-0", "opd-1/rollout-1", "opd-1/queue", "opd-1/teacher-math-0"]
        monkeypatch.setattr(strikes, "list_named_actors", lambda: names)
        monkeypatch.setattr(strikes.ray, "get_actor", lambda name: name)
        monkeypatch.setattr(strikes.ray, "kill", self._kill)

    def _kill(self, name: str, no_restart: bool) -> None:
        assert not no_restart, "the queue is brought back by Ray"
        self.killed.append(name)

    def back(self, who: str) -> None:
        event = {"event": "restart", "who": who, "seconds": 0.5}
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")


STEP = {"step": 1, "time/step": 0.1}


def test_one_dies_at_a_time_and_the_run_ends_when_all_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, signals = Stage(tmp_path / "events.jsonl", monkeypatch), Signals()
    stage.back("rollout worker 1")  # before its time
    made = Strikes(["rollout", "teacher math", "queue"], stage.path, signals, 1e6)
    made.line({"step": 0})  # an evaluation's line
    assert not stage.killed
    for who in ("rollout worker 0", "teacher math engine 0", "queue"):
        made.line(STEP)
        before = len(stage.killed)
        made.line(STEP)
        assert len(stage.killed) == before, "it has not returned"
        stage.back(who)
    assert stage.killed == ["opd-1/rollout-0", "opd-1/teacher-math-0", "opd-1/queue"]
    made.line(STEP)
    assert signals.received is None
    made.line(STEP)
    assert made.ended and signals.received == signal.SIGINT
    assert list(made.recoveries) == ["rollout", "teacher math", "queue"]
    assert set(made.recoveries.values()) == {0.5}


def test_who_does_not_return_in_time_and_who_never_was_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, signals = Stage(tmp_path / "events.jsonl", monkeypatch), Signals()
    made = Strikes(["evaluator", "queue", "rollout"], stage.path, signals, 1e6)
    made.line(STEP)
    assert made.recoveries == {"evaluator": None}
    made.line(STEP)
    made._deadline = 0.0
    made.line(STEP)
    assert list(made.recoveries) == ["evaluator", "queue", "rollout"]
    assert made.ended and not any(made.recoveries.values())


@pytest.mark.parametrize(
    ("settings", "shown", "part"),
    [
        ({}, 6, ", scored by the policy's engines"),
        ({"teacher_lag": 2, "estimator": "full"}, 6, "and the same number again, by the learner"),
        ({"teacher_feedback": "{prompt}{prompt}!{response}"}, 2 * 3 + 1 + 8, ""),
        ({"teacher_feedback": "{prompt}!", "teacher_ema": 0.9}, 3 + 1, ""),
    ],
    ids=str,
)
def test_what_a_teacher_scores_is_as_long_as_what_it_is_shown(
    opd: Opd, tmp_path: Path, settings: dict[str, Any], shown: int, part: str
) -> None:
    row = {"prompt": "1+1"}
    if "teacher_feedback" not in settings:
        row["teacher_prompt"] = "1+1!!!"
    prompts = write_rows(tmp_path / "rows.jsonl", row)
    config = opd(
        teacher="policy", prompts=prompts, prompts_per_step=5, group_size=2, eval_size=0,
        dry_run="rehearse", device="cpu", **settings,
    )  # fmt: skip
    [line] = [
        line for line in full_size(config, check_rollout(config), []).lines
        if line.startswith("teacher")
    ]  # fmt: skip
    tokens = 10 * (shown + 8)
    assert f"at most {tokens:,} tokens per step (10 samples of up to {shown} + 8)" in line
    assert part in line
    small = small_run(config, tmp_path / "small").config
    assert small.teacher.moves and small.teacher_rule == config.teacher_rule


def test_a_teacher_that_seldom_moves_moves_in_the_rehearsal(opd: Opd, tmp_path: Path) -> None:
    config = opd(teacher="policy", teacher_feedback="{prompt}!", teacher_lag=500)
    small = small_run(config, tmp_path / "small")
    assert isinstance(small.config, OpdConfig) and small.config.teacher.lag == 2
    assert list(small.twins) == ["student"]


def test_the_full_size_is_told_in_tokens_bytes_and_hours(opd: Opd) -> None:
    config = opd(
        dry_run="rehearse", steps=10, prompts_per_step=5, group_size=2,
        device="cpu",
    )  # fmt: skip
    inputs = check_rollout(config)
    lines = "\n".join(full_size(config, inputs, []).lines)
    assert f"{len(inputs.train)} measured" in lines and "context 128" in lines
    assert "10 samples of up to" in lines
    assert "push" in lines and "policy" in lines
    assert f"{len(inputs.held_out)} problems x 1 responses" in lines and "2 times" in lines
    assert "a checkpoint every" in lines and "reference" not in lines
    kept = changed(config, reference=config.model.path, reference_kl_coef=0.1, eval_every=3)
    lines = "\n".join(full_size(kept, inputs, []).lines)
    assert "reference at most" in lines and "5 times" in lines
    with refuses(ConfigError, "train_from"):
        opd(dry_run="rehearse", train_from="elsewhere")
