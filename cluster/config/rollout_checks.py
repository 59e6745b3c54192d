"""Validation of opd and rl runs and their files, before any actor starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from actors.rollout.teacher import States
from actors.rollout.text_teacher import TextTeacher
from actors.sglang.address import is_url
from cluster.config.model_checks import (
    CheckedScorer,
    check_holds_tokenizer,
    check_model,
    check_scorer,
    check_trained,
    served_hidden_size,
)
from cluster.config.on_policy import RolloutConfig
from cluster.config.rows import digests_of, reader_of, unweighted_sources
from cluster.config.teachers import teacher_setting
from cluster.config.text_teachers import text_teachers
from distill.data.example_encoder import ExampleEncoder
from distill.data.held_out import choose_held_out
from distill.data.order import MixedPart, shares
from distill.data.row_conversion import LongRows
from distill.data.row_reader import RowReader
from distill.data.sft_rows import load_sft_rows
from distill.data.sources import Source, parse_sources
from distill.envs.base import (
    EnvConfig,
    EnvContext,
    EnvDataset,
    EnvGroupBuilder,
    Mixture,
    mixture,
    problems_of,
)
from distill.errors import ConfigError
from distill.models.head import check_head
from distill.models.loading import (
    check_served_ties,
    context_length,
    ends_of,
    vocab_size,
)
from distill.models.reward import check_reward_config
from distill.objective.batching import TrainingRow
from distill.objective.settings import ObjectiveConfig, OpdObjective
from distill.rules import get
from distill.sampling import UNSCALED
from distill.stops import StopTokens, merged
from distill.tokenizer import probe_tokenizer
from distill.types import Tokenizer, shared_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerInputs:
    """Inputs of the learner of a checked opd or rl run.

    Attributes:
        longest_row: upper bound of a training row's length, tokens.
        sft_rows_D: supervised rows of all `sft.data` sources, in order.
        sft_parts: name, number of rows and weight of each source.
    """

    tokenizer: Tokenizer
    stops: StopTokens
    longest_row: int
    sft_rows_D: list[TrainingRow]
    sft_parts: list[MixedPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInputs(LearnerInputs):
    """Inputs of all actors of a checked opd or rl run.

    Attributes:
        train: problems to train on.
        held_out: problems for evaluations.
        judged: True if rewards are meaningful for at least one problem.
        digests: digest of the rows of each setting that names files, by setting.
        text_teachers: teachers whose samples an endpoint generates, by name.
        states: request for hidden states to teachers' engines, by name of each teacher of which the
            learner has the head.
    """

    train: EnvDataset
    held_out: EnvDataset
    judged: bool
    digests: Mapping[str, str]
    text_teachers: Mapping[str, TextTeacher]
    states: Mapping[str, States]

    @property
    def of_learner(self) -> LearnerInputs:
        """Only the learner's inputs, to be sent to the learner."""
        return LearnerInputs(**shared_fields(LearnerInputs, self))


