"""Process that calls an agent's function, one episode at a time (see `agent_process`).

Interpreters without isotherm also run `serve`, so its imports are limited to the standard library.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

# Maps {"problem": ..., "environment": {...}} to {"result": ...} or {"error": text}. Must not raise.
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(answer: Answer) -> None:
    """Serve calls: one line of JSON on stdin for each call, one line on stdout for its result.

    If the folder of an episode (TMPDIR of its environment) was removed, it is created again. Other
    output is redirected to stderr. The process ends when stdin is closed.
    """
    calls, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in calls:
        asked = json.loads(line)
        os.makedirs(asked["environment"]["TMPDIR"], 0o700, exist_ok=True)
        written = json.dumps(answer(asked)).encode() + b"\n"
        sys.stdout.flush()
        while written:
            written = written[os.write(answers, written) :]
    os._exit(0)  # the agent's threads must not keep the process alive


def main(function: str) -> None:
    """Entry point for an agent that is `module:function`."""
    from distill.errors import described

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        os.environ.update(asked["environment"])
        tempfile.tempdir = None  # otherwise Python keeps the folder of an earlier episode
        try:
            result = _called(function, asked["problem"])
            json.dumps(result)
        except BaseException as error:  # user code may raise anything, SystemExit included
            return {"error": described(error)}
        return {"result": result}

    serve(answer)


def _called(function: str, problem: Any) -> Any:
    from distill.lookup import resolve_function

    result = resolve_function("env.command", function, ())(problem)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result
