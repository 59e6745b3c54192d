"""A real server process: its start, its failures, and its end with its owner."""

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from actors.sglang import installed as sglang_here
from actors.sglang import server as sglang_server
from actors.sglang.config import SglangConfig
from actors.sglang.flags import parse_flags, server_flags
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from actors.sglang.server import SglangServer, cause_of_kill
from actors.sglang.start import cpus_of_ranks
from distill.engine import GenerateRequest, ScoreRequest
from distill.errors import CheckpointError, ConfigError, DataError, EngineError
from distill.sampling import EvalSampling
from tests.conftest import TinyPair
from tests.leftovers import gone, is_alive
from tests.refusals import refuses
from tests.waiting import DEADLINE_S, until

needs_sglang = pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed")

# Maximum time by which a server process may outlive its owner.
ORPHAN_S = 10
PRIVATE_FILES = "actors.sglang.private_files"


def flags(model: str, extra: str = "") -> list[str]:
    config = SglangConfig(model=model, device="cpu", max_running_requests=16, server_flags=extra)
    return server_flags(config, 135)


CPU = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}

# Owns a server, prints its keys once the server answers, and waits.
OWNER = """
import asyncio, sys, time
from actors.sglang.config import SglangConfig
from actors.sglang.hosted import HostedSglangEngine

async def main():
    model, log = sys.argv[1:]
    engine = HostedSglangEngine(
        SglangConfig(model=model, device="cpu", log_path=log)
    )
    await engine.info()
    print(engine.server.api_key, engine.server.admin_api_key, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
@needs_sglang
def test_a_server_hides_keys_and_ends_with_its_owner(tiny_pair: TinyPair, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tiny_pair.student, str(log)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        keys = owner.stdout.readline().split()
        family = psutil.Process(owner.pid).children(recursive=True)
        assert len(family) >= 3, "an HTTP server, a scheduler and a detokenizer"
        printed = log.read_text() + "".join(str(process.cmdline()) for process in family)
        assert "api_key" in printed, "SGLang prints its arguments"
        assert len(keys) == 2 and not [key for key in keys if key in printed]
        assert listening(family) <= {"127.0.0.1", gloo_address()}
        directory = private_directory_of(family)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert named_after(directory), "SGLang's shared memory does not carry the name"
        os.kill(owner.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=ORPHAN_S)
        assert not alive, f"orphans: {[process.cmdline()[:4] for process in alive]}"
        assert not gone(lambda: named_after(directory))
    finally:
        owner.kill()
        owner.communicate()


@pytest.mark.slow
@needs_sglang
async def test_a_cache_smaller_than_the_context_is_the_context(tiny_pair: TinyPair) -> None:
    engine = HostedSglangEngine(
        SglangConfig(
            model=tiny_pair.student, device="cpu", start_deadline_s=DEADLINE_S,
            server_flags="--max-total-tokens 100",
        )
    )  # fmt: skip
    sampling = EvalSampling(temperature=0, max_new_tokens=100)
    try:
        room = (await engine.info()).context_length
        assert 80 < room < 100
        tokens_T = np.full(room, 5, np.int32)
        await engine.score([ScoreRequest(tokens_T=tokens_T, start=1, temperatures=(0.7,))])
        with pytest.raises(DataError):
            await engine.generate(
                GenerateRequest(prompt_tokens_T=tokens_T, sampling=sampling, num_samples=1, seed=0)
            )
    finally:
        await engine.close()


def listening(processes: Sequence[psutil.Process]) -> set[str]:
    """Addresses at which the processes take TCP connections."""
    sockets = [each for process in processes for each in process.net_connections("tcp")]
    assert sockets
    return {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}


def gloo_address() -> str:
    """Address on which gloo listens: that of the host's name."""
    return socket.gethostbyname(socket.gethostname())


