"""Groups on disk according to a run's journal, and those that were sampled again nevertheless."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.queue.journal import by_id, read_journal
from distill.records import TrainedGroups


class KeptInJournal:
    """Groups on disk, according to the events of a journal.

    Attributes:
        waiting: groups that are on disk, as they were delivered last, and not trained.
        sampled_again: complaints of such groups that were sampled again: after a death of the
            queue, or by a job that began where the last one ended. (Groups of a job that begins
            further back may have been sampled by weights that are lost.)
    """

    def __init__(self, journal: Path) -> None:
        self.waiting: set[int] = set()
        self.sampled_again: list[str] = []
        self._to_score: set[int] = set()  # on disk, with scores that are to be made again
        self._trained = TrainedGroups()
        for event in read_journal(journal):
            self._read(event)

    def _read(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "keep":
                self.waiting |= set(event["ids"])
                self._to_score -= set(event["ids"])
            case "put":
                self._to_score |= {event["id"]} & self.waiting
            case "again":
                self._to_score |= set(event["ids"]) & self.waiting
            case "begin_again" | "lost":
                self.waiting -= set(event["ids"])
            case "push" | "train":
                # A `train` may repeat the ids of its `push`.
                if not all(group_id in self._trained for group_id in event["ids"]):
                    self._trained = self._trained.after(event["ids"], by_id(event["skipped"]))
                self.waiting -= {*event["ids"], *map(int, event["skipped"])}
            case "set_aside":
                self.waiting -= {event["id"]}
            case "rewind":
                self._trained = TrainedGroups.from_json(event)
                self.waiting.clear()
            case "recover":
                self._report((self.waiting - self._to_score) & set(event["ids"]), "the queue")
            case "start":
                back = set(map(int, event.get("adopted", ())))
                trained = TrainedGroups.from_json(event)
                if trained == self._trained:
                    self._report(self.waiting - back, "a new job")
                self._trained = trained
                self.waiting, self._to_score = back, set(back)

    def _report(self, lost: set[int], who: str) -> None:
        if lost:
            self.sampled_again.append(f"{who} samples groups {sorted(lost)} again, of the disk")
