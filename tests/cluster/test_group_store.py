"""Groups on disk: files after a crash, and groups that restarted queues and later jobs adopt."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.handles.calls import get, kill
from cluster.inspect.audit import audit
from cluster.queue.group_queue import GroupQueue, WorkerEnd
from cluster.queue.journal import read_journal
from cluster.queue.ledger_types import Kept, LedgerSettings, adopted
from cluster.store.group_format import GroupRow
from cluster.store.group_store import GroupStore
from distill.columns import pack
from distill.objective.whole_groups import opened
from distill.records import Lease, TrainedGroups
from distill.types import TrajectoryGroup
from tests.cluster.test_queue import kill_queue, long_group
from tests.conftest import TinyPair
from tests.distill.test_groups import assert_same
from tests.queues import NewQueue
from tests.samples import group, packed
from tests.simulated_run import SimulatedRun
from tests.simulation import simulated_time
from tests.waiting import until

Make = Callable[[int], TrajectoryGroup]


def rows(*made: TrajectoryGroup, attempt: int = 1) -> list[GroupRow]:
    return [GroupRow(each, pack(each.trajectories_G), attempt) for each in made]


def lease(group_id: int, attempt: int = 1, epoch: int = 1) -> Lease:
    return Lease(group_id=group_id, attempt=attempt, epoch=epoch)


# files


def test_a_cut_file_is_read_up_to_its_last_whole_group(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    path, sizes = tmp_path / "e0002-0001.arrow", list[int]()
    for group_id in range(3):
        store.append(2, rows(group(group_id)))
        assert list(tmp_path.iterdir()) == [path]
        sizes.append(path.stat().st_size)
    written = path.read_bytes()
    leases = [lease(group_id, epoch=2) for group_id in range(3)]
    assert_same(tuple(store.read(leases).values()), tuple(map(group, range(3))))
    for end in [*range(0, len(written), 211), *sizes]:
        path.write_bytes(written[:end])
        read = GroupStore(tmp_path).read(leases)
        assert list(read) == [i for i, size in enumerate(sizes) if size <= end]
        assert_same(tuple(read.values()), tuple(map(group, read)))
    after = GroupStore(tmp_path)
    after.append(2, rows(group(7)))
    assert len(list(tmp_path.iterdir())) == 2, "a file that may be cut is not continued"
    assert list(after.read([lease(7, epoch=2)])) == [7]


def test_a_damaged_byte_never_raises_nor_yields_another_group(tmp_path: Path) -> None:
    """A changed byte within a group's arrays cannot be detected."""
    GroupStore(tmp_path).append(1, rows(group(0)))
    [path] = tmp_path.iterdir()
    written = path.read_bytes()
    found = set()
    for at in range(0, len(written), 7):
        path.write_bytes(written[:at] + bytes([written[at] ^ 0xFF]) + written[at + 1 :])
        found |= GroupStore(tmp_path).read([lease(0)]).keys()
    assert found <= {0}


