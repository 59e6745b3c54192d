"""Removal of secrets from text of other programs that a run prints, stores or sends."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from cluster.config.files import WRITTEN_CLASS
from distill.settings import by_path

_HIDDEN = "***"
_NOTIFY = "tracking.notify"
_SECRET_NAME = r"(?:key|token|secret|password|passwd|credential|signature)"
_USER_INFO = re.compile(r"(?<=://)[^\s/?#]+@")
_PARAMETER = re.compile(
    rf"([?&](?=[^\s=&#?]*{_SECRET_NAME})[^\s=&#?]*+=)[^\s&#'\"]+", re.IGNORECASE
)
_HEADER = re.compile(r"\b((?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(_SECRET_NAME, re.IGNORECASE)
# Minimum length of a secret. Shorter values are words or flags (TOKENIZERS_PARALLELISM=false).
_SHORTEST = 8


def redacted(text: str) -> str:
    """Replace secrets in a text by ***.

    Secrets are users and passwords in URIs, keys in queries and headers, and the values of
    environment variables with a secret's name.
    """
    for secret in sorted(_secrets(os.environ), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    text = _USER_INFO.sub(f"{_HIDDEN}@", text)
    text = _PARAMETER.sub(rf"\1{_HIDDEN}", text)
    return _HEADER.sub(rf"\1{_HIDDEN}", text)


def _secrets(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST:
            yield value
        elif "@" in value and "://" in value:
            try:
                password = urlsplit(value).password or ""
            except ValueError:  # an incomplete IPv6 address
                continue
            if len(password) >= _SHORTEST:
                yield from {password, unquote(password)}


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run by path, for other services.

    A URL in `tracking.notify` is reduced to its host, because the path of a chat's web hook is its
    key.
    """
    settings = by_path(settings)
    for path in [path for path in settings if path.endswith(f".{WRITTEN_CLASS}")]:
        settings[path.removesuffix(f".{WRITTEN_CLASS}")] = settings.pop(path)
    try:
        url = urlsplit(str(settings.get(_NOTIFY)))
    except ValueError:
        return {**settings, _NOTIFY: _HIDDEN}
    if url.scheme not in ("http", "https"):
        return settings
    return {**settings, _NOTIFY: f"{url.scheme}://{url.netloc.rpartition('@')[2]}/..."}
