"""Trackers with their own libraries: they receive what the run wrote, once."""

import importlib
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.config.opd import OpdConfig
from cluster.run_files.metric_table import HEADLINES
from cluster.run_files.redact import redacted
from cluster.run_files.run_directory import RunDirectory
from cluster.run_files.trackers import Trackers, check_trackers
from cluster.store.kept_groups import KeptGroupWriter
from distill.errors import ConfigError
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.types import StopReason, Trajectory, TrajectoryGroup
from tests.samples import keep_step, segment_of
from tests.waiting import until

NewOpd = Callable[..., OpdConfig]
NAMES = {"step": 3, "opd/reverse_kl": 0.5, "eval/pass@4": 0.25, "reward/mean/source=a.jsonl": 1.0}


def a_group(tokenizer: PreTrainedTokenizerBase, step: int) -> TrajectoryGroup:
    prompt, answer = (tokenizer.encode(text) for text in ("1+1=", "2"))
    mask_T = np.arange(len(prompt) + len(answer)) >= len(prompt)
    segment = segment_of(
        tokens_T=np.array(prompt + answer, np.int32), action_mask_T=mask_T,
        behaviour_logprobs_T=np.where(mask_T, -0.5, 0),
        teacher_logprobs_T=np.where(mask_T, -0.25, 0), versions_T=np.where(mask_T, step - 1, -1),
        temperature=0.7,
    )  # fmt: skip
    one = Trajectory(segments=(segment,), reward=1.0, stop_reason=StopReason.EOS)
    return TrajectoryGroup(group_id=8 * step, trajectories_G=(one, one))


class Run:
    """A run's directory and its trackers."""

    def __init__(self, config: OpdConfig, first_step: int = 0) -> None:
        self.directory = RunDirectory(config)
        self.directory.path.mkdir(exist_ok=True)
        if not (self.directory.path / "config.json").exists():
            self.directory.start(None)
        self.lines: list[str] = []
        settings = {
            "temperature": config.sampling.temperature,
            "tracking": {"notify": config.tracking.notify},
        }
        self.trackers = Trackers(
            config.tracking, self.directory, settings, first_step, self.lines.append
        )

    def steps(self, tokenizer: PreTrainedTokenizerBase, first: int, last: int) -> None:
        log = KeptGroupWriter(self.directory.groups, 1)
        self.directory.append_event("size", pool="policy", ready=2, starting=0, draining=0)
        for step in range(first, last + 1):
            self.trackers.log(NAMES | {"step": step})
            groups = [a_group(tokenizer, step)]
            keep_step(log, step, groups, policy_rows(groups, ObjectiveConfig()))
            self.trackers.show_rollouts(tokenizer)
        self.directory.append_event("death", who="policy 0", why="killed")
        self.directory.append_event("restart", who="policy 0", seconds=1.0)
        self.trackers.log(NAMES | {"step": last + 1})

    def finish(self, code: int = 0) -> None:
        self.trackers.finish({"status": "finished", "eval after": {"eval/accuracy": 0.5}}, code)


