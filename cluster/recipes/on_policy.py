"""recipe=opd and recipe=rl: the student samples at T; teachers score at T, or a reward judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console

from cluster.base.outcomes import Interrupted, LearnerLost, RunFailed
from cluster.config.estimator import with_estimator
from cluster.config.on_policy import OpdConfig, RolloutConfig
from cluster.config.rollout_checks import RolloutInputs, check_rollout
from cluster.config.routing import with_routing_replay
from cluster.config.user_code import try_own_objective, try_user_code
from cluster.findings.finding import Setup
from cluster.findings.watch import Watch
from cluster.handles import errors
from cluster.hosts.build import RolloutCast
from cluster.placement.device_choice import with_device
from cluster.placement.engine_choice import with_engine
from cluster.placement.layout import describe_layout
from cluster.placement.places import Places
from cluster.placement.roles import teacher_roles
from cluster.queue.scoring import read_scoring
from cluster.recipes.common import (
    RunSession,
    already_complete,
    kept_line,
    learner_line,
    opened,
    placed,
    session,
    tell_dry_run,
)
from cluster.recipes.evaluations import Evaluations
from cluster.recipes.kept import kept_steps, train_on_kept
from cluster.recipes.run_handshake import RunHandshake
from cluster.run_files.best_checkpoint import check_metric
from cluster.run_files.certificate import certificate
from cluster.run_files.fork import Fork, find_fork
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.canaries import ScoredWrongly
from cluster.runtime.fleet import Fleet, trained_in
from cluster.runtime.steps import drive
from distill.envs.base import EnvDataset, Mixture
from distill.envs.single_turn import SingleTurn
from distill.errors import CheckpointError, EngineError, kind_of
from distill.objective.settings import ObjectiveConfig
from distill.records import CONSTANT_REWARD, TrainedGroups
from distill.settings import changed
from learner.checkpoint import Checkpoint
from learner.config import ShadowRule

# Longest wait of an interrupted run for its last canaries: schedulers soon kill an interrupted job.
_LAST_CANARIES_S = 30.0
# Kinds of failures that the console's last lines name.
_KINDS = 5


def run_on_policy(config: RolloutConfig, console: Console) -> None:
    """Runs the recipe to its end.

    Raises:
        IsothermError, RunFailed, Interrupted: see `cluster.train`, which turns them to exit codes.
    """
    say = partial(console.print, markup=False, highlight=False)
    device, engine = config.device, config.engine
    config, said = with_device(config)
    if said:
        say(said)
    config, said = with_engine(config)
    if said:
        say(said)
    inputs = check_rollout(config)
    if isinstance(config, OpdConfig):
        config, said = with_estimator(config)
        if said:
            say(said)
    config, said = with_routing_replay(config)
    if said:
        say(said)
    # As given: `auto` may resolve to another value where the run is resumed.
    recorded = changed(config, device=device, engine=engine)
    directory = RunDirectory(config.recipe, recorded, inputs.digests, inputs.stops)
    with opened(config, directory, say) as resume_from:
        _run_opened(config, inputs, directory, resume_from, console)


def _run_opened(
    config: RolloutConfig,
    inputs: RolloutInputs,
    directory: RunDirectory,
    resume_from: Checkpoint | None,
    console: Console,
) -> None:
    say = partial(console.print, markup=False, highlight=False)
    own_metrics = not isinstance(config.env, SingleTurn)
    check_metric(config.checkpoint.keep_best, "eval/", _measured(config, inputs), own=own_metrics)
    fork = None
    if resume_from is None:
        fork = find_fork(
            config, config.recipe, title="student", model=config.student,
            tokenizer=inputs.tokenizer, say=say,
        )  # fmt: skip
        try_own_objective(config, say)
        if config.train_from is None:
            try_user_code(config, inputs, say)
    kept = None if config.train_from is None else kept_steps(config)
    console.print(_plan(config, inputs, directory, fork))
    if config.only_plans:
        tell_dry_run(console, directory, describe_layout(config, inputs.longest_row))
    if config.only_plans or already_complete(directory, resume_from, config, console):
        return
    untrained = TrainedGroups().to_json()
    with session(config, directory, resume_from, console, fork, untrained) as running:
        if kept is not None:
            train_on_kept(config, inputs, kept, running)
            return
        with _run(config, inputs, running) as run:
            run.to_the_end()


def _held_out_line(config: RolloutConfig, inputs: RolloutInputs) -> str:
    """Number of evaluated problems, and how many of them have a prompt that is trained."""
    trained, evaluated = (
        [problems.builder(p, config.sampling.group_size).prompt_key for p in range(len(problems))]
        for problems in (inputs.train, inputs.held_out)
    )
    known = set(trained) - {None}
    both = sum(key in known for key in evaluated)
    overlap = f", {both} of them with a prompt that is trained" if both else ""
    return f"{len(evaluated)} held out for evaluation{overlap}"


def _measured(config: RolloutConfig, inputs: RolloutInputs) -> set[str]:
    """Names of an evaluation's metrics that do not depend on what an environment measures."""
    names = {"eval/response_length", "eval/eos_share"}
    if inputs.judged:
        samples = config.eval.samples
        names |= {"eval/accuracy", "eval/accuracy_low", "eval/accuracy_high"}
        names |= {f"eval/pass@{2**n}" for n in range(1, samples.bit_length()) if 2**n <= samples}
        names |= {f"eval/majority@{samples}"} if samples > 1 else set()
    return names | ({"eval/reverse_kl"} if teacher_roles(config) else set())


