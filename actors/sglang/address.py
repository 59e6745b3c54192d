"""Addresses of servers that somebody else runs, as settings name them."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from distill.errors import ConfigError

API_KEY_VARIABLE = "ISOTHERM_TEACHER_API_KEY"


def is_url(model: str) -> bool:
    """True if `teacher=` names a running server, not a checkpoint."""
    return model.startswith(("http://", "https://"))


def check_url(url: str) -> None:
    """Raises ConfigError unless it is http(s)://host[:port] and nothing more."""
    parts = split_address(url)
    if names_user(url):  # before the address is printed anywhere
        raise ConfigError(
            "teacher= holds a user or a password, which would stand in config.json; give the "
            f"server's key in {API_KEY_VARIABLE}, and write http://host:port",
            field="teacher.model",
        )
    if parts is not None and re.match(r"/(v\d|api|openai)\b|.*/completions", parts.path):
        raise ConfigError(
            f"teacher={url} is the address of an OpenAI-compatible endpoint, which answers in "
            "text: it cannot say how likely given tokens are at T. Give a checkpoint, or "
            "http://host:port of an SGLang server, to score; beside one an endpoint can write the "
            "samples of teacher.sft_steps= and teacher.sample_share= (teacher.samples_from=), and "
            "for SFT alone there are cluster.sample_to_sft and recipe=sft",
            field="teacher.model",
        )
    if parts is None or parts.path not in ("", "/") or parts.query:
        raise ConfigError(
            f"teacher={url} is not an address; write http://host:port", field="teacher.model"
        )


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
