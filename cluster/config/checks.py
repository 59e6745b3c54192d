"""Validation of settings and input files, before an actor starts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.config import choose_engine
from actors.sglang.address import is_url
from actors.sglang.external import ExternalSglangEngine
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.config.rows import digests_of, unweighted_sources
from cluster.config.supervised import (
    DpoConfig,
    RewardModelConfig,
    SftConfig,
    SupervisedConfig,
)
from distill.data.columns import Columns, CompletionColumns, PreferenceColumns, PromptColumns
from distill.data.held_out import HeldOut, Unit, hold_out
from distill.data.order import MixedPart, shares
from distill.data.preferences import load_preference_pairs, scored_row
from distill.data.row_reader import RowReader
from distill.data.sft_rows import load_sft_rows
from distill.data.sources import Source, parse_sources
from distill.engine import EngineInfo
from distill.envs.base import (
    EnvConfig,
    EnvContext,
    EnvDataset,
    EnvGroupBuilder,
    Mixture,
    Subset,
    mixture,
    problems_of,
)
from distill.errors import CheckpointError, ConfigError, EngineError
from distill.models.attention_probe import check_packs
from distill.models.loading import (
    context_length,
    ends_of,
    load_config,
    meta_causal_lm,
    train_time_noise,
    vocab_size,
)
from distill.models.reward import (
    HEAD_WEIGHT,
    check_reward_config,
    meta_reward_model,
    padding_token,
)
from distill.objective.batching import TrainingRow
from distill.objective.settings import ObjectiveConfig
from distill.settings import values_of
from distill.stops import StopTokens, hits
from distill.tokenizer import check_same_tokenizer, load_tokenizer, probe_tokenizer
from learner.export import check_export
from learner.lora import check_lora
from learner.router_balance import check_balances

Loaded = TypeVar("Loaded")

# An external teacher says who it is in far less; one that does not answer is not there.
_INTRODUCTION_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInputs:
    """A checked opd or rl run: what its actors are built from.

    `digests` are of the rows that each setting names; `sft_parts` those of `sft_data`'s sources;
    `judged` is False where no problem has anything that a reward could compare with.
    """

    tokenizer: PreTrainedTokenizerBase
    train: EnvDataset
    held_out: EnvDataset
    judged: bool
    sft_rows_D: list[TrainingRow]
    stops: StopTokens
    sft_parts: list[MixedPart]
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedInputs:
    """A checked sft, dpo or reward_model run; a pair is two rows, the chosen one first.

    `parts` are the sources, sized in rows or pairs; `digests` are of the rows of each setting;
    `padding` is a reward model's.
    """

    tokenizer: PreTrainedTokenizerBase
    rows_D: list[TrainingRow]
    stops: StopTokens
    parts: list[MixedPart]
    digests: Mapping[str, str]
    held_out: Sequence[HeldOut] = ()
    padding: int | None = None
    warning: str | None = None


def check_rollout(config: RolloutConfig) -> RolloutInputs:
    """Reads all checkpoints' headers, their tokenizers and every prompt.

    Raises:
        ConfigError, CheckpointError, DataError: with the field or file, the value and the remedy.
    """
    choose_engine(config.engine)
    student = _check_model(config.student)
    if config.packing:
        check_packs(meta_causal_lm(config.student))
    check_export(config.student)
    _check_routers(config, config.student)
    _check_adapter(config, config.student)
    tokenizer = load_tokenizer(config.student)
    own_template = tokenizer.chat_template
    tokenizer = config.choose_template(tokenizer)
    _check_holds_tokenizer("student", config.student, vocab_size(student), tokenizer)
    named = {
        f"teachers.{name}" if name else "teacher": teacher.model
        for name, teacher in config.teacher_models().items()
    }
    if config.reference is not None:
        named["reference"] = config.reference
    scorers = {role: _check_scorer(role, model, tokenizer) for role, model in named.items()}
    own = ends_of(config.student, tokenizer)
    stops = config.stops(tokenizer, [own, *(scorer.ends for scorer in scorers.values())])
    _check_stops(config, stops, own, tokenizer)
    for role, scorer in scorers.items():
        _check_holds_tokenizer(role, scorer.model, scorer.vocab_size, tokenizer)
        if scorer.vocab_size < vocab_size(student):
            raise ConfigError(
                f"{role}={scorer.model} has a vocabulary of {scorer.vocab_size}, smaller than the "
                f"student's {vocab_size(student)}: a token that the student may sample could not "
                "be scored. Resize its embeddings, or choose another pair"
            )
        if role != "reference":
            _check_top(config.objective(), role, scorer, vocab_size(student), stops.event)
    teacher_tokenizers = {
        name: _for_teacher_messages(
            config, scorers[f"teachers.{name}" if name else "teacher"], own_template, tokenizer
        )
        for name in config.teacher_models()
    }
    if config.reward_model is not None:
        _check_model(config.reward_model)
        check_reward_config(config.reward_model)
    read, read_sft = _reader(PromptColumns, config), RowReader()
    train, held_out = _load_problems(
        config, tokenizer, student, list(scorers.values()), teacher_tokenizers, read
    )
    read.require_columns()
    if config.eval_engines and not len(held_out):
        raise ConfigError(
            f"eval_engines={config.eval_engines} have nothing to evaluate: no problem is held out; "
            "give eval_prompts=, or leave it out"
        )
    _check_signal(config, train)
    sft_rows_D, sft_parts = [], []
    if config.sft_data is not None:
        sft_rows_D, sft_parts = _each_source(
            parse_sources("sft_data", config.sft_data),
            lambda place: load_sft_rows(
                place,
                tokenizer,
                vocab_size=vocab_size(student),
                max_length=context_length(student),
                stop_ids=stops.ids,
                read=read_sft,
            ),
        )
    readers = {"prompts": read, "eval_prompts": read, "sft_data": read_sft}
    return RolloutInputs(
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        judged=any(train.builder(p, config.group_size).judged for p in range(len(train))),
        sft_rows_D=sft_rows_D,
        sft_parts=sft_parts,
        digests=digests_of(config, readers),
        stops=stops,
    )


def _check_stops(
    config: RolloutConfig,
    stops: StopTokens,
    own: frozenset[int],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Raises ConfigError for a server of the student that would end elsewhere as well."""
    missing = own - set(stops.ids)
    if missing and choose_engine(config.engine) == "sglang":
        names = ", ".join(str(tokenizer.convert_ids_to_tokens(id_)) for id_ in sorted(missing))
        raise ConfigError(
            f"stop_tokens={config.stop_tokens} leaves out {names}, at which an SGLang server of "
            f"student={config.student} ends in any case; add it, change eos_token in the student's "
            "tokenizer_config.json and generation_config.json, or use engine=embedded"
        )


