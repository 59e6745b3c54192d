"""Replays of steps: bit-equal, under other settings, and with shares of the gradient."""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from cluster.inspect.replayed import attribute_gradient
from cluster.replay import StepReplay, main
from cluster.store.group_format import read_groups, write_groups
from cluster.store.kept_groups import KeptGroups, KeptGroupWriter
from cluster.store.replay_log import KeptSteps, ReplayLog, steps_in
from distill.errors import ConfigError
from distill.objective.rows import policy_rows
from distill.objective.settings import Normalisation, ObjectiveConfig
from distill.objective.whole_groups import LocalGroups
from distill.records import TrainedGroups
from distill.settings import changed
from distill.types import Segment, TopLogprobs, TrajectoryGroup
from learner.checkpoint import CheckpointStore
from learner.sharding import Fingerprints
from tests.conftest import TinyPair
from tests.e2e.harness import distil, opd_settings, train
from tests.refusals import refuses
from tests.rows import write_rows
from tests.samples import group, keep_step

Printed = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def out(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 7 steps with checkpoints after 3, 6 and 7 that keeps the last 4 steps."""
    path = tmp_path_factory.mktemp("replay") / "run"
    distil(
        tiny_pair, path, steps=7, prompts_per_step=3, max_new_tokens=5, eval_size=0,
        estimator="top_k", checkpoint_every=3, keep_last=1, keep=4,
    )  # fmt: skip
    return path


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """printed(*arguments): exit code, and all output on one line."""

    def run(*arguments: object) -> tuple[int, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, " ".join((captured.out + captured.err).split())

    return run


@pytest.mark.parametrize(("step", "start"), [(5, 3), (7, 6)])
def test_a_replayed_step_is_bit_equal(out: Path, printed: Printed, step: int, start: int) -> None:
    code, output = printed(f"out={out}", f"step={step}")
    assert code == 0, output
    assert f"(step {start})" in output and f"step {step} is bit-equal" in output


def test_steps_from_hidden_states_are_refused(
    tiny_pair: TinyPair, tmp_path: Path, printed: Printed
) -> None:
    distil(
        tiny_pair, tmp_path / "run", steps=1, prompts_per_step=2, group_size=1, max_new_tokens=3,
        eval_size=0, estimator="full", checkpoint_every=1, keep=1,
        **{"teacher.head": tiny_pair.teacher},
    )  # fmt: skip
    code, output = printed(f"out={tmp_path / 'run'}", "step=1")
    assert code == 2 and "teacher.head=" in output and "estimator=top_k" in output


@pytest.fixture
def sixth(out: Path) -> Iterator[Path]:
    """Files of step 6 without their suffix, which a test may change."""
    path = out / "groups" / "step-000006"
    files = [path.with_suffix(suffix) for suffix in (".arrow", ".json")]
    written = [file.read_bytes() for file in files]
    yield path
    for file, content in zip(files, written, strict=True):
        file.write_bytes(content)


def test_unreadable_groups_are_named(out: Path, sixth: Path, printed: Printed) -> None:
    path = sixth.with_suffix(".arrow")
    written = path.read_bytes()
    renamed = written.replace(b"first_action", b"FIRST_ACTION")
    assert renamed != written
    for damaged in (written[: len(written) // 2], b"", renamed):
        path.write_bytes(damaged)
        code, output = printed(f"out={out}", "step=6")
        assert code == 2 and path.name in output, output


def test_the_first_tensor_that_differs_is_named(out: Path, sixth: Path, printed: Printed) -> None:
    path = sixth.with_suffix(".json")
    outcome = json.loads(path.read_text())
    name = list(outcome["weights"])[2]
    outcome["weights"][name][0] += 1
    path.write_text(json.dumps(outcome))
    code, output = printed(f"out={out}", "step=6")
    assert code == 1 and f"weights of {name}" in output


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.001, 0), (1.1, 1)])
def test_steps_of_several_workers_may_differ_by_a_hundredth(
    out: Path, sixth: Path, printed: Printed, factor: float, code: int
) -> None:
    path = sixth.with_suffix(".json")
    outcome = json.loads(path.read_text()) | {"workers": 2}
    name = list(outcome["gradient"])[2]
    bits, norm = outcome["gradient"][name]
    outcome["gradient"][name] = [bits + (factor != 1.0), norm * factor]
    path.write_text(json.dumps(outcome))
    found, output = printed(f"out={out}", "step=6")
    assert found == code and (f"gradient of {name}" in output) == (code == 1), output


def test_a_step_that_was_not_finite_is_not_finite_again(
    out: Path, sixth: Path, printed: Printed
) -> None:
    groups = sixth.with_suffix(".arrow")
    kept = read_groups(groups, "")
    unlikely_P = [with_segments(group, unlikely) for group in kept.groups_P]
    write_groups(groups, unlikely_P, kept.note)
    sixth.with_suffix(".json").unlink()
    code, output = printed(f"out={out}", "step=6")
    assert code == 0 and "step 6 is not finite" in output, output


def with_segments(
    group: TrajectoryGroup, change: Callable[[Segment], Segment], **changes: Any
) -> TrajectoryGroup:
    """The group with each of its segments changed."""
    members = [
        replace(member, segments=tuple(map(change, member.segments)))
        for member in group.trajectories_G
    ]
    return replace(group, trajectories_G=tuple(members), **changes)


def unlikely(segment: Segment) -> Segment:
    """The segment with log-probs near minus infinity of the teacher's likeliest tokens."""
    top = segment.teacher_top
    assert top is not None
    never = TopLogprobs(ids_NK=top.ids_NK, logprobs_NK=np.full_like(top.logprobs_NK, -3e38))
    return replace(segment, teacher_top=never)


def test_a_disk_that_refuses_writes_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "groups").write_text("in the way")
    keep_steps(ReplayLog(tmp_path, 2), [1.0, 2.0])
    [warning] = caplog.records
    assert "step 1" in warning.getMessage()


