"""The child's side of `SglangServer`: `python -m actors.sglang.launch`, one SGLang HTTP server.

    stdin, first line    JSON: {"flags": [...], "api_key": ..., "admin_api_key": ...}
    stdin, afterwards    a lifeline: when the parent closes it, by dying or on purpose, the server
                         and every process that it started are killed at once

Keys come by stdin because a command line can be read by every user of the machine.
"""

# SGLang is an extra: types are checked without it, too.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from typing import Any, NoReturn


def main() -> None:
    """Serves until the lifeline is cut; what goes wrong is a traceback in the log."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_die_with_the_parent, name="lifeline", daemon=True).start()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    try:
        run_server(prepare_server_args([*order["flags"], *_key_flags(order)]))
    except BaseException:
        traceback.print_exc()
    finally:  # the interpreter would wait for the schedulers before it ends
        _end()


def _key_flags(order: dict[str, Any]) -> list[str]:
    # One word each: a key may begin with a dash.
    return [f"--api-key={order['api_key']}", f"--admin-api-key={order['admin_api_key']}"]


def _die_with_the_parent() -> None:
    # A raw read: the interpreter's own stdin buffer takes a lock that its shutdown needs too.
    while os.read(0, 4096):
        pass
    _end()


def _end() -> NoReturn:
    """Exits at once, with every process that the server started. A server never ends on its own."""
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(1)


if __name__ == "__main__":
    main()
