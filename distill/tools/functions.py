"""Tools from Python functions: the types and the docstring determine the JSON schema."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pkgutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from distill.errors import ConfigError
from distill.tools.base import Tool, ToolError

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def function_tool(function: Callable[..., Any]) -> Tool:
    """Create a tool from a function at the top of a module, synchronous or not; pickles by name.

    Every argument needs a type, and an entry under `Args:` in the docstring (Google style). Each
    call of a synchronous function runs in a new thread, which cannot be interrupted: a function
    that hangs occupies its thread, but does not block the caller.

    Raises:
        ConfigError: the function cannot be found by its name, or its types or docstring are
            incomplete.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in function.__qualname__:
        raise ConfigError(
            f"tool {name} cannot be imported by other processes; define it at the top level of a "
            "module",
            field="env.tools",
        )
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in _BY_NAME:
            raise ConfigError(
                f"tool {name}: {parameter} cannot be given by name, as a model gives arguments",
                field="env.tools",
            )
    return _FunctionTool(name, function)


def _tool_at(name: str) -> Tool:
    found = pkgutil.resolve_name(name)
    # If function_tool is used as a decorator, the name refers to the tool already.
    return found if isinstance(found, Tool) else function_tool(found)


class _FunctionTool(Tool):
    def __init__(self, place: str, function: Callable[..., Any]) -> None:
        try:
            from transformers.utils.chat_template_utils import get_json_schema

            self._schema: dict[str, Any] = get_json_schema(function)["function"]
        except Exception as error:  # of several types, not all of them public
            raise ConfigError(
                f"tool {place} does not document its call: {error}. It needs a docstring with an "
                "entry under `Args:` for each argument, and a type for each",
                field="env.tools",
            ) from error
        self._place = place
        self._function = function

    @property
    def name(self) -> str:
        return self._schema["name"]

    @property
    def description(self) -> str:
        return self._schema["description"]

    @property
    def parameters(self) -> Mapping[str, Any]:
        return _plain(self._schema["parameters"])

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        if inspect.iscoroutinefunction(self._function):
            return str(await self._function(**arguments))
        return str(await _in_thread(self._function, arguments))

    def __reduce__(self) -> tuple[Callable[[str], Tool], tuple[str]]:
        return _tool_at, (self._place,)


def _plain(schema: Any) -> Any:
    """Replace `nullable`, which is a keyword of OpenAPI, by the type null of JSON schema."""
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _plain(value) for key, value in schema.items()}
    if plain.get("nullable") is True and isinstance(plain.get("type"), str | list):
        del plain["nullable"]
        kinds = plain["type"]
        plain["type"] = [*([kinds] if isinstance(kinds, str) else kinds), "null"]
        if "enum" in plain:
            plain["enum"] = [*plain["enum"], None]
    return plain


async def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Run a function in a new thread.

    In the event loop's thread pool, calls that hang would use up the threads, and the process would
    wait for them at its exit. A SystemExit of the function becomes a ToolError, because it must not
    end this process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # the caller was cancelled
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = context.run(function, **arguments)
        except StopIteration as error:  # a future cannot hold a StopIteration
            failure = ToolError(f"StopIteration: {error}")
        except Exception as error:  # raised in the caller
            failure = error
        except BaseException as error:  # such as SystemExit: see above
            failure = ToolError(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=f"tool {function.__name__}", daemon=True).start()
    return await future
