"""`chat_date=`: the date that chat templates print, which stays the same when a run is resumed."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TypeVar

from cluster.config.common import CommonConfig
from cluster.config.files import at_path
from cluster.config.run_record import RunRecord
from distill.errors import DataError
from distill.settings import changed

Config = TypeVar("Config", bound=CommonConfig)


def with_chat_date(config: Config) -> Config:
    """Settings with a `chat_date`: the given one, else that of the run in `out=`, else today."""
    if config.model.chat_date is not None:
        return config
    try:
        record = RunRecord.of_run(Path(config.out))
    except DataError:
        return config  # the check of out= raises the error
    today = date.today().isoformat()
    began = today if record is None else at_path(record.settings, "model.chat_date")
    return changed(config, chat_date=began)
