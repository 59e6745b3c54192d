"""Worker nodes come for what is pending, go when they are idle, and are replaced when killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from tests.e2e.scaling_cluster import (
    HEAD_TYPE,
    REPOSITORY,
    ScalingCluster,
    WorkerType,
    is_alive,
    scaling_cluster,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Drivers have a process of their own: this one may be connected to the suite's other Ray. Each
# answers a line with a line, among what Ray prints, and ends with its input.
ANSWER = "answer: "
ACTORS = (
    f"ANSWER = {ANSWER!r}"
    + """
import json, ray, sys
ray.init(log_to_driver=False)

@ray.remote(num_cpus=0, resources={"env_slot": 1})
class Guest:
    def node(self):
        return ray.get_runtime_context().get_node_id()

guests = [Guest.remote() for _ in range(3)]
for _ in sys.stdin:
    print(ANSWER + json.dumps(ray.get([guest.node.remote() for guest in guests])), flush=True)
"""
)
GROUPS = (
    f"ANSWER = {ANSWER!r}"
    + """
import json, ray, sys
from ray.util.placement_group import placement_group, placement_group_table
ray.init(log_to_driver=False)
groups = [placement_group([{"env_slot": 1}]) for _ in range(2)]
for _ in sys.stdin:
    tables = [placement_group_table(group) for group in groups]
    found = [[table["state"], table["bundles_to_node_id"].get(0)] for table in tables]
    print(ANSWER + json.dumps(found), flush=True)
"""
)


class Driver:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self) -> list[Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            _, answered, rest = line.partition(ANSWER)
            if answered:  # Ray's own lines may begin or end in the middle of it
                return json.JSONDecoder().raw_decode(rest)[0]
        raise AssertionError("the driver ended")


@contextmanager
def driver(source: str, cluster: ScalingCluster) -> Iterator[Driver]:
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=REPOSITORY,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Driver(process)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


class Planned(Exception):
    """Ends the block early."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ScalingCluster]:
    """Its block ends with an exception, as that of a test that fails; nothing may be left."""
    types = {"env": WorkerType(resources={"CPU": 1, "env_slot": 1}, maximum=3)}
    entered: list[ScalingCluster] = []
    processes: list[psutil.Process] = []
    with suppress(Planned), scaling_cluster(types, idle_s=2) as made:
        entered.append(made)
        yield made
        processes += made.processes()
        raise Planned
    assert len(processes) > 3
    assert not any(is_alive(process) for process in processes)
    assert not entered[0].processes()
    assert not entered[0].directory.exists()


def test_a_node_comes_for_each_pending_actor_and_goes_with_it(cluster: ScalingCluster) -> None:
    (head,) = cluster.nodes()
    assert head.type == HEAD_TYPE and head.resources["CPU"] == 1
    with driver(ACTORS, cluster) as guests:
        nodes = guests.ask()  # once all three run
        workers = cluster.workers()
        assert sorted(nodes) == sorted(worker.node_id for worker in workers)
        assert len(set(nodes)) == 3
        assert all(worker.type == "env" for worker in workers)
        assert all(worker.resources["env_slot"] == 1 for worker in workers)
    assert cluster.wait_for_workers(0) == []


def test_a_bundle_whose_node_is_killed_moves_to_a_new_one(cluster: ScalingCluster) -> None:
    with driver(GROUPS, cluster) as groups:
        wait_until(lambda: all(s == "CREATED" for s, _ in groups.ask()), "two placement groups")
        (_, lost), (_, kept) = groups.ask()
        assert {lost, kept} == {worker.node_id for worker in cluster.workers()}
        assert cluster.kill_a_worker_node(lost) == lost

        def has_moved() -> bool:
            state, node = groups.ask()[0]
            return state == "CREATED" and node != lost

        wait_until(has_moved, "the bundle on another node")
        (_, moved), (_, unmoved) = groups.ask()
        assert unmoved == kept and moved not in (lost, kept)
        assert {moved, kept} == {worker.node_id for worker in cluster.wait_for_workers(2)}
    assert cluster.wait_for_workers(0) == []
