"""recipe=opd and recipe=rl: the student samples at T; teachers score at T, or a reward judges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from cluster.config.estimator import state_bytes
from cluster.config.on_policy import RolloutConfig
from cluster.config.rollout_checks import RolloutInputs
from cluster.config.routing import with_routing_replay
from cluster.config.teachers import teacher_setting
from cluster.config.user_code import try_own_objective, try_user_code
from cluster.hosts.build import RolloutCast
from cluster.hosts.learners import kept_learners
from cluster.placement.checked import checked
from cluster.placement.places import Places
from cluster.placement.push_plan import adapter_push
from cluster.recipes.context import RunContext
from cluster.recipes.evaluations import Evaluations
from cluster.recipes.opening import opened
from cluster.recipes.plan import NoEvaluations, RunPlan, kept_line, learner_line
from cluster.run_files.fork import Fork, find_fork
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.fleet import Fleet
from cluster.runtime.learner_alone import LearnerAlone
from cluster.runtime.run_handshake import RunHandshake
from cluster.store.replay_log import KeptSteps
from distill.envs.base import EnvDataset, Mixture
from distill.errors import ConfigError
from distill.gpu import readable
from distill.models.loading import load_config, vocab_size
from distill.objective.settings import ObjectiveConfig
from distill.records import TrainedGroups
from distill.settings import changed
from distill.types import TrajectoryGroup
from learner.checkpoint import Checkpoint, trained_in
from learner.config import ShadowRule

# Field of a segment that an estimator reads; estimator=full uses a teacher in the learner.
_SCORES = {"sampled": "teacher_logprobs_T", "top_k": "teacher_top"}


@contextmanager
def prepared(config: RolloutConfig, console: Console) -> Iterator[RunPlan]:
    """Check the run and print its plan.

    Raises:
        IsothermError: the run cannot work with these settings.
    """
    print_line = partial(console.print, highlight=False)
    device, engine = config.cluster.device, config.engine.kind
    config, inputs = checked(config, print_line)
    config, notice = with_routing_replay(config)
    if notice:
        print_line(notice)
    if notice := adapter_push(config):
        print_line(notice)
    # As given: `auto` may resolve to another value in a resumed run.
    recorded = changed(config, device=device, engine=engine)
    directory = RunDirectory(recorded, inputs.digests, inputs.stops)
    with opened(config, directory, print_line) as resume_from:
        yield _planned(config, inputs, directory, resume_from, console)


def _planned(
    config: RolloutConfig,
    inputs: RolloutInputs,
    directory: RunDirectory,
    resume_from: Checkpoint | None,
    console: Console,
) -> RunPlan:
    print_line = partial(console.print, highlight=False)
    config.check_keep_best(judged=inputs.judged)
    fork = None
    if resume_from is None:
        fork = find_fork(config, tokenizer=inputs.tokenizer, print_line=print_line)
        try_own_objective(config, print_line)
        if config.train_from is None:
            try_user_code(config, inputs, print_line)
    parts = partial(_parts, config, inputs)
    if config.train_from is not None:
        parts = partial(_parts_on_kept, config, inputs, kept_steps(config, resume_from))
    console.print(_plan(config, inputs, directory, fork))
    return RunPlan(
        config=config,
        tokenizer=inputs.tokenizer,
        longest_row=inputs.longest_row,
        directory=directory,
        resume_from=resume_from,
        fork=fork,
        untrained=TrainedGroups().to_json(),
        parts=parts,
    )


def _parts(
    config: RolloutConfig, inputs: RolloutInputs, context: RunContext, places: Places
) -> tuple[Fleet, NoEvaluations]:
    directory, print_line = context.directory, context.progress.note
    if config.only_keeps:
        context.progress.hidden.add("staleness/max")  # groups are never stale
    if not inputs.judged:
        context.progress.hidden.add("reward/mean")
    context.start_detectors(config)
    holds_base = config.only_keeps or config.weights.transport == "adapter"
    start = None if holds_base else context.resume_from
    fleet = Fleet(
        cast=RolloutCast(config, inputs, directory, places),
        signals=context.signals,
        handshake=RunHandshake(config, inputs, directory, context.console, print_line),
        print_line=print_line,
        trained=trained_in(context.resume_from),
        start_model=config.model.path if start is None else start.model_dir,
        found=context.found,
    )
    if config.only_keeps or not len(inputs.held_out):
        return fleet, NoEvaluations()
    return fleet, Evaluations(config, context, fleet)


def _parts_on_kept(
    config: RolloutConfig,
    inputs: RolloutInputs,
    kept: KeptSteps,
    context: RunContext,
    places: Places,
) -> tuple[LearnerAlone, NoEvaluations]:
    """Parts of a run on kept steps, in their order; nothing is sampled, pushed or evaluated."""
    context.progress.hidden.add("staleness/max")  # versions are those of the run that sampled
    make = partial(kept_learners, config, inputs, kept, context.directory, places)
    learner = LearnerAlone(
        config, places, make, context.directory, context.signals, context.progress.note
    )
    return learner, NoEvaluations()


def _held_out_line(config: RolloutConfig, inputs: RolloutInputs) -> str:
    """Line of the plan: evaluated problems, and how many of their prompts are also trained."""
    trained, evaluated = (
        [problems.builder(p, config.sampling.group_size).prompt_key for p in range(len(problems))]
        for problems in (inputs.train, inputs.held_out)
    )
    known = set(trained) - {None}
    both = sum(key in known for key in evaluated)
    overlap = f", {both} of them with a prompt that is trained" if both else ""
    return f"{len(evaluated)} held out for evaluation{overlap}"


def _plan(
    config: RolloutConfig, inputs: RolloutInputs, directory: RunDirectory, fork: Fork | None
) -> str:
    objective = config.objective
    sampling = config.sampling
    again = ", some of them more than once" if config.data.batch_size > len(inputs.train) else ""
    evaluation = f"evaluation engines: {config.eval.engines}, " if config.eval.engines else ""
    start = f"  start     {fork.described}\n" if fork else ""
    sampled = (
        f"  problems  {len(inputs.train)} to train on{_sources(inputs.train)}, "
        f"{_held_out_line(config, inputs)}; env={type(config.env).__name__}\n"
        f"  step      {config.data.batch_size} prompts{again} x {sampling.group_size} samples "
        f"of at most {sampling.max_new_tokens} tokens, {_mode(config)}\n"
        f"{_epochs(config, inputs)}"
    )
    made = (
        f"engine    {config.engine.kind} (dtype={config.engine.dtype}); "
        f"policy engines: {config.policy.engines}, {evaluation}"
        f"rollout workers: {config.rollout.workers}"
    )
    if config.train_from is not None:
        made = (
            f"rollouts  the groups that {config.train_from} kept, in its order; without engines, "
            "so without evaluations (evaluate final/ with python -m cluster.evaluate)"
        )
        sampled = ""
    return (
        f"{config.recipe}: {config.model.path} learns from {_teachers(config) or config.judge} at "
        f"T={config.sampling.temperature:g}\n"
        f"  {made}\n"
        f"  objective {_objective_line(objective)}{_teacher_samples_line(config)}\n"
        f"{_states_lines(config, inputs)}"
        f"  stops at  {inputs.stops.described(inputs.tokenizer)}\n"
        f"{sampled}"
        f"  learner   {learner_line(config, objective.num_substeps)}\n"
        f"{start}"
        f"  run       {config.steps} steps into {directory.path}\n"
        f"  keeps     {kept_line(config, directory.path)}"
    )


def _states_lines(config: RolloutConfig, inputs: RolloutInputs) -> str:
    """Lines of the plan: bytes of hidden states of teachers with only their head in the learner."""
    lines = ""
    for name, path in config.teacher_heads.items():
        each, step = state_bytes(config, path)
        alone = ""
        if inputs.states[name] == "only":
            alone = "; its server has no plugin and sends them as text, which is many times larger"
        lines += (
            f"  states    of {name or 'the teacher'}, {each:,} bytes a trained token, at most "
            f"{readable(step)} a step; the learner has the head of {path}{alone}\n"
        )
    return lines


def _epochs(config: RolloutConfig, inputs: RolloutInputs) -> str:
    """Line of the plan: epochs over the problems, and evaluations."""
    size = len(inputs.train)
    through = f"{config.steps * config.data.batch_size / size:.3g} times through" if size else ""
    evaluated = f"every {config.eval.every} steps" if config.eval.every else "before and after"
    if config.only_keeps:
        evaluated = "none: nothing is trained"
    elif not len(inputs.held_out):
        evaluated = "none: no held-out problems"
    return f"  epochs    {through} the problems; evaluations: {evaluated}\n"


def _teachers(config: RolloutConfig) -> str:
    if config.teacher.moves:
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
    if config.only_keeps:
        return f"groups_in_flight={config.window}"
    if config.queue.max_staleness == 0:
        return "synchronous (max_staleness=0)"
    return (
        f"overlapped (groups_in_flight={config.window}, max_staleness={config.queue.max_staleness})"
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
        terms.append(f"{objective.reward_coef:g} x reward (baseline {objective.baseline})")
    for name in ("reference_kl_coef", "entropy_coef", "hint_bonus_coef"):
        if getattr(objective, name):
            terms.append(f"{name}={getattr(objective, name):g}")
    weighed = objective.has_advantages or objective.loss != "importance_sampling"
    loss = f", by {objective.loss}" if weighed else ""
    return f"{' + '.join(terms)}{loss}"


def _teacher_samples_line(config: RolloutConfig) -> str:
    """Line of the plan on the groups that the teacher samples; empty without any."""
    parts = []
    if config.teacher.sft_steps:
        parts.append(f"all groups of steps 1 to {config.teacher.sft_steps}")
    if config.teacher.sample_share:
        later = "later " if config.teacher.sft_steps else ""
        parts.append(f"{config.teacher.sample_share:.0%} of {later}groups")
    if not parts:
        return ""
    written = "; ".join(
        f"{address} writes those{f' of {name}' if name else ''}"
        for name, address in config.text_endpoints().items()
    )
    line = f"\n  teacher   samples {', '.join(parts)}, trained by cross-entropy"
    return f"{line}; {written}" if written else line


def _check_scores(config: RolloutConfig, groups: Iterable[TrajectoryGroup]) -> None:
    """Raise ConfigError if the objective reads scores that the kept groups lack.

    Also if they have scores of another number of tokens.
    """
    objective, read = config.objective, dict[str, str]()
    asked = objective.asked_of_policy + objective.asked_of_teacher
    if objective.kl_coef and (scores := _SCORES.get(objective.estimator)) is not None:
        read[scores] = f"objective.estimator={objective.estimator}"
    if needs := config.needs_teacher_logprobs:
        read["teacher_logprobs_T"] = needs
    if config.scored_by_reference:
        given = f"objective.reference_kl_coef={objective.reference_kl_coef:g}"
        read["reference_logprobs_T"] = given
    for segment in (each for group in groups if not group.by_teacher for each in group.segments()):
        for scores, setting in read.items():
            if getattr(segment, scores) is None:
                raise ConfigError(
                    f"{setting} reads scores that groups of train_from={config.train_from} do not "
                    f"have ({scores}); give the value of the run that kept them",
                    field=setting.partition("=")[0],
                )
        top = segment.teacher_top if "teacher_top" in read else None
        if top is not None and top.ids_NK.shape[1] != asked:
            raise ConfigError(
                f"objective.teacher_top_k={objective.teacher_top_k} with top_k_from="
                f"{objective.top_k_from} compares {asked} tokens at each action; groups of "
                f"train_from={config.train_from} have the teacher's log-probs of "
                f"{top.ids_NK.shape[1]}: give the values of the run that kept them"
            )


def _check_teachers(config: RolloutConfig, groups: Iterable[TrajectoryGroup]) -> None:
    """Raise ConfigError if kept groups are of a teacher that this run does not have."""
    known = config.teacher_models()
    if missing := sorted({group.teacher for group in groups} - known.keys()):
        named = [teacher_setting(name) for name in missing]
        raise ConfigError(
            f"train_from={config.train_from} has groups of {', '.join(named)}, and this run has "
            f"{', '.join(map(teacher_setting, known))}; give those of the run that kept them",
            field=f"{named[0]}.model",
        )


def kept_steps(config: RolloutConfig, resume_from: Checkpoint | None) -> KeptSteps:
    """Steps in `train_from=`. Steps that are still to be trained are read and checked.

    Raises:
        ConfigError: there are no steps, or too few; their temperature, vocabulary or teacher
            differs;
            they lack scores that the objective reads; or steps before `resume_from` are not those
            that the checkpoint was trained on.
    """
    kept = KeptSteps(Path(config.train_from or ""))
    if not kept.steps:
        raise ConfigError(
            f"train_from={config.train_from} has no kept steps (groups/step-*.arrow); give the "
            "out= of a run with keep=N, or with rollout_only=True"
        )
    if config.steps > len(kept.steps):
        raise ConfigError(
            f"steps={config.steps} is more than the {len(kept.steps)} that "
            f"train_from={config.train_from} holds; give steps={len(kept.steps)} at most"
        )
    done, trained = resume_from.step if resume_from else 0, trained_in(resume_from)
    before = kept.steps[:done]
    if before and not all(group.group_id in trained for group in kept.groups(before[-1])):
        raise ConfigError(
            f"train_from={config.train_from} no longer keeps the {done} steps that this run has "
            "trained on, because that run has continued. Choose another out="
        )
    size = vocab_size(load_config(config.model.path))
    for step in kept.steps[done : config.steps]:
        _check_kept(config, kept.groups(step), size)
    return kept


def _check_kept(config: RolloutConfig, groups: Sequence[TrajectoryGroup], size: int) -> None:
    """Raise ConfigError for groups of a kept step that this run cannot train on.

    Args:
        size: size of the student's vocabulary.
    """
    if config.teacher_models():
        _check_teachers(config, groups)
    _check_scores(config, groups)
    for segment in (segment for group in groups for segment in group.segments()):
        if segment.temperature != config.sampling.temperature:
            raise ConfigError(
                f"temperature={config.sampling.temperature:g}, but the groups of "
                f"train_from={config.train_from} were sampled and scored at "
                f"{segment.temperature:g}; give that temperature",
                field="sampling.temperature",
            )
        if (largest := int(segment.tokens_T.max())) >= size:
            raise ConfigError(
                f"groups of train_from={config.train_from} contain the token {largest}, but the "
                f"vocabulary of student={config.model.path} is {size}; give the student that "
                "sampled them, or a model of its family",
                field="train_from",
            )
