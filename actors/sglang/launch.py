"""Child process of `SglangServer`: `python -m actors.sglang.launch` runs one SGLang HTTP server.

    stdin, first line    JSON: {"flags": [...], "api_key": ..., "admin_api_key": ...}
    stdin, afterwards    a lifeline: when the parent closes stdin, by dying or on purpose, the
                         server and every process that it started are killed immediately

Keys are passed by stdin because every user of the machine can read a command line. They are
replaced in the output of this process, which contains SGLang's arguments. Temporary files are in a
private directory of the server (actors/sglang/private_files.py). It contains the rendezvous file of
the server's ranks as well: torch's TCP store would listen on all addresses of the machine.
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

# Allocations after which garbage collection runs. With Python's default of 700 the imports of a
# server trigger many collections, which find nothing: the imported objects stay alive.
_COLLECT_AFTER = 100_000
# Value "spawn": processes of a server on a CPU are spawned, as on CUDA.
START_METHOD = "ISOTHERM_SGLANG_START_METHOD"


def main() -> None:
    """Serve until the lifeline is closed. Errors are written to the log as a traceback."""
    gc.set_threshold(_COLLECT_AFTER)  # inherited by forked processes
    keep_freed_memory()
    order = json.loads(sys.stdin.readline())
    keys = (order["api_key"], order["admin_api_key"])
    sys.stdout, sys.stderr = _Redacted(sys.stdout, keys), _Redacted(sys.stderr, keys)
    directory = private_directory()
    threading.Thread(target=_die_with_the_parent, name="lifeline", daemon=True).start()
    _use(directory)
    os.environ[SWITCH] = "1"  # activates the plugin in this server

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    _name_instances(PortArgs, directory.name)
    try:
        # With "=": a key may begin with a dash.
        keys = [f"--api-key={order['api_key']}", f"--admin-api-key={order['admin_api_key']}"]
        server_args: Any = prepare_server_args([*order["flags"], *keys])
        if server_args.device == "cpu" and os.environ.get(START_METHOD) != "spawn":
            _fork_processes()
        _meet_in(directory, server_args)
        run_server(server_args)
    except BaseException:
        traceback.print_exc()
    finally:  # a normal exit of the interpreter would wait for the schedulers
        _end()


class _Redacted(io.TextIOWrapper):
    """Text stream that replaces keys by ***."""

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
    """Make this process and its children keep temporary files in the directory."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Set before TMPDIR: later servers reuse compiled kernels, so they must outlive the directory.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    # Otherwise SGLang's process titles overwrite the environment, by which the cleaner recognises
    # processes of this server.
    os.environ["SPT_NOENV"] = "1"
    # Prefix of named semaphores of this process and its children: /dev/shm/sem.NAME-...
    multiprocessing.current_process()._config["semprefix"] = f"/{directory.name}"  # pyright: ignore[reportAttributeAccessIssue]


def _name_instances(port_args: Any, name: str) -> None:
    """Make SGLang name its load snapshots, files in /dev/shm, after the directory."""
    init_new = port_args.init_new

    def named(*arguments: Any, **keywords: Any) -> Any:
        made = init_new(*arguments, **keywords)
        made.instance_id = name
        return made

    port_args.init_new = staticmethod(named)


def _meet_in(directory: Path, server_args: Any) -> None:
    """Make the ranks of a server on one node meet through a file.

    SGLang's own store is still needed by servers on several nodes; by replicas, each of which is a
    world with its own store; and by NIXL, which opens another store at the same address.
    """
    alone = server_args.nnodes == 1 and server_args.dp_size == 1
    if not alone or server_args.dist_init_addr or server_args.moe_a2a_backend == "nixl":
        return
    os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{directory}/ranks")
    # SGLang's CPU kernels name their shared memory after the address of the store. With a file
    # there is no address, so one is set.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(server_args.port))


def _fork_processes() -> None:
    """Make SGLang fork its processes instead of spawning them.

    SGLang spawns because CUDA does not survive a fork. On a CPU forking is safe, and saves the
    scheduler and the detokenizer the seconds of importing SGLang again.
    """
    set_start_method = multiprocessing.set_start_method

    def fork(_method: str | None, force: bool = False) -> None:
        set_start_method("fork", force=force)

    multiprocessing.set_start_method = fork


def _die_with_the_parent() -> None:
    # A raw read: reading sys.stdin holds a lock that the interpreter's shutdown needs.
    while os.read(0, 4096):
        pass
    _end()


def _end() -> NoReturn:
    """Kill every process that the server started, and exit. A server never ends by itself."""
    kill(psutil.Process().children(recursive=True))
    os._exit(1)


if __name__ == "__main__":
    main()
