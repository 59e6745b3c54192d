"""Guard of a program: a process that ends all processes that the program has started.

    starter ── front ── guard ── the program ── its descendants
    (the lifeline is a pipe: the starter holds one end, the guard waits at the other)

The guard ends the program and its descendants when the program has ended, on SIGTERM, and when the
starter or the front has died for any reason. Then it removes the program's scratch folder, which it
has created, and ends as the program did, or with exit code 1; so does the front. On Linux,
descendants that left the program's process group are also ended: orphans become children of the
guard. If the guard is killed, they become children of the front, which does the same.

If guard and front are killed at the same time, the program dies with them, but descendants that
left its process group live on as children of init. No process that is left can end them: a death
signal is not inherited by children, a cgroup is ended only by a process that writes to it, and a
starter that adopted orphans could not distinguish them from those of its libraries. Only a PID
namespace ends them, as it does for `isolation="namespaces"` (sandbox_child.py).

The front is the starter's only child. A Ray worker kills its children as it ends; if the guard were
one of them, nothing would end the program's processes.

Run as a script it needs only the standard library:
`python -I -S guard.py LIFELINE SCRATCH PROGRAM ...`, where LIFELINE is a descriptor or its path.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_AWAITED = (signal.SIGTERM, signal.SIGCHLD)
_ON_LINUX = sys.platform == "linux"


def guarded(command: Sequence[str], *, scratch: str = "", inherits: bool = True) -> list[str]:
    """Command that runs `command` under a guard.

    Start it in a new session, with `pass_fds=(lifeline(),)`.

    Args:
        scratch: folder that the guard creates, and removes after all processes have ended; empty:
            none. If the starter created it, it would remain when starter and front died before the
            guard has started.
        inherits: False if a library starts the command and passes no descriptors. The guard then
            opens the lifeline in /proc; without /proc the command is not guarded.
    """
    line = str(lifeline()) if inherits else f"/proc/{os.getpid()}/fd/{lifeline()}"
    if not inherits and not os.path.exists(line):
        return [*command]
    return [sys.executable, "-I", "-S", "-B", __file__, line, scratch, *command]


def search_path() -> str:
    """PATH of a user's program: `python` is the run's interpreter."""
    folder = os.path.dirname(sys.executable)
    return os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])


def lifeline() -> int:
    """File descriptor of the guards' end of this process's lifeline."""
    return _lifeline()[0]


@lru_cache
def _lifeline() -> tuple[int, int]:
    return os.pipe()


def _close_lifeline() -> None:
    """Close a forked process's copy of the starter's end, which would keep the guards waiting.

    uvloop, which Ray's actors use if it is installed, calls this in every process that it starts,
    before the program replaces the process. The guards' end therefore stays open.
    """
    if _lifeline.cache_info().currsize:
        os.close(_lifeline()[1])
        _lifeline.cache_clear()


os.register_at_fork(after_in_child=_close_lifeline)


def main() -> None:
    """Run the front and, in a forked process, the guard."""
    line, scratch = sys.argv[1], sys.argv[2]
    # If it cannot be opened, the starter has died, and nothing is started.
    starter = int(line) if line.isdigit() else os.open(line, os.O_RDONLY)
    os.set_inheritable(starter, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    front = os.getpid()
    if guard := os.fork():
        _run_front_process(guard, scratch)
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != front:  # the front died before
        os.kill(os.getpid(), signal.SIGTERM)
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in _AWAITED:
        signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if scratch:
        os.mkdir(scratch, 0o700)
    program = os.fork()
    if program == 0:
        _exec(sys.argv[3:])
    _close_standard()
    status = _until_the_end(program, starter, signals)
    _clean_up(program, scratch)
    _end_as(status)


def _run_front_process(guard: int, scratch: str) -> NoReturn:
    """Forward SIGTERM to the guard, and end as the guard does; clean up if it was killed."""
    _close_standard()
    while True:
        if signal.sigwait(_AWAITED) == signal.SIGTERM:
            os.kill(guard, signal.SIGTERM)
        elif (ended := os.waitpid(guard, os.WNOHANG)) != (0, 0):
            _clean_up(None, scratch)
            _end_as(ended[1])


def _close_standard() -> None:
    """Close stdin and stdout here, so that the starter detects when the program closes them."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)


def _do_nothing(signum: int, frame: object) -> None:
    """Do nothing: the wakeup descriptor has received the signal."""


def _prctl(option: int, value: int) -> None:
    if _ON_LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _exec(command: Sequence[str]) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _until_the_end(program: int, starter: int, signals: int) -> int | None:
    """Wait for the program; return its wait status, or None if it must be ended."""
    while True:
        ready = select.select([starter, signals], [], [])[0]
        if starter in ready or signal.SIGTERM in os.read(signals, 4096):
            return None
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == program:
                return ended[1]


def _clean_up(program: int | None, scratch: str) -> None:
    """Kill the remaining processes, and remove the scratch folder."""
    _end_all(program)
    if scratch and os.path.exists(scratch):
        import shutil  # a guard without a folder starts faster

        shutil.rmtree(scratch, ignore_errors=True)


def _end_all(program: int | None) -> None:
    """Kill the remaining processes; those whose parent has ended are children of this one."""
    if not _ON_LINUX:
        if program is not None:
            with suppress(ProcessLookupError, PermissionError):  # the whole group has ended
                os.killpg(program, signal.SIGKILL)
        return
    while _has_children():
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        os.wait()


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    names = filter(str.isdigit, os.listdir("/proc"))
    return [int(name) for name in names if _parent(name) == os.getpid()]


def _parent(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:  # the process has ended
        return None


def _end_as(status: int | None) -> NoReturn:
    """End this process as the program did."""
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # signals that cannot be handled
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
