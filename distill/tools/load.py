"""Loading of tools by the names in a setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from distill.errors import ConfigError
from distill.libraries import require_library
from distill.lookup import require_module, resolve
from distill.sandbox.sandbox import Isolation, SandboxLimits, require_sandbox
from distill.tools.base import Tool
from distill.tools.functions import function_tool
from distill.tools.python import PythonTool
from distill.tools.retrieval import Retrieval

_BUILT_IN: dict[str, Callable[[], Tool]] = {
    "calculator": lambda: _calculator(),
    "python": lambda: _python("namespaces"),
    "python:process": lambda: _python("process"),
}
_RETRIEVAL = ("retrieval", "search")
_KNOWN = (*_BUILT_IN, *(f"{kind}:DIRECTORY" for kind in _RETRIEVAL))


def load_tools(names: str) -> tuple[Tool, ...]:
    """Load the tools of a comma-separated list; empty for an empty list.

    Names: `calculator`; `python`, or `python:process` if the machine cannot create the sandbox (see
    `distill.sandbox.sandbox`); `retrieval:DIRECTORY`, or `search:DIRECTORY`; and
    `package.module:attribute`, which is a function, a Tool, or a subclass of Tool whose constructor
    takes no arguments.

    Raises:
        ConfigError: an unknown name, two tools with one name, or a tool that cannot be created.
    """
    tools = tuple(_load(name.strip()) for name in names.split(",")) if names.strip() else ()
    for name, count in Counter(tool.name for tool in tools).items():
        if count > 1:
            raise ConfigError(
                f"tools={names!r} has {count} tools named {name!r}; keep one", field="env.tools"
            )
    return tools


def require_tools(names: str) -> None:
    """Check the names of tools without importing their modules.

    Raises:
        ConfigError: an unknown name, or a module or a directory that does not exist.
    """
    for name in filter(None, map(str.strip, names.split(","))):
        if name.partition(":")[0] in _RETRIEVAL:
            _load(name)  # the index is built later
        elif name not in _BUILT_IN:
            require_module("env.tools", name, _KNOWN)


def _calculator() -> Tool:
    require_library("simpleeval", "tools=calculator", "simpleeval", "env.tools")
    from distill.tools.calculator import Calculator

    return Calculator()


def _python(isolation: Isolation) -> Tool:
    require_sandbox(isolation)
    return PythonTool(SandboxLimits(isolation=isolation))


def _load(name: str) -> Tool:
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    module, _, attribute = name.partition(":")
    if module in _RETRIEVAL:
        if not attribute:
            raise ConfigError(
                f"tools={name!r} needs a directory of texts: {module}:DIRECTORY", field="env.tools"
            )
        return Retrieval(attribute)
    return _custom(name)


def _custom(name: str) -> Tool:
    found = resolve("env.tools", name, _KNOWN)
    if isinstance(found, type) and issubclass(found, Tool):
        try:
            found = found()
        except Exception as error:  # the class is the user's: it may raise anything
            raise ConfigError(
                f"tools={name!r} cannot be created: {type(error).__name__}: {error}. A tool class "
                "must take no arguments",
                field="env.tools",
            ) from error
    if isinstance(found, Tool):
        return found
    if isinstance(found, type) or not callable(found):
        raise ConfigError(
            f"tools={name!r} is {found!r}: neither a function nor a Tool (distill.tools.base)",
            field="env.tools",
        )
    return function_tool(found)
