"""Custody: which scorer scored a group, and which canaries prove it."""

from pathlib import Path

import pytest

from cluster.inspect.audit import audit
from cluster.queue.journal import Journal, read_journal, replay
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_types import CanaryAnswer, LedgerSettings
from cluster.queue.scoring import read_scoring
from distill.records import Lease, TrainedGroups
from tests.cluster import test_audit

SETTINGS = {"groups_per_step": 2, "max_staleness": 2, "total_groups": 12, "lease_s": 60.0}


class Run(test_audit.Run):
    """A ledger with its journal, two scorers, and a learner that trains delivered groups."""

    def __init__(self, path: Path, trained: TrainedGroups | None = None) -> None:
        super().__init__(path, trained=trained, settings=SETTINGS)
        self.version = len(self.trained) // 2
        for number in (0, 1):
            self.ledger.scorer(
                number, who=f"teacher engine {number}", kind="embedded", model="m",
                dtype="float32", scaling="in the engine", answers=4, measured=0.0, allowed=1e-3,
            )  # fmt: skip

    def deliver(self, *by: int, leases: list[Lease] | None = None) -> list[int]:
        """Lease two groups and deliver them, scored by these scorers."""
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

    def reward_model(self, number: int) -> None:
        self.ledger.scorer(
            number, rewards=True, who="reward model", kind="reward model", model="m",
            dtype="float32", scaling="none", answers=4, measured=0.0, allowed=1e-3,
        )  # fmt: skip

    def canary(self, number: int, good: bool) -> CanaryAnswer:
        why = {} if good else {"why": "other weights"}
        fields = {"step": self.version, "gap": 0.0 if good else 9.0, "mean": 0.0, "rode": True}
        return self.ledger.canary(number, good, **fields, **why)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_a_canary_proves_groups_that_arrived_before_it_was_sent(path: Path) -> None:
    run = Run(path)
    run.deliver(0)
    run.train()
    run.ledger.ask([0, 1])
    run.deliver(0)  # may have been scored after the canary was sent
    run.train()
    assert run.canary(0, True).proven == 1
    run.ledger.ask([0, 1])
    assert run.canary(0, True).proven == 2
    scoring = read_scoring(path)
    assert scoring is not None and scoring.holds and scoring.trained == 4


def test_groups_of_a_scorer_that_changed_are_scored_again_unless_trained(path: Path) -> None:
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
    assert found == CanaryAnswer(to_rescore=tuple(first), first_bad=3, proven=2)
    assert run.ledger.status().pending == first
    # The same groups are leased again: attempt 2, for another scorer; they have not failed.
    again = run.ledger.lease("b", 9)
    assert [one.group_id for one in again][:2] == first and again[0].attempt == 2
    for one in again[:2]:
        assert run.ledger.deliver(one, "b", scored_by=[0])
    assert run.ledger.take(run.trained) is not None
    assert run.canary(1, False).to_rescore == ()  # Ray repeats the call after a death
    found = audit(path)
    assert found.problems == [] and found.re_leases == {"to be scored again": 2}
    assert found.scoring is not None and found.scoring.bad == {"teacher engine 1": [3]}


def test_a_taken_group_counts_as_trained(path: Path) -> None:
    run = Run(path)
    taken = run.deliver(1)
    step = run.ledger.take(run.trained)
    assert step is not None and step.group_ids == taken
    assert run.canary(1, False) == CanaryAnswer(to_rescore=(), first_bad=1, proven=0)


def test_a_delivery_scored_by_a_scorer_that_changed_is_scored_again(path: Path) -> None:
    run = Run(path)
    leases = run.ledger.lease("a", 2)
    assert run.canary(1, False) == CanaryAnswer(to_rescore=(), first_bad=None, proven=0)
    run.deliver(0, 1, leases=leases)
    assert run.ledger.take(run.trained) is None
    assert run.ledger.status().pending == [0, 1] and run.ledger.status().depth == 0


