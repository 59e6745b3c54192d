"""Originals of a history's condensed messages, and the tool by which the model reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distill.chat.template import Message
from distill.text.chunks import count_tokens
from distill.text.condense import is_summary, transcript
from distill.tools.base import Tool, ToolError
from distill.types import Tokenizer

# Number of a block's characters in the list of blocks.
_HEAD = 48


class Blocks:
    """Messages that an episode has condensed, one block each, numbered from 1."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: list[str] = []

    def keep(self, messages: Sequence[Message], max_tokens: int) -> str:
        """Store the messages; return a list of all blocks in at most `max_tokens`, the latest last.

        Earlier summaries do not become blocks. Blocks that do not fit are listed by number only.
        """
        self._texts += [transcript(each) for each in messages if not is_summary(each)]
        lines: list[str] = []
        for number in range(len(self._texts), 0, -1):
            earlier = [f"<block_1> to <block_{number - 1}>"] if number > 1 else []
            line = f"<block_{number}> {_head(self._texts[number - 1])}"
            if self._tokens([*earlier, line, *lines]) > max_tokens:
                break
            lines.insert(0, line)
        left = len(self._texts) - len(lines)
        listed = [f"<block_1> to <block_{left}>"] * (left > 0) + lines
        return "\n".join(listed) if self._tokens(listed) <= max_tokens else ""

    def read(self, number: int) -> str:
        """Return the text of a block.

        Raises:
            ToolError: there is no such block.
        """
        if not 1 <= number <= len(self._texts):
            raise ToolError(f"there is no block {number}; there are {len(self._texts)}")
        return self._texts[number - 1]

    def _tokens(self, lines: Sequence[str]) -> int:
        return count_tokens(self._tokenizer, "\n".join(lines))


def _head(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _HEAD else f"{line[:_HEAD]}..."


class ReadBlock(Tool):
    """Tool that returns the text of a block of one episode."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    @property
    def name(self) -> str:
        return "read_block"

    @property
    def description(self) -> str:
        return "Reads a message in full that the summary of the conversation lists as <block_N>."

    @property
    def parameters(self) -> Mapping[str, Any]:
        number = {"type": "integer", "description": "N of <block_N>"}
        return {"type": "object", "properties": {"number": number}, "required": ["number"]}

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        return self._blocks.read(int(arguments["number"]))
