"""Paths in settings, checked before a model or a library of tensors is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from cluster.command import parse
from cluster.config.arguments import Arguments
from cluster.config.early_checks import check_early
from cluster.config.on_policy import OpdConfig
from cluster.config.supervised import DpoConfig, SftConfig
from cluster.evaluate import EvaluateConfig
from cluster.run_files.out_directory import wait_for_other_job
from cluster.run_files.run_lock import RunLock
from cluster.train import run_recipe
from distill.errors import CheckpointError, ConfigError, DataError

OTHERS = ["prompts=README.md", "temperature=0.7", "out=OUT"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "config.json").write_text("{}")
    return tmp_path / "run"


def test_a_run_stands_for_its_trained_model_in_every_setting(run: Path) -> None:
    final = str(run / "final")
    opd = parse(
        OpdConfig,
        [
            f"student={run}",
            f"teachers.a.model={run}",
            f"reference={run}",
            "reference_kl_coef=0.1",
            *OTHERS,
        ],
    )
    assert (opd.student, opd.reference, opd.teachers["a"].model) == (final, final, final)
    assert parse(OpdConfig, ["student=a/b", f"teacher={run}", *OTHERS]).teacher.model == final
    evaluated = parse(EvaluateConfig, [f"model={run}", *OTHERS[:1], f"reward=model:{run}"])
    assert (evaluated.model, evaluated.reward_model) == (final, final)
    dpo = parse(DpoConfig, [f"model={run}", f"reference={run}", "data=README.md", "out=OUT"])
    assert (dpo.model, dpo.reference) == (final, final)


def test_the_moving_teacher_is_no_directory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.rename(tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    told = "teacher_feedback={prompt} {response}"
    assert (
        parse(OpdConfig, ["student=a/b", "teacher=policy", told, *OTHERS]).teacher.model == "policy"
    )


@pytest.mark.parametrize(
    ("given", "error", "field"),
    [
        (["student=/no/where", "teacher=a/b"], CheckpointError, "student"),
        (["student=a/b", "teachers.x.model=/no/where"], CheckpointError, "teachers.x.model"),
        (["student=a/b", "teacher=a/c", "eval.source=no-*.jsonl"], DataError, "eval.source"),
        (["student=a/b", "teacher=a/c", "chat_template=no.jinja"], ConfigError, "chat_template"),
        (["student=RUN/..", "teacher=a/c"], CheckpointError, "student"),
    ],
)
def test_wrong_paths_are_refused_by_their_setting(
    given: list[str], error: type[Exception], field: str, run: Path
) -> None:
    config = parse(OpdConfig, [each.replace("RUN", str(run)) for each in given] + OTHERS)
    with pytest.raises(error) as refused:
        check_early(config)
    assert str(refused.value).startswith(field)


def test_servers_hub_names_and_data_sets_are_left_to_those_who_ask_them() -> None:
    given = ["student=Qwen/Qwen3-0.6B", "teacher=http://localhost:1", "prompts=openai/gsm8k:main"]
    check_early(parse(OpdConfig, [*given, *OTHERS[1:]]))


def test_the_directory_of_an_unfinished_run_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("metrics.jsonl", "config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError):
        check_early(parse(SftConfig, [f"model={tmp_path}", "data=README.md", "out=OUT"]))


@pytest.mark.parametrize("out", ["", "no-such/report.json"])
def test_a_report_that_cannot_be_written_is_refused(out: str, run: Path) -> None:
    config = parse(EvaluateConfig, [f"model={run}", OTHERS[0], f"out={run / out}"])
    with pytest.raises(ConfigError):
        check_early(config)


def test_a_busy_directory_is_waited_for_before_anything_else(tmp_path: Path) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        held.__exit__()

    held = RunLock.acquire(tmp_path / ".lock", say, 0.0)
    wait_for_other_job(tmp_path, say)
    assert len(said) == 1 and str(tmp_path) in said[0]


def test_a_file_as_out_is_refused(run: Path) -> None:
    out = run / "final" / "config.json"
    arguments = ["recipe=sft", f"model={run}", "data=README.md", f"out={out}"]
    with pytest.raises(ConfigError):
        run_recipe(Arguments.of(arguments), Console())
