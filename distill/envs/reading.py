"""Questions about documents longer than the context: read part by part, take notes, answer.

by=model        each part is a turn: the model sees the question, its notes so far and the
                part, and writes new notes; finally it sees only the question and the notes, and
                answers. Every turn begins with a new context, so each turn is a segment, which
                the teacher scores in exactly the student's context
by=keywords     the document is reduced to the text relevant to the question; the model answers
by=module:f     as keywords, with a custom function
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import chz

from distill.chat.responses import Response
from distill.chat.template import Message, check_text, render_messages
from distill.data.answers import answer_text
from distill.data.columns import refuse_misspelt
from distill.data.prompts import prompt_key
from distill.data.row_files import located
from distill.engine import SamplingModel
from distill.envs.base import EnvContext, require_path
from distill.envs.chat import MessageEnv, MessageStep
from distill.envs.chat_config import ChatEnvConfig, MessageProblem
from distill.errors import DataError
from distill.rewards.registry import RewardFunction, answer_of, verdict
from distill.rewards.token_rewards import first_mentions, key_fact_bonuses
from distill.rules import at_least, needs, readable_as, setting
from distill.text.chunks import chunk_text, require_splitter
from distill.text.condense import Condenser, load_condenser

MODEL = "model"
_BY_MODEL = needs("by", MODEL)
# Upper bound of the tokens that texts need in addition when they are joined.
_SEAMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One problem: a question about a document.

    Attributes:
        facts: texts that good notes contain. The tokens that first write one earn `fact_bonus`.
    """

    text: str
    question: str
    answer: str
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Prompt templates with `{}` fields, for turns that read a part and for the final answer."""

    read: str
    answer: str


WORDING = Wording(
    read=(
        "Question: {question}\n\nNotes so far: {notes}\n\nPart {number} of {count}:\n{part}\n\n"
        "Write the new notes: all that the question needs, of the old notes and of this part, and "
        "nothing else."
    ),
    answer="Question: {question}\n\nNotes: {notes}\n\nAnswer the question.",
)
# Templates for models that are trained on this task: only the fields, without instructions.
TERSE = Wording(read="{question}|{notes}|{part}>", answer="{question}|{notes}=")


class Reader(MessageEnv):
    """Environment in which the model reads part by part. The model's turns are the notes."""

    def __init__(
        self,
        document: Document,
        parts: Sequence[str],
        wording: Wording,
        reward: RewardFunction,
        fact_bonus: float,
    ) -> None:
        self._document, self._parts, self._wording = document, parts, wording
        self._reward, self._fact_bonus = reward, fact_bonus
        self._read = 0

    def initial_messages(self) -> Sequence[Message]:
        return self._shows("")

    async def step(self, message: Message) -> MessageStep:
        text = str(message.get("content") or "")
        document = self._document
        if self._read > len(self._parts):
            return await _answered(self._reward, message, document.answer)
        oracle, metrics = None, {}
        if document.facts:
            oracle = partial(
                key_fact_bonuses, facts=document.facts, value=self._fact_bonus, answer=text
            )
            metrics["facts_kept"] = fmean(
                found is not None for found in first_mentions(document.facts, text)
            )
        return MessageStep(
            messages=self._shows(text), replaces_history=True, oracle=oracle, metrics=metrics
        )

    def _shows(self, notes: str) -> list[Message]:
        """Messages with the next part and the notes; after the last part, with the notes alone."""
        document = self._document
        filled = {"question": document.question, "notes": notes.strip()}
        if self._read < len(self._parts):
            text = self._wording.read.format(
                **filled,
                part=self._parts[self._read],
                number=self._read + 1,
                count=len(self._parts),
            )
        else:
            text = self._wording.answer.format(**filled)
        self._read += 1
        return [{"role": "user", "content": text}]


