"""The plan's sums and words; the numbers are worked out by hand."""

from __future__ import annotations

from cluster.placement.layout import RolePlan, render
from cluster.placement.push_plan import push_line
from cluster.placement.resources import ResourceDemand


def role(
    name: str, count: int, most: int, memory: int | None = None, note: str = "", **resources: float
) -> RolePlan:
    demand = ResourceDemand(name=name, count=count, resources=resources)
    return RolePlan(demand=demand, most=most, memory=memory, note=note)


def test_the_plan_counts_what_is_needed_at_the_start_and_at_the_most() -> None:
    table = render(
        [
            role("policy", 2, 4, 16 << 30, CPU=1, GPU=1),
            role("learner", 1, 1, 128 << 30, CPU=1, GPU=2),
            role("queue", 1, 1, 0, "on the head"),
            role("teacher", 1, 1, CPU=1, GPU=0.5),
        ],
        colocate=[("learner", "policy"), ("a", "b")],
        turns=("a", "b"),
        push="16 GiB",
    )
    assert table.splitlines() == [
        "role     count  each            in all          memory of one",
        "policy   2..4   1 CPU, 1 GPU    2 CPU, 2 GPU    16 GiB",
        "learner  1      1 CPU, 2 GPU    1 CPU, 2 GPU    128 GiB",
        "queue    1      nothing         nothing         small  on the head",
        "teacher  1      1 CPU, 0.5 GPU  1 CPU, 0.5 GPU  unknown",
        "placed   learner and policy on one node",
        "placed   a and b on the same GPUs, by turns",
        "push     16 GiB",
        "needs    4 CPU, 4.5 GPU to start; grown to the most, 6 CPU, 6.5 GPU",
    ]


def test_a_plan_for_more_cpus_than_this_machine_has_says_so() -> None:
    roles = [role("policy", 2, 4, CPU=1), role("learner", 1, 1, CPU=2)]
    fits, more = (render(roles, cores=cores).splitlines() for cores in (4, 3))
    assert more[:-1] == fits and "3 cores" in more[-1]


def test_a_push_goes_to_every_engine() -> None:
    assert push_line(8 << 30, "bfloat16", 3) == (
        "16 GiB (8589.9 M parameters in bfloat16) to 3 policy engines after each step: 48 GiB"
    )
    assert "to 1 policy engine after" in push_line(8 << 30, "float32", 1)
    assert push_line(None, "float32", 2).endswith("size unknown")
