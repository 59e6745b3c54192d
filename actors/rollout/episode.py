"""Episodes of a group: environment and policy engine alternate until the environment ends."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np

from actors.together import together
from distill.chat.segments import SegmentBuilder
from distill.engine import GenerateRequest, Sample, SamplingModel
from distill.envs.asking import AskingEnv
from distill.envs.base import Env, EnvGroupBuilder, Episode, QueriedModels, Turn
from distill.errors import DataError, EngineError
from distill.rewards.length import LengthRules
from distill.rewards.registry import LARGEST_REWARD
from distill.sampling import Sampling, TrainSampling
from distill.types import Segment, StopReason, TokenArray, Trajectory, TrajectoryGroup

# Context manager around the code of an environment or a reward. Several members of a group may be
# inside at the same time.
UserCode = Callable[[], AbstractAsyncContextManager[None]]

# Computes a member's seed. Members with the same first prompt share the seed of the first member.
Seed = Callable[[], int]

# Limit of metrics. Sums of much larger values are not finite.
_LARGEST_METRIC = 1e100


class EpisodesFailed(DataError):
    """All episodes of a group failed."""


async def rollout_group(
    policy: SamplingModel,
    builder: EnvGroupBuilder,
    sampling: TrainSampling,
    *,
    group_id: int,
    seed: int,
    models: Mapping[str, SamplingModel] | None = None,
    user_code: UserCode = nullcontext,
    ended: Callable[[Sequence[Segment]], None] = lambda segments: None,
    lengths: LengthRules | None = None,
) -> TrajectoryGroup:
    """Play a group's G episodes and return them as trajectories to train on.

    The group gets the builder's teacher, tag, answer and privileged context. Members without a
    turn, and members that failed, are left out.

    Args:
        lengths: rules that change rewards by the lengths of episodes.
        ended: called with the segments of each trajectory when it has ended, or, if the teacher
            gets feedback, when all have ended. The group contains the same objects.

    Raises:
        EngineError, DataError: see `play_group`; DataError also for an invalid trajectory.
        EpisodesFailed: all members failed (the message is the reason of the first failure), or the
            policy had no turn in any of them.
    """
    segments_G: dict[int, tuple[Segment, ...]] = {}

    def note(member: int, episode: Episode) -> None:
        if _is_trained(episode):
            context_T = builder.teacher_context_T(episode)
            segments_G[member] = _segments(episode, sampling.temperature, context_T)
            ended(segments_G[member])

    # Feedback includes the episode's reward, which is known when all episodes have ended.
    waits = builder.feedback is not None

    episodes_G = await play_group(
        policy,
        builder,
        sampling,
        group_id=group_id,
        seed=seed,
        models=models,
        user_code=user_code,
        ended=(lambda member, episode: None) if waits else note,
    )
    for member, episode in enumerate(episodes_G if waits else ()):
        note(member, episode)
    trajectories_G = tuple(
        _apply_length_rules(_trajectory(segments_G[member], episode), episode, lengths)
        for member, episode in enumerate(episodes_G)
        if _is_trained(episode)
    )
    failures = [episode.failure for episode in episodes_G if episode.failure]
    if failures and not trajectories_G:
        raise EpisodesFailed(failures[0])
    if not trajectories_G:
        raise EpisodesFailed("the policy had no turn in any of its episodes")
    return TrajectoryGroup(
        group_id=group_id,
        trajectories_G=trajectories_G,
        metrics={
            **_cached(episodes_G),
            **_failed(episodes_G),
            **(_unhinted(trajectories_G) if builder.hinted else {}),
        },
        teacher=builder.teacher,
        tag=builder.tag,
        answer=builder.answer,
    )


def _is_trained(episode: Episode) -> bool:
    return bool(episode.turns) and not episode.failure


def _failed(episodes_G: Sequence[Episode]) -> dict[str, float]:
    """Share of failed episodes. Empty for environments that do not report failures."""
    failed = [bool(episode.failure) for episode in episodes_G if episode.failure is not None]
    return {"rollout/failed_episodes": sum(failed) / len(failed)} if failed else {}


def _trajectory(segments: tuple[Segment, ...], episode: Episode) -> Trajectory:
    return Trajectory(
        segments=segments,
        reward=episode.reward,
        stop_reason=episode.stop_reason,
        metrics=episode.metrics,
    )


def _apply_length_rules(
    trajectory: Trajectory, episode: Episode, rules: LengthRules | None
) -> Trajectory:
    """Apply length rules to the reward: subtract the penalty of the longest turn.

    The penalty is recorded as the metric `overlong`.
    """
    if rules is None:
        return trajectory
    metrics, penalty = trajectory.metrics, 0.0
    if rules.overlong_buffer:
        penalty = rules.penalty(max(len(turn.sample.tokens_T) for turn in episode.turns))
        metrics = {**metrics, "overlong": penalty}
    return replace(
        trajectory,
        reward=trajectory.reward - penalty,
        metrics=metrics,
        reward_counts=rules.counts(trajectory.stop_reason),
    )


def _segments(
    episode: Episode, temperature: float, teacher_context_T: TokenArray | None
) -> tuple[Segment, ...]:
    segments = SegmentBuilder(temperature, teacher_context_T)
    for turn in episode.turns:
        segments.append(turn.observation_T, turn.sample, turn.bonuses_T, trained=turn.trained)
    return segments.build()


def _cached(episodes_G: Sequence[Episode]) -> dict[str, float]:
    """Share of the prompt tokens of all turns but the first that engines had in their caches."""
    later = [turn for episode in episodes_G for turn in episode.turns[1:]]
    counted = [turn for turn in later if turn.sample.cached_tokens is not None]
    if not counted:
        return {}
    cached = sum(turn.sample.cached_tokens or 0 for turn in counted)
    return {"rollout/cached_share": cached / sum(len(turn.observation_T) for turn in counted)}


def _unhinted(trajectories_G: Sequence[Trajectory]) -> dict[str, float]:
    """Share of segments without privileged context, because it could not replace any tokens."""
    hinted = [s.teacher_context_T is not None for t in trajectories_G for s in t.segments]
    return {"opd/unhinted_segments": hinted.count(False) / len(hinted)} if hinted else {}


async def play_group(
    policy: SamplingModel,
    builder: EnvGroupBuilder,
    sampling: Sampling,
    *,
    group_id: int,
    seed: int,
    models: Mapping[str, SamplingModel] | None = None,
    user_code: UserCode = nullcontext,
    ended: Callable[[int, Episode], None] = lambda member, episode: None,
) -> list[Episode]:
    """Play a group's G episodes concurrently.

    The first turns of members with the same first observation are one request, so the engine
    computes their prompt once. Samples are a function of (weights, prompt, sampling, seed,
    group_id).

    Args:
        models: models that environments may use besides the policy; see
            `EnvGroupBuilder.make_envs`.
        user_code: context manager entered around all calls of environments and rewards, except
            `close`.
        ended: called with each member's index and episode when the episode has ended, before the
            group's rewards.

    Raises:
        EngineError: the engine aborted a sample.
        DataError: the builder did not return one reward for each member; or a reward or a metric is
            not finite, or too large to average.
    """
    async with user_code():
        envs_G = builder.make_envs(QueriedModels({**(models or {}), "policy": policy}))
    seeds_G = [partial(_mix, seed, group_id, member) for member in range(len(envs_G))]
    group = _GroupPlay(policy, sampling, f"{seed}-{group_id}", user_code)

    async def play(member: int, first: tuple[TokenArray, Sample] | None) -> Episode:
        episode = await group.play(envs_G[member], first, seeds_G[member])
        ended(member, episode)
        return episode

    try:
        first_G = await group.first_turns(envs_G, seeds_G)
        episodes_G = await together(*(play(member, first) for member, first in enumerate(first_G)))
    finally:
        await _close(envs_G)
    async with user_code():
        rewards_G = await builder.group_rewards(envs_G, episodes_G)
    if len(rewards_G) != len(episodes_G):
        raise DataError(
            f"group_rewards gave {len(rewards_G)} rewards for {len(episodes_G)} members"
        )
    return [
        _checked(episode, reward) for episode, reward in zip(episodes_G, rewards_G, strict=True)
    ]


async def _close(envs_G: Sequence[Env]) -> None:
    """Close all environments. A caller that cancels the group waits until they are closed."""
    holding = [env for env in envs_G if type(env).close is not Env.close]
    closing = asyncio.gather(*(env.close() for env in holding))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await closing
        raise


def _checked(episode: Episode, of_group: float) -> Episode:
    """Add the group's reward to an episode, convert numbers to float, and check their limits.

    User code may return other numeric types, such as NumPy scalars.
    """
    metrics = {name: float(value) for name, value in episode.metrics.items()}
    episode = replace(episode, reward=float(episode.reward + of_group), metrics=metrics)
    limited = [(name, value, _LARGEST_METRIC) for name, value in episode.metrics.items()]
    for name, value, largest in [("reward", episode.reward, LARGEST_REWARD), *limited]:
        if not abs(value) <= largest:
            raise DataError(
                f"{name} = {value} is not finite, or larger than {largest:g}; scale it", field=name
            )
    return episode


def _mix(*parts: int) -> int:
    """Combine integers into a 63-bit seed; equal parts give equal seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def _known(turns: Sequence[Turn], observation_T: TokenArray) -> int:
    """Number of leading tokens of an observation that the policy has processed in earlier turns.

    The last sampled token is not processed before the next turn.
    """
    if not turns:
        return 0
    seen_T = np.concatenate([turns[-1].observation_T, turns[-1].sample.tokens_T])
    extended = np.array_equal(observation_T[: len(seen_T)], seen_T)
    return len(seen_T) - 1 if extended else 0


