"""Hostile programs in the sandbox reach no files, network, memory or time of ours."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from distill.errors import ConfigError
from distill.sandbox.guard import guarded, lifeline
from distill.sandbox.sandbox import SandboxLimits, SandboxResult, run_python
from distill.sandbox.seccomp import filter_program
from tests.leftovers import is_alive
from tests.refusals import refuses
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.usefixtures("sandbox")


def run(source: str, *, stdin: str = "", **limits) -> SandboxResult:
    return asyncio.run(run_python(source, stdin=stdin, limits=SandboxLimits(**limits)))


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_a_program_reads_writes_and_ends(isolation) -> None:
    source = "import sys; print(input()[::-1]); print('no', file=sys.stderr); sys.exit(3)"
    result = run(source, stdin="ünicode", isolation=isolation)
    assert (result.stdout, result.stderr) == ("edocinü\n", "no\n")
    assert (result.exit_code, result.outcome) == (3, "error")
    assert run("", isolation=isolation).outcome == "ok"


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_our_environment_is_not_there(monkeypatch: pytest.MonkeyPatch, isolation) -> None:
    monkeypatch.setenv("TOKEN_OF_OURS", "hf_secret")
    result = run("import os; print(dict(os.environ))", isolation=isolation)
    assert result.outcome == "ok"
    assert "hf_secret" not in result.stdout and "TOKEN" not in result.stdout


def test_our_open_files_are_not_there(tmp_path: Path) -> None:
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        source = """
import os
for fd in range(3, 200):
    try:
        print(fd, os.fstat(fd))
    except OSError:
        pass
"""
        assert run(source).stdout == ""


def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = f"import socket; socket.create_connection({server.getsockname()!r}, 5)"
        with pytest.raises(BlockingIOError):
            _accept(server)
        result = run(source)
        assert (result.outcome, "unreachable" in result.stderr) == ("error", True), result
        with pytest.raises(BlockingIOError):
            _accept(server)
        # The program as such would reach it.
        assert run(source, isolation="process").outcome == "ok"
        _accept(server)


def _accept(server: socket.socket) -> None:
    server.setblocking(False)
    server.accept()[0].close()


def test_no_file_of_ours(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("secret")
    places = [str(tmp_path), str(Path.home() / ".bashrc"), __file__, "/etc/passwd", "/proc", "/sys"]
    source = f"""
import os
for place in {places!r}:
    print(os.path.lexists(place), end=" ")
print(open({str(tmp_path / "weights")!r}).read())
"""
    result = run(source)
    assert result.stdout.split() == ["False"] * len(places), result.stdout
    assert "FileNotFoundError" in result.stderr


def test_programs_write_nothing_outside(tmp_path: Path) -> None:
    source = f"""
import os, sys
for place in ["/", "/usr", "/dev", {sys.prefix!r}, {sys.base_prefix!r}, {str(Path.home())!r}]:
    try:
        os.makedirs(place, exist_ok=True)
        open(place + "/written-by-a-program", "w")
        print(place)
    except OSError:
        pass
os.makedirs({str(tmp_path)!r})
open({str(tmp_path / "there")!r}, "w").write("x")
open("here", "w").write("x")
print(os.getcwd(), os.listdir())
"""
    result = run(source)
    assert result.stdout.startswith("/tmp ['here', "), result
    assert not os.listdir(tmp_path)
    assert "here" not in run("import os; print(os.listdir())").stdout  # gone with its program
    assert not os.path.exists("/tmp/here")


def test_programs_have_no_privileges_and_get_none() -> None:
    source = """
