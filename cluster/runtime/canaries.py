"""Canaries of a run: fixed rows that scorers score again and again, to detect drift.

    join         a new scorer: first answers, tolerance, agreement with the others of its role
    after_step   every `canary_every` steps: canaries are sent with a worker's next batch
    poll         answers are compared with the scorer's first ones. A scorer that has drifted is
                 terminated and restarted; its scores since its last good canary are repeated
    check        if weights contain such scores, the learner goes back
    ask_last     at the end of a run or of a scorer: canaries are sent alone, as no batch may follow

Frozen models in the learner are checked there, between steps (`copy_canaries.py`). The reward model
gives no log-probs, and has its own canaries (`reward_canaries.py`).
An answer proves the scores before it because of the order of the queue's journal
(cluster/queue/custody.py): canaries are sent after `ask` is written there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.base.outcomes import ActorLost, LearnerLost
from cluster.config.on_policy import RolloutConfig
from cluster.findings.finding import Finding
from cluster.handles import calls, errors
from cluster.placement.roles import REFERENCE, ROLLOUT
from cluster.queue.group_queue import GroupQueue
from cluster.queue.ledger_answers import CanaryAnswer
from cluster.runtime.copy_canaries import CopyCanaries
from cluster.runtime.driver import Driver
from cluster.runtime.reward_canaries import RewardCanaries
from cluster.supervision.failures import reason_of
from cluster.supervision.supervise import Member, State, Supervisor
from distill.engine import EngineInfo, Score
from distill.errors import EngineError
from distill.handshake.canary import (
    COMPANY,
    CanaryRows,
    CanaryScores,
    CanaryVerdict,
    Tolerance,
    judge,
    outliers,
)

logger = logging.getLogger(__name__)

# Longest wait of canaries for a batch to be sent with, seconds; then they are sent alone.
_PATIENCE_S = 60.0
# Deadline of the queue's answers, which are immediate except during its restart.
_QUEUE_S = 120.0


class ScoredWrongly(LearnerLost):
    """Raised if weights may contain scores of a drifted scorer: the learner goes back."""

    def __init__(self, why: str, first_bad: int) -> None:
        super().__init__(why)
        self.before = self.first_bad = first_bad


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySetup:
    """Settings of a run's canaries.

    Attributes:
        every: steps between two canaries; 0 disables them.
        listed: numbers of (given, likeliest) tokens that training requests per position, by role.
        require: False lets engines serve that disagree with the others of their role.
        copies: the learner holds frozen models of its own.
        base: the base of the learner's adapter is one of them.
    """

    every: int
    temperature: float
    listed: Mapping[str, tuple[int, int]]
    require: bool
    copies: bool = False
    base: bool = False


def canary_setup(config: RolloutConfig, scorers: Sequence[str]) -> CanarySetup:
    """Canary setup of a run; `scorers` are the roles whose weights never change."""
    objective = config.objective()
    asked = objective.asked_of_policy, objective.asked_of_teacher
    return CanarySetup(
        every=config.canary_every,
        temperature=config.temperature,
        listed={role: (0, 0) if role == REFERENCE else asked for role in scorers},
        require=config.handshake,
        copies=config.copies_teachers or config.base_is_reference,
        base=config.base_is_reference,
    )


@dataclass(slots=True, eq=False)
class _Scorer:
    """One life of a scoring engine. `asked`: the pending canary, sent at `since`."""

    number: int
    member: Member
    rows: CanaryRows
    first: CanaryScores
    tolerance: Tolerance
    asked: Any = None
    since: float = 0.0
    alone: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Introduced:
    """A scorer that has answered its first canaries."""

    info: EngineInfo
    answers: list[CanaryScores]
    tolerance: Tolerance

    def restless(self, rows: CanaryRows) -> CanaryVerdict | None:
        """Verdict on a repeated answer that differs from the first one; None if none does."""
        verdicts = [judge(each, self.answers[0], self.tolerance, rows) for each in self.answers]
        return next((verdict for verdict in verdicts if not verdict.good), None)


class Canaries:
    """The canaries of one run's scorers: teachers and the reference, on engines and in the learner.

    Args:
        learner: returns the leader of the current learner.
        found: called with a finding for each scorer that has drifted.
        trusted: called with the step up to which weights contain only proven groups.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        driver: Driver,
        queue: GroupQueue,
        setup: CanarySetup,
        *,
        learner: Callable[[], Any],
        say: Callable[[str], None],
        found: Callable[[Finding], None],
        trusted: Callable[[int], None],
    ) -> None:
        self._supervisor, self._driver, self._queue = supervisor, driver, queue
        self._setup, self._say, self._found, self._trusted = setup, say, found, trusted
        self._scorers: dict[Any, _Scorer] = {}  # by handle
        self._rows: dict[str, CanaryRows] = {}
        self._anchors: dict[str, CanaryScores] = {}  # by role
        self._next_number = 0
        self._turn = 0
        self._step = 0
        self._told: list[Any] = []  # pending writes of good answers to the journal
        self._bad: tuple[int, str] | None = None
        self._copies = CopyCanaries(
            driver,
            queue,
            learner=learner,
            temperature=setup.temperature if setup.every and setup.copies else None,
            base=setup.base,
            number=self._number,
            found=found,
            bad=self._note_bad,
            trusted=trusted,
        )

        self._rewards = RewardCanaries(
            supervisor=supervisor,
            driver=driver,
            queue=queue,
            on=bool(setup.every),
            number=self._number,
            found=found,
            bad=self._note_bad,
            trusted=trusted,
        )

    def _number(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def _note_bad(self, first_bad: int, why: str) -> None:
        if self._bad is None or first_bad < self._bad[0]:
            self._bad = first_bad, why

    @property
    def lives(self) -> dict[str, int]:
        """Numbers of the scorers that serve, by name."""
        return {
            scorer.member.name: scorer.number
            for scorer in self._scorers.values()
            if scorer.member.state in (State.READY, State.SERVING)
        }

    # first answers

    def join(self, members: Sequence[Member]) -> dict[str, str]:
        """Get first answers of new scorers before they serve; returns reasons of refusals by name.

        Raises:
            EngineError, RunFailed: a scorer did not answer.
        """
        scorers = [m for m in members if m.spec.name in self._setup.listed]
        if not self._setup.every or not scorers:
            return {}
        answered = self._driver.run("the first canaries", self._first_answers(scorers))
        refused = self._strangers(scorers, answered)
        if refused and not self._setup.require:
            for name, why in refused.items():
                self._say(f"WARNING: {name} serves although {why}")
            refused = {}
        for member, introduced in zip(scorers, answered, strict=True):
            if member.name not in refused:
                self._welcome(member, introduced)
        return refused

    async def _first_answers(self, members: Sequence[Member]) -> list[_Introduced]:
        return await asyncio.gather(*(self._introduce(member) for member in members))

    async def _introduce(self, member: Member) -> _Introduced:
        role, T = member.spec.name, self._setup.temperature
        info = await member.handle.info.remote()
        given, top_k = self._setup.listed[role]
        rows = self._rows.setdefault(role, CanaryRows.of(info, T, given=given, top_k=top_k))
        answers = []
        for number in COMPANY:
            scores: list[Score] = await member.handle.score.remote(rows.with_company(number))
            answers.append(rows.answer(scores))
        return _Introduced(info, answers, Tolerance.of(answers, info.dtype, T))

    def _strangers(
        self, members: Sequence[Member], answered: Sequence[_Introduced]
    ) -> dict[str, str]:
        """Find scorers that disagree with themselves or with others of their role; with reasons."""
        refused: dict[str, str] = {}
        by_role: dict[str, dict[str, CanaryScores]] = {}
        between = {
            each.info.dtype: Tolerance.between(each.info.dtype, self._setup.temperature)
            for each in answered
        }
        for member, introduced in zip(members, answered, strict=True):
            role = member.spec.name
            if restless := introduced.restless(self._rows[role]):
                refused[member.name] = f"it answers the same rows otherwise: {restless.told()}"
                continue
            by_role.setdefault(role, {})[member.name] = introduced.answers[0]
        for role, firsts in by_role.items():
            loosest = max(between.values(), key=lambda tolerance: tolerance.max_gap)
            if (anchor := self._anchors.get(role)) is not None:
                verdicts = {
                    name: judge(first, anchor, loosest, self._rows[role])
                    for name, first in firsts.items()
                }
            else:
                verdicts = outliers(firsts, loosest, self._rows[role])
                agreed = [first for name, first in firsts.items() if name not in verdicts]
                self._anchors |= {role: agreed[0]} if agreed else {}
            refused |= {
                name: f"it is not the {role} that the others are: {verdict.told()}"
                for name, verdict in verdicts.items()
                if not verdict.good
            }
        return refused

    def _welcome(self, member: Member, introduced: _Introduced) -> None:
        number = self._number()
        info, tolerance = introduced.info, introduced.tolerance
        said = {
            "who": member.name,
            "kind": info.kind,
            "model": info.model,
            "dtype": info.dtype,
            "scaling": info.temperature_scaling,
            "answers": len(introduced.answers),
            "measured": tolerance.measured,
            "allowed": tolerance.max_gap,
        }
        self._driver.call("writing down a scorer", self._queue.scorer(number, said))
        self._scorers[member.handle] = _Scorer(
            number, member, self._rows[member.spec.name], introduced.answers[0], tolerance
        )

    def join_learner(self) -> None:
        """Get first answers of the frozen models of a learner that has started."""
        self._copies.introduce()

    def join_reward_model(self) -> None:
        """Get first answers of the initial reward model, if the run has one."""
        self._rewards.introduce()

    # the later ones

    def after_step(self, step: int) -> None:
        """Send canaries if they are due after `step`; call it between steps.

        Raises:
            ScoredWrongly: as `check`, for a model in the learner, which answers here.
        """
        self._step = step
        if self._setup.every and step % self._setup.every == 0:
            self._ask([s for s in self._serving() if s.asked is None], alone=False)
            self._rewards.ask(step)
            self._copies.ask(step)
            self.check()

    def _serving(self) -> list[_Scorer]:
        self._forget_the_dead()
        return [s for s in self._scorers.values() if s.member.state is State.SERVING]

    def _forget_the_dead(self) -> None:
        self._scorers = {
            handle: scorer
            for handle, scorer in self._scorers.items()
            if scorer.member in self._supervisor.members(scorer.member.spec.name)
        }

    def _ask(self, scorers: Sequence[_Scorer], *, alone: bool) -> None:
        if not scorers:
            return
        numbers = [scorer.number for scorer in scorers]
        self._driver.call("writing down canaries", self._queue.ask(numbers))
        for scorer in scorers:
            self._send(scorer, alone=alone)

    def _send(self, scorer: _Scorer, *, alone: bool) -> None:
        workers = self._supervisor.members(ROLLOUT, State.SERVING)
        requests, member = list(scorer.rows.requests), scorer.member
        scorer.since, scorer.alone = time.monotonic(), alone or not workers
        if scorer.alone:
            scorer.asked = member.handle.score.remote(requests)
            return
        self._turn += 1
        worker = workers[self._turn % len(workers)].handle
        scorer.asked = worker.canary.remote(member.spec.name, member.name, requests, _PATIENCE_S)

    def poll(self) -> None:
        """Collect answers without blocking, and terminate scorers that have drifted.

        Raises:
            RunFailed: a scorer has drifted or died too often.
        """
        self._collect_proofs()
        self._rewards.poll()
        asked = {s.asked: s for s in self._scorers.values() if s.asked is not None}
        if not asked:
            return
        self._forget_the_dead()
        for reference in calls.ended(asked):
            self._answered(asked[reference])

    def _answered(self, scorer: _Scorer) -> None:
        reference, scorer.asked = scorer.asked, None
        try:
            answer = calls.get(reference)
        except (errors.RayError, EngineError) as error:
            if scorer.member.state is State.SERVING and not scorer.alone:
                self._send(scorer, alone=True)  # the worker died, or its batch was refused
            else:
                logger.warning("%s: no canary (%s)", scorer.member.name, reason_of(error))
            return
        scores, rode = (answer, False) if scorer.alone else answer
        self._judge(scorer, scores, rode)

    def _judge(self, scorer: _Scorer, scores: Sequence[Score], rode: bool) -> None:
        verdict = judge(scorer.rows.answer(scores), scorer.first, scorer.tolerance, scorer.rows)
        said = {
            "step": self._step,
            "gap": verdict.max_gap,
            "mean": verdict.mean_gap,
            "rode": rode,
            "seconds": time.monotonic() - scorer.since,
        }
        if verdict.good:
            self._told.append(self._queue.canary(scorer.number, True, said))
            return
        told = self._queue.canary(scorer.number, False, said | {"why": verdict.told()})
        self._quarantine(scorer, verdict, self._queue_says(told))

    def _queue_says(self, reference: Any) -> CanaryAnswer:
        """Answer of the queue, without `Driver.call`, which would poll within this poll."""
        return calls.get(reference, timeout=_QUEUE_S)

    def _collect_proofs(self) -> None:
        if not self._told:
            return
        done, self._told = calls.wait(self._told, num_returns=len(self._told), timeout=0)
        if done:
            self._trusted(max(self._queue_says(reference).proven for reference in done))

    def _quarantine(self, scorer: _Scorer, verdict: CanaryVerdict, answer: CanaryAnswer) -> None:
        member = scorer.member
        if (first_bad := answer.first_bad) is not None:
            contained = (
                f"the weights of step {first_bad} and later contain what it scored since its last "
                "good canary"
            )
            self._note_bad(first_bad, f"{member.name} has moved, and {contained}")
        else:
            contained = "no weights contain what it scored since its last good canary"
        again = f"; {len(answer.again)} groups are scored again" if answer.again else ""
        self._found(
            Finding(
                name="scorer_moved",
                step=self._step,
                text=f"{member.name} has moved from its first answers, {verdict.told()}; "
                f"{contained}{again}",
                remedy="it is restarted. Look at its log and its machine; of a server that runs "
                "elsewhere, see that all replicas behind its address serve one model",
                settings=("canary_every",),
            )
        )
        del self._scorers[member.handle]
        if member in self._supervisor.members(member.spec.name):
            self._supervisor.bury(member, f"it has moved, {verdict.told()}")

    def check(self) -> None:
        """Raise an error if weights contain scores of a drifted scorer; call it between steps.

        Raises:
            ScoredWrongly: the learner goes back to the checkpoint before them.
        """
        if self._bad is None:
            return
        first_bad, why = self._bad
        self._bad = None
        raise ScoredWrongly(why, first_bad)

    def before_checkpoint(self, step: int) -> None:
        """Check the learner's frozen models, so that its checkpoint is proven if it dies.

        Raises:
            ScoredWrongly: as `check`.
        """
        self._copies.ask(step)
        self.check()

    def after_last(self, step: int) -> None:
        """Send canaries to all scorers after the last step, and wait for the answers.

        Raises:
            ScoredWrongly: as `check`.
        """
        self._step = step
        self._copies.ask(step)
        self._rewards.ask(step, wait=True)
        self.ask_last()
        self.check()

    def ask_last(self, members: Sequence[Member] | None = None) -> None:
        """Send canaries alone to the members, or to all that serve; wait for answers; `check`.

        Raises:
            ScoredWrongly: as `check`.
        """
        asked = self._serving() if members is None else [
            self._scorers[m.handle] for m in members if m.handle in self._scorers
        ]  # fmt: skip
        if not self._setup.every or not asked:
            return
        self._ask(asked, alone=True)
        pending = [(scorer, scorer.asked) for scorer in asked]
        for scorer in asked:
            scorer.asked = None  # so that no poll collects them
        for scorer, reference in pending:
            try:
                scores = self._driver.call(f"the last canary of {scorer.member.name}", reference)
            except LearnerLost:
                raise
            except (ActorLost, EngineError) as error:
                logger.warning("%s: no last canary (%s)", scorer.member.name, error)
                continue
            self._judge(scorer, scores, False)
        for reference in self._told:
            try:
                self._trusted(self._queue_says(reference).proven)
            except errors.GetTimeoutError as error:
                logger.warning("the queue did not take note of a canary: %s", error)
        self._told.clear()
        self.check()
