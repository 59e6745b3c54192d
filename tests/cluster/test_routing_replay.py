"""`routing_replay=`: its default, and the flags of servers."""

from collections.abc import Callable
from typing import Any

import pytest

from actors.sglang.config import SglangConfig
from actors.sglang.flags import server_flags
from cluster.config.opd import OpdConfig
from cluster.config.routing import with_routing_replay
from cluster.placement.engines import RunEngines
from distill.errors import ConfigError
from distill.models.routers import WEIGH
from tests.families import family_dir
from tests.refusals import refuses

NewOpd = Callable[..., OpdConfig]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return family_dir(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def settled(config: OpdConfig) -> tuple[bool | None, str]:
    made, line = with_routing_replay(config)
    assert RunEngines(made).policy("m", "log").routed_experts == made.replays_routing()
    assert made.learner_config().replays_routing == made.replays_routing()
    assert not RunEngines(made).teacher("t", "log").routed_experts
    return made.learner.routing_replay, line


def test_routing_replay_is_the_default_for_mixtures(opd: NewOpd, mixture: str) -> None:
    replayed, line = settled(opd(student=mixture))
    assert replayed is True and line.startswith("routing_replay=True")
    assert settled(opd(student=mixture, routing_replay=False)) == (False, "")
    assert settled(opd(student=mixture, routing_replay=True)) == (True, "")


def test_a_dense_student_has_no_routing_to_replay(opd: NewOpd) -> None:
    assert settled(opd()) == (False, "")
    with refuses(ConfigError, "learner.routing_replay"):
        settled(opd(routing_replay=True))


def test_routing_replay_that_is_impossible_is_off_or_refused(
    opd: NewOpd, mixture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(WEIGH, "Qwen3MoeTopKRouter")
        replayed, line = settled(opd(student=mixture))
        assert replayed is False and "Qwen3MoeForCausalLM" in line
        with refuses(ConfigError, "learner.routing_replay"):
            settled(opd(student=mixture, routing_replay=True))
    with pytest.raises(ConfigError):
        settled(opd(student=mixture, routing_replay=True, compile=True))
    assert settled(opd(student=mixture, compile=True))[0] is False


def test_servers_record_routed_experts() -> None:
    def flags(device: str, **given: Any) -> list[str]:
        return server_flags(SglangConfig(model="m", device=device, **given), 9)

    arguments = flags("cpu", routed_experts=True)
    assert "--enable-return-routed-experts" in arguments and "--moe-runner-backend" not in arguments
    assert "--enable-return-routed-experts" not in flags("cpu")
    assert flags("cuda", routed_experts=True)[-2:] == ["--moe-runner-backend", "triton"]
    arguments = flags("cuda", routed_experts=True, server_flags="--moe-runner-backend deep_gemm")
    assert arguments[-2:] == ["--moe-runner-backend", "deep_gemm"]
