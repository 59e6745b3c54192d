"""Journal of the ledger, `out/ledger.jsonl`: every event of every job of a run, one per line.

    {"t": 1790000000.123, "event": "put", "id": 17, "attempt": 1, "worker": "rollout-0", "epoch": 1}

    start      a job began: run (its queue), run_id (of config.json), epoch, settings, watermark,
               set_aside, above (`distill.records.TrainedGroups`); adopted: groups of earlier jobs
               that it takes back, with epoch and attempt of their deliveries on disk and the
               weight version of their first lease
    lease      ids, attempts, worker, epoch, request
    put        id, attempt, worker, epoch: a group arrived and was accepted; constant_reward, if a
               step may skip the group for it; by: numbers of the replicas that scored the group
    dup, late  id, attempt, worker, epoch: a delivery was dropped; late has a reason
    keep       epoch, ids, attempts: these deliveries are on disk (cluster/store)
    fail       id, attempt, worker, reason
    forfeit    worker, ids, inside, reason: the worker died; inside: groups that ran environment
               code, with descriptions of their problems
    expire     ids, reason
    set_aside  id, reason
    take       ids, skipped: the learner took a step; replaced: groups that the step skips
    scorer     replica, who, ...: a scoring engine starts to serve, with the number of this
               lifetime; in_learner: a frozen model in the learner, which scores all trained
               groups; rewards: the reward model
    ask        replicas: canaries are about to be sent to them
    canary     replica, good, ...: the answer of a canary agrees with the first one, or not
    again      ids, reason: delivered groups are leased again, to be scored by another replica
    begin_again  epoch, ids: overdue groups; their leases have ended permanently, and they start
               when they are leased again
    lost       epoch, ids, reason: taken groups whose node is gone
    push       version, ids, watermark, skipped: a push of weights with these groups has begun,
               and overlaps the next step
    train      version, ids, watermark, skipped: weights with these groups are on every engine,
               with or without an earlier `push`
    commit     step, watermark: a checkpoint is on disk
    rewind     epoch, watermark, set_aside, above, reason: the learner returned to a checkpoint
    recover    epoch, ids, set_aside: the queue restarted, and the payloads of `ids` were lost;
               kept: groups that were read from disk. If one of `ids` is among them, it is only
               scored again
    end        the run ended normally

Each line also has `after`, a digest of the line before it ("" in the first line), so that removed,
repeated, moved or edited lines are detected (`broken_links`).

`Replay` reads the journal, after the queue was killed and for the audit (cluster/inspect/audit.py).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.jsonl_log import LineFile, last_line
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_types import Kept, LedgerSettings
from distill.errors import DataError
from distill.records import Lease, TrainedGroups

_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Journal:
    """Appends events to a `LineFile`."""

    def __init__(self, path: str | Path) -> None:
        self._file = LineFile(path)
        self._link: str | None = None  # digest of the last line; read at the first event
        self._together = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Buffer events, and write them at the end in one write."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self._file.flush()

    def record(self, event: str, **fields: Any) -> None:
        if self._link is None:
            self._link = _link(last_line(self._file.path))
        written = {"t": time.time(), "event": event, **fields, "after": self._link}
        line = _ENCODER.encode(written).encode()
        self._link = _link(line)
        self._file.append(line, later=self._together)

    def sync(self) -> None:
        """Sync to disk, so that written events survive a crash of the machine."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def read_journal(path: str | Path) -> Iterator[dict[str, Any]]:
    """Read the events in order. An incomplete last line, cut by a crash, is left out.

    Raises:
        DataError: there is no such file, or a complete line is not an event.
    """
    for number, line in _lines(path):
        yield _event(line, f"{path}, line {number}")


def broken_links(path: str | Path) -> Iterator[str]:
    """Messages about lines whose `after` is not the digest of the line before them.

    Raises:
        DataError: as for `read_journal`.
    """
    before = b""
    for number, line in _lines(path):
        link = _event(line, f"{path}, line {number}").get("after")
        if link != _link(before):
            place = f"line {number - 1}" if before else "the beginning"
            yield (
                f"line {number} does not follow {place} as written: lines were removed, "
                "repeated, moved or edited"
            )
        before = line


def _link(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=8).hexdigest() if line else ""


