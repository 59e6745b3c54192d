"""Launcher started by `sandbox.py`: creates the sandbox around itself, and runs the program in it.

    launcher ── first process of the namespaces ── the program
    (waits)     (builds the root, waits, reports)   (an interpreter of its own)

This script needs only the standard library, and `seccomp.py` beside it: `python -I -S
sandbox_child.py LENGTH REPORT`. Standard input has LENGTH bytes of JSON (see `sandbox.py`),
followed by the program's own input. The script writes one JSON object to the file descriptor
REPORT: `{"error": ...}`, or the program's `exit_code` (minus the signal that ended it) and `cpu_s`.

If the first process of a process namespace dies, the kernel kills all its other processes, and the
first process dies with the launcher. A separate process outside writes the user and group ids of
the new namespace, because the kernel does not permit a process inside to map two users.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(__file__))  # which an isolated interpreter (-I) leaves out
from seccomp import install  # pyright: ignore[reportMissingImports]

NOBODY = 65534
OLD = "/.old"
PROGRAM = "/program.py"

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
# The system call has the same number on every architecture.
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Limited, because empty files also use kernel memory.
_MAX_FILES = 10_000

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    length, report = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(report, False)
    os.umask(0o022)
    spec = json.loads(_read(length))
    run = _in_namespaces if spec["isolation"] == "namespaces" else _as_a_process
    _reporting(report, lambda: run(spec, report))


def _read(length: int) -> bytes:
    """Read exactly `length` bytes of stdin; the rest is the program's input."""
    data = b""
    while len(data) < length and (chunk := os.read(0, length - len(data))):
        data += chunk
    return data


def _reporting(report: int, run: Callable[[], None]) -> NoReturn:
    """Call `run`, then end this process. An OSError is written to the report."""
    try:
        run()
    except OSError as error:
        os.write(report, json.dumps({"error": str(error)}).encode() + b"\n")
        os._exit(1)
    os._exit(0)


def _in_namespaces(spec: dict[str, Any], report: int) -> None:
    _unshare()
    first = os.fork()
    if first == 0:
        _reporting(report, lambda: _first_process(spec, report))
    os.waitpid(first, 0)


def _unshare() -> None:
    """Create new namespaces of all kinds.

    If this process is root, root and nobody keep their ids, and the program runs as nobody, because
    root owns files and is exempt from the process limit. Otherwise this process's user becomes
    nobody.
    """
    root = os.geteuid() == 0
    maps = {name: _map(name, root) for name in ("uid", "gid")}
    ready, unshared = os.pipe()
    launcher = os.getpid()
    writer = os.fork()
    if writer == 0:
        os.close(unshared)
        os._exit(_write_maps(launcher, maps, root) if os.read(ready, 1) else 1)
    _die_with_parent()
    flags = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    _call("unshare", _CLONE_NEWUSER | flags)
    _die_with_parent()  # again, because a change of privileges clears it
    os.write(unshared, b"x")
    status = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
    if status:
        raise OSError(status, f"/proc/PID/uid_map: {os.strerror(status)}")
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    except OSError:
        # The file is read-only in many containers. Without the filter of system calls, the program
        # could then create nested namespaces: more kernel code to attack, but no further rights.
        pass


def _map(name: str, root: bool) -> str:
    ours = os.geteuid() if name == "uid" else os.getegid()
    return f"0 0 1\n{NOBODY} {NOBODY} 1\n" if root else f"{NOBODY} {ours} 1\n"


def _write_maps(pid: int, maps: dict[str, str], root: bool) -> int:
    try:
        if not root:
            _write(f"/proc/{pid}/setgroups", "deny")
        for name, lines in maps.items():
            _write(f"/proc/{pid}/{name}_map", lines)
    except OSError as error:
        return error.errno or 1
    return 0