def _plan(
    config: RolloutConfig, inputs: RolloutInputs, directory: RunDirectory, fork: Fork | None
) -> str:
    objective = config.objective()
    sampling = config.sampling
    again = ", some of them more than once" if config.prompts_per_step > len(inputs.train) else ""
    evaluation = f"{config.eval.engines} evaluation, " if config.eval.engines else ""
    start = f"  start     {fork.described}\n" if fork else ""
    made = (
        f"engine    {config.engine} (dtype={config.dtype}); "
        f"{config.policy_engines} policy, {evaluation}{config.rollout.workers} rollout workers"
    )
    if config.train_from is not None:
        made = f"rollouts  those that {config.train_from} has kept, in its order; no engines"
    return (
        f"{config.recipe}: {config.student} learns from {_teachers(config) or config.judge} at "
        f"T={config.sampling.temperature:g}\n"
        f"  {made}\n"
        f"  objective {_objective_line(objective)}{_teacher_samples_line(config)}\n"
        f"  stops at  {inputs.stops.described(inputs.tokenizer)}\n"
        f"  problems  {len(inputs.train)} to train on{_sources(inputs.train)}, "
        f"{_held_out_line(config, inputs)}; env={type(config.env).__name__}\n"
        f"  step      {config.prompts_per_step} prompts{again} x {sampling.group_size} samples "
        f"of at most {sampling.max_new_tokens} tokens, {_mode(config)}\n"
        f"{_epochs(config, inputs)}"
        f"  learner   {learner_line(config, config.student, objective.num_substeps)}\n"
        f"{start}"
        f"  run       {config.steps} steps into {directory.path}\n"
        f"  keeps     {kept_line(config, config.student, directory.path)}"
    )


def _epochs(config: RolloutConfig, inputs: RolloutInputs) -> str:
    """Line of the plan: epochs over the problems, and evaluations."""
    size = len(inputs.train)
    through = f"{config.steps * config.prompts_per_step / size:.3g} times through" if size else ""
    evaluated = f"every {config.eval.every} steps" if config.eval.every else "before and after"
    if not len(inputs.held_out):
        evaluated = "none: no held-out problems"
    return f"  epochs    {through} the problems; evaluations: {evaluated}\n"


def _teachers(config: RolloutConfig) -> str:
    if config.teacher_moves:
        return f"itself{_following(config.teacher_rule)} (teacher=policy)"
    return ", ".join(
        f"{name}={teacher.model} (weight {teacher.weight:g})" if name else teacher.model
        for name, teacher in config.teacher_models().items()
    )


def _following(rule: ShadowRule | None) -> str:
    """Update rule of a teacher that is the student itself, for the plan."""
    if rule is None:
        return " as it trains"
    return f", renewed every {rule.every} steps" if rule.every else f", averaged by {rule.ema:g}"


