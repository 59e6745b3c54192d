"""Class and arguments of the engine that each setting builds."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from actors import config as config_module
from actors.config import EngineConfig, EngineSettings, engine_note, start_deadline
from actors.embedded.engine import EmbeddedEngine
from actors.sglang import installed as sglang_here
from actors.sglang.external import ExternalSglangEngine
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.parallelism import Parallelism
from actors.sglang.start import server_environment
from actors.sglang.turns import TurnTakingEngine
from distill.errors import ConfigError
from tests.refusals import refuses


@pytest.mark.parametrize("installed", [True, False])
def test_auto_is_sglang_where_it_can_run(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    for module in (config_module, sglang_here):
        monkeypatch.setattr(module, "sglang_installed", lambda: installed)
    assert EngineSettings(kind="auto").kind_on("cuda") == ("sglang" if installed else "embedded")
    assert EngineSettings(kind="auto").kind_on("cpu") == "embedded"
    # No warning if no other engine is possible.
    assert bool(engine_note("auto", "embedded")) is installed
    assert not engine_note("embedded", "embedded")
    assert EngineSettings(kind="embedded").kind_on("cuda") == "embedded"
    if installed:
        assert EngineSettings(kind="sglang").kind_on("cpu") == "sglang"
    else:
        with refuses(ConfigError, "engine.kind"):
            EngineSettings(kind="sglang").kind_on("cpu")


@pytest.mark.parametrize(
    "kind, model, engine_class",
    [
        ("embedded", "dir", EmbeddedEngine),
        ("sglang", "dir", HostedSglangEngine),
        ("embedded", "http://10.0.0.1:3000", ExternalSglangEngine),
        ("sglang", "https://teacher:3000", ExternalSglangEngine),
    ],
)
def test_the_class_follows_from_kind_and_model(kind, model: str, engine_class: type) -> None:
    config = EngineConfig(kind=kind, model=model)
    assert config.engine_class is engine_class
    assert config.external == model.startswith("http")
    assert pickle.loads(pickle.dumps(config)) == config


def test_an_engine_with_a_turn_takes_it() -> None:
    assert EngineConfig(kind="sglang", model="m", turn="t").engine_class is TurnTakingEngine


def test_a_start_may_take_longer_the_larger_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for part in "ab":
        with (tmp_path / f"{part}.safetensors").open("wb") as file:
            file.truncate(2_000_000_000)  # a sparse file
    assert start_deadline(None, str(tmp_path)) == 640
    assert start_deadline(None, None) == 600
    assert start_deadline(7, str(tmp_path)) == 7


def test_kernels_are_compiled_before_a_start_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"
    monkeypatch.delenv(name, raising=False)
    assert server_environment("cuda", 1, Parallelism())[name] == "false"
    monkeypatch.setenv(name, "true")
    assert server_environment("cuda", 1, Parallelism())[name] == "true"
    assert name not in server_environment("cpu", 1, Parallelism())


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_running_requests": 0}, "max_running_requests"),
        ({"start_deadline_s": 0}, "start_deadline_s"),
        ({"server_flags": "tp 2"}, "server_flags"),
        ({"model": "http://"}, "teacher.model"),
        ({"model": "http://host:port"}, "teacher.model"),
        ({"model": "http://host?x=1"}, "teacher.model"),
        ({"model": "http://host/v1"}, "teacher.model"),
    ],
)
def test_settings_that_cannot_work(settings: dict, field: str) -> None:
    with refuses(ConfigError, field):
        EngineConfig(**dict[str, Any](kind="sglang", model="m") | settings)
