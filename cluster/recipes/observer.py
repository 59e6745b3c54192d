"""Observation of a run from the code that started it, in the same process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.runtime.driver import Signals


def _ignore(_metrics: Mapping[str, float]) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Callbacks into the code that started a run.

    Attributes:
        line: receives every line of metrics.jsonl, once it is on disk.
        signals: signals of the run; setting one ends the run as the signal does.
    """

    line: Callable[[Mapping[str, float]], None] = _ignore
    signals: Signals = field(default_factory=Signals)
