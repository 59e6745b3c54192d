"""The process that calls an agent's function, episode by episode (see `agent_process`)."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from typing import Any

from distill.errors import described
from distill.lookup import resolve_function


def main(function: str) -> None:
    """Entry point: a line of JSON for each call on stdin, and one for its result on stdout.

    What the function prints goes to stderr. Ends when stdin is closed.
    """
    calls, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in calls:
        asked = json.loads(line)
        os.environ.update(asked["environment"])
        answer = json.dumps(_answer(function, asked["problem"])).encode() + b"\n"
        sys.stdout.flush()
        while answer:
            answer = answer[os.write(answers, answer) :]
    os._exit(0)  # threads of the agent's must not keep the process alive


def _answer(function: str, problem: Any) -> dict[str, Any]:
    try:
        result = _called(function, problem)
        json.dumps(result)
    except BaseException as error:  # the user's code may raise anything, an exit too
        return {"error": described(error)}
    return {"result": result}


def _called(function: str, problem: Any) -> Any:
    result = resolve_function("env.command", function, ())(problem)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result
