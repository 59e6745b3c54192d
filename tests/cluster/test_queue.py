"""The queue as its two ends see it, on real Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator

import pytest
import ray

from cluster.ledger import Ledger
from cluster.queue import GroupQueue, QueueClosed, QueueTimeout, WorkerEnd
from distill.delivery import TrainedGroups
from distill.errors import DataError
from distill.types import TrajectoryGroup
from tests.samples import group

NewQueue = Callable[..., GroupQueue]


@pytest.fixture
def new_queue(ray_cluster: None) -> Iterator[NewQueue]:
    made: list[GroupQueue] = []

    def new(*, per_step: int = 2, max_staleness: int = 1, timeout_s: float = 60) -> GroupQueue:
        ledger = Ledger(
            trained=TrainedGroups(),
            groups_per_step=per_step,
            max_staleness=max_staleness,
            total_groups=8,
        )
        window = per_step * (max_staleness + 1)
        made.append(GroupQueue(ledger, window, timeout_s, {"num_cpus": 0}))
        return made[-1]

    yield new
    for queue in made:
        ray.kill(queue.actor)


def lease(queue: GroupQueue, count: int) -> list[int]:
    return asyncio.run(WorkerEnd(queue).lease(count))


def put(queue: GroupQueue, *group_ids: int) -> None:
    for group_id in group_ids:
        asyncio.run(WorkerEnd(queue).put(group(group_id)))


def ids(groups: list[TrajectoryGroup]) -> list[int]:
    return [made.group_id for made in groups]


def test_out_of_order_in_once_and_in_order_out(new_queue: NewQueue) -> None:
    queue = new_queue()
    assert lease(queue, 9) == [0, 1, 2, 3]
    waiting = queue.actor.take.remote(2, 60)
    put(queue, 3, 1, 1, 3)  # repeats are dropped while parked,
    put(queue, 0)
    assert ids(ray.get(waiting)) == [0, 1]
    put(queue, 0, 1, 2)  # and after they were taken
    taken = queue.take(2)
    assert ids(taken) == [2, 3] and queue.empty()
    expected = group(2).trajectories_G[0].segments[0]
    assert taken[0].trajectories_G[0].segments[0].tokens_T.tolist() == expected.tokens_T.tolist()


def test_slots_are_free_once_released(new_queue: NewQueue) -> None:
    queue = new_queue(max_staleness=0)
    assert lease(queue, 1) == [0]
    assert lease(queue, 9) == [1]
    waiting = queue.actor.lease.remote(9, 60)
    put(queue, 0, 1)
    queue.take(2)
    assert ray.wait([waiting], timeout=0.2)[0] == []  # taken is not published
    queue.release(2)
    assert ray.get(waiting) == [2, 3]


def test_a_run_that_is_all_leased_says_so_at_once(new_queue: NewQueue) -> None:
    queue = new_queue(per_step=4)
    assert lease(queue, 9) == list(range(8))
    assert lease(queue, 1) == []


@pytest.mark.parametrize("item", [None, "done", [group(0)], 3])
def test_it_carries_groups_and_nothing_else(new_queue: NewQueue, item: object) -> None:
    queue = new_queue()
    lease(queue, 1)
    with pytest.raises(DataError, match=f"carries TrajectoryGroup, not {type(item).__name__}"):
        ray.get(queue.actor.put.remote(item))


def test_a_deadline_says_who_waits_for_whom(new_queue: NewQueue) -> None:
    queue = new_queue(timeout_s=0.1)
    lease(queue, 9)
    put(queue, 0, 2)
    with pytest.raises(QueueTimeout, match=r"waited 0 s for groups \[1, 3\] from the rollout work"):
        queue.take(2)
    with pytest.raises(QueueTimeout, match="waited 0 s for the learner to publish and free slots"):
        lease(queue, 1)
    put(queue, 1)  # a wait that ended took nothing with it
    assert ids(queue.take(3)) == [0, 1, 2]


def test_closing_ends_every_wait(new_queue: NewQueue) -> None:
    queue = new_queue()
    lease(queue, 9)
    taking, leasing = queue.actor.take.remote(1, 60), queue.actor.lease.remote(1, 60)
    assert ray.wait([taking, leasing], timeout=0.2)[0] == []
    queue.close()
    assert ray.get(leasing) == []
    with pytest.raises(QueueClosed):
        ray.get(taking)
    put(queue, 0)
    with pytest.raises(QueueClosed):
        queue.take(1)


def test_both_ends_cross_processes(new_queue: NewQueue) -> None:
    queue = pickle.loads(pickle.dumps(new_queue()))

    @ray.remote(num_cpus=0)
    def work(end: WorkerEnd) -> list[int]:
        async def two_groups() -> list[int]:
            leased = await end.lease(2)
            for group_id in reversed(leased):
                await end.put(group(group_id))
            return leased

        return asyncio.run(two_groups())

    assert ray.get(work.remote(WorkerEnd(queue))) == [0, 1]
    assert ids(queue.take(2)) == [0, 1]
