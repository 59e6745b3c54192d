"""`python -m cluster.audit out=DIR`: was each prompt group trained exactly once?

Reads the ledger's journal of a whole run, all its jobs and rewinds, and takes no word of the ledger
for it: what leases, arrivals and steps say is compared with one another, and with what else lies in
`out/` (cluster/inspect/witnesses.py). A journal that begins after group 0 proves nothing of the
groups before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
from rich.console import Console

from cluster.command import run_command
from cluster.inspect.witnesses import Witnesses
from cluster.queue.journal import broken_links, read_journal
from distill.errors import ConfigError, DataError, IsothermError

# More are counted, and not shown.
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of an audit: what a journal proves of the weights that the run ended with.

    Attributes:
        problems: every way in which it does not add up; none: exactly once is proved.
        trained: groups in the final weights, as far as the journal goes back.
        watermark: every id below it is accounted for.
        set_aside: ids below it that were not trained, and why.
        steps: published steps in the final weights.
        committed: watermark of the newest checkpoint.
        again: groups trained again after the learner, and the weights with them, were lost.
        jobs, rewinds, recoveries: starts, returns to a checkpoint, deaths of the queue.
        re_leases: groups leased again, by cause.
        duplicates: groups that arrived and were dropped: again, or too late.
        ended: the last job ended as it should.
        first: the id that the journal begins with; it knows nothing of those below.
    """

    problems: list[str]
    trained: int
    watermark: int
    set_aside: dict[int, str]
    steps: int
    committed: int
    again: int
    jobs: int
    rewinds: int
    recoveries: int
    re_leases: dict[str, int]
    duplicates: int
    ended: bool
    first: int = 0

    def lines(self) -> list[str]:
        """The audit's lines, for people to read."""
        causes = ", ".join(f"{count} {cause}" for cause, count in self.re_leases.items())
        ended = "ended as it should" if self.ended else "did not end, or was killed"
        ids = f"ids {f'{self.first} and above, ' if self.first else ''}below {self.watermark}"
        saved = f"; those below {self.committed} are in a checkpoint" if self.committed else ""
        made = [
            f"{self.trained} groups trained in {self.steps} steps, {ids}{saved}",
            f"{len(self.set_aside)} set aside",
            *(f"  group {i}: {reason}" for i, reason in self.set_aside.items()),
            f"{sum(self.re_leases.values())} leased again" + (f": {causes}" if causes else ""),
            f"{self.duplicates} dropped, since they arrived again or too late",
            f"{self.jobs} jobs, {self.rewinds} returns to a checkpoint, {self.recoveries} deaths "
            f"of the queue; {self.again} groups trained again after a lost learner",
            f"the last job {ended}",
        ]
        if not self.problems:
            return [*made, "exactly once: proved"]
        more = len(self.problems) - _SHOWN
        return [
            *made,
            f"exactly once: NOT proved, {len(self.problems)} problems",
            *(f"  {problem}" for problem in self.problems[:_SHOWN]),
            *([f"  and {more} more"] if more > 0 else []),
        ]


@dataclass(frozen=True, slots=True)
class _Published:
    """A step in published weights: all ids of [first, end) but the skipped ones."""

    version: int
    first: int
    end: int
    skipped: dict[int, str]

    def __len__(self) -> int:
        """Groups trained."""
        return self.end - self.first - len(self.skipped)


