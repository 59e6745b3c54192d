"""Ledger of prompt groups: credit, leases, order, and the groups of the next step.

Independent of Ray and of external state: cluster/queue/group_queue.py keeps a ledger in an actor,
and cluster/queue/journal.py records its events, from which it can be rebuilt.

    not yet leased -> leased -> delivered -> (pushed ->) in published weights
                      |    ^
                      v    |
                     pending -> set aside         failed too often

A group holds a slot from its lease until the weights that its step produced are on every policy
engine. There are `groups_in_flight` slots. If a push overlaps the next step, that step takes its
groups after the push has begun (`push`), and slots are freed when the push has ended (`publish`).

A rule chooses the groups of a step (cluster/queue/step_rule.py). A group leased at weight version
v is trained at version v + max_staleness at the latest, unless the settings train overdue groups
late, or restart them (`restart_groups`). A group that is leased again keeps its slot and its age.
The run starts one more group for each group that is set aside.

With `most_replaced`, a step skips groups whose members all have the same reward, which carry no
learning signal, and takes others instead (dynamic sampling, Yu et al. 2025, DAPO). The skipped
groups are set aside when the weights of that step are published. Beyond `most_replaced` the step
trains on such groups, so that it always completes.

Deliveries are written to disk (cluster/store) soon after they arrived (`keep`). After the queue's
death the kept groups are unchanged, and the others are sampled again (`recover`). A new job takes
kept groups back: they are pending, with their age, and are only scored again.

Scorers are checked with canaries (cluster/queue/provenance.py). Groups that a moved scorer may have
scored wrongly are leased again, for another scorer; if weights contain such groups, the learner has
to return to an earlier checkpoint.

cluster/queue/faults.py attributes failures of groups and deaths of workers.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from cluster.queue.faults import Faults, killed
from cluster.queue.ledger_types import CanaryAnswer, Kept, LedgerSettings, NextStep, QueueStatus
from cluster.queue.provenance import ScoreProvenance
from cluster.queue.step_rule import View
from distill.records import CONSTANT_REWARD, Lease, StepGroups, TrainedGroups

# Number of newest delivered groups whose durations the ledger keeps, if above groups_per_step.
_KNOWN = 256
# Number of newest failures whose reasons a status includes.
_NEWEST = 8


@dataclass(frozen=True, slots=True)
class _Held:
    worker: str
    attempt: int
    since: float  # time of the last progress
    began: float


class Ledger:
    """The groups of one run.

    Every change is passed to `record` as an event before the call returns. Calls are idempotent: a
    call that Ray repeats after the queue's death has no further effect.

    Attributes:
        trained, published: groups that the learner's weights, and those on the engines, account
            for. They differ only during a push that overlaps the next step.
        set_aside: reasons of the groups that are set aside, by id.
        faults: suspects are reserved for a worker without leases.
        kept: groups whose deliveries are on disk, until a checkpoint includes them.
        resampled: groups that are leased again, with their earlier data discarded.
    """

    def __init__(
        self,
        settings: LedgerSettings,
        trained: TrainedGroups,
        *,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
        record: Callable[..., None] = lambda _event, **_fields: None,
        adopted: Mapping[int, Kept] | None = None,
    ) -> None:
        """
        Args:
            trained: groups that the starting weights account for.
            adopted: groups of an earlier job that are taken back (`ledger_types.adopted`).
            record: called with an event's name and its fields.
        """
        self.record = record
        self.epoch = epoch
        self._clock = clock
        self._settings, self._rule = settings, settings.rule()
        self.faults = Faults(settings.max_failures, settings.max_deaths)
        self.set_aside: dict[int, str] = {}
        self._arrived = self._consecutive_set_aside = 0
        self._last_reason = ""
        self.provenance = ScoreProvenance()
        self.resampled: set[int] = set()
        self._made_at = self._metered_at = clock()
        self._starved, self._starved_s = False, 0.0
        # Seconds between lease and delivery of the newest delivered groups.
        self._seconds: deque[float] = deque(maxlen=max(_KNOWN, settings.groups_per_step))
        self._start_from(trained)
        for group_id, kept in (adopted or {}).items():
            self.kept[group_id] = kept
            self._started[group_id] = kept.started - self._base
            self._pending.add(group_id)

    def _start_from(self, trained: TrainedGroups) -> None:
        self.trained = self.published = trained
        self._next = trained.watermark
        self._steps = 0  # published since
        self._base = len(trained) // self._settings.groups_per_step  # version at step 0
        self._version = self._base  # published last
        # Failed groups stay set aside; a group of constant reward may get other rewards when it is
        # sampled again.
        above = {
            i: reason
            for i, reason in self.set_aside.items()
            if i >= trained.watermark and reason != CONSTANT_REWARD
        }
        self.set_aside = {**trained.set_aside, **above}
        self.provenance.reset(trained.__contains__)
        # Each live id that was started and is not trained, with `_steps` at its first lease or last
        # restart. Each id is in exactly one of `_pending`, `_leased` and `_delivered`.
        self._started: dict[int, int] = {}
        self._pending: set[int] = set()
        self._leased: dict[int, _Held] = {}
        self._delivered: set[int] = set()
        self._constant: dict[int, float] = {}  # delivered ids of constant reward, with that reward
        self._attempts: Counter[int] = Counter()
        self._restarts: Counter[int] = Counter()
        self._over: dict[int, int] = {}  # of these ids, the last attempt that the restart ended
        self._answers: dict[str, tuple[str, list[Lease]]] = {}
        self._taken: StepGroups | None = None
        self.kept: dict[int, Kept] = {}
        # Kept groups that were delivered again since: the kept scores are not valid.
        self._rescored: set[int] = set()

    # the workers' end

    def lease(self, worker: str, max_groups: int, request: str = "") -> list[Lease]:
        """Lease groups: pending ones first, lowest first, then as many new ones as credit allows.

        A worker without leases gets a suspect first, if there is one, and then nothing else.

        Args:
            request: identifies the call. If the worker repeats its last call, it gets the same
                leases again, except those that it no longer holds.
        """
        answered, leases = self._answers.get(worker, ("", []))
        if request and request == answered:
            return [lease for lease in leases if self._is_held(lease)]
        leases = [
            self._lease_one(group_id, worker) for group_id in self._startable(worker, max_groups)
        ]
        if leases:
            self._answers[worker] = (request, leases)
            self.faults.given(worker, leases)
            self.record(
                "lease",
                ids=[lease.group_id for lease in leases],
                attempts=[lease.attempt for lease in leases],
                worker=worker,
                epoch=self.epoch,
                request=request,
            )
            self._meter()
        return leases

    def _startable(self, worker: str, max_groups: int) -> list[int]:
        if suspects := self.faults.suspects:
            held = {i for i, held in self._leased.items() if held.worker == worker}
            if held & suspects:
                return []
            if not held and (waiting := suspects & self._pending):
                return [min(waiting)]
        ids = heapq.nsmallest(max_groups, self._pending - suspects)
        last = len(ids) + min(max_groups - len(ids), self.credit)
        while len(ids) < last:
            if self._is_new(self._next):
                ids.append(self._next)
            self._next += 1
        return ids

    def leased_to(self, worker: str) -> int:
        return sum(held.worker == worker for held in self._leased.values())

    def _lease_one(self, group_id: int, worker: str) -> Lease:
        self._pending.discard(group_id)
        self._attempts[group_id] += 1
        attempt = self._attempts[group_id]
        if self._over.get(group_id) == attempt - 1:
            self._started[group_id] = self._steps
        self._started.setdefault(group_id, self._steps)
        self.provenance.record_lease(group_id)
        now = self._clock()
        self._leased[group_id] = _Held(worker, attempt, now, now)
        return Lease(group_id=group_id, attempt=attempt, epoch=self.epoch)

    def _is_new(self, group_id: int) -> bool:
        """True if the group has not started; it may have, after a rewind or in an earlier job."""
        return not any(group_id in ids for ids in (self._started, self.trained, self.set_aside))

    def _is_held(self, lease: Lease) -> bool:
        held = self._leased.get(lease.group_id)
        return lease.epoch == self.epoch and held is not None and held.attempt == lease.attempt

    def deliver(
        self,
        lease: Lease,
        worker: str = "",
        constant_reward: float | None = None,
        scored_by: Collection[int] = (),
    ) -> bool:
        """Record a delivered group.

        A delivery on an expired lease is accepted if it is the group's first: its data is valid.

        Args:
            constant_reward: reward that all its members have; None if their rewards differ.
            scored_by: replicas that scored it (cluster/queue/provenance.py).

        Returns:
            True for the group's first delivery in this epoch; False if the caller must drop it.
        """
        group_id = lease.group_id
        self.faults.returned(worker, lease)
        fields = {"id": group_id, "attempt": lease.attempt, "worker": worker, "epoch": lease.epoch}
        if why := self._why_late(lease):
            self.record("late", **fields, reason=why)
            return False
        if group_id in self.trained or group_id in self._delivered:
            self.record("dup", **fields)
            return False
        self._pending.discard(group_id)
        if (held := self._leased.pop(group_id, None)) is not None:
            self._seconds.append(self._clock() - held.began)
        self._delivered.add(group_id)
        if group_id in self.kept:
            self._rescored.add(group_id)
        self.faults.arrived(group_id)
        self._arrived += 1
        self._consecutive_set_aside = 0
        constant = constant_reward if self._settings.most_replaced else None
        if constant is not None:
            fields["constant_reward"] = constant
        replicas = {*scored_by, *self.provenance.rewarded_by(group_id)}
        if replicas:
            fields["by"] = sorted(replicas)
        self.record("put", **fields)
        if not self.provenance.record_delivery(group_id, replicas):
            moved = replicas & self.provenance.moved
            self._rescore([group_id], resample=not moved.isdisjoint(self.provenance.rewarding))
        elif constant is not None:
            self._constant[group_id] = constant
        self._meter()
        return True

    def _why_late(self, lease: Lease) -> str:
        if lease.epoch != self.epoch:
            return f"epoch {lease.epoch} is over"
        if lease.group_id in self.set_aside:
            return f"it was set aside: {self.set_aside[lease.group_id]}"
        if lease.attempt <= self._over.get(lease.group_id, 0):
            return "it was overdue and has been restarted"
        known = lease.group_id in self.trained or lease.attempt <= self._attempts[lease.group_id]
        if not known:
            # The journal lacks its lease: the disk was full then, and later the queue died.
            return "no such lease is known"
        return ""

    def fail(self, lease: Lease, reason: str, worker: str = "") -> None:
        """Record that the group's rollout failed. If the lease has ended, only its return."""
        self.faults.returned(worker, lease)
        if not self._is_held(lease):
            return
        group_id = lease.group_id
        self._last_reason = reason
        self.record("fail", id=group_id, attempt=lease.attempt, worker=worker, reason=reason)
        self._requeue(group_id, self.faults.failed(group_id, reason))
        self._meter()

    def _requeue(self, group_id: int, verdict: str | None) -> None:
        """Make a group pending again, or set it aside if `verdict` gives a reason."""
        if verdict is None:
            self._make_pending([group_id])
        else:
            self._drop([group_id])
            self.set_aside[group_id] = self._last_reason = verdict
            self._consecutive_set_aside += 1
            self.record("set_aside", id=group_id, reason=verdict)

    def _make_pending(self, ids: Collection[int]) -> None:
        """Return leased or delivered groups to the pending ones."""
        self._pending.update(ids)
        for group_id in ids:
            self._leased.pop(group_id, None)
            self._delivered.discard(group_id)
            self._constant.pop(group_id, None)

    def _drop(self, ids: Collection[int]) -> None:
        """Remove groups from the live ones."""
        self._make_pending(ids)
        for group_id in ids:
            self._started.pop(group_id, None)
            self._pending.discard(group_id)

    def report_user_code(self, worker: str, problems: Mapping[int, str]) -> None:
        """See `Faults`. Not journalled: a restarted queue suspects all groups of a dead worker that
        has not reported since."""
        self.faults.report_user_code(worker, problems)

    # scorers and their canaries

    def scorer(
        self, replica: int, in_learner: bool = False, rewards: bool = False, **fields: Any
    ) -> None:
        """Register a scorer whose first canaries were good.

        Args:
            in_learner: the scorer is a model inside the learner, and scores its training data.
            rewards: the scorer is the reward model.
            fields: further fields of the event.
        """
        kind = {"in_learner": True} if in_learner else {"rewards": True} if rewards else {}
        self.record("scorer", replica=replica, **kind, **fields)
        if in_learner:
            self.provenance.in_learner.add(replica)
        if rewards:
            self.provenance.rewarding.append(replica)

    def ask(self, replicas: Collection[int]) -> None:
        """Record that canaries are about to be sent: delivered groups were scored before them."""
        self.provenance.record_canaries_sent(replicas)
        self.record("ask", replicas=sorted(replicas))

    def canary(self, replica: int, good: bool, **fields: Any) -> CanaryAnswer:
        """Record the result of a scorer's canary.

        If it is bad, the groups that the scorer has scored since its last good canary are leased
        again, except those that the learner has taken.

        Args:
            good: the answer agrees with the scorer's first one.
            fields: further fields of the event.
        """
        if replica not in self.provenance.moved:  # otherwise Ray has repeated the call
            self.record("canary", replica=replica, good=good, **fields)
        if good:
            self.provenance.record_good_canary(replica)
            return CanaryAnswer(proven=self._proven)
        scored = self.provenance.record_bad_canary(replica)
        taken = scored & set(self._taken.group_ids if self._taken else ())
        bad = [v for i, v in self.provenance.versions.items() if i in scored]
        bad += [self._version + 1] if taken else []
        to_rescore = self._rescore(
            sorted(scored & self._delivered - taken),
            resample=replica in self.provenance.rewarding,
        )
        self._meter()
        return CanaryAnswer(
            to_rescore=tuple(to_rescore), first_bad=min(bad, default=None), proven=self._proven
        )

    @property
    def _proven(self) -> int:
        first = min(self.provenance.versions.values(), default=None)
        return self._version if first is None else first - 1

    def _rescore(self, ids: Collection[int], *, resample: bool) -> list[int]:
        """Make delivered groups pending again, without counting a failure.

        Groups of constant reward are set aside instead, as far as others have started in their
        place: they may come back with other rewards, and then the steps would have too few places.

        Args:
            resample: sample them again, too, because their rewards are wrong.

        Returns:
            The ids that are pending again.
        """
        self.provenance.drop(ids)
        skipped = self._skip_constant(self._delivered - set(ids))
        for group_id in skipped:
            self.record("set_aside", id=group_id, reason=CONSTANT_REWARD)
        ids = [i for i in ids if i not in skipped]
        if not ids:
            return []
        if resample:
            self.resampled |= set(ids)
            self.provenance.discard_rewards(ids)
            self._forget_kept(ids)
        self._last_reason = "its scorer has moved"
        self.record("again", ids=ids, reason=self._last_reason)
        self._make_pending(ids)
        return ids

    def _skip_constant(self, stay: Set[int]) -> list[int]:
        """Set aside groups of constant reward, as far as others have started in their place.

        Args:
            stay: delivered groups that are not concerned.
        """
        constant, most = self._view().constant, self._settings.most_replaced
        missed = min(len(constant), most) - min(len(constant & stay), most)
        skipped = sorted(constant - stay)[:missed]
        self._drop(skipped)
        self.set_aside |= dict.fromkeys(skipped, CONSTANT_REWARD)
        self._forget_kept(skipped)
        return skipped

    # the driver's end

    def forfeit(self, worker: str, reason: str) -> list[int]:
        """Record a worker's death and make its leased groups pending again. Returns their ids."""
        ids = sorted(i for i, held in self._leased.items() if held.worker == worker)
        self._answers.pop(worker, None)
        death = self.faults.died(worker, ids)
        if death.had_groups:
            self._last_reason = reason
            in_user_code = _by_text(death.in_user_code)
            self.record("forfeit", worker=worker, ids=ids, inside=in_user_code, reason=reason)
            if death.cause is not None:
                why = killed(death.in_user_code.get(death.cause, ""), reason)
                self._requeue(death.cause, self.faults.failed(death.cause, why))
            else:
                self._make_pending(ids)
            self._meter()
        return ids

    def expire(self, now: float) -> list[int]:
        """End the leases that were not renewed for `lease_s`, as if their workers had died."""
        lease_s = self._settings.lease_s
        late = [i for i, held in self._leased.items() if now - held.since > lease_s]
        return self.release(late, f"without progress for more than {lease_s:g} s")

    def renew(self, ids: Iterable[int]) -> None:
        """Renew leases. Not journalled, since a restart of the queue renews all leases."""
        now = self._clock()
        for group_id in self._leased.keys() & set(ids):
            held = self._leased[group_id]
            self._leased[group_id] = replace(held, since=now)

    def release(self, ids: Iterable[int] | None, reason: str) -> list[int]:
        """End the leases of `ids` (None: all leases) early; returns the ids that were leased."""
        leased = sorted(self._leased if ids is None else self._leased.keys() & set(ids))
        if leased:
            self._last_reason = reason
            self.record("expire", ids=leased, reason=reason)
            self._requeue_lost(leased, reason)
        return leased

    def _requeue_lost(self, ids: list[int], reason: str) -> None:
        for group_id in ids:
            self._requeue(group_id, self.faults.lost(group_id, reason))
        self._meter()

    def rewind(self, trained: TrainedGroups, reason: str) -> None:
        """Reset to a checkpoint that the learner returned to.

        Groups that the checkpoint does not contain start anew. Groups that were set aside for
        failures stay set aside, and failure counts are kept.
        """
        self.epoch += 1
        self._last_reason = reason
        self._start_from(trained)
        self.record("rewind", epoch=self.epoch, **trained.to_json(), reason=reason)
        self._meter()

    def commit(self, step: int, watermark: int) -> None:
        """Record that the checkpoint of `step` is on disk: groups below `watermark` are final."""
        self.faults.forget_below(watermark)
        self._forget_kept([i for i in self.kept if i < watermark])
        self.record("commit", step=step, watermark=watermark)

    def keep(self, attempts: Mapping[int, int]) -> None:
        """Record that deliveries are on disk: the current one of each group, attempts by id."""
        attempts = {i: attempt for i, attempt in attempts.items() if i in self._delivered}
        if not attempts:
            return
        ids = list(attempts)
        self.record("keep", epoch=self.epoch, ids=ids, attempts=list(attempts.values()))
        for group_id, attempt in attempts.items():
            started = self._base + self._started[group_id]
            self.kept[group_id] = Kept(self.epoch, attempt, started)
        self._rescored.difference_update(ids)

    def _forget_kept(self, ids: Iterable[int]) -> None:
        for group_id in ids:
            self.kept.pop(group_id, None)
            self._rescored.discard(group_id)

    def overdue(self) -> list[int]:
        """Groups to restart, with `on_stale=restart`.

        These are groups that the next step would have to wait for, and that have been leased for
        unusually long or are pending.
        """
        settings = self._settings
        if settings.on_stale != "restart" or self._taken_intact is not None:
            return []
        if len(self._seconds) < settings.groups_per_step:
            return []  # too few for a meaningful median
        before = self._clock() - settings.restart_after * median(self._seconds)
        began = {i: held.began for i, held in self._leased.items() if held.began < before}
        able = [*sorted(self._pending), *sorted(began, key=lambda i: (began[i], i))]
        able = [i for i in able if self._restarts[i] < settings.max_restarts]
        return self._rule.choose_restarts(self._view(), able, self._steps)

    def restart_groups(self, ids: Collection[int]) -> None:
        """End the leases of groups permanently and make these pending, with their age reset.

        Deliveries on the ended leases are dropped, since their data is overdue.
        """
        if not ids:
            return
        most = self._settings.max_restarts
        assert all(i not in self._delivered and self._restarts[i] < most for i in ids)
        self._last_reason = "it was overdue"
        self.record("begin_again", epoch=self.epoch, ids=list(ids))
        self.provenance.discard_rewards(ids)
        self._forget_kept(ids)
        self._make_pending(ids)
        for group_id in ids:
            self._over[group_id] = self._attempts[group_id]
            self._started[group_id] = self._steps
            self._restarts[group_id] += 1
        self._meter()

    # the learner's end

    def ready(self) -> StepGroups | None:
        """The next step, or None if its groups are not all delivered."""
        if (taken := self._taken_intact) is not None:
            return taken if self._delivered.issuperset(taken.group_ids) else None
        if (choice := self._rule.choose(self._view())) is None:
            return None
        replaced = dict.fromkeys(choice.replaced, CONSTANT_REWARD)
        after = self.trained.after(choice.ids, self.set_aside | replaced)
        skipped = after.set_aside.items() - self.trained.set_aside.items()
        now = self._steps + self.pushing
        ages = [now - self._started[group_id] for group_id in choice.ids]
        return StepGroups(
            group_ids=choice.ids,
            set_aside=dict(sorted(skipped)),
            overdue=sum(age > self._settings.max_staleness for age in ages),
            restarts=sum(self._restarts[group_id] for group_id in choice.ids),
            start_max=max(ages),
            queued=len(self._delivered) - len(choice.ids),
            replaced={group_id: self._constant[group_id] for group_id in replaced},
            epoch=self.epoch,
        )

    @property
    def _taken_intact(self) -> StepGroups | None:
        """The step that was taken last; None if one of its groups was set aside since.

        Payloads of its groups may have been lost.
        """
        taken = self._taken
        if taken is None or self.set_aside.keys() & set(taken.group_ids):
            return None
        return taken

    def peek(self, trained: TrainedGroups) -> NextStep | None:
        """Groups, as far as known, of the step that starts from weights accounting for `trained`.

        A forecast only, without side effects: groups that finish later may take precedence.

        Returns:
            None if that is neither the next step nor the one after the taken step.
        """
        behind, taken = len(trained) - len(self.trained), self._taken_intact
        gone: set[int] = set()
        if behind == 0 and taken is not None:
            ids = [i for i in taken.group_ids if i in self._delivered]
            return NextStep(ids, len(ids) == len(taken.group_ids))
        if behind:
            if taken is None or behind != len(taken.group_ids):
                return None
            gone = {*taken.group_ids, *taken.replaced}
        view = self._view(gone)
        return NextStep(self._rule.peek(view), self._rule.choose(view) is not None)

    def take(
        self, trained: TrainedGroups | None = None, *, pushing: bool = False
    ) -> StepGroups | None:
        """Take the next step: as `ready`, and fixed from then on until it is pushed or published.

        Args:
            trained: groups that the learner's weights account for.
            pushing: True while the push of these weights to the engines is in progress.

        Raises:
            AssertionError: `trained` differs from the ledger's record of the learner's weights.
        """
        if trained is not None and len(trained) > len(self.trained):
            # The journal lacks the last step's event: the disk was full, and then the queue died.
            arrived = self.push if pushing else self.publish
            arrived(len(trained) // self._settings.groups_per_step, trained)
        assert trained is None or trained == self.trained, (
            f"the learner requests groups after {trained}, but its weights account for "
            f"{self.trained}: some groups would be trained twice or never"
        )
        step = self.ready()
        if step is not None and step != self._taken:
            self._taken = step
            replaced = {"replaced": list(step.replaced)} if step.replaced else {}
            self.record("take", ids=step.group_ids, skipped=_by_text(step.set_aside), **replaced)
        return step

    def mark_lost(self, ids: Iterable[int], reason: str) -> list[int]:
        """Record that taken groups cannot be fetched, because their node is gone.

        Each is leased again and counts as an expired lease. Returns the ids that were held.
        """
        taken = set(self._taken.group_ids) if self._taken else set()
        gone = sorted(self._delivered & taken & set(ids))
        if gone:
            self._last_reason = reason
            self.record("lost", epoch=self.epoch, ids=gone, reason=reason)
            self.provenance.drop(gone)
            self._forget_kept(gone)
            self._requeue_lost(gone, reason)
        return gone

    def missing(self) -> list[int]:
        """Ids that the next step waits for: started ones, then new ids if those are too few."""
        if (taken := self._taken_intact) is not None:
            return [i for i in taken.group_ids if i not in self._delivered]
        left = self._settings.total_groups - len(self.trained)
        view, group_id = self._view(), self._next
        lacking = min(self._settings.groups_per_step, left) - view.in_progress
        missing = self._rule.waited_for(view) if left else []
        while lacking > 0:
            if self._is_new(group_id):
                missing.append(group_id)
                lacking -= 1
            group_id += 1
        return missing

    def push(self, version: int, trained: TrainedGroups, epoch: int | None = None) -> None:
        """Record that a push of weights that account for `trained` has begun.

        The next step can be taken; slots are not freed yet. As for `publish`, repeated calls and
        calls from a past `epoch` have no effect.
        """
        if self._is_over_in(epoch) or len(trained) <= len(self.trained):
            return
        self._arrive()  # pushes do not overlap: the previous one has ended
        self._account_for("push", version, trained)

    def publish(self, version: int, trained: TrainedGroups, epoch: int | None = None) -> None:
        """Record that weights that account for `trained` are on every engine. Frees their slots.

        A repeated call has no effect, nor does a call from a past `epoch`, whose weights are lost.

        `trained` takes precedence over the ledger's state: since the step was taken, the queue may
        have died, leased its groups again, and set aside one that the weights contain.
        """
        if self._is_over_in(epoch) or len(trained) <= len(self.published):
            return
        if self.pushing and len(trained) == len(self.trained):
            self._record_step("train", version, self.published, trained)
        else:
            self._arrive()
            self._account_for("train", version, trained)
        self._arrive()
        self._meter()

    @property
    def pushing(self) -> bool:
        """True while the learner's weights are being pushed to the engines."""
        return len(self.published) < len(self.trained)

    def _arrive(self) -> None:
        """Mark the push in progress, if there is one, as complete."""
        if self.pushing:
            self.published = self.trained
            self._steps += 1

    def _account_for(self, event: str, version: int, trained: TrainedGroups) -> None:
        before = self.trained
        ids, skipped = trained.since(before), _newly_aside(before, trained)
        taken = self._taken
        passed = taken.replaced if taken is not None and taken.group_ids == ids else {}
        aside = skipped | dict.fromkeys(passed, CONSTANT_REWARD)
        self._drop((*ids, *aside))
        for group_id in (*ids, *aside):
            for of_it in (self._attempts, self._over, self._restarts):
                of_it.pop(group_id, None)
        self.set_aside = {i: r for i, r in self.set_aside.items() if i not in trained} | aside
        self.trained, self._taken = trained, None
        self.provenance.drop(aside)
        self.provenance.record_published(version, ids)
        self._version = version
        self._next = max(self._next, trained.watermark)
        self._record_step(event, version, before, trained)
        self._meter()

    def _record_step(
        self, event: str, version: int, before: TrainedGroups, after: TrainedGroups
    ) -> None:
        self.record(
            event,
            version=version,
            ids=after.since(before),
            watermark=after.watermark,
            skipped=_by_text(_newly_aside(before, after)),
        )

    def _is_over_in(self, epoch: int | None) -> bool:
        return epoch is not None and epoch != self.epoch

    # the queue's own

    def recover(self, readable: Collection[int] = ()) -> None:
        """Recover from the queue's death, in which its payloads were lost.

        Delivered groups stay delivered if their deliveries can be read from disk; the others are
        sampled again. Leases stay valid, since their workers are alive and will deliver. Lost
        groups of constant reward are set aside, not sampled again, as far as others have started in
        their place.

        Args:
            readable: ids among `kept` of groups that can be read.
        """
        now = self._clock()
        here = self._started.keys() & self.kept.keys() & set(readable)
        self._forget_kept([i for i in self.kept if i in self._started and i not in here])
        stay = (self._delivered & here) - self._rescored
        self._skip_constant(stay)
        self._leased = {i: replace(h, since=now, began=now) for i, h in self._leased.items()}
        self._seconds.clear()  # durations from a replay, not from real time
        lost = self._delivered - stay
        self._make_pending(lost)
        self.resampled.clear()
        taken = set(self._taken.group_ids if self._taken else ())
        self.provenance.drop(lost - taken)  # taken groups may still be trained
        above = {i: r for i, r in self.set_aside.items() if i >= self.trained.watermark}
        again = {"kept": sorted(here)} if here else {}
        self.record(
            "recover", epoch=self.epoch, ids=sorted(lost), set_aside=_by_text(above), **again
        )
        self._meter()

    def _meter(self) -> None:
        """Update `starved_s`; called after every change."""
        now = self._clock()
        if self._starved:
            self._starved_s += now - self._metered_at
        self._metered_at = now
        waits = len(self._delivered) > len(self._leased)  # first: credit takes longer to compute
        self._starved = waits and not self._pending and not self.credit

    def _view(self, gone: Collection[int] = ()) -> View:
        """The state for the step rule; with groups of the taken step `gone`, for the step after."""
        # A taken step trains a group that was lost and came back constant, too.
        promised = self._taken_intact
        view = View(
            step=self._steps + self.pushing,
            groups_per_step=self._settings.groups_per_step,
            started=self._started,
            finished=self._delivered,
            constant=self._constant.keys() - set(promised.group_ids if promised else ()),
            most_replaced=self._settings.most_replaced,
        )
        if not gone:
            return view
        return replace(
            view,
            step=view.step + 1,
            started={i: at for i, at in view.started.items() if i not in gone},
            finished=view.finished - set(gone),
            constant=view.constant - set(gone),
        )

    @property
    def credit(self) -> int:
        pushed = len(self.trained) - len(self.published)  # these still hold their slots
        return max(0, min(self._rule.room(self._view()) - pushed, self._to_start))

    @property
    def all_started(self) -> bool:
        """True if every group of the run was leased at least once."""
        return self._to_start <= 0

    @property
    def _to_start(self) -> int:
        return self._settings.total_groups - len(self.trained) - self._view().in_progress

    def is_in_progress(self, group_id: int) -> bool:
        """True if the group was started and is not in the learner's weights."""
        return group_id in self._started

    def holds(self, group_id: int) -> bool:
        """True if the group was delivered and is not in the learner's weights."""
        return group_id in self._delivered

    def status(self) -> QueueStatus:
        self._meter()
        now = self._clock()
        failed = {i: why for i, why in self.set_aside.items() if why != CONSTANT_REWARD}
        return QueueStatus(
            depth=len(self._delivered),
            leased={
                i: (held.worker, held.attempt, now - held.since)
                for i, held in sorted(self._leased.items())
            },
            pending=sorted(self._pending),
            missing=self.missing(),
            credit=self.credit,
            set_aside=len(failed),
            newest_set_aside=dict(list(failed.items())[-_NEWEST:]),
            restarted=dict(self._over),
            delivered=self._arrived,
            consecutive_set_aside=self._consecutive_set_aside,
            last_reason=self._last_reason,
            exhausted=self.all_started and not self._pending,
            epoch=self.epoch,
            starved_s=self._starved_s,
            age_s=now - self._made_at,
        )


def _newly_aside(before: TrainedGroups, after: TrainedGroups) -> dict[int, str]:
    return dict(sorted(after.set_aside.items() - before.set_aside.items()))


def _by_text(reasons: Mapping[int, str]) -> dict[str, str]:
    return {str(group_id): reason for group_id, reason in reasons.items()}
