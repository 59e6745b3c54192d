"""`python -m cluster.replay out=DIR step=N [key=value ...]`: repeat a step of a run.

as it was    Repeat the step, and those between it and the checkpoint before it, in one process,
             on the groups that the run kept (keep=N). The result is bit-equal, or the first
             tensor that differs is named. Equal bits need the same machine, the same number of
             threads, and a learner of one worker; with several, norms must agree to 1%.
what if      loss=ppo lr=1e-5 ...: repeat the step from the same weights with other settings, and
             compare its metrics with the run's.
blame=20     List the prompts, responses and tokens with the largest shares of the step's
             gradient, and their places on the page of cluster.report.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cluster.base.outcomes import RunFailed
from cluster.command import run_and_report
from cluster.config.arguments import HELP, Arguments, HelpAsked, built
from cluster.config.early_checks import check_early, check_run
from cluster.config.files import by_name
from cluster.config.on_policy import RolloutConfig
from cluster.config.recipes import CONFIGS
from distill.chat.token_text import decode
from distill.errors import ConfigError, NonFiniteError
from distill.types import TokenArray

if TYPE_CHECKING:
    from cluster.inspect.replayed import GradientShare

_USAGE = f"""{__doc__}
  out=DIR      the run's directory
  step=N       the step to repeat
  blame=N      number of prompts, responses and tokens to list; default: 0
  others       settings of the run's recipe (python -m cluster.train recipe=NAME --help) in
               objective., learner., sft. and teachers., and teacher.model
