"""Environments in runs with real engines: turns, tools and games."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.sglang.installed import sglang_installed
from cluster.evaluate import main as evaluate
from cluster.inspect.audit import audit
from cluster.inspect.report.command import main as report
from cluster.store.kept_groups import KeptGroups
from cluster.train import main
from distill.envs.games.tic_tac_toe import TicTacToeGames
from examples.show.chat_worlds import (
    DIGITS_APART,
    SQUARES_APART,
    game_rows,
    product_prompts,
    product_rows,
    products,
    write_untrained,
)
from tests.conftest import TinyPair
from tests.e2e.harness import REPOSITORY, metrics, opd_arguments, run, taught, train, trained_groups
from tests.rows import write_rows

pytestmark = pytest.mark.e2e
ENGINES = [
    "embedded",
    pytest.param(
        "sglang",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed"),
        ],
    ),
]


@pytest.fixture
def backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The exact environment of docs/environments.md, and its words."""
    page = (REPOSITORY / "docs/environments.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "backwards.py").write_text(code)
    assert sum(map(bool, code.split("\n"))) < 30, "that is no small file any more"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPOSITORY)]))
    monkeypatch.syspath_prepend(str(tmp_path))
    words = tmp_path / "words.txt"
    words.write_text("\n".join(f"{a}{b}" for a in "abcd" for b in "efgh"))
    yield words
    sys.modules.pop("backwards", None)


@pytest.fixture
def brief_pair(tiny_pair: TinyPair, tmp_path: Path) -> TinyPair:
    """Pair with many stop tokens: random models hardly ever sample a single one."""
    copies = {}
    for role in ("student", "teacher"):
        copies[role] = str(shutil.copytree(getattr(tiny_pair, role), tmp_path / role))
        stops = {"eos_token_id": [1, *range(20, 80)]}
        (Path(copies[role]) / "generation_config.json").write_text(json.dumps(stops))
    return TinyPair(**copies, prompts=tiny_pair.prompts)


