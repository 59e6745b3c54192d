"""A run's directory: of one run, resumable, locked by one process, with checked records."""

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import chz
import pytest

from cluster.config.opd import OpdConfig
from cluster.config.recipes import make
from cluster.config.rows import digests_of
from cluster.config.supervised import SftConfig
from cluster.recipes.opening import opened
from cluster.run_files import out_directory
from cluster.run_files.out_directory import claimed_directory
from cluster.run_files.run_directory import RunDirectory
from distill.data.row_conversion import LongRows
from distill.data.row_reader import RowReader
from distill.envs.tool_use import ToolUse
from distill.errors import CheckpointError, ConfigError, DataError
from distill.settings import MAY_CHANGE as MAY_CHANGE_FLAG
from distill.settings import flagged, path_of
from distill.stops import StopTokens
from learner.checkpoint import Checkpoint, CheckpointStore
from tests.full_disk import files_of_at_most
from tests.refusals import refuses
from tests.waiting import DEADLINE_S

NewOpd = Callable[..., OpdConfig]
# Settings on which nothing that a step computes depends.
MAY_CHANGE = {
    "checkpoint.every", "checkpoint.keep_best", "checkpoint.keep_every", "checkpoint.keep_last",
    "cluster.colocate", "cluster.device", "cluster.gpu_memory_gib", "cluster.gpus_per_actor",
    "cluster.local", "cluster.no_progress_s", "cluster.start_deadline_s", "cluster.threads",
    "dry_run", "eval.engines", "eval.every", "keep", "learner.compile",
    "learner.gradient_checkpointing", "learner.liger", "learner.offload_optimizer",
    "learner.packing", "learner.replicas", "learner.router_aux_coef", "learner.routing_replay",
    "learner.token_budget", "learner.trace_step", "learner.workers", "out", "policy.engines",
    "policy.server_flags", "queue.lease_s", "reward.timeout_s", "rollout.cpus",
    "rollout.smoke_test", "rollout.workers", "steps", "teacher.engines", "teacher.gpus",
    "teacher.server_flags", "tracking.notify", "tracking.track", "tracking.wandb",
    "verify.every", "weights.transport",
}  # fmt: skip
SAMPLES = {"teacher.sft_steps": 1, "teacher.samples_from": "m@http://a:1"}


def sft(out: str) -> SftConfig:
    return make("sft", model="m", data="d", out=out)


def started(config: OpdConfig, resume_from: Checkpoint | None = None, **given: Any) -> RunDirectory:
    directory = RunDirectory(config, **given)
    with directory.locked():
        directory.start(resume_from)
    return directory


def trained(config: OpdConfig, **given: Any) -> RunDirectory:
    """Directory of a run that has trained a step, without a checkpoint."""
    directory = started(config, **given)
    directory.append_metrics({"step": 1})
    return directory


def save(directory: RunDirectory, model_dir: str, step: int) -> Checkpoint:
    def write(path: Path) -> None:
        shutil.copytree(model_dir, path / "model")
        (path / "trainer.json").write_bytes(b"state")

    return directory.store.save(
        step=step, write=write, delivery={"watermark": step, "set_aside": {}}
    )


def test_a_start_records_settings_and_versions(opd: NewOpd) -> None:
    config = opd(temperature=1.5)
    directory = RunDirectory(config)
    assert directory.check() is None
    assert not directory.path.exists()  # a check writes nothing
    started(config)
    written = json.loads((directory.path / "config.json").read_text())
    assert written["recipe"] == "opd"
    env = chz.asdict(config.env) | {"__chz_type__": "distill.envs.single_turn:SingleTurn"}
    objective = chz.asdict(config.objective)
    del objective["constant_groups"]  # rl has it
    assert written["settings"] == chz.asdict(config) | {"env": env, "objective": objective}
    assert {"ray", "torch", "transformers"} <= written["versions"].keys()
    assert directory.check() is None  # started, nothing saved yet: start over


