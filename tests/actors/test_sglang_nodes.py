"""A server over several nodes: the ranks' address, and the command of each node.

tests/actors/test_sglang_tp.py runs real ranks of two nodes.
"""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - public

from actors.sglang import nodes, start
from actors.sglang.config import SglangConfig
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.nodes import RanksStore, SglangFollower
from actors.sglang.start import MeetingPoint
from distill.errors import ConfigError, EngineError, EngineLost
from distill.process_groups import INTERFACE
from learner.process_group import LOOPBACK
from tests.tiny import tiny_model_dir
from tests.waiting import DEADLINE_S


class Process:
    """Stand-in for `SglangServer` that records its arguments."""

    url, api_key, admin_api_key = "", "", ""
    running = True

    def __init__(self, flags: list[str], **settings: Any) -> None:
        self.flags, self.settings = flags, settings

    def option(self, name: str) -> str:
        return self.flags[self.flags.index(name) + 1]

    async def ready(self) -> None:
        pass

    def exit_report(self) -> str:
        return "the SGLang server ended with code 1"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SglangConfig:
    monkeypatch.setattr(start, "require_sglang", lambda: None)
    monkeypatch.setattr(start, "SglangServer", Process)
    model = tiny_model_dir(tmp_path, seed=1)
    return SglangConfig(model=model, device="cpu", server_flags="--tp-size 4 --nnodes 2")


def test_the_ranks_of_all_nodes_have_one_store(config: SglangConfig) -> None:
    engine = HostedSglangEngine(config, address=lambda: LOOPBACK)
    point = asyncio.run(engine.meeting_point())
    follower = SglangFollower(config, point, 1)
    head, other = engine.server, follower.server
    assert isinstance(head, Process) and isinstance(other, Process)
    for rank, process in enumerate((head, other)):
        assert process.option("--nnodes") == "2" and process.option("--node-rank") == str(rank)
        assert process.option("--dist-init-addr") == f"{LOOPBACK}:{point.port}"
        environment = process.settings["environment"]
        assert (
            environment["MASTER_PORT"] == str(point.port) and environment["MASTER_ADDR"] == LOOPBACK
        )
        # Two ranks on each node, though four in all: CPUs for those.
        assert environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
        assert process.settings["port_attempts"] == 1, "a second start would meet the first's ranks"
    assert head.settings["ready_path"] == "/ready" and other.settings["ready_path"] == "/health"
    without = [flags[: flags.index("--node-rank")] for flags in (head.flags, other.flags)]
    assert without[0] == without[1]


_START = """
import sys
from actors.sglang import start
from actors.sglang.config import SglangConfig
start.require_sglang, start.SglangServer = lambda: None, lambda flags, **_: flags
flags = start.start_server(SglangConfig(model="m", device="cpu", context_length=10))
assert flags[:2] == ["--model-path", "m"]
sys.exit("torch" in sys.modules)
"""


def test_a_server_is_started_before_torch_is_imported() -> None:
    subprocess.run([sys.executable, "-c", _START], check=True, timeout=DEADLINE_S)


async def test_a_follower_serves_as_long_as_its_processes(config: SglangConfig) -> None:
    point = MeetingPoint(address=LOOPBACK, port=1)
    follower = SglangFollower(config, point, 1)
    serving = asyncio.create_task(follower.serve())
    await asyncio.sleep(0.05)
    assert not serving.done()
    follower.server.running = False  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(EngineLost):
        await serving


def test_an_engine_that_no_other_node_can_reach_is_refused(config: SglangConfig) -> None:
    with pytest.raises(ConfigError):
        HostedSglangEngine(config)


def test_the_store_listens_on_its_address_alone_and_holds_the_ports_behind_it() -> None:
    stores = [RanksStore(LOOPBACK, 60) for _ in range(3)]
    for store in stores:
        port = store.point.port
        first, second = (TCPStore(LOOPBACK, port, is_master=False) for _ in range(2))
        first.set("from", "one")
        assert second.get("from") == b"one"
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.connect(("127.0.0.2", port))
        for following in range(port + 1, port + 7):
            with socket.socket() as stranger, pytest.raises(OSError):
                stranger.bind((LOOPBACK, following))
    assert len({store.point.port for store in stores}) == 3


def test_no_free_ports_in_a_row_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(host: str, port: int = 0) -> socket.socket:
        if port:
            raise OSError("address already in use")
        return socket.create_server((host, 0))

    monkeypatch.setattr(nodes, "claim_port", taken)
    with pytest.raises(EngineError):
        RanksStore(LOOPBACK, 60)


@pytest.mark.parametrize(
    "address, written", [("10.0.0.1", "10.0.0.1:9"), ("fe80::1", "[fe80::1]:9")]
)
def test_addresses_are_written_as_sglang_reads_them(address: str, written: str) -> None:
    point = MeetingPoint(address=address, port=9)
    assert point.flags(1) == ["--node-rank", "1", "--dist-init-addr", written]
    assert point.environment.get(INTERFACE) != "lo", "the others must reach it"
