"""Extraction of mathematical expressions from text, as LaTeX that math-verify can parse."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterator
from decimal import Decimal

# The answer is at the end; searching more text would only be slower.
_LONGEST = 20_000
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_DOLLAR = re.compile(r"(?<!\\)\$")
_MARKS = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_MARKED = re.compile(r"\$[^$]+\$|\\\((?:[^\\]|\\(?![()]))++\\\)|\\\[(?:[^\\]|\\(?![\[\]]))++\\\]")
# \( and \[ that nothing closes, or after which another one opens first.
_UNCLOSED = re.compile(
    r"(?<!\\)(?:\\\((?!(?:[^\\]|\\\\|\\(?![()]))*+\\\))|\\\[(?!(?:[^\\]|\\\\|\\(?![\[\]]))*+\\\]))"
)
# US$18, and \$18, which is how LaTeX writes money.
_CURRENCY = re.compile(
    r"\b(?:US|USD|AU|CA|HK|NZ|A|C)\s*\\?\$|\\\$|\bUSD\s*(?=\d)|(?<=\d)\s*USD\b|[€£¥₹]"
)
# Spaces between thousands: 1 000 and 1\,000.
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\s|\\[,;: ]|~)\d{3})+(?!\d)")
_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{NON-BREAKING HYPHEN}", "-"),
        **{"\N{MULTIPLICATION SIGN}": r"\times ", "÷": r"\div ", "·": r"\cdot "},
        **{"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "},
        **{"\N{UNION}": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^\circ ", "±": r"\pm "},
    }
)
_VULGAR = "\u00bc-\u00be\u2150-\u215e"
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
# A number in another base than ten (1001_2) equals only itself, so it is read as a symbol.
_BASED = re.compile(r"(?<![\w.])(\d+)_(?:\{(?!10\})(\w+)\}|(?!10(?!\d))(\d+))(?!\w)")
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*+\^\s*+(?:\d|\{\d+\}))?\s*+(?:\\left\s*+)?[({]?\s*+-?)"
    r"(\d+(?:\.\d+)?)\s*+\^\s*+(?:\\circ|\{\s*+\\circ\s*+\})"
)
# Notations that math-verify does not read, and those that it does.
_NOTATIONS = (
    (re.compile(r"\\(?:nice|s)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\degree(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<=\d)\s*+[xX]\s*+(?=10\s*+\^)"), r"\\times "),
    # The real root of a negative number, not the principal one.
    (re.compile(r"\\sqrt\s*+\[(\d*[13579])\]\s*+\{\s*+-\s*+(\d+)\}"), r"(-\\sqrt[\1]{\2})"),
    (_DEGREES, r"\1\\frac{\2\\pi}{180}"),
)
# A percentage with a fraction, of which math-verify would drop the whole part: 33\frac13\%.
_PERCENT = re.compile(
    r"(?<![\d.])(?:(\d{1,999})\s*+)?\\[dtc]?frac\s*+"
    r"(?:(\d)\s*+(\d)|\{(\d{1,999})\}\s*+\{(\d{1,999})\})\s*+(?=\\?%)"
)
# The letter of a choice before its text, which names no other choice: (A) 5.
_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|mathbf|mathrm)\s*+\{)?\(([A-J])\)\}?(?:\s|~|\\[ ,;:]|\\quad)"
    r"(?=[^A-Z]*\d)[^A-Z]*+"
)
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWER = re.compile(
    rf"(?<=[\d}}])\s*+(\\(?:text|mbox|mathrm)\s*+\{{)?\s*+({'|'.join(_POWERS)})s?(?![A-Za-z])"
)
# A word is text, and no product of its letters.
_WORDS = re.compile(r"(?!(?i:infinity)$)(?:[A-Za-z]{4,}|[A-Z]{3})(?: (?!(?:and|or)\b)[A-Za-z]+)*")
# Levels of roots within roots that are read.
_ROOTS_WITHIN = 8
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-zπ]))")
_MIXED = re.compile(r"(?<![\w.,/^{}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/]|\.\d)")
# The number of digits is limited, because Python parses numbers of at most 4300.
_REPEATING = re.compile(
    r"(?<!\d)(\d{0,999})\.(\d{0,999})\\(?:overline|bar|dot)\s*(?:\{(\d{1,999})\}|(\d))"
)
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d{1,3})(?![\w{]|\.\d)")
# Expressions in plain text that math-verify does not recognise: 3√2, 1½, 2π, x², 1 1/2, 11_2, and
# 2 million.
_PLAIN = re.compile(
    rf"(?:-|(?<![\w.()]))[\w.()]*[√∛∜π∞{_VULGAR}{_SUPERSCRIPTS}][\w.()+\-*/^√∛∜π∞{_VULGAR}{_SUPERSCRIPTS}]*"
    rf"|-?{_MIXED.pattern}|-?{_BASED.pattern}"
    rf"|-?(?<![\d,.])\d[\d,.]*+\s++(?:{'|'.join(_POWERS)})s?\b"
)


def response_text(response: str) -> str:
    """The last box of a response after its thinking, else the end of the response.

    math-verify would read several boxes as parts of one answer, and accept a box in the thinking.
    """
    end = response.rpartition("</think>")[2][-_LONGEST:]
    box = _last_box(end)
    if box is not None:
        return _boxed(box)
    end = _CURRENCY.sub("", end)
    if not _MARKS.search(end):
        end = _PLAIN.sub(lambda found: f" ${_latex(found[0].rstrip('.'))}$ ", end)
    else:
        end = _MARKED.sub(lambda found: _latex(found[0]), end)
    return _exact_decimals(end.translate({ord("\N{MINUS SIGN}"): "-"}))


def answer_text(answer: str) -> Iterator[str]:
    """Candidates for an answer's expression, likeliest first: last box, text in dollars, all."""
    box = _last_box(answer)
    if box is not None:
        yield _boxed(box)
        return
    marks = _MARKS.findall(answer)
    if marks and marks.count("$") % 2 == 0:
        yield _latex(answer)
    yield _boxed(answer)


