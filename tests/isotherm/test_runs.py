"""Recipes as iterators: metrics, early ends, errors; and the blocks of docs/library.md."""

import json
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray._private.state import actors as ray_actors
from transformers import AutoModelForCausalLM

import isotherm
from cluster.train import main
from learner.checkpoint import CheckpointStore
from tests.conftest import TinyPair
from tests.e2e.harness import REPOSITORY, lines, opd_settings


@pytest.fixture
def settings(tiny_pair: TinyPair, tmp_path: Path) -> dict[str, Any]:
    return opd_settings(
        tiny_pair, recipe="opd", out=tmp_path / "run", steps=3, prompts_per_step=2,
        max_new_tokens=4, local=True, quiet=True,
    )  # fmt: skip


def test_every_line_of_the_metrics_is_yielded(settings: dict[str, Any]) -> None:
    made = list(isotherm.run(**settings))
    assert made == lines(settings["out"])
    assert [line["step"] for line in made if "time/step" in line] == [1, 2, 3]
    AutoModelForCausalLM.from_pretrained(settings["out"] / "final")
    assert list(isotherm.run(**settings)) == []  # it is finished


def test_closing_the_iterator_saves_and_ends_all(settings: dict[str, Any]) -> None:
    before = set(threading.enumerate())
    settings |= {"steps": 100_000, "eval_size": 0}
    for metrics in isotherm.run(**settings):
        if metrics["step"] == 2:
            break
    summary = json.loads((settings["out"] / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    newest = CheckpointStore(settings["out"] / "checkpoints", keep=2).latest()
    assert newest is not None and newest.step == lines(settings["out"])[-1]["step"] >= 2
    left = {thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()}
    assert not left & {"recipe", "LearnerActor", "RolloutActor"}, left
    again = isotherm.run(**settings)
    assert next(again)["step"] == newest.step + 1
    again.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"techer": "somewhere"},
        {"student": "nowhere"},
        {"top_p": 0.9},
        {"recipe": "odp"},
        {"teacher": None},
        {"reward": "no_such_module:f"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_errors_have_the_words_of_the_command_line(
    settings: dict[str, Any], changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    settings |= changes
    with pytest.raises(isotherm.IsothermError) as raised:
        list(isotherm.run(**settings))
    given = [f"{k}={v}" for k, v in settings.items() if k != "quiet" and v is not None]
    assert main(given) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {raised.value}"


def test_a_function_of_the_notebook_itself_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(isotherm.ConfigError):
        list(isotherm.run(**settings, reward=lambda response, answer: 1.0))


def test_the_error_of_a_failed_run_has_the_remedy(settings: dict[str, Any]) -> None:
    settings |= {"lr": 1e30, "steps": 50, "eval_size": 0}
    with pytest.raises(isotherm.RunFailed):
        list(isotherm.run(**settings))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_closing_the_iterator_ends_rays_actors(settings: dict[str, Any]) -> None:
    before = _alive()
    settings |= {"steps": 100_000, "eval_size": 0, "local": False}
    made = isotherm.run(**settings)
    assert next(made)["step"] == 1 and _alive() > before
    made.close()
    assert _alive() == before
    assert json.loads((settings["out"] / "summary.json").read_text())["status"] == "interrupted"
    assert CheckpointStore(settings["out"] / "checkpoints", keep=2).latest() is not None


def _alive() -> set[str]:
    return {name for name, actor in ray_actors().items() if actor["State"] != "DEAD"}


def test_the_page_runs(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("student", "teacher", "prompts"):
        (tmp_path / name).with_suffix(Path(getattr(tiny_pair, name)).suffix).symlink_to(
            getattr(tiny_pair, name)
        )
    page = REPOSITORY / "docs/library.md"
    text = page.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) > 5
    main = ModuleType("__main__")  # as in a notebook
    monkeypatch.setitem(sys.modules, "__main__", main)
    names: dict[str, Any] = main.__dict__
    for block in blocks:
        # Blank lines before it: a traceback then has the page's own line numbers.
        above = "\n" * text[: block.start(1)].count("\n")
        exec(compile(above + block[1], page, "exec"), names)
    for made in list(names.values()):
        if isinstance(made, isotherm.Policy | isotherm.Sampler):
            made.close()
