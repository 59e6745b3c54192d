"""`python -m cluster.sample_to_sft model=DIR prompts=FILE data=OUT.jsonl`: responses as SFT rows.

Rejection sampling from a stronger model, or from a model that sees a hint. Each prompt is answered
several times, a reward judges the responses, and those with at least `min_reward` are written as
rows for recipe=sft:

    {"messages": [..., {"role": "assistant", "content": "..."}], "reward": 1.0, "line": 3}
    {"prompt": "...", "completion": "...", "reward": 1.0, "line": 4}

The model is a checkpoint, on an engine in this process, or an OpenAI-compatible endpoint
(model=http://host:port/v1 name=MODEL), which receives chats. With `hinted=True` the model sees a
row's `teacher_messages` or `teacher_prompt` in place of the prompt; the written row has the prompt
without the hint. Responses that were cut off are left out.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import chz
from rich.console import Console
from rich.progress import Progress

from actors.config import running_engines
from actors.rollout.text_endpoint import (
    LONGEST_PAUSE_S,
    AnswerLimits,
    EndpointAddress,
    TextEndpoint,
    UnusableAnswer,
    text_endpoint,
)
from actors.sglang.address import is_url
from actors.together import together
from cluster.base.outcomes import RunFailed
from cluster.command import run_command
from cluster.config.common import LocalEngineConfig, ModelSettings
from cluster.config.early_checks import WRITTEN, model_field
from cluster.config.env import RewardSettings
from cluster.config.evaluation import LengthSettings
from cluster.config.rows import ROWS, reader_of, unweighted_sources
from cluster.jsonl_log import write_rows
from distill.chat.responses import THINK, Response, ThinkingMarks, read_response, thinking_marks
from distill.chat.template import (
    Message,
    answered,
    check_messages,
    check_text,
    check_tools,
    render_messages,
    render_text,
)
from distill.chat.unwritten import check_written
from distill.data.answers import answer_text
from distill.data.columns import PromptColumns, with_chats
from distill.data.row_files import located
from distill.engine import GenerateRequest
from distill.errors import ConfigError, DataError
from distill.rewards.model_reward import ModelReward
from distill.rewards.registry import (
    RewardFunction,
    check_answers,
    judge,
)
from distill.rules import IN_MEMORY, JSONL, above, at_least, at_most, needs, setting
from distill.sampling import EvalSampling
from distill.settings import ESSENTIAL, section_field
from distill.tokenizer import load_tokenizer
from distill.types import StopReason

# Maximum number of attempts at an endpoint with transient failures.
_ATTEMPTS = 4
# Fields of a row that are read.
_FIELDS = ("prompt", "messages", "teacher_prompt", "teacher_messages", "tools", "answer")

Respond = Callable[["SamplePrompt"], Awaitable[list["SampledAnswer"]]]


@chz.chz
class SamplerSettings(ModelSettings):
    """The model that samples, and how its prompts are formatted."""

    path: str = model_field(
        doc="model that samples: a checkpoint (or a run's directory), or http://host:port/v1 of an "
        "OpenAI-compatible endpoint (its key in ISOTHERM_ENDPOINT_API_KEY)",
        metadata=ESSENTIAL,
    )


@chz.chz
class SampleToSftConfig(PromptColumns, LocalEngineConfig):
    """Sample responses, and write those with a high reward as rows for recipe=sft."""

    model: SamplerSettings = section_field(SamplerSettings)
    name: str | None = chz.field(default=None, doc="name of the model at the endpoint")
    prompts: str = chz.field(
        doc="sources of rows, in the format of prompts= in recipe=opd", metadata=ESSENTIAL | ROWS
    )
    data: str = setting(
        JSONL,
        doc="file to write, .jsonl; an existing one is replaced",
        metadata=ESSENTIAL | WRITTEN,
    )
    hinted: bool = chz.field(
        default=False,
        doc="prompt the model with a row's teacher_messages or teacher_prompt; the written rows "
        "contain only the prompt",
    )
    temperature: float = setting(
        at_least(0), default=1.0, doc="temperature of the samples; 0: greedy"
    )
    sampling: LengthSettings = section_field(LengthSettings)
    top_p: float = setting(above(0), at_most(1), default=1.0, doc="top-p of the samples; 1: off")
    samples: int = setting(
        at_least(1),
        IN_MEMORY,
        needs(
            "temperature",
            remedy="with temperature=0 all samples are the same; give a temperature above 0",
        ),
        default=1,
        doc="responses per prompt",
    )
    reward: RewardSettings = section_field(RewardSettings)
    min_reward: float = chz.field(
        default=1.0,
        doc="minimum reward of a response that is written, if its prompt has an `answer`",
    )
    keep: Literal["all", "best"] = chz.field(
        default="all",
        doc="responses to write for each prompt, of those that qualify. all: all that differ; "
        "best: the best one",
    )
    seed: int = chz.field(default=0, doc="seed of the samples of a checkpoint")
    timeout_s: float = setting(
        above(0), default=300.0, doc="time limit of a request to an endpoint in seconds"
    )
    max_concurrent: int = setting(
        at_least(1), default=16, doc="maximum number of concurrent requests to an endpoint"
    )

    @chz.validate
    def _sampling_is_consistent(self) -> None:
        if is_url(self.model.path) != (self.name is not None):
            raise ConfigError(
                f"model={self.model.path} with name={self.name}: give name= with an endpoint, and "
                "only with an endpoint",
                field="name",
            )
        if self.name is not None:
            self.address()
        unweighted_sources("prompts", self.prompts)

    def address(self) -> EndpointAddress:
        """Address of the endpoint. `name` must be set."""
        assert self.name is not None
        return EndpointAddress(
            url=self.model.path, name=self.name, url_setting="model", name_setting="name"
        )

    def decoder(self) -> EvalSampling:
        return EvalSampling(
            temperature=self.temperature,
            max_new_tokens=self.sampling.max_new_tokens,
            top_p=self.top_p,
        )

    def reward_function(self) -> RewardFunction:
        """Load the reward. Raises ConfigError for a reward model, which needs a run."""
        reward = self.reward.load()
        if isinstance(reward, ModelReward):
            raise ConfigError(
                f"reward={self.reward.function}: a reward model cannot be used here; give a "
                "function",
                field="reward.function",
            )
        return reward


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePrompt:
    """A prompt.

    Attributes:
        where: source and line, for messages.
        seed: seed of a checkpoint's samples, different for each prompt.
        shown: the prompt that the model sees.
        written: fields of the prompt in the written row.
    """

    where: str
    line: int
    seed: int
    shown: str | Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    written: Mapping[str, Any]
    answer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """A response to a prompt.

    Attributes:
        message: the assistant message that the chat template renders as the response.
        ended: True if the model ended the response itself.
    """

    response: Response
    message: Message
    ended: bool

    @classmethod
    def by(cls, marks: ThinkingMarks, response: Response, *, ended: bool) -> SampledAnswer:
        return cls(response=response, message=marks.message(response), ended=ended)


def sample_to_sft(config: SampleToSftConfig, console: Console) -> None:
    """Sample responses, judge them, and write the rows.

    Raises:
        ConfigError, DataError, CheckpointError: before sampling begins.
        EngineError: an endpoint does not answer. Nothing is written.
        RunFailed: no response qualifies.
    """
    reward = config.reward_function()
    read = reader_of(config, _FIELDS)
    asked: list[SamplePrompt] = []
    for source in unweighted_sources("prompts", config.prompts):
        first = asked[-1].seed if asked else config.seed  # continues after the previous source
        for number, row in read(source.place):
            where = f"{source.place}:{number}"
            asked.append(_asked(config, where, number, first + number, row))
    read.require_columns()
    check_answers(reward, ((each.where, each.answer) for each in asked))
    rows = asyncio.run(_rows(config, reward, asked, console))
    if not rows:
        failed = RunFailed(
            f"no response to {len(asked)} prompts ended with a stop token and a reward of at "
            f"least min_reward={config.min_reward:g}; nothing is written"
        )
        hints = "" if config.hinted else ", or give hints (hinted=True)"
        failed.remedy = f"Lower it, raise samples= or max_new_tokens={hints}"
        raise failed
    write_rows("data", Path(config.data), rows)
    answered = len({(row["source"], row["line"]) for row in rows})
    console.print(
        f"{len(rows)} responses to {answered} of {len(asked)} prompts are in {config.data}",
        highlight=False,
    )


def _asked(
    config: SampleToSftConfig,
    where: str,
    line: int,
    seed: int,
    row: Mapping[str, Any],
) -> SamplePrompt:
    with located(where):
        row = with_chats(row)
        plain = _shown(row, "")
        if plain is None:
            raise DataError("give `prompt` (a string) or `messages` (chat format)")
        shown = _shown(row, "teacher_") if config.hinted else plain
        if shown is None:
            raise DataError(
                "hinted=True needs `teacher_messages` or `teacher_prompt`, and the row has neither"
            )
        tools = check_tools(row)
        written: dict[str, Any] = {"prompt": plain}
        if not isinstance(plain, str):
            written = {"messages": list(plain)} | ({"tools": tools} if tools else {})
        return SamplePrompt(
            where=where,
            line=line,
            seed=seed,
            shown=shown,
            tools=tools,
            written=written,
            answer=answer_text(row.get("answer")),
        )


def _shown(row: Mapping[str, Any], prefix: str) -> str | list[Message] | None:
    text, messages = f"{prefix}prompt", f"{prefix}messages"
    if row.get(messages) is not None:
        return check_messages(row[messages], messages)
    return None if row.get(text) is None else check_text(row, text)


async def _rows(
    config: SampleToSftConfig,
    reward: RewardFunction,
    asked: Sequence[SamplePrompt],
    console: Console,
) -> list[dict[str, Any]]:
    """Rows of all prompts, in order."""
    answering = _by_checkpoint if config.name is None else _by_endpoint
    async with answering(config) as respond:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("sampling", total=len(asked))

            async def one(each: SamplePrompt) -> list[dict[str, Any]]:
                rows = await _judged(config, reward, each, await respond(each))
                progress.advance(task)
                return rows

            made = await together(*(one(each) for each in asked))
    return [row for rows in made for row in rows]


async def _judged(
    config: SampleToSftConfig,
    reward: RewardFunction,
    asked: SamplePrompt,
    answers: Sequence[SampledAnswer],
) -> list[dict[str, Any]]:
    """Rows of the responses that qualify, the best first."""
    differing = {each.response.sampled: each for each in answers if each.ended}
    found: list[tuple[float | None, SampledAnswer]] = []
    for text, each in differing.items():
        if not text:
            continue
        earned = None
        if asked.answer is not None:
            earned = await judge(reward, each.response, asked.answer)
        if earned is None or earned >= config.min_reward:
            found.append((earned, each))
    found.sort(key=lambda pair: -(pair[0] or 0.0))
    source = asked.where.rpartition(":")[0]
    return [
        {**_completed(asked.written, each), "reward": earned, "source": source, "line": asked.line}
        for earned, each in (found[:1] if config.keep == "best" else found)
    ]


def _completed(written: Mapping[str, Any], each: SampledAnswer) -> dict[str, Any]:
    if "prompt" in written:
        return {**written, "completion": each.response.sampled}
    return {**written, "messages": answered(written["messages"], each.message)}


@asynccontextmanager
async def _by_endpoint(config: SampleToSftConfig) -> AsyncIterator[Respond]:
    limits = AnswerLimits(
        attempt_s=config.timeout_s,
        all_s=_ATTEMPTS * (config.timeout_s + LONGEST_PAUSE_S),
        attempts=_ATTEMPTS,
        max_unusable=1,
    )
    async with text_endpoint(
        config.address(), limits=limits, max_concurrent=config.max_concurrent
    ) as endpoint:

        async def respond(asked: SamplePrompt) -> list[SampledAnswer]:
            answers = (_answer(config, endpoint, asked) for _ in range(config.samples))
            return await together(*answers)

        yield respond


async def _answer(
    config: SampleToSftConfig, endpoint: TextEndpoint, asked: SamplePrompt
) -> SampledAnswer:
    """Request a response. An unusable answer counts as a response that was cut off."""
    try:
        answer = await endpoint.answer(asked.shown, config.decoder(), asked.tools)
    except UnusableAnswer:
        return SampledAnswer.by(THINK, THINK.response(""), ended=False)
    return SampledAnswer.by(THINK, THINK.response(answer.text), ended=answer.ended)


@asynccontextmanager
async def _by_checkpoint(config: SampleToSftConfig) -> AsyncIterator[Respond]:
    # These import transformers, which --help does not need.
    from distill.models.loading import ends_of, load_config, vocab_size

    path = config.model.path
    tokenizer = load_tokenizer(path)
    stops = config.model.stops(tokenizer, [ends_of(path, tokenizer)], vocab_size(load_config(path)))
    tokenizer = config.model.choose_template(tokenizer)
    marks = thinking_marks(tokenizer)
    async with running_engines(config.engine_config(config.model.path, stops)) as (engine,):

        async def respond(asked: SamplePrompt) -> list[SampledAnswer]:
            with located(asked.where):
                if isinstance(asked.shown, str):
                    prompt_T = render_text(tokenizer, asked.shown)
                else:
                    check_written(tokenizer, asked.shown, tools=asked.tools)
                    prompt_T = render_messages(tokenizer, asked.shown, tools=asked.tools)
                samples = await engine.generate(
                    GenerateRequest(
                        prompt_tokens_T=prompt_T,
                        sampling=config.decoder(),
                        num_samples=config.samples,
                        seed=asked.seed,
                    )
                )
            return [
                SampledAnswer.by(
                    marks,
                    read_response(tokenizer, prompt_T, each),
                    ended=each.stop_reason is StopReason.EOS,
                )
                for each in samples
            ]

        yield respond


main = partial(run_command, SampleToSftConfig, sample_to_sft)


if __name__ == "__main__":
    sys.exit(main())