@pytest.mark.parametrize(("saved", "left"), [(None, []), (0, []), (1, [0, 1])])
def test_a_start_drops_evaluations_that_will_be_made_again(
    opd: NewOpd, saved: int | None, left: list[int]
) -> None:
    """An attempt without steps evaluates again; a fork has a checkpoint of step 0."""
    directory = started(opd())
    checkpoint = None if saved is None else save(directory, opd().model.path, saved)
    (directory.path / "evaluations.jsonl").write_text('{"step": "no number"}\n')
    for step in (0, 1, 2):
        directory.append_metrics({"step": step, "eval/accuracy": 0.5})
        directory.append_evaluation(step, "teacher", [])
    again = started(opd(), checkpoint)
    assert [line["step"] for line in again.read_metrics()] == left
    evaluations = (again.path / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == left


def test_a_return_to_the_newest_step_writes_nothing(opd: NewOpd) -> None:
    directory = started(opd())
    for step in (1, 2):
        directory.append_metrics({"step": step, "time/step": 1.0, "eval/accuracy": 0.5})
        directory.append_evaluation(step, f"step {step}", [])
    with files_of_at_most(0):  # a full disk
        directory.rewind_metrics(2)
        with pytest.raises(CheckpointError):
            directory.rewind_metrics(1)
    assert [line["step"] for line in directory.read_metrics()] == [1, 2]


def test_responses_whose_metrics_a_kill_has_prevented_are_not_kept(opd: NewOpd) -> None:
    directory = started(opd())
    checkpoint = save(directory, opd().model.path, 2)
    directory.append_evaluation(1, "step 1", [])
    directory.append_metrics({"step": 1, "time/step": 1.0, "eval/accuracy": 0.5})
    directory.append_metrics({"step": 2, "time/step": 1.0})
    directory.append_evaluation(2, "after", [])
    again = started(opd(), checkpoint)
    evaluations = (again.path / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [1]


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({}, "lr", 0.5),
        ({}, "teacher.model", "other"),
        ({}, "fork_from", "other"),
        ({}, "rollout_only", True),
        ({}, "env", ToolUse()),
        ({}, "columns", {"prompt": "question"}),
        ({"loss": "ppo", "clip": (0.2, 0.28)}, "clip", (0.2, 0.3)),
        ({"estimator": "full"}, "teacher.head", "other"),
        ({"teacher": None, "teachers": {"a": {"model": "m"}}}, "teachers",
         {"a": {"model": "m", "weight": 2.0}}),
        (SAMPLES, "teacher.samples_from", "n@http://a:1"),
    ],
    ids=str,
)  # fmt: skip
def test_another_run_is_refused_and_the_setting_named(
    opd: NewOpd, given: dict[str, Any], name: str, value: object
) -> None:
    trained(opd(**given))
    with refuses(ConfigError, path_of(OpdConfig, name)):
        RunDirectory(opd(**given | {name: value})).check()


def test_another_recipe_and_other_stop_tokens_are_refused(opd: NewOpd) -> None:
    ends, more = StopTokens(ids=(1,)), StopTokens(ids=(1, 2), one_event=True)
    trained(opd(), stops=ends)
    assert RunDirectory(opd(), stops=ends).check() is None
    with refuses(ConfigError, "model.stop_tokens"):
        RunDirectory(opd(), stops=more).check()
    with refuses(ConfigError, "recipe"):
        RunDirectory(sft(opd().out)).check()


def test_settings_that_no_step_depends_on_may_change(opd: NewOpd) -> None:
    assert flagged(OpdConfig, MAY_CHANGE_FLAG) == MAY_CHANGE
    trained(opd(**SAMPLES))
    changes = {"steps": 7, "keep": "all", "device": "cpu", "policy.engines": 2, "compile": True}
    moved = SAMPLES | {"teacher.samples_from": "m@https://b:2/v1"}
    assert RunDirectory(opd(**moved | changes)).check() is None


def test_a_run_with_settings_of_other_names_is_refused(opd: NewOpd) -> None:
    path = trained(opd()).path / "config.json"
    written = json.loads(path.read_text())
    written["settings"]["checkpoint_every"] = written["settings"].pop("checkpoint")["every"]
    path.write_text(json.dumps(written))
    with refuses(ConfigError, "out", names="checkpoint_every"):
        RunDirectory(opd()).check()


def with_file(opd: NewOpd, tmp_path: Path, text: str, name: str = "rows.jsonl") -> OpdConfig:
    (tmp_path / name).write_text(text)
    return opd(prompts=str(tmp_path / name))


def check(config: OpdConfig) -> Checkpoint | None:
    return RunDirectory(
        config, digests_of(config, {"data.source": RowReader()}, LongRows())
    ).check()


