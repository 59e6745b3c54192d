"""Agents as environments: real processes that use the `openai` library."""

import asyncio
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.envs.agent import Agent, AgentResult
from actors.envs.agent_process import AgentFailed
from actors.rollout.episode import EpisodesFailed, play_group, rollout_group
from actors.rollout.evaluator import Evaluator
from distill.data.feedback import FeedbackTemplate
from distill.engine import GenerateRequest, Sample
from distill.envs.base import EnvDataset
from distill.envs.tool_use import ToolUse
from distill.errors import ConfigError, DataError
from distill.rewards.registry import last_number
from distill.sampling import EvalSampling, TrainSampling
from distill.tools.calculator import Calculator
from distill.types import StopReason, TrajectoryGroup
from tests.agents import CALCULATE
from tests.refusals import refuses
from tests.rows import write_rows
from tests.samples import TEMPERATURE
from tests.scripted import Scripted, call, chat_tokenizer, setting
from tests.waiting import until

TOKENIZER = chat_tokenizer()

SAMPLING = TrainSampling(temperature=TEMPERATURE, max_new_tokens=48)
CALL = call("calculator", {"expression": "6*7"})
ROW = {"messages": [{"role": "user", "content": "What is 6*7?"}], "answer": "42"}
# Without the `openai` library, which takes long to import.
ASKS_ONCE = """
import json, os, sys, time, urllib.request

def once(problem):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": problem["messages"]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory, from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_rows(tmp_path / "rows.jsonl", ROW)
    code = CALCULATE.replace("{SCHEMA}", repr(Calculator().schema))
    (tmp_path / "calculate.py").write_text(code)
    return tmp_path


def dataset(command: str, **settings: Any) -> EnvDataset:
    context = setting(TOKENIZER, reward=last_number, context_length=512)
    made = Agent(command=command, **settings)("rows.jsonl", context)
    return pickle.loads(pickle.dumps(made))


def rolled_out(problems: EnvDataset, policy: Scripted, group_size: int = 1) -> TrajectoryGroup:
    builder = problems.builder(0, group_size)
    return asyncio.run(rollout_group(policy, builder, SAMPLING, group_id=0, seed=0))


def turns_by(_: int, seen: str) -> str:
    return "42" if "tool" in seen.rpartition("What is")[2] else CALL


@pytest.mark.parametrize("command", ["python calculate.py", "calculate:solve"])
def test_an_agent_has_the_same_segments_as_tool_use(folder: Path, command: str) -> None:
    """Group of three: one process each, the same tokens as ToolUse, and the reward."""
    by_agent = rolled_out(dataset(command), Scripted(TOKENIZER, turns_by), 3)
    ours = ToolUse()("rows.jsonl", setting(TOKENIZER, reward=last_number, context_length=512))
    by_us = rolled_out(ours, Scripted(TOKENIZER, turns_by))
    [expected] = by_us.segments()
    assert [trajectory.reward for trajectory in by_agent.trajectories_G] == [1, 1, 1]
    for segment in by_agent.segments():
        assert segment.tokens_T.tolist() == expected.tokens_T.tolist()
        assert segment.action_mask_T.tolist() == expected.action_mask_T.tolist()
    assert by_agent.metrics["rollout/failed_episodes"] == 0
    assert by_agent.answer == "42"


def test_the_process_of_a_function_is_reused(folder: Path) -> None:
    code = f"{ASKS_ONCE}\nimport tempfile\nasync def solve(problem):\n    once(problem)\n"
    code += '    tempfile.mkdtemp()\n    return {"reward": 1, "metrics": {"pid": os.getpid()}}\n'
    (folder / "kept.py").write_text(code)
    problems = dataset("kept:solve")
    pids = set()
    for _ in range(2):
        [trajectory] = rolled_out(problems, Scripted(TOKENIZER, ["a"])).trajectories_G
        pids.add(trajectory.metrics["pid"])
    assert len(pids) == 1 and pids != {os.getpid()}


# Like a kill by the kernel while a long result is written.
CUT = """import stat
    answers = next(f for f in range(3, 99) if stat.S_ISSOCK(os.fstat(f).st_mode))
    os.write(answers, b'{"result": 1')
    os._exit(9)"""


@pytest.mark.parametrize(
    ("kind", "ending", "words"),
    [
        ("program", 'raise RuntimeError("no such luck")', "no such luck"),
        ("program", 'print("goes on"); os._exit(3)', "exit code 3"),
        ("program", 'print("thinking", file=sys.stderr); time.sleep(600)', "took longer than 1 s"),
        ("program", "pass", "printed nothing"),
        ("program", 'print("forty-two")', "forty-two"),
        ("program", 'print(json.dumps({"score": 1}))', "score"),
        ("program", 'print(json.dumps({"reward": "high"}))', "high"),
        ("program", 'print("x" * (5 << 20)); print(1)', "more than 4 MiB"),
        ("program", "bytearray(2 << 30)", "MemoryError"),
        ("function", 'raise RuntimeError("no such luck")', "no such luck"),
        ("function", "os._exit(3)", "exit code 3"),
        ("function", "time.sleep(600)", "took longer than 1 s"),
        ("function", "return object()", "TypeError"),
        ("function", 'return {"reward": 1, "feedback": chr(0xD800)}', "surrogates"),
        ("function", 'return {"reward": 1, "metrics": {"a": 10**400}}', "metrics"),
        ("function", CUT, "exit code 9"),
    ],
)
def test_the_error_of_an_agent_without_a_result_has_the_reason(
    folder: Path, kind: str, ending: str, words: str
) -> None:
    module = f"bad_{abs(hash(ending))}"
    code = f"once(json.load(sys.stdin))\n{ending}\n"
    if kind == "function":
        code = f"def solve(problem):\n    once(problem)\n    {ending}\n"
    (folder / f"{module}.py").write_text(f"{ASKS_ONCE}\n{code}")
    command = f"python {module}.py" if kind == "program" else f"{module}:solve"
    problems = dataset(command, memory_mb=1024, time_s=1 if "sleep" in ending else 60)
    with pytest.raises(DataError) as caught:
        rolled_out(problems, Scripted(TOKENIZER, ["a"]))
    assert words in str(caught.value) and "bad" in str(caught.value)


def test_failed_members_are_left_out_of_a_group_and_wrong_in_an_evaluation(folder: Path) -> None:
    code = f"{ASKS_ONCE}\nsaid = once(json.load(sys.stdin))\n"
    code += 'assert said != "crash"\nprint(1)\n'
    (folder / "frail.py").write_text(code)
    problems = dataset("python frail.py")
    group = rolled_out(problems, Scripted(TOKENIZER, ["crash", "fine", "fine", "fine"]), 4)
    assert len(group.trajectories_G) == 3
    assert group.metrics["rollout/failed_episodes"] == 0.25
    sampling = EvalSampling(temperature=0.7, max_new_tokens=48, num_samples=2)
    policy: Any = Scripted(TOKENIZER, ["crash", "fine"])
    evaluation = asyncio.run(Evaluator(problems, TOKENIZER).evaluate(policy, sampling))
    assert evaluation.metrics["eval/accuracy"] == 0.5
    assert [request.sampling.temperature for request in policy.requests] == [0.7, 0.7]


def test_an_agent_that_a_limit_ends_is_trained(folder: Path) -> None:
    (folder / "endless.py").write_text(
        f"{ASKS_ONCE}\nproblem = json.load(sys.stdin)\nwhile True: once(problem)\n"
    )
    problems = dataset("python endless.py", max_turns=2)
    [trajectory] = rolled_out(problems, Scripted(TOKENIZER, ["a", "b"])).trajectories_G
    assert trajectory.stop_reason is StopReason.TURNS and trajectory.reward == 0
    assert len(trajectory.segments) == 2


def test_failures_before_a_first_request_are_failures_like_others(folder: Path) -> None:
    """The first agent to start sends no request."""
    code = (
        'import os\ntry: os.mkdir("begun")\nexcept FileExistsError: pass\nelse: print(1); exit()\n'
    )
    code += f"{ASKS_ONCE}\nonce(json.load(sys.stdin))\nprint(1)\n"
    (folder / "shy.py").write_text(code)
    problems = dataset("python shy.py")
    group = rolled_out(problems, Scripted(TOKENIZER, ["a", "b"]), 2)
    assert len(group.trajectories_G) == 1 and group.metrics["rollout/failed_episodes"] == 0.5
    (folder / "begun").rmdir()
    sampling = EvalSampling(temperature=0.7, max_new_tokens=48, num_samples=2)
    policy: Any = Scripted(TOKENIZER, ["a", "b"])
    evaluation = asyncio.run(Evaluator(problems, TOKENIZER).evaluate(policy, sampling))
    assert evaluation.metrics["eval/accuracy"] == 0.5


def test_an_evaluation_in_which_all_agents_failed_is_an_error(folder: Path) -> None:
    (folder / "mute.py").write_text("print(1)\n")
    sampling = EvalSampling(temperature=0.7, max_new_tokens=48, num_samples=2)
    evaluator = Evaluator(dataset("python mute.py"), TOKENIZER)
    policy: Any = Scripted(TOKENIZER, ["a"])
    with pytest.raises(EpisodesFailed):
        asyncio.run(evaluator.evaluate(policy, sampling))


# Starts a process outside its group, writes both ids, and sends a request.
PARENT = f"""{ASKS_ONCE}
import subprocess, tempfile
tempfile.mkdtemp()
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open("pids.new", "w").write(f"{{child.pid}} {{os.getpid()}}")
os.rename("pids.new", "pids")
"""


def pids(folder: Path) -> list[int]:
    """Process ids of the agent and its child, once they are written."""
    until((folder / "pids").exists)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def end(processes: list[int]) -> None:
    until(lambda: not any(map(runs, processes)))


def runs(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("ends", ["answers", "is cancelled"])
async def test_an_agent_s_children_end_with_it(folder: Path, ends: str) -> None:
    ending = "print(1)" if ends == "answers" else "time.sleep(600)"
    (folder / "parent.py").write_text(f"{PARENT}\nonce(json.load(sys.stdin))\n{ending}\n")
    builder = dataset("python parent.py").builder(0, 1)
    episode = play_group(Scripted(TOKENIZER, ["a"]), builder, SAMPLING, group_id=0, seed=0)
    playing = asyncio.ensure_future(episode)
    await asyncio.to_thread(pids, folder)
    if ends == "answers":
        await playing
    else:
        playing.cancel()
        await asyncio.wait({playing})
    end(pids(folder))


WORKER = """
import asyncio, sys
from actors.envs.agent_process import AgentProgram

