"""The `isotherm` console script: `isotherm train|evaluate|forecast|doctor|audit|report ...`."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from difflib import get_close_matches

# Modules are imported when their command is called: imports are most of a command's start-up time.
_COMMANDS = {
    "train": ("cluster.train", "run a recipe: recipe=opd, rl, sft, dpo, reward_model, ..."),
    "evaluate": ("cluster.evaluate", "evaluate a checkpoint with your serving decoder"),
    "audit": ("cluster.audit", "check that each prompt group of a run was trained exactly once"),
    "report": (
        "cluster.inspect.report.command",
        "write a run's curves, events and rollouts, token by token, to one HTML page",
    ),
    "replay": (
        "cluster.replay",
        "repeat a step of a run, also with other settings; rank the causes of its gradient",
    ),
    "rollouts_to_sft": (
        "cluster.rollouts_to_sft",
        "write a run's best rollouts as data for recipe=sft",
    ),
    "sample_to_sft": (
        "cluster.sample_to_sft",
        "sample a stronger or hinted model, or an endpoint, and write data for recipe=sft",
    ),
    "forecast": (
        "cluster.inspect.forecast.command",
        "predict from some responses whether student and teacher are a good pair",
    ),
    "doctor": ("cluster.inspect.doctor", "check that this machine has what a run needs"),
    "calibrate": ("cluster.calibrate", "check that student, teacher and learner score alike at T"),
    "demo": ("cluster.demo", "run on-policy distillation on tiny models that it trains itself"),
}


def main() -> int:
    """Run the command in `sys.argv`, and return the exit code."""
    if sys.argv[1:] == ["--version"]:
        print(f"isotherm {importlib.metadata.version('isotherm')}")
        return 0
    if len(sys.argv) < 2 or sys.argv[1] not in _COMMANDS:
        lines = [f"  {name:17}{text}" for name, (_, text) in _COMMANDS.items()]
        print("usage: isotherm COMMAND key=value ...\n\ncommands:\n" + "\n".join(lines))
        print("\nisotherm COMMAND --help explains its settings")
        if sys.argv[1:] in ([], ["--help"]):
            return 0
        print(f"error: {sys.argv[1]!r} is not a command{_meant(sys.argv[1])}", file=sys.stderr)
        return 2
    module, _ = _COMMANDS[sys.argv[1]]
    return importlib.import_module(module).main(sys.argv[2:])


def _meant(word: str) -> str:
    """Remedy for a word that is not a command; empty if no command is similar."""
    from cluster.config.recipes import CONFIGS

    if word in CONFIGS or word.startswith("recipe="):
        return f"; write isotherm train recipe={word.removeprefix('recipe=')}"
    near = get_close_matches(word, _COMMANDS, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


if __name__ == "__main__":
    sys.exit(main())
