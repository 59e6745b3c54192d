"""recipe=opd and recipe=rl: the student samples at T; teachers score at T, or a reward judges."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape

from actors.config import choose_dtype, choose_engine
from cluster.build import RolloutActors, build_rollout, kill, resolve_device
from cluster.checks import RolloutInputs, check_rollout
from cluster.config_on_policy import RolloutConfig
from cluster.handles import EnginePool
from cluster.handshake import LearnerLogprobs, handshake
from cluster.outputs import RunDirectory
from cluster.recipes.common import Session, already_complete, learner_line, session
from cluster.run import Driver, drive
from cluster.tracking import agreement_table
from distill.objective import ObjectiveConfig
from distill.tokenizer import fingerprint, probe


def run_on_policy(config: RolloutConfig, console: Console) -> None:
    """Runs the recipe to its end.

    Raises:
        IsothermError, RunFailed, Interrupted: see `cluster.train`, which turns them to exit codes.
    """
    inputs = check_rollout(config)
    directory = RunDirectory(config.recipe, config)
    resume_from = directory.check()
    console.print(_plan(config, inputs, directory))
    if config.dry_run or already_complete(directory, resume_from, config, console):
        return
    with session(config, directory, resume_from, console) as running:
        run = _Run(config, inputs, running)
        try:
            run.to_the_end()
        finally:
            kill(run.actors.all.values())


def _plan(config: RolloutConfig, inputs: RolloutInputs, directory: RunDirectory) -> str:
    mode = "synchronous" if config.max_staleness == 0 else "overlapped"
    teachers = ", ".join(
        f"{name}={teacher.model} (weight {teacher.weight:g})" if name else teacher.model
        for name, teacher in config.teacher_models().items()
    )
    return (
        f"{config.recipe}: {config.student} learns from {teachers or config.reward} at "
        f"T={config.temperature:g}\n"
        f"  engine    {choose_engine(config.engine)} (dtype={config.dtype}); "
        f"{config.policy_engines} policy, {config.rollout_workers} rollout workers\n"
        f"  objective {_objective_line(config.objective())}\n"
        f"  prompts   {len(inputs.train_prompts_P)} to train on, "
        f"{len(inputs.eval_prompts_P)} held out for evaluation\n"
        f"  step      {config.prompts_per_step} prompts x {config.group_size} samples of at most "
        f"{config.max_new_tokens} tokens, {mode} (max_staleness={config.max_staleness})\n"
        f"  learner   {learner_line(config, config.student)}\n"
        f"  run       {config.steps} steps into {directory.path}"
    )


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


class _Run:
    """One run: actors, handshake, steps, evaluations."""

    def __init__(self, config: RolloutConfig, inputs: RolloutInputs, running: Session) -> None:
        self._config = config
        self._running = running
        self._fingerprint = fingerprint(inputs.tokenizer)
        self._tokenizer_probe = probe(inputs.tokenizer)
        self._device = resolve_device(config)
        self._has_eval = bool(inputs.eval_prompts_P)
        self.actors: RolloutActors = build_rollout(
            config,
            inputs,
            running.directory,
            running.resume_from,
            self._device,
        )
        self._driver = Driver(actors=self.actors.all, signals=running.signals)
        for name, follower in self.actors.learners.named_followers.items():
            self._driver.watch(name, follower.serve.remote())

    def to_the_end(self) -> None:
        actors, running = self.actors, self._running
        if self._config.lora_adapter is not None and running.resume_from is None:
            self._publish()  # the adapter, of which the engines' own checkpoint knows nothing
            self._shake_hands()
        else:
            self._shake_hands()
            self._publish()
        if self._has_eval:
            self._evaluate_teachers()
            if running.first_step == 0:
                self._evaluate("before")
        for i, worker in enumerate(actors.workers):
            self._driver.watch(f"rollout worker {i}", worker.run.remote())
        checkpoint = drive(
            driver=self._driver,
            learner=actors.learner,
            first_step=running.first_step,
            steps=self._config.steps,
            checkpoint_every=self._config.checkpoint_every,
            on_step=self._on_step,
            end_waits=actors.queue.close,
        )
        self._driver.call("the last weight probe", actors.learner.settle.remote())
        if self._has_eval:
            self._evaluate("after")
        running.complete(checkpoint)

    def _publish(self) -> None:
        learner = self.actors.learner
        way = self._driver.call("publishing the first weights", learner.publish.remote())
        self._running.progress.note(f"weights: {way}")

    def _shake_hands(self) -> None:
        """Refuses to train unless every party scores alike; writes calibration.json either way."""

        learner = self.actors.learner

        async def learner_logprobs(rows_D: Any) -> Any:
            return await learner.logprobs.remote(rows_D)

        async def copied_logprobs(teacher: str, rows_D: Any) -> Any:
            return await learner.teacher_logprobs.remote(teacher, rows_D)

        copies: dict[str, LearnerLogprobs] = {}
        if self._config.objective().estimator == "full":
            for name, engine in self.actors.first_engines.items():
                copies[engine] = partial(copied_logprobs, name)
        report = self._driver.run(
            "the handshake",
            handshake(
                policies=_named("policy", self.actors.policy),
                teachers={
                    name: EnginePool([engine]) for name, engine in self.actors.scorers.items()
                },
                learner=learner_logprobs,
                tokenizer=self._tokenizer_probe,
                temperature=self._config.temperature,
                learner_dtype=choose_dtype(self._config.learner_dtype, self._device),
                copies=copies,
            ),
            timeout=self._config.deadline_s,
        )
        self._running.directory.write_json(
            "calibration.json", report.to_json() | {"tokenizer": asdict(self._fingerprint)}
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

    def _on_step(self, metrics: dict[str, float]) -> None:
        step = int(metrics["step"])
        every = self._config.eval_every
        try:
            if self._has_eval and every and step % every == 0 and step < self._config.steps:
                metrics = metrics | self._evaluate(f"step {step}")
        finally:
            self._running.record(metrics)  # the step is trained, whatever became of its evaluation

    def _evaluate_teachers(self) -> None:
        """What there is to reach: each teacher at the same decoder, on the same prompts."""
        for name, pool in self.actors.teacher_pools.items():
            who = f"teacher {name}" if name else "teacher"
            reference = self.actors.evaluator.evaluate.remote(pool, self._config.eval_sampling())
            self._note_evaluation(who, self._driver.call(f"evaluating the {who}", reference))

    def _evaluate(self, when: str) -> dict[str, float]:
        """Accuracy at the serving decoder, KL(p_T || q_T) with a teacher; on held-out prompts."""
        started = time.perf_counter()
        evaluator, actors = self.actors.evaluator, self.actors
        decoded = evaluator.evaluate.remote(actors.policy, self._config.eval_sampling())
        reverse_kl = None
        if actors.teachers:
            reverse_kl = evaluator.reverse_kl.remote(
                actors.policy, actors.teacher_pools, self._config.train_sampling()
            )
        metrics = self._driver.call("evaluation", decoded)
        if reverse_kl is not None:
            metrics["eval/reverse_kl"] = self._driver.call("evaluation", reverse_kl)
        metrics["time/eval"] = time.perf_counter() - started
        self._note_evaluation(when, metrics)
        return metrics

    def _note_evaluation(self, when: str, metrics: dict[str, float]) -> None:
        self._running.summary[f"eval {when}"] = metrics
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._running.progress.note(f"evaluation, {when}: {shown}")


def _named(role: str, pool: EnginePool) -> dict[str, EnginePool]:
    """Each engine of a pool under the name that it has in every other message."""
    return {f"{role} engine {i}": engine for i, engine in enumerate(pool.each())}
