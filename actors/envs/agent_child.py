"""The process that calls an agent's function, episode by episode (see `agent_process`).

`serve` is run by other interpreters too, which have the standard library alone.
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

# Of {"problem": ..., "environment": {...}}: {"result": ...}, or {"error": text}. Must not raise.
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(answer: Answer) -> None:
    """A line of JSON for each call on stdin, and one for its result on stdout.

    What is printed meanwhile goes to stderr. Ends the process when stdin is closed.
    """
    calls, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in calls:
        written = json.dumps(answer(json.loads(line))).encode() + b"\n"
        sys.stdout.flush()
        while written:
            written = written[os.write(answers, written) :]
    os._exit(0)  # threads of the agent's must not keep the process alive


def main(function: str) -> None:
    """Entry point for an agent that is `module:function`."""
    from distill.errors import described

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        os.environ.update(asked["environment"])
        tempfile.tempdir = None  # else temporary files go to the folder of an episode before
        try:
            result = _called(function, asked["problem"])
            json.dumps(result)
        except BaseException as error:  # the user's code may raise anything, an exit too
            return {"error": described(error)}
        return {"result": result}

    serve(answer)


def _called(function: str, problem: Any) -> Any:
    from distill.lookup import resolve_function

    result = resolve_function("env.command", function, ())(problem)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result
