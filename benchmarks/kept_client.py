"""The example's agent with a client that is made once, not in each episode.

Apart from `benchmarks.agents`: each kept process imports the agent's module, and needs no torch.
"""

from __future__ import annotations

import os
from typing import Any

from openai import OpenAI

from examples.agents import calculator

_CLIENT = OpenAI(base_url="http://localhost", api_key="of an episode")


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Answers a problem through the episode's own endpoint."""
    client = _CLIENT.with_options(
        base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    return calculator.solve(problem, client)
