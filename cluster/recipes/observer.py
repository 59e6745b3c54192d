"""Observation of a run from the code that started it, in the same process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.runtime.driver import Signals


def _unseen(_metrics: Mapping[str, float]) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """
    Attributes:
        line: is given every line of metrics.jsonl, once it is on disk.
        signals: of the run; with one received, the run ends as it does on that signal.
    """

    line: Callable[[Mapping[str, float]], None] = _unseen
    signals: Signals = field(default_factory=Signals)