def _lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Complete lines without their newlines, numbered from 1."""
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, line[:-1]
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); give the out= of a run"
        ) from error


def _event(line: bytes, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"{where}: not an event of a ledger ({error})") from error
    if not isinstance(event, dict) or not {"t", "event"} <= event.keys():
        raise _damaged(f"{where}: not an event of a ledger")
    return event


def _damaged(what: str) -> DataError:
    return DataError(
        f"{what}. Restore the file as the run wrote it, or move it away: the run then continues "
        "from its checkpoint, and its audit covers only what follows"
    )


def replay(path: str | Path, clock: Callable[[], float] = time.monotonic) -> Replay:
    """Replay a journal; a missing file counts as empty.

    The lines are always a prefix of the events that happened, so the replay gives a state that
    existed. Later events, which a full disk may have lost, do not exist for the new ledger, and
    their work is done again.

    Raises:
        DataError: the file is not a journal, or contradicts itself.
    """
    played = Replay(clock)
    for event in read_journal(path) if Path(path).exists() else ():
        played.play(event)
        if played.contradictions:
            raise _damaged(f"{path}, {played.contradictions[0]}")
    return played


class Replay:
    """Replay of a journal's events on a ledger, which must record the same events again.

    Attributes:
        run: token of the newest job's queue; empty for an empty journal.
        run_id: run of the newest job; empty if the journal does not contain it.
        ended: True if the newest job ended normally.
        ledger: ledger of the newest job after the last event; None for an empty journal.
        contradictions: for each job, a message about the first event that its ledger would not
            have recorded.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = self.run_id = ""
        self.ended = False
        self.ledger: Ledger | None = None
        self.contradictions: list[str] = []
        self._clock = clock
        self._recorded: deque[dict[str, Any]] = deque()  # by the ledger, and not yet compared
        self._line = 0
        self._contradicted = False  # True: later events of the job cannot be compared

    @property
    def epoch(self) -> int:
        """Newest epoch; 0 for an empty journal."""
        return self.ledger.epoch if self.ledger else 0

    def play(self, event: Mapping[str, Any]) -> None:
        self._line += 1
        try:
            if event["event"] == "start":
                self._start(event)
            elif event["event"] == "end":
                self.ended = True
            elif self.ledger is not None and not self._contradicted:
                self._compare(self.ledger, event)
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
            self._contradicted = True
            self.contradictions.append(
                f"line {self._line} contradicts the lines before it: {dict(event)}: {error!r}"
            )

    def _start(self, event: Mapping[str, Any]) -> None:
        self.run, self.run_id, self.ended = event["run"], event.get("run_id", ""), False
        self._contradicted = False
        self._recorded.clear()
        settings, trained = LedgerSettings(**event["settings"]), TrainedGroups.from_json(event)
        self.ledger = Ledger(
            settings, trained, epoch=event["epoch"], clock=self._clock, record=self._record,
            adopted=adopted_of(event),
        )  # fmt: skip

    def _record(self, event: str, **fields: Any) -> None:
        self._recorded.append({"event": event, **fields})

    def _compare(self, ledger: Ledger, event: Mapping[str, Any]) -> None:
        if event["event"] == "recover":  # the queue may have died during a call
            self._recorded.clear()
        if not self._recorded:
            _apply(ledger, event)
        recorded = self._recorded.popleft() if self._recorded else {}
        assert recorded and recorded.items() <= event.items(), f"the ledger records {recorded}"


def _apply(ledger: Ledger, event: Mapping[str, Any]) -> None:
    """Repeat the call of the ledger that recorded the event."""
    match event["event"]:
        case "lease":
            ledger.lease(event["worker"], len(event["ids"]), event["request"])
        case "put" | "dup" | "late":
            ledger.deliver(
                _lease(event, event["epoch"]), event["worker"], event.get("constant_reward"),
                event.get("by", ()),
            )  # fmt: skip
        case "keep":
            ledger.keep(dict(zip(event["ids"], event["attempts"], strict=True)))
        case "fail":
            ledger.fail(_lease(event, ledger.epoch), event["reason"], event["worker"])
        case "forfeit":
            ledger.report_user_code(event["worker"], by_id(event["inside"]))
            ledger.forfeit(event["worker"], event["reason"])
        case "expire":
            ledger.release(event["ids"], event["reason"])
        case "scorer":
            kind = {name: event[name] for name in ("in_learner", "rewards") if name in event}
            ledger.scorer(event["replica"], **kind)
        case "ask":
            ledger.ask(event["replicas"])
        case "canary":
            ledger.canary(event["replica"], event["good"])
        case "begin_again":
            ledger.restart_groups(event["ids"])
        case "take":
            ledger.take()
        case "lost":
            ledger.mark_lost(event["ids"], event["reason"])
        case "push":
            ledger.push(event["version"], ledger.trained.after(*step_of(event)))
        case "train":
            ids, skipped = step_of(event)
            pushed = ids == ledger.trained.since(ledger.published)
            trained = ledger.trained if pushed else ledger.trained.after(ids, skipped)
            ledger.publish(event["version"], trained)
        case "commit":
            ledger.commit(event["step"], event["watermark"])
        case "rewind":
            ledger.rewind(TrainedGroups.from_json(event), event["reason"])
        case "recover":
            ledger.recover(event.get("kept", ()))
        case kind:
            raise ValueError(f"{kind!r} is not an event that a ledger records")


def adopted_of(event: Mapping[str, Any]) -> dict[int, Kept]:
    """Groups of earlier jobs that the job of a `start` event takes back, by id."""
    return {int(group_id): Kept(*kept) for group_id, kept in event.get("adopted", {}).items()}


def step_of(event: Mapping[str, Any]) -> tuple[list[int], dict[int, str]]:
    """Ids of a step's event, and the reasons of the groups that it skips, by id."""
    return event["ids"], by_id(event["skipped"])


def by_id(reasons: Mapping[str, str]) -> dict[int, str]:
    return {int(group_id): reason for group_id, reason in reasons.items()}


def _lease(event: Mapping[str, Any], epoch: int) -> Lease:
    return Lease(group_id=event["id"], attempt=event["attempt"], epoch=epoch)
