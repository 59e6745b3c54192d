"""Recorder of each step's groups, which replaces the learner with rollout_only=True.

    step   waits for: the step's groups    unblocked by: the rollout workers' puts
           waits for: space on the disk    unblocked by: a later try; a closed queue ends it

Queue, leases, scores and step rules are those of a run that trains, and so is the order of a step:
groups are written to out/groups, then published, which frees their slots; then the driver writes
the metrics and marks the step. Engines keep their initial weights, so all groups are of version 0.
Steps are numbered because the ledger requires it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import chz

from cluster.config.on_policy import RolloutConfig
from cluster.queue.group_queue import GroupQueue
from cluster.run_files.run_directory import RunDirectory
from cluster.store.kept_groups import KeptGroupWriter
from cluster.store.replay_log import drop_groups_after, write_step
from cluster.supervision.supervise import WorkDone
from distill.durable_files import disk_remedy, with_retries
from distill.errors import CheckpointError
from distill.objective.batching import TrainingRow
from distill.objective.metrics import group_metrics, token_table
from distill.objective.rows import advantage_metrics, advantage_stats, policy_rows, rows_by_group
from distill.objective.whole_groups import opened
from distill.pace import Progress
from distill.records import StepGroups
from distill.types import TrajectoryGroup
from learner.checkpoint import Checkpoint, trained_in


class GroupRecorder:
    """Keeps the groups of one step at a time. Has the methods of `LearnerActor` that a run calls.

    Args:
        directory: directory of the kept groups and of the marks.
        resume_from: mark to continue from; groups that were kept after it are dropped.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        queue: GroupQueue,
        directory: RunDirectory,
        keep: KeptGroupWriter,
        teacher_weights: Mapping[str, float],
        stop_event: tuple[int, ...],
        resume_from: Checkpoint | None,
    ) -> None:
        self._queue, self._groups, self._store = queue, directory.groups, directory.store
        self._keep = keep
        self._objective = config.objective  # advantages are kept for inspection
        if not config.scored_by_reference:  # a learner's own model scores when it trains
            self._objective = chz.replace(config.objective, reference_kl_coef=0.0)
        self._teacher_weights = teacher_weights
        self._stop_event = stop_event
        self._step_count = resume_from.step if resume_from else 0
        self._kept = trained_in(resume_from)
        self._progress = Progress()
        drop_groups_after(self._groups, self._step_count)
        keep.rewind(self._step_count)

    def step(self, waited_s: float) -> dict[str, float]:
        """Take a step's groups, keep them, and publish; returns metrics of the samples.

        Raises:
            CheckpointError: the groups could not be written, or the disk stays full.
            QueueClosed: the run ends; the groups of this step are not kept.
        """
        started = time.perf_counter() - waited_s
        return with_retries(lambda: self._step(started), self._progress.mark)

    def _step(self, started: float) -> dict[str, float]:
        taken, groups_P = self._take()
        waited = time.perf_counter() - started
        step = self._step_count + 1
        kept = taken.after(self._kept)
        rows_D = policy_rows(
            groups_P, self._objective, self._teacher_weights, self._stop_event
        )  # raises if they lack a score that a learner would need
        try:
            write_step(self._groups, step, taken, groups_P)
        except OSError as error:
            raise CheckpointError(
                f"cannot keep the groups of step {step} in {self._groups}: {error}. "
                f"{disk_remedy(error)}"
            ) from error
        self._show(step, groups_P, rows_D)
        self._kept, self._step_count = kept, step
        self._progress.mark()
        self._queue.publish(step, kept)
        seconds = time.perf_counter() - started
        tokens = sum(row.num_trained for row in rows_D)
        return {
            **group_metrics(taken.groups_P, version=0),
            **advantage_metrics([advantage_stats(rows_D)], self._objective),
            "step": step,
            "weight_version": 0,
            "rollout/tokens": tokens,
            "time/wait": waited,
            "time/step": seconds,
            "tokens_per_s": tokens / seconds,
            **taken.metrics(kept),
        }

    def _take(self) -> tuple[StepGroups, list[TrajectoryGroup]]:
        while True:
            taken = self._queue.take(self._kept)
            groups_P, lost = opened(self._queue, taken.groups_P)
            if not lost:
                return taken, groups_P
            self._queue.mark_lost(lost)

    def _show(
        self, step: int, groups_P: Sequence[TrajectoryGroup], rows_D: Sequence[TrainingRow]
    ) -> None:
        """Keep some of the groups for inspection."""
        ids = set(self._keep.chosen(step, [group.group_id for group in groups_P]))
        chosen = [pair for pair in rows_by_group(groups_P, rows_D) if pair[0].group_id in ids]
        if chosen:
            segments = [segment for group in groups_P for segment in group.segments()]
            self._keep.keep(
                step,
                [group for group, _ in chosen],
                [row for _, rows in chosen for row in rows],
                [token_table(segments)],
            )

    def save(self) -> Checkpoint:
        """Mark the current step, from which a resumed run continues."""
        return self._store.save(
            step=self._step_count, write=lambda _path: None, delivery=self._kept.to_json()
        )

    def begin_save(self) -> Checkpoint:
        return self.save()

    def progress(self) -> WorkDone:
        """Heartbeat; call it in `HEALTH_GROUP`."""
        return WorkDone(self._progress.count)

    def written(self, wait: bool) -> None:
        """None: marks are never written concurrently with a step."""

    # the engines', which get no weights

    def publish(self) -> str:
        return "none are pushed: engines keep the student's (rollout_only=True)"

    def pushed(self, wait: bool) -> None: ...

    def admit(self, engines: Mapping[str, Any]) -> None: ...

    def remove_engines(self, names: Sequence[str]) -> None: ...

    def settle(self) -> None: ...