import ctypes, os
print(os.getuid(), os.getgid(), os.getpid())
libc = ctypes.CDLL(None)
print(libc.unshare(0x10000000), libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
try:
    os.kill(1, 9)
except PermissionError:
    print("no")
"""
    lines = run(source).stdout.splitlines()
    assert lines[0] == "65534 65534 2" and lines[1].endswith(" -1")
    if os.access("/proc/sys/user/max_user_namespaces", os.W_OK):
        assert lines[1].startswith("-1")
    assert lines[2:] == (["no"] if os.geteuid() == 0 else lines[2:])


CALLS = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return result if result >= 0 else errno.errorcode[ctypes.get_errno()]
x86 = os.uname().machine == "x86_64"
def family(number):
    try:
        return socket.socket(number, socket.SOCK_STREAM).family
    except OSError as error:
        return errno.errorcode[error.errno]
def buffer(option):
    pair = socket.socketpair()
    try:
        pair[0].setsockopt(socket.SOL_SOCKET, option, 1 << 24)
        return "set"
    except OSError as error:
        return errno.errorcode[error.errno]
try:
    memory = os.memfd_create("more")
except OSError as error:
    memory = errno.errorcode[error.errno]
print(json.dumps({
    "memfd": memory,
    "memfd_secret": call(447, 0),
    "shmget": call(29 if x86 else 194, 0, 1 << 20, 0o1600),
    "keyctl": call(250 if x86 else 219, 0, -3, 0),
    "add_key": call(248 if x86 else 217, 0, 0, 0, 0, -3),
    "io_uring": call(425, 1, 0),
    "ptrace": call(101 if x86 else 117, 0),
    "unshare": call(272 if x86 else 97, 0x10000000),
    "clone of a namespace": call(56 if x86 else 220, 0x10000011, 0, 0, 0, 0),
    "clone3": call(435, 0, 0),
    "x32": call(0x40000000 + 39) if x86 else "ENOSYS",
    "vmsplice": call(278 if x86 else 75, 1, 0, 0, 0),
    "send buffer": buffer(socket.SO_SNDBUF),
    "receive buffer": buffer(socket.SO_RCVBUF),
    "forced buffer": buffer(32),
    "reused address": buffer(socket.SO_REUSEADDR),
    "vsock": family(40),
    "netlink": family(16),
    "packet": family(17),
    "pair": [each.family for each in socket.socketpair()],
    "internet": [family(2), family(10)],
}))
"""


@pytest.mark.skipif(not filter_program(), reason="no filter for this machine")
@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_system_calls_that_no_computation_needs_are_refused(isolation) -> None:
    result = run(CALLS, isolation=isolation)
    assert result.outcome == "ok", result
    refused = json.loads(result.stdout)
    assert refused.pop("pair") == [1, 1] and refused.pop("internet") == [2, 10]
    assert refused.pop("reused address") == "set"
    families = dict.fromkeys(("vsock", "netlink", "packet"), "EAFNOSUPPORT")
    missing = dict.fromkeys(("x32", "clone3"), "ENOSYS")
    assert refused == dict.fromkeys(refused, "EPERM") | families | missing


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_ordinary_programs_run(isolation) -> None:
    source = """
import asyncio, concurrent.futures, multiprocessing, subprocess, sys, tempfile, threading
def double(x): return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(double, [1, 2]))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        print(list(threads.map(double, [1, 2])))
    print(subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True).stdout)
    async def main():
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", "exit(3)")
        return await child.wait()
    print(asyncio.run(main()))
    with tempfile.TemporaryFile() as file:
        print(file.write(b"four"))
"""
    result = run(source, isolation=isolation)
    assert result.stdout.split("\n") == ["[2, 4]", "[2, 4]", "3", "", "3", "4", ""], result


@pytest.mark.parametrize(
    "isolation", ["namespaces", pytest.param("process", marks=pytest.mark.slow)]
)
def test_the_time_limit(isolation) -> None:
    result = run("import time; time.sleep(600)", wall_s=0.5, isolation=isolation)
    assert (result.outcome, result.exit_code) == ("time", None)
    busy = "print('so far', flush=True)\nwhile True: pass"
    result = run(busy, cpu_s=1, wall_s=60, isolation=isolation)
    assert (result.stdout, result.outcome) == ("so far\n", "time")
    ignores = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(ignores, cpu_s=1, wall_s=60, isolation=isolation).outcome == "time"


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_the_memory_limit(isolation) -> None:
    result = run("x = 'a' * (1 << 30)", memory_mb=256, isolation=isolation)
    assert (result.outcome, result.stderr.splitlines()[-1]) == ("memory", "MemoryError")


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_the_output_limit(isolation) -> None:
    before = psutil.Process().memory_info().rss
    result = run("while True: print('x' * 1000)", output_bytes=10_000, isolation=isolation)
    assert (result.outcome, len(result.stdout)) == ("output", 10_000)
    source = "import os\nwhile True: os.write(2, b'x' * 100000)"
    result = run(source, output_bytes=5000, isolation=isolation)
    assert (result.outcome, len(result.stderr), result.stdout) == ("output", 5000, "")
    result = run("print('x' * 4999)", output_bytes=5000, isolation=isolation)
    assert (result.outcome, len(result.stdout)) == ("ok", 5000), "as many as may be"
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_files_are_limited_together() -> None:
    source = """
for i in range(8):
    with open(str(i), "wb") as file:
        file.write(b"x" * (1 << 20))
    print(i, flush=True)
"""
    result = run(source, files_mb=4)
    assert result.outcome == "error" and "No space left" in result.stderr
    assert len(result.stdout.split()) <= 4


def test_a_fork_bomb() -> None:
    source = """
import os, time
children = 0
try:
    while os.fork():
        children += 1
except OSError as error:
    print(children, flush=True)
    os._exit(0)
time.sleep(600)
"""
    result = run(source, processes=8, wall_s=60)
    assert (result.outcome, result.stdout) == ("ok", "7\n")


ORPHAN = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600) #{mark}"],
                 start_new_session=True)
