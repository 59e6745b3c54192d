"""`estimator=auto`: its choice and reason, and that a run keeps it."""

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cluster.run
from cluster.config import estimator
from cluster.config.estimator import with_estimator
from cluster.config.opd import OpdConfig
from cluster.config.rollout_checks import check_rollout
from distill.engine import EngineInfo
from distill.errors import ConfigError
from distill.gpu import readable
from distill.models.loading import load_config
from tests.conftest import TinyPair
from tests.refusals import refuses
from tests.samples import engine_info
from tests.tiny import VOCAB_SIZE

NewOpd = Callable[..., OpdConfig]
URL = "http://teacher:30000"


def server(**changes: Any) -> EngineInfo:
    external = {"kind": "sglang (external)", "model": URL, "context_length": 256}
    return engine_info(**external | {"eos_token_ids": None} | changes)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator, "free_bytes", lambda device: 1 << 20)


def chosen(config: OpdConfig) -> tuple[str, str]:
    made, line = with_estimator(config)
    assert line.startswith(f"estimator=auto: {made.objective.estimator}, because ")
    return made.objective.estimator, line


def test_full_is_chosen_for_teachers_and_heads_that_fit(opd: NewOpd, tiny_pair: TinyPair) -> None:
    head = {"teacher": URL, "teacher.head": tiny_pair.teacher}
    for more in ({}, {"divergence": "jsd"}, {"lora_rank": 4, "learner_workers": 2}, head):
        assert chosen(opd(**{"estimator": "auto"} | more))[0] == "full"


@pytest.mark.usefixtures("no_room")
def test_top_k_is_chosen_for_a_teacher_that_does_not_fit(opd: NewOpd) -> None:
    for divergence in ("reverse_kl", "forward_kl"):
        name, line = chosen(opd(estimator="auto", divergence=divergence))
        assert name == "top_k"
        assert "0.7 MiB" in line and "cpu" in line


def test_a_kl_discount_needs_sampled_terms(opd: NewOpd, tiny_pair: TinyPair) -> None:
    settings: dict[str, Any] = {"estimator": "auto", "kl_discount_factor": 0.5}
    assert chosen(opd(**settings))[0] == "sampled"
    of_reference = settings | {"reference": tiny_pair.student, "reference_kl_coef": 0.1}
    assert chosen(opd(**of_reference, divergence="jsd"))[0] == "full"
    heads = {"teacher": URL, "teacher.head": tiny_pair.teacher}
    assert chosen(opd(**of_reference, **heads))[0] == "full"
    with refuses(ConfigError, "objective.kl_discount_factor"):
        with_estimator(opd(**settings, **heads))


@pytest.mark.parametrize(
    "info, settings, expected",
    [
        ({}, {}, "top_k"),
        ({"scores_given": False}, {}, "sampled"),
        ({"scores_given": False}, {"divergence": "forward_kl"}, "top_k"),  # its own likeliest
        ({"vocab_size": VOCAB_SIZE + 32}, {}, "top_k"),
    ],
)
def test_the_choice_for_a_running_server_follows_its_abilities(
    opd: NewOpd, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch, info: dict[str, Any],
    settings: dict[str, Any], expected: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(estimator, "ask_server", lambda role, url: server(**info))
    assert chosen(opd(estimator="auto", teacher=URL, **settings))[0] == expected
    teachers = {"a": {"model": URL}, "b": {"model": tiny_pair.teacher}}
    among = opd(estimator="auto", teacher=None, teachers=teachers, **settings)
    assert chosen(among)[0] == expected


@pytest.mark.usefixtures("no_room")
def test_the_reason_names_a_head_and_its_bytes_if_a_teacher_does_not_fit(opd: NewOpd) -> None:
    config = opd(estimator="auto", prompts_per_step=4, group_size=2)
    assert config.teacher.model is not None
    width, most = load_config(config.teacher.model).hidden_size, config.sampling.max_new_tokens
    states = readable(width * 4 * 8 * most)
    line = chosen(config)[1]
    assert "teacher.head=" in line and states in line


@pytest.mark.usefixtures("no_room")
def test_sampled_is_chosen_for_a_small_vocabulary(
    opd: NewOpd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimator, "DEFAULT_TOP_K", VOCAB_SIZE // 3 + 1)
    assert chosen(opd(estimator="auto"))[0] == "sampled"
    with pytest.raises(ConfigError):
        with_estimator(opd(estimator="auto", divergence="jsd"))


@pytest.mark.usefixtures("no_room")
def test_a_run_keeps_its_first_choice(opd: NewOpd) -> None:
    config = opd(estimator="auto")
    Path(config.out).mkdir()
    begun = Path(config.out) / "config.json"
    settings = {"objective": {"estimator": "sampled"}}
    begun.write_text(json.dumps({"recipe": "opd", "settings": settings}))
    assert chosen(config)[0] == "top_k"  # no step was trained
    (begun.parent / "metrics.jsonl").write_text('{"step": 1}\n')
    assert chosen(config)[0] == "sampled"
    begun.write_text("{")
    assert chosen(config)[0] == "top_k"  # the check of the directory refuses the file later


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("rule", [{}, {"teacher_lag": 2}, {"teacher_ema": 0.9}], ids=str)
def test_full_is_chosen_for_a_moving_teacher_without_a_copy(
    opd: NewOpd, rule: dict[str, Any]
) -> None:
    config, _ = with_estimator(opd(estimator="auto", teacher="policy", **rule))
    assert config.objective.estimator == "full"
    assert config.learner_is_teacher and not config.copied_teachers


def test_the_plan_names_the_choice_and_the_states_of_a_head(
    opd: NewOpd, tiny_pair: TinyPair
) -> None:
    shown = StringIO()
    config = opd(**{"estimator": "auto", "dry_run": True, "teacher.head": tiny_pair.teacher})
    cluster.run.run(config, Console(file=shown, width=200))
    assert "estimator=auto: full" in shown.getvalue()
    assert "bytes a trained token" in shown.getvalue()


@pytest.mark.parametrize("estimator", ["auto", "full"])
@pytest.mark.parametrize("setting", [{"loss": "ppo"}, {"correction": "mask"}], ids=str)
def test_settings_without_effect_on_full_are_refused(
    opd: NewOpd, estimator: str, setting: dict[str, Any]
) -> None:
    [name] = setting
    with refuses(ConfigError, f"objective.{name}"):
        check_rollout(with_estimator(opd(estimator=estimator, **setting))[0])
    rewarded = {"reward": "contains", "reward_coef": 0.1}
    made, _ = with_estimator(opd(estimator=estimator, **setting, **rewarded))
    assert made.objective.estimator == "full"


@pytest.mark.slow
def test_a_resumed_run_trains_with_the_first_choice(
    opd: NewOpd, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {
        "estimator": "auto", "local": True, "engine": "embedded", "prompts_per_step": 2,
        "group_size": 2, "eval_size": 0,
    }  # fmt: skip
    config = opd(**small, steps=1)
    cluster.run.run(config, Console(quiet=True))
    written = json.loads((Path(config.out) / "config.json").read_text())
    assert written["settings"]["objective"]["estimator"] == "full"
    monkeypatch.setattr(estimator, "free_bytes", lambda device: 1 << 20)
    cluster.run.run(opd(**small, steps=2), Console(quiet=True))
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    assert ["opd/divergence" in json.loads(line) for line in lines if "time/step" in line] == [
        True, True,
    ]  # fmt: skip
