"""Builder of the actors of an opd or rl run from checked settings."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import chz

from actors.config import EngineConfig, choose_dtype
from actors.embedded.reward_model import EmbeddedRewardModel
from actors.rollout.user_code_file import problems_in_user_code
from actors.sglang.nodes import SglangFollower
from actors.sglang.parallelism import parallelism
from actors.sglang.start import start_server
from cluster.config.on_policy import RolloutConfig
from cluster.config.rollout_checks import RolloutInputs
from cluster.handles import calls
from cluster.handles.mailbox import with_mailbox
from cluster.handles.node import node_address
from cluster.hosts.actors import deferred, early_setting_on_gpus, local_node_options, maker
from cluster.hosts.evaluator_actor import EvaluatorActor
from cluster.hosts.group_recorder import GroupRecorder
from cluster.hosts.learner_actor import (
    PolicyTraining,
    group_writer,
    publishers_to,
    teacher_weights,
)
from cluster.hosts.learners import LEADER_GROUPS, LearnerActors, make_learners
from cluster.hosts.rollout_actor import RolloutActor, build_worker
from cluster.placement.engines import by_turns
from cluster.placement.places import Places, lacking_in
from cluster.placement.roles import (
    EVALUATION,
    EVALUATOR,
    POLICY,
    QUEUE,
    RECORDER,
    REFERENCE,
    REWARD,
    ROLLOUT,
    engine_makers,
    queried_roles,
    teacher_roles,
    turn_roles,
    worker_title,
)
from cluster.queue.group_queue import GroupQueue, WorkerEnd
from cluster.queue.ledger_types import LedgerSettings
from cluster.queue.queue_actor import GroupQueueActor
from cluster.run_files.run_directory import RunDirectory
from cluster.supervision.supervise import (
    HEALTH_GROUP,
    ActorSpec,
    health_call,
    location_call,
    progress_call,
    ready_call,
)
from cluster.weights.transport import PushSettings
from distill.envs.base import EnvStream
from distill.handshake.comparison import looser_dtype
from distill.models.loading import context_length, load_config, vocab_size
from distill.records import TrainedGroups
from distill.rewards.length import LengthRules
from learner.checkpoint import Checkpoint

# A separate thread for heartbeats, which a long call would delay.
_ASIDE = {"concurrency_groups": {HEALTH_GROUP: 1}}
# Ray restarts it, and repeats its unfinished calls.
_LASTING = {"max_restarts": -1, "max_task_retries": -1}
# Number of problems that a message names.
_SHOWN = 8


@dataclass(eq=False)
class RolloutCast:
    """Factory of the actors of an opd or rl run, used again at each restart."""

    config: RolloutConfig
    inputs: RolloutInputs
    directory: RunDirectory
    placement: Places

    def __post_init__(self) -> None:
        self._make = maker(self.config)

    def _local_options(self) -> dict[str, Any]:
        return {} if self.config.cluster.local else local_node_options()

    def queue(self, trained: TrainedGroups) -> GroupQueue:
        """Create the queue on the driver's node, near `out/`; Ray restarts it from its journal."""
        config = self.config
        options = {"name": self.directory.actor_name(QUEUE), **_LASTING}
        settings = LedgerSettings(
            groups_per_step=config.data.batch_size,
            max_staleness=config.queue.max_staleness,
            total_groups=config.steps * config.data.batch_size,
            lease_s=config.queue.lease_s,
            groups_in_flight=config.window,
            on_stale=config.queue.on_stale,
            most_replaced=config.most_replaced,
        )
        actor = self._make(
            GroupQueueActor, self._local_options() | options,
            secrets.token_hex(8), self.directory.run_id, trained, settings,
            str(self.directory.ledger),
        )  # fmt: skip
        return GroupQueue(actor, timeout_s=config.cluster.no_progress_s)

    @property
    def queue_spec(self) -> ActorSpec:
        by_ray = not self.config.cluster.local
        return self._role(QUEUE, lambda _: QUEUE, None, location_call, restarted_by_ray=by_ray)

    def specs(
        self, queue: GroupQueue, max_groups: Callable[[], int], start_model: str
    ) -> dict[str, ActorSpec]:
        """Specs of all actors but the queue and the learner, by role.

        Args:
            max_groups: returns the number of groups that a worker may have in progress.
            start_model: model that policy engines load at their first start; restarted ones load
                the student.
        """
        config, first = self.config, {POLICY: start_model, EVALUATION: start_model}
        specs = {
            role: self._engine_spec(role, model, settings, first.get(role, model))
            for role, (model, settings) in engine_makers(config, self.inputs.stops).items()
        }
        if config.reward_model is not None:
            specs[REWARD] = self._reward_spec(config.reward_model)
        specs[ROLLOUT] = self._worker_spec(queue, max_groups)
        if len(self.inputs.held_out) and not config.only_keeps:
            specs[EVALUATOR] = self._evaluator_spec()
        return specs

    def _evaluator_spec(self) -> ActorSpec:
        config, inputs = self.config, self.inputs
        user_code_file = self.directory.log(EVALUATOR).removesuffix(".log") + ".inside"
        title = config.problems_title(config.eval.source or config.data.source)

        def create(_index: int, attempt: int) -> Any:
            options = self._local_options() | _ASIDE | {"name": self._name(EVALUATOR, 0, attempt)}
            return self._make(
                EvaluatorActor, options, inputs.held_out, inputs.tokenizer, user_code_file
            )

        def death_details() -> str:
            lines = [inputs.held_out.label(p) for p in problems_in_user_code(user_code_file)]
            more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            noun = "problem" if len(lines) == 1 else "problems"
            named = f"{noun} {', '.join(lines[:_SHOWN])}{more} of {title}"
            return f", in the code of {named}" if lines else ""

        return self._role(
            EVALUATOR,
            lambda _: EVALUATOR,
            create,
            heartbeat=progress_call,
            death_details=death_details,
        )

    def _worker_spec(self, queue: GroupQueue, max_groups: Callable[[], int]) -> ActorSpec:
        """Spec of rollout workers. They receive their engines by `update`, before `run`."""
        config, inputs = self.config, self.inputs
        dataset = EnvStream(
            inputs.train,
            group_size=config.sampling.group_size,
            seed=config.seed,
            title=config.problems_title(config.data.source),
        )
        dataset = calls.shared(dataset, [queue.actor])  # all workers read the same
        teacher_samples = config.teacher_sampled(vocab_size(load_config(config.model.path)))

        def create(index: int, attempt: int) -> Any:
            build = partial(
                build_worker,
                policy=POLICY,
                teachers=teacher_roles(config),
                reference=REFERENCE if config.scored_by_reference else None,
                models=queried_roles(config),
                policy_top_k=config.objective.asked_of_policy,
                teacher_top_k=config.objective.asked_of_teacher,
                lengths=LengthRules.of(config.objective, config.sampling.max_new_tokens),
                routed_experts=config.replays_routing(),
                scored=config.scored_by_teacher(),
                states=inputs.states,
                teacher_samples=teacher_samples,
                text_teachers=inputs.text_teachers,
                sink=WorkerEnd(queue, worker_title(index), whole=config.learner.workers == 1),
                sampling=config.sampling.train(),
                seed=config.seed,
                max_groups=max_groups(),
                runs_user_code=config.runs_user_code,
            )
            placed = config.rollout.cpus > 0
            options = self.placement.options(ROLLOUT, index) if placed else self._local_options()
            options |= _ASIDE | {"name": self._name(ROLLOUT, index, attempt)}
            return self._make(RolloutActor, options, build, dataset, config.cluster.no_progress_s)

        return self._role(ROLLOUT, worker_title, create, lacking=self._lacking(ROLLOUT))

    def _reward_spec(self, path: str) -> ActorSpec:
        """Spec of the reward model: one for all rollout workers and evaluations."""
        config = self.config

        def create(index: int, attempt: int) -> Any:
            options = self.placement.options(REWARD, index)
            options |= {"name": self._name(REWARD, index, attempt)}
            return self._make(
                deferred(EmbeddedRewardModel),
                options,
                model_path=path,
                dtype=config.engine.dtype_on(config.cluster.device),
                device=config.cluster.device,
                threads=config.cluster.threads,
            )

        return self._role(
            REWARD, lambda _: REWARD, create, heartbeat=health_call, model=path,
            lacking=self._lacking(REWARD),
        )  # fmt: skip

    def _engine_spec(
        self,
        role: str,
        model: str,
        settings: Callable[[str, str], EngineConfig],
        first: str,
    ) -> ActorSpec:
        """Spec of a role's engines. They load `first` at their first start, and `model` later."""
        sharers = turn_roles(self.config)
        turns = len(sharers) if role in sharers else 1

        def engine(log_path: str, attempt: int) -> EngineConfig:
            return settings(model if attempt else first, log_path)

        def log_of(index: int) -> str:
            return self.directory.log(_member(role, index))

        def start_is(index: int) -> str:
            if engine(log_of(index), 0).hosted:
                return f"SGLang loads {model}; log: {log_of(index)}"
            return f"loads {model}"

        def create(index: int, attempt: int) -> Any:
            made = engine(log_of(index), attempt)
            if turns > 1:
                made = chz.replace(made, turn=str(self.directory.turn(index)))
            options = self.placement.options(role, index)
            options |= {"name": self._name(role, index, attempt)}
            made = self._served(made)
            arguments = made.arguments()
            if made.nodes > 1:
                arguments["address"] = node_address
            elif made.hosted:
                start = partial(start_server, made)
                arguments["server"] = early_setting_on_gpus(self.placement, role, index, start)
            hosted = deferred(made.engine_class)
            kind = hosted if self.config.cluster.local else with_mailbox(hosted)
            return self._make(kind, options, **arguments)

        def follow(index: int, attempt: int, head: Any) -> dict[Any, Any]:
            """A follower on each further node; they start once the head says where they meet."""
            nodes = engine("", attempt).nodes
            meeting_point = head.meeting_point.remote() if nodes > 1 else None
            followers = {}
            for node in range(1, nodes):
                log_path = self.directory.log(_member(role, index, node))
                made = self._served(engine(log_path, attempt))
                options = self.placement.options(role, index, node)
                options |= {"name": self._name(role, index, attempt, node)}
                follower = self._make(SglangFollower, options, made, meeting_point, node)
                followers[follower.serve.remote()] = follower
            return followers

        return self._role(
            role,
            lambda index: f"{role} engine {index}",
            create,
            heartbeat=health_call,
            follow=follow,
            lacking=self._lacking(role),
            gated=True,
            start_is=start_is,
            model=model,
            turns=turns,
        )

    def _served(self, engine: EngineConfig) -> EngineConfig:
        """Engine class whose server, if any, can be started without torch."""
        if not engine.hosted:
            return engine
        return chz.replace(
            engine,
            context_length=context_length(load_config(engine.model)),
            start_deadline_s=self.config.cluster.start_deadline_of(engine.model),
        )

    def _role(
        self,
        name: str,
        title: Callable[[int], str],
        create: Callable[[int, int], Any] | None,
        heartbeat: Callable[[Any], Any] = ready_call,
        model: str | None = None,
        turns: int = 1,
        **changes: Any,
    ) -> ActorSpec:
        """Spec with the start deadline of a model. Each start on GPUs that are shared is a turn."""
        return ActorSpec(
            name=name,
            title=title,
            create=create,
            heartbeat=heartbeat,
            start_deadline_s=turns * self.config.cluster.start_deadline_of(model),
            **changes,
        )

    def _lacking(self, role: str) -> Callable[[int], str]:
        return lacking_in(self.placement, role, self.config.cluster.no_progress_s)

    def _name(self, role: str, index: int, attempt: int, node: int = 0) -> str:
        again = f"-again-{attempt}" if attempt else ""
        return self.directory.actor_name(f"{_member(role, index, node)}{again}")

    def learners(
        self,
        resume_from: Checkpoint | None,
        attempt: int,
        queue: GroupQueue,
        policies: Mapping[str, Any],
        teachers: Mapping[str, Any],
    ) -> LearnerActors:
        """Create the learner's workers; with rollout_only=True the recorder that replaces them.

        Args:
            attempt: number of their starts before this one.
            policies, teachers: policy engines, and engines of a following teacher, that receive
                weights.
        """
        config, device = self.config, self.config.cluster.device
        if config.only_keeps:
            return self._recorder(resume_from, attempt, queue)
        probe_every, prove_every = config.verify.of_pushes(device)
        push = PushSettings(
            choice=config.weights.transport,
            served=config.engine.kind_on(device) == "sglang",
            device=device,
            directory=str(self.directory.path / "weights"),
            model=config.model.path,
            temperature=config.sampling.temperature,
            dtype=looser_dtype(
                config.engine.dtype_on(device), choose_dtype(config.learner.dtype, device)
            ),
            probe_every=probe_every,
            prove_every=prove_every,
            timeout_s=config.cluster.no_progress_s,
            parallel=parallelism(config.policy.server_flags),
        )
        inputs = self.inputs
        learner_config = config.policy_learner(resume_from, inputs.stops, inputs.longest_row)
        if device.startswith("cuda") and config.engines_sleep:
            learner_config = by_turns(learner_config, config)
        if config.learner_takes_turns:
            gpus = parallelism(config.policy.server_flags).gpus
            turns = [
                str(self.directory.turn(rank // gpus)) for rank in range(config.learner.workers)
            ]
            learner_config = chz.replace(learner_config, gpu_turns=turns)
        training = PolicyTraining(
            config=config,
            learner_config=learner_config,
            inputs=inputs.of_learner,
            source=queue,
            directory=self.directory,
            resume_from=resume_from,
            publishers=partial(publishers_to, config, policies, teachers, queue, push),
        )
        return make_learners(training, self.placement, attempt)

    def _recorder(
        self, resume_from: Checkpoint | None, attempt: int, queue: GroupQueue
    ) -> LearnerActors:
        config, directory = self.config, self.directory
        recorder = self._make(
            GroupRecorder,
            self._local_options()
            | {
                "concurrency_groups": LEADER_GROUPS,
                "name": self._name(RECORDER, 0, attempt),
            },
            config,
            queue=queue,
            directory=directory,
            keep=group_writer(config, directory),
            teacher_weights=teacher_weights(config),
            stop_event=self.inputs.stops.event,
            resume_from=resume_from,
        )
        return LearnerActors(leader=recorder, followers=[], meeting_point=None)


def _member(role: str, index: int, node: int = 0) -> str:
    """An actor in the names of files and on Ray; of a server over several nodes, its follower."""
    name = f"{role.replace(' ', '-')}-{index}"
    return f"{name}-node-{node}" if node else name