program = AgentProgram(command=sys.argv[1], directory=".", time_s=600, memory_mb=4096)
print(asyncio.run(program.run({}, {})), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("moment", ["at its start", "in an episode", "between episodes"])
@pytest.mark.parametrize("command", ["python parent.py", "parent:solve"])
def test_a_worker_that_is_killed_leaves_nothing(folder: Path, command: str, moment: str) -> None:
    """The agents, their children (one outside the process group) and temporary files disappear."""
    temporary = folder / "temporary"
    temporary.mkdir()
    ending = "time.sleep(600)" if moment == "in an episode" else "pass"
    (folder / "parent.py").write_text(
        f"def solve(problem):\n{textwrap.indent(PARENT, '    ')}\n    {ending}\n    return 1\n"
        'if __name__ == "__main__":\n    print(solve({}))\n'
    )
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TMPDIR": str(temporary),
        },
    ) as worker:  # fmt: skip
        if moment == "at its start":
            until(lambda: any(temporary.iterdir()))
            started = psutil.Process(worker.pid).children()
            worker.kill()
            for child in started:  # as Ray does
                child.kill()
        else:
            started = [*pids(folder), *(each.pid for each in psutil.Process(worker.pid).children())]
            if moment == "between episodes":
                assert worker.stdout is not None and worker.stdout.readline() == b"1\n"
            worker.kill()
            end(started)
    until(lambda: not any(temporary.iterdir()))


