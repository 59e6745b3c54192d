"""`device=auto` and `engine=auto`, by the GPUs of this machine or of the cluster to join."""

from collections.abc import Callable

import pytest

from cluster.config.opd import OpdConfig
from cluster.placement.checked import with_engine
from cluster.placement.device_choice import with_device
from distill.errors import ConfigError
from tests.refusals import refuses

Opd = Callable[..., OpdConfig]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here and no cluster; SGLang is installed."""
    monkeypatch.setattr("actors.config.sglang_installed", lambda: True)
    monkeypatch.setattr("actors.config.require_sglang", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, bool], None]:
    """join(gpus, grows): name a cluster of so many GPUs, with an autoscaler or without."""

    def named(gpus: float, grows: bool) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
        monkeypatch.setattr("cluster.placement.connect.cluster_gpus", lambda: gpus)
        monkeypatch.setattr("cluster.placement.connect.autoscales", lambda: grows)

    return named


@pytest.mark.parametrize(
    ("gpus", "grows", "auto", "cuda"),
    [
        (0, False, "cpu", None),
        (0, True, None, "cuda"),
        (4, False, "cuda", "cuda"),
        (4, True, "cuda", "cuda"),
    ],
)
def test_the_cluster_to_join_decides(
    opd: Opd, join: Callable[[float, bool], None], gpus: float, grows: bool, auto: str | None,
    cuda: str | None,
) -> None:  # fmt: skip
    join(gpus, grows)
    assert with_device(opd(device="cpu"))[0].cluster.device == "cpu"
    for asked, chosen in (("auto", auto), ("cuda", cuda)):
        if chosen is None:
            with refuses(ConfigError, "cluster.device"):
                with_device(opd(device=asked))
            continue
        config, _ = with_device(opd(device=asked))
        assert config.cluster.device == chosen
        assert with_engine(config)[0].engine.kind == ("sglang" if chosen == "cuda" else "embedded")


def test_a_dry_run_with_given_gpus_contacts_no_cluster(
    opd: Opd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert with_device(opd(device="cuda", dry_run=True))[0].cluster.device == "cuda"
    assert with_device(opd(dry_run=True, gpu_memory_gib=80.0))[0].cluster.device == "cuda"
    with refuses(ConfigError, "RAY_ADDRESS"):
        with_device(opd(dry_run=True))


def test_this_machine_decides_without_a_cluster(opd: Opd, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = with_engine(with_device(opd())[0])
    assert (config.cluster.device, config.engine.kind) == ("cpu", "embedded")
    with refuses(ConfigError, "cluster.device"):
        with_device(opd(device="cuda"))
    with pytest.raises(ConfigError):
        with_device(opd(liger=True))
    for name, value in (("gpus_per_actor", 0.5), ("gpu_memory_gib", 80.0)):
        with refuses(ConfigError, f"cluster.{name}"):
            with_device(opd(**{"device": "cpu", name: value}))
        with_device(opd(**{name: value}))
    with pytest.raises(ConfigError):
        with_engine(opd(weights="ipc", device="cpu"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert with_device(opd(local=True))[0].cluster.device == "cuda"


@pytest.mark.parametrize(
    "changes",
    [
        {"policy_engines": 4},
        {"gpus_per_actor": 0.25},
        {"colocate": "no"},
        {"weights": "ipc", "colocate": "share", "gpus_per_actor": 1.0},
        {"weights": "ipc", "colocate": "share", "policy_server_flags": "--tp-size 2"},
    ],
)
def test_actors_that_cannot_share_gpus_are_refused(
    opd: Opd, join: Callable[[float, bool], None], changes: dict
) -> None:
    join(8, False)
    shared = {
        "learner_workers": 8, "policy_engines": 8, "gpus_per_actor": 0.5, "colocate": "sleep",
        "prompts_per_step": 8, "engine": "sglang",
    }  # fmt: skip
    assert with_device(opd(**shared))[0].cluster.device == "cuda"
    with pytest.raises(ConfigError):
        with_device(opd(**shared | changes))
