"""`weights=` of a run that trains an adapter: the pushed tensors and their size."""

from pathlib import Path
from typing import Any

import pytest

from actors.sglang.installed import sglang_installed
from cluster.config.opd import OpdConfig
from cluster.placement.engines import RunEngines
from cluster.placement.push_plan import adapter_push, describe_push
from distill.errors import ConfigError
from distill.settings import by_names, changed
from distill.stops import StopTokens
from learner.learner import Learner
from tests.conftest import TinyPair
from tests.families import family_dir
from tests.refusals import refuses
from tests.tiny import EOS

pytestmark = pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed")


def config(pair: TinyPair, **settings: Any) -> OpdConfig:
    given = {
        "student": pair.student, "teacher": pair.teacher, "prompts": pair.prompts, "out": "out",
        "temperature": 0.7, "engine": "sglang", "device": "cuda", "lora.rank": 4,
    }  # fmt: skip
    return by_names(OpdConfig, **(given | settings))


def test_servers_get_the_adapter_alone(tiny_pair: TinyPair, tmp_path: Path) -> None:
    merged = config(tiny_pair, **{"queue.max_staleness": 3})
    alone = changed(merged, weights="adapter")
    assert "alone" in adapter_push(alone)
    assert "weights=adapter would" in adapter_push(merged)
    alone, merged = changed(alone, device="cpu"), changed(merged, device="cpu")
    learner = Learner(
        alone.policy_learner(None, StopTokens(ids=(EOS,), one_event=False)), str(tmp_path)
    )
    parameters = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    assert f"{4 * parameters / 2**20:.3g} MiB" in describe_push(alone)
    assert describe_push(alone) != describe_push(merged)
    flags = RunEngines(alone).policy(tiny_pair.student, "").server_flags
    assert "--enable-lora" in flags and "--max-loaded-loras 5" in flags
    assert "--enable-lora" in RunEngines(alone).evaluation(tiny_pair.student, "").server_flags
    assert not RunEngines(merged).policy(tiny_pair.student, "").server_flags


@pytest.mark.parametrize(
    "settings",
    [
        {"policy_server_flags": "--enable-dp-attention --dp-size 2 --tp-size 2"},
        {"policy_server_flags": "--speculative-algorithm EAGLE"},
        {"on_weight_update": "restart"},
        {"lora.targets": "k_proj"},
        {"lora.targets": "gate_proj,down_proj"},
        {"lora.rank": None},
    ],
)
def test_weights_adapter_is_refused_if_the_server_cannot_serve_it(
    tiny_pair: TinyPair, settings: dict[str, Any]
) -> None:
    assert adapter_push(config(tiny_pair, **settings)) == ""
    with refuses(ConfigError, "weights.transport"):
        adapter_push(config(tiny_pair, weights="adapter", **settings))


def test_no_adapter_push_is_suggested_for_an_untested_family(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    student = family_dir(tmp_path, "qwen3_moe")
    assert adapter_push(config(tiny_pair, student=student)) == ""


@pytest.mark.parametrize("settings", [{"engine": "embedded"}, {"weights": "disk"}])
def test_no_adapter_push_is_suggested_for_other_engines_and_transports(
    tiny_pair: TinyPair, settings: dict[str, Any]
) -> None:
    assert adapter_push(config(tiny_pair, **settings)) == ""