def private_directory_of(processes: Sequence[psutil.Process]) -> Path:
    """Directory in the arguments of the launcher's cleaner; the launcher comes first."""
    launcher = str(processes[0].pid)
    commands = [process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"])]
    [directory] = [line[-2] for line in commands if PRIVATE_FILES in line and line[-1] == launcher]
    return Path(directory)


def named_after(directory: Path) -> set[Path]:
    """A server's directory and its shared memory, if they exist."""
    return {path for path in (directory, *Path("/dev/shm").iterdir())
            if directory.name in path.name and path.exists()}  # fmt: skip


async def test_a_claimed_port_is_the_server_s_alone() -> None:
    """SGLang's HTTP server binds it (asyncio sets SO_REUSEADDR); other binds fail."""
    claims = [sglang_server.claim_port("127.0.0.1") for _ in range(50)]
    ports = {claim.getsockname()[1] for claim in claims}
    assert len(ports) == 50
    port = claims[0].getsockname()[1]
    with socket.socket() as stranger, pytest.raises(OSError):
        stranger.bind(("127.0.0.1", port))
    strangers = [socket.socket() for _ in range(500)]
    try:
        for stranger in strangers:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stranger.bind(("127.0.0.1", 0))
        assert not ports & {stranger.getsockname()[1] for stranger in strangers}
    finally:
        for stranger in strangers:
            stranger.close()
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    writer.close()
    server.close()
    await server.wait_closed()
    for claim in claims:
        claim.close()


@pytest.mark.slow
@needs_sglang
def test_a_taken_port_is_skipped_and_a_dead_server_has_a_reason(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "logs/server.log"
    log.parent.mkdir()
    before = "Scheduler hit an exception: Traceback\nValueError: of a server before this one\n"
    log.write_text(before)
    log.chmod(0o600)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        claims = iter([taken])
        claim_port = sglang_server.claim_port
        monkeypatch.setattr(
            sglang_server, "claim_port", lambda host: next(claims, None) or claim_port(host)
        )
        server = SglangServer(
            flags(tiny_pair.student), environment=CPU, log_path=log,
            start_deadline_s=DEADLINE_S,
        )  # fmt: skip
        try:
            asyncio.run(server.ready())
            assert server.url != f"http://127.0.0.1:{taken.getsockname()[1]}"
            assert stat.S_IMODE(log.stat().st_mode) == 0o600, "the log may hold prompts"
            family = psutil.Process(server.pid).children(recursive=True)
            [part] = [child for child in family if "detokenizer" in " ".join(child.cmdline())]
            directory = private_directory_of([psutil.Process(server.pid), *family])
            part.kill()
            until(lambda: not server.running, failing="it lives on without its detokenizer")
            assert "its detokenizer was killed" in server.exit_report()
            assert (
                str(log) in server.exit_report() and "before this one" not in server.exit_report()
            )
            assert "coredumps before exiting" not in log.read_text(), "it waited for diagnostics"
            assert not gone(lambda: named_after(directory))
        finally:
            server.stop()


# Layers of 2.5 PB each: more than a process can address on any machine.
TOO_LARGE = f"--json-model-override-args '{json.dumps({'intermediate_size': 10**13})}'"


@pytest.mark.slow
@needs_sglang
@pytest.mark.parametrize(
    "extra, message",
    [
        ("--no-such-flag 1", "unrecognized arguments: --no-such-flag"),
        (TOO_LARGE, "can't allocate memory"),
    ],
    ids=["unknown flag", "out of memory"],
)
def test_a_server_that_cannot_start_shows_the_end_of_its_log(
    tiny_pair: TinyPair, tmp_path: Path, extra: str, message: str
) -> None:
    log = tmp_path / "server.log"
    all_flags = flags(tiny_pair.student, extra)
    server = SglangServer(all_flags, environment=CPU, log_path=log, start_deadline_s=DEADLINE_S)
    with pytest.raises(EngineError) as error:
        asyncio.run(server.ready())
    assert message in str(error.value) and str(log) in str(error.value)
    assert not server.running


@pytest.mark.slow
@needs_sglang
def test_a_model_that_sglang_cannot_load_shows_why(tiny_pair: TinyPair, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_pair.student, tmp_path / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    server = SglangServer(
        flags(str(model)), environment=CPU, log_path=tmp_path / "server.log",
        start_deadline_s=DEADLINE_S,
    )  # fmt: skip
    with pytest.raises(EngineError) as error:
        asyncio.run(server.ready())
    assert "safetensor" in str(error.value).lower(), "the log's end does not say what is wrong"
    assert "by the kernel" not in str(error.value)


def test_the_cause_of_a_scheduler_s_end() -> None:
    trace = (
        "[2026-11-25] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "scheduler.py", line 1, in run\n    raise KeyError("x")\nKeyError: \'x\'\n\n'
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File "
        '"model.py", line 2, in load\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    )
    cause = cause_of_kill(f"starting\n{trace}\n[2026-11-25] SIGQUIT received.\nKilled\n")
    assert cause.endswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    killed = "was killed (by the kernel, out of memory?)"
    assert cause_of_kill("ValueError: of a request, long ago\nKilled\n") == killed
    crashed = "Subprocess scheduler_0 (pid=7) crashed with exit code"
    assert cause_of_kill(f"{crashed} -9. Triggering").endswith(f"its scheduler_0 {killed}")
    assert cause_of_kill(f"{crashed} -6. Triggering").endswith("its scheduler_0 ended with code -6")


@needs_sglang
def test_a_server_that_misses_its_start_deadline_is_ended(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    server = SglangServer(
        flags(tiny_pair.student), environment=CPU, log_path=tmp_path / "s.log", start_deadline_s=0.5
    )
    process = psutil.Process(server.pid)
    until(process.environ)  # empty for a moment: Popen returns in the middle of the exec
    inherits = process.environ()
    assert inherits["PATH"] == os.environ["PATH"] and inherits.items() >= CPU.items()
    assert not exported.keys() & inherits.keys(), "variables that break a server"
    with pytest.raises(EngineError):
        asyncio.run(server.ready())
    assert not server.running


@needs_sglang
def test_a_directory_without_a_model_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        HostedSglangEngine(SglangConfig(model=str(tmp_path)))


def test_without_sglang_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_here, "sglang_installed", lambda: False)
    with refuses(ConfigError, "engine.kind"):
        SglangServer([])


def test_user_flags_replace_defaults() -> None:
    made = flags("m", "--attention-backend triton --max-total-tokens=99 --tp-size 2")
    assert made[made.index("--attention-backend") + 1] == "triton"
    assert made.count("--max-total-tokens") == 1
    assert made[made.index("--max-total-tokens") + 1] == "99"
    assert parse_flags("--a 1 --b --c=2 3") == {"--a": ["1"], "--b": [], "--c": ["2", "3"]}
    assert cpus_of_ranks([0, 1, 2, 3, 6], 2) == "0,2,6|1,3"
    assert cpus_of_ranks([4], 2) == "4|4"


@pytest.mark.parametrize(
    "text", ["--dtype float16", "--api-key x", "--trust-remote-code", "8 --a", "--a 'open"]
)
def test_flags_that_cannot_be_set(text: str) -> None:
    with refuses(ConfigError, "teacher.server_flags"):
        parse_flags(text, "teacher.server_flags")


# Stand-in for a server: files, an orphaned process, and a fork of the server itself.
SERVER = """
import os, subprocess, sys, time
from actors.sglang.private_files import private_directory

directory = private_directory()
(directory / "socket").touch()
if os.path.isdir("/dev/shm"):
    open(f"/dev/shm/sem.{directory.name}-planted", "x").close()
    open(f"/dev/shm/sgl_shm_mq_{os.getpid()}_planted", "x").close()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         env={**os.environ, "TMPDIR": str(directory)}, start_new_session=True)
if not (copy := os.fork()):
    os.closerange(0, 2)
    time.sleep(600)
print(directory, child.pid, copy, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["of itself", "killed with its process group"])
def test_files_and_processes_go_when_the_server_has_ended(end: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None
    name, pid, copy = server.stdout.readline().split()
    directory, child = Path(name), psutil.Process(int(pid))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700 and (directory / "socket").exists()

    def left() -> set[str]:
        shared = Path("/dev/shm").iterdir() if Path("/dev/shm").is_dir() else []
        marks = (directory.name, f"_{server.pid}_planted")
        names = {path.name for path in shared if any(mark in path.name for mark in marks)}
        return names | {str(directory)} if directory.exists() else names

    assert len(left()) in (1, 3)
    try:
        if end == "of itself":
            server.stdin.close()
        else:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        assert not gone(left), "the cleaner still waits, for the copy?"
        assert not is_alive(child)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(copy), signal.SIGKILL)
        server.stdout.close()


def test_sockets_are_not_put_below_a_long_path(tmp_path: Path) -> None:
    """A unix socket's address has 107 bytes."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    program = "from actors.sglang.private_files import *; print(private_directory())"
    made = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(long)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    directory = Path(made.stdout.strip())
    assert directory.parent == Path("/tmp")
    assert not gone(lambda: {directory} if directory.exists() else set())
