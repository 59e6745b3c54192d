"""History of a run's metrics for detectors: series with running means."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping

import numpy as np

# Approximate number of steps in a running mean.
SPAN = 8


class Series:
    """The values of one metric, and their running means.

    Up to `SPAN` values, the running mean is the plain mean; afterwards each new value has a weight
    of 1 / SPAN. A run has tens of series, which grow with every step: arrays take 24 bytes a value,
    and NumPy reads them without a copy.
    """

    def __init__(self) -> None:
        self.steps, self.values, self.means = array("q"), array("d"), array("d")

    def add(self, step: int, value: float) -> None:
        last = self.means[-1] if self.means else value
        weight = max(1 / (len(self.means) + 1), 1 / SPAN)
        self.steps.append(step)
        self.values.append(value)
        self.means.append(last + weight * (value - last))

    def drop_after(self, step: int) -> None:
        kept = bisect_right(self.steps, step)
        del self.steps[kept:], self.values[kept:], self.means[kept:]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def now(self) -> float:
        """Running mean at the newest step."""
        return self.means[-1]

    @property
    def start(self) -> float:
        """Mean of the first `SPAN` values."""
        return self.means[min(SPAN, len(self)) - 1]

    @property
    def error(self) -> float:
        """Standard error of a mean of `SPAN` values, estimated from successive differences."""
        if len(self) < 2:
            return 0.0
        return float(np.std(np.diff(self.values)) / np.sqrt(2 * SPAN))

    def lowest(self) -> int:
        """Index of the lowest running mean of at least `SPAN` values."""
        first = min(SPAN, len(self)) - 1
        return first + int(np.argmin(np.asarray(self.means)[first:]))

    def highest(self) -> int:
        """Index of the highest running mean of at least `SPAN` values."""
        first = min(SPAN, len(self)) - 1
        return first + int(np.argmax(np.asarray(self.means)[first:]))

    def at(self, step: int) -> float:
        """Running mean after `step`."""
        return self.means[max(0, bisect_right(self.steps, step) - 1)]


class History:
    """The metrics of all steps of a run so far."""

    def __init__(self, steps: Iterable[Mapping[str, float]] = ()) -> None:
        self._series: dict[str, Series] = {}
        self.step = 0
        for metrics in steps:
            self.add(metrics)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one step, which include `step`."""
        self.step = int(metrics["step"])
        for name, value in metrics.items():
            if np.isfinite(value):
                self._series.setdefault(name, Series()).add(self.step, value)

    def rewind(self, step: int) -> None:
        """Drop the steps after `step`, which are repeated."""
        self.step = step
        for series in self._series.values():
            series.drop_after(step)

    def of(self, name: str, least: int = 1) -> Series | None:
        """Series of a metric, if the newest step has it and there are at least `least` values."""
        series = self._series.get(name)
        if series is None or len(series) < least or series.steps[-1] != self.step:
            return None
        return series