def test_files_of_rows_may_move_and_not_change(opd: NewOpd, tmp_path: Path) -> None:
    config = with_file(opd, tmp_path, '{"prompt": "1"}\n')
    directory = trained(
        config, digests=digests_of(config, {"data.source": RowReader()}, LongRows())
    )
    assert check(config) is None
    was = hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()
    assert json.loads((directory.path / "config.json").read_text())["data"]["data.source"] == was

    moved = with_file(opd, tmp_path, '{"prompt": "1"}\n', "moved.jsonl")
    assert check(moved) is None
    other = with_file(opd, tmp_path, '{"prompt": "2"}\n', "other.jsonl")
    with refuses(ConfigError, "data.source"):
        check(other)

    edited = with_file(opd, tmp_path, '{"prompt": "1"}\n{"prompt": "2"}\n')
    now = hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()
    with refuses(ConfigError, "data.source", names=now):
        check(edited)


def start_line(run_id: str, **changes: object) -> str:
    ledger = {"groups_per_step": 2, "max_staleness": 0, "total_groups": 8, "lease_s": 9.0}
    start = {"t": 1.0, "event": "start", "run": "q", "run_id": run_id, "epoch": 1, "watermark": 0}
    return json.dumps(start | {"set_aside": {}, "settings": ledger} | changes) + "\n"


PUT = '{"t": 1.0, "event": "put", "id": 0, "attempt": 1, "worker": "a", "epoch": 1}\n'


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("metrics.jsonl", 'x\n{"step": 1}\n', "metrics.jsonl:1"),
        ("metrics.jsonl", '{"step": "1"}\n', "metrics.jsonl"),
        ("metrics.jsonl", "[" * 100_000 + "\n", "metrics.jsonl:1"),
        ("events.jsonl", '{"t": 1.0}\n{}\n', "events.jsonl:1"),
        ("ledger.jsonl", start_line("r") + "x\n" + PUT, "line 2"),
        ("ledger.jsonl", start_line("r") + PUT * 2, "line 2"),
        ("ledger.jsonl", start_line("r", settings=3), "line 1"),
        ("ledger.jsonl", "\0" * 4096 + "\n", "line 1"),
    ],
)
def test_damaged_lines_are_refused_with_file_and_line(
    opd: NewOpd, name: str, text: str, line: str
) -> None:
    directory = started(opd())
    (directory.path / name).write_text(text)
    with refuses(DataError, None, names=line):
        directory.check()


@pytest.mark.parametrize("line", [b'{"t": 1.0, "ev', b'{"step": "\xc3'])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "evaluations.jsonl", "events.jsonl", "ledger.jsonl"]
)
def test_a_cut_last_line_is_accepted(opd: NewOpd, name: str, line: bytes) -> None:
    directory = started(opd())
    (directory.path / name).write_bytes(line)
    assert directory.check() is None
    assert started(opd()).read_metrics() == []


def test_the_ledger_of_another_run_is_refused(opd: NewOpd) -> None:
    config = opd()
    directory = started(config)
    directory.ledger.write_text(start_line("another"))
    assert directory.check() is None  # nothing was saved: the run starts over with a new id
    checkpoint = save(directory, config.model.path, 2)
    with pytest.raises(ConfigError):
        directory.check()
    directory.ledger.write_text(start_line(directory.run_id))
    assert directory.check() == checkpoint


@pytest.mark.parametrize("changes", [{"lr": 0.5}, {"temperature": 0.8}, {"fork_from": "other"}])
@pytest.mark.parametrize("of_a_fork", [False, True])
def test_an_attempt_without_steps_is_replaced_by_other_settings(
    opd: NewOpd, changes: dict, of_a_fork: bool
) -> None:
    first = started(opd())
    was = first.run_id
    first.append_metrics({"step": 0, "eval/accuracy": 0.5})
    begin = save(first, opd().model.path, 0) if of_a_fork else None
    assert RunDirectory(opd()).check() == begin
    scores = first.reference_scores("reference")
    scores.touch()
    started(opd())
    assert scores.exists()
    lines: list[str] = []
    assert RunDirectory(opd(**changes)).check(lines.append) is None
    assert len(lines) == 1
    assert RunDirectory(sft(opd().out)).check() is None
    second = started(opd(**changes))
    assert second.run_id != was and second.read_metrics() == [] and not scores.exists()
    assert not second.store.complete()  # the weights of the fork are set aside
    assert RunDirectory(opd(**changes)).check(lines.append) is None
    assert len(lines) == 1


