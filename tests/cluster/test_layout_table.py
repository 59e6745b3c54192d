"""The plan's sums and words; the numbers are worked out by hand."""

from __future__ import annotations

from cluster.placement.layout import Layout, RolePlan, render
from cluster.placement.push_plan import push_line


def test_the_plan_counts_what_is_needed_at_the_start_and_at_the_most() -> None:
    layout = Layout(
        roles=[
            RolePlan(name="policy", count=2, most=4, cpus=1, gpus=1, memory=16 << 30),
            RolePlan(name="learner", count=1, most=1, cpus=1, gpus=2, memory=128 << 30),
            RolePlan(name="queue", count=1, most=1, cpus=0, memory=0, note="on the head"),
            RolePlan(name="teacher", count=1, most=1, cpus=1, gpus=0.5),
        ],
        colocate=[("learner", "policy"), ("a", "b")],
        turns=("a", "b"),
        push="16 GiB",
    )
    assert render(layout).splitlines() == [
        "role     count  each            in all          memory of one",
        "policy   2..4   1 CPU, 1 GPU    2 CPU, 2 GPU    16 GiB",
        "learner  1      1 CPU, 2 GPU    1 CPU, 2 GPU    128 GiB",
        "queue    1      -               -               small  on the head",
        "teacher  1      1 CPU, 0.5 GPU  1 CPU, 0.5 GPU  unknown",
        "placed   learner and policy on one node",
        "placed   a and b on the same GPUs, by turns",
        "push     16 GiB",
        "needs    4 CPU, 4.5 GPU to start; grown to the most, 6 CPU, 6.5 GPU",
    ]


def test_a_plan_for_more_cpus_than_this_machine_has_says_so() -> None:
    roles = [
        RolePlan(name="policy", count=2, most=4, cpus=1),
        RolePlan(name="learner", count=1, most=1, cpus=2),
    ]
    fits, more = (render(Layout(roles=roles, cores=cores)).splitlines() for cores in (4, 3))
    assert more[:-1] == fits and "3 cores" in more[-1]


def test_a_push_goes_to_every_engine() -> None:
    assert push_line(8 << 30, "bfloat16", 3) == (
        "16 GiB (8589.9 M parameters in bfloat16) to 3 policy engines after each step: 48 GiB"
    )
    assert "to 1 policy engine after" in push_line(8 << 30, "float32", 1)
    assert push_line(None, "float32", 2).endswith("size unknown")
