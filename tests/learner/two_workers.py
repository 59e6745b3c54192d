"""Real learner workers (two, if not told otherwise), in processes of their own, that meet over
gloo."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distill.records import TrajectorySource
from learner.config import LearnerConfig
from learner.forward import LossFunction
from learner.learner import Learner
from learner.policy_loss import PolicyObjectiveLoss
from learner.process_group import LOOPBACK, Membership, WorkerGroup, open_store
from learner.worker import LearnerWorker, follow

WORKERS = 2
_DEADLINE_S = 240.0
# Once for all the workers of a session: a worker of its own would take seconds for it.
_IMPORTED = ["learner.learner", "transformers.models.qwen3.modeling_qwen3"]
# what a leader is given, and gives back: anything that pickles
Story = Callable[[Learner, dict[str, Any]], Any]


def tell(
    story: Story,
    config: LearnerConfig,
    scratch: Path,
    losses: tuple[LossFunction, ...],
    given: dict[str, Any],
    *,
    source: TrajectorySource | None = None,
    workers: int = WORKERS,
) -> Any:
    """What `story` returns, told by a leader of `workers`; the others find rollouts in `source`.

    Raises:
        AssertionError: a worker failed; with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    store = open_store(LOOPBACK, _DEADLINE_S)
    reader, writer = context.Pipe(duplex=False)
    members = [
        Membership(
            address=LOOPBACK, port=store.port, rank=rank, size=workers, timeout_s=_DEADLINE_S
        )
        for rank in range(workers)
    ]
    arguments = (config, losses, members[0], str(scratch), story, given, writer)
    leader = context.Process(target=_lead, args=arguments, daemon=True)
    followers = [
        context.Process(target=_follow, args=(config, losses, member, source), daemon=True)
        for member in members[1:]
    ]
    processes = [leader, *followers]
    for process in processes:
        process.start()
    try:
        assert reader.poll(_DEADLINE_S), "the leader did not answer"
        problem, told = reader.recv()
        assert not problem, problem
        return told
    finally:
        for process in processes:
            process.kill()
            process.join()


def _lead(
    config: LearnerConfig,
    losses: tuple[LossFunction, ...],
    membership: Membership,
    scratch: str,
    story: Story,
    given: dict[str, Any],
    answer: Any,
) -> None:
    try:
        learner = Learner(config, scratch, losses=losses, membership=membership)
        answer.send(("", story(learner, given)))
    except BaseException:
        answer.send((traceback.format_exc(), None))


def _follow(
    config: LearnerConfig,
    losses: tuple[LossFunction, ...],
    membership: Membership,
    source: TrajectorySource | None,
) -> None:
    torch.set_num_threads(config.threads)
    group = WorkerGroup(membership, config.device)
    worker = LearnerWorker(config, losses, group)
    if source is not None:
        loss = losses[0]
        assert isinstance(loss, PolicyObjectiveLoss)
        worker.take_rollouts_from(source, loss)
    follow(worker, group)