def test_a_delivery_is_identified_by_its_epoch_and_attempt(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    for epoch, attempt in ((1, 1), (1, 2), (2, 1)):
        store.append(epoch, rows(group(5, version=10 * epoch + attempt), attempt=attempt))
    for known in (store, GroupStore(tmp_path)):
        for kept in (lease(5), lease(5, 2), lease(5, epoch=2)):
            expected = group(5, version=10 * kept.epoch + kept.attempt)
            assert_same(known.read([kept])[5], expected)
        assert known.read([lease(5, 2, epoch=2), lease(6)]) == {}


def test_files_without_a_needed_group_are_deleted(tmp_path: Path) -> None:
    store = GroupStore(tmp_path)
    (tmp_path / "step-000001.arrow").write_bytes(b"of another reader")
    store.append(1, rows(group(1), group(2)))
    store.retain([2])
    store.append(1, rows(group(3)))
    assert len(list(tmp_path.glob("e*"))) == 2
    store.retain([3])
    assert list(store.read([lease(i) for i in (1, 2, 3)])) == [3]
    GroupStore(tmp_path).retain([])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.arrow"]


# queues


def deliver(queue: GroupQueue, count: int, make: Make = group) -> list[Lease]:
    """Lease and deliver groups."""

    async def work() -> list[Lease]:
        end = WorkerEnd(queue, "a")
        leases = await end.lease(count)
        await asyncio.gather(*(end.put(one, *packed(make(one.group_id))) for one in leases))
        return leases

    return asyncio.run(work())


def kept_ids(journal: Path) -> set[int]:
    return {i for event in read_journal(journal) if event["event"] == "keep" for i in event["ids"]}


def wait_until_kept(journal: Path, count: int) -> None:
    until(lambda: len(kept_ids(journal)) >= count, failing=f"not {count} groups are on disk")


@pytest.mark.parametrize("make", [group, long_group], ids=["in the call", "in the object store"])
def test_a_killed_queue_recovers_groups_on_disk_and_samples_none_again(
    new_queue: NewQueue, tmp_path: Path, make: Make
) -> None:
    queue, journal = new_queue(on_ray=True), tmp_path / "ledger.jsonl"
    deliver(queue, 3, make)
    wait_until_kept(journal, 3)
    for _ in range(2):
        kill_queue(queue)
        status = get(queue.actor.status.remote())
        assert status.depth == 3 and status.pending == []
    taken = queue.take(TrainedGroups())
    groups, lost = opened(queue, taken.groups_P)
    assert not lost
    assert_same(tuple(groups), (make(0), make(1)))
    trained = taken.after(TrainedGroups())
    queue.publish(1, trained)
    assert [each.group_id for each in deliver(queue, 9, make)] == [3, 4, 5]
    wait_until_kept(journal, 6)
    get(queue.actor.commit.remote(1, trained.watermark))
    kill_queue(queue)
    taken = queue.take(trained)
    assert taken.group_ids == [2, 3]
    groups, lost = opened(queue, taken.groups_P)
    assert not lost
    assert_same(tuple(groups), (make(2), make(3)))
    queue.publish(2, taken.after(trained))
    get(queue.actor.close.remote())
    found = audit(journal, steps=2)
    assert found.problems == [] and found.recoveries == 3 and found.re_leases == {
        "when the queue died": 0
    }  # fmt: skip


def test_a_new_job_adopts_groups_that_its_weights_could_have_sampled(
    new_queue: NewQueue, tmp_path: Path
) -> None:
    """The job resumes from step 1 of 2: groups of version 2 are lost with their weights."""
    queue, journal = new_queue(max_staleness=2, total_groups=12), tmp_path / "ledger.jsonl"
    deliver(queue, 6)  # groups 0 to 5, of version 0
    wait_until_kept(journal, 6)
    trained = TrainedGroups()
    at = [trained]
    for version in (1, 2):
        taken = queue.take(trained)
        trained = taken.after(trained)
        at.append(trained)
        queue.publish(version, trained)
        deliver(queue, 2, lambda i, v=version: group(i, version=v))  # 6, 7; and 8, 9
        if version == 1:
            get(queue.actor.commit.remote(1, trained.watermark))
    wait_until_kept(journal, 10)
    kill(queue.actor)

    again = new_queue(max_staleness=2, total_groups=12, trained=at[1])

    async def leased() -> dict[int, TrajectoryGroup | None]:
        end = WorkerEnd(again, "b")
        return {one.group_id: await end.sampled(one) for one in await end.lease(9)}

    found = asyncio.run(leased())
    assert list(found) == [2, 3, 4, 5, 6, 7]
    for group_id, made in found.items():
        assert_same(made, group(group_id, version=group_id >= 6))
    asyncio.run(WorkerEnd(again, "b").report_user_code({}))
    assert get(again.actor.forfeit.remote("b", "killed")) == list(found)  # before it scored them
    assert list(asyncio.run(leased())) == list(found)
    get(again.actor.close.remote())
    found_in = audit(journal)
    assert found_in.problems == [] and (found_in.jobs, found_in.adopted) == (2, 6)
    other = new_queue(run_id="another")
    assert get(other.actor.status.remote()).pending == []
    assert not list((tmp_path / "groups").iterdir())


def test_groups_that_a_disk_refused_are_sampled_again_after_a_death(
    new_queue: NewQueue, tmp_path: Path
) -> None:
    (tmp_path / "groups").write_text("in the way")
    queue = new_queue(on_ray=True)
    deliver(queue, 4)
    until(lambda: "groups" in get(queue.actor.status.remote()).unkept)
    assert queue.take(TrainedGroups()).group_ids == [0, 1]
    kill_queue(queue)
    assert get(queue.actor.status.remote()).pending == [0, 1, 2, 3]
    (tmp_path / "groups").unlink()  # there is room again
    deliver(queue, 4)
    wait_until_kept(tmp_path / "ledger.jsonl", 4)


def test_a_disk_that_refuses_groups_is_a_finding_and_the_run_continues(
    tmp_path: Path,
    tiny_pair: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with simulated_time(monkeypatch) as loop:
        run = SimulatedRun(
            loop, tmp_path / "run", tiny_pair.student, prompts_per_step=2, group_size=2, steps=8,
            max_new_tokens=8,
        )  # fmt: skip
        (tmp_path / "run" / "out" / "groups").write_text("in the way")
        for _ in range(3):
            assert len(run.step()) == 2
            run.fleet.driver.pause(2.0)
    assert capsys.readouterr().out.count("groups_not_kept") == 1


# adoption


def settings(**changes: Any) -> LedgerSettings:
    given = {"groups_per_step": 2, "max_staleness": 2, "total_groups": 100, "lease_s": 1.0}
    return LedgerSettings(**given | changes)


def test_groups_of_another_run_are_not_adopted(new_queue: NewQueue, tmp_path: Path) -> None:
    queue = new_queue(run_id="one")
    deliver(queue, 4)
    wait_until_kept(tmp_path / "ledger.jsonl", 4)
    kill(queue.actor)
    other = new_queue(run_id="another")
    assert get(other.actor.status.remote()).pending == []
    assert not list((tmp_path / "groups").iterdir())


def test_groups_that_would_become_too_old_are_not_adopted() -> None:
    """Steps of two groups from version 3: the oldest two are trained now, at an age of 2."""
    kept = {10: Kept(1, 1, 1), 11: Kept(1, 1, 1), 12: Kept(1, 1, 1), 13: Kept(1, 1, 2)}
    trained = TrainedGroups(6)
    assert list(adopted(kept, trained, settings())) == [10, 11, 13]
    assert list(adopted(kept, trained, settings(max_staleness=1, on_stale="train_late"))) == [
        10, 11, 12, 13,
    ]  # fmt: skip
    assert list(adopted(kept, trained, settings(max_staleness=0))) == []
    assert list(adopted(kept, trained, settings(groups_in_flight=2))) == [10, 11]
    assert list(adopted(kept, TrainedGroups(6, above=[11]), settings(max_staleness=4))) == [
        10, 12, 13,
    ]  # fmt: skip
    newer = {7: Kept(1, 1, 4), 8: Kept(1, 1, 3)}
    assert list(adopted(newer, trained, settings())) == [8]
