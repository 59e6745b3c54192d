"""The page of a report: one HTML file that makes no network requests.

Text of models is data, never markup: it is in a JSON block in which no tag can begin or end, and
the page's script inserts it as text. A content security policy allows only the page's own style and
scripts, whatever else the page contains.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Parts of the page's script, in order.
_SCRIPTS = ("base", "curves", "timeline", "groups", "tokens", "reader", "links")
# The only characters with a meaning to an HTML parser within a script.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def report_page(data: Mapping[str, Any]) -> str:
    """HTML of the page for `data`, the result of `report_data`.

    If `data` has `live`, the version of the data on a server, the page polls that server for newer
    versions.
    """
    style = _part("page.css")
    live = "live" in data
    script = "\n".join(_part(f"{name}.js") for name in (*_SCRIPTS, *["live"] * live))
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    if live:
        policy += "; connect-src 'self'"
    # The data comes last, because it may contain the marks of the other parts.
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": as_json(data)}
    page = _part("page.html")
    for name, part in parts.items():
        page = page.replace(f"@@{name}@@", part, 1)
    return page


def as_json(data: Mapping[str, Any]) -> str:
    """JSON that is inert within an HTML script: plain ASCII without <, > and &."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
