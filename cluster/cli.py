"""The `isotherm` console script: `isotherm train|evaluate|forecast|doctor|audit|report ...`."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from difflib import get_close_matches

# Modules are imported when their command is called: imports are most of a command's start-up time.
_COMMANDS = {
    "train": ("cluster.train", "run a recipe: recipe=opd, rl, sft, dpo, reward_model, ..."),
    "evaluate": ("cluster.evaluate", "a checkpoint at your serving decoder"),
    "audit": ("cluster.audit", "was each prompt group of a run trained exactly once?"),
    "report": (
        "cluster.inspect.report.command",
        "a run's curves, events and rollouts, token by token, on one HTML page",
    ),
    "replay": ("cluster.replay", "a step of a run, done again; what if; who is to blame"),
    "rollouts_to_sft": ("cluster.rollouts_to_sft", "a run's best rollouts as data for recipe=sft"),
    "sample_to_sft": (
        "cluster.sample_to_sft",
        "responses of a stronger or hinted model, or of an endpoint, as data for recipe=sft",
    ),
    "forecast": (
        "cluster.inspect.forecast.command",
        "will it work? what a pair of models says on some prompts predicts it",
    ),
    "doctor": ("cluster.inspect.doctor", "does this machine have what a run needs?"),
    "calibrate": ("cluster.calibrate", "prove that student, teacher and learner score alike at T"),
    "demo": ("cluster.demo", "the main job on tiny models that it trains itself"),
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
        print(f"error: {sys.argv[1]!r} is no command{_meant(sys.argv[1])}", file=sys.stderr)
        return 2
    module, _ = _COMMANDS[sys.argv[1]]
    return importlib.import_module(module).main(sys.argv[2:])


def _meant(word: str) -> str:
    """Remedy for a word that is not a command; empty if no command is similar."""
    from cluster.train import RECIPES

    if word in RECIPES or word.startswith("recipe="):
        return f"; write isotherm train recipe={word.removeprefix('recipe=')}"
    near = get_close_matches(word, _COMMANDS, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


if __name__ == "__main__":
    sys.exit(main())
