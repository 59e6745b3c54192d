"""The transport to each engine, by the places of learner and engines; no GPU is needed."""

from dataclasses import replace

import pytest

from actors.sglang.parallelism import Parallelism
from actors.sglang.start import server_environment
from cluster.weights.ways import Place, lenders_of, plan_ways
from distill.errors import ConfigError
from distill.process_groups import nccl_settings
from distill.weights.lending import LenderPlace
from tests.refusals import refuses


def place(node: str, *gpus: int, **nccl: str) -> Place:
    return Place(node=node, host=node, gpus=tuple(map(str, gpus)), nccl=nccl_settings(nccl))


def worker(host: str, gpu: int | None = None) -> LenderPlace:
    return LenderPlace(host=host, gpu=None if gpu is None else str(gpu))


LEARNER = place("a", 0)
ON_CPU = place("a")


@pytest.mark.parametrize(
    "engines, expected",
    [
        ([place("a", 1)], {"group": [0]}),
        ([place("a", 1, 2), place("a", 3, 4)], {"group": [0, 1]}),
        ([place("a", 0)], {"shared_memory": [0]}),
        ([place("a", 0), place("a", 1)], {"shared_memory": [0], "group": [1]}),
        ([place("a", 0, 1)], {"shared_memory": [0]}),  # one rank of two is on the learner's GPU
        ([place("a", 1), place("a", 1)], {"group": [0], "shared_memory": [1]}),
        ([place("b", 0)], {"group": [0]}),  # another node's GPU 0
        ([place("b", 0), place("a", 0)], {"group": [0], "shared_memory": [1]}),
    ],
)
def test_servers_on_other_gpus_get_weights_by_nccl(engines, expected) -> None:
    named = {str(i): engine for i, engine in enumerate(engines)}
    found = plan_ways("auto", LEARNER, named, served=True)
    assert {way: [int(n) for n in names] for way, names in found.items()} == expected


@pytest.mark.parametrize(
    "learner, engine, served, way",
    [
        (ON_CPU, place("a"), True, "shared_memory"),
        (ON_CPU, place("a"), False, "shared_memory"),
        (ON_CPU, place("b"), True, "group"),
        (ON_CPU, place("b"), False, "group"),
        (ON_CPU, place("a", 1), True, "shared_memory"),  # a learner without a GPU has no NCCL
        (LEARNER, place("a", 1), False, "shared_memory"),  # an embedded engine
        (LEARNER, place("b", 1), False, "group"),
    ],
)
def test_without_nccl_the_node_decides(learner, engine, served, way) -> None:
    assert plan_ways("auto", learner, {"e": engine}, served=served) == {way: ["e"]}
    assert plan_ways("disk", learner, {"e": engine}, served=served) == {"disk": ["e"]}


@pytest.mark.parametrize(
    "engines, field",
    [
        ({"x": place("a", 0)}, "weights.transport"),
        ({"x": place("a", 2, 0)}, "weights.transport"),
        ({"x": place("a", 1), "y": place("a", 1)}, "weights.transport"),
        ({"x": place("b", 1, NCCL_CUMEM_ENABLE="1")}, "NCCL_CUMEM_ENABLE"),
        ({"x": place("b", 1, NCCL_NVLS_ENABLE="1")}, "NCCL_NVLS_ENABLE"),
    ],
)
def test_a_group_that_would_hang_is_refused(engines: dict[str, Place], field: str) -> None:
    with refuses(ConfigError, field):
        plan_ways("group", LEARNER, engines, served=True)
    without_gpu = {name: place(e.node) for name, e in engines.items()}
    assert plan_ways("group", ON_CPU, without_gpu, served=True) == {"group": [*engines]}


WORKERS = [worker("a", 0), worker("a", 1), worker("b", 0)]