def without_prompts(pair: TinyPair, out: Path, words: Path, **settings: object) -> list[str]:
    arguments = opd_arguments(pair, out, env="backwards:Words", **settings)
    kept = [one for one in arguments if not one.startswith("prompts=")]
    return [*kept, f"env.file={words}"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_environment_of_the_docs_trains(
    brief_pair: TinyPair,
    tmp_path: Path,
    backwards: Path,
    engine: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two turns per episode; what is trained equals what was sampled and scored."""
    out = tmp_path / "run"
    arguments = without_prompts(brief_pair, out, backwards, steps=3, engine=engine,
        keep="all", max_staleness=0, local=engine == "embedded",
        policy_engines=2 if engine == "sglang" else 1,
    )  # fmt: skip
    if engine == "embedded":
        assert main(["recipe=opd", *arguments]) == 0
        output = capsys.readouterr().out
    else:
        output = run("cluster.train", "recipe=opd", *arguments)
    assert "env=Words" in output
    assert trained_groups(out) == list(range(3 * 4))
    assert audit(out / "ledger.jsonl").problems == []
    for step in metrics(out):
        assert step["rollout/turns"] > 1
        assert step["train/logprob_gap"] < 1e-3, "the learner scores another chain"
        assert step["opd/reverse_kl/turn=1"] > 0 and step["opd/reverse_kl/turn=2"] > 0
        if engine == "sglang":  # a second turn goes to the engine that has its prefix
            assert step["rollout/cached_share"] > 0.5
    assert KeptGroups(out / "groups").steps == [1, 2, 3]
    other = shutil.copy(backwards, tmp_path / "other.txt")
    assert main(["recipe=opd", *arguments[:-1], f"env.file={other}"]) == 2
    assert "env" in capsys.readouterr().err
    played = [
        f"model={out / 'final'}", "env=backwards:Words", f"env.file={backwards}",
        "engine=embedded", "max_new_tokens=8", "eval.size=3",
    ]  # fmt: skip
    assert evaluate(played) == 0
    output = capsys.readouterr().out
    assert "Words (3 prompts)" in output and "eval/accuracy" in output
    assert report([f"out={out}"]) == 0 and (out / "report.html").stat().st_size > 10_000


def test_invalid_environments_are_refused_before_the_start(
    tiny_pair: TinyPair, tmp_path: Path, backwards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = opd_arguments(tiny_pair, tmp_path / "run")
    plain = [one for one in common if not one.startswith("prompts=")]
    named = "env=backwards:Words"
    for arguments, message in [
        ([*plain, "env=nowhere:Words"], "nowhere"),
        ([*plain, named], "env.file"),
        ([*plain, named, "env.file=nowhere"], "FileNotFoundError"),
        ([*plain, named, f"env.file={backwards}", "env.fil=x"], "env.file"),
        ([*common, named, f"env.file={backwards}"], "data.source"),
        ([*plain, named, f"env.file={backwards}", "reward=contains"], "rewards of its own"),
        (plain, "give prompts=FILE.jsonl"),
    ]:
        assert main(["recipe=opd", *arguments]) == 2, arguments
        assert message in capsys.readouterr().err, arguments
    assert not (tmp_path / "run").exists()


def test_groups_of_a_failing_environment_are_dropped(
    tiny_pair: TinyPair, tmp_path: Path, backwards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every fourth word raises, or has a reward that is not a number."""
    code = (tmp_path / "backwards.py").read_text()
    bad = 'if self.word[1] == "h":\n            raise RuntimeError("no such word")\n        '
    code = code.replace("self.tries += 1\n        ", f"self.tries += 1\n        {bad}")
    (tmp_path / "backwards.py").write_text(code)
    out = tmp_path / "run"
    arguments = without_prompts(tiny_pair, out, backwards, steps=4,
        reward_coef=1, local=True, smoke_test=False,
    )  # fmt: skip
    assert main(["recipe=opd", *arguments]) == 0, capsys.readouterr()
    assert "RuntimeError: no such word" in (out / "ledger.jsonl").read_text()
    assert 1 <= metrics(out)[-1]["groups/set_aside"] <= 8
    assert audit(out / "ledger.jsonl").problems == []


@pytest.mark.slow
def test_opd_on_tool_calls(tmp_path: Path) -> None:
    """A little-trained model: its calls are executed, and both turns are trained."""
    pairs = products(300, 0)
    book = product_rows(pairs, guesses=0.0)
    untrained = tmp_path / "untrained"
    write_untrained(str(untrained), book, DIGITS_APART, context_length=128, seed=1)
    student = taught(untrained, book, tmp_path)
    steps = train(
        "opd_tools", tmp_path / "run", student=student,
        teacher=shutil.copytree(student, str(tmp_path / "teacher")),
        prompts=write_rows(tmp_path / "prompts.jsonl", *product_prompts(pairs)),
        temperature=0.7, steps=2, prompts_per_step=8, group_size=2, max_new_tokens=32,
        engine="embedded", max_staleness=0, reward_coef=1.0, eval_size=4, checkpoint_every=100,
        local=True,
    )  # fmt: skip
    for step in steps:
        assert step["env/tool_calls"] > 0.5, "the model calls no tool"
        assert step["rollout/turns"] > 1.5
        assert step["train/logprob_gap"] < 1e-3
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["eval after"]["eval/tool_calls"] > 0.5
    assert summary["eval after"]["eval/turns"] > 1.5


@pytest.mark.parametrize("opponent", ["self", pytest.param("reference", marks=pytest.mark.slow)])
def test_games_by_self_play_and_against_a_frozen_model(tmp_path: Path, opponent: str) -> None:
    frozen = opponent == "reference"
    student = str(tmp_path / "model")
    book = game_rows(40, blunders=0.3)
    write_untrained(student, book, SQUARES_APART, context_length=192, seed=1)
    steps = train(
        "selfplay", tmp_path / "run", student=student, temperature=0.7, steps=2, prompts_per_step=4,
        group_size=4, max_new_tokens=4, engine="embedded", eval_size=4, checkpoint_every=100,
        env=TicTacToeGames(
            rules=False, games=80, opponent=opponent, opponent_temperature=0.7 if frozen else None,
        ),
        reference=student if frozen else None, local=True,
    )  # fmt: skip
    for step in steps:
        assert step["env/illegal"] > 0  # an untrained model
        assert -2 <= step["reward/mean"] <= 0
        assert step["train/tokens"] > 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert {"eval/won", "eval/illegal", "eval/drawn"} <= summary["eval after"].keys()
    assert audit(tmp_path / "run/ledger.jsonl").scoring is None, "an opponent scores nothing"


def test_an_environment_s_user_is_played_by_the_teacher(
    brief_pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The environment of docs/environments/users.md, in a run, its evaluations, and by itself."""
    [code] = re.findall(
        r"```py\n(.*?)```", (REPOSITORY / "docs/environments/users.md").read_text(), re.DOTALL
    )
    (tmp_path / "helpdesk.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPOSITORY)]))
    monkeypatch.syspath_prepend(str(tmp_path))
    words = tmp_path / "words.txt"
    words.write_text("\n".join(f"{a}{b}" for a in "abcd" for b in "efgh"))
    played = ["env=helpdesk:Guesses", f"env.file={words}", "env.max_turns=3", "max_new_tokens=4"]
    out = tmp_path / "run"
    arguments = opd_arguments(brief_pair, out, local=True, steps=2, reward_coef=1)
    arguments = [one for one in arguments if not one.startswith(("prompts=", "max_new_tokens="))]
    assert main(["recipe=opd", *arguments, *played]) == 0
    assert all(step["rollout/turns"] > 1 for step in metrics(out))
    assert json.loads((out / "summary.json").read_text())["eval after"]["eval/reverse_kl"] > 0
    common = [f"model={out / 'final'}", *played, "engine=embedded", "eval.size=3"]
    assert evaluate([*common, f"teacher={brief_pair.teacher}", "temperature=0.7"]) == 0
    assert evaluate(common) == 2
    assert "'teacher'" in capsys.readouterr().err
