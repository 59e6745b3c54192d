"""Validation of checkpoints, tokenizers and running servers, for all recipes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from transformers.modeling_utils import PreTrainedModel

from actors.sglang.address import is_url
from cluster.config.checkpoint_facts import check_weights
from cluster.config.common import CommonConfig
from distill.engine import EngineInfo, ScoreRequest
from distill.errors import ConfigError, EngineError
from distill.libraries import require_library
from distill.models.attention_probe import check_packs
from distill.models.loading import (
    context_length,
    ends_of,
    load_config,
    meta_causal_lm,
    vocab_size,
)
from distill.models.model_files import check_model_files
from distill.sampling import UNSCALED
from distill.tokenizer import check_same_tokenizer, load_tokenizer, probe_tokenizer
from distill.types import Tokenizer
from learner.export import check_export
from learner.lora import check_lora
from learner.routers import check_balances

if TYPE_CHECKING:
    from actors.sglang.external import ExternalSglangEngine

# Deadline for the info of a running server, seconds; an answer takes far less time.
_INTRODUCTION_DEADLINE_S = 60.0
# Request for the hidden state of one token.
_ONE_STATE = ScoreRequest(
    tokens_T=np.zeros(2, np.int32),
    start=1,
    temperatures=(UNSCALED,),
    states_N=np.ones(1, np.bool_),
)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedScorer:
    """A checked teacher or reference.

    Attributes:
        tokenizer: tokenizer of the model; None for a running server.
        ends: ids of the model's stop tokens; None for a running server.
        chat: token ids of a known chat, rendered by a running server's chat template; None for a
            checkpoint or a server without a template.
        scores_given: False for a running server without isotherm's plugin.
        longest_states, scores_at_t: see `EngineInfo`.
    """

    model: str
    vocab_size: int
    context_length: int
    tokenizer: Tokenizer | None = None
    ends: frozenset[int] | None = None
    chat: tuple[int, ...] | None = None
    scores_given: bool = True
    longest_states: int | None = None
    scores_at_t: bool = True


def check_scorer(role: str, model: str, tokenizer: Tokenizer) -> CheckedScorer:
    """Check a checkpoint or a running server, which must have the student's tokenizer.

    Raises:
        ConfigError: the server does not answer, or has another tokenizer.
    """
    if is_url(model):
        info = ask_server(role, model)
        if info.tokenizer is not None and info.tokenizer.texts != probe_tokenizer(tokenizer).texts:
            raise ConfigError(
                f"student and teacher={model} do not share a tokenizer: the server encodes the "
                "same texts differently, and it scores the student's token ids unchanged. Give "
                "a teacher with the student's tokenizer",
                field="teacher.model",
            )
        return CheckedScorer(
            model=model,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            chat=None if info.tokenizer is None else info.tokenizer.chat,
            scores_given=info.scores_given,
            longest_states=info.longest_states,
            scores_at_t=info.scores_at_t,
        )
    config, own = check_model(model), load_tokenizer(model)
    check_same_tokenizer(tokenizer, own)
    return CheckedScorer(
        model=model,
        vocab_size=vocab_size(config),
        context_length=context_length(config),
        tokenizer=own,
        ends=ends_of(model, own),
    )


def ask_server(role: str, url: str) -> EngineInfo:
    """Info that the running server of `role` reports.

    Raises:
        ConfigError: the address is not that of an SGLang server, or does not answer.
    """
    try:
        return asyncio.run(_asked(url, lambda engine: engine.info()))
    except EngineError as error:
        raise ConfigError(f"{role}={url} does not serve: {error}") from error


async def _asked(url: str, question: Callable[[ExternalSglangEngine], Awaitable[Answer]]) -> Answer:
    for library in ("aiohttp", "orjson"):
        require_library(library, f"the server {url}", library)
    from actors.sglang.external import ExternalSglangEngine  # imports optional libraries

    engine = ExternalSglangEngine(url=url, request_deadline_s=_INTRODUCTION_DEADLINE_S)
    try:
        return await question(engine)
    finally:
        await engine.close()


def served_hidden_size(role: str, scorer: CheckedScorer, longest_row: int) -> int:
    """Size of the hidden states that a teacher's engine returns.

    Raises:
        ConfigError: a running server returns no hidden states, or not for `longest_row` tokens.
    """
    if not is_url(scorer.model):
        return load_config(scorer.model).get_text_config().hidden_size
    if scorer.longest_states == 0:
        raise ConfigError(
            f"{role}={scorer.model} returns no hidden states, which {role}.head= is for; start it "
            "with --enable-return-hidden-states, or install isotherm where it runs",
            field=f"{role}.head",
        )
    if scorer.longest_states is not None and longest_row > scorer.longest_states:
        raise ConfigError(
            f"{role}={scorer.model} returns the hidden states of {scorer.longest_states} tokens, "
            f"those of one prefill chunk, and rows may have {longest_row}; start it with "
            "--chunked-prefill-size -1, or install isotherm where it runs",
            field=f"{role}.head",
        )
    try:
        [score] = asyncio.run(_asked(scorer.model, lambda engine: engine.score([_ONE_STATE])))
        return score.states.hidden_size
    except EngineError as error:
        raise ConfigError(f"{role}={scorer.model}: {error}", field=f"{role}.head") from error


def check_holds_tokenizer(role: str, model: str, size: int, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a model's vocabulary of `size` is smaller than the tokenizer's."""
    if size < len(tokenizer):
        raise ConfigError(
            f"{role}={model} has a vocabulary of {size}, smaller than the tokenizer's "
            f"{len(tokenizer)}; model and tokenizer do not belong together"
        )


def check_model(path: str) -> Any:
    """Check the weights files of a local directory by their headers; return the model's config.

    Raises:
        CheckpointError: a weights file is missing or unreadable.
    """
    config = load_config(path)
    if Path(path).is_dir():
        check_weights(Path(path))
    return config


def check_trained(
    config: CommonConfig,
    meta_model: Callable[[str], PreTrainedModel] = meta_causal_lm,
    fresh: Collection[str] = (),
) -> tuple[Any, Tokenizer, object]:
    """Check that the learner can train and export the run's model.

    Args:
        meta_model, fresh: see `check_export`.

    Returns:
        The model's config, its tokenizer with the run's chat template, and its own template.

    Raises:
        ConfigError, CheckpointError: with the setting or the file.
    """
    path = config.model.path
    model = check_model(path)
    if config.learner.packing:
        check_packs(meta_model(path))
    check_export(path, meta_model, fresh)
    if config.learner.router_aux_coef:
        check_balances(meta_model(path))
    if config.lora.trains_adapter:
        check_lora(config.lora, path)
    tokenizer = load_tokenizer(path)
    own_template = tokenizer.chat_template
    tokenizer = config.model.choose_template(tokenizer)
    check_model_files(path, tokenizer)
    return model, tokenizer, own_template
