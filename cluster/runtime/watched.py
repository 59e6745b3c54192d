"""Frozen models that canaries check: scoring engines, models in the learner, the reward model."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from actors.embedded.reward_model import RewardAnswer
from cluster.handles.mailbox import with_states
from cluster.placement.roles import learner_title, teacher_role
from cluster.supervision.supervise import Member
from distill.engine import Score
from distill.handshake.canary import (
    FILLER_ROWS,
    CanaryAnswers,
    CanaryRows,
    CanaryScores,
    Drift,
    Gaps,
    allowed,
    judge,
    outliers,
)
from distill.handshake.comparison import TOLERANCE
from distill.lookup import listed
from learner.canaries import CopyAnswer, CopyQuestion

# Number of changed tensors that a finding names.
_NAMED = 3


@dataclass(frozen=True, slots=True, eq=False)
class ScoringEngine:
    """An engine of a teacher or of the reference.

    `remedy` is the advice of the finding if it drifts.
    """

    remedy: ClassVar[str] = (
        "it is restarted. Check its log and its machine; for an external server, check that all "
        "replicas behind its address serve the same model"
    )
    member: Member
    first: CanaryAnswers

    @property
    def who(self) -> str:
        return self.member.name

    def described(self) -> dict[str, Any]:
        return self.first.described()

    def ask(self) -> Any:
        return self.member.handle.score.remote(list(self.first.rows.requests))

    def ask_with_next_batch(self, worker: Any, patience_s: float) -> Any:
        """As `ask`, with the next batch of a rollout worker; a reference to (answer, batched)."""
        requests = list(self.first.rows.requests)
        return worker.canary.remote(self.member.spec.name, self.who, requests, patience_s)

    def drift(self, answer: Sequence[Score]) -> Drift:
        return self.first.judge(self.first.rows.answer(answer))


class Engines:
    """First answers of the scoring engines, and their agreement within each role.

    Args:
        listed: numbers of (given, likeliest) tokens that training requests per position, by role.
        headed: roles whose hidden states training requests.
    """

    def __init__(
        self,
        temperature: float,
        listed: Mapping[str, tuple[int, int]],
        headed: Collection[str],
    ) -> None:
        self._temperature, self._listed, self._headed = temperature, listed, headed
        self._rows: dict[str, CanaryRows] = {}
        self._anchors: dict[str, CanaryScores] = {}  # by role: the answer that others must repeat

    async def introduce(self, members: Sequence[Member]) -> list[ScoringEngine]:
        return await asyncio.gather(*(self._introduce(member) for member in members))

    async def _introduce(self, member: Member) -> ScoringEngine:
        role, T = member.spec.name, self._temperature
        info = await member.handle.info.remote()
        given, top_k = self._listed[role]
        made = CanaryRows.of(info, T, given=given, top_k=top_k, states=role in self._headed)
        rows = self._rows.setdefault(role, made)
        answers = []
        for number in FILLER_ROWS:
            scores: list[Score] = await member.handle.score.remote(rows.with_filler(number))
            answers.append(rows.answer(await with_states(scores)))
        return ScoringEngine(member, CanaryAnswers(info, rows, answers))

    def inconsistent(self, engines: Sequence[ScoringEngine]) -> dict[str, str]:
        """Engines that differ from themselves or from others of their role, with reasons."""
        refused: dict[str, str] = {}
        firsts: dict[str, dict[str, CanaryScores]] = {}  # by role and name
        for engine in engines:
            if why := engine.first.nondeterministic:
                refused[engine.who] = f"it {why}"
            else:
                by_name = firsts.setdefault(engine.member.spec.name, {})
                by_name[engine.who] = engine.first.answers[0]
        dtypes = {engine.first.info.dtype for engine in engines}
        loosest = max(Gaps.between_kernels(dtype, self._temperature) for dtype in dtypes)
        for role, answers in firsts.items():
            rows = self._rows[role]
            if (anchor := self._anchors.get(role)) is None:
                others = outliers(answers, loosest, rows)
                agreed = [first for name, first in answers.items() if name not in others]
                self._anchors |= {role: agreed[0]} if agreed else {}
            else:
                others = {n: judge(each, anchor, loosest, rows).why for n, each in answers.items()}
            refused |= {
                name: f"it differs from the other {role} engines: {why}"
                for name, why in others.items()
                if why
            }
        return refused


@dataclass(frozen=True, slots=True, eq=False)
class LearnerModel:
    """A frozen model on one worker of the learner: a copy of a teacher, or an adapter's base.

    `place` is its index among the worker's models.
    """

    remedy: ClassVar[str] = (
        "the learner is restarted and loads it again. Check the machine's memory, and custom "
        "code in the learner (loss=, baseline=)"
    )
    handle: Any
    question: CopyQuestion
    rank: int
    place: int
    answer: CopyAnswer
    member: None = None

    @property
    def who(self) -> str:
        teacher = self.answer.teacher
        what = "base" if teacher is None else f"copy of {teacher_role(teacher)}"
        return f"{learner_title(self.rank)}'s {what}"

    @property
    def weights(self) -> tuple[object, str]:
        """Key of the required weights, and their digest. Each worker has its own shard."""
        return ("learner", self.answer.teacher, self.rank), self.answer.digest

    @property
    def first(self) -> CanaryAnswers:
        return self.answer.scored

    def described(self) -> dict[str, Any]:
        return {"in_learner": True, **self.first.described(), "digest": self.answer.digest}

    def ask(self) -> Any:
        return self.handle.canary.remote(self.question)

    def drift(self, answer: Sequence[Sequence[CopyAnswer]]) -> Drift:
        own = answer[self.rank][self.place]
        drift = self.first.judge(own.scored.answers[0])
        reasons = []
        if own.changed:
            others = len(own.changed) - _NAMED
            more = f" and {others} other tensors" if others > 0 else ""
            reasons.append(f"{listed(list(own.changed[:_NAMED]))}{more} changed")
        return drift._replace(why="; ".join([*reasons, drift.why] if drift.why else reasons))


@dataclass(frozen=True, slots=True, eq=False)
class RewardModel:
    """A reward model, which returns scores and no log-probs."""

    remedy: ClassVar[str] = "it is restarted. Check its log and its machine"
    member: Member
    answer: RewardAnswer

    @property
    def who(self) -> str:
        return self.member.name

    @property
    def weights(self) -> tuple[object, str]:
        return "reward model", self.answer.digest

    @property
    def _measured(self) -> float:
        scores = np.array(self.answer.scores)
        return float(np.abs(scores - scores[0]).max())

    @property
    def _allowed(self) -> float:
        largest = max(1.0, float(np.abs(self.answer.scores).max()))
        return allowed(self._measured, TOLERANCE[self.answer.dtype] * largest)

    def described(self) -> dict[str, Any]:
        return {
            "rewards": True,
            "kind": "reward model",
            "model": self.answer.model,
            "dtype": self.answer.dtype,
            "scaling": "none: it gives a score",
            "answers": len(self.answer.scores),
            "measured": self._measured,
            "allowed": self._allowed,
            "digest": self.answer.digest,
        }

    def ask(self) -> Any:
        return self.member.handle.canary.remote()

    def drift(self, answer: RewardAnswer) -> Drift:
        gap_N = np.abs(np.subtract(answer.scores[0], self.answer.scores[0]))
        gap = float(gap_N.max())
        reasons = ["its weights changed"] if answer.digest != self.answer.digest else []
        if gap > self._allowed:
            reasons.append(f"scores differ by up to {gap:.3g} (allowed {self._allowed:.3g})")
        return Drift(gap, float(gap_N.mean()), "; ".join(reasons))


# One life of a frozen model, from its first answers on: `ask` sends a canary, `drift` compares the
# answer, `described` are the fields of its `scorer` event in the queue's journal. `member` is None
# for a model in the learner, which restarts as a whole, and whose canary asks all its models.
Watched: TypeAlias = ScoringEngine | LearnerModel | RewardModel
