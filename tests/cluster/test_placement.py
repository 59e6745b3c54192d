"""Placement groups on real Ray: reservations, waits and releases."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import pytest
import ray

from cluster.placement.connect import join_local
from cluster.placement.local_head import LocalHead
from cluster.placement.placement_groups import Placement
from cluster.placement.resources import PlannedGroup, ResourceDemand, lacking_of
from distill.errors import ConfigError
from tests.e2e.harness import REPOSITORY
from tests.leftovers import living_actors
from tests.refusals import refuses
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.e2e

ONE = {"CPU": 1.0}


class Member:
    def group(self) -> str:
        return ray.get_runtime_context().get_placement_group_id() or ""


def placement(*roles: ResourceDemand, colocate: tuple[str, ...] = ()) -> Placement:
    return Placement(roles, colocate=[colocate], name="test")


def reserve(
    placement: Placement,
    deadline_s: float = DEADLINE_S,
    print_line: Callable[[str], None] = print,
    poll: Callable[[], None] = lambda: None,
) -> None:
    placement.reserve(deadline_s=deadline_s, print_line=print_line, poll=poll)


def start(placement: Placement, role: str, index: int, **options: Any) -> Any:
    return ray.remote(Member).options(**placement.options(role, index), **options).remote()


_heads: list[LocalHead] = []


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0)


@pytest.fixture(autouse=True)
def idle(ray_cluster: None) -> None:
    """All CPUs are free. If Ray has not freed some, it is restarted with a warning."""
    deadline = time.monotonic() + 60
    while free_cpus() != 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    if (free := free_cpus()) != 8:
        held = [group for group in ray.util.placement_group_table().values() if is_there(group)]
        warnings.warn(f"{free:g} of 8 CPUs are free: {living_actors()}, {held}", stacklevel=1)
        ray.shutdown()
        _heads.append(LocalHead(8))
        join_local(_heads[-1], "tests")


def is_there(group: dict[str, object]) -> bool:
    return group["state"] != "REMOVED"


def test_members_start_in_the_bundles_that_were_reserved() -> None:
    mine = placement(
        ResourceDemand(name="policy", count=2, resources=ONE),
        ResourceDemand(name="learner", count=1, resources={"CPU": 2, "GPU": 0}),
        ResourceDemand(name="worker", count=3, resources={"CPU": 0}),
    )
    reserve(mine)
    until(lambda: free_cpus() == 4)
    policies = [start(mine, "policy", i) for i in range(2)]
    groups = ray.get([actor.group.remote() for actor in policies])
    assert groups[0] and groups[0] == groups[1]
    learner, worker = start(mine, "learner", 0), start(mine, "worker", 2)
    assert ray.get(learner.group.remote()) not in ("", groups[0])
    assert ray.get(worker.group.remote()) == "", "a member without resources has a bundle"
    assert free_cpus() == 4, "a member took what was not its bundle's"
    mine.release()
    mine.release()
    until(lambda: free_cpus() == 8)


def test_a_member_with_a_span_shares_the_bundles_of_as_many_others() -> None:
    mine = placement(
        ResourceDemand(name="learner", count=4, resources=ONE),
        ResourceDemand(name="policy", count=2, resources=ONE, span=2),
        colocate=("learner", "policy"),
    )
    reserve(mine)
    table = ray.util.placement_group_table()
    made = [group for group in table.values() if group["state"] == "CREATED"]
    assert [group["strategy"] for group in made] == ["STRICT_PACK"] * 2, "one a node with two GPUs"
    assert [group["bundles"] for group in made] == [{0: {"CPU": 2}, 1: {"CPU": 2}}] * 2
    bundles = {
        (role, index, part): _bundle_of(mine, role, index, part)
        for role, count, span in (("learner", 4, 1), ("policy", 2, 2))
        for index in range(count)
        for part in range(span)
    }
    for worker in range(4):
        assert bundles["learner", worker, 0] == bundles["policy", worker // 2, worker % 2]
    assert len(set(bundles.values())) == 4
    members = [start(mine, *who) for who in (("policy", 1), ("learner", 2), ("learner", 3))]
    assert len(set(ray.get([member.group.remote() for member in members]))) == 1
    mine.release()


@pytest.mark.parametrize("pairs", [False, True])
def test_members_that_are_together_are_on_one_node(pairs: bool) -> None:
    mine = placement(
        ResourceDemand(name="policy", count=4, resources=ONE),
        ResourceDemand(name="learner", count=4, resources=ONE, together=2),
        colocate=("learner", "policy") if pairs else (),
    )
    reserve(mine)
    groups = [_bundle_of(mine, "learner", worker, 0) for worker in range(4)]
    assert len(set(groups)) == 4
    assert groups[0][0] == groups[1][0] != groups[2][0] == groups[3][0]
    for number, (group, _) in enumerate(groups):
        [made] = [
            each for key, each in ray.util.placement_group_table().items() if key == group.hex()
        ]
        assert made["strategy"] == "STRICT_PACK" and len(made["bundles"]) == 2
        assert (_bundle_of(mine, "policy", number, 0) == groups[number]) == pairs
    mine.release()


def _bundle_of(mine: Placement, *member: Any) -> tuple[Any, int]:
    strategy = mine.options(*member)["scheduling_strategy"]
    return strategy.placement_group.id, strategy.placement_group_bundle_index


def test_a_demand_above_the_whole_cluster_is_refused_at_once() -> None:
    mine = placement(
        ResourceDemand(name="learner", count=1, resources=ONE),
        ResourceDemand(name="policy", count=2, resources={"CPU": 1, "GPU": 1}),
    )
    with pytest.raises(ConfigError) as refused:
        reserve(mine)
    for fact in ("policy (2 x 1 CPU, 1 GPU)", "8 CPU, 0 GPU on 1 node", "3 CPU, 2 GPU in all"):
        assert fact in str(refused.value)
    pairs = [
        ResourceDemand(name=name, count=8, resources={"CPU": 1, "GPU": 1})
        for name in ("learner", "policy")
    ]
    with pytest.raises(ConfigError):
        reserve(placement(*pairs, colocate=("learner", "policy")))
    assert free_cpus() == 8


def test_a_busy_cluster_is_waited_for_until_the_deadline() -> None:
    others = placement(ResourceDemand(name="other", count=6, resources=ONE))
    reserve(others)
    lines: list[str] = []
    mine = placement(
        ResourceDemand(name="learner", count=1, resources=ONE),
        ResourceDemand(name="policy", count=3, resources=ONE),
    )
    with refuses(ConfigError, "cluster.start_deadline_s"):
        reserve(mine, 2, lines.append)
    assert "policy (3 x 1 CPU)" in lines[-1] and lines[-1].endswith("s of 2 s")
    until(lambda: free_cpus() == 2)  # the learner's bundle is free again
    polls = iter([others.release])
    reserve(mine, poll=lambda: next(polls, lambda: None)())
    mine.release()


@pytest.mark.slow
def test_two_runs_that_wait_for_each_other_s_bundles_start_in_sequence() -> None:
    def run(name: str, learners: int, policies: int) -> Placement:
        counts = {"learner": learners, "policy": policies}
        demands = [ResourceDemand(name=n, count=c, resources=ONE) for n, c in counts.items()]
        return Placement(demands, name=name)

    others = run("third", 3, 0), run("fourth", 2, 0)
    for other in others:
        reserve(other)
    runs = run("first", 3, 4), run("second", 3, 3)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(reserve, runs[0])
        until(lambda: holds("first"))  # 3 of 8 CPUs, as the third run; it lacks 4
        others[0].release()
        second = threads.submit(reserve, runs[1])
        until(lambda: holds("second"))  # 3 CPUs; it lacks 3
        others[1].release()
        wait([first, second], return_when=FIRST_COMPLETED)
        assert first.done() != second.done()
        runs[0 if first.done() else 1].release()
        first.result()
        second.result()
    for each in runs:
        each.release()


def holds(run: str) -> bool:
    """True if a learner's group has room, and one of policies waits."""
    states = {g["name"]: g["state"] for g in ray.util.placement_group_table().values()}
    return (states.get(f"{run}/learner"), states.get(f"{run}/policy")) == ("CREATED", "PENDING")


