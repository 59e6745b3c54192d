"""User code is tried before a run: a failure is reported with its place, and nothing starts."""

import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from actors.rollout import tryout
from cluster.command import parse
from cluster.config import user_code
from cluster.config.opd import OpdConfig
from cluster.config.rollout_checks import check_rollout
from cluster.config.user_code import try_own_objective, try_user_code
from cluster.train import main
from distill.errors import ConfigError
from distill.settings import changed
from tests.conftest import TinyPair
from tests.e2e.harness import opd_arguments
from tests.refusals import refuses
from tests.rows import write_rows
from tests.waiting import until

NewOpd = Callable[..., OpdConfig]

CODE = """
    import os, subprocess, sys, time
    from functools import partial

    import chz

    from distill.envs.chat import MessageEnv, MessageStep
    from distill.envs.chat_config import ChatEnvConfig, MessageProblem


    def fine(response, answer):
        return float(response == answer)

    def of_right_answers_alone(response, answer):
        return 1.0 / (response == answer)

    def on_one(response, answer):
        ROWS.append(answer)
        return float({"0": "no number"}.get(answer, 1))

    ROWS = []

    def exits(response, answer):
        os._exit(7)

    def prints_and_exits(response, answer):
        print("the disk is on fire", flush=True)
        sys.exit(4)

    def hangs(response, answer):
        while True:
            time.sleep(1)

    def leaves_a_process(response, answer):
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.path.join(os.path.dirname(__file__), "left"), "a") as file:
            file.write(f"{left.pid} ")
        return 1.0


    class Words(MessageEnv):
        def __init__(self, breaks):
            self.breaks = breaks

        def initial_messages(self):
            return [{"role": "user", "content": "Say it."}]

        async def step(self, message):
            if self.breaks == "hangs":
                time.sleep(60)
            if self.breaks == "step":
                return MessageStep(reward=1.0, messages=message["missing"])
            return MessageStep(reward=1.0)


    async def compares(messages_G):
        raise TypeError("cannot compare")


    @chz.chz
    class Own(ChatEnvConfig):
        reads_prompts = judges = False
        breaks: str = "nothing"

        def problems(self, path, setting):
            compare = compares if self.breaks == "group" else None
            made = MessageProblem(make=partial(Words, self.breaks), compare=compare)
            return [made] * 40
"""


