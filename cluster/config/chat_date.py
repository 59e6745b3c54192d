"""`chat_date=`: the date that chat templates print, the same from the start to the last resume."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import TypeVar

from cluster.config.common import CommonConfig
from distill.settings import changed

Config = TypeVar("Config", bound=CommonConfig)


def with_chat_date(config: Config) -> Config:
    """The settings with a `chat_date`: as given, else that of the run in `out=`, else today's."""
    if config.model.chat_date is not None:
        return config
    try:
        written = json.loads((Path(config.out) / "config.json").read_text(encoding="utf-8"))
        began = written["settings"]["model"]["chat_date"]
    except FileNotFoundError:
        began = date.today().isoformat()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return config  # the check of out= says what is wrong with it
    return changed(config, chat_date=began)
