"""BM25 tokenizer: casefolded words; unigrams and bigrams of CJK characters."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

# Character ranges: Han with its iteration marks, kana, hangul, and the planes of rare Han.
CJK = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\u1100-\u11ff\uac00-\ud7af\uff66-\uff9f\U00020000-\U0003ffff"
)
_RUN = re.compile(rf"(?P<cjk>[{CJK}]+)|[^\W_{CJK}]+")


def words(text: str) -> list[str]:
    """Words of a text in order, casefolded and normalised in width.

    A run of CJK characters yields its characters and pairs of neighbours. Characters that are not
    part of words (punctuation, `_`) separate words.
    """
    found: list[str] = []
    for match in _RUN.finditer(unicodedata.normalize("NFKC", text).casefold()):
        run = match.group()
        if match["cjk"] is None:
            found.append(run)
        else:
            found += [*run, *(a + b for a, b in pairwise(run))]
    return found
