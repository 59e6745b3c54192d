"""No command writes into a job's upload, which Ray removes, or to a path that is none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import calibrate, demo, evaluate, sample_to_sft, train
from cluster.config.job_upload import missing_from_upload
from cluster.inspect import rollouts_to_sft
from cluster.inspect.forecast import command as forecast
from cluster.inspect.report import command as report
from examples.opd_vs_rl.__main__ import main as opd_vs_rl
from examples.show.__main__ import main as show

UPLOAD = "runtime_resources/working_dir_files/_ray_pkg_0"
MODELS = ["student=a/b", "teacher=a/c", "temperature=1"]
Writer = tuple[Callable[[list[str]], int], str, list[str]]
WRITERS: list[Writer] = [
    (train.main, "out", ["recipe=opd", *MODELS, "prompts=p.jsonl"]),
    (train.main, "out", ["recipe=rl", "student=a/b", "temperature=1", "prompts=p.jsonl"]),
    (train.main, "out", ["recipe=sft", "model=a/b", "data=d.jsonl"]),
    (demo.main, "out", []),
    (show, "out", ["task=tools"]),
    (opd_vs_rl, "out", []),
    (evaluate.main, "out", ["model=a/b", "prompts=p.jsonl"]),
    (forecast.main, "out", [*MODELS, "prompts=p.jsonl"]),
    (calibrate.main, "out", MODELS),
    (sample_to_sft.main, "data", ["model=a/b", "prompts=p.jsonl"]),
    (rollouts_to_sft.main, "data", ["out=run"]),
    (report.main, "html", ["out=run"]),
]


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("writer", WRITERS)
def test_no_command_writes_into_a_job_s_upload(
    writer: Writer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, setting, others = writer
    upload = tmp_path / UPLOAD
    upload.mkdir(parents=True)
    for name in ("p.jsonl", "d.jsonl"):
        (upload / name).write_text("{}\n")
    monkeypatch.chdir(upload)
    for path in ("made.jsonl", str(upload / "made.jsonl"), "none/made.jsonl"):
        assert command([*others, f"{setting}={path}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {setting}={path}") and "upload" in error


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("path", ["s3://bucket/made.jsonl", "loop/made.jsonl"])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_command_writes_to_a_url_or_through_a_loop_of_links(
    writer: Writer,
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, setting, others = writer
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert command([*others, f"{setting}={path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {setting}={path} ") and error.count("\n") == 1


@pytest.mark.parametrize("given", ["out=loop", "out=. against=loop", "out=s3://bucket/run"])
def test_a_report_reads_no_url_or_loop_of_links(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert report.main(given.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {given.split()[-1]} ")


def test_a_report_s_own_page_is_not_written_into_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / UPLOAD / "run"
    run.mkdir(parents=True)
    assert report.main([f"out={run}"]) == 2 and "html=" in capsys.readouterr().err


def test_relative_paths_missing_from_the_upload_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = tmp_path / UPLOAD
    upload.mkdir(parents=True)
    (upload / "there.jsonl").touch()
    given = {"prompts": "there.jsonl,data/p.jsonl", "student": "org/model", "out": "/shared/out"}
    assert missing_from_upload(given) is None
    monkeypatch.chdir(upload)
    note = missing_from_upload(given)
    assert note is not None and "prompts=data/p.jsonl." in note
