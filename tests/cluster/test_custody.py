"""Who scored what, and between which canaries: the ledger as it goes, its journal, the audit."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.inspect.audit import audit
from cluster.queue.journal import Journal, read_journal, replay
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_answers import CanaryAnswer
from cluster.queue.ledger_settings import LedgerSettings
from cluster.queue.scoring import read_scoring
from distill.records import Lease, TrainedGroups
from tests.cluster import test_audit

SETTINGS = {"groups_per_step": 2, "max_staleness": 2, "total_groups": 12, "lease_s": 60.0}


class Run(test_audit.Run):
    """A ledger with its journal, and a learner that trains what is there."""

    def __init__(self, path: Path, trained: TrainedGroups | None = None) -> None:
        super().__init__(path, trained=trained, settings=SETTINGS)
        self.version = len(self.trained) // 2
        for number in (0, 1):
            self.ledger.scorer(
                number, who=f"teacher engine {number}", kind="embedded", model="m",
                dtype="float32", scaling="in the engine", answers=4, measured=0.0, allowed=1e-3,
            )  # fmt: skip

    def deliver(self, *by: int, leases: list[Lease] | None = None) -> list[int]:
        """Leases two groups and delivers them, scored by these."""
        leases = self.ledger.lease("a", 2) if leases is None else leases
        for one in leases:
            assert self.ledger.deliver(one, "a", scored_by=by)
        return [one.group_id for one in leases]

    def train(self) -> None:
        step = self.ledger.take(self.trained)
        assert step is not None
        self.trained = step.after(self.trained)
        self.version += 1
        self.ledger.publish(self.version, self.trained)

    def canary(self, number: int, good: bool) -> CanaryAnswer:
        why = {} if good else {"why": "other weights"}
        said = {"step": self.version, "gap": 0.0 if good else 9.0, "mean": 0.0, "rode": True}
        return self.ledger.canary(number, good, **said, **why)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_a_canary_proves_what_arrived_before_it_was_asked(path: Path) -> None:
    run = Run(path)
    run.deliver(0)
    run.train()
    run.ledger.ask([0, 1])
    run.deliver(0)  # under way when the canary was sent, perhaps
    run.train()
    assert run.canary(0, True).proven == 1
    run.ledger.ask([0, 1])
    assert run.canary(0, True).proven == 2
    scoring = read_scoring(path)
    assert scoring is not None and scoring.holds and scoring.trained == 4


def test_one_that_moves_has_its_groups_scored_again_and_names_the_weights(path: Path) -> None:
    run = Run(path)
    run.deliver(0)
    run.deliver(1)
    run.train()
    run.ledger.ask([0, 1])
    assert run.canary(0, True).proven == 1 and run.canary(1, True).proven == 1
    run.train()  # by 1, proven
    run.deliver(1)
    run.train()  # by 1: in the weights of version 3, not proven
    first, _ = run.deliver(1), run.deliver(0)
    found = run.canary(1, False)
    assert found == CanaryAnswer(again=tuple(first), first_bad=3, proven=2)
    assert run.ledger.status().pending == first
    # A lease of the same groups again: attempt 2, by another; they are no failures.
    again = run.ledger.lease("b", 9)
    assert [one.group_id for one in again][:2] == first and again[0].attempt == 2
    for one in again[:2]:
        assert run.ledger.deliver(one, "b", scored_by=[0])
    assert run.ledger.take(run.trained) is not None
    assert run.canary(1, False).again == ()  # the same call, which Ray repeats after a death
    found = audit(path)
    assert found.problems == [] and found.re_leases == {"to be scored again": 2}
    assert found.scoring is not None and found.scoring.bad == {"teacher engine 1": [3]}


def test_what_is_taken_counts_as_trained(path: Path) -> None:
    """The learner has it, and nobody can take it away from there."""
    run = Run(path)
    taken = run.deliver(1)
    step = run.ledger.take(run.trained)
    assert step is not None and step.group_ids == taken
    assert run.canary(1, False) == CanaryAnswer(again=(), first_bad=1, proven=0)


def test_what_one_that_has_moved_still_delivers_is_scored_again(path: Path) -> None:
    run = Run(path)
    leases = run.ledger.lease("a", 2)
    assert run.canary(1, False) == CanaryAnswer(again=(), first_bad=None, proven=0)
    run.deliver(0, 1, leases=leases)
    assert run.ledger.take(run.trained) is None
    assert run.ledger.status().pending == [0, 1] and run.ledger.status().depth == 0


def test_the_journal_played_again_is_the_same_ledger(path: Path) -> None:
    run = Run(path)
    for by in (0, 1):
        run.deliver(by)
        run.train()
    run.ledger.ask([0, 1])
    run.deliver(1)
    run.canary(0, True)
    found = run.canary(1, False)
    assert found.first_bad == 2 and found.again == (4, 5)
    again = replay(path).ledger
    assert again is not None and again.status().pending == run.ledger.status().pending == [4, 5]
    # What it forgets is the payload: one more canary has nothing to complain of.
    assert again.canary(0, True) == run.ledger.canary(0, True, step=2, gap=0.0, mean=0.0, rode=True)


def test_weights_that_went_back_contain_what_they_did(path: Path) -> None:
    run = Run(path)
    run.deliver(0)
    run.train()
    checkpoint = run.trained
    run.deliver(0)
    run.train()
    run.ledger.rewind(checkpoint, "the learner was lost")
    run.trained, run.version = checkpoint, 1
    # The first step is in the checkpoint, and not proven: only the second one was undone.
    assert run.canary(0, False) == CanaryAnswer(again=(), first_bad=1, proven=0)


def test_a_group_that_is_made_again_while_weights_contain_it_is_held_to_both(path: Path) -> None:
    """The queue dies after the learner took its groups, which come again, by another scorer."""
    run = Run(path)
    run.deliver(1)
    step = run.ledger.take(run.trained)
    assert step is not None
    run.ledger.recover()
    run.deliver(0)
    run.trained = run.trained.after(step.group_ids, {})
    run.ledger.publish(1, run.trained)
    run.ledger.ask([0])
    assert run.canary(0, True).proven == 0
    assert run.canary(1, False).first_bad == 1


def test_what_a_killed_job_left_open_stays_a_gap(path: Path) -> None:
    run = Run(path)
    run.deliver(0)
    run.train()
    again = Run(path, run.trained)
    again.deliver(0)
    again.train()
    again.ledger.ask([0, 1])
    again.canary(0, True)
    scoring = read_scoring(path)
    assert scoring is not None and not scoring.holds and not scoring.bad
    assert (scoring.proven, scoring.trained) == (2, 4)
    assert scoring.gaps == {"teacher engine 0": [1]}
    assert "step 1: groups of teacher engine 0 after its last good canary" in scoring.verdict()


def test_an_audit_finds_canaries_that_are_missing_or_made_up(path: Path) -> None:
    run = Run(path)
    run.deliver(0)
    run.train()
    run.ledger.ask([0, 1])
    run.canary(0, True)
    run.journal.close()
    events = list(read_journal(path))
    true = json.dumps(events)

    def audited(**changes: Any) -> tuple[list[str], bool]:
        kind, change = next(iter(changes.items()))
        made = [change(e) if e["event"] == kind else e for e in json.loads(true)]
        test_audit.write_anew(path, [event for event in made if event])
        found = audit(path)
        assert found.scoring is not None
        return found.problems, found.scoring.holds

    assert audited(canary=lambda event: event) == ([], True)
    assert audited(canary=lambda _: None) == ([], False)
    assert audited(ask=lambda _: None) == ([], False)
    assert audited(canary=lambda event: event | {"good": False, "why": "?"}) == ([], False)
    problems, _ = audited(canary=lambda event: event | {"replica": 7})
    assert problems == ["a canary of scorer 7, which never began"]
    problems, _ = audited(put=lambda event: event | {"by": [5]})
    assert problems[0] == "group 0 was scored by [5], which never began"
    assert audited(put=lambda event: event | {"by": []}) == ([], False)
    certificate = {"proven": True, "groups": {"trained": 2, "proven": 2, "unwatched": 0}}
    (path.parent / "certificate.json").write_text(json.dumps(certificate))
    assert audited(canary=lambda event: event) == ([], True)
    [problem], _ = audited(canary=lambda _: None)
    assert problem.startswith("certificate.json")


def test_runs_without_scorers_say_nothing_of_them(path: Path) -> None:
    journal = Journal(path)
    trained = TrainedGroups()
    journal.record("start", run="r", run_id="i", epoch=1, settings=SETTINGS, **trained.to_json())
    ledger = Ledger(LedgerSettings(**SETTINGS), trained, epoch=1, record=journal.record)
    for one in ledger.lease("a", 2):
        ledger.deliver(one, "a")
    assert read_scoring(path) is None
    assert not any("scores:" in line for line in audit(path).lines())
    assert not any("by" in event for event in read_journal(path))


def test_a_reward_model_that_moves_has_its_groups_made_anew(path: Path) -> None:
    """Rewards are of whole episodes, and of whichever life was there since the group began."""
    run = Run(path)
    said = {"who": "reward model", "kind": "reward model", "model": "m", "dtype": "float32",
            "scaling": "none", "answers": 4, "measured": 0.0, "allowed": 1e-3}  # fmt: skip
    run.ledger.scorer(7, rewards=True, **said)
    run.deliver(0)
    run.ledger.ask([0, 7])
    run.train()
    assert run.canary(0, True).proven == 0, "the reward model has not answered"
    assert run.canary(7, True).proven == 1
    waiting = run.deliver(0)
    under_way = run.ledger.lease("a", 2)
    answer = run.canary(7, False)
    assert list(answer.again) == waiting and answer.first_bad is None
    assert run.ledger.sampled_anew == set(waiting)
    run.ledger.sampled_anew.clear()
    run.ledger.scorer(8, rewards=True, **said)
    # What was under way may have asked the one that moved.
    for one in under_way:
        assert run.ledger.deliver(one, "a", scored_by=[0])
        assert not run.ledger.holds(one.group_id)
    late = {one.group_id for one in under_way}
    assert run.ledger.sampled_anew == late
    # All of it again, and this time by the one that is well.
    run.deliver(0, leases=run.ledger.lease("a", 4))
    run.train()
    run.train()
    run.ledger.ask([0, 8])
    assert run.canary(0, True).proven == 1 and run.canary(8, True).proven == 3
    scoring = read_scoring(path)
    assert scoring is not None and scoring.holds and scoring.trained == 6
    assert {r.who: r.trained for r in scoring.replicas if r.said["replica"] in (7, 8)} == {
        "reward model": 4
    }
    assert replay(path).ledger is not None and audit(path).problems == []


def test_scored_again_by_another_teacher_a_group_keeps_the_reward_model_that_it_had(
    path: Path,
) -> None:
    run = Run(path)
    said = {"who": "reward model", "kind": "reward model", "model": "m", "dtype": "float32",
            "scaling": "none", "answers": 4, "measured": 0.0, "allowed": 1e-3}  # fmt: skip
    run.ledger.scorer(7, rewards=True, **said)
    ids = run.deliver(0)
    assert list(run.canary(0, False).again) == ids
    assert run.ledger.sampled_anew == set(), "its samples and rewards are kept"
    run.ledger.scorer(8, rewards=True, **said)  # the first died meanwhile
    run.deliver(1, leases=run.ledger.lease("a", 2))
    put = [event for event in read_journal(path) if event["event"] == "put"][-1]
    assert put["by"] == [1, 7, 8]