def without_unclosed(text: str) -> str:
    """Remove marks that open no expression. math-verify would search to the end for each of them,
    several times."""
    return _UNCLOSED.sub("", text)


def _last_box(text: str) -> str | None:
    """Content of the last box; all text after it if its brace is never closed."""
    found = list(_BOX.finditer(text))
    if not found:
        return None
    inside, depth = text[found[-1].end() :], 1
    for place, character in enumerate(inside):
        if character in "{}" and inside[place - 1 : place] != "\\":
            depth += 1 if character == "{" else -1
        if depth == 0:
            return inside[:place]
    return inside


def _boxed(content: str) -> str:
    latex = _DOLLAR.sub("", _latex(content)).strip()
    # The end of a sentence, not the delimiter of \right. and not the space \, .
    kept = latex.rstrip(string.whitespace + ".,;")
    latex = latex[: len(kept) + kept.endswith(("\\", "\\right"))]
    if choice := _CHOICE.fullmatch(latex):
        latex = choice[1]
    if _WORDS.fullmatch(latex):
        latex = rf"\text{{{latex}}}"
    return rf"\boxed{{{latex}}}" if latex else ""


def _latex(text: str) -> str:
    """Replace other notations in a text by LaTeX."""
    text = _CURRENCY.sub("", text)
    text = _THOUSANDS.sub(lambda found: "".join(re.findall(r"\d", found[0])), text)
    text = re.sub(f"[{_VULGAR}]", _vulgar, text)
    text = re.sub(f"[{_SUPERSCRIPTS}]+", _superscript, text)
    for _ in range(_ROOTS_WITHIN):
        text = _ROOT.sub(_root, text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text.translate(_SYMBOLS))
    for notation, latex in _NOTATIONS:
        text = notation.sub(latex, text)
    text = _PERCENT.sub(_improper, text)
    text = _BASED.sub(lambda found: f"b_{{{found[1]}base{found[2] or found[3]}}}", text)
    text = _POWER.sub(lambda found: rf"\times 10^{{{_POWERS[found[2]]}}}{found[1] or ''}", text)
    return _exact_decimals(text)


def _exact_decimals(text: str) -> str:
    return _EXPONENT.sub(_plain_decimal, _REPEATING.sub(_repeating, text))


def _vulgar(found: re.Match[str]) -> str:
    return r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", found[0]).split("\u2044"))


def _superscript(found: re.Match[str]) -> str:
    digits = unicodedata.normalize("NFKC", found[0]).replace("\N{MINUS SIGN}", "-")
    return f"^{{{digits}}}"


def _improper(found: re.Match[str]) -> str:
    whole, top, bottom = (
        int(each or 0) for each in (found[1], found[2] or found[4], found[3] or found[5])
    )
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _root(found: re.Match[str]) -> str:
    sign, *insides = found.groups()
    return f"{_ROOTS[sign]}{{{next(each for each in insides if each is not None)}}}"


def _repeating(found: re.Match[str]) -> str:
    r"""Convert a repeating decimal, such as 0.1\overline{6}, to a fraction."""
    whole, start, period = found[1] or "0", found[2], found[3] or found[4]
    numerator = int(whole + start + period) - int(whole + start)
    return rf"\frac{{{numerator}}}{{{10 ** len(start) * (10 ** len(period) - 1)}}}"


def _plain_decimal(found: re.Match[str]) -> str:
    return format(Decimal(f"{found[1]}e{found[2]}"), "f")
