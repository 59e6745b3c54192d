"""Audit of the scorers from a journal: whether each trained group lies between two good canaries.

Reads the events of cluster/queue/journal.py in order, for all jobs of a run. The provenance of
their replayed ledgers tells which groups are proven. Numbers of scorers are valid within one job.
Groups that a killed job left unproven cannot be proven later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.queue.journal import Replay, read_journal, step_of
from cluster.queue.provenance import ScoreProvenance
from distill.records import TrainedGroups


@dataclass(slots=True, kw_only=True)
class Replica:
    """One process lifetime of a scoring engine.

    Attributes:
        start_event: the event of its start, with its first answers.
        canaries: number of good canaries after the first.
        batched: number of these that were sent together with a batch.
        largest: largest gap among them, nats.
        moved: the event of its bad canary; None without one.
        trained: number of groups in the final weights that it has scored.
        gaps: number of these that it scored after its last good canary.
    """

    who: str
    start_event: Mapping[str, Any]
    canaries: int = 0
    batched: int = 0
    largest: float = 0.0
    moved: Mapping[str, Any] | None = None
    trained: int = 0
    gaps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Result of the audit: whether each trained group was scored between two good canaries.

    Attributes:
        trained: number of groups in the final weights.
        proven: number of these that meet this.
        unwatched: number of these for which the journal names no scorer.
        gaps: steps with groups that were scored after their scorer's last good canary, by scorer.
        bad: the same for scorers whose next canary was bad.
        rescored: number of groups that were scored again.
        problems: contradictions about scorers in the journal.
    """

    replicas: list[Replica]
    trained: int
    proven: int
    unwatched: int
    gaps: dict[str, list[int]]
    bad: dict[str, list[int]]
    rescored: int
    problems: list[str]

    @property
    def holds(self) -> bool:
        return self.proven == self.trained and not self.problems

    def verdict(self) -> str:
        moved = sum(replica.moved is not None for replica in self.replicas)
        canaries = sum(replica.canaries for replica in self.replicas)
        watched = f"(scorers: {len(self.replicas)}, canaries after the first: {canaries}"
        watched += f"; moved and ended: {moved})" if moved else ")"
        if self.holds:
            return (
                f"all {self.trained} trained groups were scored between two good canaries {watched}"
            )
        why = [
            *(f"{_steps(s)}: groups of {who}, which had moved" for who, s in self.bad.items()),
            *(
                f"{_steps(s)}: groups of {who} after its last good canary"
                for who, s in self.gaps.items()
            ),
            *([f"{self.unwatched} groups without a scorer"] if self.unwatched else []),
            *self.problems,
        ]
        return (
            f"{self.proven} of {self.trained} trained groups are proven to be scored between two "
            f"good canaries {watched}; not proven: {'; '.join(why)}"
        )


def _steps(steps: Collection[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"


@dataclass(slots=True)
class _Job:
    """Scorers of one job, by number, and the provenance of its scores."""

    provenance: ScoreProvenance
    replicas: dict[int, Replica] = field(default_factory=dict)


class ScoringRecord:
    """Builds a `Scoring` from the events of a journal. Each must be replayed before it is read."""

    def __init__(self) -> None:
        self._job = _Job(ScoreProvenance())
        self._jobs: list[_Job] = []
        self._by: dict[int, tuple[_Job, list[int]]] = {}  # by group: its last scorers
        self._trained: dict[int, int] = {}  # versions, by group
        self._rescored = 0
        self._problems: list[str] = []

    def read(self, event: Mapping[str, Any], played: Replay) -> None:
        """Read an event that `played` has replayed."""
        if event["event"] == "start" and played.ledger is not None:
            self._job = _Job(played.ledger.provenance)
            self._jobs.append(self._job)
        if (read := getattr(self, f"_read_{event['event']}", None)) is not None:
            read(event)

    def _read_start(self, event: Mapping[str, Any]) -> None:
        trained = TrainedGroups.from_json(event)
        self._trained = {i: version for i, version in self._trained.items() if i in trained}
        for job in self._jobs:
            job.provenance.reset(trained.__contains__)

    _read_rewind = _read_start

    def _read_scorer(self, event: Mapping[str, Any]) -> None:
        self._job.replicas[event["replica"]] = Replica(who=event["who"], start_event=event)

    def _read_canary(self, event: Mapping[str, Any]) -> None:
        number = event["replica"]
        if (replica := self._job.replicas.get(number)) is None:
            self._problems.append(f"a canary of scorer {number}, never recorded")
        elif replica.moved is not None:
            self._problems.append(f"a canary of {replica.who} after it had moved")
        elif event["good"]:
            replica.canaries += 1
            replica.batched += event["rode"]
            replica.largest = max(replica.largest, event["gap"])
        else:
            replica.moved = event

    def _read_put(self, event: Mapping[str, Any]) -> None:
        group_id, numbers = event["id"], event.get("by", [])
        if unknown := sorted(set(numbers) - self._job.replicas.keys()):
            self._problems.append(f"group {group_id} was scored by {unknown}, never recorded")
        self._by[group_id] = self._job, numbers

    def _read_again(self, event: Mapping[str, Any]) -> None:
        self._rescored += len(event["ids"])

    def _read_train(self, event: Mapping[str, Any]) -> None:
        ids, _ = step_of(event)
        version: int = event["version"]
        if ids and all(self._trained.get(group_id) == version for group_id in ids):
            return  # recorded by its push event already
        in_learner = self._job.provenance.in_learner
        for group_id in ids:
            self._trained[group_id] = version
            if in_learner:
                job, numbers = self._by.get(group_id, (self._job, []))
                self._by[group_id] = job, [*numbers, *in_learner]

    _read_push = _read_train

    def result(self, contradictions: Sequence[str]) -> Scoring | None:
        """Return the result; None if the journal names no scorer."""
        replicas = [replica for job in self._jobs for replica in job.replicas.values()]
        if not replicas:
            return None
        gaps: dict[str, set[int]] = {}
        bad: dict[str, set[int]] = {}
        open_groups: set[int] = set()
        counts: Counter[int] = Counter()
        for group_id in self._trained:
            job, numbers = self._by.get(group_id, (self._job, []))
            counts.update(id(job.replicas[n]) for n in numbers if n in job.replicas)
        for job in self._jobs:
            for number, replica in job.replicas.items():
                replica.trained = counts[id(replica)]
                found = job.provenance.unproven_of(number) & self._trained.keys()
                replica.gaps = len(found)
                open_groups |= found
                if found:
                    of = bad if replica.moved is not None else gaps
                    of.setdefault(replica.who, set()).update(self._trained[i] for i in found)
        unwatched = sum(not self._by.get(i, (None, []))[1] for i in self._trained)
        return Scoring(
            replicas=replicas,
            trained=len(self._trained),
            proven=len(self._trained) - unwatched - len(open_groups),
            unwatched=unwatched,
            gaps={who: sorted(steps) for who, steps in gaps.items()},
            bad={who: sorted(steps) for who, steps in bad.items()},
            rescored=self._rescored,
            problems=[*contradictions, *self._problems],
        )


def read_scoring(path: str | Path) -> Scoring | None:
    """Audit the scorers of a whole journal. Raises as `read_journal`."""
    record, played = ScoringRecord(), Replay()
    for event in read_journal(path):
        played.play(event)
        record.read(event, played)
    return record.result(played.contradictions)
