"""`python -m cluster.train recipe=NAME [key=value ...]`: checks, runs, sets the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from cluster.command import exit_code, parse
from cluster.config.arguments import HELP, key_values
from cluster.config.common import CommonConfig
from cluster.config.on_policy import OpdConfig, RlConfig
from cluster.config.presets import (
    OpdCondensedConfig,
    OpdToolsConfig,
    RlToolsConfig,
    SelfplayConfig,
)
from cluster.config.supervised import DpoConfig, SftConfig
from distill.errors import ConfigError
from distill.lookup import known_names


@dataclass(frozen=True, slots=True)
class _Recipe:
    config: type[CommonConfig]
    run: Callable[[Any, Console], None]
    line: str


def _run_on_policy(config: Any, console: Console) -> None:
    from cluster.recipes.on_policy import run_on_policy  # Ray and torch: not for --help

    run_on_policy(config, console)


def _run_sft(config: Any, console: Console) -> None:
    from cluster.recipes.supervised import run_sft

    run_sft(config, console)


def _run_dpo(config: Any, console: Console) -> None:
    from cluster.recipes.supervised import run_dpo

    run_dpo(config, console)


RECIPES = {
    "opd": _Recipe(
        OpdConfig, _run_on_policy, "on-policy distillation: student samples, teacher scores"
    ),
    "rl": _Recipe(
        RlConfig, _run_on_policy, "reinforcement learning (GRPO): student samples, a reward judges"
    ),
    "opd_tools": _Recipe(OpdToolsConfig, _run_on_policy, "opd on questions answered with tools"),
    "rl_tools": _Recipe(RlToolsConfig, _run_on_policy, "rl on questions answered with tools"),
    "selfplay": _Recipe(SelfplayConfig, _run_on_policy, "rl on games of two, both seats trained"),
    "opd_condensed": _Recipe(
        OpdCondensedConfig, _run_on_policy, "opd on documents longer than the context"
    ),
    "sft": _Recipe(SftConfig, _run_sft, "supervised fine-tuning on completions or assistant turns"),
    "dpo": _Recipe(DpoConfig, _run_dpo, "direct preference optimisation on chosen and rejected"),
}

_USAGE = """\
usage: python -m cluster.train recipe=NAME key=value ...       (or: isotherm train ...)

recipes:
{recipes}

A recipe's settings:  python -m cluster.train recipe=opd --help
A first run:          python -m cluster.train recipe=opd student=DIR teacher=DIR \\
                          prompts=FILE.jsonl out=runs/first temperature=0.7
Checked, not started: add dry_run=True
"""


def main(argv: list[str] | None = None) -> int:
    """Runs a recipe; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv

    return exit_code(lambda console: run_recipe(arguments, console))


def run_recipe(arguments: list[str], console: Console) -> None:
    """Runs what the arguments ask for: a recipe, or the usage.

    Raises:
        HelpAsked, IsothermError, RunFailed, Interrupted, EngineError, NonFiniteError: see
            `cluster.command`, which turns them to exit codes.
    """
    recipe, rest = _recipe_of(arguments)
    if recipe is None:
        console.print(_usage(), markup=False, highlight=False)
    else:
        _refuse_truncation(rest)
        recipe.run(parse(recipe.config, rest), console)


def _recipe_of(argv: list[str]) -> tuple[_Recipe | None, list[str]]:
    """The recipe named on the command line and the other arguments; None asks for the usage."""
    key_values(argv)  # before `recipe opd` counts as no recipe
    names = [
        argument.removeprefix("recipe=") for argument in argv if argument.startswith("recipe=")
    ]
    rest = [argument for argument in argv if not argument.startswith("recipe=")]
    if not names:
        if not rest or rest == [HELP]:
            return None, rest
        raise ConfigError(f"no recipe given; add recipe=NAME, one of {', '.join(RECIPES)}")
    if names[-1] not in RECIPES:
        raise ConfigError(f"recipe={names[-1]} is unknown; {known_names(names[-1], RECIPES)}")
    return RECIPES[names[-1]], rest


def _refuse_truncation(argv: list[str]) -> None:
    for argument in argv:
        name = argument.partition("=")[0]
        if name in ("top_p", "top_k", "min_p"):
            raise ConfigError(
                f"{argument}: training does not truncate. Rollouts must be samples of softmax(z/T) "
                f"over the whole vocabulary, or the reverse KL is another one; leave {name} out "
                "(the serving decoder of evaluation has eval_top_p and eval_top_k)"
            )


def _usage() -> str:
    recipes = "\n".join(f"  {name:15}{recipe.line}" for name, recipe in RECIPES.items())
    return _USAGE.format(recipes=recipes)


if __name__ == "__main__":
    sys.exit(main())
