"""`weights=` of a run that trains an adapter: what is pushed, and how large it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.sglang.installed import sglang_installed
from cluster.config.adapter_push import with_adapter_push
from cluster.config.on_policy import OpdConfig
from cluster.placement.push_plan import describe_push
from distill.errors import ConfigError
from distill.settings import by_names
from learner.learner import Learner
from tests.conftest import TinyPair
from tests.families import family_dir
from tests.refusals import refuses

pytestmark = pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed")


def config(pair: TinyPair, **settings: Any) -> OpdConfig:
    given = {
        "student": pair.student, "teacher": pair.teacher, "prompts": pair.prompts, "out": "out",
        "temperature": 0.7, "engine": "sglang", "device": "cuda", "lora.rank": 4,
    }  # fmt: skip
    return by_names(OpdConfig, **(given | settings))


def test_servers_get_the_adapter_alone(tiny_pair: TinyPair, tmp_path: Path) -> None:
    given = config(tiny_pair, **{"queue.max_staleness": 3})
    chosen, said = with_adapter_push(given)
    assert chosen.weights == "adapter" and said
    learner = Learner(chosen.policy_learner("cpu", None, None), str(tmp_path))
    parameters = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    assert f"{4 * parameters / 2**20:.3g} MiB" in describe_push(chosen, "cpu")
    assert describe_push(chosen, "cpu") != describe_push(given, "cpu")
    flags = chosen.policy_engine(tiny_pair.student, "cpu", "").server_flags
    assert "--enable-lora" in flags and "--max-loaded-loras 5" in flags
    assert "--enable-lora" in chosen.evaluation_engine(tiny_pair.student, "cpu", "").server_flags
    assert not given.policy_engine(tiny_pair.student, "cpu", "").server_flags


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "embedded"},
        {"policy_server_flags": "--enable-dp-attention --dp-size 2 --tp-size 2"},
        {"policy_server_flags": "--speculative-algorithm EAGLE"},
        {"on_weight_update": "restart"},
        {"lora.targets": "k_proj"},
        {"lora.targets": "gate_proj,down_proj"},
    ],
)
def test_engines_that_cannot_get_merged_weights(
    tiny_pair: TinyPair, settings: dict[str, Any]
) -> None:
    chosen, said = with_adapter_push(config(tiny_pair, **settings))
    assert chosen.weights == "auto" and "merged" in said
    if settings.get("engine") == "embedded":
        return  # weights=adapter is refused with the settings
    with refuses(ConfigError, "weights"):
        with_adapter_push(config(tiny_pair, weights="adapter", **settings))


def test_on_a_cpu_it_is_pushed_alone_where_that_is_said(tiny_pair: TinyPair) -> None:
    chosen, said = with_adapter_push(config(tiny_pair, device="cpu"))
    assert chosen.weights == "auto" and "merged" in said
    chosen, said = with_adapter_push(config(tiny_pair, device="cpu", weights="adapter"))
    assert chosen.weights == "adapter" and "alone" in said


def test_a_model_whose_adapters_sglang_was_not_seen_to_serve(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    student = family_dir(tmp_path, "qwen3_moe")
    chosen, said = with_adapter_push(config(tiny_pair, student=student))
    assert chosen.weights == "auto" and "merged" in said


@pytest.mark.parametrize("settings", [{"lora.rank": None}, {"weights": "disk"}])
def test_without_an_adapter_or_with_another_transport_nothing_is_said(
    tiny_pair: TinyPair, settings: dict[str, Any]
) -> None:
    given = config(tiny_pair, **settings)
    assert with_adapter_push(given) == (given, "")
