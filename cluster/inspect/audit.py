"""`python -m cluster.audit out=DIR`: was each prompt group trained exactly once, and scored well?

The audit checks the ledger's journal of a whole run, with all its jobs and rewinds, in three ways:

- A ledger replays the journal and must record the same events again (cluster/queue/journal.py).
- Leases, arrivals and steps are compared without a ledger, because a replay would repeat its
  faults: each group must be leased, arrive and be trained once.
- The other files in `out/` must agree with the journal (cluster/inspect/run_evidence.py).

A journal that begins after group 0 proves nothing about earlier groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import chz
from rich.console import Console

from cluster.command import run_command
from cluster.config.run_record import RunRecord
from cluster.inspect.run_evidence import RunEvidence
from cluster.queue.journal import Replay, adopted_of, broken_links, by_id, read_journal, step_of
from cluster.queue.ledger_types import Kept
from cluster.queue.scoring import Scoring, ScoringRecord
from distill.errors import ConfigError, DataError, IsothermError
from distill.records import CONSTANT_REWARD, TrainedGroups
from distill.rules import at_least, needs, setting

# Number of problems that are printed; further problems are only counted.
_SHOWN = 8
# End of the last job, by its status.
_ENDS = {"finished": "finished", "interrupted": "was interrupted", "failed": "failed"}
_NOT_ENDED = "has not ended yet, or was killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of an audit: what the journal proves about the run's final weights.

    Attributes:
        problems: all contradictions; if empty, exactly-once training is proved.
        trained: number of groups in the final weights, as far as the journal goes back.
        watermark: every id below it is accounted for.
        set_aside: ids that were not trained, with the reason: those below the watermark, and groups
            above it that failed.
        steps: number of steps in the final weights.
        committed: watermark of the newest checkpoint.
        retrained: number of groups trained again after the learner and its weights were lost.
        jobs, rewinds, recoveries: numbers of starts, of returns to a checkpoint, and of deaths of
            the queue.
        re_leases: number of groups leased again, by cause.
        duplicates: number of groups that were dropped because they arrived again or too late.
        ended: True if the last job closed its queue, also after an error.
        status: status of the run in summary.json; "" if missing.
        first: first id of the journal, which has no events of lower ids.
        adopted: number of groups of earlier jobs that were taken back from disk.
        scoring: record of teachers and reference (cluster/queue/scoring.py); None if there are
            none.
    """

    problems: list[str]
    trained: int
    watermark: int
    set_aside: dict[int, str]
    steps: int
    committed: int
    retrained: int
    jobs: int
    rewinds: int
    recoveries: int
    re_leases: dict[str, int]
    duplicates: int
    ended: bool
    status: str = ""
    first: int = 0
    adopted: int = 0
    scoring: Scoring | None = None

    def lines(self) -> list[str]:
        """Text of the audit for the console, by line."""
        causes = ", ".join(f"{count} {cause}" for cause, count in self.re_leases.items())
        ended = _ENDS.get(self.status, "ended") if self.ended else _NOT_ENDED
        ids = f"ids {f'{self.first} and above, ' if self.first else ''}below {self.watermark}"
        saved = f"; those below {self.committed} are in a checkpoint" if self.committed else ""
        failed = {i: why for i, why in self.set_aside.items() if why != CONSTANT_REWARD}
        replaced = len(self.set_aside) - len(failed)
        facts = [
            f"{self.trained} groups trained in {self.steps} steps, {ids}{saved}",
            *([f"{replaced} skipped: {CONSTANT_REWARD}"] if replaced else []),
            f"{len(failed)} set aside",
            *(f"  group {i}: {reason}" for i, reason in failed.items()),
            f"{sum(self.re_leases.values())} leased again" + (f": {causes}" if causes else ""),
            *([f"{self.adopted} of earlier jobs reloaded from disk"] if self.adopted else []),
            f"{self.duplicates} dropped, because they arrived twice or too late",
            f"{self.jobs} jobs, {self.rewinds} returns to a checkpoint, {self.recoveries} deaths "
            f"of the queue; {self.retrained} groups trained again after the learner died",
            f"the last job {ended}",
            *([f"scores: {self.scoring.verdict()}"] if self.scoring else []),
        ]
        if not self.problems:
            return [*facts, "exactly once: proved"]
        more = len(self.problems) - _SHOWN
        return [
            *facts,
            f"exactly once: NOT proved, {len(self.problems)} problems",
            *(f"  {problem}" for problem in self.problems[:_SHOWN]),
            *([f"  and {more} more"] if more > 0 else []),
        ]


