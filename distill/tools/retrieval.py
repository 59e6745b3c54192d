"""Retrieval tool: BM25 search over paragraphs of local texts, by bm25s."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.errors import ConfigError, DataError
from distill.libraries import require_library
from distill.text.bm25_words import words
from distill.tools.base import Tool

if TYPE_CHECKING:
    import bm25s

_KINDS = (".jsonl", ".md", ".txt")
_TOP_K, _MAX_TOP_K = 3, 10
# Longer paragraphs are split into several passages.
_LONGEST = 1500
_BLANK = re.compile(r"\n[ \t]*\n")
_building = threading.Lock()


class Retrieval(Tool):
    """Tool that searches paragraphs of *.txt, *.md and *.jsonl (field `text`) in a directory.

    The index is built by the first search in a process; a pickle has only the directory.

    Raises:
        ConfigError: the directory does not exist, all such files in it are empty, or bm25s is not
            installed.
    """

    def __init__(self, directory: str | Path) -> None:
        require_library("bm25s", f"retrieval:{directory}", "bm25s", "env.tools")
        self._directory = str(directory)
        why = ""
        if not Path(directory).is_dir():
            why = "the directory does not exist"
        elif not any(path.stat().st_size for path in _files(Path(directory))):
            why = "it has no texts; add *.txt, *.md or *.jsonl files (rows with `text`)"
        if why:
            raise ConfigError(f"env.tools=retrieval:{directory}: {why}")

    @property
    def name(self) -> str:
        return "search"

    @property
    def description(self) -> str:
        return (
            "Searches a collection of texts by the words of the query. Returns the passages that "
            "fit best, each with the file it is from."
        )

    @property
    def parameters(self) -> Mapping[str, Any]:
        top_k = {
            "type": "integer",
            "minimum": 1,
            "maximum": _MAX_TOP_K,
            "description": f"How many passages; {_TOP_K} if left out.",
        }
        return {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "Words to look for."},
                "top_k": top_k,
            },
            "required": ["query"],
        }

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        top_k = int(arguments.get("top_k", _TOP_K))
        return await asyncio.to_thread(_search, self._directory, arguments["query"], top_k)

    def __reduce__(self) -> tuple[type[Retrieval], tuple[str]]:
        return Retrieval, (self._directory,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
    place: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    passages: tuple[_Passage, ...]
    scorer: bm25s.BM25


def _search(directory: str, query: str, top_k: int) -> str:
    with _building:
        index = _index(directory)
    known = [word for word in words(query) if word in index.scorer.vocab_dict]
    if not known:
        return "No passage has any of these words."
    scores = index.scorer.get_scores(known)
    best = np.argsort(-scores, kind="stable")[:top_k]  # of equal scores, the first
    found = [index.passages[i] for i in best if scores[i] > 0]
    return "\n\n".join(
        f"[{rank}] {passage.place}\n{passage.text}" for rank, passage in enumerate(found, 1)
    )


@lru_cache(maxsize=8)
def _index(directory: str) -> _Index:
    passages = tuple(_passages(Path(directory)))
    # bm25s refuses word lists that are all empty, so a text without words has its place as a word.
    tokens = [words(passage.text) or [passage.place] for passage in passages]
    if not tokens:
        raise DataError(f"retrieval:{directory}: its files contain only white space", field="tools")
    import bm25s

    scorer = bm25s.BM25(backend="numpy")
    scorer.index(tokens, show_progress=False)
    return _Index(passages=passages, scorer=scorer)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.suffix in _KINDS and path.is_file())


def _passages(directory: Path) -> Iterator[_Passage]:
    for path in _files(directory):
        name = path.relative_to(directory).as_posix()
        for place, text in _texts(path, name):
            for paragraph in _BLANK.split(text.replace("\r\n", "\n")):
                for start in range(0, len(paragraph), _LONGEST):
                    part = paragraph[start : start + _LONGEST].strip()
                    if part:
                        yield _Passage(place=place, text=part)


def _texts(path: Path, name: str) -> Iterator[tuple[str, str]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".jsonl":
        yield name, text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{name}:{number}", _text_of(line, f"{path}:{number}")


def _text_of(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise DataError(f"{place}: must be an object with a string `text`, got {line[:60]!r}")
    return row["text"]