def test_an_agent_that_is_killed_within_its_request_fails_alone(folder: Path) -> None:
    """One of two members is killed while its answer is sampled; the other is trained."""
    (folder / "victim.py").write_text(
        f"{ASKS_ONCE}\nonce({{'messages': [{{'role': 'user', 'content': str(os.getpid())}}]}})\n"
        "print(1)\n"
    )
    policy = Scripted(TOKENIZER, ["a", "b"])

    class Killer:
        killed = False

        async def generate(self, request: GenerateRequest) -> list[Sample]:
            if not self.killed:
                self.killed = True
                seen = str(TOKENIZER.decode(request.prompt_tokens_T.tolist()))
                [agent] = re.findall(r"\d+", seen)
                os.kill(int(agent), signal.SIGKILL)
            return await policy.generate(request)

    builder = dataset("python victim.py").builder(0, 2)
    group = asyncio.run(rollout_group(Killer(), builder, SAMPLING, group_id=0, seed=0))
    [trajectory] = group.trajectories_G
    assert trajectory.reward == 1 and group.metrics["rollout/failed_episodes"] == 0.5


def teacher_contexts(group: TrajectoryGroup) -> list[list[str | None]]:
    """Teacher contexts of each segment of each member, as text."""
    return [
        [None if T is None else str(TOKENIZER.decode(T.tolist())) for T in contexts]
        for trajectory in group.trajectories_G
        for contexts in [[segment.teacher_context_T for segment in trajectory.segments]]
    ]


