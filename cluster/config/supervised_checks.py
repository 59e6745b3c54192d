"""Validation of sft, dpo and reward_model runs and their files, before an actor starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from transformers.modeling_utils import PreTrainedModel

from cluster.config.model_checks import (
    check_holds_tokenizer,
    check_scorer,
    check_trained,
)
from cluster.config.rows import digests_of, reader_of, unweighted_sources
from cluster.config.supervised import DpoConfig, RewardModelConfig, SftConfig, SupervisedConfig
from distill.data.example_encoder import ExampleEncoder
from distill.data.held_out import ExampleRows, HeldOut, hold_out, unit_keys
from distill.data.order import MixedPart
from distill.data.preferences import load_preference_pairs, scored_row
from distill.data.row_conversion import LongRows
from distill.data.row_reader import RowReader
from distill.data.sft_rows import load_sft_rows
from distill.data.sources import Source, parse_sources
from distill.errors import ConfigError
from distill.models.loading import (
    context_length,
    ends_of,
    load_config,
    meta_causal_lm,
    vocab_size,
)
from distill.models.reward import HEAD_WEIGHT, meta_reward_model, padding_token
from distill.objective.batching import TrainingRow
from distill.stops import StopTokens, hits
from distill.types import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedInputs:
    """Inputs of a checked sft, dpo or reward_model run.

    Attributes:
        rows_D: rows to train on. A pair is two consecutive rows, the chosen one first.
        parts: name, size in rows or pairs, and weight of each source.
        digests: digest of the rows of each setting that names files, by setting.
        held_out: held-out rows of each source.
        overlap: number of held-out rows or pairs whose prompt is also trained on.
        padding: padding token of a reward model.
        warning: message for the user.
    """

    tokenizer: Tokenizer
    rows_D: list[TrainingRow]
    stops: StopTokens
    parts: list[MixedPart]
    digests: Mapping[str, str]
    held_out: Sequence[HeldOut] = ()
    overlap: int = 0
    padding: int | None = None
    warning: str | None = None

    def longest_rows(self, rows_per_unit: int) -> int:
        """Tokens of the longest unit: `rows_per_unit` rows, each padded to the longest row."""
        held_out = (source.rows_D for source in self.held_out)
        return rows_per_unit * max(map(len, chain(self.rows_D, *held_out)))


def check_sft(config: SftConfig) -> SupervisedInputs:
    """Read and check the checkpoint's headers, the tokenizer, and every row.

    Raises:
        ConfigError, CheckpointError, DataError: with the field or file, the value and the remedy.
    """
    encoder, stops = _encoder(config)
    inputs = _supervised_inputs(config, encoder, stops, _examples)
    return replace(inputs, warning=_without_end(inputs.rows_D, stops, encoder.tokenizer))


def check_dpo(config: DpoConfig) -> SupervisedInputs:
    """Read and check the checkpoints' headers, the tokenizer, and every pair.

    Raises:
        ConfigError, CheckpointError, DataError: with the field or file, the value and the remedy.
    """
    encoder, stops = _encoder(config)
    if config.model.reference is not None:
        tokenizer = encoder.tokenizer
        reference = check_scorer("reference", config.model.reference, tokenizer)
        check_holds_tokenizer("reference", config.model.reference, reference.vocab_size, tokenizer)
        if reference.context_length < encoder.max_length:
            raise ConfigError(
                f"reference={config.model.reference} has a context of {reference.context_length}, "
                f"shorter than max_length={encoder.max_length}; lower max_length",
                field="data.max_length",
            )
    return _supervised_inputs(config, encoder, stops, _pairs)


def check_reward_model(config: RewardModelConfig) -> SupervisedInputs:
    """Read and check the checkpoint's headers, the tokenizer, and every pair.

    Raises:
        ConfigError, CheckpointError, DataError: with the field or file, the value and the remedy.
    """
    meta_reward_model(config.model.path)
    encoder, stops = _encoder(config, meta_reward_model, fresh=(HEAD_WEIGHT,))
    # `scored_row` appends a token to each row.
    context = context_length(load_config(config.model.path))
    encoder = replace(encoder, max_length=min(encoder.max_length, context - 1))
    inputs = _supervised_inputs(config, encoder, stops, _pairs)
    rows = chain(inputs.rows_D, *(source.rows_D for source in inputs.held_out))
    lasts = {int(row.tokens_T[-1]) for row in rows}.union(stops.ids)
    tokenizer = encoder.tokenizer
    padding = padding_token(tokenizer, encoder.vocab_size, lasts)
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


def _examples(
    place: str, encoder: ExampleEncoder, read: RowReader, long: LongRows
) -> list[ExampleRows]:
    """Units of a source for sft: the rows of each example."""
    rows_D = load_sft_rows(place, encoder, read, long)
    return [list(rows) for _, rows in groupby(rows_D, key=lambda row: row.source)]


def _pairs(
    place: str, encoder: ExampleEncoder, read: RowReader, long: LongRows
) -> list[ExampleRows]:
    """Units of a source for dpo and reward_model: the two rows of each pair."""
    found = load_preference_pairs(place, encoder, read, long)
    return [(pair.chosen, pair.rejected) for pair in found]


def _supervised_inputs(
    config: SftConfig | DpoConfig | RewardModelConfig,
    encoder: ExampleEncoder,
    stops: StopTokens,
    units_of: Callable[[str, ExampleEncoder, RowReader, LongRows], list[ExampleRows]],
) -> SupervisedInputs:
    """Load the rows to train on, and the held-out rows; `units_of` loads a source."""
    read, long = reader_of(config.data, config.row_fields), config.data.long_rows()

    def load(place: str) -> list[ExampleRows]:
        return units_of(place, encoder, read, long)

    rows_D: list[TrainingRow] = []
    parts: list[MixedPart] = []
    held_out: list[HeldOut] = []
    sources = parse_sources("data.source", config.data.source)
    units_by_source = [load(source.place) for source in sources]
    if config.eval.size:
        units_by_source, held_out = _hold_out_rows(config, sources, units_by_source)
    overlap = 0
    if config.eval.source is not None:
        held_out, overlap = _rows_apart(config, config.eval.source, load, units_by_source)
    for source, units in zip(sources, units_by_source, strict=True):
        ours = list(chain.from_iterable(units))
        rows_D += ours
        size = len(ours) // config.rows_per_unit
        parts.append(MixedPart(name=source.name, size=size, weight=source.weight))
    read.require_columns()
    return SupervisedInputs(
        tokenizer=encoder.tokenizer,
        rows_D=rows_D,
        parts=parts,
        held_out=held_out,
        overlap=overlap,
        digests=digests_of(config, {"data.source": read, "eval.source": read}, long),
        stops=stops,
    )


def _hold_out_rows(
    config: SupervisedConfig,
    sources: Sequence[Source],
    units_by_source: Sequence[Sequence[ExampleRows]],
) -> tuple[list[Sequence[ExampleRows]], list[HeldOut]]:
    """Split units into units to train on, by source, and held-out rows.

    Raises:
        ConfigError: no unit of a source can be held out.
    """
    trained: list[Sequence[ExampleRows]] = []
    held_out = []
    split = hold_out(units_by_source, config.eval.size, seed=config.seed)
    for source, (ours, apart) in zip(sources, split, strict=True):
        if not apart:
            raise ConfigError(
                f"eval.size={config.eval.size:g} of the {len(ours)} rows of {source.place} is less "
                "than the fewest rows of any prompt, and a prompt's rows stay together (a prompt "
                "in several sources is not held out); give a larger eval.size, or eval.source=FILE"
            )
        trained.append(ours)
        held_out.append(HeldOut(name=source.name, rows_D=list(chain.from_iterable(apart))))
    return trained, held_out


def _rows_apart(
    config: SftConfig | DpoConfig | RewardModelConfig,
    place: str,
    load: Callable[[str], Sequence[ExampleRows]],
    trained_units: Sequence[Sequence[ExampleRows]],
) -> tuple[list[HeldOut], int]:
    """Rows of each source of `eval.source`, and the number of units with a trained prompt.

    Raises:
        ConfigError: a source is also in `data.source`.
    """
    trained = {source.place for source in parse_sources("data.source", config.data.source)}
    keys = {key for units in trained_units for key in unit_keys(units)}
    held_out, overlap = [], 0
    for source in unweighted_sources("eval.source", place):
        if source.place in trained:
            raise ConfigError(
                f"eval.source={place}: {source.place} is also in data=, and trained rows cannot be "
                "held out; give another file, or eval.size=0.05"
            )
        units = load(source.place)
        overlap += sum(key in keys for key in unit_keys(units))
        held_out.append(HeldOut(name=source.name, rows_D=list(chain.from_iterable(units))))
    return held_out, overlap


def _without_end(
    rows_D: Sequence[TrainingRow], stops: StopTokens, tokenizer: Tokenizer
) -> str | None:
    """Warning if rows have no trained token at which a server of the model would stop, or None."""
    endless = [row for row in rows_D if not hits(row.tokens_T[row.loss_mask_T], stops.ids).any()]
    if not endless:
        return None
    said_T = endless[0].tokens_T[endless[0].loss_mask_T]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = said_T[hits(said_T, [id_ for id_, token in added.items() if token.special])]
    ending = str(tokenizer.convert_ids_to_tokens(int(special[-1]))) if len(special) else "TOKEN"
    return (
        f"{len(endless)} of {len(rows_D)} rows ({endless[0].source} first) train none of the "
        f"tokens at which a server of the model stops ({stops.described(tokenizer)}), so its "
        f"responses would not end; give stop_tokens='{ending}', which ends a turn in its chats"
    )


def _encoder(
    config: SupervisedConfig,
    meta_model: Callable[[str], PreTrainedModel] = meta_causal_lm,
    fresh: Collection[str] = (),
) -> tuple[ExampleEncoder, StopTokens]:
    """Encoder of supervised data for the model, and the model's stop tokens."""
    model, tokenizer, _ = check_trained(config, meta_model, fresh)
    limit = context_length(model)
    if config.data.max_length is not None:
        if config.data.max_length > limit:
            raise ConfigError(
                f"data.max_length={config.data.max_length} must be at most the model's context, "
                f"{limit}; lower it"
            )
        limit = config.data.max_length
    vocabulary = vocab_size(model)
    stops = config.model.stops(tokenizer, [ends_of(config.model.path, tokenizer)], vocabulary)
    encoder = ExampleEncoder(
        tokenizer=tokenizer, vocab_size=vocabulary, max_length=limit, stop_ids=stops.ids
    )
    # Supervised tokens are trained unchanged, so each stop token is a separate outcome.
    return encoder, replace(stops, one_event=False)
