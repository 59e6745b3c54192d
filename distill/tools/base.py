"""Tools and tool calls, as in OpenAI's function calling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class ToolError(Exception):
    """An error whose message the model sees in place of a tool's result."""


class Tool(ABC):
    """A function that the model may call. Must pickle; episodes call it concurrently."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def description(self) -> str:
        """Description for the model: what the tool does and when to call it."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments, which are an object."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the tool, in the form of chat templates and OpenAI's `tools`."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    @abstractmethod
    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Return the result as text; `arguments` fit `parameters`.

        Raises:
            ToolError: the call failed; the model sees the message.
        """
