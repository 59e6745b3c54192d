"""The ledger's journal, `out/ledger.jsonl`: every event of every job of a run, one per line.

    {"t": 1790000000.123, "event": "put", "id": 17, "attempt": 1, "worker": "rollout-0", "epoch": 1}

    start      a job began: run (its queue), run_id (config.json's), epoch, settings, watermark,
               set_aside, above (`distill.delivery.TrainedGroups`)
    lease      ids, attempts, worker, epoch, request
    put        id, attempt, worker, epoch: it arrived and is wanted; constant_reward, if it is one
               that steps may pass over; by, the scorers that scored it, by their numbers
    dup, late  the same, and is dropped; late has a reason
    fail       id, attempt, worker, reason       forfeit   worker, ids, inside, reason: the
               worker died; `inside` are those that ran their environment's code, and its problem
    expire     ids, reason                       set_aside id, reason
    take       ids, skipped: handed to the learner; replaced, those that it passes over
    scorer     replica, who, ...: a scoring engine begins to serve by this number, of one life of
               it; in_learner, of a frozen model there, which scores all that is trained; rewards,
               of the reward model
    ask        replicas: canaries are about to be sent to them
    canary     replica, good, ...: the answer, as at first or moved
    again      ids, reason: delivered, and leased again to be scored by another
    begin_again  epoch, ids: overdue; their leases are over for good, and they start only when they
               are leased again
    lost       epoch, ids, reason: taken, and gone with the node that held them
    push       version, ids, watermark, skipped: in weights that are on their way to the engines,
               beside the next step
    train      the same: in weights that are on every engine, pushed before or not
    commit     step, watermark: in a checkpoint on disk
    rewind     epoch, watermark, set_aside, above, reason: the learner went back to a checkpoint
    recover    epoch, ids, set_aside: the queue came back, the payloads of `ids` were lost
    end        the run ended as it should

Each line also has `after`, a digest of the line before it ("" in the first): so lines that were
removed, repeated, moved or edited are known (`broken_links`).

Two read it: the queue that was killed (`replay`), and cluster/inspect/audit.py.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.jsonl_log import LineFile, last_line
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_settings import LedgerSettings
from distill.delivery import Lease, TrainedGroups
from distill.errors import DataError

_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Journal:
    """Appends events to a `LineFile`."""

    def __init__(self, path: str | Path) -> None:
        self._file = LineFile(path)
        self._link: str | None = None  # to the last line; found by the first event
        self._together = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context that buffers records, and writes them at its end in one write."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self._file.flush()

    def record(self, event: str, **fields: Any) -> None:
        """Appends an event."""
        if self._link is None:
            self._link = _link(last_line(self._file.path))
        written = {"t": time.time(), "event": event, **fields, "after": self._link}
        line = _ENCODER.encode(written).encode()
        self._link = _link(line)
        self._file.append(line, later=self._together)

    def sync(self) -> None:
        """Syncs to disk: what was written survives a crash of the machine."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def read_journal(path: str | Path) -> Iterator[dict[str, Any]]:
    """The events in order. A last line that was cut short by a crash is left out.

    Raises:
        DataError: there is no such file, or a line in the middle is not an event.
    """
    for number, line in _lines(path):
        yield _event(line, f"{path}, line {number}")


def broken_links(path: str | Path) -> Iterator[str]:
    """Complaints of lines that do not follow the one before them, as they were written.

    Raises:
        DataError: as `read_journal` does.
    """
    before = b""
    for number, line in _lines(path):
        link = _event(line, f"{path}, line {number}").get("after")
        if link != _link(before):
            place = f"line {number - 1}" if before else "the beginning"
            yield (
                f"line {number} does not follow {place}, as it was written: lines were removed, "
                "repeated, moved or edited"
            )
        before = line


def _link(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=8).hexdigest() if line else ""


def _lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines without their newlines, numbered from 1."""
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, line[:-1]
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); a run writes it to its out="
        ) from error


def _event(line: bytes, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise _damaged(f"{where}: not an event of a ledger ({error})") from error
    if not isinstance(event, dict) or not {"t", "event"} <= event.keys():
        raise _damaged(f"{where}: not an event of a ledger")
    return event


def _damaged(what: str) -> DataError:
    return DataError(
        f"{what}. Put the file back as the run left it; or move it away: the run then goes on from "
        "its checkpoint, and its audit proves nothing of what came before"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """State of the newest job of a journal, replayed.

    Attributes:
        run: the token of that job's queue; "" of an empty journal.
        epoch: the newest; 0 of an empty journal.
        ended: the job ended as it should.
        ledger: as it was when the last line was written; None of an empty journal.
        run_id: the run that the job was of; "" where the journal does not say.
    """

    run: str
    epoch: int
    ended: bool
    ledger: Ledger | None
    run_id: str = ""


def replay(path: str | Path, clock: Callable[[], float] = time.monotonic) -> Replay:
    """Plays the journal again; a file that is not there is empty.

    The lines are always the beginning of what happened, so playing them gives a state that was:
    what came after it (on a full disk) did not happen for the new ledger, and is done again.

    Raises:
        DataError: it is no journal, or contradicts itself.
    """
    ledger, run, run_id, ended = None, "", "", False
    if not Path(path).exists():
        return Replay(run="", epoch=0, ended=False, ledger=None)
    for number, event in enumerate(read_journal(path), start=1):
        try:
            if event["event"] == "start":
                settings = LedgerSettings(**event["settings"])
                trained = TrainedGroups.from_json(event)
                ledger = Ledger(settings, trained, epoch=event["epoch"], clock=clock)
                run, run_id, ended = event["run"], event.get("run_id", ""), False
            elif ledger is not None:
                _apply(ledger, event)
                ended = ended or event["event"] == "end"
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise _damaged(
                f"{path}, line {number} contradicts the lines before it: {event}: {error!r}"
            ) from error
    epoch = ledger.epoch if ledger else 0
    return Replay(run=run, epoch=epoch, ended=ended, ledger=ledger, run_id=run_id)


def _apply(ledger: Ledger, event: Mapping[str, Any]) -> None:
    match event["event"]:
        case "lease":
            leases = ledger.lease(event["worker"], len(event["ids"]), event["request"])
            assert [lease.group_id for lease in leases] == event["ids"], f"it leases {leases}"
        case "put" | "dup" | "late":
            wanted = ledger.deliver(
                _lease(event, event["epoch"]), event["worker"], event.get("constant_reward"),
                event.get("by", ()),
            )  # fmt: skip
            assert wanted == (event["event"] == "put"), "the group was delivered before, or later"
        case "fail":
            ledger.fail(_lease(event, ledger.epoch), event["reason"], event["worker"])
        case "forfeit":
            inside = {int(group_id): problem for group_id, problem in event["inside"].items()}
            ledger.inside(event["worker"], inside)
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
            ledger.begin_again(event["ids"])
        case "take":
            step = ledger.take()
            ids, _ = step_of(event)
            assert step is not None and step.group_ids == ids, f"the next step is {step}"
        case "lost":
            ledger.lose(event["ids"], event["reason"])
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
            ledger.recover()


def step_of(event: Mapping[str, Any]) -> tuple[list[int], dict[int, str]]:
    """Ids of a `take` or `train` event, and the reasons of those that it skips."""
    skipped = {int(group_id): reason for group_id, reason in event["skipped"].items()}
    return event["ids"], skipped


def _lease(event: Mapping[str, Any], epoch: int) -> Lease:
    return Lease(group_id=event["id"], attempt=event["attempt"], epoch=epoch)
