"""Metrics of a run for Prometheus, through Ray's exporter on each node.

The driver's node exports the metrics, labelled with the run's name and id. `opd/reverse_kl` is
exported as `ray_isotherm_opd_reverse_kl`. deploy/grafana-dashboard.json is a dashboard for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.run_files.metric_table import HEADLINES, described

# Exported values that are not in metrics.jsonl, with their meaning.
COUNTED = {
    "pool/policy": "policy engines that serve",
    "restarts": "restarts of actors since the run began or was resumed",
    "findings": "findings since the run began or was resumed",
}
TRAINED_TOKENS = "train/tokens"
GAUGES = ("step", *HEADLINES, *COUNTED)


def exported_name(metric: str) -> str:
    """Name of a metric in Ray. Ray's exporter adds the prefix `ray_`."""
    return "isotherm_" + re.sub(r"\W", "_", metric)


class RayExporter:
    """Tracker that passes a run's main metrics to Ray's exporter; needs a connection to Ray.

    Args:
        run, run_id: labels of each metric.
    """

    def __init__(self, run: str, run_id: str) -> None:
        from ray.util.metrics import Counter, Gauge  # not in a local run

        labels = {"run": run, "run_id": run_id}
        keys = tuple(labels)
        self._gauges = {
            name: Gauge(exported_name(name), _meaning(name), keys).set_default_tags(labels)
            for name in GAUGES
        }
        self._trained_tokens = Counter(
            exported_name(TRAINED_TOKENS), "trained tokens", keys
        ).set_default_tags(labels)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        late = "eval/version" in metrics
        for name, value in (metrics if late else {"step": step, **metrics}).items():
            if name in self._gauges:
                self._gauges[name].set(value)
        if trained := metrics.get(TRAINED_TOKENS):
            self._trained_tokens.inc(trained)

    def show(self, rollouts: Sequence[object], step: int) -> None:
        """Do nothing: rollouts are not numbers."""

    def alert(self, text: str, step: int) -> None:
        """Do nothing: findings and restarts are counted among the metrics."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Do nothing: Ray drops the driver's metrics when the driver ends."""


def _meaning(name: str) -> str:
    if name in COUNTED:
        return COUNTED[name]
    metric = described(name)
    assert metric is not None, name
    return f"{metric.meaning} ({metric.unit})" if metric.unit else metric.meaning
