"""An unmodified agent framework in a virtual environment made by pip."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from actors.envs.agent import Agent
from actors.rollout.episode import rollout_group
from distill.rewards.registry import last_number
from distill.sampling import TrainSampling
from tests.rows import write_rows
from tests.samples import TEMPERATURE
from tests.scripted import Scripted, call, chat_tokenizer, setting

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
