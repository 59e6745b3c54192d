"""Python tool: runs a program in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.sandbox.sandbox import SandboxLimits, SandboxResult, run_python
from distill.tools.base import Tool, ToolError

_LAST_LINES = 20


class PythonTool(Tool):
    """Tool that runs a program and returns its output. No state is kept between calls.

    `distill.sandbox.sandbox.require_sandbox` checks that the machine can run it.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()

    @property
    def name(self) -> str:
        return "python"

    @property
    def description(self) -> str:
        return (
            "Runs a Python program and returns what it prints. Every call starts afresh, without "
            f"network, and has {self.limits.wall_s:g} seconds."
        )

    @property
    def parameters(self) -> Mapping[str, Any]:
        code = {"type": "string", "description": "The program. It must print its results."}
        return {"type": "object", "properties": {"code": code}, "required": ["code"]}

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Run the program and return its standard output.

        Raises:
            ToolError: the program failed or was ended; the message has its output and the last
                lines of its errors.
            ConfigError: the sandbox cannot be created on this machine.
        """
        result = await run_python(arguments["code"], limits=self.limits)
        if result.outcome == "ok":
            return result.stdout or "(the program printed nothing)"
        raise ToolError(_error_text(result, self.limits))


def _error_text(result: SandboxResult, limits: SandboxLimits) -> str:
    if result.outcome in ("time", "memory", "output"):
        lines = [limits.message_for(result.outcome)]
    else:
        lines = [f"the program ended with exit code {result.exit_code}"]
    if result.stderr.strip():
        lines += result.stderr.rstrip().split("\n")[-_LAST_LINES:]
    if result.stdout:
        lines += ["It had printed:", result.stdout]
    return "\n".join(lines)
