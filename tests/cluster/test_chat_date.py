"""The date in chat templates: given, or that of the run's first day."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from cluster.config.opd import OpdConfig
from cluster.train import with_chat_date
from distill.settings import changed

NewOpd = Callable[..., OpdConfig]


def began(out: Path, **settings: str) -> None:
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"recipe": "opd", "settings": {"model": settings}}))


def test_a_new_run_has_today_s_date(opd: NewOpd, tmp_path: Path) -> None:
    before = date.today()
    config = with_chat_date(opd(out=str(tmp_path / "run")))
    assert config.model.chat_date in {before.isoformat(), date.today().isoformat()}


def test_a_resumed_run_keeps_its_date(opd: NewOpd, tmp_path: Path) -> None:
    out = tmp_path / "run"
    began(out, chat_date="2026-01-31")
    assert with_chat_date(opd(out=str(out))).model.chat_date == "2026-01-31"
    given = changed(opd(out=str(out)), chat_date="2026-02-01")
    assert with_chat_date(given).model.chat_date == "2026-02-01"  # which the check of out= refuses


@pytest.mark.parametrize("written", ['{"settings": {}}', "[]", "no JSON", '{"settings": 1}'])
def test_a_resumed_run_without_a_date_has_none(opd: NewOpd, tmp_path: Path, written: str) -> None:
    (tmp_path / "config.json").write_text(written)
    assert with_chat_date(opd(out=str(tmp_path))).model.chat_date is None
