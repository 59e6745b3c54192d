"""Deaths in a rehearsal: actors of each kind are killed in turn, each after the last recovered."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util import list_named_actors

from cluster.jsonl_log import read_lines
from cluster.runtime.driver import Signals

# Number of steps after the last recovery before the run is ended.
_STEPS_AFTER = 2


class Strikes:
    """Kills actors between a run's steps, in the driver's process.

    Args:
        kinds: roles of the actors, in the order in which they are killed.
        events: the run's events.jsonl.
        signals: signals of the run, by which it is ended.
        deadline_s: deadline of all deaths and recoveries, after which the run is ended.

    Attributes:
        recoveries: for each kind of actor that was killed, seconds from the detection of its death
            until a replacement served; None if none served in time, or there was no such actor.
    """

    def __init__(self, kinds: list[str], events: Path, signals: Signals, deadline_s: float) -> None:
        self.recoveries: dict[str, float | None] = {}
        self.ended = False
        self._waiting, self._events, self._signals = list(kinds), events, signals
        self._deadline = time.monotonic() + deadline_s
        self._victim: str | None = None
        self._known = 0  # restarts of the victim's kind before its death
        self._steps_after = 0

    def line(self, metrics: Mapping[str, float]) -> None:
        """`Observer.line`: after each step, record a recovery or kill the next actor."""
        if "time/step" not in metrics or self.ended:
            return
        if self._victim is not None and (seconds := self._returned()) is not None:
            self.recoveries[self._victim] = seconds
            self._victim = None
        if time.monotonic() > self._deadline:
            self._abandon()
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
            self.recoveries[kind] = None
            return
        self._victim, self._known = kind, len(self._restarts(kind))
        ray.kill(ray.get_actor(living[0]), no_restart=False)

    def _returned(self) -> float | None:
        """Seconds from the detection of the victim's death until it served again; None: not yet."""
        assert self._victim is not None
        new = self._restarts(self._victim)[self._known :]
        return new[0]["seconds"] if new else None

    def _restarts(self, kind: str) -> list[dict[str, Any]]:
        restarts = (e for e in read_lines(self._events, {"event"}) if e["event"] == "restart")
        return [event for event in restarts if str(event["who"]).startswith(kind)]

    def _abandon(self) -> None:
        left = ([] if self._victim is None else [self._victim]) + self._waiting
        self.recoveries |= dict.fromkeys(left)
        self._end()

    def _end(self) -> None:
        """End the run as Ctrl-C does, with a checkpoint from which it can be resumed."""
        self.ended = True
        self._signals.received = signal.SIGINT
