"""`python -m cluster.train recipe=NAME [key=value ...]`: checks and runs a recipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cluster.command import run_and_report
from cluster.config.arguments import HELP, Arguments, HelpAsked, built, help_asked
from cluster.config.common import CommonConfig
from cluster.config.early_checks import check_early
from cluster.config.files import at_path, text_of
from cluster.config.help import help_text
from cluster.config.job_upload import missing_from_upload
from cluster.config.learning_rate import with_suggested_lr
from cluster.config.on_policy import RolloutConfig
from cluster.config.recipes import CONFIGS, config_of
from cluster.config.run_record import RunRecord
from cluster.handles.node import starts_here
from cluster.placement.device_choice import check_cluster, gpus_elsewhere
from cluster.placement.local_head import local_head
from cluster.placement.roles import cpus_here
from cluster.process_memory import long_lived
from cluster.run_files.out_directory import check_out, wait_for_other_job
from distill.errors import ConfigError, DataError
from distill.libraries import require_library
from distill.settings import changed, meant_by

if TYPE_CHECKING:
    from cluster.recipes.context import Observer  # imports torch


_USAGE = """\
usage: python -m cluster.train recipe=NAME key=value ...       (or: isotherm train ...)

recipes:
{recipes}

A recipe's settings:  python -m cluster.train recipe=opd --help
A first run:          python -m cluster.train recipe=opd student=DIR teacher=DIR \\
                          prompts=FILE.jsonl out=runs/first temperature=0.7
Check only:           add dry_run=True
From a file:          config=run.yaml, .toml or .json, or another run's directory; the command line
                      has precedence: config=runs/first out=runs/second lr=1e-5
"""


def main(argv: list[str] | None = None) -> int:
    """Run a recipe, and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv

    def run(console: Console) -> None:
        if arguments and arguments[0] in CONFIGS:
            name = arguments[0]
            raise ConfigError(f"{name!r} is not key=value; write recipe={name}", field="recipe")
        given = Arguments.of(arguments)
        if not arguments or arguments == [HELP]:
            console.print(_usage(), highlight=False)
        else:
            run_recipe(given, console, explain=help_asked(arguments))

    return run_and_report(run)


def run_recipe(
    arguments: Arguments,
    console: Console,
    observer: Observer | None = None,
    *,
    explain: str | None = None,
) -> None:
    """Run the recipe that the arguments name.

    Args:
        observer: gets the run's metrics, and may end it.
        explain: only print the recipe's settings that match this word (`help_text`).

    Raises:
        HelpAsked, IsothermError, RunFailed, Interrupted, EngineError, NonFiniteError: see
            `cluster.command`, which maps them to exit codes.
    """
    name, given = arguments.take("recipe")
    if name is None:
        raise ConfigError(
            f"no recipe given; add recipe=NAME, one of {', '.join(CONFIGS)}", field="recipe"
        )
    kind = config_of(name)
    _refuse_truncation(given.given)
    _refuse_others_settings(name, given.given)
    settings = given.settings(kind)
    if explain is not None:
        raise HelpAsked(help_text(kind, settings, explain))
    settings, notice = with_suggested_lr(settings, kind.stage)
    config = with_chat_date(built(kind, settings))
    missing = missing_from_upload({key: text_of(value) for key, value in settings.items()})
    for note in filter(None, (notice, missing)):
        console.print(note, highlight=False)
    if not (config.cluster.local or config.only_plans):
        require_library("ray", "a run without local=True", "ray[default]", "cluster.local")
    check_early(config, elsewhere=gpus_elsewhere(config))
    check_cluster(config)
    out = Path(config.out).resolve()
    if not (config.only_plans or config.rehearses):  # a rehearsal writes elsewhere
        wait_for_other_job(out, partial(console.print, highlight=False))
    check_out(out)
    with _start_ray_during_imports(config):
        console.print("checking models and data", highlight=False)  # seconds, of imports alone
        _run(config, console, observer)


def with_chat_date(config: CommonConfig) -> CommonConfig:
    """Settings with a `chat_date`: the given one, else that of the run in `out=`, else today."""
    if config.model.chat_date is not None:
        return config
    try:
        record = RunRecord.of_run(Path(config.out))
    except DataError:
        return config  # the check of out= raises the error
    today = date.today().isoformat()
    began = today if record is None else at_path(record.settings, "model.chat_date")
    return changed(config, chat_date=began)


def _run(config: CommonConfig, console: Console, observer: Observer | None) -> None:
    with long_lived():  # while torch is imported
        if isinstance(config, RolloutConfig) and config.rehearses:
            from cluster.rehearsal.rehearse import rehearse

            start = partial(rehearse, config)
        else:
            from cluster.run import run

            start = partial(run, config)
    start(console, observer)


def _start_ray_during_imports(config: CommonConfig) -> AbstractContextManager[object]:
    """Context manager that starts Ray, if the run needs it, concurrently with the imports.

    A rehearsal starts its own Ray, for the actors of its small run.
    """
    if config.cluster.local or config.only_plans or config.rehearses or not starts_here():
        return nullcontext()
    return local_head(cpus_here(config))


def _refuse_truncation(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in ("top_p", "top_k", "min_p"):
            raise ConfigError(
                f"{name}={text_of(value)}: training does not truncate. Rollouts must be samples of "
                f"softmax(z/T) over the whole vocabulary, or the reverse KL changes; leave {name} "
                "out (evaluation has eval.top_p and eval.top_k)"
            )


def _refuse_others_settings(recipe: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of other recipes, such as a teacher for rl."""
    for key, value in given.items():
        if meant_by(CONFIGS[recipe], key):
            continue
        others = [other for other, kind in CONFIGS.items() if meant_by(kind, key)]
        if others:
            have = "has" if len(others) == 1 else "have"
            raise ConfigError(
                f"{key}={text_of(value)}: recipe={recipe} does not have this setting; "
                f"{', '.join(others)} {have} it. recipe={recipe} {HELP} all lists them"
            )


def _usage() -> str:
    recipes = "\n".join(f"  {name:15}{kind.summary}" for name, kind in CONFIGS.items())
    return _USAGE.format(recipes=recipes)


if __name__ == "__main__":
    sys.exit(main())