def test_the_journal_replays_to_the_same_custody(path: Path) -> None:
    run = Run(path)
    for by in (0, 1):
        run.deliver(by)
        run.train()
    run.ledger.ask([0, 1])
    run.deliver(1)
    run.canary(0, True)
    found = run.canary(1, False)
    assert found.first_bad == 2 and found.to_rescore == (4, 5)
    again = replay(path).ledger
    assert again is not None and again.status().pending == run.ledger.status().pending == [4, 5]
    assert again.canary(0, True) == run.ledger.canary(0, True, step=2, gap=0.0, mean=0.0, rode=True)


def test_a_rewind_keeps_the_custody_of_checkpointed_groups(path: Path) -> None:
    run = Run(path)
    run.deliver(0)
    run.train()
    checkpoint = run.trained
    run.deliver(0)
    run.train()
    run.ledger.rewind(checkpoint, "the learner was lost")
    run.trained, run.version = checkpoint, 1
    # The first step is in the checkpoint, and not proven.
    assert run.canary(0, False) == CanaryAnswer(to_rescore=(), first_bad=1, proven=0)


def test_a_taken_group_that_is_delivered_again_needs_the_proof_of_both_scorers(path: Path) -> None:
    """The queue dies after the learner took its groups; another scorer scores them again."""
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


def test_groups_of_a_killed_job_without_a_last_canary_stay_unproven(path: Path) -> None:
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
    assert "step 1: groups of teacher engine 0" in scoring.verdict()


def test_a_run_without_scorers_has_no_custody(path: Path) -> None:
    journal = Journal(path)
    trained = TrainedGroups()
    journal.record("start", run="r", run_id="i", epoch=1, settings=SETTINGS, **trained.to_json())
    ledger = Ledger(LedgerSettings(**SETTINGS), trained, epoch=1, record=journal.record)
    for one in ledger.lease("a", 2):
        ledger.deliver(one, "a")
    assert read_scoring(path) is None
    assert not any("scores:" in line for line in audit(path).lines())
    assert not any("by" in event for event in read_journal(path))


def test_groups_of_a_reward_model_that_changed_are_sampled_again(path: Path) -> None:
    """A group may have used any reward model that was alive since its first lease."""
    run = Run(path)
    run.reward_model(7)
    run.deliver(0)
    run.ledger.ask([0, 7])
    run.train()
    assert run.canary(0, True).proven == 0, "the reward model has not answered"
    assert run.canary(7, True).proven == 1
    waiting = run.deliver(0)
    in_progress = run.ledger.lease("a", 2)
    answer = run.canary(7, False)
    assert list(answer.to_rescore) == waiting and answer.first_bad is None
    assert run.ledger.resampled == set(waiting)
    run.ledger.resampled.clear()
    run.reward_model(8)
    # Groups under way may have asked the one that changed.
    for one in in_progress:
        assert run.ledger.deliver(one, "a", scored_by=[0])
        assert not run.ledger.holds(one.group_id)
    assert run.ledger.resampled == {one.group_id for one in in_progress}
    run.deliver(0, leases=run.ledger.lease("a", 4))
    run.train()
    run.train()
    run.ledger.ask([0, 8])
    assert run.canary(0, True).proven == 1 and run.canary(8, True).proven == 3
    scoring = read_scoring(path)
    assert scoring is not None and scoring.holds and scoring.trained == 6
    assert {r.who: r.trained for r in scoring.replicas if r.start_event["replica"] in (7, 8)} == {
        "reward model": 4
    }
    assert replay(path).ledger is not None and audit(path).problems == []


def test_a_group_that_is_scored_again_keeps_its_reward_model(path: Path) -> None:
    run = Run(path)
    run.reward_model(7)
    ids = run.deliver(0)
    assert list(run.canary(0, False).to_rescore) == ids
    assert run.ledger.resampled == set(), "its samples and rewards are kept"
    run.reward_model(8)  # the first died
    run.deliver(1, leases=run.ledger.lease("a", 2))
    put = [event for event in read_journal(path) if event["event"] == "put"][-1]
    assert put["by"] == [1, 7, 8]