class _Auditor:
    """Reads one event after the other; `steps` is the lineage of the newest weights."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.steps: list[_Published] = []
        self.first = 0  # what the lineage's first step starts from
        self.inherited: dict[int, str] = {}  # set aside below it
        self.run_id = ""
        self.epoch = self.committed = 0
        self.per_step: int | None = None
        self.again = self.jobs = self.rewinds = self.recoveries = self.duplicates = 0
        self.undone: set[int] = set()
        self.causes: Counter[str] = Counter()
        self.ended = False
        self._set_aside: dict[int, str] = {}
        self._forget()

    def _forget(self) -> None:
        """A new epoch: nothing before counts."""
        self._leases: set[tuple[int, int]] = set()  # (id, attempt)
        self._arrived: set[int] = set()  # in this epoch, published or not
        self._held: set[int] = set()  # arrived, and the payload not lost since

    @property
    def watermark(self) -> int:
        return self.steps[-1].end if self.steps else self.first

    @property
    def set_aside(self) -> dict[int, str]:
        """Reasons of the groups set aside below the watermark."""
        made = {i: reason for i, reason in self.inherited.items() if i < self.first}
        for step in self.steps:
            made |= step.skipped
        return made

    def read(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if self.jobs == 0 and kind != "start":
            self._complain("the journal does not begin with a start")
            self.jobs = 1
        getattr(self, f"_read_{kind}", self._read_unknown)(event)

    def _complain(self, problem: str) -> None:
        self.problems.append(problem)

    def _read_unknown(self, event: Mapping[str, Any]) -> None:
        self._complain(f"{event['event']!r} is no event of a ledger")

    # jobs and epochs

    def _read_start(self, event: Mapping[str, Any]) -> None:
        self.jobs += 1
        self.ended = False
        self.per_step = event["settings"]["groups_per_step"]
        run_id = event.get("run_id", "")
        if self.jobs == 1:
            self.first = event["watermark"]
            self.inherited = _by_id(event["set_aside"])
        elif self.run_id and run_id != self.run_id and event["watermark"]:
            self._complain(
                f"a job of run {run_id or 'unknown'} starts from {event['watermark']}, and what "
                f"was trained before it is of run {self.run_id}"
            )
        self.run_id = run_id
        self._go_back("a new job", event)
        self._set_aside = _by_id(event["set_aside"])

    def _read_rewind(self, event: Mapping[str, Any]) -> None:
        self.rewinds += 1
        self._go_back("the learner", event)

    def _go_back(self, who: str, event: Mapping[str, Any]) -> None:
        """Goes back to weights of an earlier step: later ones are undone."""
        target, epoch, set_aside = event["watermark"], event["epoch"], _by_id(event["set_aside"])
        if epoch != self.epoch + 1:
            self._complain(f"epoch {epoch} follows epoch {self.epoch}")
        if target > self.watermark:
            self._complain(
                f"{who} starts from {target}, and only groups below {self.watermark} were seen "
                f"to be trained: {target - self.watermark} are not accounted for"
            )
            self._assume(target, set_aside)
        while self.steps and self.steps[-1].end > target:
            undone = self.steps.pop()
            self.undone |= set(range(undone.first, undone.end)) - undone.skipped.keys()
        if target != self.watermark:
            self._complain(f"{who} starts from {target}, which is within a step")
            self._assume(target, set_aside)
        if set_aside != self.set_aside:
            self._complain(
                f"{who} starts from {target} with groups {sorted(set_aside)} set aside, and the "
                f"steps before it skipped {sorted(self.set_aside)}"
            )
        self.epoch = epoch
        self._forget()

    def _assume(self, end: int, set_aside: Mapping[int, str]) -> None:
        """A step that nobody saw, so that one problem does not make others."""
        first = self.watermark
        version = self.steps[-1].version if self.steps else 0
        skipped = {i: reason for i, reason in set_aside.items() if first <= i < end}
        self.steps.append(_Published(version, first, end, skipped))

    def _read_recover(self, event: Mapping[str, Any]) -> None:
        self.recoveries += 1
        self._check_epoch(event)
        self.causes["when the queue died"] += len(event["ids"])
        self._set_aside |= _by_id(event["set_aside"])
        self._held.clear()

    def _read_end(self, event: Mapping[str, Any]) -> None:
        self.ended = True

    def _check_epoch(self, event: Mapping[str, Any]) -> None:
        if event["epoch"] != self.epoch:
            self._complain(f"{event['event']} of epoch {event['epoch']} in epoch {self.epoch}")

    # groups

    def _read_lease(self, event: Mapping[str, Any]) -> None:
        self._check_epoch(event)
        for group_id, attempt in zip(event["ids"], event["attempts"], strict=True):
            if group_id < self.watermark:
                self._complain(f"group {group_id} was leased though the weights contain it")
            if (group_id, attempt) in self._leases:
                self._complain(f"attempt {attempt} of group {group_id} was leased twice")
            self._leases.add((group_id, attempt))

    def _read_put(self, event: Mapping[str, Any]) -> None:
        self._check_epoch(event)
        group_id, attempt = event["id"], event["attempt"]
        if (group_id, attempt) not in self._leases:
            self._complain(f"group {group_id} arrived (attempt {attempt}) without a lease")
        if group_id in self._held or group_id < self.watermark:
            self._complain(f"group {group_id} was accepted twice")
        self._arrived.add(group_id)
        self._held.add(group_id)

    def _read_dup(self, event: Mapping[str, Any]) -> None:
        self.duplicates += 1
        if event["id"] not in self._arrived and event["id"] >= self.watermark:
            self._complain(f"group {event['id']} was dropped as a repeat, and never arrived")

    def _read_late(self, event: Mapping[str, Any]) -> None:
        self.duplicates += 1

    def _read_fail(self, event: Mapping[str, Any]) -> None:
        self.causes["after a failure"] += 1

    def _read_forfeit(self, event: Mapping[str, Any]) -> None:
        self.causes["when a worker died"] += len(event["ids"])

    def _read_expire(self, event: Mapping[str, Any]) -> None:
        self.causes["under way for too long"] += len(event["ids"])

    def _read_set_aside(self, event: Mapping[str, Any]) -> None:
        self._set_aside[event["id"]] = event["reason"]

    # steps

    def _read_take(self, event: Mapping[str, Any]) -> None:
        skipped = event["skipped"]
        for group_id in range(event["from"], event["to"]):
            if str(group_id) not in skipped and group_id not in self._held:
                self._complain(f"group {group_id} was taken, and is not there")

    def _read_train(self, event: Mapping[str, Any]) -> None:
        version, first, end = event["version"], event["from"], event["to"]
        skipped = _by_id(event["skipped"])
        self._check_order(version, first, end)
        for group_id, reason in skipped.items():
            if self._set_aside.get(group_id) != reason:
                self._complain(f"group {group_id} was skipped, and not set aside for {reason!r}")
        live = [i for i in range(first, end) if i not in skipped]
        for group_id in live:
            if group_id not in self._arrived:
                self._complain(f"group {group_id} was trained, and never arrived in this epoch")
        if self.per_step is not None and len(live) != self.per_step:
            self._complain(f"version {version} trains {len(live)} groups, not {self.per_step}")
        self.again += sum(group_id in self.undone for group_id in live)
        self.undone -= set(live)
        self.steps.append(_Published(version, first, end, skipped))
        self._held = {i for i in self._held if i >= end}

    def _check_order(self, version: int, first: int, end: int) -> None:
        if first > self.watermark:
            self._complain(f"groups {self.watermark} to {first - 1} were lost: never trained")
        for group_id in range(first, min(end, self.watermark)):
            self._complain(f"group {group_id} was trained twice")
        if end <= first:
            self._complain(f"version {version} trains from {first} to {end}: out of order")
        if self.steps and version <= self.steps[-1].version:
            self._complain(
                f"version {version} was published after version {self.steps[-1].version}: out of "
                "order"
            )

    def _read_commit(self, event: Mapping[str, Any]) -> None:
        if event["watermark"] > self.watermark:
            self._complain(
                f"the checkpoint of step {event['step']} accounts for groups below "
                f"{event['watermark']}, and only those below {self.watermark} were trained"
            )
        self.committed = event["watermark"]


def _by_id(reasons: Mapping[str, str]) -> dict[int, str]:
    return {int(group_id): reason for group_id, reason in reasons.items()}


def audit(
    path: str | Path, *, steps: int | None = None, groups_per_step: int | None = None
) -> Audit:
    """Reads a journal, `out/ledger.jsonl`, and what lies beside it.

    Args:
        steps: of the run, if it should be complete; with `groups_per_step`, or the journal's own.

    Raises:
        DataError: there is none, it is empty, or it is unreadable.
    """
    witnesses = Witnesses.beside(Path(path))  # first: what a live run adds meanwhile is no lie
    auditor = _Auditor()
    auditor.problems += broken_links(path)
    for event in read_journal(path):
        try:
            auditor.read(event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: an event without its fields, {event}: {error!r}") from error
    if not auditor.jobs:
        raise DataError(f"{path} is empty: no job of this run got as far as its queue")
    set_aside = auditor.set_aside
    trained = sum(len(step) for step in auditor.steps)
    ends = {step.version: step.end for step in auditor.steps}
    auditor.problems += witnesses.contradict(auditor.run_id, ends, set_aside)
    per_step = groups_per_step or auditor.per_step or 0
    if steps is not None and trained != steps * per_step:
        auditor.problems.append(
            f"{trained} groups were trained; {steps} steps of {per_step} are {steps * per_step}"
        )
    return Audit(
        problems=[*_begins_late(auditor), *auditor.problems],
        trained=trained,
        watermark=auditor.watermark,
        set_aside=set_aside,
        steps=len(auditor.steps),
        committed=auditor.committed,
        again=auditor.again,
        jobs=auditor.jobs,
        rewinds=auditor.rewinds,
        recoveries=auditor.recoveries,
        re_leases=dict(auditor.causes),
        duplicates=auditor.duplicates,
        ended=auditor.ended,
        first=auditor.first,
    )


def _begins_late(auditor: _Auditor) -> list[str]:
    if not auditor.first:
        return []
    rest = "" if auditor.problems else f"; each from {auditor.first} on was trained exactly once"
    return [
        f"the journal begins with group {auditor.first}, and how those below it were trained is "
        f"written nowhere: of groups 0 to {auditor.first - 1} nothing is proved{rest}"
    ]


@chz.chz
class AuditConfig:
    """Was each prompt group of a run trained exactly once?"""

    out: str = chz.field(doc="the run's directory, which holds ledger.jsonl")
    steps: int | None = chz.field(default=None, doc="the run should have trained so many steps")
    groups_per_step: int | None = chz.field(
        default=None, doc="groups per step, if not those that the ledger was started with"
    )

    @chz.validate
    def _in_range(self) -> None:
        for name in ("steps", "groups_per_step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.groups_per_step is not None and self.steps is None:
            raise ConfigError(f"groups_per_step={self.groups_per_step} needs steps=, too")


def print_audit(config: AuditConfig, console: Console) -> None:
    """Prints it; raises IsothermError (exit code 1) if it does not add up."""
    path = Path(config.out) / "ledger.jsonl"
    found = audit(path, steps=config.steps, groups_per_step=config.groups_per_step)
    for line in found.lines():
        console.print(line, highlight=False, markup=False)
    if found.problems:
        raise IsothermError(f"{path} does not prove that each group was trained exactly once")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(AuditConfig, print_audit, argv)