def check_rollout(config: RolloutConfig) -> RolloutInputs:
    """Read the headers of all checkpoints, their tokenizers and every prompt, and check them.

    Raises:
        ConfigError, CheckpointError, DataError: with the field or file, its value and a remedy.
    """
    config.engine.kind_on(config.cluster.device)  # raises an error if it is not installed
    student, tokenizer, own_template = check_trained(config)
    vocabulary = vocab_size(student)
    check_holds_tokenizer("student", config.model.path, vocabulary, tokenizer)
    scorers = _check_scorers(config, tokenizer)
    own = ends_of(config.model.path, tokenizer)
    ends = [own, *(scorer.ends for scorer in scorers.values())]
    stops = config.model.stops(tokenizer, ends, vocabulary)
    _check_stops(config, stops, own, tokenizer)
    for role, scorer in scorers.items():
        check_holds_tokenizer(role, scorer.model, scorer.vocab_size, tokenizer)
        _check_vocabulary(role, scorer, vocabulary)
        if role != "reference":
            _check_top(config.objective, role, scorer, vocabulary, stops.event)
    teacher_tokenizers = {
        name: _for_teacher_messages(config, scorers[teacher_setting(name)], own_template, tokenizer)
        for name in config.teacher_models()
    }
    if config.reward_model is not None:
        check_model(config.reward_model)
        check_reward_config(config.reward_model)
    read, read_sft = reader_of(config.data, config.env.row_fields), RowReader()
    long = config.data.long_rows()
    train, held_out = _load_problems(
        config, tokenizer, student, list(scorers.values()), teacher_tokenizers, read, long
    )
    read.require_columns()
    _check_evaluations(config, held_out)
    builders_P = [train.builder(p, config.sampling.group_size) for p in range(len(train))]
    _check_signal(config, train, builders_P)
    encoder = ExampleEncoder(
        tokenizer=tokenizer,
        vocab_size=vocabulary,
        max_length=context_length(student),
        stop_ids=stops.ids,
    )
    sft_rows_D, sft_parts = _load_sft(config, encoder, read_sft, long)
    longest_row = max([train.longest_row(config.sampling.max_new_tokens), *map(len, sft_rows_D)])
    states: dict[str, States] = {
        name: _check_states(config, teacher_setting(name), head, scorers, longest_row)
        for name, head in config.teacher_heads.items()
    }
    readers = {"data.source": read, "eval.source": read, "sft.data": read_sft}
    # An endpoint's samples are truncated at max_new_tokens instead.
    unlimited = replace(encoder, max_length=sys.maxsize)
    return RolloutInputs(
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        longest_row=longest_row,
        judged=any(builder.judged for builder in builders_P),
        sft_rows_D=sft_rows_D,
        sft_parts=sft_parts,
        digests=digests_of(config, readers, long),
        stops=stops,
        text_teachers=text_teachers(config, unlimited, train),
        states=states,
    )


def _check_scorers(config: RolloutConfig, tokenizer: Tokenizer) -> dict[str, CheckedScorer]:
    """Check the teachers and the reference; return them by the names of their settings."""
    named = {
        teacher_setting(name): teacher.model for name, teacher in config.teacher_models().items()
    }
    if config.model.reference is not None:
        named["reference"] = config.model.reference
    if config.engine.kind_on(config.cluster.device) == "sglang":
        for role, model in {"student": config.model.path, **named}.items():
            if not is_url(model):
                check_served_ties(role, model)
    return {role: check_scorer(role, model, tokenizer) for role, model in named.items()}


def _check_vocabulary(role: str, scorer: CheckedScorer, student_vocab: int) -> None:
    if scorer.vocab_size < student_vocab:
        raise ConfigError(
            f"{role}={scorer.model} has a vocabulary of {scorer.vocab_size}, smaller than the "
            f"student's {student_vocab}: it could not score every token that the student may "
            "sample. Resize its embeddings, or choose another pair"
        )


def _check_evaluations(config: RolloutConfig, held_out: EnvDataset) -> None:
    for name in ("eval.engines", "checkpoint.keep_best"):
        if (value := get(config, name)) and not len(held_out):
            raise ConfigError(
                f"{name}={value}: nothing is evaluated, because no problem is held out; give "
                "eval.source=, or a larger eval.size of more prompts, or leave it out"
            )


def _load_sft(
    config: RolloutConfig, encoder: ExampleEncoder, read: RowReader, long: LongRows
) -> tuple[list[TrainingRow], list[MixedPart]]:
    """Supervised rows of all `sft.data` sources, in order, and the size and weight of each."""
    rows_D, parts = [], []
    if config.sft.data is None:
        return rows_D, parts
    for source in parse_sources("sft.data", config.sft.data):
        ours = load_sft_rows(source.place, encoder, read, long)
        rows_D += ours
        parts.append(MixedPart(name=source.name, size=len(ours), weight=source.weight))
    return rows_D, parts


def _check_stops(
    config: RolloutConfig,
    stops: StopTokens,
    own: frozenset[int],
    tokenizer: Tokenizer,
) -> None:
    """Raise ConfigError if an SGLang server of the student would stop at further tokens."""
    missing = own - set(stops.ids)
    if missing and config.engine.kind_on(config.cluster.device) == "sglang":
        names = ", ".join(str(tokenizer.convert_ids_to_tokens(id_)) for id_ in sorted(missing))
        raise ConfigError(
            f"model.stop_tokens={config.model.stop_tokens} leaves out {names}, at which an SGLang "
            f"server of student={config.model.path} ends in any case; add it, change eos_token in "
            "its tokenizer_config.json and generation_config.json, or use engine=embedded"
        )