def test_a_signal_ends_the_wait_and_leaves_nothing_reserved() -> None:
    others = placement(ResourceDemand(name="other", count=6, resources=ONE))
    reserve(others)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reserve(placement(ResourceDemand(name="policy", count=3, resources=ONE)), poll=interrupt)
    others.release()
    until(lambda: free_cpus() == 8)
    time.sleep(1)
    assert free_cpus() == 8, "a cancelled reservation was made later"


def test_members_are_added_when_there_is_room_and_removed() -> None:
    mine = placement(ResourceDemand(name="policy", count=1, resources={"CPU": 5}))
    reserve(mine)
    first, second = (
        mine.add("policy"),
        placement(ResourceDemand(name="other", count=1, resources={"CPU": 3})),
    )
    reserve(second)
    assert first == 1 and not mine.lacking("policy", 0) and mine.lacking("policy", 1)
    mine.remove("policy", 1)  # while it still waits
    assert mine.lacking("policy", 1)
    second.release()
    assert mine.add("policy") == 2
    assert mine.lacking("policy", 2), "5 of 8 are taken"
    mine.release()

    mine = placement(ResourceDemand(name="policy", count=1, resources=ONE))
    reserve(mine)
    assert mine.add("policy") == 1
    until(lambda: not mine.lacking("policy", 1))
    added = start(mine, "policy", 1)
    assert ray.get(added.group.remote())
    until(lambda: free_cpus() == 6)
    mine.remove("policy", 1)
    until(lambda: free_cpus() == 7)
    mine.remove("policy", 0)
    assert [mine.add("policy"), mine.add("policy")] == [0, 2], "the reserved bundle is not first"
    until(lambda: not mine.lacking("policy", 2))
    assert free_cpus() == 6
    mine.release()