def _mode(config: RolloutConfig) -> str:
    """Overlap of rollout and training, for the plan."""
    if config.queue.max_staleness == 0:
        return "synchronous (max_staleness=0)"
    if config.queue.step_rule == "in_order":
        return f"overlapped (in_order, groups_in_flight={config.window})"
    return (
        f"overlapped (due_first, groups_in_flight={config.window}, "
        f"max_staleness={config.queue.max_staleness})"
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
        clip = "" if objective.kl_clip is None else f", clipped at {objective.kl_clip:g} nats"
        how = f"{objective.estimator}{clip}"
        terms.append(f"{objective.kl_coef:g} x {objective.divergence} ({how})")
    if objective.reward_coef:
        compared = objective.advantage or f"baseline {objective.baseline}"
        terms.append(f"{objective.reward_coef:g} x reward ({compared})")
    for name in ("reference_kl_coef", "entropy_coef", "bonus_coef", "hint_bonus_coef"):
        if getattr(objective, name):
            terms.append(f"{name}={getattr(objective, name):g}")
    weighed = objective.has_advantages or objective.loss != "importance_sampling"
    loss = f", by {objective.loss}" if weighed else ""
    return f"{' + '.join(terms)}{loss}{_caution(objective)}"


def _caution(objective: ObjectiveConfig) -> str:
    """Warn of a bucket that flattens the student's distribution (measured: docs/objectives.md)."""
    flat = (
        objective.kl_coef
        and objective.divergence == "reverse_kl"
        and objective.tail == "bucket"
        and objective.support == "student"
    )
    return (
        "\n  caution   tail=bucket of the student's own likeliest tokens does not say which of the "
        "others are right:\n            watch train/entropy, or use tail=sampled or "
        "top_k_from=teacher (docs/objectives.md)"
        if flat
        else ""
    )


def _teacher_samples_line(config: RolloutConfig) -> str:
    """Line of the plan on the groups that the teacher samples; empty without any."""
    if not isinstance(config, OpdConfig):
        return ""
    parts = []
    if config.sft_steps:
        parts.append(f"the first {config.sft_steps} steps of its own samples")
    if config.sample_share:
        later = "later " if config.sft_steps else ""
        parts.append(f"{config.sample_share:.0%} of {later}groups")
    if not parts:
        return ""
    written = "; ".join(
        f"those{f' of {name}' if name else ''} are written by {address}"
        for name, address in config.text_endpoints().items()
    )
    line = f"\n  teacher   samples {', '.join(parts)}, learnt by cross-entropy"
    return f"{line}; {written}" if written else line


@contextmanager
def _run(config: RolloutConfig, inputs: RolloutInputs, running: RunSession) -> Iterator[_Run]:
    """Place the run on the cluster; all its actors are ended on exit."""
    with placed(config, running) as (device, placement):
        cast = RolloutCast(config, inputs, running.directory, device, placement)
        run = _Run(config, inputs, running, cast, placement, device)
        try:
            yield run
        finally:
            run.fleet.close()


class _Run:
    """One run: actors, handshake and steps. `drive` runs its steps."""

    def __init__(
        self,
        config: RolloutConfig,
        inputs: RolloutInputs,
        running: RunSession,
        cast: RolloutCast,
        placement: Places,
        device: str,
    ) -> None:
        self._config = config
        self._running = running
        self._tokenizer = inputs.tokenizer
        self._stops = inputs.stops
        self._handshake = RunHandshake(config, inputs.tokenizer, device, lambda: self.fleet)
        if config.only_keeps:
            running.progress.hidden = {"staleness/max"}  # nothing is ever stale
        if not inputs.judged:
            running.progress.hidden.add("reward/mean")
        self._watch = Watch(
            Setup.of(config),
            running.directory.rollouts,
            running.directory.read_steps(),
            {event["name"] for event in running.directory.read_events("finding")},
        )
        resume_from = running.resume_from
        self.fleet = Fleet(
            config=config,
            cast=cast,
            placement=placement,
            directory=running.directory,
            signals=running.signals,
            examine=self._handshake.examine,
            say=running.progress.note,
            trained=trained_in(running.resume_from),
            start_model=(
                config.student
                if config.only_keeps or resume_from is None
                else resume_from.model_dir
            ),
            found=running.found,
        )
        problems = 0 if config.only_keeps else len(inputs.held_out)
        self._evaluations = Evaluations(config, running, self.fleet, problems=problems)

    @property
    def learner(self) -> Any:
        return self.fleet.learner

    def to_the_end(self) -> None:
        fleet, running, config = self.fleet, self._running, self._config
        fleet.start(running.resume_from)
        adapter = config.lora.adapter is not None and running.resume_from is None
        if adapter or config.teacher_rule is not None:
            self._publish()  # the engines' own checkpoint does not hold these weights
            fleet.pin()
            self._shake_hands()
        else:
            self._shake_hands()
            self._publish()
        fleet.introduce_scorers()
        self._evaluations.before_steps()
        fleet.work()
        try:
            checkpoint = drive(
                self,
                fleet.driver,
                first_step=running.first_step,
                steps=config.steps,
                checkpoint_every=1 if config.only_keeps else config.checkpoint.every,
                wanted=lambda: running.best.due or self._evaluations.wants_checkpoint,
            )
            self._evaluations.finish()
        except Interrupted:
            self._ask_last_canaries()
            raise
        finally:
            self._evaluations.give_up("the run ends")
        self._settle()
        self._report_set_aside(checkpoint)
        self._evaluations.after_steps(checkpoint.step)
        self._certify()
        if config.only_keeps:
            running.kept(checkpoint.step)
        else:
            running.complete(checkpoint)

    def _report_set_aside(self, checkpoint: Checkpoint) -> None:
        """Count the groups that failed for good by kind, in summary.json and on the console."""
        set_aside = trained_in(checkpoint).set_aside
        failed = {i: why for i, why in set_aside.items() if why != CONSTANT_REWARD}
        self.fleet.report_failures(failed)  # the last status may be older
        kinds = Counter(map(kind_of, failed.values()))
        if kinds:
            self._running.summary["set_aside"] = dict(kinds.most_common())
            told = "; ".join(f"{count} x {kind}" for kind, count in kinds.most_common(_KINDS))
            self._running.progress.note(
                f"{kinds.total()} groups failed and were not trained on: {told}"
            )

    def _ask_last_canaries(self) -> None:
        """Send last canaries to every scorer after a signal, else the last groups stay unproven."""
        running = self._running
        if not running.under_way:
            return
        try:
            with self.fleet.driver.ending(_LAST_CANARIES_S):
                self.fleet.canaries.after_last(running.last_step)
        except ScoredWrongly as moved:
            running.directory.store.set_aside_after(moved.first_bad - 1)
            running.progress.note(f"{moved}: later checkpoints are renamed to *.damaged")
        except (RunFailed, EngineError, errors.RayError) as error:
            running.progress.note(f"the last canaries were not answered: {error}")

    def _certify(self) -> None:
        """Write certificate.json, and print its verdict."""
        running = self._running
        found = certificate(self._config, read_scoring(running.directory.ledger))
        if found is not None:
            running.directory.write_json("certificate.json", found)
            running.summary["certificate"] = found["verdict"]
            running.progress.note(f"certificate: {found['verdict']}")

    # calls of `drive`

    def before_step(self) -> float:
        self._evaluations.collect()
        return self.fleet.wait_for_groups()

    def on_step(self, metrics: dict[str, float]) -> None:
        step = int(metrics["step"])
        for finding in self._watch.see(metrics):
            self._running.found(finding)
        told = {"tokens_per_s": metrics["tokens_per_s"]}
        if "staleness/mean" in metrics:  # groups that the teacher samples have no staleness
            told["staleness"] = metrics["staleness/mean"]
        self._running.directory.append_event("step", step=step, **told)
        try:
            if self._running.signals.received is None:  # else no checkpoint would be made
                metrics = metrics | self._evaluations.after_step(step)
        finally:
            self._running.record(metrics)  # the step is trained even if its evaluation fails
        if self._running.signals.received is None:
            self.fleet.ask_canaries(step)

    def on_saving(self, step: int) -> None:
        self.fleet.canaries.before_checkpoint(step)
        self._running.best.saving(step)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.fleet.commit(checkpoint)
        self._running.best.saved({checkpoint.step})
        self._running.trackers.show_rollouts(self._tokenizer)

    def on_unsaved(self, error: CheckpointError, *, again: bool) -> None:
        self._running.unsaved(error, again=again)

    def recover(self, lost: LearnerLost) -> int:
        checkpoint = self.fleet.recover(lost)
        step = checkpoint.step if checkpoint else 0
        self._running.rewound()
        self._evaluations.rewound(step)
        self._watch.rewound(step)
        return step

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

    def _shake_hands(self) -> None:
        running = self._running
        self._handshake.before_steps(
            running.directory, self._stops, running.console, running.progress.note
        )