def test_a_step_is_compared_with_one_of_other_settings(out: Path, printed: Printed) -> None:
    code, output = printed(f"out={out}", "step=5", "lr=1e-3", "loss=ppo", "estimator=sampled")
    assert code == 0, output
    assert "step 5 is bit-equal" in output
    assert "train/lr" in output and "0.001" in output and "0.003" in output
    assert "train/loss" in output and "staleness/mean" not in output, "equal metrics are left out"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("step=2", "4, 5, 6, 7"),  # not kept; these are
        ("los=ppo", "'loss'"),
        ("step=0", "step=0"),
        ("blame=x", "blame=x"),
        ("temperature=0.9", "sampling.temperature"),  # a replay samples nothing
        ("seed=3", "seed"),
    ],
)
def test_wrong_arguments_are_refused(out: Path, printed: Printed, given: str, named: str) -> None:
    code, output = printed(f"out={out}", "step=5", given)
    assert code == 2 and named in output
    assert printed("step=5")[0] == 2


def uneven(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with the second trajectory's segment added to the first trajectory."""
    first, second = group.trajectories_G
    longer = replace(first, segments=(*first.segments, *second.segments))
    return replace(group, trajectories_G=(longer, second))


def unscored(segment: Segment) -> Segment:
    return replace(segment, teacher_logprobs_T=None, teacher_logprobs_q1_T=None, teacher_top=None)


@pytest.mark.parametrize("by_teacher", [False, True], ids=["policy", "and-teacher"])
@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_shares_of_the_gradient_add_up(
    out: Path, tmp_path: Path, normalisation: Normalisation, by_teacher: bool
) -> None:
    replay = StepReplay(out, 4, Console(quiet=True))
    kept = KeptSteps(out)
    config = changed(replay.config, normalisation=normalisation)
    loop = replay.loop(config, kept.start_of(4), str(tmp_path))
    groups_P = [uneven(group) for group in kept.groups(4)]
    if by_teacher:
        groups_P[1] = with_segments(groups_P[1], unscored, by_teacher=True)
    found = attribute_gradient(loop, groups_P, lambda tokens_T: str(tokens_T.tolist()), 10**6)
    assert len(found["prompts"]) == 3 and len(found["responses"]) == 6
    for rows in (found["prompts"], found["responses"]):
        assert sum(row.share for row in rows) == pytest.approx(1, abs=1e-3)
        assert rows == sorted(rows, key=lambda row: -abs(row.share))
    [tokens] = [rows for title, rows in found.items() if title.startswith("tokens")]
    for response in found["responses"][:4]:
        of_it = [row.share for row in tokens if row.where.startswith(f"{response.where}, token ")]
        assert sum(of_it) == pytest.approx(response.share, abs=1e-3) and of_it


def test_groups_outside_the_report_have_no_links(
    out: Path, tmp_path: Path, printed: Printed
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(out, copy)
    remove_kept_groups(copy)
    code, output = printed(f"out={copy}", "step=4", "blame=2")
    assert code == 0, output
    assert "responses: share of the gradient" in output and "#step=" not in output


def remove_kept_groups(run: Path) -> None:
    for path in list((run / "groups").glob("kept-*.arrow")):
        path.unlink()


def test_shares_of_the_gradient_link_to_the_report(
    out: Path, tmp_path: Path, printed: Printed
) -> None:
    copy, groups_P = tmp_path / "run", KeptSteps(out).groups(7)
    shutil.copytree(out, copy)
    remove_kept_groups(copy)
    rows_D = policy_rows(groups_P, ObjectiveConfig(estimator="top_k"))
    keep_step(KeptGroupWriter(copy / "groups", 1, whole=True), 7, groups_P, rows_D)
    code, output = printed(f"out={copy}", "step=7", "blame=99")
    assert code == 0, output
    kept = KeptGroups(copy / "groups")
    broken_down = 0
    for shown, member in itertools.product([each.group for each in kept], range(2)):
        place = f"step=7&group={shown.group_id}&member={member}"
        assert f"#{place} group {shown.group_id}, trajectory {member}" in output
        sampled = sum(each.num_actions for each in shown.trajectories_G[member].segments)
        linked = [n for n in range(sampled + 1) if f"#{place}&token={n} " in output]
        # The responses with the largest shares are broken down into all of their tokens.
        assert linked in ([], list(range(sampled)))
        broken_down += bool(linked)
    assert len(kept) == 3 and broken_down == 4
    assert set(re.findall(r"#step=7&group=(\d+)", output)) == {
        str(each.group.group_id) for each in kept
    }


def save(store: CheckpointStore, step: int) -> None:
    def write(path: Path) -> None:
        (path / "file").write_text(str(step))

    store.save(step=step, write=write, delivery=TrainedGroups().to_json())


def take(log: ReplayLog, step: int) -> None:
    groups = [group(step)]
    log.taken(step, LocalGroups().taken(groups, set_aside={}), groups)


NO_PRINTS: Fingerprints = {"gradient": {}, "weights": {}}


def keep_steps(log: ReplayLog, norms: list[float]) -> None:
    for step, norm in enumerate(norms, 1):
        take(log, step)
        log.trained(step, {"train/grad_norm": norm}, NO_PRINTS, 1)


def test_the_newest_steps_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    save(store, 2)
    keep_steps(ReplayLog(tmp_path, 2), [1, 1, 1, 1])
    assert steps_in(tmp_path / "groups") == [3, 4]
    kept = KeptSteps(tmp_path)
    start = kept.start_of(4)
    assert start is not None and start.step == 2
    assert [each.group_id for each in kept.groups(4)] == [4]
    with refuses(ConfigError, "step", names="3, 4"):
        kept.start_of(5)


def test_checkpoints_stay_while_a_kept_step_starts_from_them(tmp_path: Path) -> None:
    for window, kept in ((0, [[3], [6], [9], [12]]), (3, [[3], [3, 6], [6, 9], [9, 12]])):
        store = CheckpointStore(tmp_path / f"{window}", keep=1, window=window)
        for step, there in zip((3, 6, 9, 12), kept, strict=True):
            save(store, step)
            assert [each.step for each in store.complete()] == there


def test_a_step_that_never_ended_stays(tmp_path: Path) -> None:
    log = ReplayLog(tmp_path, 1)
    take(log, 1)  # was not finite
    take(log, 2)
    log.trained(2, {}, NO_PRINTS, 1)
    take(log, 3)
    log.trained(3, {}, NO_PRINTS, 2)
    kept = KeptSteps(tmp_path)
    assert kept.steps == [1, 3] and kept.outcome(1) is None
    assert kept.outcome(3) == {
        "step": 3, "metrics": {}, "workers": 2, **NO_PRINTS
    }  # fmt: skip


def kept_run(tiny_pair: TinyPair, out: Path, **settings: object) -> dict[str, torch.Tensor]:
    """Run 3 steps; return the final weights."""
    small = {"steps": 3, "prompts_per_step": 2, "max_new_tokens": 4, "checkpoint_every": 1}
    distil(tiny_pair, out, **{"estimator": "top_k", **small, **settings})
    return load_file(out / "final" / "model.safetensors")


ROWS_OF_A = [{"prompt": f"{a} + 1 =", "teacher": "a"} for a in range(9)]


def test_a_learner_alone_trains_on_kept_rollouts_as_the_run_did(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    made = kept_run(tiny_pair, tmp_path / "made", keep=3)
    kept_run(tiny_pair, tmp_path / "alone", train_from=str(tmp_path / "made"), steps=2)
    assert not (tmp_path / "alone" / "ledger.jsonl").exists(), "there is no queue"
    alone = kept_run(tiny_pair, tmp_path / "alone", train_from=str(tmp_path / "made"))
    assert made.keys() == alone.keys()
    assert all(torch.equal(made[name], alone[name]) for name in made)
    other = kept_run(tiny_pair, tmp_path / "other", train_from=str(tmp_path / "made"), loss="ppo")
    assert not all(torch.equal(made[name], other[name]) for name in made)
    mistakes: dict[str, dict[str, Any]] = {
        "steps": {"steps": 4}, "sampling.temperature": {"temperature": 0.8},
        "train_from": {"train_from": str(tmp_path)},
        "objective.reference_kl_coef": {
            "reference_kl_coef": 0.1, "reference": tiny_pair.student
        },
        "teacher.model": {
            "teacher": None, "teachers": {"a": {"model": tiny_pair.teacher}},
            "prompts": write_rows(tmp_path / "a.jsonl", *ROWS_OF_A),
        },
    }  # fmt: skip
    for field, wrong in mistakes.items():
        with refuses(ConfigError, field):
            kept_run(tiny_pair, tmp_path / "new", **{"train_from": str(tmp_path / "made"), **wrong})
    shutil.copytree(tmp_path / "made", moved := tmp_path / "moved")
    *_, last = sorted(moved.glob("groups/step-*.arrow"))
    written = read_groups(last, "")
    write_groups(last, [replace(each, teacher="b") for each in written.groups_P], written.note)
    with refuses(ConfigError, "teachers.b.model"):
        kept_run(tiny_pair, tmp_path / "new", train_from=str(moved))
    assert not (tmp_path / "new").exists()
    kept_run(tiny_pair, tmp_path / "new", train_from=str(moved), steps=1)
    last.with_name("step-000001.arrow").unlink()  # the other run continued and dropped old steps
    with refuses(ConfigError, "train_from"):
        kept_run(tiny_pair, tmp_path / "new", train_from=str(moved), steps=2)


@pytest.mark.parametrize("estimator", ["sampled", "top_k"])
def test_groups_without_the_scores_that_the_objective_reads_are_refused(
    tiny_pair: TinyPair, tmp_path: Path, estimator: str
) -> None:
    out = str(tmp_path / "made")
    rewards: dict[str, Any] = {"teacher": None, "estimator": None, "steps": 1, "keep": 1}
    given = opd_settings(tiny_pair, checkpoint_every=1, local=True) | rewards
    train("rl", tmp_path / "made", **{name: v for name, v in given.items() if v is not None})
    with refuses(ConfigError, "objective.estimator"):
        distil(tiny_pair, tmp_path / "new", train_from=out, steps=1, estimator=estimator)
    assert not (tmp_path / "new").exists()
    distil(tiny_pair, tmp_path / "new", train_from=out, steps=1, estimator="full")


@pytest.mark.parametrize(
    ("top_k_from", "changes"),
    [("student", {"teacher_top_k": 2}), ("union", {"top_k_from": "teacher"})],
)
def test_groups_scored_at_other_tokens_are_refused(
    tiny_pair: TinyPair, tmp_path: Path, top_k_from: str, changes: dict[str, Any]
) -> None:
    shape: dict[str, Any] = {
        "estimator": "top_k", "teacher_top_k": 3, "top_k_from": top_k_from, "steps": 1,
        "checkpoint_every": 1,
    }  # fmt: skip
    distil(tiny_pair, tmp_path / "made", keep=1, **shape)
    kept = shape | {"train_from": str(tmp_path / "made")}
    with refuses(ConfigError, "objective.teacher_top_k"):
        distil(tiny_pair, tmp_path / "new", **kept | changes)
    distil(tiny_pair, tmp_path / "new", **kept)
