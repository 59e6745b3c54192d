"""At the start of a Ray worker: a fork of `parent.py` does the work, and this process waits for it.

Imported by Python itself, in every process of a test session: so it must cost next to nothing where
there is nothing to do. Where nobody answers, the worker starts as it always does.
"""

import os
import sys

_WORKER = os.path.join("ray", "_private", "workers", "default_worker.py")


def _stand_for_a_fork(address: str) -> None:
    import array
    import json
    import socket

    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(address)
    except OSError:
        return
    request = {
        "arguments": sys.orig_argv[1:],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "niceness": os.nice(0),
    }
    body = json.dumps(request).encode()
    standard = array.array("i", [0, 1, 2])
    head = len(body).to_bytes(8, "big")
    channel.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, standard)])
    channel.sendall(body)
    channel.recv(1)  # nothing is ever sent: it is closed when the fork and its children have ended
    os._exit(0)


if (_address := os.environ.get("ISOTHERM_PREFORK", "off")) != "off" and (
    len(sys.orig_argv) > 1 and sys.orig_argv[1].endswith(_WORKER)
):
    _stand_for_a_fork(_address)
