"""Tools of a real MCP server over stdio: called, hanging, dying, and ended with the episode."""

import asyncio
import os
import pickle
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from actors.envs.mcp_tools import McpServer, McpServerError, McpSession, McpToolUse, server_tools
from actors.rollout.episode import play_group
from distill.engine import GenerateRequest, Sample
from distill.envs.base import EnvDataset, Episode
from distill.errors import ConfigError
from distill.rewards.registry import last_number
from distill.sampling import TrainSampling
from tests.leftovers import is_alive
from tests.refusals import refuses
from tests.samples import TEMPERATURE
from tests.scripted import Scripted, call, chat_tokenizer, setting
from tests.waiting import until

TOKENIZER = chat_tokenizer()

pytest.importorskip("mcp", reason="pip install 'isotherm[mcp]'")

SAMPLING = TrainSampling(temperature=TEMPERATURE, max_new_tokens=64)
# Against hangs only.
DEADLINE_S = 60.0
SERVER = '''
import os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")
open(os.path.join(sys.argv[1], f"pid{os.getpid()}"), "w").close()
total = 0

@server.tool()
def add(number: int) -> str:
    """Adds to a sum that starts at 0."""
    global total
    total += number
    return f"the sum is {total}"

@server.tool()
def fail() -> str:
    """Fails."""
    raise ToolError("no luck today")

@server.tool()
def hang() -> str:
    """Takes its time."""
    time.sleep(600)
    return "never"

@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)

@server.tool()
def calculator() -> str:
    """Of the same name as another one."""
    return "0"

@server.tool()
def variable(name: str) -> str:
    """A variable of the environment."""
    return os.environ.get(name, "unset")

if len(sys.argv) > 2:
    import socket, uvicorn
    app = uvicorn.Config(server.streamable_http_app(), log_level="warning")
    uvicorn.Server(app).run(sockets=[socket.socket(fileno=int(sys.argv[2]))])
else:
    server.run("stdio")
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the server's script, and a file named after each process that ran it."""
    directory = tmp_path_factory.mktemp("server")
    (directory / "server.py").write_text(SERVER)
    return directory


def command(server: Path) -> str:
    return shlex.join([sys.executable, str(server / "server.py"), str(server)])


def alive(server: Path) -> list[int]:
    pids = [int(path.name.removeprefix("pid")) for path in server.glob("pid*")]
    return [pid for pid in pids if runs(pid, server)]


def runs(pid: int, server: Path) -> bool:
    """True if the process runs a script of the directory: its id may have been reused."""
    try:
        return os.fsencode(server) in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def dataset(server: Path, tmp_path: Path, **settings: object) -> EnvDataset:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "Add 40 and 2.", "answer": "42"}')
    config = McpToolUse(**{"mcp_command": command(server), **settings})  # pyright: ignore[reportArgumentType]
    room = setting(TOKENIZER, context_length=4096, max_new_tokens=64, reward=last_number)
    return pickle.loads(pickle.dumps(config(str(path), room)))


@pytest.fixture(scope="module")
def problems(server: Path, tmp_path_factory: pytest.TempPathFactory) -> EnvDataset:
    """Problems with the default settings; listing the tools took one server."""
    return dataset(server, tmp_path_factory.mktemp("questions"))


def play(problems: EnvDataset, policy: Scripted, group_size: int = 1) -> list[Episode]:
    async def run() -> list[Episode]:
        builder = problems.builder(0, group_size)
        return await asyncio.wait_for(
            play_group(policy, builder, SAMPLING, group_id=0, seed=0), DEADLINE_S
        )

    return asyncio.run(run())


def test_an_episode_calls_the_servers_tools(server: Path, problems: EnvDataset) -> None:
    says = [call("add", {"number": 40}), call("add", {"number": 2}), call("fail", {}), "42"]
    policy = Scripted(TOKENIZER, says)
    [episode] = play(problems, policy)
    assert "Adds to a sum that starts at 0." in policy.seen[0]
    assert "the sum is 40" in policy.seen[1] and "the sum is 42" in policy.seen[2]
    assert "no luck today" in policy.seen[3]
    assert episode.reward == 1.0
    assert episode.metrics["tool_calls"] == 3 and episode.metrics["tool_errors"] == 1
    assert not alive(server)


def test_each_episode_has_a_server_of_its_own(server: Path, problems: EnvDataset) -> None:
    """Members of a group have separate sums."""

    def script(_turn: int, seen: str) -> str:
        return "21" if "the sum is" in seen else call("add", {"number": 21})

    policy = Scripted(TOKENIZER, script)
    episodes = play(problems, policy, group_size=2)
    assert len(episodes) == 2
    answered = [seen for seen in policy.seen if "the sum is" in seen]
    assert len(answered) == 2 and all("the sum is 21" in seen for seen in answered)
    assert not alive(server)


def test_a_hanging_call_is_an_error_and_ends_its_server(server: Path, tmp_path: Path) -> None:
    policy = Scripted(TOKENIZER, [call("hang", {}), "0"])
    [episode] = play(dataset(server, tmp_path, tool_timeout_s=1.0), policy)
    assert episode.metrics["tool_calls"] == 1 and episode.metrics["tool_errors"] == 1
    assert episode.metrics["tool_seconds"] > 0.5
    assert not alive(server)


def test_a_dead_server_is_an_error_and_the_episode_continues(problems: EnvDataset) -> None:
    policy = Scripted(TOKENIZER, [call("die", {}), call("add", {"number": 1}), "42"])
    [episode] = play(problems, policy)
    assert episode.reward == 1.0 and episode.metrics["tool_errors"] == 2


async def test_a_cancelled_group_ends_its_servers(server: Path, problems: EnvDataset) -> None:
    class Waits(Scripted):
        async def generate(self, request: GenerateRequest) -> list[Sample]:
            assert alive(server)
            reached.set()
            await asyncio.Event().wait()
            raise AssertionError

    reached = asyncio.Event()
    group = play_group(Waits(TOKENIZER, []), problems.builder(0, 2), SAMPLING, group_id=0, seed=0)
    playing = asyncio.create_task(group)
    await asyncio.wait_for(reached.wait(), DEADLINE_S)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert not alive(server)


async def test_a_server_closed_while_it_starts_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(f"import os, time; open({str(tmp_path)!r} + f'/pid{{os.getpid()}}', 'w')\n"
                      "time.sleep(600)\n")  # fmt: skip
    session = McpSession(McpServer(command=(sys.executable, str(script))))
    opening = asyncio.create_task(session.open())
    began = time.monotonic()
    while not alive(tmp_path) and time.monotonic() - began < DEADLINE_S:
        await asyncio.sleep(0.01)
    assert alive(tmp_path)
    await session.close()
    assert not alive(tmp_path)
    with pytest.raises(asyncio.CancelledError):
        await opening


# Writes down itself and a child that leaves its session.
PARENT = '''
import os, subprocess, time
from mcp.server.mcpserver import MCPServer