def test_tensorboard_gets_steps_rollouts_and_alerts(
    opd: NewOpd, tokenizer: PreTrainedTokenizerBase
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = opd(track="tensorboard", notify="https://hooks.example.com/services/T0/s3cr3t")
    first = Run(config)
    first.steps(tokenizer, 1, 4)
    first.finish(1)
    again = Run(config, first_step=2)  # it rewinds to step 2
    again.steps(tokenizer, 3, 4)
    again.finish()
    read = EventAccumulator(str(first.directory.path / "tensorboard"))
    read.Reload()
    values = [(each.step, each.value) for each in read.Scalars("opd/reverse_kl")]
    assert values == [(step, 0.5) for step in (1, 2, 3, 4, 5)]
    assert read.Scalars("pool/policy")[-1].value == 2
    assert [each.value for each in read.Scalars("restarts")] == [0, 0, 0, 0, 1]
    texts = {tag: read.Tensors(tag) for tag in read.Tags()["tensors"]}
    shown = texts["rollouts/text_summary"][-1].tensor_proto.string_val[0].decode()
    assert "1+1=" in shown and "reward 1" in shown
    alert = texts["alerts/text_summary"][-1].tensor_proto.string_val[0].decode()
    assert alert == "policy 0 died: killed"
    settings = texts["settings/text_summary"][0].tensor_proto.string_val[0].decode()
    assert "tracking.notify" in settings and "s3cr3t" not in settings
    assert not first.lines and not again.lines


@pytest.mark.slow
def test_mlflow_continues_the_same_run(
    opd: NewOpd, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of my own")
    config = opd(track="mlflow")
    first = Run(config)
    first.steps(tokenizer, 1, 2)
    first.finish(1)
    again = Run(config, first_step=3)
    again.trackers.log(NAMES | {"step": 4})
    again.finish()
    assert not first.lines and not again.lines
    client = MlflowClient(f"sqlite:///{first.directory.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("of my own")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == first.directory.path.name
    history = client.get_metric_history(run.info.run_id, "eval/pass_4")
    assert [(each.step, each.value) for each in history] == [(s, 0.25) for s in (1, 2, 3, 4)]
    assert run.data.metrics["reward/mean/source_a.jsonl"] == 1.0
    summary = {name for name in run.data.metrics if name.startswith("summary/")}
    assert summary == {"summary/opd/reverse_kl"}
    assert run.data.params["temperature"] == "0.7"
    assert run.data.tags["alert.step_2"] == "policy 0 died: killed"
    shown = client.list_artifacts(run.info.run_id, "rollouts")[-1]
    assert shown.path == "rollouts/step_2.jsonl"


def test_wandb_gets_history_summary_and_alerts_in_the_project_of_its_variable(
    opd: NewOpd, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "my-project")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")  # its process may be slow to start: 30 s
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "300")
    run = Run(opd(wandb="offline"))
    run.steps(tokenizer, 1, 2)
    run.finish()
    assert not run.lines
    [written] = run.directory.path.glob("wandb/offline-run-*/run-*.wandb")
    records = all_wandb_records(written)
    [started] = [each.run for each in records if each.WhichOneof("record_type") == "run"][:1]
    assert (started.project, started.display_name) == ("my-project", run.directory.path.name)
    history = [each.history for each in records if each.WhichOneof("record_type") == "history"]
    names = {"/".join(item.nested_key) or item.key for row in history for item in row.item}
    assert {"opd/reverse_kl", "pool/policy", "restarts"} <= names
    assert any(name.startswith("rollouts") for name in names)
    summary = [each.summary for each in records if each.WhichOneof("record_type") == "summary"]
    assert any("eval after" in str(each) for each in summary)
    defined = [each.metric for each in records if each.WhichOneof("record_type") == "metric"]
    assert [each.summary.none for each in defined if each.glob_name == "*"] == [True]
    assert {each.name for each in defined if each.summary.last} == set(HEADLINES)
    alerts = [each.alert for each in records if each.WhichOneof("record_type") == "alert"]
    assert [each.text for each in alerts] == ["policy 0 died: killed"]


def all_wandb_records(path: Path) -> list[Any]:
    """Records up to the last, `exit`, which W&B's process may write after the run has ended."""

    def ended() -> bool:
        return any(each.WhichOneof("record_type") == "exit" for each in wandb_records(path))

    until(ended, failing=f"W&B wrote no end into {path}")
    return wandb_records(path)


def wandb_records(path: Path) -> list[Any]:
    """Records of W&B's file: a header of 7 bytes, then LevelDB's log format in 32 KiB blocks."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    data, at, whole, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # padding, too short for another header
            at += left
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # the record is not written yet
            break
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = messages.Record()
            record.ParseFromString(whole)
            records.append(record)
            whole = b""
    return records


def test_rollouts_of_repeated_steps_are_shown_again(
    opd: NewOpd, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner goes back to step 1, and keeps more steps than before."""
    shown: list[int] = []

    class Shown(Scripted):
        def show(self, rollouts: Any, step: int) -> None:
            shown.extend(each.step for each in rollouts)

        def finish(self, summary: dict[str, Any], exit_code: int) -> None: ...

    monkeypatch.setattr(
        "cluster.run_files.trackers.KINDS", {"mlflow": lambda _: Shown(lambda _: None)}
    )
    run = Run(opd(track="mlflow"))
    run.steps(tokenizer, 1, 3)
    KeptGroupWriter(run.directory.groups, 1).rewind(1)
    run.trackers.skip_kept()
    log, groups = KeptGroupWriter(run.directory.groups, 1), [a_group(tokenizer, 1000)]
    for step in range(2, 5):
        keep_step(log, step, groups, policy_rows(groups, ObjectiveConfig()))
    run.trackers.show_rollouts(tokenizer)
    run.finish()
    assert shown == [1, 1, 2, 2, 3, 3, 2, 2, 3, 3, 4, 4] and not run.lines
    resumed = Run(opd(track="mlflow"), 4)
    resumed.trackers.skip_kept()
    shown.clear()
    resumed.steps(tokenizer, 5, 5)
    resumed.finish()
    assert shown == [5, 5]


class Scripted:
    """A tracker that passes each call to a function of the test."""

    def __init__(self, call: Callable[[str], None]) -> None:
        self._call = call
        call("start")

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._call(f"log {step}")

    def show(self, rollouts: Any, step: int) -> None:
        self._call("show")

    def alert(self, text: str, step: int) -> None:
        self._call(f"alert {text}")

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        self._call(f"finish {summary['reason']}")


def scripted(
    opd: NewOpd, monkeypatch: pytest.MonkeyPatch, call: Callable[[str], None], end_s: float = 30
) -> list[str]:
    """Warnings of a run of three steps with such a tracker."""
    monkeypatch.setattr(
        "cluster.run_files.trackers.KINDS", {"mlflow": lambda _started: Scripted(call)}
    )
    config, lines = opd(track="mlflow"), []
    directory = RunDirectory(config)
    directory.path.mkdir(exist_ok=True)
    directory.start(None)
    trackers = Trackers(config.tracking, directory, {}, 0, lines.append, end_s)
    for step in (1, 2, 3):
        trackers.log({"step": step})
    directory.append_event("death", who="policy 0", why="no https://me:pass-word@host/ there")
    trackers.finish({"status": "failed", "reason": "no s3cr3t-s3cr3t there"}, 1)
    return lines


def test_a_long_text_is_searched_for_secrets() -> None:
    text = "?a" * 200_000 + "?" + "key" * 50_000  # in quadratic time, it would be hours
    assert redacted(f"{text}&token=abc") == f"{text}&token=***"


@pytest.mark.parametrize("at", ["start", "log 2", "finish"])
def test_a_failing_tracker_is_warned_of_once_without_secrets(
    opd: NewOpd, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-s3cr3t")
    heard: list[str] = []

    def call(what: str) -> None:
        heard.append(what)
        if what.startswith(at):
            raise OSError(
                "cannot reach http://me:pass-word@host:5/api?token=abc with s3cr3t-s3cr3t"
            )

    [line] = scripted(opd, monkeypatch, call)
    assert "mlflow" in line and "http://***@host:5/api" in line
    assert heard[-1].startswith(at)  # it is called no more
    assert not any(
        secret in text for text in (line, *heard) for secret in ("pass-word", "abc", "s3cr3t")
    )


@pytest.mark.parametrize("at", ["start", "log 2", "finish"])
def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(
    opd: NewOpd, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    released = threading.Event()

    def call(what: str) -> None:
        if what.startswith(at):
            released.wait(60)

    [line] = scripted(opd, monkeypatch, call, end_s=0.1)
    released.set()
    assert "mlflow" in line


def test_trackers_must_be_installed(opd: NewOpd, monkeypatch: pytest.MonkeyPatch) -> None:
    made = opd(track="wandb, tensorboard", wandb="offline").tracking
    assert made.trackers == ["wandb", "tensorboard"]
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError):
        check_trackers(opd(track="mlflow").tracking)
