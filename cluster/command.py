"""Shared parts of the commands: settings from `key=value`, errors turned into exit codes.

0 the command did what it was asked; 1 it failed; 2 bad input, nothing was started; 3 the handshake
refused; 129 SIGHUP, 130 Ctrl-C and 143 SIGTERM, after a checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rich.console import Console

from cluster.config.arguments import HELP, Arguments, HelpAsked, make
from cluster.config.early_checks import check_early
from cluster.config.help import help_text
from cluster.console import discard_lost_outputs, make_console
from cluster.early_ends import Interrupted, RunFailed, StoppedAtOnce
from distill.errors import EngineError, IsothermError, NonFiniteError

Config = TypeVar("Config")


def run_command(
    config_class: type[Config], run: Callable[[Config, Console], None], argv: list[str] | None
) -> int:
    """Parses `argv` into the settings, runs, and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv

    def checked(console: Console) -> None:
        config = parse(config_class, arguments)
        check_early(config)
        run(config, console)

    return exit_code(checked)


def parse(config_class: type[Config], argv: Sequence[str]) -> Config:
    """Settings from `key=value` arguments, and from the file that config= names beneath them.

    Raises:
        ConfigError: what is written cannot be meant.
        HelpAsked: --help or --version is among the arguments.
    """
    given = Arguments.of(argv).settings(config_class)
    if HELP in argv:
        raise HelpAsked(help_text(config_class, given))
    return make(config_class, given)


def exit_code(run: Callable[[Console], Any]) -> int:
    """Runs, and turns what was raised into a line on stderr and a code."""
    console = make_console()
    try:
        run(console)
    except HelpAsked as asked:
        console.print(str(asked), markup=False, highlight=False)
    except (IsothermError, Interrupted) as error:
        return _complain(complaint(error), error.exit_code)
    except (RunFailed, EngineError, NonFiniteError) as error:
        return _complain(complaint(error), 1)
    except StoppedAtOnce as error:
        return _complain(
            "stopped at once: what came after the newest checkpoint is lost; the same command "
            "resumes from there",
            error.exit_code,
        )
    except KeyboardInterrupt:
        return _complain("interrupted (SIGINT)", 130)
    finally:
        discard_lost_outputs()  # or the interpreter fails to flush them, and exits with 120
    return 0


def complaint(error: BaseException) -> str:
    """An error as it is told to people: with its remedy, where it has one apart."""
    if isinstance(error, Interrupted) and not error.trained:
        return f"interrupted ({error}) before the first step; the same command starts again"
    if isinstance(error, Interrupted):
        safe = (
            "kept so far is in out/replay"
            if error.only_kept
            else "trained so far is in a checkpoint"
        )
        return f"interrupted ({error}); every step {safe}, and the same command resumes"
    return f"{error}. {error.remedy}" if isinstance(error, RunFailed) else str(error)


def _complain(text: str, code: int) -> int:
    with suppress(OSError):  # nobody reads it any more; the exit code tells
        print(f"error: {text}", file=sys.stderr, flush=True)
    return code
