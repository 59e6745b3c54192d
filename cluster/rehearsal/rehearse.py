"""`dry_run=rehearse`: a small version of the run, with the user's code and data.

    twins      random models of the same families and vocabularies (distill/models/twins.py)
    run        handshake, steps, pushes, evaluations, checkpoints; one actor of each kind is killed
    resume     the run continues from its checkpoint to its end
    checks     out/final loads, and the audit proves exactly once; predictions for the full size

Everything is written to OUT-rehearsal, which the next rehearsal replaces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import cluster.run
from cluster.base.outcomes import Interrupted, RunFailed
from cluster.config.on_policy import RolloutConfig
from cluster.config.rollout_checks import RolloutInputs
from cluster.config.teachers import teacher_setting
from cluster.handles.node import starts_here
from cluster.inspect.audit import audit
from cluster.placement.checked import checked
from cluster.placement.local_head import local_head
from cluster.placement.roles import (
    EVALUATOR,
    LEARNER,
    POLICY,
    QUEUE,
    REFERENCE,
    REWARD,
    ROLLOUT,
    cpus_here,
    served_teachers,
)
from cluster.recipes.context import Observer
from cluster.rehearsal.external_server import check_server
from cluster.rehearsal.full_size import full_size
from cluster.rehearsal.small import SmallRun, small_run
from cluster.rehearsal.strikes import Strikes
from cluster.run_files.out_directory import claimed_directory
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.driver import Signals
from cluster.store.kept_groups import KeptGroups
from distill.errors import IsothermError
from distill.models.loading import load_causal_lm
from distill.settings import changed

# Deadline of all deaths and recoveries: the servers of a few models take a minute each to start.
_DEADLINE_S = 900.0
_REPORT = "rehearsal.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalCheck:
    """Result of one check of the rehearsal."""

    what: str
    works: bool
    detail: str
    seconds: float | None = None


def rehearse(config: RolloutConfig, console: Console, observer: Observer | None = None) -> None:
    """Rehearse the run; print a table of the checks, and predictions for the full size.

    Raises:
        ConfigError, CheckpointError, DataError: the checks of the run failed; nothing was started.
        RunFailed: a check failed.
    """
    began = time.monotonic()
    print_line = partial(console.print, highlight=False)
    config, inputs = checked(config, print_line)
    out = Path(config.out)
    with claimed_directory(
        out.with_name(f"{out.name}-rehearsal"), "rehearsal", print_line
    ) as place:
        small = small_run(config, place)
        outer = (observer or Observer()).signals
        rehearsal = _Rehearsal(config, small, inputs, place, console, outer)
        with local_head(cpus_here(small.config)) if starts_here() else nullcontext():
            rehearsal.run()
        rehearsal.report(time.monotonic() - began)


class _Rehearsal:
    def __init__(
        self,
        config: RolloutConfig,
        small: SmallRun,
        inputs: RolloutInputs,
        place: Path,
        console: Console,
        outer: Signals,
    ) -> None:
        self._outer = outer
        self._config, self._small, self._inputs = config, small, inputs
        self._place, self._console = place, console
        self._outcomes: list[RehearsalCheck] = []
        self._directory = RunDirectory(small.config)

    def run(self) -> None:
        """Run all checks; stop if a check fails on which the others depend."""
        self._print(f"rehearsal in {self._place}, with random twins; the run itself is not started")
        for name, twin in self._small.twins.items():
            note = " (replaces an external model)" if name in self._small.stand_ins else ""
            self._record(f"twin of {name}", True, f"{twin.description}{note}")
        self._check_external_teachers()
        before = len(self._outcomes)
        with self._recording_errors("the run, with deaths"):
            strikes = self._run_with_deaths()
            for who, seconds in strikes.recoveries.items():
                outcome = "recovered" if seconds is not None else "did not recover"
                self._record(f"death: {who}", seconds is not None, outcome, seconds)
            self._record_measurements()
            with self._recording_errors("resume and finish"):
                self._resume()
        if all(each.works for each in self._outcomes[before:]):
            self._check_results()

    def _check_external_teachers(self) -> None:
        """Send one canary to each external teacher, which a twin replaces in the run."""
        objective = self._config.objective
        headed = [teacher_setting(name) for name in self._config.teacher_heads]
        for name, url in self._small.stand_ins.items():
            began = time.monotonic()
            works, description = check_server(
                url,
                self._config.sampling.temperature,
                given=objective.asked_of_policy,
                top_k=objective.asked_of_teacher,
                states=name in headed,
            )
            self._record(f"{name}, external", works, description, time.monotonic() - began)

    def _run_with_deaths(self) -> Strikes:
        """Run until one actor of each kind has died and recovered."""
        began, signals = time.monotonic(), Signals()
        strikes = Strikes(
            self._kinds(), self._directory.path / "events.jsonl", signals, _DEADLINE_S
        )

        def line(metrics: Any) -> None:
            self._outer.check()
            strikes.line(metrics)

        try:
            observer = Observer(line=line, signals=signals)
            cluster.run.run(self._small.config, self._console, observer)
        except Interrupted:
            if not strikes.ended:
                raise
        steps = self._directory.read_steps()
        self._record(
            "steps", len(steps) >= 3, f"{len(steps)} steps, a checkpoint after each",
            time.monotonic() - began,
        )  # fmt: skip
        return strikes

    def _kinds(self) -> list[str]:
        """Kinds of actors to kill. The learner is last: its death rewinds to a checkpoint."""
        config = self._small.config
        kinds = [ROLLOUT, POLICY, *served_teachers(config).values()]
        kinds += [REFERENCE] if config.model.reference is not None else []
        kinds += [REWARD] if config.reward_model is not None else []
        kinds += [EVALUATOR] if len(self._inputs.held_out) else []
        return [*kinds, QUEUE, LEARNER]

    def _record_measurements(self) -> None:
        """Record results from the steps' metrics and the handshake."""
        calibration = json.loads((self._directory.path / "calibration.json").read_text())
        agreed = [each for each in calibration["comparisons"] if not each["must_differ"]]
        gap = max(float(each["max_gap"]) for each in agreed)
        text = f"all parties agree to {gap:.1e} nats at T={self._config.sampling.temperature:g}"
        self._record("handshake", calibration["agrees"], text)
        steps = self._directory.read_steps()
        last = steps[-1]
        text = f"{last['push/bytes'] / 1e6:.1f} MB in {last['push/seconds']:.2f} s"
        if (proven := last.get("push/proven")) is not None:
            text += f", {proven:.0%} of the parameters verified by checksum"
        handed = [step for step in steps if "push/teacher_seconds" in step]
        if handed:
            text += f"; the moving teacher in {handed[-1]['push/teacher_seconds']:.2f} s, "
            text += f"{len(handed)} times in {len(steps)} steps"
        self._record("push", True, text)
        rewards = [step["reward/mean"] for step in steps if "reward/mean" in step]
        if self._inputs.judged and rewards:  # without rewards, the teacher sampled everything
            spread = f"{min(rewards):.3g} to {max(rewards):.3g} (of random models)"
            self._record("rewards", True, f"mean per step {spread}")

    def _resume(self) -> None:
        began, done = time.monotonic(), len(self._directory.read_steps())
        config = changed(self._small.config, steps=done + 1)
        cluster.run.run(config, self._console)
        self._record("resume", True, f"from step {done} to the end", time.monotonic() - began)

    def _check_results(self) -> None:
        """Check the evaluations, the exported model and the ledger."""
        summary = self._directory.read_summary()
        evaluated = [name for name in summary if name.startswith("eval ")]
        if len(self._inputs.held_out):
            self._record("evaluation", bool(evaluated), ", ".join(evaluated) or "none")
        final = self._directory.final
        model = load_causal_lm(str(final), dtype=torch.float32, device="cpu")
        self._record("final", True, f"{final.name}/ loads as {type(model).__name__}")
        found = audit(self._directory.ledger)
        text = f"{found.trained} groups in {found.steps} steps, each trained once"
        self._record("audit", not found.problems, "; ".join(found.problems[:2]) or text)

    @contextmanager
    def _recording_errors(self, what: str) -> Iterator[None]:
        """Record an error in the block as a failed check; the rehearsal continues."""
        try:
            yield
        except (RunFailed, IsothermError) as error:
            self._record(what, False, f"{type(error).__name__}: {error}")

    def _record(self, what: str, works: bool, detail: str, seconds: float | None = None) -> None:
        self._outcomes.append(
            RehearsalCheck(what=what, works=works, detail=detail, seconds=seconds)
        )

    def report(self, seconds: float) -> None:
        """Print the results, and write rehearsal.json.

        Raises:
            RunFailed: a check failed.
        """
        table = Table(title="rehearsal")
        for header in ("", "what", "how", "s"):
            table.add_column(header, justify="right" if header == "s" else "left")
        for each in self._outcomes:
            mark = Text("works", "green") if each.works else Text("FAILS", "bold red")
            took = "" if each.seconds is None else f"{each.seconds:.1f}"
            table.add_row(mark, each.what, each.detail, took)
        self._console.print(table)
        full = full_size(self._config, self._inputs, self._first_observations())
        self._print("at full size:")
        for line in full.lines:
            self._print(f"  {line}".replace("\n", "\n  "))
        for warning in full.warnings:
            mark = Text("  WOULD BREAK", "bold red")
            self._console.print(mark, warning, highlight=False)
        if self._small.left_out:
            self._print(f"not rehearsed: {', '.join(self._small.left_out)}")
        failed = [each.what for each in self._outcomes if not each.works]
        report = {
            "status": "failed" if failed else "works",
            "seconds": seconds,
            "outcomes": [asdict(each) for each in self._outcomes],
            "full_size": {"lines": full.lines, "warnings": full.warnings},
            "not_rehearsed": list(self._small.left_out),
        }
        (self._place / _REPORT).write_text(json.dumps(report, indent=1) + "\n")
        self._print(f"took {seconds:.0f} s; all results are in {self._place}")
        if failed:
            raise RunFailed(f"the rehearsal failed: {', '.join(failed)}; see {self._place}")

    def _first_observations(self) -> list[int]:
        return [
            member.segments[0].first_action
            for kept in KeptGroups(self._directory.groups)
            for member in kept.group.trajectories_G
        ]

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False)