print("started", flush=True)
{then}
"""


def alive(mark: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(mark in argument for argument in process.info["cmdline"] or [])
    ]


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
@pytest.mark.parametrize("then", ["", "time.sleep(600)", "os._exit(1)"])
def test_no_orphans(isolation, then: str) -> None:
    mark = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    late = "sleep" in then
    source = ORPHAN.format(mark=mark, then=then)
    result = run(source, wall_s=3 if late else 60, isolation=isolation)
    assert result.stdout == "started\n" or late, result.stderr
    assert not alive(mark)


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
async def test_cancelled_it_ends_the_program(isolation) -> None:
    mark = f"cancelled-{os.getpid()}-{time.monotonic_ns()}"
    limits = SandboxLimits(wall_s=600, isolation=isolation)
    async with asyncio.timeout(DEADLINE_S):
        source = ORPHAN.format(mark=mark, then="time.sleep(600)")
        task = asyncio.create_task(run_python(source, limits=limits))
        while not alive(mark):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not alive(mark)


def test_it_dies_with_us() -> None:
    mark = f"parent-{os.getpid()}-{time.monotonic_ns()}"
    source = ORPHAN.format(mark=mark, then="time.sleep(600)")
    code = f"""
import asyncio
from distill.sandbox.sandbox import SandboxLimits, run_python
asyncio.run(run_python({source!r}, limits=SandboxLimits(wall_s=600)))
"""
    ours = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: len(alive(mark)) == 2)  # ours has it in its own arguments
    ours.kill()
    ours.wait()
    until(lambda: not alive(mark))


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"cpu_s": 0}, "cpu_s"),
        ({"wall_s": -1.0}, "wall_s"),
        ({"memory_mb": 8}, "memory_mb"),
        ({"isolation": "proces"}, "isolation"),
    ],
)
def test_limits_that_cannot_be(limits, field: str) -> None:
    with refuses(ConfigError, field):
        SandboxLimits(**limits)


def test_without_namespaces_it_is_refused() -> None:
    """A user namespace that may create no other, like a strict container."""
    code = """
import asyncio
from distill.sandbox.sandbox import require_sandbox, run_python
for call in (require_sandbox, lambda: asyncio.run(run_python("print('ran')"))):
    try:
        call()
    except ValueError as error:
        print(type(error).__name__, error)
"""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", forbid, sys.executable, code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and "ran" not in lines
    for line in lines:
        assert line.startswith("ConfigError the sandbox cannot be created on this machine: [Errno")
        assert 'isolation="process"' in line


def test_a_program_starts_with_fork_hooks() -> None:
    """uvloop runs them, and CPython with a `preexec_fn`."""
    started = subprocess.run(
        guarded([sys.executable, "-c", "print('started')"]), start_new_session=True,
        pass_fds=(lifeline(),), preexec_fn=lambda: None, capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert (started.returncode, started.stdout) == (0, "started\n"), started.stderr


# Starts a guarded program, says so, and waits to be killed.
STARTER = """
import subprocess, sys, time
from distill.sandbox.guard import guarded, lifeline
subprocess.Popen(
    guarded([sys.executable, "-c", sys.argv[1]], scratch=sys.argv[2]), start_new_session=True,
    pass_fds=(lifeline(),),
)
time.sleep(1000)
"""
# Leaves its session to a child, and waits too.
PROGRAM = """
import subprocess, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("started", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("children_first", [False, True])
def test_a_killed_starter_leaves_nothing(tmp_path: Path, children_first: bool) -> None:
    """With its children, as Ray's workers are killed, or alone."""
    scratch = tmp_path / "scratch"
    command = [sys.executable, "-c", STARTER, PROGRAM, str(scratch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None and starter.stdout.readline() == "started\n"
        process = psutil.Process(starter.pid)
        started = process.children(recursive=True)
        assert len(started) > 2 and scratch.is_dir()
        for child in process.children() if children_first else ():
            child.kill()
        starter.kill()
    until(lambda: not any(map(is_alive, started)))
    until(lambda: not scratch.exists())


def test_a_killed_guard_leaves_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    with subprocess.Popen(
        guarded([sys.executable, "-c", PROGRAM], scratch=str(scratch)), start_new_session=True,
        pass_fds=(lifeline(),), stdout=subprocess.PIPE, text=True,
    ) as front:  # fmt: skip
        assert front.stdout is not None and front.stdout.readline() == "started\n"
        [guard] = psutil.Process(front.pid).children()
        started = guard.children(recursive=True)
        assert len(started) == 2 and scratch.is_dir()
        guard.kill()
    assert front.returncode == -signal.SIGKILL
    assert not any(map(is_alive, started)) and not scratch.exists()
