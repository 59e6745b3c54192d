"""An agent that answers with a calculator: `openai`, its own loop, and nothing of isotherm."""

import json
import math
import re
import sys
from typing import Any

from openai import OpenAI

EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR = {"name": "calculator", "description": "Multiplies.", "parameters": EXPRESSION}
TOOLS: list = [{"type": "function", "function": CALCULATOR}]


def solve(problem: dict, client: OpenAI | None = None) -> dict:
    client, messages = client or OpenAI(), list(problem["messages"])
    while True:
        turn = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message: Any = turn.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return {"answer": message.content}
        for call in message.tool_calls:
            numbers = re.findall(r"\d+", call.function.arguments)
            result = str(math.prod(map(int, numbers)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    print(json.dumps(solve(json.load(sys.stdin))))
