"""rollout_only=True: groups are sampled, scored and kept; nothing is trained.

Training on kept groups is in test_replay.py.
"""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import cluster.run
import distill.durable_files
from cluster.base.outcomes import Interrupted, error_text
from cluster.config.opd import OpdConfig
from cluster.config.recipes import make
from cluster.hosts import group_recorder
from cluster.inspect.audit import audit
from cluster.placement.roles import LEARNER, POLICY, ROLLOUT, model_paths, placed_roles
from cluster.recipes.context import Observer
from cluster.replay import main as replay
from cluster.runtime.driver import Signals
from cluster.store.kept_groups import KeptGroups
from cluster.store.replay_log import KeptSteps
from distill.errors import CheckpointError
from distill.types import TrajectoryGroup
from tests.conftest import TinyPair
from tests.e2e.harness import metrics, opd_settings

Settings = Callable[..., OpdConfig]


@pytest.fixture(scope="module")
def settings(tiny_pair: TinyPair) -> Settings:
    """settings(out, **changes): three steps of a tiny run in this process that keeps groups."""

    def new(out: Path, **changes: object) -> OpdConfig:
        small = {
            "steps": 3, "prompts_per_step": 2, "max_new_tokens": 4, "estimator": "top_k",
            "checkpoint_every": 10, "local": True, "max_staleness": 0, "rollout_only": True,
            "keep": "all",
        }  # fmt: skip
        return make("opd", **opd_settings(tiny_pair, **small | {"out": str(out)} | changes))

    return new


