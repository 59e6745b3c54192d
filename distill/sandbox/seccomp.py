"""Seccomp filter for untrusted programs, in the kernel's format.

The filter refuses system calls that have no use in a computation: memory that no limit counts
(memfd, System V, pages that vmsplice pins, larger buffers of sockets), keys, sockets of rare
families, io_uring, tracing, mounting, new namespaces, BPF, modules. Refused calls fail with an
error code, and the program continues. All calls of other architectures than the machine's own (32
bits, x32) also fail, because their numbers would mean other calls.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

# Numbers of the refused calls on x86_64 and aarch64, by name (Linux:
# arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h; from 424 on, numbers
# are the same on all architectures).
_REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "vmsplice": (278, 75),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "syslog": (103, 116),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
}
_CLONE, _SOCKET, _SOCKETPAIR = (56, 220), (41, 198), (53, 199)
# The flags of clone3 are in memory, which a filter cannot read. The C library falls back on clone.
_CLONE3 = 435
_NAMESPACES = 0x7E020000  # CLONE_NEW*
# Options for sizes of buffers in kernel memory: SO_SNDBUF, SO_RCVBUF, and both with FORCE.
_SETSOCKOPT, _SOL_SOCKET, _BUFFERS = (54, 208), 1, (7, 8, 32, 33)
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: families that namespaces confine
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets in struct seccomp_data.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2


def filter_program(*, sockets: bool = True) -> bytes:
    """Filter for this machine, as `struct sock_filter`s; empty if the machine is not supported.

    Args:
        sockets: if True, local and internet sockets may be created.
    """
    if sys.platform != "linux" or os.uname().machine not in _MACHINES:
        return b""
    column, architecture = _MACHINES[os.uname().machine]
    families = _FAMILIES if sockets else ()
    refused = [numbers[column] for numbers in _REFUSED.values()]
    return b"".join(
        [
            _step(_LOAD, _ARCHITECTURE),
            _step(_JUMP_IF_EQUAL, architecture, then=1),
            _fail(errno.ENOSYS),
            _step(_LOAD, _NUMBER),
            *([_step(_JUMP_IF_AT_LEAST, _X32, other=1), _fail(errno.ENOSYS)] if not column else []),
            _step(_JUMP_IF_EQUAL, _CLONE3, other=1),
            _fail(errno.ENOSYS),
            *(_step(_JUMP_IF_EQUAL, number, other=1) + _fail(errno.EPERM) for number in refused),
            _step(_JUMP_IF_EQUAL, _CLONE[column], other=4),
            _step(_LOAD, _FIRST_ARGUMENT),
            _step(_JUMP_IF_ANY, _NAMESPACES, other=1),
            _fail(errno.EPERM),
            _step(_RETURN, _ALLOW),
            _step(_JUMP_IF_EQUAL, _SETSOCKOPT[column], other=4 + 2 * len(_BUFFERS)),
            _step(_LOAD, _SECOND_ARGUMENT),
            _step(_JUMP_IF_EQUAL, _SOL_SOCKET, other=1 + 2 * len(_BUFFERS)),
            _step(_LOAD, _THIRD_ARGUMENT),
            *(_step(_JUMP_IF_EQUAL, name, other=1) + _fail(errno.EPERM) for name in _BUFFERS),
            _step(_RETURN, _ALLOW),
            _step(_JUMP_IF_EQUAL, _SOCKET[column], then=1),
            _step(_JUMP_IF_EQUAL, _SOCKETPAIR[column], other=2 + 2 * len(families)),
            _step(_LOAD, _FIRST_ARGUMENT),
            *(
                _step(_JUMP_IF_EQUAL, family, other=1) + _step(_RETURN, _ALLOW)
                for family in families
            ),
            _fail(errno.EAFNOSUPPORT),
            _step(_RETURN, _ALLOW),
        ]
    )


def _step(code: int, operand: int, *, then: int = 0, other: int = 0) -> bytes:
    """One instruction. A comparison skips `then` instructions if it holds, else `other`."""
    return struct.pack("=HBBI", code, then, other, operand)


def _fail(code: int) -> bytes:
    return _step(_RETURN, _FAIL | code)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def install(steps: bytes) -> None:
    """Apply a filter to this thread and its children, irrevocably; an empty filter does nothing.

    Raises:
        OSError: the kernel does not support filters.
    """
    if not steps:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps) // 8, steps)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"seccomp: {os.strerror(code)}")
