"""The example's agent with a client that is created once, instead of in each episode.

In a module of its own because each agent process that is kept imports it, and needs no torch.
"""

from __future__ import annotations

import os
from typing import Any

from openai import OpenAI

from examples.agents import calculator

_CLIENT = OpenAI(base_url="http://localhost", api_key="of an episode")


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Answer a problem through the episode's endpoint."""
    client = _CLIENT.with_options(
        base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    return calculator.solve(problem, client)