def _check_states(
    config: RolloutConfig,
    role: str,
    head: str,
    scorers: Mapping[str, CheckedScorer],
    longest_row: int,
) -> States:
    """Request for hidden states to a teacher's engines, for the teacher's head in the learner.

    Raises:
        ConfigError: the engine returns no hidden states, or not for rows of `longest_row` tokens,
            or the head does not match the engine's model.
    """
    scorer, setting = scorers[role], f"{role}.head"
    check_model(head)
    vocabulary, hidden_size = check_head(head, setting)
    served = served_hidden_size(role, scorer, longest_row)
    if (vocabulary, hidden_size) != (scorer.vocab_size, served):
        raise ConfigError(
            f"{setting}={head} has a head of {vocabulary} tokens and hidden states of "
            f"{hidden_size}, and {role}={scorer.model} has {scorer.vocab_size} and {served}; give "
            "the checkpoint that the server loaded"
        )
    if scorer.scores_at_t or config.sampling.temperature == UNSCALED:
        return "also"
    if by := config.needs_teacher_logprobs:
        raise ConfigError(
            f"{by} needs the teacher's log-probs at T={config.sampling.temperature:g}, and the "
            f"server at {role}={scorer.model} runs without isotherm's plugin: it scores given "
            "tokens at T = 1. Install isotherm where it runs, or leave it out",
            field=by.partition("=")[0],
        )
    return "only"


def _check_top(
    objective: ObjectiveConfig,
    role: str,
    teacher: CheckedScorer,
    student_vocab: int,
    event: Sequence[int],
) -> None:
    """Raise ConfigError if a teacher cannot provide the top-k log-probs of the objective.

    The tail bucket needs tokens outside the top k. Scores of given tokens need isotherm's plugin in
    a running server.
    """
    if objective.asked_of_policy and not teacher.scores_given:
        raise ConfigError(
            f"objective.top_k_from={objective.support} asks the teacher at the student's likeliest "
            f"tokens, and the server at {role}={teacher.model} runs without isotherm's plugin (or "
            "with one of another version): it returns only the log-probs of its own likeliest "
            "tokens. Install isotherm where it runs, or use top_k_from=teacher or estimator=sampled"
        )
    each = objective.asked_of_policy or objective.asked_of_teacher
    asked = objective.asked_of_policy + objective.asked_of_teacher
    if asked >= student_vocab - merged(event):
        both = f", so {asked} with top_k_from=union," if asked > each else ""
        raise ConfigError(
            f"objective.teacher_top_k={each}{both} must be below the vocabulary of "
            f"{student_vocab}: no token would be left for the tail; estimator=full uses the whole "
            "vocabulary"
        )


def _load_problems(
    config: RolloutConfig,
    tokenizer: Tokenizer,
    student: Any,
    scorers: Sequence[CheckedScorer],
    teacher_tokenizers: Mapping[str, Tokenizer],
    read: RowReader,
    long: LongRows,
) -> tuple[EnvDataset, EnvDataset]:
    """Problems to train on, and held-out problems. Each fits the context of every model."""
    rooms = [scorer.context_length for scorer in scorers]

    def load(env: EnvConfig, sources: Sequence[Source], max_new_tokens: int) -> list[EnvDataset]:
        setting = EnvContext(
            tokenizer=tokenizer,
            vocab_size=vocab_size(student),
            context_length=min([context_length(student), *rooms]),
            max_new_tokens=max_new_tokens,
            reward=config.reward.load(),
            teachers=[name for name in config.teacher_models() if name],
            teacher_context_length=min(rooms, default=None),
            read=read,
            long=long,
            teacher_tokenizers=teacher_tokenizers,
            feedback=config.feedback_template(),
        )
        places = [source.place for source in sources] or [None]
        return [problems_of(env, place, setting) for place in places]

    rollout = config.sampling.max_new_tokens
    longest = max(rollout, config.eval.sampling(rollout).max_new_tokens)
    evaluation = config.env.evaluation()
    sources = [] if config.data.source is None else parse_sources("data.source", config.data.source)
    if config.eval.source is None:
        train = load(config.env, sources, longest)
        same = evaluation is config.env
        return _hold_out(
            train, train if same else load(evaluation, sources, longest), sources, config
        )
    train = load(config.env, sources, config.sampling.max_new_tokens)
    apart = unweighted_sources("eval.source", config.eval.source)
    held_out = load(evaluation, apart, longest)
    sizes = [len(problems) for problems in held_out]
    counts = shares(sizes, _held_out_number(config.eval.size, sum(sizes), sum(sizes)))
    taken = [each.subset(range(count)) for each, count in zip(held_out, counts, strict=True)]
    return mixture(train, sources), mixture(taken, apart)


