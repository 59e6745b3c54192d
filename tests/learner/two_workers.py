"""Real learner workers in their own processes, by default two, which meet over gloo."""

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from distill.records import TrajectorySource
from learner.config import LearnerConfig
from learner.forward import LossFunction
from learner.learner import Learner
from learner.policy_loss import PolicyObjectiveLoss
from learner.process_group import Membership, WorkerGroup
from learner.worker import LearnerWorker
from tests.learner.piped_followers import Seat, meet, serve

WORKERS = 2
_DEADLINE_S = 240.0
# Imported once for all workers of a session: each worker would take seconds.
_IMPORTED = ["learner.learner", "transformers.models.qwen3.modeling_qwen3"]
# Arguments and result of a leader: anything that pickles.
Story = Callable[[Learner, dict[str, Any]], Any]
# Losses with models are created in their worker.
MakeLosses = Callable[[WorkerGroup], Sequence[LossFunction]]


def on_workers(
    story: Story,
    config: LearnerConfig,
    scratch: Path,
    losses: Sequence[LossFunction] | MakeLosses,
    given: dict[str, Any],
    *,
    source: TrajectorySource | None = None,
    workers: int = WORKERS,
    replicas: int = 1,
) -> Any:
    """Result of `story` on a leader of `workers`; the others fetch rollouts from `source`.

    Raises:
        AssertionError: a worker failed; with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    store, (leads, *others) = meet(workers, context, _DEADLINE_S, replicas)
    reader, writer = context.Pipe(duplex=False)
    arguments = (config, losses, leads.membership, str(scratch), story, given, writer)
    leader = context.Process(target=_lead, args=arguments, daemon=True)
    followers = [
        context.Process(target=_follow, args=(config, losses, seat, source), daemon=True)
        for seat in others
    ]
    processes = [leader, *followers]
    for process in processes:
        process.start()
    try:
        assert reader.poll(_DEADLINE_S), "the leader did not answer"
        problem, result = reader.recv()
        assert not problem, problem
        return result
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def _lead(
    config: LearnerConfig,
    losses: Sequence[LossFunction] | MakeLosses,
    membership: Membership,
    scratch: str,
    story: Story,
    given: dict[str, Any],
    answer: Any,
) -> None:
    try:
        group = WorkerGroup(membership, config.device)
        learner = Learner(config, scratch, losses=_made(losses, group), group=group)
        answer.send(("", story(learner, given)))
    except BaseException:
        answer.send((traceback.format_exc(), None))


def _follow(
    config: LearnerConfig,
    losses: Sequence[LossFunction] | MakeLosses,
    seat: Seat,
    source: TrajectorySource | None,
) -> None:
    torch.set_num_threads(config.threads)
    group = WorkerGroup(seat.membership, config.device)
    made = _made(losses, group)
    worker = LearnerWorker(config, made, group)
    if source is not None:
        loss = made[0]
        assert isinstance(loss, PolicyObjectiveLoss)
        worker.take_rollouts_from(source, loss)
    serve(worker, seat)


def _made(
    losses: Sequence[LossFunction] | MakeLosses, group: WorkerGroup
) -> Sequence[LossFunction]:
    return losses(group) if callable(losses) else losses
