"""Formats in which model families write tool calls: marks, and readers of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from distill.chat.tool_readers import (
    Reader,
    gemma_call,
    json_calls,
    listed_calls,
    named_call,
    python_calls,
    tagged_call,
    whole_turn,
)

ToolFormat: TypeAlias = Literal[
    "hermes", "xml", "llama", "mistral", "deepseek", "dsml", "harmony", "glm", "kimi", "minimax",
    "gemma", "pythonic",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Format of tool calls.

    Attributes:
        opener: regular expression of the mark that opens a call.
        read: reader of a call after its mark.
        example: a call in this format, shown to a model whose call cannot be read.
        gap: text that templates write between words and a call.
        before_words: text that templates write before words that precede a call.
    """

    opener: str
    read: Reader
    example: str
    gap: str = ""
    before_words: str = ""


def _invokes(tag: str, section: str, key: str, gap: str) -> Grammar:
    """Grammar of `<invoke name="...">` calls with `<parameter name="...">` tags, in a section."""
    name = r'\s*+name="(?P<name>[^"\n]+)"'
    return Grammar(
        opener=rf"<{section}>|<{tag}invoke(?=\s+name=)",
        read=tagged_call(
            head=rf"\s*+(?:<{tag}invoke)?{name}>",
            opens=f"<{tag}parameter ",
            key=rf"{name}{key}>",
            closes=f"</{tag}parameter>",
            end=rf"</{tag}invoke>\s*(?:</{section}>)?",
            section_end=f"</{section}>",
        ),
        example=f'<{section}>\n<{tag}invoke name="NAME">\n<{tag}parameter name="KEY">VALUE'
        f"</{tag}parameter>\n</{tag}invoke>\n</{section}>",
        gap=gap,
    )


def _bars(words: str) -> str:
    """Special token of DeepSeek models."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS, _CALLS_END = _bars("tool calls begin"), _bars("tool calls end")
_CALL, _CALL_END = _bars("tool call begin"), _bars("tool call end")
_SEPARATOR = _bars("tool sep")
_DSML = "\uff5cDSML\uff5c"

# Header of gpt-oss's messages to a tool; the recipient is before or after the channel.
_CHANNEL = r"(?:<\|channel\|>(?:commentary|analysis))"
# Possessive quantifiers, since backtracking over a long word would take minutes.
_RECIPIENT = r"(?:functions\.)?(?P<name>[\w.-]++)"
_REST = rf"\s*+{_CHANNEL}?\s*+(?:<\|constrain\|>)?\s*+\w*+\s*+<\|message\|>"

GRAMMARS: dict[ToolFormat, Grammar] = {
    "hermes": Grammar(
        opener="<tool_call>",
        read=json_calls("</tool_call>"),
        example='<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>',
        gap="\n",
    ),
    "xml": Grammar(
        opener="<tool_call>",
        read=tagged_call(
            head=r"\s*<function=(?P<name>[^>\n]+)>",
            opens="<parameter=",
            key=r"(?P<name>[^>\n]+)>",
            closes="</parameter>",
            end=r"</function>\s*(?:</tool_call>|\Z)",
            section_end="</tool_call>",
            own_line=True,
        ),
        example="<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
        "</tool_call>",
        gap="\n",
    ),
    # Llama 3; Llama 4, which puts marks around words; GigaChat 3.1, which puts a mark before calls.
    "llama": Grammar(
        opener=r"<\|python_tag\|>|<\|function_call\|>|<\|python_end\|>(?=\s*\{)|\A\s*(?=\{)|"
        r'(?=\{\s*"name"\s*:)',
        read=whole_turn("<|python_tag|>", "<|function_call|>"),
        example='{"name": NAME, "parameters": {...}}',
        before_words="<|python_start|>",
    ),
    "mistral": Grammar(
        opener=r"\[TOOL_CALLS\]",
        read=listed_calls(
            "[TOOL_CALLS]",
            named_call(
                head=r"\s*(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>[^\s\[\]{}]*))?(?:\[ARGS\])?",
                end=r"",
            ),
            r"\s*[^\s\[\]{}]+(?:\[CALL_ID\][^\s\[\]{}]*)?(?:\[ARGS\])?(?=\s*\{)",
        ),
        example='[TOOL_CALLS][{"name": NAME, "arguments": {...}}]',
    ),
    # V3 and R1 write the name after the separator, above fenced arguments; V3.1 before it.
    "deepseek": Grammar(
        opener=rf"{_CALLS}\s*(?:{_CALL})?|{_CALL}",
        read=named_call(
            head=rf"\s*+(?:\w+{_SEPARATOR}(?=[^\n`]+\n```json\n))?(?P<name>[^\n`<]+)"
            rf"(?:{_SEPARATOR}|\n```json\n)",
            end=rf"(?:```\s*)?(?:{_CALL_END}|\Z)\s*(?:{_CALLS_END})?",
        ),
        example=f"{_CALLS}{_CALL}function{_SEPARATOR}NAME\n```json\n{{...}}\n```{_CALL_END}"
        f"{_CALLS_END}",
    ),
    # DeepSeek V3.2
    "dsml": _invokes(
        _DSML, f"{_DSML}function_calls", r'(?:\s+string="(?P<text>true|false)")?', gap="\n\n"
    ),
    # gpt-oss
    "harmony": Grammar(
        opener=rf"(?:<\|start\|>assistant)?\s?{_CHANNEL}?\s?to=(?={_RECIPIENT}{_REST})",
        read=named_call(head=_RECIPIENT + _REST, end=r"<\|call\|>|<\|end\|>|\Z"),
        example="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}",
    ),
    # GLM-4.5 to 4.7
    "glm": Grammar(
        opener="<tool_call>",
        read=tagged_call(
            head=r"\s*(?P<name>[\w.:/-]+)",
            opens="<arg_key>",
            key=r"(?P<name>.*?)</arg_key>\s*<arg_value>",
            closes="</arg_value>",
            end=r"</tool_call>|\Z",
            section_end="</tool_call>",
        ),
        example="<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
        "</tool_call>",
        gap="\n",
    ),
    "kimi": Grammar(
        opener=r"<\|tool_calls_section_begin\|>\s*(?:<\|tool_call_begin\|>)?|<\|tool_call_begin\|>",
        read=named_call(
            head=r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?)\s*"
            r"<\|tool_call_argument_begin\|>",
            end=r"(?:<\|tool_call_end\|>|\Z)\s*(?:<\|tool_calls_section_end\|>)?",
        ),
        example="<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0"
        "<|tool_call_argument_begin|>{...}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "minimax": _invokes("", "minimax:tool_call", "", gap="\n"),
    # Gemma 4
    "gemma": Grammar(
        opener=r"<\|tool_call>",
        read=gemma_call('<|"|>', "<tool_call|>"),
        example='<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:1}<tool_call|>',
    ),
    # Llama 4 if its template asks for Python calls, LFM2.5
    "pythonic": Grammar(
        opener=r"<\|tool_call_start\|>|<\|python_start\|>(?=\s*\[)|(?=\[\s*[\w.]+\()",
        read=python_calls("<|tool_call_end|>", "<|python_end|>"),
        example="[NAME(KEY=VALUE)]",
    ),
}
