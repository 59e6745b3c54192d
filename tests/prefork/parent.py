"""`python -m tests.prefork.parent SOCKET`: forks itself for each that asks; see the package."""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

# What the actors of a run import before they work. Each must leave this process with one thread.
# Not Ray: it takes its settings, and whose worker it is, from the environment of its first import.
_MODULES = (
    "actors.embedded.engine",
    "actors.rollout.evaluator",
    "actors.rollout.worker",
    "actors.sglang.external",
    "distill.text.condense",
    "learner.worker",
    "peft",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
)


def main(address: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(128)  # whoever asks while the imports go on waits for them
    for name in _MODULES:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    _require_one_thread()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(sys.stdin, selectors.EVENT_READ)
        while all(key.fileobj is listener for key, _ in waiting.select()):
            channel, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                waiting.close()
                listener.close()
                _work(channel)
            channel.close()
    os.unlink(address)
    os.rmdir(os.path.dirname(address))


def _require_one_thread() -> None:
    """A fork has but the thread that forks. pyarrow's allocator knows, and restarts its own."""
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    names = {(task / "comm").read_text().strip() for task in others}
    assert threading.active_count() == 1 and names <= {"jemalloc_bg_thd"}, f"threads: {names}"


def _work(channel: socket.socket) -> None:
    """The fork: becomes the Ray worker that was asked for, and knows nothing of the tests."""
    os.setsid()
    request = _received(channel)
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.nice(request["niceness"] - os.nice(0))
    tempfile.tempdir = None
    random.seed()
    sys.argv = request["arguments"]
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [path for path in sys.path[1:] if path not in named]
    sys.path = [os.path.dirname(sys.argv[0]), *filter(None, named), *rest]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _received(channel: socket.socket) -> dict[str, Any]:
    """The request; its descriptors become this process's standard ones."""
    room = socket.CMSG_SPACE(3 * array.array("i").itemsize)
    head, ancillary, _, _ = channel.recvmsg(8, room)
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    for standard, passed in enumerate(descriptors):
        os.dup2(passed, standard)
        os.close(passed)
    body = b""
    while len(body) < int.from_bytes(head, "big"):
        body += channel.recv(1 << 20)
    return json.loads(body)


def _end_with(channel: socket.socket) -> None:
    """Ends this process once that which stands for it is killed."""
    channel.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