@dataclass(eq=False)
class Condensed(MessageEnv):
    """Environment in which the model answers from a condenser's extract of the whole document."""

    document: Document
    wording: Wording
    reward: RewardFunction
    condense: Callable[[], Awaitable[str]]
    _notes: str = field(init=False, default="")

    async def start(self, models: Mapping[str, SamplingModel]) -> None:
        self._notes = await self.condense()

    def initial_messages(self) -> Sequence[Message]:
        text = self.wording.answer.format(question=self.document.question, notes=self._notes)
        return [{"role": "user", "content": text}]

    async def step(self, message: Message) -> MessageStep:
        return await _answered(self.reward, message, self.document.answer)


async def _answered(reward: RewardFunction, message: Message, answer: str) -> MessageStep:
    earned = await verdict(reward, Response.of(message), answer)
    return MessageStep(reward=earned.reward, feedback=earned.feedback)


class _Once:
    """Condensed text of a document, computed by the first call and shared by all later calls."""

    def __init__(self, document: Document, condenser: Condenser, max_tokens: int) -> None:
        self._document, self._condenser, self._max_tokens = document, condenser, max_tokens
        self._condensing: asyncio.Future[str] | None = None

    async def __call__(self) -> str:
        if self._condensing is None:
            self._condensing = asyncio.ensure_future(
                self._condenser(
                    self._document.text,
                    focus=self._document.question,
                    max_tokens=self._max_tokens,
                )
            )
        return await asyncio.shield(self._condensing)  # a cancelled caller must not cancel others


def _condensed_group(
    document: Document,
    wording: Wording,
    reward: RewardFunction,
    condenser: Condenser,
    max_tokens: int,
    group_size: int,
) -> list[MessageEnv]:
    condense = _Once(document, condenser, max_tokens)
    return [Condensed(document, wording, reward, condense) for _ in range(group_size)]


_FIELDS = frozenset(("document", "question", "answer", "facts", "tag"))


def _boundary(pattern: str) -> None:
    """Raise ValueError if a pattern matches the empty text, and so cannot mark a boundary."""
    if re.compile(pattern).fullmatch("") is not None:
        raise ValueError(
            "it matches the empty text at every position; give the beginning of a passage"
        )


