"""The child's side of `SglangServer`: `python -m actors.sglang.launch`, one SGLang HTTP server.

    stdin, first line    JSON: {"flags": [...], "api_key": ..., "admin_api_key": ...}
    stdin, afterwards    a lifeline: when the parent closes it, by dying or on purpose, the server
                         and every process that it started are killed at once

Keys come by stdin because a command line can be read by every user of the machine, and are blotted
out of what this process prints, SGLang's arguments among it. Temporary files are in a directory of
the server's own (actors/sglang/private_files.py), the store by which its ranks meet too: torch's
other store would listen on all addresses of the machine.
"""

# SGLang is an extra: types are checked without it, too.
# pyright: reportMissingImports=false

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn, TextIO

import psutil

from actors.sglang.plugin.hooks import SWITCH
from actors.sglang.private_files import kill, private_directory
from distill.main_memory import keep_freed_memory

# New objects after which the garbage collector looks for unused ones. Python's own threshold, 700,
# has it look again and again through what the imports of a server make, and that stays.
_COLLECT_AFTER = 100_000
# "spawn": processes of a server on a CPU start as those of one on CUDA do.
START_METHOD = "ISOTHERM_SGLANG_START_METHOD"


def main() -> None:
    """Serves until the lifeline is cut; what goes wrong is a traceback in the log."""
    # Of this process and its forks.
    gc.set_threshold(_COLLECT_AFTER)
    keep_freed_memory()
    order = json.loads(sys.stdin.readline())
    keys = (order["api_key"], order["admin_api_key"])
    sys.stdout, sys.stderr = _Redacted(sys.stdout, keys), _Redacted(sys.stderr, keys)
    directory = private_directory()
    threading.Thread(target=_die_with_the_parent, name="lifeline", daemon=True).start()
    _use(directory)
    os.environ[SWITCH] = "1"  # the plugin is for servers that ask for it

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    _name_instances(PortArgs, directory.name)
    try:
        # One word each: a key may begin with a dash.
        keys = [f"--api-key={order['api_key']}", f"--admin-api-key={order['admin_api_key']}"]
        server_args: Any = prepare_server_args([*order["flags"], *keys])
        if server_args.device == "cpu" and os.environ.get(START_METHOD) != "spawn":
            _fork_processes()
        _meet_in(directory, server_args)
        run_server(server_args)
    except BaseException:
        traceback.print_exc()
    finally:  # the interpreter would wait for the schedulers before it ends
        _end()


class _Redacted(io.TextIOWrapper):
    """A stream that shows no key."""

    def __init__(self, stream: TextIO, keys: Collection[str]) -> None:
        super().__init__(
            stream.buffer, stream.encoding, errors="backslashreplace", line_buffering=True
        )
        self._keys = keys

    def write(self, text: str, /) -> int:
        for key in self._keys:
            text = text.replace(key, "***")
        return super().write(text)


def _use(directory: Path) -> None:
    """Has this process and what it starts keep temporary files in the directory."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Compiled kernels are no temporary files: the next server takes them from there.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    # SGLang's process titles would be written over the environment, by which processes are known.
    os.environ["SPT_NOENV"] = "1"
    # Named semaphores, of this process and of its children: /dev/shm/sem.NAME-...
    multiprocessing.current_process()._config["semprefix"] = f"/{directory.name}"  # pyright: ignore[reportAttributeAccessIssue]


def _name_instances(port_args: Any, name: str) -> None:
    """Has SGLang name its load snapshots, files in /dev/shm, by the directory."""
    init_new = port_args.init_new

    def named(*arguments: Any, **keywords: Any) -> Any:
        made = init_new(*arguments, **keywords)
        made.instance_id = name
        return made

    port_args.init_new = staticmethod(named)


def _meet_in(directory: Path, server_args: Any) -> None:
    """Has the ranks of a server on one node meet in a file; others need SGLang's own store.

    That is a server of several nodes; replicas, each of which is a world with its own store; and
    NIXL, which opens another store at the same address.
    """
    alone = server_args.nnodes == 1 and server_args.dp_size == 1
    if not alone or server_args.dist_init_addr or server_args.moe_a2a_backend == "nixl":
        return
    os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{directory}/ranks")
    # SGLang's CPU kernels name their shared memory by the store's address, which there is none of.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(server_args.port))


def _fork_processes() -> None:
    """Has SGLang's processes begin as copies of this one, not as interpreters of their own.

    SGLang spawns them because CUDA does not survive a fork. On a CPU nothing speaks against it, and
    the seconds of importing SGLang are paid once, not by scheduler and detokenizer again.
    """
    set_start_method = multiprocessing.set_start_method

    def fork(_method: str | None, force: bool = False) -> None:
        set_start_method("fork", force=force)

    multiprocessing.set_start_method = fork


def _die_with_the_parent() -> None:
    # A raw read: the interpreter's own stdin buffer takes a lock that its shutdown needs too.
    while os.read(0, 4096):
        pass
    _end()


def _end() -> NoReturn:
    """Exits at once, with every process that the server started. A server never ends on its own."""
    kill(psutil.Process().children(recursive=True))
    os._exit(1)


if __name__ == "__main__":
    main()
