"""Scoring of groups: tokens, contexts, temperatures, and the fields of the answers."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.rollout.teacher import Scorer, Scorers, score_group, teacher_of
from distill.chat.segments import SegmentBuilder
from distill.engine import Sample, Score, ScoreRequest, ScoringModel
from distill.errors import EngineError
from distill.sampling import UNSCALED
from distill.types import Segment, TokenArray, TrajectoryGroup
from tests.actors.prefix_engine import PrefixEngine
from tests.samples import ids, sample, segment, trajectory
from tests.tiny import VOCAB_SIZE
from tests.waiting import DEADLINE_S

TEACHER, OTHER, REFERENCE = PrefixEngine(1), PrefixEngine(2), PrefixEngine(3)
TOP_K = 4
HINT_T = ids(90, 91, 92, 93, 94, 95)


async def score_rollout(
    group: TrajectoryGroup,
    *,
    teachers: Mapping[str, ScoringModel],
    reference: ScoringModel | None,
    top_k: int,
) -> TrajectoryGroup:
    """Score trajectories that ended together, as a worker does."""
    teacher = teacher_of(teachers, group.teacher) if teachers else None
    try:
        async with asyncio.TaskGroup() as tasks:
            scorers = Scorers(teacher=teacher, reference=reference, top_k=top_k)
            scorer = Scorer(tasks, scorers)
            for member in group.trajectories_G:
                scorer.ended(member.segments)
            scorer.finish()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return scorer.filled(group)


def unscored(**changes: Any) -> TrajectoryGroup:
    """One member of one segment, one of two, with observations between the last one's actions.

    Every segment but the second has a privileged context, one longer and one shorter than its own.
    """
    fields: dict[str, Any] = {"teacher_logprobs_T": None, "teacher_logprobs_q1_T": None}
    with_holes_T = np.array([0, 0, 1, 1, 0, 0, 1, 0, 1], bool)
    made = TrajectoryGroup(
        group_id=3,
        trajectories_G=(
            trajectory(segment(5, 3, seed=1, teacher_context_T=HINT_T, **fields), reward=2.0),
            trajectory(
                segment(2, 4, seed=2, **fields),
                segment(
                    2, 7, seed=3, action_mask_T=with_holes_T,
                    versions_T=np.where(with_holes_T, 0, -1), teacher_context_T=ids(7), **fields,
                ),
            ),
        ),
        metrics={"time/rollout": 1.0},
        tag="sums",
    )  # fmt: skip
    return replace(made, **changes)


def run(coroutine: Coroutine[Any, Any, TrajectoryGroup]) -> TrajectoryGroup:
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def seen_by_teacher(of: Segment, position: int) -> TokenArray:
    """Teacher context of the token at `position`."""
    context_T = ids() if of.teacher_context_T is None else of.teacher_context_T
    return np.concatenate([context_T, of.tokens_T[of.teacher_replaces : position]])


def expect_taught(scored: TrajectoryGroup, engine: PrefixEngine, top_k: int = 0) -> None:
    for of in scored.segments():
        assert of.teacher_logprobs_T is not None and of.teacher_logprobs_q1_T is not None
        rows = iter(range(of.num_actions))
        for t in range(len(of)):
            if not of.action_mask_T[t]:
                assert of.teacher_logprobs_T[t] == of.teacher_logprobs_q1_T[t] == 0
                continue
            seen_T, token = seen_by_teacher(of, t), of.tokens_T[t]
            at_T_V = engine.distribution_V(seen_T, of.temperature)
            assert of.teacher_logprobs_T[t] == at_T_V[token]
            unscaled_V = engine.distribution_V(seen_T, UNSCALED)
            assert of.teacher_logprobs_q1_T[t] == unscaled_V[token]
            if top_k:
                assert of.teacher_top is not None and len(of.teacher_top) == of.num_actions
                best_K, row = np.argsort(-at_T_V)[:top_k], next(rows)
                assert of.teacher_top.ids_NK[row].tolist() == best_K.tolist()
                assert of.teacher_top.logprobs_NK[row].tolist() == at_T_V[best_K].tolist()
        if not top_k:
            assert of.teacher_top is None


def expect_referred(scored: TrajectoryGroup, engine: PrefixEngine) -> None:
    """Assert log-probs after the policy's own context, independent of the teacher's."""
    for of in scored.segments():
        assert of.reference_logprobs_T is not None
        for t in range(len(of)):
            log_p_V = engine.distribution_V(of.tokens_T[:t], of.temperature)
            expected = log_p_V[of.tokens_T[t]] if of.action_mask_T[t] else 0
            assert of.reference_logprobs_T[t] == expected


def expect_otherwise_the_same(scored: TrajectoryGroup, before: TrajectoryGroup) -> None:
    assert (scored.group_id, scored.teacher, scored.tag) == (3, before.teacher, "sums")
    assert scored.metrics == before.metrics
    for new, old in zip(scored.trajectories_G, before.trajectories_G, strict=True):
        assert (new.reward, new.stop_reason) == (old.reward, old.stop_reason)
    for new, old in zip(scored.segments(), before.segments(), strict=True):
        for name in ("tokens_T", "action_mask_T", "behaviour_logprobs_T", "versions_T"):
            np.testing.assert_array_equal(getattr(new, name), getattr(old, name))
        assert new.temperature == old.temperature
        assert new.teacher_context_T is old.teacher_context_T


def test_the_version_that_scored_is_on_each_segment() -> None:
    class Moves(PrefixEngine):
        def answer(self, request: ScoreRequest) -> Score:
            return replace(super().answer(request), version=len(request.tokens_T))

    before = unscored()
    scored = run(score_group(Moves(0), before))
    lengths = [len(seen_by_teacher(s, len(s))) for s in before.segments()]
    assert [segment.teacher_version for segment in scored.segments()] == lengths
    frozen = run(score_group(TEACHER, before))
    assert [segment.teacher_version for segment in frozen.segments()] == [None] * len(lengths)


@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_the_teacher_scores_actions_after_its_own_context(top_k: int) -> None:
    before = unscored()
    scored = run(score_group(TEACHER, before, top_k=top_k))
    expect_taught(scored, TEACHER, top_k)
    expect_otherwise_the_same(scored, before)
    assert all(of.reference_logprobs_T is None for of in scored.segments())


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_teacher_is_asked_at_the_policys_likeliest_tokens(top_k: int) -> None:
    rng = np.random.default_rng(0)
    before, wanted = unscored(), []

    def with_ids(of: Segment) -> Segment:
        ids_NK = np.stack([rng.permutation(VOCAB_SIZE)[:TOP_K] for _ in range(of.num_actions)])
        wanted.append(ids_NK.astype(np.int32))
        return replace(of, policy_top_ids_NK=wanted[-1])

    before = replace(
        before,
        trajectories_G=tuple(
            replace(member, segments=tuple(map(with_ids, member.segments)))
            for member in before.trajectories_G
        ),
    )
    scored = run(score_group(TEACHER, before, top_k=top_k))
    for of, ids_NK in zip(scored.segments(), wanted, strict=True):
        assert of.policy_top_ids_NK is None, "they are part of teacher_top now"
        assert of.teacher_top is not None and of.teacher_top.k == TOP_K + top_k
        np.testing.assert_array_equal(of.teacher_top.ids_NK[:, :TOP_K], ids_NK)
        for row, t in enumerate(np.flatnonzero(of.action_mask_T).tolist()):
            log_q_V = TEACHER.distribution_V(seen_by_teacher(of, t), of.temperature)
            ids_K = of.teacher_top.ids_NK[row]
            assert of.teacher_top.logprobs_NK[row].tolist() == log_q_V[ids_K].tolist()
            others = [v for v in np.argsort(-log_q_V).tolist() if v not in ids_NK[row]]
            assert ids_K[TOP_K:].tolist() == others[:top_k]


def episode(*turns: tuple[TokenArray, Sample, bool]) -> TrajectoryGroup:
    builder = SegmentBuilder(0.7, ids(90, 91, 92))
    for observation_T, taken, trained in turns:
        builder.append(observation_T, taken, trained=trained)
    return TrajectoryGroup(group_id=3, trajectories_G=(trajectory(*builder.build()),))


PROMPT = [1, 2, 3]
EPISODES = {
    "an untrained turn and a tool's answer": (
        [(ids(*PROMPT), sample(10, 11), False), (ids(*PROMPT, 10, 11, 4, 5), sample(20, 21), True)],
        [([90, 91, 92, 10, 11, 4, 5, 20, 21], 7)],
    ),
    "several trained turns": (
        [
            (ids(*PROMPT), sample(10, 11), True),
            (ids(*PROMPT, 10, 11, 4), sample(20), True),
            (ids(*PROMPT, 10, 11, 4, 20, 5), sample(30, 31), True),
        ],
        [([90, 91, 92, 10, 11, 4, 20, 5, 30, 31], 3)],
    ),
    "a second segment that begins with the prompt": (
        [(ids(*PROMPT), sample(10, 11), True), (ids(*PROMPT, 11, 4), sample(20, 21), True)],
        [([90, 91, 92, 10, 11], 3), ([90, 91, 92, 11, 4, 20, 21], 5)],
    ),
    "a second segment of a condensed history": (
        [(ids(*PROMPT), sample(10, 11), True), (ids(1, 2, 9), sample(20, 21), True)],
        [([90, 91, 92, 10, 11], 3), ([1, 2, 9, 20, 21], 3)],
    ),
}


@pytest.mark.parametrize("case", EPISODES)
def test_the_privileged_context_takes_the_place_of_the_prompt_alone(case: str) -> None:
    """The teacher also sees untrained turns and tool results."""
    turns, expected = EPISODES[case]
    engine = PrefixEngine(4)
    scored = run(score_group(engine, episode(*turns)))
    [requests] = engine.scored
    assert [(request.tokens_T.tolist(), request.start) for request in requests] == expected
    for made, (tokens, start) in zip(scored.segments(), expected, strict=True):
        shift = len(tokens) - len(made)
        for t in np.flatnonzero(made.action_mask_T):
            log_q_V = engine.distribution_V(ids(*tokens[: t + shift]), made.temperature)
            assert made.teacher_logprobs_T is not None
            assert made.teacher_logprobs_T[t] == log_q_V[made.tokens_T[t]]
        assert start == made.first_action + shift


def test_a_rollout_is_scored_by_its_own_teacher_and_the_reference() -> None:
    teachers: dict[str, ScoringModel] = {"maths": TEACHER, "code": OTHER}
    for name, engine in (("maths", TEACHER), ("code", OTHER)):
        before = unscored(teacher=name)
        scored = run(score_rollout(before, teachers=teachers, reference=REFERENCE, top_k=TOP_K))
        expect_taught(scored, engine, TOP_K)
        expect_referred(scored, REFERENCE)
        expect_otherwise_the_same(scored, before)


def test_a_reference_alone_a_teacher_alone_and_neither() -> None:
    referred = run(score_rollout(unscored(), teachers={}, reference=REFERENCE, top_k=0))
    expect_referred(referred, REFERENCE)
    assert all(of.teacher_logprobs_T is None for of in referred.segments())
    taught = run(score_rollout(unscored(), teachers={"": TEACHER}, reference=None, top_k=0))
    expect_taught(taught, TEACHER)
    assert all(of.reference_logprobs_T is None for of in taught.segments())
    before = unscored()
    untouched = run(score_rollout(before, teachers={}, reference=None, top_k=0))
    assert list(untouched.segments()) == list(before.segments())


class Together(PrefixEngine):
    """Answer only when another engine of the same barrier has a request too."""

    def __init__(self, salt: int, meeting: asyncio.Barrier) -> None:
        super().__init__(salt)
        self._meeting = meeting

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        await self._meeting.wait()
        return await super().score(requests)


def test_teacher_and_reference_score_at_the_same_time() -> None:
    async def both() -> TrajectoryGroup:
        meeting = asyncio.Barrier(2)
        return await score_rollout(
            unscored(), teachers={"": Together(1, meeting)}, reference=Together(3, meeting), top_k=0
        )

    scored = run(both())
    expect_taught(scored, TEACHER)
    expect_referred(scored, REFERENCE)


class Failing(PrefixEngine):
    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        raise EngineError(f"engine {self._salt} fell over")


class Slow(PrefixEngine):
    """Never answer; record the cancellation."""

    cancelled = False

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True
        raise AssertionError


@pytest.mark.parametrize("teacher_fails", [True, False])
def test_the_first_failure_is_the_error_and_ends_the_other(teacher_fails: bool) -> None:
    failing, slow = Failing(8), Slow(9)
    teacher, reference = (failing, slow) if teacher_fails else (slow, failing)
    with pytest.raises(EngineError):
        run(score_rollout(unscored(), teachers={"": teacher}, reference=reference, top_k=0))
    assert slow.cancelled


class Spoilt(PrefixEngine):
    def __init__(self, spoil: Callable[[Score], Score]) -> None:
        super().__init__(1)
        self._spoil = spoil

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return [self._spoil(score) for score in await super().score(requests)]


def one_fewer(score: Score) -> Score:
    return replace(
        score, logprobs_by_temperature=tuple(v[1:] for v in score.logprobs_by_temperature)
    )


def without_top(score: Score) -> Score:
    return replace(score, top=None)


def top_of_one_position_fewer(score: Score) -> Score:
    assert score.top is not None
    return replace(score, top=score.top.at(np.arange(1, len(score.top))))


@pytest.mark.parametrize("spoil", [one_fewer, without_top, top_of_one_position_fewer])
def test_an_answer_of_another_size_is_refused(spoil: Callable[[Score], Score]) -> None:
    with pytest.raises(EngineError):
        run(score_group(Spoilt(spoil), unscored(), top_k=TOP_K))
