"""Tools of a Model Context Protocol (MCP) server, through the official client (extra `mcp`).

    env=actors.envs.mcp_tools:McpToolUse env.mcp_command="python server.py"

    check of the run          requests the server's list of tools, which every episode uses
    start of an episode       starts a server and opens a session
    call                      goes through that session; limits and errors as for any tool
    end of an episode         closes the session and ends the server's processes, even after errors
                              and if this process is killed (`distill.sandbox.guard`)

If a server does not start, the group fails, and the run counts the failure. If a server dies or
refuses a call, the model gets the error, because the call may have caused it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import chz

from distill.data.prompts import Prompt
from distill.engine import SamplingModel
from distill.envs.tool_use import Question, ToolUse
from distill.errors import ConfigError
from distill.libraries import require_library
from distill.lookup import known_names
from distill.rules import above, readable_as, setting
from distill.sandbox.guard import guarded, search_path
from distill.tools.base import Tool, ToolError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client import Transport

logger = logging.getLogger(__name__)

# The client gives a server 2 s to end, and kills it after 4 s (stdio.py of the client).
_CLOSE_S = 15.0


class McpServerError(RuntimeError):
    """Raised if a server does not start or answer, which the model cannot have caused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """Address of an MCP server: a command, or the URL of a running server (streamable HTTP).

    Attributes:
        environment: names of environment variables passed to the command, in addition to PATH, HOME
            and the others of the client's `get_default_environment`. Their values are read in the
            process that runs the command.
        start_s: longest start in seconds.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    environment: tuple[str, ...] = ()
    start_s: float = 60.0

    def __str__(self) -> str:
        return self.url or shlex.join(self.command)

    def transport(self, errors: Any) -> Transport:
        """Create a transport for a client. The command's stderr goes to the file `errors`."""
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self.url:
            return streamable_http_client(self.url)
        variables = {name: os.environ[name] for name in self.environment if name in os.environ}
        variables["PATH"] = search_path()
        program, *arguments = guarded(self.command, inherits=False)
        parameters = StdioServerParameters(command=program, args=arguments, env=variables)
        return stdio_client(parameters, errlog=errors)


class McpSession:
    """Session with a server. A server with a command is started by `open` and ended by `close`.

    A separate task holds the client, because the task that enters the client's context must also
    leave it, and the steps of an episode run in several tasks.
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._client: asyncio.Future[Client] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    async def open(self) -> None:
        """Open the session. Raises McpServerError if the server does not start or answer."""
        assert self._holder is None, "a session is opened once"
        if self._end.is_set():
            raise McpServerError(f"the session with {self._server} was closed before it began")
        self._client = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(self._client))
        await asyncio.shield(self._client)

    async def close(self) -> None:
        self._end.set()
        if self._holder is None or self._client is None:
            return
        if not self._client.done():
            self._holder.cancel()  # the session is still being opened
        await asyncio.wait([self._holder], timeout=_CLOSE_S)
        if not self._holder.done():
            logger.warning("MCP server %s does not end and is left running", self._server)
            self._holder.cancel()

    async def ask(self, question: Callable[[Client], Awaitable[Any]]) -> Any:
        """Return the server's answer. Raises ToolError if the server refuses or has ended."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        assert self._client is not None, "open comes first"
        try:
            return await question(self._client.result())
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ToolError("this tool cannot be used: its server has ended") from error
            raise ToolError(error.message) from error

    async def _hold(self, opened: asyncio.Future[Client]) -> None:
        from mcp import Client

        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            client = Client(self._server.transport(errors))
            try:
                async with asyncio.timeout(self._server.start_s) as clock, client:
                    clock.reschedule(None)
                    opened.set_result(client)
                    await self._end.wait()
            except Exception as error:  # from the client or the system, or an ExceptionGroup
                if opened.done():
                    logger.warning("MCP server %s ended badly: %s", self._server, _causes(error))
                    return
                failure = McpServerError(self._why(error, errors))
                failure.__cause__ = error
                opened.set_exception(failure)
            finally:
                opened.cancel()  # no effect if the future is done

    def _why(self, error: Exception, errors: Any) -> str:
        errors.seek(0)
        printed = " ".join(errors.read().split())[-300:]
        why = _causes(error)
        if isinstance(error, TimeoutError):
            why = f"no answer within {self._server.start_s:g} s"
        return f"{self._server} did not start: {why}{f'; its output: {printed}' if printed else ''}"