def _check_signal(
    config: RolloutConfig, train: EnvDataset, builders_P: Sequence[EnvGroupBuilder]
) -> None:
    """Raise ConfigError if the problems leave a term of the objective without a signal."""
    _check_some(config, train)
    _check_answers(config, train, builders_P)
    _check_rewards(config, builders_P)
    _check_feedback(config, train, builders_P)
    for name, teacher in config.teacher_models().items():
        its_P = [builder for builder in builders_P if builder.teacher == name]
        if not its_P:
            raise ConfigError(
                f"teachers.{name}={teacher.model} is unused: no prompt of {config.data.source} "
                "names it; leave it out"
            )
        if not any(builder.hinted for builder in its_P):
            _check_unhinted(config, teacher.model)


def _check_some(config: RolloutConfig, train: EnvDataset) -> None:
    """Raise ConfigError if there are no problems to train on, or none from one of the sources."""
    if not len(train):
        raise ConfigError(f"env={type(config.env).__name__} has no problem to train on")
    if empty := [part.name for part in train.parts if not part.size]:
        raise ConfigError(
            f"prompts={config.data.source}: {empty[0]} has no problem to train on; leave it out",
            field="data.source",
        )


def _check_answers(
    config: RolloutConfig, train: EnvDataset, builders_P: Sequence[EnvGroupBuilder]
) -> None:
    """Raise ConfigError if a prompt lacks the `answer` that a term of the objective needs."""
    objective, template = config.objective, config.feedback_template()
    terms = {
        f"objective.reward_coef={objective.reward_coef}": objective.reward_coef > 0,
        f"objective.hint_bonus_coef={objective.hint_bonus_coef}": objective.hint_bonus_coef > 0,
        "teacher.feedback= with the reward": template is not None and template.judges,
    }
    judging = [term for term, judges in terms.items() if judges]
    unjudged = (p for p, builder in enumerate(builders_P) if not builder.judged)
    if judging and (first := next(unjudged, None)) is not None:
        label = train.label(first)
        where = label if isinstance(train, Mixture) else f"{config.data.source}:{label}"
        raise ConfigError(
            f"{judging[0]} needs an `answer` with every prompt; {where} has none (columns.answer= "
            "names its column)"
        )


def _check_rewards(config: RolloutConfig, builders_P: Sequence[EnvGroupBuilder]) -> None:
    """Raise ConfigError if the problems cannot pay the rewards of the objective."""
    objective = config.objective
    bonuses = any(builder.pays_bonuses for builder in builders_P)
    if not (objective.reward_coef or objective.kl_coef or objective.hint_bonus_coef or bonuses):
        raise ConfigError(
            "objective.reward_coef=0 leaves no reward: no prompt has `bonuses`, and the "
            "environment gives no bonus; give a reward_coef"
        )
    if isinstance(objective, OpdObjective):
        objective.check_weighing(bonuses)


def _check_unhinted(config: RolloutConfig, teacher: str) -> None:
    """Raise ConfigError if a teacher with the student's own context gives no gradient."""
    objective = config.objective
    if objective.hint_bonus_coef:
        raise ConfigError(
            f"objective.hint_bonus_coef={objective.hint_bonus_coef} changes nothing: the teacher "
            "sees no hint; give teacher.feedback, or `teacher_prompt` or `teacher_messages` with "
            "each prompt"
        )
    if config.teacher.moves and config.teacher_rule is None:
        raise ConfigError(
            "teacher=policy is the student itself, at every step, and sees what the student "
            "sees: the KL and its gradient are zero. Show it more (teacher.feedback, or "
            "`teacher_prompt` or `teacher_messages` with each prompt)",
            field="teacher.model",
        )
    same = not is_url(teacher) and os.path.realpath(teacher) == os.path.realpath(config.model.path)
    fork = config.fork_from is not None and not config.teacher.moves
    if same and objective.reward_coef == 0 and not fork:
        raise ConfigError(
            f"teacher={teacher} is the student itself and sees what the student sees: the KL and "
            "its gradient are zero. Give another teacher, or show it more than the student "
            "(`teacher_prompt` or `teacher_messages` with each prompt)",
            field="teacher.model",
        )