@pytest.mark.parametrize(
    "engines, expected",
    [
        ([place("a", 0)], {"ipc": [0]}),
        ([place("a", 0), place("a", 1), place("b", 0)], {"ipc": [0, 1, 2]}),  # other workers' too
        ([place("a", 1, 0)], {"ipc": [0]}),  # two ranks, each on a worker's GPU
        ([place("a", 0, 2)], {"shared_memory": [0]}),  # one of them is not
        ([place("a", 2), place("b", 1)], {"group": [0, 1]}),
        ([place("a", 1), place("a", 2)], {"ipc": [0], "group": [1]}),
    ],
)
def test_servers_on_gpus_of_learner_workers_are_lent_weights(engines, expected) -> None:
    named = {str(i): engine for i, engine in enumerate(engines)}
    found = plan_ways("auto", LEARNER, named, served=True, lenders=WORKERS)
    assert {way: [int(n) for n in names] for way, names in found.items()} == expected
    for way in plan_ways("auto", LEARNER, named, served=False, lenders=WORKERS):
        assert way in ("shared_memory", "group")


def test_on_cpus_weights_are_lent_only_on_request() -> None:
    lenders = [worker("a"), worker("a")]
    assert plan_ways("auto", ON_CPU, {"e": ON_CPU}, served=True, lenders=lenders) == {
        "shared_memory": ["e"]
    }
    assert plan_ways("ipc", ON_CPU, {"e": ON_CPU}, served=True, lenders=lenders) == {"ipc": ["e"]}


@pytest.mark.parametrize(
    "engine, ranks, lenders, expected",
    [
        (place("a", 1), 1, WORKERS, [1]),
        (place("a", 1, 0), 2, WORKERS, [1, 0]),
        (place("b", 0), 1, WORKERS, [2]),
        (ON_CPU, 2, [worker("a")], [0, 0]),
        (ON_CPU, 3, [worker("b"), worker("a"), worker("a")], [1, 2, 1]),
    ],
)
def test_each_rank_reads_from_the_worker_on_its_gpu(engine, ranks, lenders, expected) -> None:
    assert lenders_of("e", engine, ranks, lenders) == expected


@pytest.mark.parametrize(
    "engine, ranks, lenders",
    [
        (place("c", 0), 1, WORKERS),
        (replace(place("a", 0), nodes=2), 1, WORKERS),
        (place("a", 5), 1, WORKERS),
        (place("a", 0), 2, WORKERS),
        (place("a"), 1, WORKERS),
        (place("a", 0), 1, [worker("a")]),
    ],
)
def test_engines_without_a_lending_worker_are_refused(engine, ranks, lenders) -> None:
    with refuses(ConfigError, "weights.transport"):
        lenders_of("e", engine, ranks, lenders)


@pytest.mark.parametrize("learner", [LEARNER, ON_CPU])
def test_a_server_over_several_nodes_gets_weights_by_a_group(learner: Place) -> None:
    """Only ranks on the learner's node could read its memory."""
    here = replace(place("a", *([1] if learner.gpus else [])), nodes=2)
    assert plan_ways("auto", learner, {"e": here}, served=True) == {"group": ["e"]}
    assert plan_ways("disk", learner, {"e": here}, served=True) == {"disk": ["e"]}
    with refuses(ConfigError, "weights.transport"):
        plan_ways("shared_memory", learner, {"e": here}, served=True)


@pytest.mark.parametrize(("choice", "engines"), [("auto", 2), ("shared_memory", 1)])
def test_engines_without_a_transport_are_refused(choice, engines: int) -> None:
    """Engines on another node that share a GPU, or shared memory to another node."""
    with refuses(ConfigError, "weights.transport"):
        plan_ways(choice, LEARNER, {str(i): place("b", 1) for i in range(engines)}, served=True)


def test_a_server_starts_with_the_nccl_settings_of_its_process() -> None:
    assert nccl_settings({}) == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert nccl_settings({"NCCL_CUMEM_ENABLE": "1"})["NCCL_CUMEM_ENABLE"] == "1"
    assert server_environment("cuda:0", 1, Parallelism()).items() >= nccl_settings().items()