@pytest.mark.parametrize(
    ("nodes", "bundles", "lacking"),
    [
        ([{"CPU": 4}], [{"CPU": 1}] * 4, []),
        ([{"CPU": 4}], [{"CPU": 1}] * 5, ["role"]),
        ([{"CPU": 2}, {"CPU": 2}], [{"CPU": 3}], ["role"]),  # no node holds the bundle
        ([{"CPU": 3}, {"CPU": 3}], [{"CPU": 2}] * 3, ["role"]),  # 6 in all; one would be split
        ([{"GPU": 1, "CPU": 9}], [{"GPU": 0.1, "CPU": 0.1}] * 10, []),
        ([{"GPU": 1, "CPU": 9}], [{"GPU": 0.1, "CPU": 1}] * 10, ["role"]),
        ([{"CPU": 4}], [{"CPU": 3, "big": 1}, {"CPU": 1}], ["role"]),
        ([{"CPU": 3, "big": 1}, {"CPU": 1}], [{"CPU": 3, "big": 1}, {"CPU": 1}], []),
    ],
)
def test_roles_that_cannot_fit_are_found(nodes: list, bundles: list, lacking: list) -> None:
    assert lacking_of({"role": PlannedGroup("role", bundles)}, nodes) == lacking


@pytest.mark.parametrize(
    ("nodes", "lacks"),
    [
        ([{"GPU": 8}, {"GPU": 8}], False),
        ([{"GPU": 16}], True),  # both bundles, and on one node
        ([{"GPU": 16}, {"GPU": 4}], True),
        ([{"GPU": 8}, {"GPU": 4}, {"GPU": 9}], False),
    ],
)
def test_bundles_of_one_server_are_on_different_nodes(nodes: list, lacks: bool) -> None:
    demand = ResourceDemand(name="policy", count=1, resources={"GPU": 8}, nodes=2)
    assert lacking_of({"policy-0": PlannedGroup.of_one(demand)}, nodes) == ["policy-0"] * lacks


def test_bundles_that_one_member_spans_are_on_one_node() -> None:
    group = PlannedGroup("learner+policy", [{"GPU": 1}] * 2, together=True)
    assert lacking_of({"0": group}, [{"GPU": 1}] * 2) == ["0"]
    assert lacking_of({"0": group}, [{"GPU": 1}, {"GPU": 2}]) == []


_LOSE_A_NODE = """
import json, ray
from ray.cluster_utils import Cluster
from cluster.placement.placement_groups import Placement
from cluster.placement.resources import ResourceDemand
from tests.waiting import until
class Member:
    def node(self):
        return ray.get_runtime_context().get_node_id()
cluster = Cluster()
cluster.add_node(num_cpus=0)
workers = [cluster.add_node(num_cpus=1, resources={"work": 1}) for _ in range(2)]
cluster.connect()
mine = Placement(
    [ResourceDemand(name="policy", count=2, resources={"CPU": 1, "work": 0.5})],
    name="x"
)
mine.reserve(deadline_s=60, print_line=print, poll=lambda: None)
kind = ray.remote(Member)
forever = {"max_restarts": -1, "max_task_retries": -1}
members = [kind.options(**mine.options("policy", i), **forever).remote() for i in range(2)]
before = ray.get([member.node.remote() for member in members])
lost = next(worker for worker in workers if worker.node_id == before[1])
cluster.remove_node(lost, allow_graceful=False)
until(lambda: mine.lacking("policy", 1))
others = not mine.lacking("policy", 0)
lacking = mine.lacking("policy", 1)
new = cluster.add_node(num_cpus=1, resources={"work": 1}).node_id
until(lambda: not mine.lacking("policy", 1))
after = ray.get([member.node.remote() for member in members], timeout=120)
ray.kill(members[1])
again = ray.get(kind.options(**mine.options("policy", 1)).remote().node.remote(), timeout=120)
print(json.dumps({"before": before, "after": after, "again": again, "new": new, "others": others,
    "lacking": lacking}))
mine.release()
ray.shutdown()
cluster.shutdown()
"""


