"""The queue's actor, as workers, learner and driver use it; on Ray where a process is killed."""

import asyncio
import os
import signal
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import WorkerCrashedError

from benchmarks.data_path import message_bytes
from cluster.handles.calls import get, kill, wait
from cluster.inspect.audit import audit
from cluster.queue.group_queue import GroupQueue, QueueClosed, QueueTimeout, WorkerEnd
from cluster.queue.journal import read_journal
from distill.columns import checked
from distill.objective.whole_groups import opened
from distill.records import Lease, StepGroups, TrainedGroups, TrajectoryId
from distill.states import HiddenStates
from distill.types import TrajectoryGroup
from tests.distill.test_groups import assert_same
from tests.queues import NewQueue
from tests.samples import group, packed, segment, top_logprobs, trajectory
from tests.waiting import DEADLINE_S, until


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "ledger.jsonl")


def lease(queue: GroupQueue, count: int, worker: str = "a") -> list[Lease]:
    return asyncio.run(WorkerEnd(queue, worker).lease(count))


def put(queue: GroupQueue, *leases: Lease, worker: str = "a") -> None:
    async def all_at_once() -> None:
        end = WorkerEnd(queue, worker)
        await asyncio.gather(*(end.put(one, *packed(group(one.group_id))) for one in leases))

    asyncio.run(all_at_once())


def ids(made: StepGroups | list[Lease]) -> list[int]:
    return made.group_ids if isinstance(made, StepGroups) else [one.group_id for one in made]


def whole(queue: GroupQueue, taken: StepGroups) -> list[TrajectoryGroup]:
    """The taken groups, fetched into this process."""
    groups, lost = opened(queue, taken.groups_P)
    assert not lost
    return groups


def payloads(queue: GroupQueue) -> dict[int, Any]:
    """Payloads that the actor holds, by group id."""
    return get(queue.actor.payloads.remote([TrajectoryId(i, 0) for i in range(8)]))


def dropped(journal: str) -> int:
    """Number of deliveries that were dropped, as duplicates or too late."""
    return sum(event["event"] in ("dup", "late") for event in read_journal(journal))


