"""Lifecycle of a rollout run's actors: start, admission, drain, restart, recovery.

    a rollout worker dies     its groups are leased again immediately; it is restarted
    an engine dies            requests in progress go to another engine; it is restarted, receives
                              the current weights (from a copy, or from the learner while that is
                              idle), passes a handshake, and is announced
    an engine leaves          workers send it no new requests; it is terminated once it is idle
    the learner dies          the learner and the queue return to its checkpoint (`recover`)

Only the driver has handles of all actors. Workers receive those of the engines that serve
(`workers.py`), the learner those of the policy engines that join and leave.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from cluster.base.outcomes import LearnerLost, RunFailed
from cluster.findings.finding import Finding
from cluster.findings.flow import groups_not_kept
from cluster.findings.rewards import groups_fail
from cluster.handles import calls, errors
from cluster.hosts.build import RolloutCast
from cluster.hosts.learners import LearnerActors
from cluster.hosts.rollout_actor import WorkerStatus
from cluster.placement.roles import (
    EVALUATION,
    LEARNER,
    POLICY,
    QUEUE,
    REFERENCE,
    REWARD,
    ROLLOUT,
    following_role,
    pool_bounds,
    turn_roles,
    worker_title,
)
from cluster.queue.group_queue import GroupQueue
from cluster.queue.ledger_types import QueueStatus
from cluster.runtime.admission import Admission
from cluster.runtime.canaries import Canaries, ScoredWrongly
from cluster.runtime.driver import Signals
from cluster.runtime.evaluator_calls import EvaluatorCalls
from cluster.runtime.learner_alone import LearnerAlone
from cluster.runtime.run_handshake import RunHandshake
from cluster.runtime.scaling import Scaling
from cluster.runtime.watchdog import Watchdog, quiet_s
from cluster.runtime.workers import Workers
from cluster.supervision.supervise import Member, State
from distill.errors import CalibrationError, CheckpointError, EngineError, kind_of
from distill.records import CONSTANT_REWARD, TrainedGroups
from learner.checkpoint import Checkpoint, trained_in

_CLOSE_S = 5.0
# Longest wait of an interrupted run for its last canaries: schedulers soon kill an interrupted job.
_LAST_CANARIES_S = 30.0
# Seconds between two looks for changes of serving engines, and between two queue statuses.
_CHANGES_S, _STATUS_S = 0.25, 1.0
# Longest wait for metrics of turns; engines that are alive answer immediately.
_TURNS_S = 5.0
# Prompt groups that may be set aside; one more ends the run.
_MAX_SET_ASIDE = 100


class Fleet(LearnerAlone):
    """Lifecycle manager of all actors of a rollout run.

    Args:
        handshake: handshake of the first engines, and of those that join.
        found: called with findings on scorers that drifted and on groups that fail.
    """

    def __init__(
        self,
        *,
        cast: RolloutCast,
        signals: Signals,
        handshake: RunHandshake,
        print_line: Callable[[str], None],
        trained: TrainedGroups,
        start_model: str,
        found: Callable[[Finding], None],
    ) -> None:
        config = cast.config
        super().__init__(
            config, cast.placement, self._make_learners, cast.directory, signals, print_line
        )
        self._config, self._cast = config, cast
        self._handshake, self._found = handshake, found
        self._groups_are_kept = True
        self._kinds_of_failures = {kind_of(why) for why in trained.set_aside.values()}
        self._committed: Any = None
        self.evaluator_calls = EvaluatorCalls(self.driver)
        self.queue: GroupQueue = cast.queue(trained)
        self.workers = Workers(self.supervisor, self.driver, self._remove)
        self._status: QueueStatus | None = None  # the queue's last
        self.bounds = pool_bounds(config)
        self._following = following_role(config)
        self._specs = cast.specs(self.queue, self._groups_a_worker, start_model)
        engines = [role for role, spec in self._specs.items() if spec.gated]
        self._engine_roles = [role for role in engines if role != EVALUATION]
        # Roles that workers call. A reward model is no engine: it has no log-probs for a handshake.
        self._asked_roles = [*self._engine_roles, *([REWARD] if REWARD in self._specs else [])]
        self._scorers = [role for role in self._engine_roles if role != POLICY]
        self._frozen = [role for role in self._scorers if role != self._following]
        # Their scores are trained on; a reference may be an opponent alone.
        scores = config.scored_by_reference
        self._watched = [role for role in self._frozen if role != REFERENCE or scores]
        self.canaries = Canaries(
            self, self.queue, config, self._watched, found=found, trusted=self._mark_proven
        )
        self.admission = Admission(
            self,
            examine=partial(handshake.examine, self),
            require_handshake=config.verify.handshake,
            following=self._following,
            join=self.canaries.join,
        )
        self._working = False
        self._epoch = 0
        self.scaling = Scaling(
            self, cast.directory, print_line, steps_in_flight=config.steps_in_flight
        )
        self._watchdog = Watchdog(
            self.queue.actor.expire_now.remote,
            self._terminate,
            print_line,
            config.cluster.no_progress_s,
        )

    # members

    @property
    def statuses(self) -> dict[str, WorkerStatus]:
        return self.workers.statuses

    def _make_learners(self, resume_from: Checkpoint | None, attempt: int) -> LearnerActors:
        policies, teachers = self._pushed_to(POLICY), self._pushed_to(self._following)
        return self._cast.learners(resume_from, attempt, self.queue, policies, teachers)

    def _pushed_to(self, role: str | None) -> dict[str, Any]:
        """Engines of the role that a new learner pushes weights to.

        The other engines are admitted later.
        """
        if role is None:
            return {}
        if self._working:
            return self.supervisor.serving(role)
        return {member.name: member.handle for member in self.supervisor.members(role)}

    def _size(self, role: str) -> int:
        return self.bounds.get(role, (1, 1))[0]

    def _groups_a_worker(self) -> int:
        window = self._config.window
        workers = self.supervisor.expected(ROLLOUT) if self._working else self._size(ROLLOUT)
        return -(-window // max(1, workers))

    # start and end

    def start(self, resume_from: Checkpoint | None) -> None:
        self.supervisor.adopt(self._cast.queue_spec, 0, self.queue.actor)
        # The slow ones first; the learner needs the engines' handles.
        self._create(self._asked_roles)
        self._create_learner(resume_from)
        self._create([name for name in self._specs if name not in self._asked_roles])
        self.driver.wait_until_started([QUEUE, LEARNER, *self._specs])
        self.supervisor.run_started = True
        if resume_from is not None and self._config.verify.canary_every and self._watched:
            self._mark_proven(resume_from.step)
        # The first handshake checks their weights.
        for role in (*self._engine_roles, EVALUATION):
            for member in self.supervisor.members(role, State.READY):
                self.supervisor.admit(member)

    def compare_all(self, resume_from: Checkpoint | None) -> None:
        """Push first if the engines' own checkpoint does not hold the learner's weights."""
        resumed, config = resume_from is not None, self._config
        adapter = (
            config.weights.transport == "adapter" if resumed else config.lora.adapter is not None
        )
        if adapter or config.teacher_rule is not None:
            self._push_first()
            self.admission.push_to_evaluators()
            self._handshake.before_steps(self, self._scorers)
        else:
            self._handshake.before_steps(self, self._scorers)
            self._push_first()
        members = [
            m for role in self._scorers for m in self.supervisor.members(role, State.SERVING)
        ]
        if refused := self.canaries.join(members):
            raise CalibrationError("; ".join(f"{name}: {why}" for name, why in refused.items()))
        self.canaries.join_learner()
        self.canaries.join_reward_model()

    def _push_first(self) -> None:
        pushed = self.learner.publish.remote()
        way = self.driver.ask_learner("publishing the first weights", pushed)
        self._print_line(f"weights: {way}")

    def _create(self, roles: Sequence[str]) -> None:
        for name in roles:
            for index in range(self._size(name)):
                self.supervisor.add(self._specs[name], index)

    def commit(self, checkpoint: Checkpoint) -> None:
        watermark = trained_in(checkpoint).watermark
        self._committed = self.queue.actor.commit.remote(checkpoint.step, watermark)

    def work(self) -> None:
        self._working = True
        self.driver.background.start(self._announce_changes())
        self.driver.background.start(self._follow_queue())
        self._begin_joining()

    def cancel_waits(self) -> None:
        self.queue.actor.close.remote()

    def settle(self) -> None:
        try:
            self.driver.ask_learner("the last weight probe", self.learner.settle.remote())
        except LearnerLost as lost:  # it is not needed again
            self._print_line(f"{lost}; its last checkpoint contains every step")

    def set_aside(self, checkpoint: Checkpoint) -> Counter[str]:
        set_aside = trained_in(checkpoint).set_aside
        failed = {i: why for i, why in set_aside.items() if why != CONSTANT_REWARD}
        self._report_failures(failed)  # the last status may be older
        return Counter(map(kind_of, failed.values()))

    def close(self) -> None:
        try:
            calls.get(self.queue.actor.close.remote(), timeout=_CLOSE_S)
            if self._committed is not None:  # Ray would report a cancelled call
                calls.get(self._committed, timeout=_CLOSE_S)
        except errors.RayError as error:  # dead or hanging: only the end of its journal is missing
            self._directory.append_event("unclosed", why=calls.reason_of(error))
        super().close()

    # while the driver waits

    async def _announce_changes(self) -> None:
        """Send changes of the serving engines to the rollout workers, in a loop."""
        while True:
            if self.workers.announced != self.supervisor.changes:
                self._announce()
            await asyncio.sleep(_CHANGES_S)

    def _announce(self) -> None:
        roster = {role: self.supervisor.serving(role) for role in self._asked_roles}
        self.workers.announce(roster, self._groups_a_worker(), self._epoch, self.canaries.replicas)
        self.canaries.ask_new_reward_models()

    async def _follow_queue(self) -> None:
        """Request the queue's status in a loop, and act on it."""
        while True:
            try:
                status: QueueStatus = await self.queue.actor.status.remote()
            except errors.RayError:
                self._status = None  # the next one answers
            else:
                self._status = status
                self._on_queue_status(status)
            await asyncio.sleep(_STATUS_S)

    def _on_queue_status(self, status: QueueStatus) -> None:
        self._check_set_aside(status)
        if status.unkept and self._groups_are_kept:
            self._groups_are_kept = False
            self._found(groups_not_kept(status.unkept, self.canaries.step))
        self._renew_leases(status)
        self._cancel_restarted(status)
        self.scaling.update(status)

    def _remove(self, member: Member) -> None:
        self.supervisor.remove(member)
        self._placement.remove(member.spec.name, member.index)

    def _on_death(self, member: Member, why: str) -> None:
        if member.spec.name == ROLLOUT:
            self.queue.actor.forfeit.remote(worker_title(member.index), why)
        if member.state is State.DRAINING:
            self._placement.remove(member.spec.name, member.index)

    # while the learner is idle

    def wait_for_groups(self) -> float:
        started = time.monotonic()
        try:
            while True:
                self.canaries.check()
                self.admission.admit_waiting()
                self.remove_drained()
                if self.driver.call("groups", self.queue.actor.poll.remote()):
                    return time.monotonic() - started
                self.check_push(wait=False)  # if it failed, no slot will ever be freed
                if self._status is not None:
                    self._watchdog.check(
                        self._status, self.statuses, self.supervisor.since_progress_s()
                    )
        finally:
            self.scaling.waited(time.monotonic() - started)

    def check_push(self, *, wait: bool) -> None:
        """Raise the error of the last push, if it failed; call it while the learner is idle.

        Args:
            wait: wait first until all engines hold the learner's weights.
        """
        self.driver.ask_learner("the push", self.learner.pushed.remote(wait))

    def _terminate(self, name: str, why: str) -> None:
        """Terminate an actor that hangs; it is restarted."""
        for role in (*self._asked_roles, ROLLOUT):
            for member in self.supervisor.members(role, State.SERVING):
                if member.name == name:
                    self.supervisor.terminate(member, why)

    def _renew_leases(self, status: QueueStatus) -> None:
        """Renew leases past half of their time, of groups that make progress."""
        half_s = self._config.queue.lease_s / 2
        old = [i for i, (_, _, age_s) in status.leased.items() if age_s > half_s]
        if not old:
            return
        quiet = quiet_s(status, self.statuses, self.supervisor.since_progress_s())
        moving = [i for i in old if quiet.get(i, half_s) < half_s]
        if moving:
            self.queue.actor.renew.remote(moving)

    def _cancel_restarted(self, status: QueueStatus) -> None:
        """Make workers cancel overdue groups that were restarted elsewhere."""
        if not status.restarted:
            return
        for member in self.supervisor.members(ROLLOUT, State.SERVING, State.DRAINING):
            member.handle.cancel_restarted.remote(status.restarted, status.epoch)

    def _check_set_aside(self, status: QueueStatus) -> None:
        """Raise RunFailed if so many groups fail that the groups cannot be the cause."""
        self._report_failures(status.newest_set_aside)
        in_a_row = status.consecutive_set_aside >= max(self._config.data.batch_size, 2)
        if in_a_row or status.set_aside > _MAX_SET_ASIDE:
            raise RunFailed(
                f"{status.set_aside} prompt groups were set aside (at most {_MAX_SET_ASIDE} may "
                f"be), {status.consecutive_set_aside} of them in a row; the last reason: "
                f"{status.last_reason}"
            )

    def _report_failures(self, set_aside: Mapping[int, str]) -> None:
        """Report each kind of failure at its first group that is set aside.

        Args:
            set_aside: reasons by group id; they may include groups that were reported before.
        """
        for group_id, reason in set_aside.items():
            if (kind := kind_of(reason)) not in self._kinds_of_failures:
                self._kinds_of_failures.add(kind)
                self._found(groups_fail(group_id, reason, self.canaries.step))

    def remove_drained(self) -> None:
        """Terminate draining engines that have no requests in progress."""
        if not self.workers.all_current:
            return
        for role in self._engine_roles:
            for member in self.supervisor.members(role, State.DRAINING):
                if any(status.requests.get(member.name) for status in self.statuses.values()):
                    continue
                if role in self._frozen:
                    self.canaries.ask_last([member])
                else:
                    left = self.learner.remove_engines.remote([member.name])
                    self.driver.ask_learner(f"removing {member.name}", left)
                if member in self.supervisor.members(role):  # otherwise it has died meanwhile
                    self._remove(member)

    def recover(self, lost: LearnerLost) -> int:
        self.admission.end_joining()
        step = super().recover(lost)
        self._begin_joining()
        return step

    def _begin_joining(self) -> None:
        # Sleeping engines leave their memory to the learner, so none may load during a step. Steps
        # that only keep groups are short: engines need not join during them.
        if self._working and not (self._config.engines_sleep or self._config.only_keeps):
            self.admission.begin_joining()

    def _rejoin(self, checkpoint: Checkpoint | None, lost: LearnerLost) -> None:
        self.driver.ask_learner("publishing its weights", self.learner.publish.remote())
        # After the push: groups leased from here on must not be sampled from the lost weights.
        rewound = self.queue.actor.rewind.remote(trained_in(checkpoint), str(lost))
        self._epoch = self.driver.call("taking the queue back", rewound)
        self.canaries.join_learner()
        if self._working:
            self._announce()
        step = checkpoint.step if checkpoint else 0
        self._print_line(f"the {self._learner_spec.title(0)} is back at step {step}")

    def turns(self) -> dict[str, float]:
        roles = turn_roles(self._config)
        if len(roles) < 2:
            return {}
        states = State.READY, State.SERVING, State.DRAINING
        members = [
            m for role in roles if role != LEARNER for m in self.supervisor.members(role, *states)
        ]
        asked = {member.handle.turns.remote(): member.index for member in members}
        answered, _ = calls.wait(list(asked), num_returns=len(asked), timeout=_TURNS_S)
        by_set: defaultdict[int, Counter[str]] = defaultdict(Counter)  # of the same GPUs
        for answer in answered:
            with suppress(errors.RayError):  # it has died
                by_set[asked[answer]].update(calls.get(answer))
        longest = max(by_set.values(), key=lambda spent: spent["turns/seconds"], default=Counter())
        return {name: float(value) for name, value in longest.items()}

    def ask_canaries(self, step: int) -> None:
        if step == self._config.steps:
            self.canaries.after_last(step)
        else:
            self.canaries.after_step(step)

    def ask_learner_canaries(self, step: int) -> None:
        self.canaries.before_checkpoint(step)

    def ask_last_canaries(self, step: int) -> None:
        try:
            with self.driver.ending(_LAST_CANARIES_S):
                self.canaries.after_last(step)
        except ScoredWrongly as moved:
            self._directory.store.set_aside_after(moved.first_bad - 1)
            self._print_line(f"{moved}: later checkpoints are renamed to *.damaged")
        except (RunFailed, EngineError, errors.RayError) as error:
            self._print_line(f"the last canaries were not answered: {error}")

    def _mark_proven(self, step: int) -> None:
        try:
            self._directory.store.mark_proven(step)
        except CheckpointError as error:  # full disk: the checkpoint is dropped as usual
            self._print_line(f"WARNING: {error}")

    # pools that change their size

    def grow(self, role: str) -> None:
        """Add a member to the pool."""
        self.supervisor.add(self._specs[role], self._placement.add(role))

    def shrink(self, role: str) -> None:
        """Cancel a pending restart, or else drain the newest member."""
        if (index := self.supervisor.cancel_restart(role)) is not None:
            self._placement.remove(role, index)
            return
        member = self.supervisor.members(role, State.SERVING, State.STARTING, State.READY)[-1]
        if member.state is not State.SERVING:  # it never served
            self._remove(member)
            return
        self.supervisor.drain(member)
        if role == ROLLOUT:
            member.handle.drain.remote()
