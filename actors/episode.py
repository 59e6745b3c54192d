"""Episodes: environments and a policy engine take turns until the environment ends it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from distill.envs.base import Env, EnvGroupBuilder
from distill.errors import EngineError
from distill.interfaces import GenerateRequest, Sample, Sampler
from distill.sampling import TrainSampling
from distill.segments import SegmentBuilder
from distill.types import StopReason, TokenArray, Trajectory, TrajectoryGroup


async def rollout_group(
    policy: Sampler, builder: EnvGroupBuilder, sampling: TrainSampling, *, group_id: int, seed: int
) -> TrajectoryGroup:
    """Runs the group's G episodes at the same time.

    Members that start from the same observation are sampled by one request, so the engine computes
    their prompt once. The samples are a function of (weights, prompt, sampling, seed, group_id).
    What the builder says of its teacher, tag and privileged context goes on the group.

    Raises:
        EngineError: the engine aborted a sample.
    """
    envs_G = builder.make_envs()
    seeds_G = [_mix(seed, group_id, member) for member in range(len(envs_G))]
    samples_G = await _first_turns(policy, envs_G, sampling, seeds_G)
    episodes = [
        _finish(policy, env, sample, sampling, member_seed, builder.teacher_tokens_T)
        for env, sample, member_seed in zip(envs_G, samples_G, seeds_G, strict=True)
    ]
    return TrajectoryGroup(
        group_id=group_id,
        trajectories_G=tuple(await asyncio.gather(*episodes)),
        teacher=builder.teacher,
        tag=builder.tag,
    )


def _mix(*parts: int) -> int:
    """A 63-bit seed from several; equal parts give equal seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


async def _first_turns(
    policy: Sampler, envs_G: Sequence[Env], sampling: TrainSampling, seeds_G: Sequence[int]
) -> list[Sample]:
    members_by_prompt: dict[bytes, list[int]] = defaultdict(list)
    observations_G = [env.initial_observation() for env in envs_G]
    for member, observation_T in enumerate(observations_G):
        members_by_prompt[observation_T.tobytes()].append(member)
    requests = [
        GenerateRequest(
            prompt_tokens_T=observations_G[members[0]],
            sampling=sampling,
            num_samples=len(members),
            seed=seeds_G[members[0]],
        )
        for members in members_by_prompt.values()
    ]
    answers = await asyncio.gather(*(policy.generate(request) for request in requests))
    samples: dict[int, Sample] = {}
    for members, answer in zip(members_by_prompt.values(), answers, strict=True):
        samples.update(zip(members, answer, strict=True))
    return [samples[member] for member in range(len(envs_G))]


async def _finish(
    policy: Sampler,
    env: Env,
    sample: Sample,
    sampling: TrainSampling,
    seed: int,
    teacher_context_T: TokenArray | None,
) -> Trajectory:
    """Plays one episode from its first sample to its end."""
    segments = SegmentBuilder(sampling.temperature, teacher_context_T)
    observation_T = env.initial_observation()
    reward, turn = 0.0, 0
    metrics: dict[str, float] = {}
    while True:
        if sample.stop_reason is StopReason.ABORTED:
            raise EngineError("a rollout was aborted by the policy engine")
        result = await env.step(sample)
        segments.append(observation_T, sample, result.bonuses_T)
        reward += result.reward
        metrics.update(result.metrics)
        if result.observation_T is None:
            return Trajectory(
                segments=segments.build(),
                reward=reward,
                stop_reason=sample.stop_reason,
                metrics=metrics,
            )
        observation_T, turn = result.observation_T, turn + 1
        request = GenerateRequest(
            prompt_tokens_T=observation_T,
            sampling=sampling,
            num_samples=1,
            seed=_mix(seed, turn),
        )
        [sample] = await policy.generate(request)