child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open("pids.new", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.new", "pids")
server = MCPServer("parent")

@server.tool()
def hang() -> str:
    """Takes its time."""
    time.sleep(600)
    return "never"

server.run("stdio")
'''
# Calls a tool that hangs if it is to be killed, else closes its session.
WORKER = """
import asyncio, sys
from actors.envs.mcp_tools import McpServer, McpSession

async def work():
    session = McpSession(McpServer(command=(sys.executable, "parent.py")))
    await session.open()
    if sys.argv[1] == "is killed":
        await session.ask(lambda client: client.call_tool("hang", {}))
    await session.close()

asyncio.run(work())
"""


@pytest.mark.parametrize("end", ["closes its session", "is killed"])
def test_a_server_s_children_end_with_its_worker(tmp_path: Path, end: str) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, end], cwd=tmp_path, env=environment
    ) as worker:
        until((tmp_path / "pids").exists)
        if end == "is killed":
            worker.kill()
    started = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
    until(lambda: not any(p.pid in started and is_alive(p) for p in psutil.process_iter()))


def test_a_server_that_does_not_start_fails_the_group(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    problems = dataset(tmp_path, tmp_path)
    (tmp_path / "server.py").write_text("raise SystemExit('the disk is on fire')")
    with pytest.raises(McpServerError):
        play(problems, Scripted(TOKENIZER, ["0"]))


def test_a_server_that_hangs_at_its_start_is_ended(tmp_path: Path) -> None:
    hangs = (sys.executable, "-c", "import time; time.sleep(600)")
    with refuses(ConfigError, "env.mcp_command"):
        server_tools(McpServer(command=hangs, start_s=0.5))


def test_the_server_sees_no_variable_that_is_not_named(
    server: Path, problems: EnvDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "swordfish")
    ask = [call("variable", {"name": "SECRET"}), "0"]
    policy = Scripted(TOKENIZER, ask)
    play(problems, policy)
    assert "unset" in policy.seen[1] and "swordfish" not in policy.seen[1]
    named = dataset(server, tmp_path, mcp_environment="SECRET")
    assert b"swordfish" not in pickle.dumps(named)
    policy = Scripted(TOKENIZER, ask)
    play(named, policy)
    assert "swordfish" in policy.seen[1]


def test_python_is_the_run_s(server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    mine = McpServer(command=("python", str(server / "server.py"), str(server)))
    assert "add" in {tool.name for tool in server_tools(mine)}


def test_a_running_server_is_spoken_to_by_its_url(server: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        file, (host, port) = listening.fileno(), listening.getsockname()
        running = subprocess.Popen([*shlex.split(command(server)), str(file)], pass_fds=[file])
        url = f"http://{host}:{port}/mcp"
        try:
            policy = Scripted(TOKENIZER, [call("add", {"number": 42}), "42"])
            play(dataset(server, tmp_path, mcp_command="", mcp_url=url), policy)
            assert "the sum is 42" in policy.seen[1]
        finally:
            running.kill()
            running.wait()


def test_some_of_the_tools_and_others_besides(server: Path) -> None:
    config = McpToolUse(mcp_command=command(server), mcp_tools="add, fail", tools="calculator")
    assert [tool.name for tool in config.toolbox()] == ["calculator", "add", "fail"]
    with refuses(ConfigError, "env.mcp_tools"):
        McpToolUse(mcp_command=command(server), mcp_tools="ad").toolbox()
    with refuses(ConfigError, "env.tools"):
        McpToolUse(mcp_command=command(server), tools="calculator").toolbox()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "env.mcp_command"),
        ({"mcp_command": "a", "mcp_url": "http://127.0.0.1:1/mcp"}, "env.mcp_command"),
        ({"mcp_command": "a", "mcp_environment": "NO_SUCH_VARIABLE"}, "env.mcp_environment"),
        ({"mcp_command": "no-such-program-at-all"}, "env.mcp_command"),
        ({"mcp_url": "http://127.0.0.1:1/mcp"}, "env.mcp_url"),
    ],
)
def test_servers_that_cannot_be_used_are_refused(settings: dict[str, object], field: str) -> None:
    with refuses(ConfigError, field):
        McpToolUse(**settings).toolbox()  # pyright: ignore[reportArgumentType]
