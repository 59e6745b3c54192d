"""Chains of two-digit sums: answers of any length whose links are all equally hard.

    prompt "740=580="   answer "231=711=940=..."      47, 85: 132; 85 + 32 = 117; 32 + 17 = 49; ...

A link is the sum of the two numbers before it, modulo 100: three digits, units first, and "=",
which prompts for the next link. The two start numbers are written like links, so each link has the
same kind of context. An answer never ends by itself: it is truncated at `max_new_tokens`, so all
answers have the same length.

A link is correct if it is the sum of the two links before it as written. One error does not
invalidate later links, and the probability of a correct link does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import chz
import numpy as np

from cluster.demos.arithmetic import OPERAND_DIGITS, Problem, write_jsonl
from distill.chat.responses import response_text
from distill.chat.token_text import decode
from distill.data.prompts import Prompt
from distill.engine import Sample, SamplingModel
from distill.envs.base import (
    Env,
    EnvConfig,
    EnvContext,
    EnvDataset,
    EnvGroupBuilder,
    StepResult,
    require_path,
)
from distill.envs.single_turn import facts_of
from distill.errors import ConfigError
from distill.tokenizer import vocabulary_hash
from distill.types import TokenArray

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

LINK_TOKENS = OPERAND_DIGITS + 2  # the digits of a sum and "="
PROMPT_TOKENS = 2 * LINK_TOKENS
Rewarded = Literal["chain", "links"]


def prompt_of(start: Problem) -> str:
    """The two start numbers of a chain, written like its links."""
    return _written(start.left) + _written(start.right)


def _written(number: int) -> str:
    return f"{number:0{OPERAND_DIGITS + 1}d}"[::-1] + "="


def chain_of(
    start: Problem,
    links: int,
    rng: np.random.Generator,
    *,
    forget_carry: float,
    random_links: float,
) -> tuple[str, list[list[int]]]:
    """Generate the text of a chain, and the character spans [start, stop) to train on.

    Args:
        links: number of links after the prompt.
        forget_carry: probability that a carry is forgotten.
        random_links: probability that a random number, which is not trained on, replaces a link.
            Without such numbers chains repeat, and a model learns to repeat instead of to add.
    """
    text, before, last, trained = prompt_of(start), start.left, start.right, []
    for _ in range(links):
        if rng.random() < random_links:
            link = _written(int(rng.integers(2 * 10**OPERAND_DIGITS - 1)))
        else:
            link = Problem(before, last).answer_with_errors(forget_carry, rng) + "="
            trained.append([len(text), len(text) + LINK_TOKENS])
        text += link
        before, last = last, _value(link)
    return text, trained


def _value(digits: str) -> int:
    """Value of a link as the next sum uses it: modulo 100."""
    return int(digits[:OPERAND_DIGITS][::-1])


def right_links(prompt: str, response: str, links: int) -> list[bool]:
    """Whether each link is the sum of the two numbers before it, as written."""
    text = prompt + response
    written = [text[i : i + LINK_TOKENS] for i in range(0, len(prompt) + links * LINK_TOKENS, 4)]
    right = []
    for before, last, link in zip(written, written[1:], written[2:], strict=False):
        numbers = before[:OPERAND_DIGITS] + last[:OPERAND_DIGITS]
        readable = numbers.isdecimal() and len(numbers) == 2 * OPERAND_DIGITS
        right.append(readable and link == Problem(_value(before), _value(last)).answer + "=")
    return right


def write_starts(path: Path, starts: Iterable[Problem]) -> None:
    """Write a JSONL file with a row of `prompt` per start."""
    write_jsonl(path, ({"prompt": prompt_of(start)} for start in starts))


def write_sft_rows(
    path: Path,
    starts: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    links: int,
    forget_carry: float,
    random_links: float,
    seed: int,
) -> None:
    """Write a JSONL file of token ids for fine-tuning: a chain per start, without an end token."""
    rng, vocab_hash = np.random.default_rng(seed), vocabulary_hash(tokenizer)
    rows = []
    for start in starts:
        text, trained = chain_of(
            start, links, rng, forget_carry=forget_carry, random_links=random_links
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        if trained:
            rows.append({"tokens": ids, "loss_mask": trained, "tokenizer": vocab_hash})
    write_jsonl(path, rows)


class ChainEnv(Env):
    """Environment of one answer. Metrics: `links`, the share of correct links, and `all_right`."""

    def __init__(
        self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, links: int, rewarded: Rewarded
    ) -> None:
        self._prompt, self._tokenizer = prompt, tokenizer
        self._links, self._rewarded = links, rewarded

    async def initial_observation(self) -> TokenArray:
        return self._prompt.tokens_T

    async def step(self, sample: Sample) -> StepResult:
        prompt_T = self._prompt.tokens_T
        response = response_text(self._tokenizer, prompt_T, sample)
        right = right_links(decode(self._tokenizer, prompt_T), response, self._links)
        share, all_right = fmean(right), float(all(right))
        return StepResult(
            reward=share if self._rewarded == "links" else all_right,
            metrics={"links": share, "all_right": all_right},
        )


@dataclass(frozen=True, kw_only=True)
class ChainGroupBuilder(EnvGroupBuilder):
    """G answers to one prompt."""

    prompt: Prompt
    tokenizer: PreTrainedTokenizerBase
    group_size: int
    links: int
    rewarded: Rewarded

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        return [
            ChainEnv(self.prompt, self.tokenizer, self.links, self.rewarded)
            for _ in range(self.group_size)
        ]


class ChainDataset(EnvDataset):
    """Dataset of chains, one per prompt with two start numbers."""

    def __init__(
        self,
        prompts_P: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        links: int,
        rewarded: Rewarded,
    ) -> None:
        self._prompts_P = prompts_P
        self._tokenizer = tokenizer
        self._links = links
        self._rewarded: Rewarded = rewarded

    def __len__(self) -> int:
        return len(self._prompts_P)

    def builder(self, problem: int, group_size: int) -> ChainGroupBuilder:
        prompt = self._prompts_P[problem]
        facts = facts_of(prompt)
        facts["judged"] = True
        return ChainGroupBuilder(
            **facts,
            prompt=prompt,
            tokenizer=self._tokenizer,
            group_size=group_size,
            links=self._links,
            rewarded=self._rewarded,
        )

    def line(self, problem: int) -> int:
        return self._prompts_P[problem].line


@chz.chz
class Chain(EnvConfig):
    """env=examples.opd_vs_rl.chain:Chain: as many links as `max_new_tokens` has room for."""

    judges = False

    rewarded: Rewarded = chz.field(
        default="chain", doc="chain: 1 for an answer whose links are all right; links: their share"
    )

    def __call__(self, path: str | None, setting: EnvContext) -> ChainDataset:
        if setting.max_new_tokens % LINK_TOKENS:
            raise ConfigError(
                f"max_new_tokens={setting.max_new_tokens} must be a multiple of {LINK_TOKENS}, the "
                "tokens of a link",
                field="max_new_tokens",
            )
        prompts_P = setting.prompts(require_path(path, "Chain"))
        links = setting.max_new_tokens // LINK_TOKENS
        return ChainDataset(prompts_P, setting.tokenizer, links, self.rewarded)
