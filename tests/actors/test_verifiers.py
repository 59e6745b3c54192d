"""Environments of `verifiers`, in a virtual environment made by pip."""

import asyncio
import json
import pickle
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import pytest

from actors.envs.verifiers_env import Verifiers, verifiers_version
from actors.rollout.episode import rollout_group
from distill.data.feedback import FeedbackTemplate
from distill.envs.base import EnvDataset
from distill.errors import ConfigError
from distill.sampling import TrainSampling
from distill.types import TrajectoryGroup
from tests.refusals import refuses
from tests.samples import TEMPERATURE
from tests.scripted import Script, Scripted, call, chat_tokenizer, setting
from tests.verifiers_environments import verifiers_python

TOKENIZER = chat_tokenizer()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return verifiers_python(tmp_path_factory.mktemp("verifiers"))


def dataset(
    name: str, python: str, *, feedback: FeedbackTemplate | None = None, **settings: Any
) -> EnvDataset:
    context = setting(TOKENIZER, context_length=8192, feedback=feedback)
    made = Verifiers(name=name, python=python, **settings)(None, context)
    return pickle.loads(pickle.dumps(made))


def rolled_out(problems: EnvDataset, problem: int, script: Script) -> TrajectoryGroup:
    sampling = TrainSampling(temperature=TEMPERATURE, max_new_tokens=64)
    policy, builder = Scripted(TOKENIZER, script), problems.builder(problem, 2)
    return asyncio.run(rollout_group(policy, builder, sampling, group_id=0, seed=0))


def test_a_version_before_its_release_is_one(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    [packages] = tmp_path.glob("lib/*/site-packages")
    (packages / "verifiers-1.0rc1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: verifiers\nVersion: 1.0rc1\n"
    (packages / "verifiers-1.0rc1.dist-info" / "METADATA").write_text(metadata)
    assert verifiers_version(str(tmp_path / "bin" / "python")) == "1.0rc1"


def test_a_single_turn(python: str) -> None:
    problems = dataset("products", python, args='{"taskset": {"num_tasks": 9}}')
    assert len(problems) == 9
    replies = ["42", "no idea"]
    group = rolled_out(problems, 6, lambda turn, _: replies[turn])
    by_reward = {trajectory.reward: trajectory for trajectory in group.trajectories_G}
    assert by_reward.keys() == {0.0, 1.0}
    assert by_reward[0.0].metrics["letters"] == len("no idea")
    [segment] = by_reward[1.0].segments
    assert "What is 6*7?" in str(TOKENIZER.decode(segment.tokens_T.tolist()))
    assert not [*Path(tempfile.gettempdir()).glob("product-*")], "temporary files stay"


def test_feedback_has_the_reward_and_no_words(python: str) -> None:
    template = FeedbackTemplate(text="({outcome}) {prompt}", correct_reward_threshold=1.0)
    problems = dataset("products", python, feedback=template)
    assert not problems.builder(1, 2).may_give_feedback
    group = rolled_out(problems, 1, lambda turn, _: ["7", "8"][turn])
    texts = {}
    for trajectory in group.trajectories_G:
        context_T = trajectory.segments[0].teacher_context_T
        assert context_T is not None
        texts[trajectory.reward] = str(TOKENIZER.decode(context_T.tolist()))
    assert "user\n(right) What is 1*7?" in texts[1.0]
    assert "user\n(wrong) What is 1*7?" in texts[0.0]


def test_tools(python: str) -> None:
    """Calls go to the environment's own server of tools; each history is one segment."""

    def says(_: int, seen: str) -> str:
        if "42" in seen:
            return "42"
        [name] = {word for word in seen.split('"') if word.endswith("multiply")}
        return call(name, {"a": 6, "b": 7})

    problems = dataset("with-tools", python, problems=8)
    group = rolled_out(problems, 6, says)
    assert [trajectory.reward for trajectory in group.trajectories_G] == [1.0, 1.0]
    for trajectory in group.trajectories_G:
        assert len(trajectory.segments) == 1
        assert trajectory.metrics["agent/rewritten"] == trajectory.metrics["agent/unmatched"] == 0


def test_a_game_of_a_library(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hangman of textarena with a dictionary of five words; the game is the user."""
    words = ["apple", "house", "plant", "water", "stone"]
    (tmp_path / "corpora/words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (tmp_path / "corpora/words" / name).write_text("\n".join(words))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))

    def says(_: int, seen: str) -> str:
        return next(guess for word in words if (guess := f"[{word}]") not in seen)

    game = '{"taskset": {"game": "Hangman-v0"}}'
    problems = dataset("textarena", python, args=game, problems=3)
    assert len(problems) == 3
    group = rolled_out(problems, 1, says)
    assert [trajectory.reward for trajectory in group.trajectories_G] == [1.0, 1.0]
    for trajectory in group.trajectories_G:
        assert len(trajectory.segments) == 1
        assert trajectory.metrics["agent/unmatched"] == 0


def test_unusable_environments_are_refused(python: str, tmp_path: Path) -> None:
    for field, name, with_python, settings in [
        ("env.python", "products", "/nowhere/python", {}),
        ("env.python", "products", sys.executable, {}),
        ("env.name", "no_such_environment", python, {}),
        ("env.name", "with-tools", python, {}),
        ("env.name", "products", python, {"args": json.dumps({"taskset": {"number": 1}})}),
    ]:
        with refuses(ConfigError, field):
            dataset(name, with_python, **settings)
    with refuses(ConfigError, "env.name", names="verifiers.utils"):
        dataset("outdated", python)
