"""Canaries of the frozen models in the learner: copies of teachers, and the base of an adapter.

    introduce   first answers of a new learner. All its workers, and all learners of the run, must
                hold identical weights
    ask         between steps: checksums equal the first ones, answers are within their tolerance

A model that has drifted ends with its learner, which restarts from the checkpoint before the first
weights that the model may have affected (`Canaries.check`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.findings.finding import Finding
from cluster.placement.roles import learner_title, teacher_role
from cluster.queue.group_queue import GroupQueue
from cluster.queue.ledger_answers import CanaryAnswer
from cluster.runtime.driver import Driver
from distill.errors import CalibrationError
from distill.handshake.canary import COMPANY, CanaryRows, CanaryScores, Tolerance, judge
from distill.lookup import listed
from learner.canaries import CopyAnswer, CopyQuestion

# Tensors that a finding names.
_NAMED = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """One life of a frozen model on one worker of the learner."""

    number: int
    who: str
    rows: CanaryRows
    first: CanaryScores
    tolerance: Tolerance

    def moved(self, answer: CopyAnswer) -> tuple[dict[str, float], str]:
        """Gaps of an answer, and a description of the drift; "" if there is none."""
        verdict = judge(answer.answers[0], self.first, self.tolerance, self.rows)
        gaps = {"gap": verdict.max_gap, "mean": verdict.mean_gap}
        if not (answer.changed or not verdict.good):
            return gaps, ""
        told = [] if verdict.good else [verdict.told()]
        if answer.changed:
            others = len(answer.changed) - _NAMED
            more = f" and {others} other tensors" if others > 0 else ""
            told.insert(0, f"{listed(list(answer.changed[:_NAMED]))}{more} changed")
        return gaps, "; ".join(told)


class CopyCanaries:
    """Canaries of the frozen models in one run's learner.

    Args:
        learner: returns the leader of the current learner.
        temperature: None if the learner holds no frozen model, which disables these canaries.
        base: the model without its adapter is the reference.
        number: returns a unique number for a scorer.
        found: called with a finding for each model that has drifted.
        bad: called with the step of the first weights that it may have affected, and the reason.
        trusted: called with the step up to which weights contain only proven groups.
    """

    def __init__(
        self,
        driver: Driver,
        queue: GroupQueue,
        *,
        learner: Callable[[], Any],
        temperature: float | None,
        base: bool,
        number: Callable[[], int],
        found: Callable[[Finding], None],
        bad: Callable[[int, str], None],
        trusted: Callable[[int], None],
    ) -> None:
        self._driver, self._queue, self._learner = driver, queue, learner
        self._temperature, self._base = temperature, base
        self._number, self._found, self._bad, self._trusted = number, found, bad, trusted
        self._copies: list[_Copy] = []
        self._asked_at: int | None = None  # the step of the last canaries
        self._digests: dict[tuple[int, str | None] | str, str] = {}

    def introduce(self) -> None:
        """Get first answers of a learner that has started; call it before its next step.

        Raises:
            CalibrationError: a frozen model differs between workers, or from the one of the
                learner that was replaced.
            LearnerLost: the learner died meanwhile.
        """
        self._copies, self._asked_at = [], None
        for rank, answers in enumerate(self._answers(COMPANY)):
            for answer in answers:
                self._recognise(rank, answer)
                self._welcome(rank, answer)

    def _answers(self, company: Sequence[int]) -> list[list[CopyAnswer]]:
        """Canary answers of every worker, by rank."""
        if self._temperature is None:
            return []
        question = CopyQuestion(
            temperature=self._temperature, company=tuple(company), base=self._base
        )
        asked = self._learner().canary.remote(question)
        return self._driver.ask_learner("the canaries of the learner's frozen models", asked)

    def _recognise(self, rank: int, answer: CopyAnswer) -> None:
        # Each worker has its own shard of a sharded base.
        key = answer.teacher if answer.teacher is not None else (rank, None)
        known = self._digests.setdefault(key, answer.digest)
        if known != answer.digest:
            raise CalibrationError(
                f"{_who(rank, answer)} has other weights than it had at first, or than another "
                f"worker's: {answer.info.model} was changed while the run was under way. Put back "
                "what it held, or begin another out="
            )

    def _welcome(self, rank: int, answer: CopyAnswer) -> None:
        copy = _Copy(
            self._number(),
            _who(rank, answer),
            answer.rows,
            answer.answers[0],
            Tolerance.of(answer.answers, answer.info.dtype, answer.rows.temperature),
        )
        for again in answer.answers:
            if not (verdict := judge(again, copy.first, copy.tolerance, copy.rows)).good:
                raise CalibrationError(
                    f"{copy.who} answers the same rows otherwise: {verdict.told()}"
                )
        said = {
            "in_learner": True,
            "who": copy.who,
            "kind": answer.info.kind,
            "model": answer.info.model,
            "dtype": answer.info.dtype,
            "scaling": answer.info.temperature_scaling,
            "digest": answer.digest,
            "answers": len(answer.answers),
            "measured": copy.tolerance.measured,
            "allowed": copy.tolerance.max_gap,
        }
        self._driver.call("writing down a scorer", self._queue.scorer(copy.number, said))
        self._copies.append(copy)

    def ask(self, step: int) -> None:
        """Check all frozen models between steps, and wait; at most once per step.

        Raises:
            LearnerLost: the learner died meanwhile.
        """
        if not self._copies or step == self._asked_at:
            return
        self._asked_at = step
        numbers = [copy.number for copy in self._copies]
        self._driver.call("writing down canaries", self._queue.ask(numbers))
        since = time.monotonic()
        answers = [answer for of_rank in self._answers([0]) for answer in of_rank]
        seconds = time.monotonic() - since
        bad = False
        for copy, answer in zip(self._copies, answers, strict=True):
            gaps, why = copy.moved(answer)
            said = {"step": step, **gaps, "rode": False, "seconds": seconds}
            told = self._queue.canary(copy.number, not why, said | ({"why": why} if why else {}))
            noted: CanaryAnswer = self._driver.call("writing down a canary", told)
            if why:
                bad = True
                self._quarantine(copy, why, noted.first_bad, step)
            else:
                self._trusted(noted.proven)
        if bad:
            self._copies = []  # the learner is restarted, with all its frozen models

    def _quarantine(self, copy: _Copy, why: str, first_bad: int | None, step: int) -> None:
        if first_bad is None:
            contained = "no weights contain what it scored since its last good canary"
        else:
            contained = (
                f"the weights of step {first_bad} and later contain what it scored since its last "
                "good canary"
            )
        self._bad(
            step + 1 if first_bad is None else first_bad, f"{copy.who} has moved; {contained}"
        )
        self._found(
            Finding(
                name="scorer_moved",
                step=step,
                text=f"{copy.who} has moved from what it was at first, {why}; {contained}",
                remedy="the learner is restarted, and loads it again. Look at the machine's "
                "memory, and at code of yours that runs in the learner (loss=, advantage=)",
                settings=("canary_every",),
            )
        )


def _who(rank: int, answer: CopyAnswer) -> str:
    what = "base" if answer.teacher is None else f"copy of {teacher_role(answer.teacher)}"
    return f"{learner_title(rank)}'s {what}"