@dataclass(frozen=True, slots=True)
class _Published:
    """A step that published weights contain.

    Attributes:
        ids: groups of the step.
        after: groups that the weights account for after the step.
        start_max: weight versions since the earliest of its groups' first leases; None if the
            journal does not have all of these leases.
    """

    version: int
    ids: list[int]
    after: TrainedGroups
    start_max: int | None


# Causes of leasing groups again, by event.
_CAUSES = {
    "fail": "after a failure",
    "forfeit": "when a worker died",
    "expire": "because they took too long",
    "lost": "when their node died",
    "recover": "when the queue died",
    "again": "to be scored again",
    "begin_again": "restarted because they were overdue",
}


class _Lineage:
    """Check of a journal's events in order, without a ledger.

    `steps` are the steps that the newest weights contain.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._report = self.problems.append
        self.steps: list[_Published] = []
        self.first = TrainedGroups()  # groups trained before the lineage's first step
        self.run_id = ""
        self.epoch = self.committed = self.retrained = self.adopted = 0
        self._kept: set[int] = set()  # on disk, and sampled by weights that still exist
        self.per_step: int | None = None
        self._most_stale: int | None = None
        self.undone: set[int] = set()
        self.counts: Counter[str] = Counter()  # of events
        self.causes: Counter[str] = Counter()
        self.ended = False
        self._set_aside: dict[int, str] = {}  # also by events of undone steps
        self._forget()

    def _forget(self) -> None:
        """Reset the state of the epoch."""
        self._leased: set[int] = set()
        self._arrived: set[int] = set()
        self._started: dict[int, int] = {}  # by id: steps published before its lease
        self._published = 0  # steps of this epoch
        self._pushed: _Published | None = None  # trained, and being pushed to the engines

    @property
    def trained(self) -> TrainedGroups:
        """Groups that the newest weights account for."""
        return self.steps[-1].after if self.steps else self.first

    @property
    def set_aside(self) -> dict[int, str]:
        """Groups that the newest weights skip, and failed groups that later weights would skip."""
        failed = {i: why for i, why in self._set_aside.items() if why != CONSTANT_REWARD}
        return {**failed, **self.trained.set_aside}

    def read(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if not self.counts and kind != "start":
            self._report("the journal does not begin with a start")
        self.counts[kind] += 1
        self.ended = kind == "end" or (self.ended and kind != "start")
        if kind in _CAUSES:
            self.causes[_CAUSES[kind]] += len(event["ids"]) if "ids" in event else 1
        # Only the replay checks scorers, and events that no ledger records.
        if (read := getattr(self, f"_read_{kind}", None)) is not None:
            read(event)

    # jobs and epochs

    def _read_start(self, event: Mapping[str, Any]) -> None:
        settings = event["settings"]
        self.per_step = settings["groups_per_step"]
        bound = settings.get("on_stale") != "train_late"
        self._most_stale = settings.get("max_staleness") if bound else None
        run_id = event.get("run_id", "")
        if self.counts["start"] == 1:
            self.first = TrainedGroups.from_json(event)
        elif self.run_id and run_id != self.run_id and event["watermark"]:
            self._report(
                f"a job of run {run_id or 'unknown'} starts from group {event['watermark']}, but "
                f"the groups before it were trained by run {self.run_id}"
            )
        self.run_id = run_id
        self._rewind("a new job", event)
        self._set_aside = by_id(event["set_aside"])
        self._adopt(adopted_of(event))

    def _adopt(self, adopted: Mapping[int, Kept]) -> None:
        """Check the groups of earlier jobs that a new job takes back; they keep their ages."""
        for group_id, kept in adopted.items():
            if group_id not in self._kept:
                self._report(f"group {group_id} was reloaded, but was not on disk")
            if group_id in self.trained or group_id < self.trained.watermark:
                self._report(
                    f"group {group_id} was reloaded, but the weights already account for it"
                )
            self._started[group_id] = kept.started - len(self.trained) // (self.per_step or 1)
        self.adopted += len(adopted)
        self._kept = set(adopted)

    def _read_rewind(self, event: Mapping[str, Any]) -> None:
        self._rewind("the learner", event)
        self._kept.clear()

    def _rewind(self, who: str, event: Mapping[str, Any]) -> None:
        """Return to the weights of an earlier step, which undoes the later steps."""
        target, epoch = TrainedGroups.from_json(event), event["epoch"]
        if epoch != self.epoch + 1:
            self._report(f"epoch {epoch} follows epoch {self.epoch}")
        if unseen := target.since(self.trained):
            self._report(
                f"{who} starts from group {target.watermark}, but the journal records training "
                f"only for groups below {self.trained.watermark}: {len(unseen)} groups are missing"
            )
            self._assume(target)
        while self.steps and len(self.trained) > len(target):
            self.undone |= set(self.steps.pop().ids)
        ours = self.trained
        if (target.watermark, target.above) != (ours.watermark, ours.above):
            self._report(f"{who} starts from group {target.watermark}, which is inside a step")
            self._assume(target)
        if target.set_aside != ours.set_aside and target.watermark == ours.watermark:
            self._report(
                f"{who} starts from group {target.watermark} with groups "
                f"{sorted(target.set_aside)} set aside, but the steps before it skipped groups "
                f"{sorted(ours.set_aside)}"
            )
        self.epoch = epoch
        self._forget()

    def _assume(self, after: TrainedGroups) -> None:
        """Insert a step that the journal lacks, so that one problem does not cause others."""
        version = self.steps[-1].version if self.steps else 0
        self.steps.append(_Published(version, after.since(self.trained), after, None))

    def _read_recover(self, event: Mapping[str, Any]) -> None:
        self._set_aside |= by_id(event["set_aside"])
        for group_id in set(event.get("kept", ())) - self._kept:
            self._report(
                f"group {group_id} was recovered after the queue died, but was not on disk"
            )

    # groups

    def _read_lease(self, event: Mapping[str, Any]) -> None:
        for group_id in event["ids"]:
            if group_id in self.trained:
                self._report(f"group {group_id} was leased, but the weights already contain it")
            self._leased.add(group_id)
            self._started.setdefault(group_id, self._published)

    def _read_begin_again(self, event: Mapping[str, Any]) -> None:
        for group_id in event["ids"]:
            self._leased.discard(group_id)
            self._started.pop(group_id, None)
            self._kept.discard(group_id)

    def _read_put(self, event: Mapping[str, Any]) -> None:
        if event["id"] not in self._leased:
            self._report(f"group {event['id']} arrived without a lease")
        self._arrived.add(event["id"])

    def _read_keep(self, event: Mapping[str, Any]) -> None:
        for group_id in event["ids"]:
            if group_id not in self._arrived:
                self._report(f"group {group_id} was kept, but never arrived in this epoch")
        self._kept |= set(event["ids"])

    def _read_set_aside(self, event: Mapping[str, Any]) -> None:
        self._set_aside[event["id"]] = event["reason"]

    # steps

    def _read_take(self, event: Mapping[str, Any]) -> None:
        self._set_aside |= dict.fromkeys(event.get("replaced", ()), CONSTANT_REWARD)

    def _read_push(self, event: Mapping[str, Any]) -> None:
        self._finish_push()
        self._pushed = self._step(event)

    def _read_train(self, event: Mapping[str, Any]) -> None:
        pushed = self._pushed
        self._finish_push()
        if pushed is None or pushed.ids != step_of(event)[0]:
            self._step(event)
            self._published += 1
        elif pushed.version != event["version"]:
            self._report(
                f"version {event['version']} was published with the groups of version "
                f"{pushed.version}"
            )

    def _finish_push(self) -> None:
        """Count the pushed step, if any, as published: a push ends before the next one begins."""
        if self._pushed is not None:
            self._published += 1
            self._pushed = None

    def _step(self, event: Mapping[str, Any]) -> _Published:
        """Record a trained step, and check its groups, its size and its version."""
        version, watermark = event["version"], event["watermark"]
        ids, skipped = step_of(event)
        for group_id, reason in skipped.items():
            if self._set_aside.get(group_id) != reason:
                self._report(f"group {group_id} was skipped, but not set aside for {reason!r}")
        for group_id in ids:
            if group_id not in self._arrived:
                self._report(f"group {group_id} was trained, but never arrived in this epoch")
        if self.per_step is not None and len(ids) != self.per_step:
            self._report(f"version {version} trains {len(ids)} groups, not {self.per_step}")
        if self.steps and version <= self.steps[-1].version:
            self._report(
                f"version {version} was published after version {self.steps[-1].version}: out of "
                "order"
            )
        self.retrained += sum(group_id in self.undone for group_id in ids)
        self.undone -= set(ids)
        after = self._account_for(version, ids, skipped, watermark)
        self.steps.append(_Published(version, ids, after, self._oldest(ids)))
        return self.steps[-1]

    def _account_for(
        self, version: int, ids: list[int], skipped: Mapping[int, str], watermark: int
    ) -> TrainedGroups:
        """Groups that weights account for after a step; reports groups trained twice or never."""
        before = self.trained
        new = [i for i in ids if i not in before and i >= before.watermark and i not in skipped]
        for group_id in sorted(set(ids) - set(new)):
            self._report(f"group {group_id} was trained twice")
        after = before.after(sorted(set(new)), skipped)
        known = {*new, *before.above, *skipped}
        if lost := [i for i in range(before.watermark, watermark) if i not in known]:
            self._report(f"groups {lost} were lost: never trained")
            after = before.after(sorted({*new, *lost}), skipped)
        if after.watermark != watermark:
            self._report(
                f"version {version} accounts for groups below {watermark}, but its steps account "
                f"for groups below {after.watermark}"
            )
        return after

    def _oldest(self, ids: list[int]) -> int | None:
        """Largest age of a step's groups, in versions; None if a group has no lease.

        Reports groups that are older than max_staleness.
        """
        ages = {i: self._published - self._started[i] for i in ids if i in self._started}
        for group_id, age in ages.items():
            if self._most_stale is not None and age > self._most_stale:
                self._report(
                    f"group {group_id} was trained {age} versions after it was leased, but "
                    f"max_staleness={self._most_stale}"
                )
        return max(ages.values(), default=0) if len(ages) == len(ids) else None

    def _read_commit(self, event: Mapping[str, Any]) -> None:
        if event["watermark"] > self.trained.watermark:
            self._report(
                f"the checkpoint of step {event['step']} accounts for groups below "
                f"{event['watermark']}, but only those below {self.trained.watermark} were trained"
            )
        self.committed = event["watermark"]


def audit(
    path: str | Path, *, steps: int | None = None, groups_per_step: int | None = None
) -> Audit:
    """Audit a journal, `out/ledger.jsonl`, and the files next to it.

    Args:
        steps: number of steps of the run, if it should be complete.
        groups_per_step: groups per step of such a run; by default the journal's own setting.

    Raises:
        DataError: the journal is missing, empty or unreadable.
    """
    evidence = RunEvidence.read(Path(path))  # first, because a live run may add events later
    lineage, record, played = _Lineage(), ScoringRecord(), Replay()
    lineage.problems += broken_links(path)
    for event in read_journal(path):
        played.play(event)
        try:
            lineage.read(event)
            record.read(event, played)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path}: event {event} has missing or invalid fields: {error!r}"
            ) from error
    if not lineage.counts:
        raise DataError(f"{path} is empty: no job of this run has started its queue")
    scoring = record.result(played.contradictions)
    lineage.problems += scoring.problems if scoring else played.contradictions
    trained = sum(len(step.ids) for step in lineage.steps)
    accounts = {step.version: step.after for step in lineage.steps}
    starts = {step.version: step.start_max for step in lineage.steps}
    lineage.problems += evidence.contradictions(lineage.run_id, accounts, starts, scoring)
    per_step = groups_per_step or lineage.per_step or 0
    if steps is not None and trained != steps * per_step:
        lineage.problems.append(
            f"{trained} groups were trained, but {steps} steps of {per_step} are {steps * per_step}"
        )
    elif steps is not None and lineage.trained.above:
        lineage.problems.append(
            f"all {steps} steps were trained, but group {lineage.trained.watermark} was skipped"
        )
    return Audit(
        problems=[*_begins_late(lineage), *lineage.problems],
        trained=trained,
        watermark=lineage.trained.watermark,
        set_aside=lineage.set_aside,
        steps=len(lineage.steps),
        committed=lineage.committed,
        retrained=lineage.retrained,
        jobs=lineage.counts["start"],
        rewinds=lineage.counts["rewind"],
        recoveries=lineage.counts["recover"],
        re_leases=dict(lineage.causes),
        adopted=lineage.adopted,
        duplicates=lineage.counts["dup"] + lineage.counts["late"],
        ended=lineage.ended,
        status=evidence.status,
        first=lineage.first.watermark,
        scoring=scoring,
    )


def _begins_late(lineage: _Lineage) -> list[str]:
    if not (first := lineage.first.watermark):
        return []
    rest = "" if lineage.problems else f"; each group from {first} on was trained exactly once"
    return [
        f"the journal begins with group {first}: nothing is proved about groups 0 to "
        f"{first - 1}, because no record of their training exists{rest}"
    ]


@chz.chz
class AuditConfig:
    """Check that each prompt group of a run was trained exactly once."""

    out: str = chz.field(doc="the run's directory, which holds ledger.jsonl")
    steps: int | None = setting(at_least(1), default=None, doc="expected number of trained steps")
    groups_per_step: int | None = setting(
        at_least(1),
        needs("steps", remedy="set it, too"),
        default=None,
        doc="groups per step; default: the number that the ledger records",
    )


def print_audit(config: AuditConfig, console: Console) -> None:
    """Print the audit; raise IsothermError (exit code 1) if it has problems."""
    _check_queued(config.out)
    path = Path(config.out) / "ledger.jsonl"
    found = audit(path, steps=config.steps, groups_per_step=config.groups_per_step)
    for line in found.lines():
        console.print(line, highlight=False)
    if found.problems:
        raise IsothermError(f"{path} does not prove that each group was trained exactly once")
    if found.scoring and found.scoring.bad:
        raise IsothermError(
            f"the weights were trained on scores that {', '.join(found.scoring.bad)} returned "
            "between the last good canary and a failed one: return to a checkpoint of an earlier "
            "step (fork_from=)"
        )


def _check_queued(out: str) -> None:
    """Raise ConfigError if the run had no queue, and therefore no ledger."""
    record = RunRecord.of_run(Path(out))
    if record is None:
        return
    if record.supervised:
        raise ConfigError(
            f"out={out} holds a run of recipe={record.recipe}; only runs of opd and rl have prompt "
            "groups to audit"
        )
    if (kept_by := record.settings.get("train_from")) is not None:
        raise ConfigError(
            f"out={out} holds a run on kept groups (train_from={kept_by}), which has no queue; "
            "audit the run that sampled them"
        )


main = partial(run_command, AuditConfig, print_audit)
