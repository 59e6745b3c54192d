"""Deaths in a rehearsal: one actor of each kind is killed, and the next once it serves again."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util import list_named_actors

from cluster.jsonl_log import read_lines
from cluster.runtime.driver import Signals

# Steps after the last one has recovered, before the run is ended.
_STEPS_AFTER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A death, and the seconds from its notice until another served in its place.

    `seconds` is None if none did in time.
    """

    who: str
    seconds: float | None


class Strikes:
    """Kills actors between a run's steps, in the process that drives it.

    Args:
        kinds: roles, in the order in which they are struck.
        events: the run's events.jsonl.
        deadline_s: of the whole; later the run is ended as it is.
    """

    def __init__(self, kinds: list[str], events: Path, signals: Signals, deadline_s: float) -> None:
        self.recoveries: list[Recovery] = []
        self.ended = False
        self._waiting, self._events, self._signals = list(kinds), events, signals
        self._give_up_at = time.monotonic() + deadline_s
        self._victim: str | None = None
        self._known = 0  # restarts of the victim's kind before
        self._steps_after = 0

    def line(self, metrics: Mapping[str, float]) -> None:
        """An `Observer.line`: sees each step, and strikes after it."""
        if "time/step" not in metrics or self.ended:
            return
        if self._victim is not None and (seconds := self._returned()) is not None:
            self.recoveries.append(Recovery(who=self._victim, seconds=seconds))
            self._victim = None
        if time.monotonic() > self._give_up_at:
            self._give_up()
        elif self._victim is None and self._waiting:
            self._strike(self._waiting.pop(0))
        elif self._victim is None:
            self._steps_after += 1
            if self._steps_after >= _STEPS_AFTER:
                self._end()

    def _strike(self, kind: str) -> None:
        prefix = f"{kind.replace(' ', '-')}-"
        living = [
            name for name in list_named_actors() if f"{name.rpartition('/')[2]}-".startswith(prefix)
        ]
        if not living:
            self.recoveries.append(Recovery(who=kind, seconds=None))
            return
        self._victim, self._known = kind, len(self._restarts(kind))
        ray.kill(ray.get_actor(living[0]), no_restart=False)

    def _returned(self) -> float | None:
        """Seconds from the notice of the victim's death until it served again, if it does."""
        assert self._victim is not None
        new = self._restarts(self._victim)[self._known :]
        return new[0]["seconds"] if new else None

    def _restarts(self, kind: str) -> list[dict[str, Any]]:
        restarts = (e for e in read_lines(self._events, {"event"}) if e["event"] == "restart")
        return [event for event in restarts if str(event["who"]).startswith(kind)]

    def _give_up(self) -> None:
        left = ([] if self._victim is None else [self._victim]) + self._waiting
        self.recoveries += [Recovery(who=kind, seconds=None) for kind in left]
        self._end()

    def _end(self) -> None:
        """As Ctrl-C ends a run: with a checkpoint, from which it can go on."""
        self.ended = True
        self._signals.received = signal.SIGINT
