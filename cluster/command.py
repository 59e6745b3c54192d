"""Common parts of the commands: settings from `key=value`, and exit codes of errors."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rich.console import Console

from cluster.base.outcomes import error_text, exit_code, outcome
from cluster.base.signals import end, handled
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
    """Parse `argv` (None: `sys.argv`) into settings, run the command, and return the exit code.

    A command's `main` is `partial(run_command, ItsConfig, its_function)`.
    """
    arguments = sys.argv[1:] if argv is None else argv

    def checked(console: Console) -> None:
        config = parse(config_class, arguments)
        check_early(config)
        run(config, console)

    return run_and_report(checked)


def parse(config_class: type[Config], argv: Sequence[str]) -> Config:
    """Parse settings from `key=value` arguments, which override the file that config= names.

    Raises:
        ConfigError: an argument is invalid.
        HelpAsked: --help or --version is among the arguments.
    """
    given = Arguments.of(argv).settings(config_class)
    if (word := help_asked(argv)) is not None:
        raise HelpAsked(help_text(config_class, given, word))
    return built(config_class, given)


def run_and_report(run: Callable[[Console], Any]) -> int:
    """Run a command, print an error to stderr, and return the exit code."""
    console = make_console()
    try:
        with handled(end, signal.SIGTERM, signal.SIGHUP):
            run(console)
    except HelpAsked as asked:
        console.print(str(asked), highlight=False)
    except BaseException as raised:
        error = outcome(raised)
        code = exit_code(error)
        if code is None:
            raise
        with suppress(OSError):  # stderr may be closed; the exit code is still returned
            print(f"error: {error_text(error)}", file=sys.stderr, flush=True)
        return code
    finally:
        # Otherwise the interpreter fails to flush closed outputs, and exits with code 120.
        discard_lost_outputs()
    return 0
