"""Groups on disk, by a run's journal alone, and those that were sampled again all the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.queue.journal import read_journal


class KeptInJournal:
    """What the events of a journal say of groups on disk.

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
        self._watermark = 0
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
                self._watermark = event["watermark"]
                self.waiting -= {*event["ids"], *map(int, event["skipped"])}
            case "set_aside":
                self.waiting -= {event["id"]}
            case "rewind":
                self._watermark = event["watermark"]
                self.waiting.clear()
            case "recover":
                self._complain((self.waiting - self._to_score) & set(event["ids"]), "the queue")
            case "start":
                back = set(map(int, event.get("adopted", ())))
                if event["watermark"] == self._watermark:
                    self._complain(self.waiting - back, "a new job")
                self._watermark = event["watermark"]
                self.waiting, self._to_score = back, set(back)

    def _complain(self, lost: set[int], who: str) -> None:
        if lost:
            self.sampled_again.append(f"{who} samples groups {sorted(lost)} again, of the disk")