OBJECTIVES = """
    def by_length(rewards_P):
        return [group.lengths_G - group.lengths_G.mean() for group in rewards_P]

    def of_two(logprobs_N, old_N):
        return logprobs_N

    def wrong(logprobs_N, old_N, advantages_N):
        return -logprobs_N * advantages_N.mean()
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = f"users_{tmp_path.name.replace('-', '_')}"
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(CODE) + textwrap.dedent(OBJECTIVES))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return path


def trial(config: OpdConfig) -> list[str]:
    lines: list[str] = []
    try_user_code(config, check_rollout(config), lines.append)
    return lines


def test_a_custom_objective_is_tried_on_made_up_numbers(opd: NewOpd, code: Path) -> None:
    fine = opd(reward_coef=1.0, baseline=f"{code.stem}:by_length")
    try_own_objective(fine, pytest.fail)
    with refuses(ConfigError, "loss"):
        try_own_objective(opd(loss=f"{code.stem}:of_two", smoke_test=False), pytest.fail)
    wrong = opd(loss=f"{code.stem}:wrong")
    with pytest.raises(ConfigError):
        try_own_objective(wrong, pytest.fail)
    try_own_objective(changed(wrong, smoke_test=False), pytest.fail)


def own(opd: NewOpd, code: Path, breaks: str, *more: str) -> OpdConfig:
    """A run in the environment of `code`."""
    given = [
        f"teacher={opd().teacher.model}", f"student={opd().model.path}", "temperature=0.7", "out=x",
    ]  # fmt: skip
    env = ["max_new_tokens=8", f"env={code.stem}:Own", f"env.breaks={breaks}"]
    config = parse(OpdConfig, [*given, *env, *more])
    assert config is not None
    return config


def line_of(code: Path, text: str) -> int:
    return 1 + next(i for i, line in enumerate(code.read_text().splitlines()) if text in line)


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        ("of_right_answers_alone", r"raised ZeroDivisionError: .*\({code}:{line}\).*response ''"),
        ("exits", r"exit code 7"),
        ("prints_and_exits", r"raised SystemExit: 4 \({code}:{line}\)"),
    ],
)
def test_a_reward_that_fails_is_named_with_file_line_and_problem(
    opd: NewOpd, code: Path, function: str, pattern: str
) -> None:
    line = line_of(code, f"def {function}") + (2 if function == "prints_and_exits" else 1)
    config = opd(reward=f"{code.stem}:{function}")
    with refuses(ConfigError, "rollout.smoke_test") as raised:
        trial(config)
    message = str(raised.value)
    assert re.search(pattern.format(code=re.escape(str(code)), line=line), message), message
    assert re.search(r"problem \d+ of env=SingleTurn", message)


def test_a_row_at_fault_is_reported_and_the_code_is_accepted(
    opd: NewOpd, code: Path, tmp_path: Path
) -> None:
    prompts, apart = tmp_path / "prompts.jsonl", tmp_path / "apart.jsonl"
    answers = ["0", "1", "2"]
    write_rows(prompts, *({"prompt": a, "answer": a} for a in answers))
    write_rows(apart, {"prompt": "1", "answer": "1"})
    lines = []
    for seed in range(2):
        config = opd(
            reward=f"{code.stem}:on_one", prompts=str(prompts), eval_source=str(apart), seed=seed
        )
        lines += trial(config)
    assert lines and all("problem 1 of" in line for line in lines)


def test_code_that_hangs_is_ended(opd: NewOpd, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        trial(opd(reward=f"{code.stem}:hangs", reward_timeout_s=0.1))
    monkeypatch.setattr(user_code, "START_S", 2.0)
    with pytest.raises(ConfigError):
        trial(own(opd, code, "hangs", "reward_timeout_s=0.1"))


def test_processes_left_by_a_reward_are_killed(opd: NewOpd, code: Path, tmp_path: Path) -> None:
    assert trial(opd(reward=f"{code.stem}:leaves_a_process")) == []
    left = {int(pid) for pid in (tmp_path / "left").read_text().split()}
    until(lambda: left.isdisjoint(process.pid for process in psutil.process_iter()))


@pytest.mark.parametrize(
    ("breaks", "pattern"),
    [
        ("nothing", None),
        ("step", r"KeyError: 'missing' \({code}:{line}\)"),
        ("group", r"TypeError: cannot compare \({code}:{line}\)"),
    ],
)
def test_an_environment_is_played(
    opd: NewOpd, code: Path, breaks: str, pattern: str | None
) -> None:
    config = own(opd, code, breaks)
    if pattern is None:
        assert trial(config) == []
        return
    line = line_of(code, {"step": 'message["missing"]', "group": "cannot compare"}[breaks])
    with pytest.raises(ConfigError) as raised:
        trial(config)
    assert re.search(pattern.format(code=re.escape(str(code)), line=line), str(raised.value))


def test_built_in_code_is_not_tried(opd: NewOpd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tryout.subprocess, "Popen", pytest.fail)
    assert trial(opd(reward="last_number")) == [] and trial(opd()) == []
    assert trial(opd(reward="tests.e2e.rewards:broken", smoke_test=False)) == []


def test_the_command_refuses_it_with_code_2_and_starts_nothing(
    tiny_pair: TinyPair, tmp_path: Path, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = opd_arguments(tiny_pair, tmp_path / "out", reward=f"{code.stem}:exits")
    assert main(["recipe=opd", *arguments]) == 2
    assert "exit code 7" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "out")