_SHARED_GPUS = """
import json, ray
from cluster.hosts.actors import deferred
from cluster.hosts.actors import early_setting_on_gpus
from cluster.placement.placement_groups import Placement
from cluster.placement.resources import ResourceDemand
from tests.cluster.gpu_seer import Seer
ray.init(address="local", num_cpus=12, num_gpus=6, include_dashboard=False)
half = {"CPU": 1, "GPU": 0.5}
mine = Placement(
    [
        ResourceDemand(name="learner", count=4, resources=half),
        ResourceDemand(name="policy", count=2, resources=half, span=2),
        *(ResourceDemand(name=name, count=1, resources=half, span=2) for name in "ab"),
    ],
    colocate=[("learner", "policy"), ("a", "b")], name="x",
)
mine.reserve(deadline_s=60, print_line=print, poll=lambda: None)
kind = ray.remote(deferred(Seer))
workers = [kind.options(**mine.options("learner", i)).remote() for i in range(4)]
def engine(index, role="policy"):
    server = early_setting_on_gpus(mine, role, index, list)
    return kind.options(**mine.options(role, index)).remote(server=server)
engines = [engine(i) for i in range(2)]
teachers = [engine(0, name) for name in "ab"]
def where(actors):
    return ray.get([actor.where.remote() for actor in actors], timeout=120)
found = {"workers": where(workers), "engines": where(engines), "teachers": where(teachers)}
ray.kill(engines[0])
found["again"] = where([engine(0)])[0]
print(json.dumps(found))
mine.release()
ray.shutdown()
"""


@pytest.mark.slow
def test_an_engine_of_two_gpus_sees_the_gpus_that_it_shares() -> None:
    """The engine shares with two workers, or another teacher; Ray assumes a node of six GPUs."""
    found = _printed_by(_SHARED_GPUS)
    workers, engines = found["workers"], found["engines"]
    for i, (node, gpus) in enumerate(engines):
        mates = workers[2 * i : 2 * i + 2]
        assert {mate for mate, _ in mates} == {node}
        assert gpus == ",".join(gpu for _, gpu in mates)
    assert len({gpu for _, gpu in workers}) == 4
    assert found["again"] == engines[0], "an engine that restarts is there again"
    [first, second] = found["teachers"]
    assert first == second and len(first[1].split(",")) == 2
    assert set(first[1].split(",")).isdisjoint(gpu for _, gpu in workers)


@pytest.mark.slow
def test_the_bundle_of_a_lost_node_moves_with_its_member() -> None:
    """A cluster of three nodes in separate processes; one dies, and a fourth joins."""
    nodes = _printed_by(_LOSE_A_NODE)
    before, after = nodes["before"], nodes["after"]
    assert len(set(before)) == 2, "spread members are on one node"
    assert after[0] == before[0], "an untouched member moved"
    assert nodes["others"], "the loss of one bundle lost the others"
    assert nodes["lacking"].startswith("1 CPU, 0.5 work: ")
    assert after[1] == nodes["new"]
    assert nodes["again"] == nodes["new"], "the same options gave another bundle"


def _printed_by(script: str) -> Any:
    """The JSON printed by a script with its own cluster."""
    # Ray leaves the address of the cluster in its directory; the tests' Ray must not find it.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        ended = subprocess.Popen(
            [sys.executable, "-c", script], cwd=REPOSITORY,
            env={**os.environ, "RAY_TMPDIR": directory, "RAY_health_check_period_ms": "500"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            stdout, stderr = ended.communicate(timeout=DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ended.pid, signal.SIGKILL)
    assert ended.returncode == 0, stderr
    return json.loads(next(line for line in stdout.splitlines() if line.startswith("{")))