def kill_queue(queue: GroupQueue) -> int:
    pid = get(queue.actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    return pid


def is_true(reference: Any) -> bool:
    return get(reference, timeout=DEADLINE_S)


def test_groups_arrive_in_any_order_and_are_taken_once_in_order(
    new_queue: NewQueue, journal: str
) -> None:
    queue = new_queue()
    leases = lease(queue, 9)
    assert ids(leases) == [0, 1, 2, 3]
    trained = TrainedGroups()
    waiting = queue.actor.poll.remote()
    put(queue, leases[1], leases[1])
    put(queue, leases[0])
    assert is_true(waiting)
    put(queue, leases[3], leases[3])
    taken = queue.take(trained)
    assert ids(taken) == ids(queue.take(trained)) == [0, 1]  # the same answer
    trained = taken.after(trained)
    queue.publish(1, trained)
    put(queue, leases[0], leases[1], leases[2])  # two of them are trained already
    taken = queue.take(trained)
    assert ids(taken) == [2, 3]
    assert_same(tuple(whole(queue, taken)), (group(2), group(3)))
    assert payloads(queue).keys() == {2, 3}, "payloads of trained groups are kept"
    queue.publish(2, taken.after(trained))
    assert payloads(queue) == {} and dropped(journal) == 4


def test_groups_that_a_worker_delivers_while_it_waits_raise_its_limit(new_queue: NewQueue) -> None:
    queue = new_queue()
    leases = lease(queue, 4)
    waiting = queue.actor.lease.remote("a", 1, "x", 60.0)
    put(queue, *leases[:2])
    queue.publish(1, queue.take(TrainedGroups()).after(TrainedGroups()))
    assert ids(get(waiting).leases) == [4, 5]


def test_a_step_is_taken_during_a_push_and_slots_are_freed_after_it(new_queue: NewQueue) -> None:
    queue = new_queue()
    put(queue, *lease(queue, 9))
    trained = queue.take(TrainedGroups()).after(TrainedGroups())
    waiting = queue.actor.lease.remote("a", 9, "x", 60.0)
    queue.push(1, trained)
    assert payloads(queue).keys() == {2, 3} and get(queue.actor.status.remote()).credit == 0
    assert is_true(queue.actor.poll.remote()) and ids(queue.take(trained)) == [2, 3]
    assert wait([waiting], timeout=0.2)[0] == []  # pushed is not published
    queue.publish(1, trained)
    assert ids(get(waiting).leases) == [4, 5]
    taken = queue.take(trained)
    assert ids(taken) == [2, 3]  # the same answer
    queue.push(2, taken.after(trained))
    assert get(queue.actor.status.remote()).credit == 0


@pytest.mark.parametrize("end_step", [GroupQueue.push, GroupQueue.publish])
def test_a_step_is_in_the_journal_on_disk_before_a_checkpoint_contains_it(
    new_queue: NewQueue, journal: str, monkeypatch: pytest.MonkeyPatch, end_step: Any
) -> None:
    synced, fsync = dict[str, int](), os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    queue = new_queue()
    put(queue, *lease(queue, 9))
    trained = queue.take(TrainedGroups()).after(TrainedGroups())
    monkeypatch.setattr(os, "fsync", noted)
    end_step(queue, 1, trained)
    assert b'"version":1' in Path(journal).read_bytes()[: synced[journal]]


def test_a_peek_does_not_fix_the_groups_of_the_next_step(new_queue: NewQueue) -> None:
    queue = new_queue(max_staleness=2)
    leases = lease(queue, 6)
    put(queue, *leases[:2], leases[4], leases[5])
    after = queue.take(TrainedGroups()).after(TrainedGroups())

    def peek(known: Collection[int] = (), whole: bool = False) -> list[int]:
        metas = queue.peek(after, known, whole)
        assert metas is not None
        return [each.group_id for each in metas]

    assert peek() == peek(whole=True) == [4, 5] and peek({4}) == [5]
    four, five = TrajectoryId(4, 0), TrajectoryId(5, 1)
    ahead = dict(queue.trajectories([four, five], ahead=True).found)
    put(queue, leases[3])
    assert peek({4, 5}) == [3] and peek() == [3, 4], "an older group has arrived"
    queue.publish(1, after)
    assert peek() == [3, 4]
    taken = queue.take(after)
    assert ids(taken) == peek() == [3, 4], "the step is not what its rule says"
    held = queue.trajectories([TrajectoryId(3, 0), four]).found
    assert held[four] is ahead[four], "it was fetched again"
    again = queue.trajectories([four, five]).found
    assert again[four] is not held[four] and again[five] is not ahead[five], "it was kept"
    assert queue.peek(taken.after(after).after([5, 6], {}), (), False) is None
    get(queue.actor.close.remote())
    assert queue.peek(after, (), False) is None


def test_a_lease_waits_beyond_its_deadline_while_all_groups_are_leased(new_queue: NewQueue) -> None:
    queue = new_queue(groups_per_step=4, timeout_s=0.1)
    assert ids(lease(queue, 9)) == list(range(8))

    async def wait_for_another() -> list[Lease]:
        waiting = asyncio.create_task(WorkerEnd(queue, "b").lease(9))
        done, _ = await asyncio.wait([waiting], timeout=1.0)
        assert not done
        await WorkerEnd(queue, "a").report_user_code({})
        assert await queue.actor.forfeit.remote("a", "killed") == list(range(8))
        return await waiting

    again = asyncio.run(wait_for_another())
    assert ids(again) == list(range(8)) and {one.attempt for one in again} == {2}


def test_an_expired_group_is_leased_again_and_its_first_delivery_counts(
    new_queue: NewQueue, journal: str
) -> None:
    queue = new_queue(lease_s=0.5, max_deaths=1000)
    hung = lease(queue, 1)
    until(lambda: get(queue.actor.status.remote()).pending)
    again = lease(queue, 1, "b")
    assert (ids(again), again[0].attempt) == ([0], 2)
    put(queue, *hung)
    put(queue, *again, worker="b")
    status = get(queue.actor.status.remote())
    assert (status.delivered, dropped(journal)) == (1, 1)


def test_a_pending_lease_call_of_a_dead_worker_gets_no_groups(new_queue: NewQueue) -> None:
    queue = new_queue()
    assert ids(lease(queue, 9)) == [0, 1, 2, 3]
    asked = queue.actor.lease.remote("a", 9, "before it died", DEADLINE_S)
    assert not get(queue.actor.status.remote()).pending  # the call is there
    assert is_true(queue.actor.forfeit.remote("a", "killed")) and get(asked).leases == []
    assert get(queue.actor.status.remote()).pending == [0, 1, 2, 3]


def test_waits_end_at_their_deadline(new_queue: NewQueue) -> None:
    queue = new_queue(timeout_s=0.1)
    leases = lease(queue, 9)
    put(queue, leases[0])
    with pytest.raises(QueueTimeout, match=r"\[1, 2, 3\]"):
        queue.take(TrainedGroups())
    with pytest.raises(QueueTimeout):
        lease(queue, 1)
    assert not is_true(queue.actor.poll.remote())
    put(queue, leases[1])
    assert ids(queue.take(TrainedGroups())) == [0, 1]


def test_closing_ends_every_wait(new_queue: NewQueue) -> None:
    queue = new_queue(on_ray=True)
    leases = lease(queue, 9)
    taking = queue.actor.take.remote(TrainedGroups(), 60.0)
    waits = [taking, queue.actor.lease.remote("a", 1, "x", 60.0), queue.actor.poll.remote()]
    assert wait(waits, timeout=0.2)[0] == []
    get(queue.actor.close.remote())
    assert get(waits[1]).leases == [] and get(waits[1]).closed
    assert get(taking) is None and get(waits[2]) is False
    put(queue, leases[0])
    with pytest.raises(QueueClosed):
        queue.take(TrainedGroups())
    assert lease(queue, 1) == []
    kill_queue(queue)
    assert lease(queue, 1) == []  # the restarted actor is closed too


# deaths


def test_a_killed_queue_recovers_leases_from_its_journal(new_queue: NewQueue, journal: str) -> None:
    queue = new_queue(on_ray=True)
    leases = lease(queue, 3, "a")
    put(queue, leases[1])
    before = get(queue.actor.status.remote())
    kill_queue(queue)
    after = get(queue.actor.status.remote())
    assert {i: held[:2] for i, held in after.leased.items()} == {0: ("a", 1), 2: ("a", 1)}
    assert after.pending == [1] and after.depth == 0  # its payload died
    assert (after.credit, after.delivered) == (before.credit, before.delivered)
    assert ids(lease(queue, 1, "b")) == [1]
    put(queue, leases[0], leases[1], leases[2])  # by the leases from before the death
    assert ids(queue.take(TrainedGroups())) == [0, 1]
    assert [e["event"] for e in read_journal(journal)].count("recover") == 1


LONG = 4_000  # tokens of an answer above 100 kB, which Ray does not send in the call


def long_group(group_id: int) -> TrajectoryGroup:
    """A group of two long answers, with the teacher's likeliest tokens."""
    return TrajectoryGroup(
        group_id=group_id,
        trajectories_G=tuple(
            trajectory(segment(3, LONG, seed=g, teacher_top=top_logprobs(LONG, 4, seed=g)))
            for g in range(2)
        ),
    )


@ray.remote(num_cpus=0)
class LongProducer:
    """A worker that delivers long groups, or a learner worker that fetches trajectories."""

    def __init__(self, queue: GroupQueue, whole: bool = False) -> None:
        self._queue, self._end = queue, WorkerEnd(queue, "a", whole=whole)

    async def deliver(self, groups: int) -> int:
        for one in await self._end.lease(groups):
            await self._end.put(one, *packed(long_group(one.group_id)))
        return os.getpid()

    def fetch(self, places: list[TrajectoryId]) -> list[Any]:
        found, lost = self._queue.trajectories(places)
        assert not lost
        return [found[place] for place in places]


@pytest.mark.parametrize(
    ("whole", "parts"), [(False, 2), (True, 1)], ids=["a part an answer", "whole"]
)
def test_groups_outlive_their_worker_and_their_payload_never_passes_through_the_queue(
    new_queue: NewQueue, whole: bool, parts: int
) -> None:
    producer: Any = LongProducer
    queue = new_queue(on_ray=True)
    worker = producer.remote(queue, whole)  # held: without a handle, Ray ends the actor itself
    os.kill(get(worker.deliver.remote(2)), signal.SIGKILL)
    payload = checked(long_group(0)).nbytes
    held = payloads(queue)
    assert [len(each.parts) for each in held.values()] == [parts, parts]
    assert message_bytes(held) < 0.01 * payload
    taken = queue.take(TrainedGroups())
    assert message_bytes(taken) < 0.01 * payload, "the leader took more than metadata"
    assert get(queue.actor.forfeit.remote("a", "SIGKILL")) == []  # nothing was under way
    follower = producer.remote(queue)
    places = [TrajectoryId(i, 1 - i) for i in ids(taken)]
    for (group_id, member), other in zip(places, get(follower.fetch.remote(places)), strict=True):
        expected = long_group(group_id).trajectories_G[member]
        mine = queue.trajectories([TrajectoryId(group_id, member)]).found[
            TrajectoryId(group_id, member)
        ]
        for made in (mine, other):
            assert_same(made, expected)
    kill(follower)


def test_a_group_whose_hidden_states_are_lost_is_scored_again(
    new_queue: NewQueue, journal: str
) -> None:
    """The states are owned by the teacher's actor and end with it; the group's columns remain."""
    queue = new_queue(on_ray=True, total_groups=1, groups_per_step=1)

    @ray.remote(num_cpus=0)
    class Teacher:
        def states(self, count: int) -> list[Any]:
            """References to states, each larger than an object that Ray copies to a caller."""
            return [
                ray.put(HiddenStates(np.full((4, 1 << 16), i, np.float32), "float32"))
                for i in range(count)
            ]

    teacher: Any = Teacher.remote()
    group = long_group(0)
    references = iter(get(teacher.states.remote(len(group.trajectories_G))))
    scored = replace(
        group,
        trajectories_G=tuple(
            replace(each, segments=(replace(each.segments[0], teacher_states=next(references)),))
            for each in group.trajectories_G
        ),
    )
    end = WorkerEnd(queue, "a")
    places = [TrajectoryId(0, member) for member in range(len(group.trajectories_G))]

    async def deliver(scored: TrajectoryGroup) -> None:
        [leased] = await end.lease(1)
        await end.put(leased, *packed(scored))

    async def again() -> TrajectoryGroup | None:
        [leased] = await end.lease(1)
        return await end.sampled(leased)

    with asyncio.Runner() as runner:
        runner.run(deliver(scored))
        del scored, references
        assert is_true(queue.actor.poll.remote())
        queue.take(TrainedGroups())
        for i, place in enumerate(places):
            [segment] = queue.trajectories([place]).found[place].segments
            states: Any = segment.teacher_states
            assert (states.values_NH == i).all()
            del segment, states
        kill(teacher)
        until(lambda: queue.trajectories(places).lost)
        queue.mark_lost(queue.trajectories(places).lost)
        sampled = runner.run(again())
    assert sampled is not None
    for made, expected in zip(sampled.trajectories_G, group.trajectories_G, strict=True):
        [segment] = made.segments
        assert_same(replace(made, segments=(replace(segment, teacher_states=None),)), expected)
    get(queue.actor.close.remote())


def test_groups_lost_after_their_delivery_are_leased_again(
    new_queue: NewQueue, journal: str
) -> None:
    """A process owns the objects that it puts: its death loses them, as that of a node does."""
    queue = new_queue(on_ray=True, total_groups=2)

    @ray.remote(num_cpus=0, max_retries=0)
    def deliver() -> None:
        async def work() -> None:
            end = WorkerEnd(queue, "a")
            first, second = await end.lease(2)
            await end.put(second, *packed(long_group(1)))
            await end.put(first, *packed(long_group(0)))

        asyncio.run(work())
        os.kill(os.getpid(), signal.SIGKILL)  # later, Ray may have ended the idle process

    with pytest.raises(WorkerCrashedError):
        get(deliver.remote())
    places = [TrajectoryId(i, member) for i in (0, 1) for member in (0, 1)]

    # Ray may find copies on the node for a while; `found` has views, which keep them there.
    until(lambda: not queue.trajectories(places).found)
    assert is_true(queue.actor.poll.remote())  # the queue has not heard of the loss
    assert ids(queue.take(TrainedGroups())) == [0, 1]
    reasons = queue.trajectories(places).lost
    assert reasons.keys() == queue.trajectories(places, ahead=True).lost.keys() == {0, 1}
    queue.mark_lost(dict.fromkeys([0, 1], reasons[0]))
    again = lease(queue, 2, "b")
    assert ids(again) == [0, 1] and {one.attempt for one in again} == {2}
    put(queue, *again, worker="b")
    taken = queue.take(TrainedGroups())
    assert [made.group_id for made in whole(queue, taken)] == ids(taken) == [0, 1]
    queue.publish(1, taken.after(TrainedGroups()))
    assert queue.trajectories(places).lost == dict.fromkeys((0, 1), "the queue holds it no longer")
    get(queue.actor.close.remote())
    events = [event["event"] for event in read_journal(journal)]
    assert events.count("lost") == 1 and events.count("take") == 1  # the same step
    found = audit(journal, steps=1)
    assert found.problems == [] and found.trained == 2
