"""Shared parts of the commands: settings from `key=value`, errors turned into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rich.console import Console

from cluster.base.outcomes import complaint, exit_code, outcome
from cluster.config.arguments import Arguments, HelpAsked, built, help_asked
from cluster.config.early_checks import check_early
from cluster.config.help import help_text
from cluster.console import discard_lost_outputs, make_console

Config = TypeVar("Config")


def run_command(
    config_class: type[Config],
    run: Callable[[Config, Console], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse `argv` (None: the process's) into the settings, run, and return the exit code.

    A command's `main` is `partial(run_command, ItsConfig, its_function)`.
    """
    arguments = sys.argv[1:] if argv is None else argv

    def checked(console: Console) -> None:
        config = parse(config_class, arguments)
        check_early(config)
        run(config, console)

    return run_and_report(checked)


def parse(config_class: type[Config], argv: Sequence[str]) -> Config:
    """Settings from `key=value` arguments, and from the file that config= names beneath them.

    Raises:
        ConfigError: what is written cannot be meant.
        HelpAsked: --help or --version is among the arguments.
    """
    given = Arguments.of(argv).settings(config_class)
    if (word := help_asked(argv)) is not None:
        raise HelpAsked(help_text(config_class, given, word))
    return built(config_class, given)


def run_and_report(run: Callable[[Console], Any]) -> int:
    """Run, print the error that ended it on stderr, and return the exit code."""
    console = make_console()
    try:
        run(console)
    except HelpAsked as asked:
        console.print(str(asked), highlight=False)
    except BaseException as raised:
        error = outcome(raised)
        code = exit_code(error)
        if code is None:
            raise
        with suppress(OSError):  # nobody reads it any more; the exit code tells
            print(f"error: {complaint(error)}", file=sys.stderr, flush=True)
        return code
    finally:
        discard_lost_outputs()  # or the interpreter fails to flush them, and exits with 120
    return 0
