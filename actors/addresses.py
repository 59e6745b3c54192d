"""Addresses of other servers, as settings name them."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit


def split_address(url: str) -> SplitResult | None:
    """Parts of an http(s) URL; None unless it names a host, and a port that can be one."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or half of an IPv6 address
        return None
    return parts if good and url.isprintable() and " " not in url else None


def names_user(url: str) -> bool:
    """True if a URL holds a user or a password, whatever else is wrong with it."""
    return re.match(r"[a-z]*:?/*[^/?#]*@", url) is not None