"""
# Settings, or their sections, that a step with kept groups depends on.
_OF_STEP = ("objective.", "learner.", "sft.", "teachers.", "teacher.model.")
# Metrics that are measured, not computed, and so differ between machines.
_MEASURED = ("time/", "push/", "tokens_per_s", "train/tflops_per_s", "rollout/ahead_share")
# For a run whose learner had several workers: maximum relative gap of a tensor's norm, and the
# minimum denominator of a gap, as a share of the norm of all tensors.
_ALLOWED, _LEAST = 0.01, 1e-3
# Maximum number of characters of a printed text.
_SHOWN = 60


def replay(arguments: list[str], console: Console) -> None:
    """Replay the step, and print the result.

    Raises:
        ConfigError: the step, or a step between, was not kept; or a setting is invalid.
        RunFailed: the replayed step differs from the original.
    """
    if HELP in arguments:
        raise HelpAsked(_USAGE)
    out, given = Arguments.of(arguments).take("out")
    number, given = given.take("step")
    blamed, given = given.take("blame")
    if out is None or number is None:
        raise ConfigError(
            "give out=DIR (a run's directory) and step=N", field="out" if out is None else "step"
        )
    step, blame = _whole("step", number, 1), _whole("blame", blamed or "0", 0)
    check_run("out", out)
    what_if = _config(out, given.given) if given.given else None
    check_early(what_if or _config(out, {}))
    StepReplay(Path(out), step, console).run(what_if, blame)


def _whole(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name}={text} must be a whole number, {least} or more")
    return int(text)


def _config(out: str, changes: Mapping[str, Any]) -> RolloutConfig:
    """Settings of the run with changes. Raises ConfigError if a change does not affect steps."""
    recipe, given = Arguments.of([f"config={out}"]).take("recipe")
    kind = CONFIGS.get(recipe or "")
    if kind is None or not issubclass(kind, RolloutConfig):
        raise ConfigError(
            f"out={out} holds a run of recipe={recipe}; only runs of opd and rl can be replayed"
        )
    changed = by_name(kind, changes)
    config = built(kind, given.settings(kind) | {"out": out} | changed)
    for path in changed:
        if not f"{path}.".startswith(_OF_STEP):
            raise ConfigError(
                f"{path} does not affect a replayed step, whose groups are already sampled; "
                f"settings that can differ: {', '.join(_OF_STEP)}",
                field=path,
            )
    return config


def _agreement(step: int, tensors: int, workers: int, differing: int, largest: float) -> str:
    if not differing:
        return f"step {step} is bit-equal: gradient and weights of {tensors} tensors"
    return (
        f"step {step} agrees to {largest:.1e} of a tensor's norm, in gradient and weights of "
        f"{tensors} tensors ({_ALLOWED:g} is allowed: the run's learner had {workers} workers, "
        "which add in another order; with one worker it would be bit-equal)"
    )


class StepReplay:
    """Replay of one step of a run."""

    def __init__(self, out: Path, step: int, console: Console) -> None:
        from cluster.config.rollout_checks import check_rollout
        from cluster.run_files.run_directory import RunDirectory
        from cluster.store.replay_log import KeptSteps

        self._step, self._console = step, console
        self.config = _config(str(out), {})
        if self.config.only_keeps:
            raise ConfigError(
                f"out={out} holds groups without training steps (rollout_only=True); train on them "
                f"with train_from={out}"
            )
        if self.config.teacher_heads:
            raise ConfigError(
                f"out={out} was trained with its teacher's hidden states (teacher.head=), which "
                "are not kept, so its steps cannot be replayed. Steps of runs with "
                "estimator=top_k, or with the whole teacher in the learner (no teacher.head=), "
                "can be replayed",
                field="teacher.head",
            )
        self._directory = RunDirectory(self.config)
        self._kept = KeptSteps(out)
        self._start = self._kept.start_of(step)
        self._inputs = check_rollout(self.config)

    def run(self, what_if: RolloutConfig | None, blame: int) -> None:
        at = self._start.step if self._start else 0
        self._print_line(
            f"from {self._start.path if self._start else 'the first weights'} (step {at})"
        )
        with tempfile.TemporaryDirectory() as scratch:
            loop = self.loop(self.config, self._start, scratch)
            for between in range(at + 1, self._step):
                loop.step()
                self._compare(between, loop)
            before = loop.save() if what_if is not None or blame else None
            try:
                metrics = loop.step()
            except NonFiniteError as error:
                metrics = None
                as_it_was = ", as it was" if self._kept.outcome(self._step) is None else ""
                self._print_line(f"step {self._step} is not finite{as_it_was}: {error}")
            else:
                self._compare(self._step, loop, final=True)
            if what_if is not None and before is not None:
                self._what_if(what_if, before, scratch, metrics or {})
            if blame and before is not None:
                self._print_attribution(self.loop(self.config, before, scratch), blame)

    def loop(self, config: RolloutConfig, start: Any, scratch: str) -> Any:
        """Build the learner's loop on the kept groups, with pushes that do nothing."""
        from cluster.hosts.learner_actor import PolicyTraining
        from cluster.run_files.run_directory import RunDirectory
        from cluster.store.replay_log import KeptGroupSource
        from distill.models.loading import resolve_device
        from distill.settings import changed

        device = resolve_device(config.cluster.device)
        config = changed(config, device=device, out=scratch, keep="none", trace_step=None)
        learner_config = config.policy_learner(start, self._inputs.stops)
        return PolicyTraining(
            config=config,
            learner_config=learner_config,
            inputs=self._inputs,
            source=KeptGroupSource(
                self._kept, range((start.step if start else 0) + 1, self._step + 1)
            ),
            directory=RunDirectory(config),
            resume_from=start,
        ).loop()

    def _compare(self, step: int, loop: Any, *, final: bool = False) -> None:
        """Raise RunFailed if gradient or weights after `step` differ from those of the run."""
        was = self._kept.outcome(step)
        if was is None:
            if final:
                self._print_line(
                    f"step {step} did not complete in the run, but completes in the replay"
                )
            return
        workers = was["workers"]
        largest = differing = 0.0
        here = loop.learner.fingerprints()
        for what in ("gradient", "weights"):
            least = _LEAST * math.hypot(*(norm for _, norm in was[what].values()))
            for name, (bits, norm) in was[what].items():
                now_bits, now = here[what].get(name, (None, math.nan))
                if now_bits == bits:
                    continue
                gap, differing = abs(now - norm) / max(norm, least), differing + 1
                if workers == loop.learner.workers or not gap <= _ALLOWED:
                    raise RunFailed(
                        f"step {step} differs from the run: the first tensor that differs is the "
                        f"{what} of {name}, of norm {now!r} here and {norm!r} in the run (a gap "
                        f"of {abs(now - norm):.2g})"
                    )
                largest = max(largest, gap)
        if final:
            self._print_line(
                _agreement(step, len(was["weights"]), workers, int(differing), largest)
            )

    def _what_if(
        self, config: RolloutConfig, before: Any, scratch: str, metrics: Mapping[str, float]
    ) -> None:
        from cluster.inspect.replayed import with_lr

        changed = with_lr(before, self.config.learner.lr, config.learner.lr)
        other = self.loop(config, changed, scratch).step()
        table = Table(title=f"step {self._step}, in the run and with the changed settings")
        for header in ("metric", "as it was", "what if"):
            table.add_column(header, justify="left" if header == "metric" else "right")
        for name in dict.fromkeys([*metrics, *other]):
            if not name.startswith(_MEASURED) and metrics.get(name) != other.get(name):
                values = (metrics.get(name), other.get(name))
                table.add_row(name, *("-" if each is None else f"{each:.6g}" for each in values))
        self._console.print(table)
        self._print_line("equal metrics are left out")

    def _print_attribution(self, loop: Any, number: int) -> None:
        from cluster.inspect.replayed import attribute_gradient

        found = attribute_gradient(loop, self._kept.groups(self._step), self._text, number)
        for title, rows in found.items():
            table = Table(title=f"{title}: share of the gradient")
            for header in ("share", "where", "text"):
                table.add_column(header, justify="right" if header == "share" else "left")
            for row in rows:
                table.add_row(f"{row.share:+.1%}", row.where, row.text)
            self._console.print(table)
        self._print_links([row for rows in found.values() for row in rows])

    def _print_links(self, rows: Sequence[GradientShare]) -> None:
        """Print links to these places on cluster.report's page, if the run kept their groups."""
        from cluster.store.kept_groups import KeptGroups

        kept = KeptGroups(self._directory.groups).places
        shown = {group_id for step, group_id in kept if step == self._step}
        links = [f"  #{row.link(self._step)}  {row.where}" for row in rows if row.group in shown]
        if not links:
            self._print_line(
                "cluster.report shows none of these groups: the run did not keep them for it "
                "(keep=all keeps all groups)"
            )
            return
        page = self._directory.path / "report.html"
        self._print_line(
            f"python -m cluster.report out={self._directory.path} groups={len(kept)} writes "
            f"{page}, which has them at"
        )
        for link in links:
            self._print_line(link)

    def _text(self, tokens_T: TokenArray) -> str:
        text = decode(self._inputs.tokenizer, tokens_T)
        return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")

    def _print_line(self, text: str) -> None:
        self._console.print(text, highlight=False)


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return run_and_report(lambda console: replay(arguments, console))


if __name__ == "__main__":
    sys.exit(main())