def _check_feedback(
    config: RolloutConfig, train: EnvDataset, builders_P: Sequence[EnvGroupBuilder]
) -> None:
    """Raise ConfigError if teacher.feedback needs text that the problems lack."""
    template = config.feedback_template()
    if template is None:
        return
    if any(builder.feedback is None for builder in builders_P):
        raise ConfigError(
            "teacher.feedback replaces the prompt or the last user message, and problems of "
            f"env={type(config.env).__name__} are tokens; give `feedback` with them "
            "(distill.data.feedback.FeedbackContext), or leave it out",
            field="teacher.feedback",
        )
    mute = [train.label(p) for p, builder in enumerate(builders_P) if not builder.may_give_feedback]
    if "feedback" in template.placeholders and mute:
        raise ConfigError(
            f"teacher.feedback names {{feedback}}, and responses to {mute[0]} get no feedback "
            "text: it comes from a reward that reads the prompt's `answer` (columns.answer= "
            "names its column), not from a reward_model; leave it out",
            field="teacher.feedback",
        )


def _for_teacher_messages(
    config: RolloutConfig,
    teacher: CheckedScorer,
    own_template: object,
    run: Tokenizer,
) -> Tokenizer:
    """Tokenizer with the chat template for `teacher_messages` of a teacher.

    The template of a running server is not available. If it renders a known chat differently from
    the run's template, the returned tokenizer raises an error when it renders a chat.
    """
    if teacher.tokenizer is not None:
        return config.model.choose_teacher_template(teacher.tokenizer, own_template, run)
    if teacher.chat is None or teacher.chat == probe_tokenizer(run).chat:
        return run
    refusing = copy(run)
    refusing.chat_template = (
        "{{- raise_exception('the server at "
        + teacher.model
        + (
            " formats chats differently than the run, and its template is unknown here: give "
            "teacher_prompt, or chat_template=FILE') }}"
        )
    )
    return refusing


def _hold_out(
    problems: Sequence[EnvDataset],
    evaluated: Sequence[EnvDataset],
    sources: Sequence[Source],
    config: RolloutConfig,
) -> tuple[EnvDataset, EnvDataset]:
    """Split problems into (train, held out) by a seeded choice.

    Holds out `eval.size` problems, from each source in proportion to its size. A number (not a
    share) holds out at most a tenth of all problems. Problems with the same prompt stay together.

    Args:
        problems: problems of each source, as training uses them.
        evaluated: the same problems, as evaluations use them.
    """
    sizes = [len(each) for each in problems]
    counts = shares(sizes, _held_out_number(config.eval.size, sum(sizes), sum(sizes) // 10))
    chosen = choose_held_out(
        [_prompt_keys(i, each, config.sampling.group_size) for i, each in enumerate(problems)],
        [min(count, size - 1) for count, size in zip(counts, sizes, strict=True)],
        [[config.seed, i] for i in range(len(sizes))],
    )
    train, apart = [], []
    for each, played, held_out in zip(problems, evaluated, chosen, strict=True):
        train.append(each.subset([p for p in range(len(each)) if p not in held_out]))
        apart.append(played.subset(sorted(held_out)))
    return mixture(train, sources), mixture(apart, sources)


def _held_out_number(size: float, total: int, most: int) -> int:
    """Number of problems for `eval.size`: at most `most`, or a share of `total`, but at least 1."""
    if size >= 1:
        return min(int(size), most)
    return max(1, round(size * total)) if size else 0


def _prompt_keys(source: int, problems: EnvDataset, group_size: int) -> list[Hashable]:
    """Key of each problem's prompt; a unique key for a problem without one."""
    keys = (problems.builder(p, group_size).prompt_key for p in range(len(problems)))
    return [(source, p) if key is None else key for p, key in enumerate(keys)]
