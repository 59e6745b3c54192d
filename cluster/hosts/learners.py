"""Creation of a learner's workers from checked settings, for every recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import chz
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - public

from actors.config import START_S, checkpoint_bytes
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.config.rollout_checks import RolloutInputs
from cluster.config.supervised import SupervisedConfig
from cluster.config.supervised_checks import SupervisedInputs
from cluster.handles.node import nodes_alive
from cluster.hosts.actors import maker
from cluster.hosts.followers import FOLLOWER_GROUPS, ActorFollowers, LearnerFollower
from cluster.hosts.learner_actor import (
    LearnerActor,
    PolicyTraining,
    SupervisedTraining,
    Training,
)
from cluster.placement.places import Places, lacking_in
from cluster.placement.roles import LEARNER, RECORDER, learner_title
from cluster.run_files.run_directory import RunDirectory
from cluster.store.replay_log import KeptGroupSource, KeptSteps
from cluster.supervision.supervise import (
    HEALTH_GROUP,
    JOIN_GROUP,
    ActorSpec,
    progress_call,
)
from cluster.weights.collective import own_address
from distill.pace import loading_s
from learner.checkpoint import Checkpoint
from learner.process_group import Membership, open_store

LEADER_GROUPS = {HEALTH_GROUP: 1, JOIN_GROUP: 1}
# Size of a learner's checkpoint relative to a bfloat16 model: weights and two moments in float32.
_STATE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerActors:
    """The learner's workers. The driver calls the leader, and the leader the followers.

    `meeting_point` is the store of their process group. It exists as long as this object.
    """

    leader: Any
    followers: list[Any]
    meeting_point: TCPStore | None

    @property
    def all(self) -> list[Any]:
        return [self.leader, *self.followers]


def kept_learners(
    config: RolloutConfig,
    inputs: RolloutInputs,
    kept: KeptSteps,
    directory: RunDirectory,
    places: Places,
    resume_from: Checkpoint | None,
    attempt: int,
) -> LearnerActors:
    """Create the learner's workers of a run on groups that another run has kept."""
    first = resume_from.step if resume_from else 0
    training = PolicyTraining(
        config=config,
        learner_config=config.policy_learner(resume_from, inputs.stops, inputs.longest_row),
        inputs=inputs.of_learner,
        source=KeptGroupSource(kept, kept.steps[first:]),
        directory=directory,
        resume_from=resume_from,
    )
    return make_learners(training, places, attempt)


def supervised_learners(
    config: SupervisedConfig,
    inputs: SupervisedInputs,
    directory: RunDirectory,
    places: Places,
    resume_from: Checkpoint | None,
    attempt: int,
) -> LearnerActors:
    """Create the learner's workers of an sft, dpo or reward_model run."""
    learner_config = chz.replace(
        config.learner_config(resume_from=resume_from, stops=inputs.stops),
        reward_padding=inputs.padding,
        longest_rows=inputs.longest_rows(config.rows_per_unit),
    )
    training = SupervisedTraining(
        config=config,
        learner_config=learner_config,
        inputs=inputs,
        directory=directory,
        resume_from=resume_from,
    )
    return make_learners(training, places, attempt)


def make_learners(training: Training, places: Places, attempt: int) -> LearnerActors:
    """Create the leader and the followers.

    Args:
        attempt: number of starts of the run's learner before this one.
    """
    config = training.config
    make, timeout_s = maker(config), config.cluster.no_progress_s

    def options(rank: int, groups: Mapping[str, int]) -> dict[str, Any]:
        name = training.directory.actor_name(f"{LEARNER}-{rank}-{attempt}")
        return places.options(LEARNER, rank) | {"concurrency_groups": groups, "name": name}

    meeting_point, leads, followers = None, None, []
    if (workers := config.learner.workers) > 1:
        address = own_address(nodes_alive() == 1)
        meeting_point = open_store(address, timeout_s)
        member = Membership(
            address=address,
            port=meeting_point.port,
            rank=0,
            size=workers,
            timeout_s=timeout_s,
            replicas=config.learner.replicas,
        )
        followers = [
            make(
                LearnerFollower, options(rank, FOLLOWER_GROUPS), training.learner_config,
                training.losses, replace(member, rank=rank), training.source,
            )
            for rank in range(1, workers)
        ]  # fmt: skip
        leads = replace(member, followers=ActorFollowers(actors=followers, timeout_s=timeout_s))
    leader = make(LearnerActor, options(0, LEADER_GROUPS), training, leads)
    return LearnerActors(leader=leader, followers=followers, meeting_point=meeting_point)


def learner_spec(config: CommonConfig, places: Places) -> ActorSpec:
    """Spec of the learner's workers. If one is lost, all are."""
    read = 0 if config.only_keeps else _learner_bytes(config)
    spec = ActorSpec(
        name=LEARNER,
        title=learner_title,
        lacking=lacking_in(places, LEARNER, config.cluster.no_progress_s),
        create=None,
        heartbeat=progress_call,
        critical=True,
        start_deadline_s=max(config.cluster.no_progress_s, START_S + loading_s(read)),
    )
    if config.only_keeps:  # the recorder reserves no resources
        return replace(spec, title=lambda _: RECORDER, lacking=lambda _: "")
    return spec


def _learner_bytes(config: CommonConfig) -> int:
    """Upper bound of the bytes that a learner reads at its start, from its own checkpoint."""
    copied = config.copied_teachers.values() if isinstance(config, RolloutConfig) else ()
    return _STATE * checkpoint_bytes(config.model.path) + sum(map(checkpoint_bytes, copied))