@chz.chz
class Reading(ChatEnvConfig):
    """env=Reading: rows of `document`, `question`, `answer`, and optionally `facts` and `tag`."""

    row_fields = _FIELDS

    by: str = chz.field(
        default=MODEL,
        doc="how the document is read. model: the policy reads part by part and keeps notes; "
        "keywords, or package.module:function of (text, focus, max_tokens): the document is "
        "condensed first",
    )
    part_tokens: int | None = setting(
        at_least(1),
        default=None,
        doc="maximum length of a part, or of the condensed document, in tokens; default: as fits",
    )
    passage_boundary: str | None = setting(
        readable_as("regular expression of a beginning", _boundary, allows="^#", refuses="#*"),
        _BY_MODEL,
        default=None,
        doc="regular expression of the beginning of a passage, such as '(?m)^## '; no part has "
        "text of two passages; default: parts end at natural breaks of the text",
    )
    fact_bonus: float = setting(
        at_least(0),
        _BY_MODEL,
        default=0.0,
        doc="bonus on the tokens of the notes that first write one of the row's `facts`",
    )
    terse: bool = chz.field(
        default=False, doc="omit the instructions, for models that were trained on the task itself"
    )
    max_turns: int = setting(
        at_least(1),
        _BY_MODEL,
        default=64,
        doc="maximum number of turns: one for each part, and one for the answer",
    )

    @property
    def metric_names(self) -> Collection[str]:
        return self._counts_and(*["facts_kept"] * (self.by == MODEL))

    def problems(self, path: str | None, setting: EnvContext) -> Sequence[MessageProblem]:
        wording = TERSE if self.terse else WORDING
        source = require_path(path, "Reading")
        require_splitter("env=Reading")
        problems_P: list[MessageProblem] = []
        for number, row in setting.read(source):
            with located(f"{source}:{number}"):
                refuse_misspelt(row, _FIELDS)
                problems_P.append(self._problem(row, number, wording, setting))
        setting.check_answers(source, ((int(each.line or 0), each.answer) for each in problems_P))
        return problems_P

    def _problem(
        self, row: Mapping[str, Any], number: int, wording: Wording, setting: EnvContext
    ) -> MessageProblem:
        question, text = check_text(row, "question"), check_text(row, "document")
        room = self.part_tokens
        if room is None or self.by != MODEL:  # otherwise the first part's turn is checked later
            most = self._room(question, wording, setting)
            if (room := room or most) > most:
                raise DataError(
                    f"env.part_tokens={room} is more than the {most} tokens that fit beside the "
                    "question and a turn; lower it"
                )
        if not text.strip():
            raise DataError("`document` is blank; give a text", field="document")
        document = Document(
            text=text,
            question=question,
            answer=_answer(row),
            facts=_facts(row),
        )
        make_group = None
        if self.by == MODEL:
            parts = tuple(
                chunk.text
                for passage in _passages(text, self.passage_boundary)
                for chunk in chunk_text(passage, tokenizer=setting.tokenizer, max_tokens=room)
            )
            if len(parts) >= self.max_turns:
                raise DataError(
                    f"`document` has {len(parts)} parts of {room} tokens and needs "
                    f"{len(parts) + 1} turns, more than env.max_turns={self.max_turns}; raise it",
                    field="document",
                )
            reward = setting.reward_function()
            make = partial(Reader, document, parts, wording, reward, self.fact_bonus)
        else:
            condenser = load_condenser(self.by, setting.tokenizer, "env.by")
            make_group = partial(
                _condensed_group, document, wording, setting.reward_function(), condenser, room
            )
            make = partial(_single_env, make_group)
        return MessageProblem(
            make=make,
            make_group=make_group,
            line=number,
            tag=None if row.get("tag") is None else check_text(row, "tag"),
            answer=document.answer,
            prompt_key=prompt_key(f"{question}\0{text}".encode()),
            pays_bonuses=bool(self.fact_bonus and document.facts),
        )

    def _room(self, question: str, wording: Wording, setting: EnvContext) -> int:
        """Number of tokens left for a part after the question, the notes and a turn.

        Raises:
            DataError: no tokens are left.
        """
        limit = setting.context_length if self.max_tokens is None else self.max_tokens
        empty = wording.read.format(question=question, notes="", part="", number=99, count=99)
        fixed = len(render_messages(setting.tokenizer, [{"role": "user", "content": empty}]))
        notes = setting.max_new_tokens if self.by == MODEL else 0
        room = limit - fixed - notes - setting.max_new_tokens - _SEAMS
        if room < 1:
            raise DataError(
                f"the question and its instructions take {fixed} tokens, notes and turn "
                f"{notes + setting.max_new_tokens}, of {limit} (env.max_tokens or the models' "
                "context), which leaves no room for the document; lower max_new_tokens, raise "
                "env.max_tokens, or give a model with a longer context"
            )
        return room

    def answer(self, setting: EnvContext) -> Callable[[str], Hashable | None] | None:
        return answer_of(setting.reward)


def _single_env(make_group: Callable[[int], Sequence[MessageEnv]]) -> MessageEnv:
    [env] = make_group(1)
    return env


def _passages(text: str, boundary: str | None) -> list[str]:
    """Split the text before each match of the boundary."""
    starts = [] if boundary is None else [found.start() for found in re.finditer(boundary, text)]
    edges = sorted({0, *starts, len(text)})
    return [text[start:stop] for start, stop in pairwise(edges)] or [text]


def _answer(row: Mapping[str, Any]) -> str:
    answer = answer_text(row.get("answer"))
    if answer is None:
        raise DataError(
            "`answer` must be given: the expected content of a right response", field="answer"
        )
    return answer


def _facts(row: Mapping[str, Any]) -> tuple[str, ...]:
    facts = row.get("facts") or []
    if not isinstance(facts, list) or not all(isinstance(fact, str) and fact for fact in facts):
        raise DataError(
            f"`facts` must be a list of non-empty strings, got {facts!r}", field="facts"
        )
    return tuple(facts)
