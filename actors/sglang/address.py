"""Addresses of external servers in settings."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from distill.errors import ConfigError

API_KEY_VARIABLE = "ISOTHERM_TEACHER_API_KEY"


def is_url(model: str) -> bool:
    """True if `teacher=` names a running server, not a checkpoint."""
    return model.startswith(("http://", "https://"))


def check_url(url: str) -> None:
    """Raise ConfigError unless `url` is http(s)://host[:port] without a path or query."""
    parts = split_address(url)
    if names_user(url):  # checked first: the other errors print the address
        raise ConfigError(
            "teacher= contains a user or a password, which would be written to config.json; give "
            f"the server's key in {API_KEY_VARIABLE}, and write http://host:port",
            field="teacher.model",
        )
    if parts is not None and re.match(r"/(v\d|api|openai)\b|.*/completions", parts.path):
        raise ConfigError(
            f"teacher={url} is the address of an OpenAI-compatible endpoint, which returns text "
            "and no log-probs of given tokens at T. Give a checkpoint, or http://host:port of an "
            "SGLang server, to score. In addition, an endpoint can write the samples of "
            "teacher.sft_steps= and teacher.sample_share= (teacher.samples_from=); for SFT alone "
            "use cluster.sample_to_sft and recipe=sft",
            field="teacher.model",
        )
    if parts is None or parts.path not in ("", "/") or parts.query:
        raise ConfigError(
            f"teacher={url} is not an address; write http://host:port", field="teacher.model"
        )


def split_address(url: str) -> SplitResult | None:
    """Split an http(s) URL; None if it has no host, or an invalid port."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or an IPv6 address is incomplete
        return None
    return parts if good and url.isprintable() and " " not in url else None


def names_user(url: str) -> bool:
    """True if a URL contains a user or a password, even if it is otherwise invalid."""
    return re.match(r"[a-z]*:?/*[^/?#]*@", url) is not None
