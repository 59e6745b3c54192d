"""Columns of rows: renaming columns to the fields that are read, and finding misspelt fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import chz

from distill.chat.messages import is_sharegpt, parsed_json
from distill.data.answers import answer_text
from distill.data.row_files import Rows, located
from distill.errors import DataError
from distill.rules import readable_as, setting
from distill.settings import Section

# Alternatives, of which a row has one field: if it is there, the other cannot be misspelt.
_EITHER = (("prompt", "messages"), ("teacher_prompt", "teacher_messages"))
_TEXT_OR_CHAT = frozenset({"prompt", "teacher_prompt", "completion", "chosen", "rejected"})
# Shorter field names are too similar to other words to look for misspellings.
_SHORTEST = 5


@chz.chz
class Columns:
    """Columns that are read as other fields."""

    section: ClassVar[Section] = Section.MODEL

    columns: Mapping[str, str] = chz.field(
        default_factory=dict,
        doc="columns.FIELD=COLUMN: column that is read as a field of the rows; for example "
        "columns.prompt=question (as `messages` if it holds chats), columns.answer=solution",
    )

    def read_as(self) -> dict[str, tuple[str, str]]:
        """Given settings: name of the setting -> (column, field that the column is read as)."""
        return {f"columns.{field}": (column, field) for field, column in self.columns.items()}

    def wanted(self) -> dict[str, str]:
        """Given settings: `setting=value` -> column without which the setting has no effect."""
        return {f"{setting}={column}": column for setting, (column, _) in self.read_as().items()}

    def as_fields(self, rows: Rows, place: str) -> Rows:
        """Rows with the given columns renamed to fields; a prompt that is a chat is `messages`.

        `a.b` is the field `b` of the objects in the column `a`, unless a column is called `a.b`. A
        source without the column is unchanged if it already has the field.

        Raises:
            DataError: a source has neither the column nor the field.
        """
        found = set().union(*(row for _, row in rows))
        given = {}
        for name, (column, field) in self.read_as().items():
            own = {field, "messages"} if field == "prompt" else {field}
            if any(has_column(row, column) for _, row in rows):
                given[column] = (field, own)
            elif not own & found:
                raise DataError(
                    f"{name}={column}: no row of {place} has this column; they have "
                    f"{', '.join(sorted(found))}"
                )
        if not given:
            return rows
        return [(number, _renamed(row, given)) for number, row in rows]


def _renamed(row: Mapping[str, Any], given: Mapping[str, tuple[str, set[str]]]) -> dict[str, Any]:
    there = {column: each for column, each in given.items() if has_column(row, column)}
    dropped = set(given).union(*(own for _, own in there.values()))
    made = {name: value for name, value in row.items() if name not in dropped}
    made |= {field: _value_of(row, column) for column, (field, _) in there.items()}
    return with_chats(made)


def has_column(row: Mapping[str, Any], column: str) -> bool:
    """True if the row has a column, or a field within one, of this name."""
    return _value_of(row, column) is not None


def _value_of(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    outer, dot, inner = column.partition(".")
    value = row.get(outer)
    return _value_of(value, inner) if dot and isinstance(value, Mapping) else None


def with_chats(row: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `prompt` and `teacher_prompt` to `messages` and `teacher_messages` if they are chats.

    A list of messages as JSON text is parsed, in prompts and in answers, because such text is not
    meant to be read by a model.
    """
    made = dict(row)
    for name in _TEXT_OR_CHAT & made.keys():
        made[name] = _parsed_chat(made[name])
    for prefix in ("", "teacher_"):
        text, messages = f"{prefix}prompt", f"{prefix}messages"
        if isinstance(made.get(text), list) and made.get(messages) is None:
            made[messages] = made.pop(text)
    return made


def _parsed_chat(value: Any) -> Any:
    parsed = parsed_json(value)
    if not isinstance(parsed, list) or not parsed:
        return value
    chat = all(
        isinstance(each, Mapping) and ("role" in each or is_sharegpt(each)) for each in parsed
    )
    return parsed if chat else value  # ShareGPT's messages are refused like those of a list


@chz.chz
class PromptColumns(Columns):
    """Columns of `prompts` and `eval.source`, and the pattern of answers within a column."""

    answer_pattern: str | None = setting(
        readable_as("regular expression", re.compile, allows="a+", refuses="("),
        default=None,
        doc="regular expression that finds the answer in its column (its last match, or the first "
        "group of that), for example '#### (.+)' for GSM8K",
    )

    def wanted(self) -> dict[str, str]:
        if self.answer_pattern is None:
            return super().wanted()
        pattern = {f"answer_pattern={self.answer_pattern!r}": self.columns.get("answer", "answer")}
        return super().wanted() | pattern

    def as_fields(self, rows: Rows, place: str) -> Rows:
        """Rows as from `Columns.as_fields`, with answers extracted by `answer_pattern`.

        Raises:
            DataError: no row of a source has a column, or an answer does not match the pattern.
        """
        rows = super().as_fields(rows, place)
        if self.answer_pattern is None:
            return rows
        pattern = re.compile(self.answer_pattern)
        found = []
        for number, row in rows:
            if row.get("answer") is not None:
                with located(f"{place}:{number}"):
                    row = {**row, "answer": _found(pattern, answer_text(row["answer"]) or "")}
            found.append((number, row))
        return found


def _found(pattern: re.Pattern[str], text: str) -> str:
    matches = list(pattern.finditer(text))
    if not matches:
        raise DataError(
            f"answer_pattern={pattern.pattern!r} finds nothing in the answer, which ends in "
            f"{text[-60:]!r}"
        )
    return str(matches[-1][min(1, pattern.groups)] or "").strip()


def fields_of(row: Mapping[str, Any]) -> str:
    """Part of an error message: the fields that the row has."""
    return f"the row has {', '.join(f'`{name}`' for name in row) or 'no field'}"


def refuse_misspelt(row: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise DataError for an unknown field whose name is nearly that of a known field.

    Other unknown fields are ignored.
    """
    slip = _misspelt(frozenset(row), known)
    if slip is not None:
        wrong, right = slip
        raise DataError(
            f"`{wrong}` is not a known field; did you mean `{right}`? Rename it (or name the "
            "column in the settings: columns.prompt=, columns.answer=)",
            field=wrong,
        )


@cache
def _misspelt(names: frozenset[str], known: frozenset[str]) -> tuple[str, str] | None:
    absent = known - names
    for pair in _EITHER:
        if names & set(pair):
            absent -= set(pair)
    for wrong in sorted(names - known):
        for right in sorted(absent):
            if _nearly(wrong.lower(), right):
                return wrong, right
    return None


def _nearly(word: str, right: str) -> bool:
    """True if `word` differs from `right` by at most one or two edits (`edit_distance`)."""
    if len(right) < _SHORTEST:
        return word == right
    return edit_distance(word, right) <= (1 if len(right) < 2 * _SHORTEST else 2)


def edit_distance(a: str, b: str) -> int:
    """Fewest edits (add, drop or change a letter, or swap neighbours) that turn `a` into `b`."""
    before, last = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i in range(1, len(a) + 1):
        row = [i]
        for j in range(1, len(b) + 1):
            cost = min(last[j] + 1, row[-1] + 1, last[j - 1] + (a[i - 1] != b[j - 1]))
            if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]