@pytest.mark.parametrize("at", [(RunDirectory, "write_json"), (CheckpointStore, "set_aside_after")])
def test_a_death_while_settings_are_replaced_leaves_no_checkpoint(
    opd: NewOpd, monkeypatch: pytest.MonkeyPatch, at: tuple[type, str]
) -> None:
    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    first, other = opd(fork_from="one"), opd(fork_from="another")
    save(started(first), first.model.path, 0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(*at, dies)
        started(other)
    assert RunDirectory(other).check() is None


@pytest.mark.parametrize("keeps", [False, True])
def test_a_damaged_checkpoint_still_refuses_other_settings(opd: NewOpd, keeps: bool) -> None:
    directory = started(opd(rollout_only=keeps))
    save(directory, opd().model.path, 2).path.joinpath("manifest.json").unlink()
    with refuses(ConfigError, "rollout_only"):
        RunDirectory(opd(rollout_only=not keeps)).check()


def test_places_with_other_files_are_refused(opd: NewOpd, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with refuses(ConfigError, "out"):
        RunDirectory(opd(out=str(tmp_path / "file"))).check()
    with refuses(ConfigError, "out"):
        RunDirectory(opd(out=str(tmp_path))).check()
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "file").rename(tmp_path / ".config.json.partial")  # of a run that was killed
    assert RunDirectory(opd(out=str(tmp_path))).check() is None
    (started(opd()).path / "checkpoints").write_text("")  # a file in a directory's place
    with refuses(ConfigError, "out"):
        RunDirectory(opd()).check()


def refusal(config: OpdConfig, answer: Connection) -> None:
    """Check in a child process without root's permissions."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        RunDirectory(config).check()
        answer.send("nothing")
    except ConfigError as error:
        answer.send(str(error))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", ["checkpoints", "final", "adapter", "failed", "metrics.jsonl"])
def test_a_directory_without_permission_is_refused(opd: NewOpd, name: str) -> None:
    out = Path(tempfile.mkdtemp())  # pytest's directories are closed to other users
    try:
        config = opd(out=str(out))
        directory = started(config)
        directory.append_metrics({"step": 1})
        for path in (out, *out.iterdir()):
            path.chmod(0o777)
        if name != "metrics.jsonl":
            (out / name).mkdir()
        (out / name).chmod(0o555)
        answer, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=refusal, args=(config, theirs))
        child.start()
        theirs.close()
        assert answer.poll(DEADLINE_S)
        problem = answer.recv()
        child.join()
        assert problem.startswith(f"out={out}") and str(out / name) in problem
    finally:
        shutil.rmtree(out)


def test_a_damaged_checkpoint_is_skipped_and_set_aside(opd: NewOpd) -> None:
    config = opd()
    directory = started(config)
    older, newest = (save(directory, config.model.path, step) for step in (2, 4))
    (newest.path / "trainer.json").write_bytes(b"stute")
    lines: list[str] = []
    assert RunDirectory(config).check(lines.append) == older
    assert newest.path.is_dir()  # a check writes nothing
    assert "step-000004" in lines[0] and "trainer.json" in lines[0]
    started(config, older)
    assert sorted(path.name for path in directory.store.root.iterdir()) == [
        "step-000002", "step-000004.damaged",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"recipe": "opd"}', "[" * 100_000])
def test_an_unreadable_record_is_refused(opd: NewOpd, text: str) -> None:
    directory = started(opd())
    (directory.path / "config.json").write_text(text)
    with pytest.raises(CheckpointError):
        directory.check()


def test_metrics_after_the_checkpoint_are_dropped_on_resuming(opd: NewOpd) -> None:
    config = opd()
    directory = started(config)
    for step in (1, 2, 3, 4):
        directory.append_metrics({"step": step, "train/loss": step / 8})
    with (directory.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/lo')  # the crash
    checkpoint = save(directory, config.model.path, 2)
    resumed = started(config, checkpoint)
    kept = [{"step": 1, "train/loss": 0.125}, {"step": 2, "train/loss": 0.25}]
    assert resumed.read_metrics() == kept
    resumed.append_metrics({"step": 3, "train/loss": 9.0})
    assert resumed.read_metrics() == [*kept, {"step": 3, "train/loss": 9.0}]
    assert started(config).read_metrics() == []  # nothing saved: from the beginning


def test_two_runs_never_share_a_directory(opd: NewOpd) -> None:
    ours, theirs = RunDirectory(opd()), RunDirectory(opd())
    with ours.locked():
        assert theirs.check() is None
        with pytest.raises(ConfigError), theirs.locked():
            pass
    with theirs.locked():
        pass
    assert not ours.path.exists()  # it was made for the lock alone


# Checks a directory in children that die at their first call that opens or changes a file, at their
# second one, and so on. Prints how many died, until one lives.
_CHECKED = """
import os, sys
from pathlib import Path
from cluster.run_files.out_directory import check_out
left = None

def die_in_time(event, arguments):
    global left
    if left is not None and event.startswith(("open", "os.", "shutil.", "tempfile.")):
        left -= 1
        if left < 0:
            os._exit(9)

sys.addaudithook(die_in_time)
for calls in range(100):
    if not (child := os.fork()):
        left = calls
        check_out(Path(sys.argv[1]))
        left = None
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print(calls)
        break
"""


def test_a_kill_during_the_check_of_a_directory_leaves_nothing(tmp_path: Path) -> None:
    died = subprocess.check_output([sys.executable, "-c", _CHECKED, tmp_path], timeout=DEADLINE_S)
    assert int(died) > 0
    assert not list(tmp_path.iterdir())


def test_a_second_job_waits_and_resumes_from_the_last_checkpoint_of_the_first(
    opd: NewOpd, tmp_path: Path
) -> None:
    """As a requeued job that starts while the first one still saves."""
    config = opd()
    lines: list[str] = []
    resumed: list[Checkpoint | None] = []

    def second() -> None:
        directory = RunDirectory(opd())
        with opened(opd(), directory, print_line) as checkpoint:
            directory.start(checkpoint)
            resumed.append(checkpoint)

    waiting = threading.Event()

    def print_line(text: str) -> None:
        lines.append(text)
        waiting.set()

    for last in (2, 4):  # before the first checkpoint, and after
        first = RunDirectory(config)
        waiting.clear()
        with opened(config, first, print_line) as found:
            if found is None:
                first.start(None)
            job = threading.Thread(target=second)
            job.start()
            assert waiting.wait(DEADLINE_S)
            first.append_metrics({"step": last})
            newest = save(first, config.model.path, last)
        job.join(DEADLINE_S)
        assert resumed[-1] == newest
        assert not list(first.store.root.glob("*.damaged"))
        assert [line["step"] for line in first.read_metrics()][-1] == last
    assert all(str(os.getpid()) in line for line in lines) and len(lines) == 2


def test_a_command_empties_only_directories_that_it_made(tmp_path: Path) -> None:
    place = tmp_path / "shown"
    for keep, kept in ((False, []), (True, ["data", "prompts"]), (False, [])):
        with claimed_directory(place, "demo", print, keep=keep) as path:
            assert path == place
            assert sorted(each.name for each in path.iterdir() if each.name[0] != ".") == kept
            (path / "data").mkdir(exist_ok=True)
            (path / "prompts").touch()
    with refuses(ConfigError, "out"), claimed_directory(place, "show", print):
        pass
    with refuses(ConfigError, "out"), claimed_directory(place / "prompts", "demo", print):
        pass
    assert (place / "prompts").exists() and not (place / ".isotherm-show").exists()


def test_the_directory_of_a_command_is_locked_and_a_run_s_is_never_emptied(
    opd: NewOpd, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(opd())

    def begin(_: str) -> None:
        """In place of the wait for the process that holds the directory."""
        run.start(None)
        held.close()

    with ExitStack() as held:
        held.enter_context(run.locked())
        with refuses(ConfigError, "out"), claimed_directory(run.path, "demo", begin):
            pass
    assert (run.path / "config.json").exists()
    place = run.path.with_name("demo")
    with claimed_directory(place, "demo", print):
        monkeypatch.setattr(out_directory, "OTHER_JOB_S", 0.0)
        with refuses(ConfigError, "out"), claimed_directory(place, "demo", print):
            pass


@pytest.mark.parametrize("name", ["config.json", "summary.json", "calibration.json"])
def test_a_file_that_cannot_be_written_is_named(opd: NewOpd, name: str) -> None:
    directory = started(opd())
    with files_of_at_most(0), refuses(CheckpointError, None, names=name):
        directory.write_json(name, {})
    assert not list(directory.path.glob(".*.partial"))


def test_lines_that_wait_for_space_on_the_disk_are_read_and_written_later(opd: NewOpd) -> None:
    directory = RunDirectory(opd())
    with directory.locked():
        directory.start(None)
        with files_of_at_most(64):
            for step in range(1, 9):
                directory.append_metrics({"step": step, "time/step": 0.1})
                directory.append_event("passed", step=step)
        assert len(directory.path.joinpath("metrics.jsonl").read_text().splitlines()) < 8
        assert [line["step"] for line in directory.read_steps()] == list(range(1, 9))
    for name in ("metrics.jsonl", "events.jsonl"):
        lines = directory.path.joinpath(name).read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
