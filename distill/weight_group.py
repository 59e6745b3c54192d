"""Membership in a weight group: a torch.distributed group in addition to torch's default group.

The learner is rank 0 and holds the group's TCPStore; the protocol is in
cluster/weights/collective.py. A broadcast that is never sent blocks its receivers, and with NCCL
only the end of their process would end that. Engines therefore `announce` that they are ready, and
receive only after the learner has confirmed that it sends. The group is formed in the same way,
because an engine that joins it waits for all other members.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - public
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    ProcessGroup,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

from distill.engine import SENDS, GroupMember
from distill.errors import EngineError

# SGLang's error message for a broadcast that failed before any weights were written.
NOT_RECEIVED = "Failed to receive weights"


def join_group(store: TCPStore, member: GroupMember) -> ProcessGroup:
    """Join a weight group as SGLang's `init_custom_process_group` does; blocks until all joined.

    Raises:
        RuntimeError: torch failed to form the group.
    """
    group, _ = _new_process_group_helper(
        member.world_size,
        member.rank,
        [],
        Backend(member.backend),
        PrefixStore(member.name, store),
        group_name=member.name,  # pyright: ignore[reportArgumentType] - a str, renamed
        timeout=timedelta(seconds=member.join_deadline_s),
    )
    assert isinstance(group, ProcessGroup)
    _world.pg_group_ranks[group] = {i: i for i in range(member.world_size)}
    group.set_timeout(timedelta(seconds=member.timeout_s))
    return group


def leave_group(group: ProcessGroup) -> None:
    """Close the group's connections: peers that wait for a broadcast by gloo get an error instead.

    An NCCL group is aborted, because destroying it waits for its broadcasts, and for peers on the
    same node.
    """
    if torch.distributed.get_backend(group) == "nccl":
        _abort_process_group(group)
    else:
        torch.distributed.destroy_process_group(group)


def learner_store(member: GroupMember) -> TCPStore:
    """Connect a member to the learner's store. Raises RuntimeError if it is gone."""
    timeout = timedelta(seconds=member.join_deadline_s)
    return TCPStore(member.address, member.port, is_master=False, timeout=timeout)


def announce(member: GroupMember, number: int) -> None:
    """Announce to rank 0 that this engine is ready to receive the push of this number, or to join
    the group (`JOINING`), and wait for its confirmation.

    Raises:
        EngineError: the learner's store is gone, or the learner cancelled the push.
    """
    key = member.word_key(number)
    try:
        store = learner_store(member)
        store.set(member.ready_key(number), "1")
        store.wait([key], timedelta(seconds=member.timeout_s))
        word = store.get(key).decode()
    except RuntimeError as error:
        raise EngineError(
            f"{NOT_RECEIVED}: the learner's store is unreachable ({error})"
        ) from error
    if word != SENDS:
        raise EngineError(f"{NOT_RECEIVED}: the learner cancelled the push")
