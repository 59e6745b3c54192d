"""The audit proves a correct journal, and names each error in a wrong one.

Errors come in two kinds: edited journals whose links are right, which only the contents reveal, and
lines that were deleted, repeated or moved, which break the links.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from cluster.inspect.audit import Audit, AuditConfig, audit, main, print_audit
from cluster.queue.journal import Journal, broken_links, read_journal, replay
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_types import LedgerSettings
from distill.errors import ConfigError, DataError
from distill.records import Lease, TrainedGroups
from learner.checkpoint import CheckpointStore
from tests.refusals import refuses
from tests.rows import read_rows, write_rows

SETTINGS = {
    "groups_per_step": 2, "max_staleness": 1, "total_groups": 8, "lease_s": 60.0, "max_failures": 1,
    "max_deaths": 2,
}  # fmt: skip


class Run:
    """A run's ledger and journal, with one worker that delivers groups in order."""

    def __init__(
        self,
        path: Path,
        run: str = "r",
        trained: TrainedGroups | None = None,
        settings: Mapping[str, Any] = SETTINGS,
    ) -> None:
        self.trained = trained or TrainedGroups()
        epoch = replay(path).epoch + 1
        self.journal = Journal(path)
        self.journal.record(
            "start", run=run, run_id="isotherm", epoch=epoch, settings=settings,
            **self.trained.to_json(),
        )  # fmt: skip
        self.ledger = Ledger(
            LedgerSettings(**settings), self.trained, epoch=epoch, record=self.journal.record
        )

    def make(self) -> list[Lease]:
        leases = self.ledger.lease("a", 9)
        for one in leases:
            self.ledger.deliver(one, "a")
        return leases

    def step(self, version: int, *, beside: bool = False) -> None:
        """Train a step; with `beside` its push has not arrived when this returns."""
        self.make()
        step = self.ledger.take(self.trained)
        assert step is not None
        self.trained = step.after(self.trained)
        (self.ledger.push if beside else self.ledger.publish)(version, self.trained)


