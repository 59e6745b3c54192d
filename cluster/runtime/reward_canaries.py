"""Canaries of the reward model: checks that it is unchanged since its first answer.

    poll         a model that has (re)started answers a first canary before it has a number
    ask          every `canary_every` steps, and after the last: checksums, and scores of fixed rows

A reward model that has drifted is terminated and restarted. Groups that it may have rewarded since
its last good canary are sampled again, since rewards depend on whole episodes. If weights contain
them, the learner goes back (`Canaries.check`). These groups are found by cluster/queue/custody.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.embedded.reward_model import RewardAnswer
from cluster.base.outcomes import ActorLost
from cluster.findings.finding import Finding
from cluster.handles import calls, errors
from cluster.placement.roles import REWARD
from cluster.queue.group_queue import GroupQueue
from cluster.queue.ledger_answers import CanaryAnswer
from cluster.runtime.driver import Driver
from cluster.supervision.failures import reason_of
from cluster.supervision.supervise import Member, State, Supervisor
from distill.errors import CalibrationError, EngineError
from distill.handshake.canary import COMPANY
from distill.handshake.comparison import TOLERANCE

logger = logging.getLogger(__name__)

# Deadline of the queue's answers, which are immediate except during its restart.
_QUEUE_S = 120.0
# Allowed gap of a later score: this multiple of the gap between the first ones, or, if larger, this
# share of the tolerance between two kernels, relative to the largest score.
_ALLOWED_TIMES, _ALLOWED_SHARE = 4.0, 1 / 8


@dataclass(slots=True, eq=False)
class _Life:
    """One life of the reward model; `number` is None until its first answer."""

    member: Member
    asked: Any
    number: int | None = None
    first: RewardAnswer | None = None
    allowed: float = 0.0
    measured: float = 0.0

    def moved(self, answer: RewardAnswer) -> tuple[dict[str, float], str]:
        """Gaps of an answer, and a description of the drift; "" if there is none."""
        assert self.first is not None
        gap_N = np.abs(np.subtract(answer.scores[0], self.first.scores[0]))
        gaps = {"gap": float(gap_N.max()), "mean": float(gap_N.mean())}
        told = ["its weights changed"] if answer.digest != self.first.digest else []
        if gaps["gap"] > self.allowed:
            told.append(f"scores differ by up to {gaps['gap']:.3g} (allowed {self.allowed:.3g})")
        return gaps, "; ".join(told)


@dataclass(slots=True, kw_only=True, eq=False)
class RewardCanaries:
    """Canaries of one run's reward model, which is one actor.

    Attributes:
        number: returns a unique number for a scorer.
        found, bad, trusted: see `CopyCanaries`.
        on: False disables these canaries.
    """

    supervisor: Supervisor
    driver: Driver
    queue: GroupQueue
    on: bool
    number: Callable[[], int]
    found: Callable[[Finding], None]
    bad: Callable[[int, str], None]
    trusted: Callable[[int], None]
    _life: _Life | None = None
    _digest: str = ""
    _step: int = field(default=0)

    def introduce(self) -> None:
        """Get the first answer of the initial reward model, and wait for it."""
        self._look()
        if self._life is not None and self._life.number is None:
            life = self._life
            asked, life.asked = life.asked, None
            answer = self.driver.call("the first canary of the reward model", asked)
            if why := self._known(life, answer):
                raise CalibrationError(f"the reward model {why}")

    def ask(self, step: int, *, wait: bool = False) -> None:
        """Send a canary between steps; `wait`: wait for its answer."""
        self._step = step
        if wait:
            self._wait()  # for a pending canary
        life = self._present()
        if life is None or life.number is None or life.asked is not None:
            return
        self.driver.call("writing down a canary", self.queue.ask([life.number]))
        life.asked = life.member.handle.canary.remote()
        if wait:
            self._wait()

    def _wait(self) -> None:
        life = self._present()
        if life is None or life.asked is None:
            return
        asked, life.asked = life.asked, None  # so that no poll collects it
        try:
            answer = self.driver.call("a canary of the reward model", asked)
        except (ActorLost, EngineError) as error:
            logger.warning("the reward model: no canary (%s)", error)
            return
        self._answered(life, answer)

    def _answered(self, life: _Life, answer: RewardAnswer) -> None:
        if life.number is not None:
            self._judge(life, answer)
        elif why := self._known(life, answer):
            self._end(life, why)

    def poll(self) -> None:
        """Collect an answer without blocking; terminate a reward model that has drifted."""
        self._look()
        life = self._life
        if life is None or life.asked is None or not calls.ended([life.asked]):
            return
        asked, life.asked = life.asked, None
        try:
            answer: RewardAnswer = calls.get(asked)
        except (errors.RayError, EngineError) as error:
            logger.warning("%s: no canary (%s)", life.member.name, reason_of(error))
            if life.number is None:  # else the next canary follows as scheduled
                self._life = None
            return
        self._answered(life, answer)

    def _present(self) -> _Life | None:
        life = self._life
        there = life is not None and life.member in self.supervisor.members(REWARD, State.SERVING)
        return life if there else None

    def _look(self) -> None:
        """Send the first canary to a reward model that has started."""
        if not self.on or self._present() is not None:
            return
        self._life = None
        for member in self.supervisor.members(REWARD, State.SERVING):
            self._life = _Life(member, member.handle.canary.remote(COMPANY))

    def _known(self, life: _Life, answer: RewardAnswer) -> str:
        """Give the model a number; returns the reason if its weights are not the first ones."""
        self._digest = self._digest or answer.digest
        if answer.digest != self._digest:
            return f"has other weights than it had at first: {answer.model} was changed"
        first = np.array(answer.scores)
        life.first, life.measured = answer, float(np.abs(first - first[0]).max())
        kernels = TOLERANCE[answer.dtype] * max(1.0, float(np.abs(first).max()))
        life.allowed = min(kernels, max(_ALLOWED_TIMES * life.measured, _ALLOWED_SHARE * kernels))
        life.number = self.number()
        said = {
            "rewards": True,
            "who": life.member.name,
            "kind": "reward model",
            "model": answer.model,
            "dtype": answer.dtype,
            "scaling": "none: it gives a score",
            "digest": answer.digest,
            "answers": len(first),
            "measured": life.measured,
            "allowed": life.allowed,
        }
        calls.get(self.queue.scorer(life.number, said), timeout=_QUEUE_S)
        return ""

    def _judge(self, life: _Life, answer: RewardAnswer) -> None:
        assert life.number is not None
        gaps, why = life.moved(answer)
        said = {"step": self._step, **gaps, "rode": False} | ({"why": why} if why else {})
        noted: CanaryAnswer = calls.get(
            self.queue.canary(life.number, not why, said), timeout=_QUEUE_S
        )
        if not why:
            self.trusted(noted.proven)
            return
        name, first_bad = life.member.name, noted.first_bad
        if first_bad is None:
            contained = "no weights contain what it rewarded since its last good canary"
        else:
            contained = (
                f"the weights of step {first_bad} and later contain what it rewarded since its "
                "last good canary"
            )
            self.bad(first_bad, f"{name} has moved, and {contained}")
        again = f"; {len(noted.again)} groups are sampled again" if noted.again else ""
        self.found(
            Finding(
                name="scorer_moved",
                step=self._step,
                text=f"{name} has moved from its first answers, {why}; {contained}{again}",
                remedy="it is restarted. Look at its log and its machine",
                settings=("canary_every",),
            )
        )
        self._end(life, f"has moved, {why}")

    def _end(self, life: _Life, why: str) -> None:
        self._life = None
        if life.member in self.supervisor.members(REWARD):
            self.supervisor.bury(life.member, f"it {why}")