def test_a_teacher_is_given_feedback_as_with_tool_use(folder: Path) -> None:
    """Feedback replaces the last user message and keeps the tools of the agent's first request."""
    template = FeedbackTemplate(
        text="<{feedback} {answer} {outcome}>{prompt}", correct_reward_threshold=1.0
    )
    context = setting(TOKENIZER, reward=last_number, context_length=512, feedback=template)
    replies = ["41", "42"]
    ours, by_agent = (
        sorted(
            str(text)
            for [text] in teacher_contexts(
                rolled_out(env("rows.jsonl", context), Scripted(TOKENIZER, replies), 2)
            )
        )
        for env in (ToolUse(), Agent(command="calculate:solve"))
    )
    assert by_agent == ours
    right, wrong = (text.partition("<|im_start|>user\n")[2] for text in ours)
    assert right.startswith("<Right. 42 right>What is 6*7?")
    assert wrong.startswith("<Wrong. The right answer is: 42 42 wrong>What is 6*7?")


def test_an_agent_s_feedback_is_for_its_first_conversation(folder: Path) -> None:
    """A sub-agent's conversation and one that begins with a text get none."""
    code = f"{ASKS_ONCE}\ndef solve(problem):\n    once(problem)\n"
    code += "    once({'messages': [{'role': 'user', 'content': 'Other.'}]})\n"
    code += "    return {'reward': 0.5, 'feedback': 'Too slow.'}\n"
    (folder / "talks.py").write_text(code)
    (folder / "writes.py").write_text(
        code.replace("chat/completions", "completions")
        .replace('{"messages": problem["messages"]}', '{"prompt": "What?"}')
        .replace('["message"]["content"]', '["text"]')
    )
    template = FeedbackTemplate(text="{feedback} {prompt}", correct_reward_threshold=1.0)
    context = setting(TOKENIZER, context_length=512, feedback=template)
    groups = {
        module: rolled_out(
            Agent(command=f"{module}:solve")("rows.jsonl", context), Scripted(TOKENIZER, ["a", "b"])
        )
        for module in ("talks", "writes")
    }
    [[first, other]] = teacher_contexts(groups["talks"])
    assert first is not None and "user\nToo slow. What is 6*7?<" in first and other is None
    assert groups["talks"].metrics["opd/unhinted_segments"] == 0.5
    assert teacher_contexts(groups["writes"]) == [[None, None]]
    assert groups["writes"].metrics["opd/unhinted_segments"] == 1


def test_results_in_every_form() -> None:
    assert AgentResult.read(2).reward == 2.0
    assert AgentResult.read("Paris").answer == "Paris"
    result = AgentResult.read({"reward": 0.5, "metrics": {"tests": 3}, "feedback": "close"})
    assert (result.reward, result.metrics, result.feedback) == (0.5, {"tests": 3.0}, "close")
    for value in (None, True, [1], 10**400, {"metrics": {"a": "b"}}, {"other": 1}):
        with pytest.raises(AgentFailed):
            AgentResult.read(value)


def test_commands_that_cannot_start_are_refused(folder: Path) -> None:
    for command in ("no_such_program_anywhere x", "", "'", "no_such_module:solve"):
        with refuses(ConfigError, "env.command"):
            dataset(command)
    (folder / "rows.jsonl").write_text(json.dumps({**ROW, "teacher_prompt": "It is 42."}))
    with refuses(DataError, "teacher_prompt"):
        dataset("calculate:solve")
    limits: list[dict[str, Any]] = [{"max_turns": 0}, {"time_s": 0}, {"memory_mb": 1}]
    for limit in limits:
        with refuses(ConfigError, f"env.{next(iter(limit))}"):
            Agent(command="calculate:solve", **limit)


EXAMPLE = Path(__file__).parents[2] / "examples/agents/framework.py"


@pytest.mark.slow
def test_the_openai_agents_sdk(tmp_path: Path) -> None:
    """The example calls its tool; each history is one segment, and the answer is graded."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    package = "openai-agents>=0.24,<0.25"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", package], check=True)
    row = {"messages": [{"role": "user", "content": "What is 6*7?"}], "answer": "42"}
    tokenizer = chat_tokenizer()
    context = setting(tokenizer, reward=last_number, context_length=2048)
    rows = write_rows(tmp_path / "rows.jsonl", row)
    problems = Agent(command=f"{python} {EXAMPLE}")(rows, context)

    def says(_: int, seen: str) -> str:
        asked = seen.rpartition("What is")[2]
        return "42" if "tool" in asked else call("calculator", {"expression": "6*7"})

    sampling = TrainSampling(temperature=TEMPERATURE, max_new_tokens=48)
    policy, builder = Scripted(tokenizer, says), problems.builder(0, 2)
    group = asyncio.run(rollout_group(policy, builder, sampling, group_id=0, seed=0))
    assert [trajectory.reward for trajectory in group.trajectories_G] == [1.0, 1.0]
    for trajectory in group.trajectories_G:
        assert len(trajectory.segments) == 1
        assert trajectory.metrics["agent/rewritten"] == trajectory.metrics["agent/unmatched"] == 0