def rewrite(path: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Replace the journal by one with these events and right links."""
    path.unlink()
    journal = Journal(path)
    for event in events:
        journal.record(
            **{name: value for name, value in event.items() if name not in ("t", "after")}
        )
    assert not list(broken_links(path))


def one_job(path: Path) -> Run:
    """Record four steps with a failing group, a death, a duplicate, and a checkpoint after two."""
    run = Run(path)
    first, second, *others = run.ledger.lease("a", 9)
    run.ledger.fail(first, "KeyError", "a")
    run.ledger.report_user_code("a", {})
    run.ledger.forfeit("a", "killed")
    run.ledger.deliver(second, "a")
    for one in run.ledger.lease("b", 9):
        run.ledger.deliver(one, "b")
    run.ledger.deliver(others[0], "a")
    for version in (1, 2):
        run.step(version)
    run.ledger.commit(2, run.trained.watermark)
    for version in (3, 4):
        run.step(version)
    run.journal.record("end")
    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_a_clean_job_is_proved(path: Path) -> None:
    one_job(path)
    found = audit(path, steps=4)
    assert found == Audit(
        problems=[], trained=8, watermark=9, set_aside={0: "failed 1 times: KeyError"}, steps=4,
        committed=5, retrained=0, jobs=1, rewinds=0, recoveries=0,
        re_leases={"after a failure": 1, "when a worker died": 3}, duplicates=1, ended=True,
    )  # fmt: skip
    assert found.lines()[-1] == "exactly once: proved"


@pytest.mark.parametrize(
    ("status", "said"),
    [("finished", "finished"), ("interrupted", "was interrupted"), ("failed", "failed")],
)
def test_the_end_of_the_last_job_is_told(path: Path, status: str, said: str) -> None:
    one_job(path)
    path.with_name("summary.json").write_text(json.dumps({"status": status}))
    found = audit(path)
    assert (found.ended, found.status) == (True, status)
    assert f"the last job {said}" in found.lines()


def test_a_group_that_fails_above_the_last_trained_one_counts_as_set_aside(path: Path) -> None:
    run = Run(path)
    run.step(1)
    [first, *_] = run.ledger.lease("a", 9)
    run.ledger.fail(first, "KeyError", "a")
    found = audit(path)
    assert found.problems == []
    assert found.watermark <= first.group_id
    assert found.set_aside == {first.group_id: "failed 1 times: KeyError"}


def test_a_run_of_many_deaths_is_proved(path: Path) -> None:
    """The queue, the learner and the job die; the proof is about the last weights."""
    many_deaths(path)
    found = audit(path, steps=4)
    assert found.problems == []
    assert (found.trained, found.watermark) == (8, 9)
    assert (found.jobs, found.rewinds, found.recoveries) == (2, 1, 1)
    # 5 to 8 by the first job and again by the last; in between 5 and 6 once more
    assert found.retrained == 2 + 2 + 2
    assert found.re_leases["when the queue died"] == 4
    assert not found.ended


def many_deaths(path: Path) -> None:
    one_job(path)  # and another from its checkpoint of step 2
    committed = TrainedGroups(5, {0: "failed 1 times: KeyError"})
    run = Run(path, "s", committed)
    run.step(3)
    run.ledger.rewind(committed, "the learner was lost")
    run.trained = committed
    run.make()
    run.ledger.recover()
    run.step(3)
    run.step(4)


Event = dict[str, Any]
Lie = Callable[[list[Event]], None]
POISON = {"0": "failed 1 times: KeyError"}


def event_of(events: list[Event], kind: str, nth: int = 0, **fields: Any) -> Event:
    """The n-th event of a kind with these fields."""
    return [e for e in events if e["event"] == kind and fields.items() <= e.items()][nth]


def lost(kind: str, nth: int = 0, **fields: Any) -> Lie:
    return lambda events: events.remove(event_of(events, kind, nth, **fields))


def repeated(kind: str, **fields: Any) -> Lie:
    def lie(events: list[Event]) -> None:
        at = events.index(event_of(events, kind, **fields))
        events.insert(at, dict(events[at]))

    return lie


def changed(kind: str, changes: Event, **fields: Any) -> Lie:
    return lambda events: event_of(events, kind, **fields).update(changes)


def swapped(*fields: str) -> Lie:
    """Exchange fields of the second and the third step."""

    def lie(events: list[Event]) -> None:
        second, third = event_of(events, "train", 1), event_of(events, "train", 2)
        for name in fields:
            second[name], third[name] = third[name], second[name]

    return lie


def appended(event: str, **fields: Any) -> Lie:
    return lambda events: events.append({"t": 1.0, "event": event, **fields})


def resumed(**changes: Any) -> Lie:
    """Append the start of another job with these wrong fields."""
    start = {"run": "s", "epoch": 2, "watermark": 5, "set_aside": POISON}
    return lambda events: events.append(events[0] | start | changes)


def without_lease(events: list[Event]) -> None:
    for event in events:
        if event["event"] == "lease" and 4 in event["ids"]:
            at = event["ids"].index(4)
            del event["ids"][at], event["attempts"][at]


def train_twice(events: list[Event]) -> None:
    second, third = event_of(events, "train", 1), event_of(events, "train", 2)
    events.insert(events.index(third), second | {"version": 3})
    event_of(events, "train", 3)["version"] = 4


def skip_a_good_one(events: list[Event]) -> None:
    second = event_of(events, "train", 1)
    second["skipped"] = {"3": "nobody knows"}
    second["ids"].remove(3)


def take_before_arrival(events: list[Event]) -> None:
    put = event_of(events, "put", id=3)
    events.remove(put)
    events.insert(events.index(event_of(events, "train", 1)), put)


def lease_beside_the_push_before(events: list[Event]) -> None:
    later = next(e for e in events if e["event"] == "lease" and 4 in e["ids"])
    events.remove(later)
    events.insert(events.index(event_of(events, "train")), later)


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        (lambda events: None, None),
        (lease_beside_the_push_before, "group 4 was trained 2 versions after it was leased"),
        (changed("train", {"version": 7}), "version 7 was published with the groups of version 1"),
    ],
)
def test_steps_taken_during_the_push_of_the_one_before(
    path: Path, lie: Lie, problem: str | None
) -> None:
    run = Run(path)
    for version in range(1, 5):
        run.step(version, beside=True)
        if version < 4:
            assert run.ledger.take(run.trained) is not None
        run.ledger.publish(version, run.trained)
    played = replay(path).ledger
    assert played is not None and played.trained == played.published == run.trained
    events = read_rows(path)
    lie(events)
    rewrite(path, events)
    found = audit(path).problems
    if problem is None:
        assert found == [] and audit(path, steps=4).trained == 8
    else:
        assert any(problem in each for each in found), found


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        (resumed(adopted={"7": [1, 1, 2]}), "group 7 was reloaded, but was not on disk"),
        (
            resumed(adopted={"3": [1, 1, 0]}),
            "group 3 was reloaded, but the weights already account for it",
        ),
        (
            appended("recover", epoch=1, ids=[], set_aside={}, kept=[8]),
            "group 8 was recovered after the queue died, but was not on disk",
        ),
        (
            appended("keep", epoch=1, ids=[99], attempts=[1]),
            "group 99 was kept, but never arrived in this epoch",
        ),
        (lost("put", id=3), "group 3 was trained, but never arrived in this epoch"),
        (without_lease, "group 4 arrived without a lease"),
        (lost("train", 1), "groups [3, 4] were lost: never trained"),
        (train_twice, "group 4 was trained twice"),
        (swapped("ids", "watermark"), "groups [3, 4] were lost: never trained"),
        (swapped("version"), "version 2 was published after version 3: out of order"),
        (repeated("put", id=3), "contradicts the lines before it"),
        (skip_a_good_one, "group 3 was skipped, but not set aside for 'nobody knows'"),
        (skip_a_good_one, "version 2 trains 1 groups, not 2"),
        (lost("set_aside"), "group 0 was skipped, but not set aside for 'failed 1 times: KeyErr"),
        (
            changed("commit", {"watermark": 7}),
            "the checkpoint of step 2 accounts for groups below 7, but only",
        ),
        (
            resumed(watermark=11, set_aside={"0": "failed"}),
            "a new job starts from group 11, but the journal records training only",
        ),
        (resumed(watermark=4), "a new job starts from group 4, which is inside a step"),
        (
            resumed(set_aside={"1": "x"}),
            "a new job starts from group 5 with groups [1] set aside, but the",
        ),
        (resumed(epoch=3), "epoch 3 follows epoch 1"),
        (
            appended("lease", ids=[2], attempts=[5], worker="a", epoch=1, request=""),
            "group 2 was leased, but the weights already contain it",
        ),
        (repeated("lease"), "contradicts the lines before it"),
        (changed("put", {"event": "dup"}, id=3), "contradicts the lines before it"),
        (take_before_arrival, "contradicts the lines before it"),
        (lost("start"), "the journal does not begin with a start"),
        (
            resumed(run_id="another"),
            "a job of run another starts from group 5, but the groups before it were trained by",
        ),
        (appended("magic"), "contradicts the lines before it"),
    ],
)
def test_each_wrong_event_is_found(path: Path, lie: Lie, problem: str) -> None:
    one_job(path)
    events = read_rows(path)
    before = json.dumps(events)
    lie(events)
    assert json.dumps(events) != before
    rewrite(path, events)
    found = audit(path)
    assert any(problem in each for each in found.problems), found.problems
    assert "NOT proved" in " ".join(found.lines())


def test_a_new_journal_proves_nothing_about_groups_before_it(path: Path) -> None:
    Run(path).step(1)
    path.unlink()
    run = Run(path, "s", TrainedGroups(2))
    run.step(2)
    run.step(3)
    found = audit(path)
    assert (found.first, found.trained, found.steps) == (2, 4, 2)
    [problem] = found.problems
    assert "nothing is proved about groups 0 to 1" in problem
    assert "6 steps of 2 are 12" in " ".join(audit(path, steps=6).problems)
    assert main([f"out={path.parent}"]) == 1


def claims(found: Audit) -> tuple:
    """Claims of the audit about the weights."""
    return found.first, found.trained, found.watermark, found.set_aside, found.steps


@pytest.fixture(scope="module")
def real_lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    path = tmp_path_factory.mktemp("real") / "ledger.jsonl"
    many_deaths(path)
    return path.read_bytes().splitlines(keepends=True)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_lines_leave_the_truth_or_no_proof(
    tmp_path: Path, real_lines: list[bytes], data: st.DataObject
) -> None:
    """Lines are deleted, repeated, exchanged, or lost at either end; metrics.jsonl is whole."""
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(real_lines))
    ends = {event["version"]: event["watermark"] for event in read_journal(path)
            if event["event"] == "train"}  # fmt: skip
    metrics = [{"step": step, "groups/watermark": end} for step, end in ends.items()]
    write_rows(tmp_path / "metrics.jsonl", *metrics)
    truth = audit(path)
    assert truth.problems == []

    lines = list(real_lines)
    place = st.integers(0, len(lines) - 1)
    a, b = data.draw(place, "a"), data.draw(place, "b")
    match data.draw(st.sampled_from(["delete", "double", "swap", "front", "end", "twice"]), "kind"):
        case "delete":
            del lines[min(a, b) : max(a, b) + 1]
        case "double":
            lines.insert(b, lines[a])
        case "swap":
            lines[a], lines[b] = lines[b], lines[a]
        case "front":
            del lines[:a]
        case "end":
            del lines[a + 1 :]
        case "twice":
            lines += real_lines
    path.write_bytes(b"".join(lines))
    if not lines:
        return
    found = audit(path)
    assert found.problems or claims(found) == claims(truth)


def checkpoint(out: Path, step: int, watermark: int, aside: dict[str, str]) -> None:
    CheckpointStore(out / "checkpoints", keep=9).save(
        step=step,
        write=lambda path: path.joinpath("weights").write_bytes(b"w"),
        delivery={"watermark": watermark, "set_aside": aside},
    )


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("config.json", '{"run_id": "another"}', "the ledger belongs to run isotherm, but"),
        (
            "metrics.jsonl",
            '{"step": 4, "groups/watermark": 9}\n{"step": 5, "groups/watermark": 11}\n',
            "metrics.jsonl: step 5 ends below 11, but the ledger does not contain",
        ),
        (
            "metrics.jsonl",
            '{"step": 4, "groups/watermark": 10}\n',
            "metrics.jsonl: step 4 ends below 10, but the ledger records below 9",
        ),
        (
            "metrics.jsonl",
            '{"step": 3, "staleness/start_max": 1}\n{"step": 4, "staleness/start_max": 2}\n',
            "metrics.jsonl: step 4 trains a group 2 versions after its first lease, but by the "
            "ledger the oldest was leased 1 versions before",
        ),
        ("metrics.jsonl", '{"step": "x", "groups/watermark": 9}\n', "metrics.jsonl: step x ends"),
    ],
)
def test_other_files_of_the_run_contradict_the_journal(
    path: Path, name: str, text: str, problem: str
) -> None:
    one_job(path)
    (path.parent / name).write_text(text)
    [found] = audit(path).problems
    assert found.startswith(problem)


@pytest.mark.parametrize("line", ['{"step": [1], "groups/watermark": 9}',
                                  '{"step": 1, "groups/watermark": NaN}'])  # fmt: skip
def test_metrics_that_are_no_numbers_are_refused(path: Path, line: str) -> None:
    one_job(path)
    (path.parent / "metrics.jsonl").write_text(line + "\n")
    with refuses(DataError, None, names="metrics.jsonl"):
        audit(path)


def test_checkpoints_contradict_the_journal(path: Path) -> None:
    one_job(path)
    poison = {"0": "failed 1 times: KeyError"}
    checkpoint(path.parent, 2, 5, poison)
    checkpoint(path.parent, 4, 9, poison)
    assert audit(path).problems == []
    checkpoint(path.parent, 3, 7, {"1": "another"})
    checkpoint(path.parent, 5, 11, poison)
    skips, missing = audit(path).problems
    assert "step 3 skips" in skips and "step 5 accounts for groups below 11" in missing


def test_the_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = f"out={path.parent}"
    assert main([out]) == 2  # there is no journal
    path.write_text("")
    assert main([out]) == 2
    one_job(path)
    capsys.readouterr()
    assert main([out]) == 0 == main([out, "steps=4", "groups_per_step=2"])
    assert "group 0: failed 1 times: KeyError" in capsys.readouterr().out
    assert main([out, "steps=5"]) == 1
    assert main([out, "groups_per_step=2"]) == 2
    for record in ({"recipe": "sft"}, {"recipe": "opd", "settings": {"train_from": "other"}}):
        (path.parent / "config.json").write_text(json.dumps(record))  # a run without a queue
        with refuses(ConfigError, "out"):
            print_audit(AuditConfig(out=str(path.parent)), Console(quiet=True))
    path.write_text('{"t": 1.0, "event": "start"}\n')
    with pytest.raises(DataError):
        audit(path)


def test_the_audit_finds_missing_and_invented_canaries(path: Path) -> None:
    run = Run(path)
    run.ledger.scorer(0, who="teacher engine 0")
    for one in run.ledger.lease("a", 2):
        run.ledger.deliver(one, "a", scored_by=[0])
    run.step(1)
    run.ledger.ask([0])
    run.ledger.canary(0, True, gap=0.0, rode=True)
    run.journal.close()
    events = list(read_journal(path))
    true = json.dumps(events)

    def audited(**changes: Any) -> tuple[list[str], bool]:
        kind, change = next(iter(changes.items()))
        made = [change(e) if e["event"] == kind else e for e in json.loads(true)]
        rewrite(path, [event for event in made if event])
        found = audit(path)
        assert found.scoring is not None
        return found.problems, found.scoring.holds

    assert audited(canary=lambda event: event) == ([], True)
    assert audited(canary=lambda _: None) == ([], False)
    assert audited(ask=lambda _: None) == ([], False)
    assert audited(canary=lambda event: event | {"good": False, "why": "?"}) == ([], False)
    problems, _ = audited(canary=lambda event: event | {"replica": 7})
    assert len(problems) == 1 and "scorer 7" in problems[0]
    problems, _ = audited(put=lambda event: event | {"by": [5]})
    assert "group 0 was scored by [5]" in problems[0]
    assert audited(put=lambda event: event | {"by": []}) == ([], False)
    certificate = {"proven": True, "groups": {"trained": 2, "proven": 2, "unwatched": 0}}
    (path.parent / "certificate.json").write_text(json.dumps(certificate))
    assert audited(canary=lambda event: event) == ([], True)
    [problem], _ = audited(canary=lambda _: None)
    assert problem.startswith("certificate.json")
