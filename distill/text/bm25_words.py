"""BM25 tokenizer: casefolded words; unigrams and bigrams of CJK characters."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

# Han with its iteration marks, kana, hangul, and the planes of rare Han: for character classes.
CJK = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\u1100-\u11ff\uac00-\ud7af\uff66-\uff9f\U00020000-\U0003ffff"
)
_RUN = re.compile(rf"(?P<cjk>[{CJK}]+)|[^\W_{CJK}]+")


def words(text: str) -> list[str]:
    """The words, folded of case and of width, in order; of a run of CJK, characters and pairs.

    What joins no word (punctuation, `_`) ends one.
    """
    found: list[str] = []
    for match in _RUN.finditer(unicodedata.normalize("NFKC", text).casefold()):
        run = match.group()
        if match["cjk"] is None:
            found.append(run)
        else:
            found += [*run, *(a + b for a, b in pairwise(run))]
    return found
