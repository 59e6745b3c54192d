"""Each command in code blocks of the documentation is accepted by its program."""

import asyncio
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.rollout.episode import play_group
from cluster.calibrate import CalibrateConfig
from cluster.command import parse
from cluster.config.demos import DemoConfig
from cluster.config.recipes import CONFIGS, config_of
from cluster.evaluate import EvaluateConfig
from cluster.inspect.audit import AuditConfig
from cluster.inspect.forecast.command import ForecastConfig
from cluster.inspect.report.command import ReportConfig
from cluster.inspect.rollouts_to_sft import RolloutsToSftConfig
from cluster.sample_to_sft import SampleToSftConfig
from distill.sampling import TrainSampling
from distill.settings import meant_by
from examples.opd_vs_rl.config import OpdVsRlConfig
from examples.show.config import ShowConfig
from tests.scripted import Scripted, call, chat_tokenizer, setting

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "cluster.audit": AuditConfig, "cluster.calibrate": CalibrateConfig, "cluster.demo": DemoConfig,
    "cluster.evaluate": EvaluateConfig, "cluster.forecast": ForecastConfig,
    "cluster.report": ReportConfig, "cluster.rollouts_to_sft": RolloutsToSftConfig,
    "cluster.sample_to_sft": SampleToSftConfig, "examples.opd_vs_rl": OpdVsRlConfig,
    "examples.show": ShowConfig,
}  # fmt: skip
ABOVE_RECIPES = {"config", "step", "blame"}
BLOCK = re.compile(r"^```(?:bash|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"python -m ((?:cluster|examples)\.\w+) (.*)")


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """Page, module and arguments of each command in a block, without those with --help."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for block in BLOCK.findall(page.read_text()):
            for module, rest in COMMAND.findall(re.sub(r"\\\n\s*", " ", block)):
                words = shlex.split(rest, comments=True)
                if not {"--help", "..."} & set(words):
                    yield page.name, module, words


FOUND = list(commands())


def test_the_search_finds_the_commands() -> None:
    assert len(FOUND) > 40 and {module for _, module, _ in FOUND} > {"cluster.train", *COMMANDS} - {
        "cluster.demo", "examples.opd_vs_rl",
    }  # fmt: skip


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the path with the modules of the pages about environments."""
    pages = (ROOT / "docs" / page for page in ("environments.md", "environments/users.md"))
    text = "\n".join(page.read_text() for page in pages)
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    modules = dict(zip(("backwards", "letters", "helpdesk"), blocks, strict=True))
    for name, code in modules.items():
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in modules:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("answer", "reward", "feedback"), [("2", 1.0, "Right."), ("3", 0.0, "contains b 2 times")]
)
def test_the_documented_tool_and_reward_work(
    documented: Path, answer: str, reward: float, feedback: str
) -> None:
    words = documented / "words.txt"
    words.write_text("bobs")
    env = importlib.import_module("letters").Letters(file=str(words))
    tokenizer = chat_tokenizer()
    policy = Scripted(tokenizer, [call("spell", {"word": "bobs"}), answer])
    builder = env(None, setting(tokenizer)).builder(0, 1)
    sampling = TrainSampling(temperature=0.7, max_new_tokens=48)
    [played] = asyncio.run(play_group(policy, builder, sampling, group_id=0, seed=0))
    assert played.reward == reward and feedback in played.feedback
    assert "b o b s" in policy.seen[1]


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize(
    ("page", "module", "words"), [pytest.param(*each, id=" ".join(each[2])) for each in FOUND]
)
def test_a_documented_command_is_accepted(page: str, module: str, words: list[str]) -> None:
    settings = dict(word.split("=", 1) for word in words)
    recipe = settings.get("recipe")
    if recipe is not None:
        words = [word for word in words if not word.startswith("recipe=")]
        assert parse(config_of(recipe), words), page
    elif module in COMMANDS:
        assert parse(COMMANDS[module], words), page
    else:  # the command changes settings of a run's file, which does not exist here
        assert module in {"cluster.train", "cluster.replay"}, page
        for name in settings.keys() - ABOVE_RECIPES:
            assert any(meant_by(config, name) for config in CONFIGS.values()), (page, name)
