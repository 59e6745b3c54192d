"""Canaries of the reward model: whether the one that rewards is the one that rewarded at first.

    poll         one that has (re)started says what it is before it has a number
    ask          every so many steps, and after the last: checksums, and scores of fixed rows

One that has moved is ended and restarted. What it may have rewarded since its last good canary is
sampled again, for rewards come of whole episodes; where weights contain it, the learner goes back
(`Canaries.check`). Which groups those are: cluster/queue/custody.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.embedded.reward_model import RewardAnswer
from cluster.findings.finding import Finding
from cluster.handles import calls, errors
from cluster.placement.roles import REWARD
from cluster.queue.group_queue import GroupQueue
from cluster.queue.ledger_answers import CanaryAnswer
from cluster.runtime.driver import Driver
from cluster.supervision.failures import reason_of
from cluster.supervision.supervise import ActorLost, Member, State, Supervisor
from distill.errors import CalibrationError, EngineError
from distill.handshake.canary import COMPANY
from distill.handshake.comparison import TOLERANCE

logger = logging.getLogger(__name__)

# The queue answers at once, or is being restarted.
_QUEUE_S = 120.0
# A later score may be so many times as far away as the first ones were from each other, and this
# share of what two kernels may differ by, of the largest score.
_ALLOWED_TIMES, _ALLOWED_SHARE = 4.0, 1 / 8


@dataclass(slots=True, eq=False)
class _Life:
    """A reward model from its start on; `number` is None until it has said what it is."""

    member: Member
    asked: Any
    number: int | None = None
    first: RewardAnswer | None = None
    allowed: float = 0.0
    measured: float = 0.0

    def moved(self, answer: RewardAnswer) -> tuple[dict[str, float], str]:
        """Its gaps, and how it has moved; "" if it has not."""
        assert self.first is not None
        gap_N = np.abs(np.subtract(answer.scores[0], self.first.scores[0]))
        gaps = {"gap": float(gap_N.max()), "mean": float(gap_N.mean())}
        told = ["its weights changed"] if answer.digest != self.first.digest else []
        if gaps["gap"] > self.allowed:
            told.append(f"scores differ by up to {gaps['gap']:.3g} (allowed {self.allowed:.3g})")
        return gaps, "; ".join(told)


@dataclass(slots=True, kw_only=True, eq=False)
class RewardCanaries:
    """Those of one run, whose reward model is one actor.

    Attributes:
        number: a number for a scorer, as no other has.
        found, bad, trusted: as `CopyCanaries` has them.
        on: False: nobody is asked.
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
        """Has the reward model that the run begins with say what it is, and waits."""
        self._look()
        if self._life is not None and self._life.number is None:
            life = self._life
            asked, life.asked = life.asked, None
            answer = self.driver.call("the first canary of the reward model", asked)
            if why := self._known(life, answer):
                raise CalibrationError(f"the reward model {why}")

    def ask(self, step: int, *, wait: bool = False) -> None:
        """Asks it, between steps; `wait`: also until it has answered."""
        self._step = step
        if wait:
            self._wait()  # for what is under way
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
        asked, life.asked = life.asked, None  # no poll takes it
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
        """Takes an answer that is there. Never waits for one; one that has moved is ended."""
        self._look()
        life = self._life
        if life is None or life.asked is None or not calls.wait([life.asked], timeout=0)[0]:
            return
        asked, life.asked = life.asked, None
        try:
            answer: RewardAnswer = calls.get(asked)
        except (errors.RayError, EngineError) as error:
            logger.warning("%s: no canary (%s)", life.member.name, reason_of(error))
            if life.number is None:  # else the next comes in its time
                self._life = None
            return
        self._answered(life, answer)

    def _present(self) -> _Life | None:
        life = self._life
        there = life is not None and life.member in self.supervisor.members(REWARD, State.SERVING)
        return life if there else None

    def _look(self) -> None:
        """Asks one that has started what it is."""
        if not self.on or self._present() is not None:
            return
        self._life = None
        for member in self.supervisor.members(REWARD, State.SERVING):
            self._life = _Life(member, member.handle.canary.remote(COMPANY))

    def _known(self, life: _Life, answer: RewardAnswer) -> str:
        """Gives it a number; why not, if it is not what rewarded before."""
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
                settings=("on_bad_teacher", "canary_every"),
            )
        )
        self._end(life, f"has moved, {why}")

    def _end(self, life: _Life, why: str) -> None:
        self._life = None
        if life.member in self.supervisor.members(REWARD):
            self.supervisor.bury(life.member, f"it {why}")
