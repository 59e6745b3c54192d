"""recipe=opd and recipe=rl: the student samples at T; teachers score at T, or a reward judges."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape

from actors.config import choose_dtype, choose_engine
from cluster.config.checks import RolloutInputs, check_rollout
from cluster.config.on_policy import KeepRollouts, RolloutConfig
from cluster.handshake.handshake import LearnerLogprobs, handshake
from cluster.hosts.build import RolloutCast
from cluster.hosts.engine_pool import EnginePool
from cluster.placement.placement_groups import Placement
from cluster.placement.roles import POLICY, REWARD, describe_layout, teacher_roles
from cluster.recipes.common import RunSession, already_complete, learner_line, placed, session
from cluster.run_files.run_directory import RunDirectory
from cluster.run_files.tracking import agreement_table
from cluster.runtime.driver import drive
from cluster.runtime.fleet import Fleet, trained_in
from cluster.runtime.turn import KlTurn
from cluster.supervision.supervise import LearnerLost
from distill.envs.base import EnvDataset, Mixture
from distill.errors import CheckpointError
from distill.handshake.comparison import CalibrationReport
from distill.objective.settings import ObjectiveConfig
from distill.rewards.model_reward import REWARD_MODEL
from distill.tokenizer import fingerprint, probe_tokenizer
from learner.checkpoint import Checkpoint

# Problems of an evaluation whose responses are kept, by keep_rollouts=; None: all of them.
_KEPT_PROBLEMS: dict[KeepRollouts, int | None] = {"every": 8, "all": None, "none": 0}


def run_on_policy(config: RolloutConfig, console: Console) -> None:
    """Runs the recipe to its end.

    Raises:
        IsothermError, RunFailed, Interrupted: see `cluster.train`, which turns them to exit codes.
    """
    inputs = check_rollout(config)
    directory = RunDirectory(config.recipe, config, inputs.digests, inputs.stops)
    resume_from = directory.check(partial(console.print, markup=False, highlight=False))
    console.print(_plan(config, inputs, directory))
    if config.dry_run:
        console.print(describe_layout(config), highlight=False)
    if config.dry_run or already_complete(directory, resume_from, config, console):
        return
    with (
        session(config, directory, resume_from, console) as running,
        _run(config, inputs, running) as run,
    ):
        run.to_the_end()


def _plan(config: RolloutConfig, inputs: RolloutInputs, directory: RunDirectory) -> str:
    mode = "synchronous" if config.max_staleness == 0 else "overlapped"
    teachers = ", ".join(
        f"{name}={teacher.model} (weight {teacher.weight:g})" if name else teacher.model
        for name, teacher in config.teacher_models().items()
    )
    return (
        f"{config.recipe}: {config.student} learns from {teachers or config.judge} at "
        f"T={config.temperature:g}\n"
        f"  engine    {choose_engine(config.engine)} (dtype={config.dtype}); "
        f"{config.policy_engines} policy, {config.rollout_workers} rollout workers\n"
        f"  objective {_objective_line(config.objective())}\n"
        f"  stops at  {inputs.stops.described(inputs.tokenizer)}\n"
        f"  problems  {len(inputs.train)} to train on{_sources(inputs.train)}, "
        f"{len(inputs.held_out)} held out for evaluation; env={type(config.env).__name__}\n"
        f"  step      {config.prompts_per_step} prompts x {config.group_size} samples of at most "
        f"{config.max_new_tokens} tokens, {mode} (max_staleness={config.max_staleness})\n"
        f"  learner   {learner_line(config, config.student)}\n"
        f"  run       {config.steps} steps into {directory.path}"
    )


def _sources(train: EnvDataset) -> str:
    """Sources, if there are several: their sizes, and their shares of the groups."""
    if not isinstance(train, Mixture):
        return ""
    total = sum(part.weight for part in train.parts)
    each = (f"{part.name} {part.size}, {part.weight / total:.0%} of groups" for part in train.parts)
    return f" ({'; '.join(each)})"


def _objective_line(objective: ObjectiveConfig) -> str:
    terms = []
    if objective.kl_coef:
        terms.append(f"{objective.kl_coef:g} x {objective.divergence} ({objective.estimator})")
    if objective.reward_coef:
        terms.append(f"{objective.reward_coef:g} x reward (baseline {objective.baseline})")
    for name in ("reference_kl_coef", "entropy_coef", "bonus_coef"):
        if getattr(objective, name):
            terms.append(f"{name}={getattr(objective, name):g}")
    return f"{' + '.join(terms)}, by {objective.loss}"


@contextmanager
def _run(config: RolloutConfig, inputs: RolloutInputs, running: RunSession) -> Iterator[_Run]:
    """Places the run on the cluster, and ends every actor of it afterwards."""
    with placed(config, running) as (device, placement):
        cast = RolloutCast(config, inputs, running.directory, device, placement)
        run = _Run(config, inputs, running, cast, placement, device)
        try:
            yield run
        finally:
            run.fleet.close()


class _Run:
    """One run: actors, handshake, steps, evaluations. What `drive` drives."""

    def __init__(
        self,
        config: RolloutConfig,
        inputs: RolloutInputs,
        running: RunSession,
        cast: RolloutCast,
        placement: Placement,
        device: str,
    ) -> None:
        self._config = config
        self._running = running
        self._tokenizer = inputs.tokenizer
        self._fingerprint = fingerprint(inputs.tokenizer)
        self._stops = inputs.stops
        self._tokenizer_probe = probe_tokenizer(inputs.tokenizer)
        self._device = device
        self._has_eval = len(inputs.held_out) > 0
        if not inputs.judged:
            running.progress.hidden.add("reward/mean")
        self._warned_of_cut = False
        self._kl_turn = KlTurn()
        resume_from = running.resume_from
        self.fleet = Fleet(
            config=config,
            cast=cast,
            placement=placement,
            directory=running.directory,
            signals=running.signals,
            examine=self._examine,
            say=running.progress.note,
            trained=trained_in(running.resume_from),
            start_model=resume_from.model_dir if resume_from else config.student,
        )

    @property
    def learner(self) -> Any:
        return self.fleet.learner

    def to_the_end(self) -> None:
        fleet, running, config = self.fleet, self._running, self._config
        fleet.start(running.resume_from)
        if config.lora_adapter is not None and running.resume_from is None:
            self._publish()  # the adapter, of which the engines' own checkpoint knows nothing
            self._shake_hands()
        else:
            self._shake_hands()
            self._publish()
        if self._has_eval:
            self._evaluate_teachers()
            if running.first_step == 0:
                self._evaluate_apart("before", step=0)
            else:
                self._recall_before()
        fleet.work()
        checkpoint = drive(
            self,
            fleet.driver,
            first_step=running.first_step,
            steps=config.steps,
            checkpoint_every=config.checkpoint_every,
            wanted=lambda: running.best.due,
        )
        self._settle()
        if self._has_eval:
            self._evaluate_apart("after", step=checkpoint.step)
        running.complete(checkpoint)

    # what `drive` asks for

    def before_step(self) -> float:
        return self.fleet.wait_for_groups()

    def on_step(self, metrics: dict[str, float]) -> None:
        step = int(metrics["step"])
        every = self._config.eval_every
        self._warn_of_cut(metrics)
        if (turned := self._kl_turn.see(metrics)) is not None:
            self._running.progress.note(turned)
        self._running.directory.append_event(
            "step",
            step=step,
            tokens_per_s=metrics["tokens_per_s"],
            staleness=metrics["staleness/mean"],
        )
        try:
            due = self._has_eval and every and step % every == 0 and step < self._config.steps
            if due and self._running.signals.received is None:  # or no checkpoint would be made
                metrics = metrics | self._evaluate(f"step {step}", step)
        finally:
            self._running.record(metrics)  # the step is trained, whatever became of its evaluation

    def _warn_of_cut(self, metrics: Mapping[str, float]) -> None:
        """Once: that most episodes end because a limit on tokens cut them off."""
        share = metrics.get("rollout/stop/length", 0.0)
        if self._warned_of_cut or share <= 0.5:
            return
        self._warned_of_cut = True
        self._running.progress.note(
            f"step {int(metrics['step'])}: {share:.0%} of the episodes were cut off, by "
            f"max_new_tokens={self._config.max_new_tokens} or the context (rollout/stop/length); "
            "raise max_new_tokens, unless this is meant"
        )

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.fleet.queue.commit(checkpoint.step, trained_in(checkpoint).watermark)
        self._running.best.saved({checkpoint.step})
        self._running.trackers.show_rollouts(self._tokenizer)

    def on_unsaved(self, error: CheckpointError) -> None:
        self._running.unsaved(error)

    def recover(self, lost: LearnerLost) -> int:
        checkpoint = self.fleet.recover(lost)
        return checkpoint.step if checkpoint else 0

    def end_waits(self) -> None:
        self.fleet.queue.close()

    def _publish(self) -> None:
        way = self.fleet.driver.call("publishing the first weights", self.learner.publish.remote())
        self._running.progress.note(f"weights: {way}")

    def _settle(self) -> None:
        try:
            self.fleet.driver.ask_learner("the last weight probe", self.learner.settle.remote())
        except LearnerLost as lost:
            self._running.progress.note(f"{lost}; its last checkpoint holds every step")

    # the handshake

    def _shake_hands(self) -> None:
        """Refuses to train unless every party scores alike; writes calibration.json either way."""
        fleet = self.fleet
        scorers: dict[str, EnginePool] = {}
        for role in fleet.scorers:
            scorers |= fleet.pool(role).each()
        report = fleet.driver.run(
            "the handshake", self._examine(fleet.pool(POLICY).each(), scorers)
        )
        self._running.directory.write_json(
            "calibration.json",
            report.to_json()
            | {"tokenizer": asdict(self._fingerprint), "stop_tokens": self._stops.to_json()},
        )
        if report.agrees:
            self._running.progress.note(
                f"handshake: all parties agree to {report.largest_gap:.1e} nats "
                f"at T={self._config.temperature:g}"
            )
            return
        self._running.console.print(agreement_table(report))
        if self._config.require_handshake:
            report.require_agreement()
        self._running.console.print(
            f"[bold red]WARNING: training although the handshake failed (require_handshake=False); "
            f"the objective is not KL(p_T || q_T)[/]. {escape(report.complaint())}"
        )

    async def _examine(
        self, policies: Mapping[str, EnginePool], scorers: Mapping[str, EnginePool]
    ) -> CalibrationReport:
        """The handshake of some engines with the learner, and with its copies of teachers."""
        learner = self.learner

        async def learner_logprobs(rows_D: Any) -> Any:
            return await learner.logprobs.remote(rows_D)

        async def copied_logprobs(teacher: str, rows_D: Any) -> Any:
            return await learner.teacher_logprobs.remote(teacher, rows_D)

        copies: dict[str, LearnerLogprobs] = {}
        if self._config.objective().estimator == "full":
            for name, role in teacher_roles(self._config).items():
                engines = [engine for engine in scorers if engine.startswith(f"{role} engine ")]
                copies |= dict.fromkeys(engines[:1], partial(copied_logprobs, name))
        return await handshake(
            policies=policies,
            teachers=scorers,
            learner=learner_logprobs,
            tokenizer=self._tokenizer_probe,
            temperature=self._config.temperature,
            learner_dtype=choose_dtype(self._config.learner_dtype, self._device),
            copies=copies,
        )

    # evaluation

    def _evaluate_teachers(self) -> None:
        """Evaluates each teacher at the same decoder, on the same prompts: the level to reach."""
        for name, role in teacher_roles(self._config).items():
            metrics = self._decoded(role, role, self._running.first_step)
            self._note_evaluation(role, metrics)
            family = f"eval/teacher={name}/" if name else "eval/teacher/"
            self._running.record_evaluation(
                {each.replace("eval/", family, 1): value for each, value in metrics.items()},
                self._running.first_step,
            )

    def _evaluate_apart(self, when: str, step: int) -> None:
        """An evaluation that no step's line has."""
        self._running.record_evaluation(self._evaluate(when, step), step)

    def _recall_before(self) -> None:
        """The evaluation before the first step, from an earlier attempt's line of it."""
        for line in self._running.directory.read_metrics():
            if line["step"] == 0 and "time/eval" in line:
                metrics = {name: value for name, value in line.items() if name != "step"}
                self._running.summary["eval before"] = metrics

    def _evaluate(self, when: str, step: int) -> dict[str, float]:
        """Accuracy at the serving decoder, KL(p_T || q_T) with a teacher; on held-out prompts."""
        started = time.perf_counter()
        metrics = self._decoded(POLICY, when, step)
        if teachers := teacher_roles(self._config):
            metrics["eval/reverse_kl"] = self.fleet.persist(
                "evaluation",
                lambda: self.fleet.evaluator.reverse_kl.remote(
                    self._pool(POLICY),
                    {name: self._pool(role) for name, role in teachers.items()},
                    self._config.train_sampling(),
                    models=self._models(),
                ),
            )
        metrics["time/eval"] = time.perf_counter() - started
        self._note_evaluation(when, metrics)
        return metrics

    def _decoded(self, role: str, when: str, step: int) -> dict[str, float]:
        """Metrics of the role's responses, some of which are kept."""
        sampling, keep = self._config.eval_sampling(), _KEPT_PROBLEMS[self._config.keep_rollouts]
        evaluation = self.fleet.persist(
            f"evaluation, {when}",
            lambda: self.fleet.evaluator.evaluate.remote(
                self._pool(role), sampling, self._models(), keep
            ),
        )
        if evaluation.responses:
            self._running.directory.append_evaluation(step, when, evaluation.responses)
        return evaluation.metrics

    def _models(self) -> dict[str, EnginePool]:
        """What environments may ask in an evaluation, besides the policy."""
        if self._config.reward_model is None:
            return {}
        return {REWARD_MODEL: self._pool(REWARD)}

    def _pool(self, role: str) -> EnginePool:
        return self.fleet.pool(role, patience_s=self._config.hang_after_s)

    def _note_evaluation(self, when: str, metrics: dict[str, float]) -> None:
        self._running.summary[f"eval {when}"] = metrics
        self._running.directory.append_event(
            "evaluation", who=when, seconds=metrics.get("time/eval")
        )
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._running.progress.note(f"evaluation, {when}: {shown}")
