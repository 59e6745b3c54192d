"""Canaries of a run: fixed inputs that frozen models answer again and again, to detect drift.

    join         first answers of a new model: repeatable, and equal to those of its role's others
    after_step   every `verify.canary_every` steps: engines' canaries are sent with a worker's next
                 batch, the learner is idle and answers at once.
                 An engine or reward model whose answer differs from its first ones has drifted. It
                 is terminated and restarted; its scores since its last good canary are repeated
    check        if weights contain such scores, the learner goes back, with its own frozen models
    after_last   at the end of a run or of a scorer: canaries are sent alone, as no batch may follow

cluster/runtime/watched.py tells the kinds of models apart. An answer proves the scores before it
because of the order of the queue's journal (cluster/queue/provenance.py): canaries are sent after
`ask` is written there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cluster.base.outcomes import ActorLost, CallFailed, LearnerLost
from cluster.config.on_policy import RolloutConfig
from cluster.findings.finding import Finding
from cluster.handles.mailbox import with_states
from cluster.placement.roles import REFERENCE, REWARD, ROLLOUT, teacher_role
from cluster.queue.group_queue import GroupQueue
from cluster.queue.ledger_types import CanaryAnswer
from cluster.runtime.learner_alone import LearnerAlone
from cluster.runtime.watched import Engines, LearnerModel, RewardModel, ScoringEngine, Watched
from cluster.supervision.supervise import Member, State
from distill.errors import CalibrationError, EngineError
from distill.handshake.canary import FILLER_ROWS
from learner.canaries import CopyQuestion

logger = logging.getLogger(__name__)

# Longest wait of canaries for a batch to be sent with, seconds; then they are sent alone.
_PATIENCE_S = 60.0


class ScoredWrongly(LearnerLost):
    """Raised if weights may contain scores of a drifted model: the learner goes back."""

    def __init__(self, why: str, first_bad: int) -> None:
        super().__init__(why)
        self.before = self.first_bad = first_bad


class Canaries:
    """The canaries of one run's frozen models: on engines, in the learner, and the reward model.

    Args:
        actors: actors of the run. A recovery replaces their learner.
        scorers: roles whose weights never change.
        found: called with a finding for each model that has drifted.
        trusted: called with the step up to which weights contain only proven groups.

    Attributes:
        step: step of the weights after which canaries were last sent.
    """

    def __init__(
        self,
        actors: LearnerAlone,
        queue: GroupQueue,
        config: RolloutConfig,
        scorers: Sequence[str],
        *,
        found: Callable[[Finding], None],
        trusted: Callable[[int], None],
    ) -> None:
        self._actors, self._queue = actors, queue
        self._supervisor, self._driver = actors.supervisor, actors.driver
        self._config, self._scorers = config, scorers
        self._every, self._found, self._trusted = config.verify.canary_every, found, trusted
        asked = config.objective.asked_of_policy, config.objective.asked_of_teacher
        self._engines = Engines(
            config.sampling.temperature,
            listed={role: (0, 0) if role == REFERENCE else asked for role in scorers},
            headed=[teacher_role(name) for name in config.teacher_heads],
        )
        self._numbers: dict[Watched, int] = {}  # numbers of lives in the journal
        self._next_number = 0
        self._digests: dict[object, str] = {}  # required of each life of these weights
        self._starting: dict[Member, asyncio.Task[None]] = {}  # reward models without first answers
        self._pending: dict[Watched, asyncio.Task[None]] = {}
        self._recording: set[Watched] = set()  # models whose verdicts the queue is recording
        self._proven = -1  # the newest step that `trusted` was called with
        self._bad: tuple[int, str] | None = None
        self._turn = 0
        self.step = 0
        self._learner_asked_at: int | None = None  # a step

    @property
    def replicas(self) -> dict[str, int]:
        """Numbers of the engines that serve, by name."""
        return {
            watched.who: number
            for watched, number in self._numbers.items()
            if isinstance(watched, ScoringEngine)
            and not self._is_dead(watched)
            and watched.member.state in (State.READY, State.SERVING)
        }

    # first answers

    def join(self, members: Sequence[Member]) -> dict[str, str]:
        """Get first answers of new engines before they serve; returns reasons of refusals by name.

        Raises:
            EngineError, RunFailed: an engine did not answer.
        """
        known = {watched.member for watched in self._numbers}
        scorers = [m for m in members if m.spec.name in self._scorers and m not in known]
        if not self._every or not scorers:
            return {}
        engines = self._driver.run("the first canaries", self._engines.introduce(scorers))
        refused = self._engines.inconsistent(engines)
        if refused and not self._config.verify.handshake:
            for name, why in refused.items():
                self._supervisor.print_line(f"WARNING: {name} stays in use although {why}")
            refused = {}
        for engine in engines:
            if engine.who not in refused:
                self._driver.call("writing down a scorer", self._register(engine))
        return refused

    def join_learner(self) -> None:
        """Get first answers of the frozen models of a learner that has started.

        Raises:
            CalibrationError: a model differs between workers, from the one of the learner that was
                replaced, or from one answer to the next.
            LearnerLost: the learner died meanwhile.
        """
        self._numbers = {w: number for w, number in self._numbers.items() if w.member is not None}
        self._learner_asked_at, self._proven = None, -1
        config, base = self._config, self._config.base_is_reference
        if not (self._every and (config.copied_teachers or config.teacher_heads or base)):
            return
        leader, T = self._actors.learner, config.sampling.temperature
        first = CopyQuestion(temperature=T, filler=FILLER_ROWS, base=base)
        later = CopyQuestion(temperature=T, base=base)
        what = "the canaries of the learner's frozen models"
        by_rank = self._driver.ask_learner(what, leader.canary.remote(first))
        for rank, answers in enumerate(by_rank):
            for place, answer in enumerate(answers):
                model = LearnerModel(leader, later, rank, place, answer)
                if why := self._changed(model) or model.first.nondeterministic:
                    raise CalibrationError(f"{model.who} {why}")
                self._driver.call("writing down a scorer", self._register(model))

    def join_reward_model(self) -> None:
        """Get the first answers of the run's first reward model.

        Raises:
            RunFailed: it did not answer.
        """
        for member in self._new_reward_models():
            self._driver.wait_for(self._introduce(member))

    def ask_new_reward_models(self) -> None:
        """Get first answers of reward models that have started, without waiting for them."""
        for member in self._new_reward_models():
            self._starting[member] = self._driver.background.start(self._introduce_late(member))

    def _new_reward_models(self) -> list[Member]:
        known = {*self._starting, *(watched.member for watched in self._numbers)}
        serving = self._supervisor.members(REWARD, State.SERVING) if self._every else []
        return [member for member in serving if member not in known]

    async def _introduce_late(self, member: Member) -> None:
        try:
            await self._introduce(member)
        except (ActorLost, CallFailed) as error:  # if it is alive, it is asked again
            logger.warning("%s: no canary (%s)", member.name, error)
        finally:
            del self._starting[member]

    async def _introduce(self, member: Member) -> None:
        asked = member.handle.canary.remote(FILLER_ROWS)
        answer = await self._driver.answer("the first canary of the reward model", asked)
        model = RewardModel(member, answer)
        if why := self._changed(model):
            self._terminate(model, why)
        else:
            await self._driver.answer("writing down a scorer", self._register(model))

    def _changed(self, model: LearnerModel | RewardModel) -> str:
        """Description of weights that differ from those of the model's first life; "" if equal."""
        key, digest = model.weights
        if self._digests.setdefault(key, digest) == digest:
            return ""
        return (
            f"has other weights than the first one that was loaded: {model.described()['model']} "
            "was changed during the run. Restore it, or start another out="
        )

    def _register(self, watched: Watched) -> Any:
        """Give the model's life a number; returns a reference to the journal entry."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._numbers[watched] = number
        return self._queue.actor.scorer.remote(number, {"who": watched.who} | watched.described())

    # the later ones

    def after_step(self, step: int) -> None:
        """Send canaries if they are due after `step`; call it between steps.

        Raises:
            ScoredWrongly: as `check`, for a model in the learner, which answers here.
        """
        self.step = step
        if self._every and step % self._every == 0:
            self.ask_new_reward_models()  # those whose first canary failed
            numbers = self._record_asked(w for w in self._serving() if w not in self._pending)
            for watched, number in numbers.items():
                canary = self._canary(watched, number, alone=False)
                self._pending[watched] = self._driver.background.start(canary)
            self._ask_learner()
            self.check()

    def before_checkpoint(self, step: int) -> None:
        """Check the learner's frozen models, so that its checkpoint is proven if it dies.

        Raises:
            ScoredWrongly: as `check`.
        """
        self.step = step
        self._ask_learner()
        self.check()

    def after_last(self, step: int) -> None:
        """Send canaries to all models after the last step, and wait for the answers.

        Raises:
            ScoredWrongly: as `check`.
        """
        self.step = step
        self._ask_learner()
        self.ask_new_reward_models()
        for task in list(self._starting.values()):
            self._driver.wait_for(task)
        self._ask_alone(self._serving())
        self.check()

    def ask_last(self, members: Sequence[Member]) -> None:
        """Send canaries alone to engines that are about to end, and wait for the answers.

        Raises:
            ScoredWrongly: as `check`.
        """
        ending = [watched for watched in self._numbers if watched.member in members]
        self._ask_alone(ending)
        self.check()

    def check(self) -> None:
        """Raise an error if weights contain scores of a drifted model; call it between steps.

        Raises:
            ScoredWrongly: the learner goes back to the checkpoint before them.
        """
        if self._bad is None:
            return
        first_bad, why = self._bad
        self._bad = None
        raise ScoredWrongly(why, first_bad)

    def _serving(self) -> list[Watched]:
        """The engines and reward models that serve."""
        self._numbers = {w: number for w, number in self._numbers.items() if not self._is_dead(w)}
        return [watched for watched in self._numbers if _state(watched) is State.SERVING]

    def _is_dead(self, watched: Watched) -> bool:
        member = watched.member
        return member is not None and member not in self._supervisor.members(member.spec.name)

    def _record_asked(self, models: Iterable[Watched]) -> dict[Watched, int]:
        """Record in the queue's journal which models get a canary next; return their numbers."""
        numbers = {watched: self._numbers[watched] for watched in models}
        if numbers:
            self._driver.call(
                "writing down canaries", self._queue.actor.ask.remote(list(numbers.values()))
            )
        return numbers

    def _ask_learner(self) -> None:
        """Check the learner's models, at most once per step, and wait; the learner is idle."""
        if self._learner_asked_at == self.step:
            return
        numbers = self._record_asked(w for w in self._numbers if w.member is None)
        if not numbers:
            return
        began, asked = time.monotonic(), next(iter(numbers)).ask()  # all answer one call
        answer = self._driver.ask_learner("canaries of the learner's models", asked)
        for watched, number in numbers.items():
            self._driver.wait_for(self._judge(watched, number, answer, began))
        self._learner_asked_at = self.step

    def _ask_alone(self, models: Sequence[Watched]) -> None:
        """Send separate canaries to engines and reward models, and wait for the verdicts."""
        for watched in models:
            if (pending := self._pending.get(watched)) is None:
                continue
            if watched in self._recording:  # the queue reports a drift only to this canary
                self._driver.wait_for(pending)
            else:  # an earlier answer would count as an answer to this canary
                self._pending.pop(watched).cancel()
        numbers = self._record_asked(watched for watched in models if watched in self._numbers)
        create_task = self._driver.background.create_task
        for canary in [create_task(self._canary(*each, alone=True)) for each in numbers.items()]:
            self._driver.wait_for(canary)

    async def _canary(self, watched: Watched, number: int, *, alone: bool) -> None:
        """Send a canary, with the next batch of a worker if it may, and judge the answer."""
        what, began, batched = f"a canary of {watched.who}", time.monotonic(), False
        workers = self._supervisor.members(ROLLOUT, State.SERVING)
        try:
            if alone or not workers or not isinstance(watched, ScoringEngine):
                answer = await self._driver.answer(what, watched.ask())
            else:
                self._turn += 1
                worker = workers[self._turn % len(workers)].handle
                reference = watched.ask_with_next_batch(worker, _PATIENCE_S)
                answer, batched = await self._driver.answer(what, reference)
            if isinstance(watched, ScoringEngine):
                answer = await with_states(answer)
        except (ActorLost, CallFailed, EngineError) as error:
            if not alone and _state(watched) is State.SERVING:
                # The worker died, or its batch was refused.
                await self._canary(watched, number, alone=True)
            else:
                logger.warning("%s: no canary (%s)", watched.who, error)
        else:
            await self._judge(watched, number, answer, began, batched=batched)
        finally:
            if not alone:
                self._pending.pop(watched, None)

    async def _judge(
        self, watched: Watched, number: int, answer: Any, began: float, *, batched: bool = False
    ) -> None:
        """Compare an answer with the first one, and make the queue record the verdict."""
        drift = watched.drift(answer)
        fields = {
            "step": self.step,
            "gap": drift.gap,
            "mean": drift.mean,
            "rode": batched,
            "seconds": time.monotonic() - began,
        } | ({"why": drift.why} if drift.why else {})
        recorded = self._queue.actor.canary.remote(number, not drift.why, fields)
        self._recording.add(watched)
        try:
            note: CanaryAnswer = await self._driver.answer("noting a canary", recorded)
        finally:
            self._recording.remove(watched)
        if drift.why:
            self._quarantine(watched, drift.why, note)
        elif note.proven > self._proven:
            self._proven = note.proven
            self._trusted(note.proven)

    def _quarantine(self, watched: Watched, why: str, answer: CanaryAnswer) -> None:
        first_bad = answer.first_bad
        contain = f"the weights of step {first_bad} and later contain"
        if first_bad is None:
            contain = "no weights contain"
        contained = f"{contain} its scores since its last good canary"
        if first_bad is None and watched.member is None:
            first_bad = self.step + 1  # the learner is restarted in any case
        if first_bad is not None and (self._bad is None or first_bad < self._bad[0]):
            self._bad = first_bad, f"{watched.who} has moved; {contained}"
        again = f"; {len(answer.to_rescore)} groups are repeated" if answer.to_rescore else ""
        self._found(
            Finding(
                name="scorer_moved",
                step=self.step,
                text=f"{watched.who} has moved from its first answers, {why}; {contained}{again}",
                remedy=watched.remedy,
            )
        )
        self._numbers.pop(watched, None)
        self._terminate(watched, f"has moved, {why}")

    def _terminate(self, watched: Watched, why: str) -> None:
        if watched.member is not None and not self._is_dead(watched):
            self._supervisor.terminate(watched.member, f"it {why}")


def _state(watched: Watched) -> State | None:
    return watched.member.state if watched.member else None