def _reader(columns: type[Columns], config: Any) -> RowReader:
    """A reader of rows with the run's own columns."""
    return RowReader(columns(**values_of(columns, config)))


def _each_source(
    sources: Sequence[Source], load: Callable[[str], Sequence[Loaded]]
) -> tuple[list[Loaded], list[MixedPart]]:
    """What is loaded of each source, one after another, and what of it is whose."""
    loaded, parts = [], []
    for source in sources:
        ours = load(source.place)
        loaded += ours
        parts.append(MixedPart(name=source.name, size=len(ours), weight=source.weight))
    return loaded, parts


def _check_holds_tokenizer(
    role: str, model: str, size: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    if size < len(tokenizer):
        raise ConfigError(
            f"{role}={model} has a vocabulary of {size}, smaller than the tokenizer's "
            f"{len(tokenizer)}; model and tokenizer do not belong together"
        )


def _check_top(
    objective: ObjectiveConfig,
    role: str,
    teacher: _Scorer,
    student_vocab: int,
    event: Sequence[int],
) -> None:
    """A bucket for the rest needs tokens that are not in the top, and given tokens our plugin."""
    if objective.asked_of_policy and not teacher.scores_given:
        raise ConfigError(
            f"top_k_from={objective.support} asks the teacher at the student's likeliest tokens, "
            f"and the server at {role}={teacher.model} runs without isotherm's plugin (or with one "
            "of another version): it returns the log-probs of its own likeliest alone. Install "
            "isotherm where it runs, or use top_k_from=teacher or estimator=sampled"
        )
    each = objective.asked_of_policy or objective.asked_of_teacher
    asked = objective.asked_of_policy + objective.asked_of_teacher
    if asked >= student_vocab - max(0, len(event) - 1):
        both = f", so {asked} with top_k_from=union," if asked > each else ""
        raise ConfigError(
            f"teacher_top_k={each}{both} must be below the vocabulary of {student_vocab}: nothing "
            "would be left for the tail; estimator=full takes all of it"
        )


def _load_problems(
    config: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    student: Any,
    scorers: Sequence[_Scorer],
    teacher_tokenizers: Mapping[str, PreTrainedTokenizerBase],
    read: RowReader,
) -> tuple[EnvDataset, EnvDataset]:
    """Problems to train on and held-out ones, each of which every model has room for."""
    rooms = [scorer.context_length for scorer in scorers]

    def load(env: EnvConfig, sources: Sequence[Source], max_new_tokens: int) -> list[EnvDataset]:
        setting = EnvContext(
            tokenizer=tokenizer,
            vocab_size=vocab_size(student),
            context_length=min([context_length(student), *rooms]),
            max_new_tokens=max_new_tokens,
            reward=config.reward_function(),
            teachers=[name for name in config.teacher_models() if name],
            teacher_context_length=min(rooms, default=None),
            read=read,
            teacher_tokenizers=teacher_tokenizers,
            feedback=config.feedback_template(),
        )
        places = [source.place for source in sources] or [None]
        return [problems_of(env, place, setting) for place in places]

    longest = max(config.max_new_tokens, config.longest_evaluation())
    evaluation = config.env.evaluation()
    sources = [] if config.prompts is None else parse_sources("prompts", config.prompts)
    if config.eval_prompts is None:
        train = load(config.env, sources, longest)
        same = evaluation is config.env
        return _hold_out(
            train, train if same else load(evaluation, sources, longest), sources, config
        )
    train = load(config.env, sources, config.max_new_tokens)
    apart = unweighted_sources("eval_prompts", config.eval_prompts)
    held_out = load(evaluation, apart, longest)
    sizes = [len(problems) for problems in held_out]
    counts = shares(sizes, min(sum(sizes), config.eval_size))
    taken = [Subset(each, range(count)) for each, count in zip(held_out, counts, strict=True)]
    return mixture(train, sources), mixture(taken, apart)


def _check_signal(config: RolloutConfig, train: EnvDataset) -> None:
    """Refuses problems that leave a term of the objective without anything to learn from."""
    objective = config.objective()
    builders_P = [train.builder(p, config.group_size) for p in range(len(train))]
    if not builders_P:
        raise ConfigError(f"env={type(config.env).__name__} has no problem to train on")
    several = isinstance(train, Mixture)
    if several and (empty := [part.name for part in train.parts if not part.size]):
        raise ConfigError(
            f"prompts={config.prompts}: {empty[0]} has no problem to train on; leave it out"
        )
    unjudged = [train.label(p) for p, builder in enumerate(builders_P) if not builder.judged]
    if objective.reward_coef > 0 and unjudged:
        raise ConfigError(
            f"reward_coef={objective.reward_coef} needs an `answer` with every prompt; "
            f"{unjudged[0] if several else f'{config.prompts}:{unjudged[0]}'} has none "
            "(answer_key= says which column it is)"
        )
    if objective.hint_bonus_coef > 0 and unjudged:
        raise ConfigError(
            f"hint_bonus_coef={objective.hint_bonus_coef} is for answers that are right, and "
            f"{config.prompts}:{unjudged[0]} has no `answer` (answer_key= says which column it is)"
        )
    if objective.bonus_coef > 0 and not any(builder.pays_bonuses for builder in builders_P):
        raise ConfigError(
            f"bonus_coef={objective.bonus_coef} changes nothing: no prompt of {config.prompts} has "
            "`bonuses`, and the environment pays none"
        )
    _check_feedback(config, builders_P, unjudged)
    for name, teacher in config.teacher_models().items():
        its_P = [builder for builder in builders_P if builder.teacher == name]
        if not its_P:
            raise ConfigError(
                f"teachers.{name}={teacher.model} scores nothing: no prompt of {config.prompts} "
                "names it; leave it out"
            )
        same = not is_url(teacher.model) and os.path.realpath(teacher.model) == os.path.realpath(
            config.student
        )
        hinted = any(builder.hinted for builder in its_P)
        if objective.hint_bonus_coef and not hinted:
            raise ConfigError(
                f"hint_bonus_coef={objective.hint_bonus_coef} changes nothing: the teacher sees no "
                "hint; give teacher_feedback, or `teacher_prompt` or `teacher_messages` with each "
                "prompt"
            )
        if config.teacher_moves and config.teacher_rule is None and not hinted:
            raise ConfigError(
                "teacher=policy is the student itself, at every step, and sees what the student "
                "sees: the KL and its gradient are zero. Show it more (teacher_feedback, or "
                "`teacher_prompt` or `teacher_messages` with each prompt)"
            )
        fork = config.fork_from is not None and not config.teacher_moves
        if same and not hinted and objective.reward_coef == 0 and not fork:
            raise ConfigError(
                f"teacher={teacher.model} is the student itself and sees what the student sees: "
                "the KL and its gradient are zero. Give another teacher, or show it more than the "
                "student (`teacher_prompt` or `teacher_messages` with each prompt)"
            )


def _check_feedback(
    config: RolloutConfig, builders_P: Sequence[EnvGroupBuilder], unjudged: Sequence[str]
) -> None:
    """Refuses feedback that an environment does not make, or that tells of rewards nobody gives."""
    template = config.feedback_template()
    if template is None:
        return
    if any(builder.feedback is None for builder in builders_P):
        raise ConfigError(
            f"teacher_feedback takes the place of a prompt, or of what a user said last, and "
            f"problems of env={type(config.env).__name__} are tokens; give `feedback` with them "
            "(distill.data.feedback.FeedbackContext), or leave it out"
        )
    if template.judges and unjudged:
        raise ConfigError(
            "teacher_feedback tells of the reward, and there is none without an `answer`: "
            f"{config.prompts}:{unjudged[0]} has none (answer_key= says which column it is)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scorer:
    """A teacher or a reference, by what matters before it runs.

    Attributes:
        tokenizer, ends: its own, and where it ends; None for a running server's.
        chat: what a running server's chat template makes of a known chat; None where it has none.
        scores_given: False of a running server without our plugin.
    """

    model: str
    vocab_size: int
    context_length: int
    tokenizer: PreTrainedTokenizerBase | None = None
    ends: frozenset[int] | None = None
    chat: tuple[int, ...] | None = None
    scores_given: bool = True


def _check_scorer(role: str, model: str, tokenizer: PreTrainedTokenizerBase) -> _Scorer:
    """Checks a checkpoint, or a running server; either must share the tokenizer."""
    if is_url(model):
        try:
            info = ask_server(model)
        except EngineError as error:
            raise ConfigError(f"{role}={model} does not serve: {error}") from error
        if info.tokenizer is not None and info.tokenizer.texts != probe_tokenizer(tokenizer).texts:
            raise ConfigError(
                f"student and teacher={model} do not share a tokenizer: the server encodes known "
                "texts differently. It scores the student's token ids as they are"
            )
        return _Scorer(
            model=model,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            chat=None if info.tokenizer is None else info.tokenizer.chat,
            scores_given=info.scores_given,
        )
    config, own = _check_model(model), load_tokenizer(model)
    check_same_tokenizer(tokenizer, own)
    return _Scorer(
        model=model,
        vocab_size=vocab_size(config),
        context_length=context_length(config),
        tokenizer=own,
        ends=ends_of(model, own),
    )


def _for_teacher_messages(
    config: RolloutConfig, teacher: _Scorer, own_template: object, run: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase:
    """The tokenizer whose chat template writes the teacher's `teacher_messages`.

    A running server's template is not to be had: where it writes otherwise than the run's, the
    tokenizer refuses to render any chat.
    """
    if teacher.tokenizer is not None:
        return config.choose_teacher_template(teacher.tokenizer, own_template, run)
    if teacher.chat is None or teacher.chat == probe_tokenizer(run).chat:
        return run
    refusing = copy(run)
    refusing.chat_template = (
        "{{- raise_exception('the server at " + teacher.model + " writes chats otherwise than the "
        "run, and its template is not known here: give teacher_prompt, or chat_template=FILE') }}"
    )
    return refusing


def ask_server(url: str) -> EngineInfo:
    """What a running server says of itself.

    Raises:
        ConfigError, EngineError: it is no SGLang server, or does not answer.
    """
    return asyncio.run(_ask(url))


async def _ask(url: str) -> EngineInfo:
    engine = ExternalSglangEngine(url=url, request_deadline_s=_INTRODUCTION_DEADLINE_S)
    try:
        return await engine.info()
    finally:
        await engine.close()


def check_sft(config: SftConfig) -> SupervisedInputs:
    """Reads the checkpoint's headers, the tokenizer, and every row.

    Raises:
        ConfigError, CheckpointError, DataError: with the field or file, the value and the remedy.
    """
    limits, stops, tokenizer = _limits(config)
    if config.dropout:
        _check_dropout(config)
    read = _reader(CompletionColumns, config)

    def examples(place: str) -> list[Unit]:
        rows_D = load_sft_rows(place, tokenizer, **limits, read=read)
        return [list(rows) for _, rows in groupby(rows_D, key=lambda row: row.source)]

    inputs = _supervised_inputs(config, read, examples, stops, tokenizer)
    return replace(inputs, warning=_without_end(inputs.rows_D, stops, tokenizer))


def _check_routers(
    config: CommonConfig,
    model: str,
    meta_model: Callable[[str], PreTrainedModel] = meta_causal_lm,
) -> None:
    """Raises ConfigError for a router_aux_coef that no loss of the model could be multiplied by."""
    if config.router_aux_coef < 0:
        raise ConfigError(f"router_aux_coef={config.router_aux_coef} must be 0 or above")
    if config.router_aux_coef:
        check_balances(meta_model(model))


def _check_dropout(config: SftConfig) -> None:
    """Raises ConfigError for dropout=True where it changes nothing, or cannot be."""
    noise = train_time_noise(load_config(config.model))
    if not noise:
        raise ConfigError(
            f"dropout=True changes nothing: no dropout or jitter in {config.model}/config.json is "
            "above 0. Set attention_dropout there, or leave dropout out"
        )
    if config.packing:
        raise ConfigError(
            f"packing=True with dropout=True: a model with {', '.join(noise)} above 0 keeps its "
            "own attention, which would let packed rows see one another; leave one of them out"
        )


def _supervised_inputs(
    config: SftConfig | DpoConfig | RewardModelConfig,
    read: RowReader,
    load: Callable[[str], Sequence[Unit]],
    stops: StopTokens,
    tokenizer: PreTrainedTokenizerBase,
) -> SupervisedInputs:
    """The rows to train on, and the held-out ones.

    Args:
        read: reads all sources, for `load`, which returns the units of one.
    """
    rows_D: list[TrainingRow] = []
    parts: list[MixedPart] = []
    held_out: list[HeldOut] = []
    for number, source in enumerate(parse_sources("data", config.data)):
        units = load(source.place)
        if config.validation_share is not None:
            units, apart = _hold_out_rows(config, config.validation_share, source, number, units)
            held_out.append(HeldOut(name=source.name, rows_D=list(chain.from_iterable(apart))))
        ours = list(chain.from_iterable(units))
        rows_D += ours
        size = len(ours) // config.rows_per_unit
        parts.append(MixedPart(name=source.name, size=size, weight=source.weight))
    if config.validation is not None:
        held_out = _validation_rows(config, config.validation, load)
    read.require_columns()
    return SupervisedInputs(
        tokenizer=tokenizer,
        rows_D=rows_D,
        parts=parts,
        held_out=held_out,
        digests=digests_of(config, {"data": read, "validation": read}),
        stops=stops,
    )


def _hold_out_rows(
    config: SupervisedConfig, share: float, source: Source, number: int, units: Sequence[Unit]
) -> tuple[Sequence[Unit], Sequence[Unit]]:
    """(trained, held out) of one source; raises ConfigError where nothing can be held out."""
    trained, apart = hold_out(units, share, seed=config.seed, source=number)
    if not apart:
        raise ConfigError(
            f"validation_share={share:g} of the {len(units)} rows of {source.place} is less than "
            "its prompt with the fewest rows has, and a prompt's rows stay together; give a larger "
            "share, or validation=FILE"
        )
    return trained, apart


def _validation_rows(
    config: SftConfig | DpoConfig | RewardModelConfig,
    validation: str,
    load: Callable[[str], Sequence[Unit]],
) -> list[HeldOut]:
    """The rows of each source of `validation`; raises ConfigError for one that is trained on."""
    trained = {source.place for source in parse_sources("data", config.data)}
    held_out = []
    for source in unweighted_sources("validation", validation):
        if source.place in trained:
            raise ConfigError(
                f"validation={validation}: {source.place} is in data= as well, and what is trained "
                "on is not held out; give another file, or validation_share=0.05"
            )
        rows_D = list(chain.from_iterable(load(source.place)))
        held_out.append(HeldOut(name=source.name, rows_D=rows_D))
    return held_out


def _without_end(
    rows_D: Sequence[TrainingRow], stops: StopTokens, tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """A warning where rows train no token at which a server of the model would stop."""
    endless = [row for row in rows_D if not hits(row.tokens_T[row.loss_mask_T], stops.ids).any()]
    if not endless:
        return None
    said_T = endless[0].tokens_T[endless[0].loss_mask_T]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = said_T[hits(said_T, [id_ for id_, token in added.items() if token.special])]
    ending = str(tokenizer.convert_ids_to_tokens(int(special[-1]))) if len(special) else "TOKEN"
    return (
        f"{len(endless)} of {len(rows_D)} rows ({endless[0].source} first) train no token at which "
        f"a server of the model stops ({stops.described(tokenizer)}), so it would talk on; give "
        f"stop_tokens='{ending}', what ends a turn in its chats"
    )


def check_dpo(config: DpoConfig) -> SupervisedInputs:
    """Reads the checkpoints' headers, the tokenizer, and every pair.

    Raises:
        ConfigError, CheckpointError, DataError: with the field or file, the value and the remedy.
    """
    limits, stops, tokenizer = _limits(config)
    if config.reference is not None:
        reference = _check_scorer("reference", config.reference, tokenizer)
        _check_holds_tokenizer("reference", config.reference, reference.vocab_size, tokenizer)
        if reference.context_length < limits["max_length"]:
            raise ConfigError(
                f"reference={config.reference} has a context of {reference.context_length}, "
                f"shorter than max_length={limits['max_length']}; lower max_length"
            )
    return _pair_inputs(config, limits, stops, tokenizer)


def check_reward_model(config: RewardModelConfig) -> SupervisedInputs:
    """Reads the checkpoint's headers, the tokenizer, and every pair.

    Raises:
        ConfigError, CheckpointError, DataError: with the field or file, the value and the remedy.
    """
    meta_reward_model(config.model)
    limits, stops, tokenizer = _limits(config, meta_reward_model, fresh=(HEAD_WEIGHT,))
    # A token more goes behind each row: see `scored_row`.
    context = context_length(load_config(config.model))
    limits["max_length"] = min(limits["max_length"], context - 1)
    inputs = _pair_inputs(config, limits, stops, tokenizer)
    rows = chain(inputs.rows_D, *(source.rows_D for source in inputs.held_out))
    lasts = {int(row.tokens_T[-1]) for row in rows}.union(stops.ids)
    padding = padding_token(tokenizer, limits["vocab_size"], lasts)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    tokenizer.padding_side = "right"
    return replace(
        inputs,
        padding=padding,
        rows_D=[scored_row(row, padding) for row in inputs.rows_D],
        held_out=[
            replace(source, rows_D=[scored_row(row, padding) for row in source.rows_D])
            for source in inputs.held_out
        ],
    )


def _pair_inputs(
    config: DpoConfig | RewardModelConfig,
    limits: Mapping[str, Any],
    stops: StopTokens,
    tokenizer: PreTrainedTokenizerBase,
) -> SupervisedInputs:
    """The pairs of a dpo or reward_model run; `limits` are the loader's."""
    read = _reader(PreferenceColumns, config)

    def pairs(place: str) -> list[Unit]:
        found = load_preference_pairs(place, tokenizer, **limits, read=read)
        return [(pair.chosen, pair.rejected) for pair in found]

    return _supervised_inputs(config, read, pairs, stops, tokenizer)


def _limits(
    config: SupervisedConfig,
    meta_model: Callable[[str], PreTrainedModel] = meta_causal_lm,
    fresh: Collection[str] = (),
) -> tuple[dict[str, Any], StopTokens, PreTrainedTokenizerBase]:
    """Limits of the model, as arguments for the loaders of supervised data; where it ends; its
    tokenizer. `meta_model` and `fresh` are as `check_export` takes them."""
    model = _check_model(config.model)
    if config.packing:
        check_packs(meta_model(config.model))
    check_export(config.model, meta_model, fresh)
    _check_routers(config, config.model, meta_model)
    _check_adapter(config, config.model)
    limit = context_length(model)
    if config.max_length is not None:
        if not 2 <= config.max_length <= limit:
            raise ConfigError(
                f"max_length={config.max_length} must be between 2 and the model's context, {limit}"
            )
        limit = config.max_length
    # Supervised tokens are trained as they are: each is an outcome of its own.
    tokenizer = config.choose_template(load_tokenizer(config.model))
    stops = config.stops(tokenizer, [ends_of(config.model, tokenizer)])
    limits = {"vocab_size": vocab_size(model), "max_length": limit, "stop_ids": stops.ids}
    return limits, replace(stops, one_event=False), tokenizer


def _hold_out(
    problems: Sequence[EnvDataset],
    evaluated: Sequence[EnvDataset],
    sources: Sequence[Source],
    config: RolloutConfig,
) -> tuple[EnvDataset, EnvDataset]:
    """(train, held out): a seeded choice of at most eval_size problems and a tenth of them all.

    Of each source as many as its size asks for. `evaluated` are the same problems, as evaluations
    play them.
    """
    sizes = [len(each) for each in problems]
    counts = shares(sizes, min(config.eval_size, sum(sizes) // 10))
    train, apart = [], []
    for i, (each, played, count) in enumerate(zip(problems, evaluated, counts, strict=True)):
        order = np.random.default_rng([config.seed, i]).permutation(len(each)).tolist()
        held_out = set(order[: min(count, len(each) - 1)])
        train.append(Subset(each, [p for p in range(len(each)) if p not in held_out]))
        apart.append(Subset(played, sorted(held_out)))
    return mixture(train, sources), mixture(apart, sources)


def _shards(directory: Path) -> list[str]:
    """Files that a sharded checkpoint's index names; none where there is no index."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is unreadable: {error}") from error


def _check_adapter(config: CommonConfig, base: str) -> None:
    """Raises ConfigError, or CheckpointError, if the run's adapter does not fit its base."""
    if config.trains_adapter:
        check_lora(config, base)


def _check_model(path: str) -> Any:
    """The model's config; in a local directory, each weights file's header is checked first."""
    config = load_config(path)
    directory = Path(path)
    if directory.is_dir():
        files = sorted(directory.glob("*.safetensors"))
        for shard in _shards(directory):
            if not (directory / shard).is_file():
                raise CheckpointError(f"{path} lacks {shard}, which its index names; copy it again")
        if not files and not list(directory.glob("pytorch_model*.bin")):
            raise CheckpointError(f"{path} holds no weights (no *.safetensors file)")
        for file in files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    tensors.keys()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is corrupt or cut short: {error}") from error
    return config
