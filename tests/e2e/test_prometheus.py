"""Ray's exporter has the metrics of metrics.jsonl, and the dashboard queries no others."""

import json
import re
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.run_files.prometheus import COUNTED, GAUGES, TRAINED_TOKENS, exported_name
from tests.conftest import TinyPair
from tests.e2e.harness import REPOSITORY, events, finish, lines, metrics, opd_arguments, start
from tests.e2e.ray_head import HOST, ray_head

EXPORTED = {f"ray_{exported_name(name)}": name for name in GAUGES}
TOKENS = f"ray_{exported_name(TRAINED_TOKENS)}_total"
# Ray's processes report every 10 s by default.
OFTEN = {"RAY_metrics_report_interval_ms": "200"}


def queried() -> set[str]:
    """Names of metrics in the queries of the dashboard."""
    board = json.loads((REPOSITORY / "deploy/grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["definition"] for each in board["templating"]["list"] if "definition" in each]
    return set(re.findall(r"ray_isotherm_\w+", " ".join(queries)))


def test_the_dashboard_queries_exported_metrics() -> None:
    assert queried() == {*EXPORTED, TOKENS}


def scraped(port: int, run: str) -> dict[str, float]:
    """The run's metrics on the exporter's page, by name."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
            page = answer.read().decode()
    except OSError:  # not up yet
        return {}
    samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
    return {each.name: each.value for each in samples if each.labels.get("run") == run}


@pytest.mark.e2e
@pytest.mark.slow
def test_metrics_of_a_run_are_exported(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "exported"
    arguments = opd_arguments(
        tiny_pair, out, steps=5, eval_every=2, loss="tests.e2e.rewards:slow_loss"
    )
    seen: dict[str, set[float]] = defaultdict(set)
    for name, value in OFTEN.items():
        monkeypatch.setenv(name, value)
    with ray_head(dashboard=False, environment=OFTEN) as head:
        monkeypatch.setenv("RAY_ADDRESS", head.address)
        run = start("cluster.train", "recipe=opd", *arguments)
        while run.poll() is None:
            for name, value in scraped(head.metrics_port, out.name).items():
                seen[name].add(value)
            time.sleep(0.1)
        finish(run)
    written = {name for line in lines(out) for name in line}
    expected = {name for name, metric in EXPORTED.items() if metric in written | {*COUNTED}}
    assert expected | {TOKENS} == set(seen)
    for name in expected:
        metric = EXPORTED[name]
        values = [line[metric] for line in lines(out) if metric in line]
        if metric in COUNTED:
            values = [0, len(events(out, "finding")), 1]
        assert all(any(value == pytest.approx(v) for v in values) for value in seen[name]), name
    assert {1, 2, 3} <= seen["ray_isotherm_step"]
    trained = [step["train/tokens"] for step in metrics(out)]
    assert seen[TOKENS] <= {sum(trained[: n + 1]) for n in range(len(trained))}
