"""Environments of `verifiers`, in a virtual environment of their own that pip makes."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.envs.verifiers_env import Verifiers
from actors.rollout.episode import rollout_group
from distill.envs.base import EnvDataset
from distill.errors import ConfigError
from distill.sampling import TrainSampling
from distill.types import TrajectoryGroup
from tests.refusals import refuses
from tests.samples import TEMPERATURE
from tests.scripted import Script, Scripted, call, chat_tokenizer, setting

pytestmark = pytest.mark.slow

PRODUCTS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Product(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class Config(vf.TasksetConfig):
    num_tasks: int = 5

class Products(vf.Taskset[Product, Config]):
    def load(self):
        for i in range(self.config.num_tasks):
            data = Data(prompt=f"What is {i}*7?", answer=str(i * 7))
            yield Product(data, self.config.task)

__all__ = ["Products"]
"""
CALCULATOR = '''
import verifiers.v1 as vf

class Tools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def multiply(self, a: int, b: int) -> str:
        """Multiplies."""
        return str(a * b)

if __name__ == "__main__":
    Tools.run()
'''
WITH_TOOLS = """
import itertools
import verifiers.v1 as vf
from with_tools.calculator import Tools

class Data(vf.TaskData):
    answer: str

class Config(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()

class TasksetConfig(vf.TasksetConfig):
    task: Config = Config()

class Product(vf.Task[Data, vf.State, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

class Products(vf.Taskset[Product, TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            data = Data(prompt=f"What is {i}*7?", answer=str(i * 7))
            yield Product(data, self.config.task)

__all__ = ["Products"]
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with `verifiers`, its games, and two environments."""
    folder = tmp_path_factory.mktemp("verifiers") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = str(folder / "bin/python")
    subprocess.run(
        [made, "-m", "pip", "install", "-q", "--no-compile", "verifiers[ta]>=0.4,<0.5", "uv"],
        check=True,
    )
    [site] = (folder / "lib").glob("*/site-packages")
    (site / "products.py").write_text(PRODUCTS)
    (site / "with_tools").mkdir()
    (site / "with_tools/__init__.py").write_text(WITH_TOOLS)
    (site / "with_tools/calculator.py").write_text(CALCULATOR)
    return made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def dataset(
    tokenizer: PreTrainedTokenizerBase, name: str, python: str, **settings: Any
) -> EnvDataset:
    context = setting(tokenizer, context_length=8192)
    made = Verifiers(name=name, python=python, **settings)(None, context)
    return pickle.loads(pickle.dumps(made))


def rolled_out(
    tokenizer: PreTrainedTokenizerBase, problems: EnvDataset, problem: int, script: Script
) -> TrajectoryGroup:
    sampling = TrainSampling(temperature=TEMPERATURE, max_new_tokens=64)
    policy, builder = Scripted(tokenizer, script), problems.builder(problem, 2)
    return asyncio.run(rollout_group(policy, builder, sampling, group_id=0, seed=0))


def test_a_single_turn(tokenizer: PreTrainedTokenizerBase, python: str) -> None:
    problems = dataset(tokenizer, "products", python, args='{"taskset": {"num_tasks": 9}}')
    assert len(problems) == 9
    said = ["42", "no idea"]
    group = rolled_out(tokenizer, problems, 6, lambda turn, _: said[turn])
    by_reward = {trajectory.reward: trajectory for trajectory in group.trajectories_G}
    assert by_reward.keys() == {0.0, 1.0}
    assert by_reward[0.0].metrics["letters"] == len("no idea")
    [segment] = by_reward[1.0].segments
    assert "What is 6*7?" in str(tokenizer.decode(segment.tokens_T.tolist()))


def test_tools(tokenizer: PreTrainedTokenizerBase, python: str) -> None:
    """Calls go to the environment's own server of tools; each history is one segment."""

    def says(_: int, seen: str) -> str:
        if "42" in seen:
            return "42"
        [name] = {word for word in seen.split('"') if word.endswith("multiply")}
        return call(name, {"a": 6, "b": 7})

    problems = dataset(tokenizer, "with-tools", python, problems=8)
    group = rolled_out(tokenizer, problems, 6, says)
    assert [trajectory.reward for trajectory in group.trajectories_G] == [1.0, 1.0]
    for trajectory in group.trajectories_G:
        assert len(trajectory.segments) == 1
        assert trajectory.metrics["agent/rewritten"] == trajectory.metrics["agent/unmatched"] == 0


def test_a_game_that_comes_with_the_library(
    tokenizer: PreTrainedTokenizerBase,
    python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hangman of textarena, with a dictionary of five words: the game answers as the user."""
    words = ["apple", "house", "plant", "water", "stone"]
    (tmp_path / "corpora/words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (tmp_path / "corpora/words" / name).write_text("\n".join(words))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))

    def says(_: int, seen: str) -> str:
        return next(guess for word in words if (guess := f"[{word}]") not in seen)

    game = '{"taskset": {"game": "Hangman-v0"}}'
    problems = dataset(tokenizer, "textarena", python, args=game, problems=3)
    assert len(problems) == 3
    group = rolled_out(tokenizer, problems, 1, says)
    assert [trajectory.reward for trajectory in group.trajectories_G] == [1.0, 1.0]
    for trajectory in group.trajectories_G:
        assert len(trajectory.segments) == 1
        assert trajectory.metrics["agent/unmatched"] == 0


def test_what_cannot_be_played_is_refused(
    tokenizer: PreTrainedTokenizerBase, python: str, tmp_path: Path
) -> None:
    for field, settings in {
        "env.python": {"name": "products", "python": "/nowhere/python"},
        "env.name": {"name": "no_such_environment", "python": python},
        "env.args": {"name": "products", "python": python, "args": "{"},
    }.items():
        with refuses(ConfigError, field):
            dataset(tokenizer, **settings)
    with refuses(ConfigError, "env.python"):
        dataset(tokenizer, "products", sys.executable)
    with refuses(ConfigError, "env.name"):
        dataset(tokenizer, "with-tools", python)
    with refuses(ConfigError, "env.name"):
        dataset(tokenizer, "products", python, args=json.dumps({"taskset": {"number": 1}}))