@dataclass(frozen=True, slots=True)
class _GroupPlay:
    """Plays the episodes of one group. `session` identifies the group to the policy's engines."""

    policy: SamplingModel
    sampling: Sampling
    session: str
    user_code: UserCode

    async def sample(
        self,
        observation_T: TokenArray,
        seed: int,
        *,
        num_samples: int = 1,
        max_new_tokens: int | None = None,
        known: int = 0,
    ) -> list[Sample]:
        """Sample from the policy. Raises EngineError if the engine aborted a sample."""
        sampling = self.sampling
        if max_new_tokens:
            most = min(sampling.max_new_tokens, max_new_tokens)
            sampling = replace(sampling, max_new_tokens=most)
        request = GenerateRequest(
            prompt_tokens_T=observation_T,
            sampling=sampling,
            num_samples=num_samples,
            seed=seed,
            session=self.session,
            known=known,
        )
        samples = await self.policy.generate(request)
        if any(sample.stop_reason is StopReason.ABORTED for sample in samples):
            raise EngineError("a rollout was aborted by the policy engine")
        return samples

    async def first_turns(
        self, envs_G: Sequence[Env], seeds_G: Sequence[Seed]
    ) -> list[tuple[TokenArray, Sample] | None]:
        """First observation and sample of each member; None for members that do not start."""
        starters = [member for member, env in enumerate(envs_G) if env.starts]
        async with self.user_code():
            observed = await asyncio.gather(*(envs_G[m].initial_observation() for m in starters))
        members_by_prompt: dict[bytes, list[int]] = defaultdict(list)
        observations: dict[int, TokenArray] = {}
        for member, observation_T in zip(starters, observed, strict=True):
            if observation_T is not None:
                observations[member] = observation_T
                members_by_prompt[observation_T.tobytes()].append(member)
        alike = members_by_prompt.values()
        answers = await asyncio.gather(
            *(
                self.sample(observations[first], seeds_G[first](), num_samples=1 + len(others))
                for first, *others in alike
            )
        )
        first_G: list[tuple[TokenArray, Sample] | None] = [None] * len(envs_G)
        for members, answer in zip(alike, answers, strict=True):
            for member, sample in zip(members, answer, strict=True):
                first_G[member] = observations[member], sample
        return first_G

    async def play(self, env: Env, first: tuple[TokenArray, Sample] | None, seed: Seed) -> Episode:
        """Play one episode to its end, starting with its first sample if given."""
        if isinstance(env, AskingEnv):
            async with self.user_code():
                return await env.play(_EpisodePolicy(self, seed()))
        turns: list[Turn] = []
        if first is None:
            observed = None
            if not env.starts:
                async with self.user_code():
                    observed = await env.initial_observation()
            if observed is None:
                return Episode(turns=(), reward=0.0, stop_reason=StopReason.DONE, metrics={})
            first = observed, (await self.sample(observed, _mix(seed(), 0)))[0]
        observation_T, sample = first
        reward, feedback = 0.0, ""
        metrics: dict[str, float] = {}
        while True:
            async with self.user_code():
                result = await env.step(sample)
            turns.append(
                Turn(
                    observation_T=observation_T,
                    sample=sample,
                    bonuses_T=result.bonuses_T,
                    trained=result.trained,
                )
            )
            reward += result.reward
            feedback = result.feedback or feedback
            metrics.update(result.metrics)
            if result.observation_T is None:
                return Episode(
                    turns=tuple(turns),
                    reward=reward,
                    stop_reason=result.stop_reason or sample.stop_reason,
                    metrics=metrics,
                    feedback=feedback,
                    first_messages=env.first_messages,
                )
            observation_T = result.observation_T
            known = _known(turns, observation_T)
            [sample] = await self.sample(observation_T, _mix(seed(), len(turns)), known=known)


class _EpisodePolicy:
    """Policy of one episode (`Ask`). The seed of request n is derived from (seed, n)."""

    def __init__(self, group: _GroupPlay, seed: int) -> None:
        self.sampling = group.sampling
        self._group, self._seed, self._numbers = group, seed, count()

    async def __call__(
        self, observation_T: TokenArray, *, num_samples: int = 1, max_new_tokens: int | None = None
    ) -> Sequence[Sample]:
        return await self._group.sample(
            observation_T,
            _mix(self._seed, next(self._numbers)),
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
        )
