"""Addresses of servers that somebody else runs."""

from __future__ import annotations

from urllib.parse import urlsplit

from distill.errors import ConfigError

API_KEY_VARIABLE = "ISOTHERM_TEACHER_API_KEY"


def is_url(model: str) -> bool:
    """True if `teacher=` names a running server, not a checkpoint."""
    return model.startswith(("http://", "https://"))


def check_url(url: str) -> None:
    """Raises ConfigError unless it is http(s)://host[:port] and nothing more."""
    parts = urlsplit(url)
    try:
        good = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        good = False
    if parts.username or parts.password:  # before the address is printed anywhere
        raise ConfigError(
            "teacher= holds a user or a password, which would stand in config.json; give the "
            f"server's key in {API_KEY_VARIABLE}, and write http://host:port"
        )
    if not good or parts.path not in ("", "/") or parts.query:
        raise ConfigError(f"teacher={url} is not an address; write http://host:port")