def _causes(error: BaseException) -> str:
    """Format an error as one line; an exception group as its members."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_causes(member) for member in error.exceptions)
    return f"{type(error).__name__}: {error}"


class McpTool(Tool):
    """A server's tool. Calls need a `session`, which exists within an episode."""

    def __init__(
        self,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        session: McpSession | None = None,
    ) -> None:
        self._definition = name, description, parameters
        self._session = session

    @property
    def name(self) -> str:
        return self._definition[0]

    @property
    def description(self) -> str:
        return self._definition[1]

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self._definition[2]

    def within(self, session: McpSession) -> McpTool:
        return McpTool(*self._definition, session)

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        assert self._session is not None, "a tool is called within a session"
        result = await self._session.ask(
            lambda client: client.call_tool(self.name, dict(arguments))
        )
        # Texts, and texts of resources. Other parts, such as pictures, are shown by their type.
        texts = [
            getattr(getattr(part, "resource", part), "text", f"[{part.type}]")
            for part in result.content
        ]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        text = "\n".join(texts)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed without a message")
        return text


@cache
def server_tools(server: McpServer) -> tuple[McpTool, ...]:
    """Tools of a server. The server is started to list them, once in each process.

    Raises:
        ConfigError: the client library is not installed, or the server does not start.
    """
    require_library("mcp", "env=McpToolUse", "isotherm[mcp]", "env")
    try:
        return asyncio.run(_listed(server))
    except Exception as error:  # the client raises many types
        raise ConfigError(
            f"cannot list the MCP server's tools: {_causes(error)}. Check that env.mcp_command "
            "runs in a shell, or that env.mcp_url answers; env.mcp_environment names the "
            "variables that the server needs",
            field="env.mcp_url" if server.url else "env.mcp_command",
        ) from error


async def _listed(server: McpServer) -> tuple[McpTool, ...]:
    session = McpSession(server)
    tools: list[McpTool] = []
    cursor = None
    try:
        await session.open()
        async with asyncio.timeout(server.start_s):
            while True:
                page = await session.ask(lambda client, at=cursor: client.list_tools(cursor=at))
                tools += [McpTool(t.name, t.description or "", t.input_schema) for t in page.tools]
                cursor = page.next_cursor
                if cursor is None:
                    return tuple(tools)
    finally:
        await session.close()


class McpQuestion(Question):
    """Environment whose MCP tools are called through one session per episode."""

    def __init__(self, server: McpServer, prompt: Prompt, tools: Sequence[Tool], *how: Any) -> None:
        self._session = session = McpSession(server)
        bound = [tool.within(session) if isinstance(tool, McpTool) else tool for tool in tools]
        super().__init__(prompt, bound, *how)

    async def start(self, models: Mapping[str, SamplingModel]) -> None:
        await self._session.open()

    async def close(self) -> None:
        await self._session.close()


@chz.chz
class McpToolUse(ToolUse):
    """env=McpToolUse: prompts that are answered with tools of an MCP server, and other tools."""

    tools: str = chz.field(
        default="", doc="additional tools, as in env=ToolUse, separated by commas"
    )
    mcp_command: str = setting(
        readable_as("command line", shlex.split, allows="a 'b'", refuses="a 'b"),
        default="",
        doc="command line of a server that the run starts, connected through stdio",
    )
    mcp_url: str = chz.field(
        default="", doc="address of a running server (streamable HTTP), instead of mcp_command"
    )
    mcp_tools: str = chz.field(
        default="",
        doc="the server's tools that the model may use, separated by commas; default: all",
    )
    mcp_environment: str = chz.field(
        default="",
        doc="environment variables that are passed to mcp_command, besides PATH and HOME, "
        "separated by commas",
    )
    mcp_start_s: float = setting(
        above(0), default=60.0, doc="time limit of a server's start in seconds"
    )

    @chz.validate
    def _one_server(self) -> None:
        if bool(self.mcp_command.strip()) == bool(self.mcp_url.strip()):
            raise ConfigError(
                f"env.mcp_command={self.mcp_command!r} env.mcp_url={self.mcp_url!r}: give exactly "
                "one of them",
            )
        for name in _names(self.mcp_environment):
            if name not in os.environ:
                raise ConfigError(f"env.mcp_environment={name} is not set; export it")

    def server(self) -> McpServer:
        return McpServer(
            command=tuple(shlex.split(self.mcp_command)),
            url=self.mcp_url.strip(),
            environment=_names(self.mcp_environment),
            start_s=self.mcp_start_s,
        )

    def toolbox(self) -> Sequence[Tool]:
        its = {tool.name: tool for tool in server_tools(self.server())}
        for name in _names(self.mcp_tools):
            if name not in its:
                raise ConfigError(
                    f"env.mcp_tools: the server has no tool {name!r}; {known_names(name, its)}",
                    field="env.mcp_tools",
                )
        chosen = [its[name] for name in _names(self.mcp_tools) or its]
        others = ToolUse.toolbox(self)
        twice = {tool.name for tool in others} & {tool.name for tool in chosen}
        if twice:
            raise ConfigError(
                f"env.tools={self.tools!r} has a tool named {min(twice)!r}, as the server has; "
                "leave one out with env.tools or env.mcp_tools",
            )
        return [*others, *chosen]

    def new_env(self) -> Callable[..., Question]:
        return partial(McpQuestion, self.server())


def _names(commas: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in commas.split(",") if name.strip())