def _write(path: str, text: str) -> None:
    """Write the text in one call, as the kernel requires for these files."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _first_process(spec: dict[str, Any], report: int) -> None:
    _die_with_parent()
    _build_root(spec)
    # This process and the launcher count for the program's user, unless this user is root.
    others = 0 if os.geteuid() == 0 else 2
    program = os.fork()
    if program == 0:
        _reporting(report, lambda: _become_program(spec, PROGRAM, "/tmp", others))
    while True:
        pid, status, usage = os.wait3(0)
        if pid == program:
            return _report_end(report, status, usage)


def _report_end(report: int, status: int, usage: resource.struct_rusage) -> None:
    outcome = {
        "exit_code": os.waitstatus_to_exitcode(status),
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }
    os.write(report, json.dumps(outcome).encode() + b"\n")


def _build_root(spec: dict[str, Any]) -> None:
    """Build a read-only root from the system's and the interpreter's files, with a new /tmp."""
    real = {path: os.path.realpath(path) for path in (*_SYSTEM, *spec["visible"])}
    source = spec["source"].encode("utf-8", "replace")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID, f"mode=755,size={len(source) + (1 << 20)}")
    os.chdir("/tmp")
    os.mkdir(OLD[1:])
    _call("pivot_root", b".", OLD[1:].encode())
    os.chdir("/")
    os.mkdir("/tmp")  # first, because the interpreter may be below /tmp
    size = f"mode=1777,size={spec['files_mb']}m,nr_inodes={_MAX_FILES}"
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    shown: list[str] = []
    for path, target in sorted(real.items()):
        if not any(path.startswith(above + "/") for above in shown):
            shown += _show(path, target)
    for path in (*_SYSTEM_FILES, *_DEVICES):
        _show_file(path)
    os.symlink("/tmp", "/dev/shm")
    with open(PROGRAM, "wb") as file:
        file.write(source)
    _call("umount2", OLD.encode(), _MNT_DETACH)
    os.rmdir(OLD)
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)


def _show(path: str, real: str) -> list[str]:
    """Make `path` visible inside, read-only: a link or a directory, if it exists outside.

    Returns the mounted paths: one or none.
    """
    if os.path.islink(OLD + path) and path in _SYSTEM:
        os.symlink(os.readlink(OLD + path), path)
        return []
    if not os.path.isdir(OLD + real):
        return []
    os.makedirs(path, exist_ok=True)
    _mount(OLD + real, path, None, _MS_BIND | _MS_REC)
    _read_only(path)
    return [path]


def _show_file(path: str) -> None:
    if os.path.exists(OLD + path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w"):
            pass
        _mount(OLD + path, path, None, _MS_BIND)


def _read_only(path: str) -> None:
    """Make the mount, and all mounts below it, read-only."""
    attributes = (ctypes.c_uint64 * 4)(_MS_RDONLY | _MS_NOSUID | _MS_NODEV, 0, 0, 0)
    _call(
        "syscall",
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        path.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(ctypes.sizeof(attributes)),
        name="mount_setattr (Linux 5.12 or later)",
    )


def _as_a_process(spec: dict[str, Any], report: int) -> None:
    """Run the program with the filter and limits only; see `sandbox.py` for the differences."""
    path, work = spec["directory"] + PROGRAM, spec["directory"] + "/work"
    with open(path, "wb") as file:
        file.write(spec["source"].encode("utf-8", "replace"))
    os.mkdir(work)
    program = os.fork()
    if program == 0:
        _reporting(report, lambda: _become_program(spec, path, work, 0))
    _, status, usage = os.wait4(program, 0)
    _report_end(report, status, usage)


def _become_program(spec: dict[str, Any], path: str, directory: str, others: int) -> None:
    os.chdir(directory)
    if spec["isolation"] == "namespaces" and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _die_with_parent()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, spec["cpu_s"], spec["cpu_s"] + 1)
    _limit(resource.RLIMIT_FSIZE, spec["files_mb"] << 20)
    _limit(resource.RLIMIT_NOFILE, 256)
    _limit(resource.RLIMIT_NPROC, spec["processes"] + others)
    _limit(resource.RLIMIT_AS, spec["memory_mb"] << 20)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    install(bytes.fromhex(spec["filter"]))
    environment = {
        "HOME": directory,
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        # A thread counts as a process.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    python = spec["python"]
    os.execve(python, [python, "-I", "-B", "-X", "utf8", path], environment)


def _limit(what: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, never above the current hard limit."""
    hardest = resource.getrlimit(what)[1]
    ceiling = soft if hard is None else hard
    if hardest != resource.RLIM_INFINITY:
        soft, ceiling = min(soft, hardest), min(ceiling, hardest)
    resource.setrlimit(what, (soft, ceiling))


def _die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    _call(
        "mount",
        source and source.encode(),
        target.encode(),
        kind and kind.encode(),
        ctypes.c_ulong(flags),
        options and options.encode(),
        name=f"mount {target}",
    )


def _call(function: str, *arguments: Any, name: str | None = None) -> None:
    """Call a function of the C library that returns -1 if it fails.

    Raises:
        OSError: the call failed.
    """
    if getattr(_libc, function)(*arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name or function}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
