"""An agent of the OpenAI Agents SDK, unchanged.

It has an interpreter of its own (docs/recipes/agents.md).
"""
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import json
import math
import re
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def calculator(expression: str) -> str:
    """Multiplies."""
    return str(math.prod(map(int, re.findall(r"\d+", expression))))


if __name__ == "__main__":
    problem = json.load(sys.stdin)
    agent = Agent(name="assistant", model="policy", tools=[calculator])
    print(json.dumps({"answer": Runner.run_sync(agent, problem["messages"]).final_output}))