@pytest.fixture(scope="module")
def out(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keeping") / "run"
    run(settings(path))
    return path


def run(config: OpdConfig, observer: Observer | None = None) -> None:
    cluster.run.run(config, Console(quiet=True), observer)


def kept(out: Path) -> list[TrajectoryGroup]:
    steps = KeptSteps(out)
    return [group for step in steps.steps for group in steps.groups(step)]


def test_groups_are_kept_whole_and_no_weights_are_written(out: Path) -> None:
    groups = kept(out)
    assert [group.group_id for group in groups] == list(range(6))
    for segment in (s for group in groups for s in group.segments()):
        assert segment.teacher_logprobs_T is not None and segment.teacher_top is not None
        assert set(segment.versions_T[segment.action_mask_T]) == {0}
    for name in ("checkpoints", "final", "adapter", "weights", "failed"):
        assert not (out / name).exists(), name
    assert not list(out.rglob("*.safetensors")) and not list(out.rglob("*.pt"))
    steps = metrics(out)
    assert [step["step"] for step in steps] == [1, 2, 3]
    lengths = [
        sum(segment.num_actions for segment in member.segments)
        for group in groups
        for member in group.trajectories_G
    ]
    assert np.mean([s["rollout/response_length"] for s in steps]) == pytest.approx(np.mean(lengths))
    assert all(s["staleness/max"] == 0 and "reward/mean" in s for s in steps)
    assert not any(name.startswith(("train/", "push/", "eval/")) for s in steps for name in s)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["kept"] == str(out / "groups")
    assert summary["rollout_tokens"] == sum(lengths)
    calibration = json.loads((out / "calibration.json").read_text())
    assert calibration["agrees"] and calibration["learner"] == "none: rollout_only=True"
    assert not any("learner" in c["reference"] for c in calibration["comparisons"])


def test_rollouts_and_audit_read_the_run_and_a_replay_is_refused(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = KeptGroups(out / "groups")
    assert [(g.step, g.group.group_id, g.version) for g in shown] == [
        (1, 0, 0), (1, 1, 0), (2, 2, 0), (2, 3, 0), (3, 4, 0), (3, 5, 0),
    ]  # fmt: skip
    found = audit(out / "ledger.jsonl", steps=3)
    assert found.problems == [] and found.trained == 6 and found.ended
    assert replay([f"out={out}", "step=2"]) == 2
    assert f"train_from={out}" in capsys.readouterr().err


def test_the_first_step_samples_and_scores_as_a_run_that_trains(
    out: Path, settings: Settings, tmp_path: Path
) -> None:
    trained = tmp_path / "trained"
    run(settings(trained, rollout_only=False, steps=1, keep=10, eval_size=2))
    for ours, theirs in zip(kept(out), kept(trained), strict=False):
        for mine, its in zip(ours.segments(), theirs.segments(), strict=True):
            assert np.array_equal(mine.tokens_T, its.tokens_T)
            assert mine.teacher_logprobs_T is not None and its.teacher_logprobs_T is not None
            np.testing.assert_allclose(mine.teacher_logprobs_T, its.teacher_logprobs_T, atol=1e-4)


@pytest.mark.parametrize("ends", ["has room again", "signal", "bad disk"])
def test_a_full_disk_is_waited_for(
    out: Path, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(distill.durable_files, "PAUSE_S", 0.0)
    write_step, signals, tries = group_recorder.write_step, Signals(), []

    def write(root: Path, step: int, *arguments: Any) -> None:
        if step == 2:
            tries.append(step)
            if ends == "signal" and len(tries) == 2:
                signals.received = signal.SIGTERM
            if ends != "has room again" or len(tries) < 4:
                number = errno.EIO if ends == "bad disk" else errno.ENOSPC
                raise OSError(number, os.strerror(number))
        write_step(root, step, *arguments)

    monkeypatch.setattr(group_recorder, "write_step", write)
    again, observer = settings(tmp_path / "run"), Observer(signals=signals)
    if ends == "has room again":
        run(again, observer)
        assert len(tries) == 4 and len(kept(tmp_path / "run")) == len(kept(out))
        return
    with pytest.raises(Interrupted if ends == "signal" else CheckpointError):
        run(again, observer)
    assert KeptSteps(tmp_path / "run").steps == [1]
    assert len(tries) == 1 or ends == "signal"
    monkeypatch.undo()
    run(again)
    assert len(kept(tmp_path / "run")) == len(kept(out))


def test_marked_steps_survive_an_interrupt_and_a_death(settings: Settings, tmp_path: Path) -> None:
    config = settings(tmp_path / "run", steps=5)
    signals = Signals()

    def after_two(line: object) -> None:
        if len(metrics(tmp_path / "run")) == 2:
            signals.received = 2

    with pytest.raises(Interrupted) as end:
        run(config, Observer(line=after_two, signals=signals))
    assert end.value.exit_code == 130
    assert "out/groups" in error_text(end.value)
    before = KeptSteps(tmp_path / "run").steps
    first = kept(tmp_path / "run")
    assert before[:2] == [1, 2] and len(before) < 5
    # As after a death between the write of a step's groups and of its mark.
    marks = sorted((tmp_path / "run" / "kept").glob("step-*"))
    shutil.rmtree(marks[-1])
    assert KeptSteps(tmp_path / "run").steps == before[:-1]
    run(config)
    assert KeptSteps(tmp_path / "run").steps == [1, 2, 3, 4, 5]
    groups = kept(tmp_path / "run")
    assert [group.group_id for group in groups] == list(range(10))
    for was, now in zip(first[: 2 * len(before) - 2], groups, strict=False):
        assert all(
            np.array_equal(a.behaviour_logprobs_T, b.behaviour_logprobs_T)
            for a, b in zip(was.segments(), now.segments(), strict=True)
        ), "a marked step was made again"
    found = audit(tmp_path / "run" / "ledger.jsonl", steps=5)
    assert found.problems == [] and found.jobs == 2


def test_no_learner_is_placed(settings: Settings, tmp_path: Path) -> None:
    config = settings(
        tmp_path, engine="sglang", local=False, learner_workers=2, colocate="sleep",
        gpus_per_actor=0.5,
    )  # fmt: skip
    assert [role.name for role in placed_roles(config)] == [POLICY, "teacher", ROLLOUT]
    assert LEARNER not in model_paths(config) and not config.engines_sleep
