"""Records of a run that has begun: files, console output and notifications."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from rich.console import Console

from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.console import lost_output
from cluster.findings.finding import Finding
from cluster.findings.watch import Watch
from cluster.queue.scoring import read_scoring
from cluster.run_files.best_checkpoint import BestCheckpoint
from cluster.run_files.certificate import certificate
from cluster.run_files.notify import Notifier
from cluster.run_files.run_directory import RunDirectory
from cluster.run_files.trackers import Trackers
from cluster.run_files.tracking import Progression
from cluster.runtime.driver import Signals
from distill.errors import CheckpointError
from distill.types import Tokenizer
from learner.checkpoint import Checkpoint

# Number of kinds of failures in the console's last lines.
_KINDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Callbacks into the code that started a run, in the same process.

    Attributes:
        line: receives every line of metrics.jsonl, once it is on disk.
        signals: signals of the run; setting one ends the run as the signal does.
    """

    line: Callable[[Mapping[str, float]], None] = lambda _metrics: None
    signals: Signals = field(default_factory=Signals)


@dataclass(kw_only=True)
class RunContext:
    """A run that has begun: its directory, records, summary and signals."""

    config: CommonConfig
    tokenizer: Tokenizer
    directory: RunDirectory
    resume_from: Checkpoint | None
    console: Console
    observer: Observer
    progress: Progression
    trackers: Trackers
    notifier: Notifier
    best: BestCheckpoint
    summary: dict[str, Any] = field(default_factory=dict)
    run_started: bool = False
    last_step: int = 0
    output_lost: bool = False
    watch: Watch | None = None

    @property
    def signals(self) -> Signals:
        return self.observer.signals

    @property
    def first_step(self) -> int:
        return self.resume_from.step if self.resume_from else 0

    def start_detectors(self, config: RolloutConfig) -> None:
        """Let the detectors of findings see every later step."""
        reported = {event["name"] for event in self.directory.read_events("finding")}
        self.watch = Watch(config, self.directory.groups, self.directory.read_steps(), reported)

    def trained(self, metrics: Mapping[str, float]) -> None:
        """A step is trained: report what detectors find in its metrics."""
        if self.watch is None:
            return
        for finding in self.watch.observe(metrics):
            self.found(finding)
        fields = {"tokens_per_s": metrics["tokens_per_s"]}
        if "staleness/mean" in metrics:  # groups that the teacher samples have no staleness
            fields["staleness"] = metrics["staleness/mean"]
        self.directory.append_event("step", step=int(metrics["step"]), **fields)

    def record(self, metrics: Mapping[str, float]) -> None:
        """Record an optimizer step's metrics: on disk first, then for observers and trackers."""
        self.run_started, self.last_step = True, int(metrics["step"])
        self.directory.append_metrics(metrics)
        self.best.observe(metrics)
        self.observer.line(metrics)
        self.progress.step(metrics)
        self.note_lost_output()
        self.trackers.log(metrics)

    def note_lost_output(self) -> None:
        """Record once in events.jsonl that the console's output is no longer read."""
        if not self.output_lost and (why := lost_output(self.console)):
            self.output_lost = True
            self.directory.append_event("output_lost", why=why)

    def record_evaluation(self, metrics: Mapping[str, float], step: int) -> None:
        """Record an evaluation outside of a step, of the weights after `step`, on its own line."""
        line = {"step": step, **metrics}
        self.directory.append_metrics(line)
        self.best.observe(line)
        self.observer.line(line)
        self.trackers.log(line)

    def recalls(self, kind: str, when: str, step: int) -> bool:
        """Restore an evaluation outside of a step from an earlier attempt's line, if it has one.

        Args:
            kind: `eval` or `validation`.
        """
        own, others = f"time/{kind}", ("time/step", "eval/teacher")
        for line in reversed(self.directory.read_metrics()):
            if line["step"] == step and own in line and not any(n.startswith(others) for n in line):
                self.summary[f"{kind} {when}"] = {n: v for n, v in line.items() if n != "step"}
                return True
        return False

    def record_late(self, metrics: Mapping[str, float], step: int) -> None:
        """Record an evaluation that ended after later steps had changed the weights."""
        self.record_evaluation(metrics, step)
        if self.best.due:
            self.best.drop()
            self.progress.note(
                f"step {step} is the best evaluation so far but is not kept: its checkpoint "
                "could not be written"
            )

    def found(self, finding: Finding) -> None:
        """Report a finding on the console, in events.jsonl and through notify=."""
        self.progress.note(finding.describe())
        self.directory.append_event("finding", **finding.to_json())
        self.notifier.send("finding", **(finding.to_json() | {"text": finding.describe()}))

    def saved(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete on disk."""
        self.best.saved({checkpoint.step})
        self.trackers.show_rollouts(self.tokenizer)

    def unsaved(self, error: CheckpointError, *, will_retry: bool) -> None:
        """Report a checkpoint that could not be written."""
        self.best.unsaved()
        self.progress.note(f"WARNING: {error}" + (". It is tried again" if will_retry else ""))
        self.directory.append_event("unsaved", why=str(error))

    def rewound(self, step: int) -> None:
        """The learner went back to its newest checkpoint, of `step`."""
        self.best.saved({each.step for each in self.directory.store.complete()})
        self.best.unsaved()
        self.trackers.skip_kept()
        if self.watch is not None:
            self.watch.rewound(step)

    def set_aside(self, kinds: Counter[str]) -> None:
        """Report the groups that failed for good, by kind, in the summary and on the console."""
        if kinds:
            self.summary["set_aside"] = dict(kinds.most_common())
            counts = "; ".join(f"{count} x {kind}" for kind, count in kinds.most_common(_KINDS))
            self.progress.note(f"{kinds.total()} groups failed and were not trained on: {counts}")

    def complete(self, checkpoint: Checkpoint) -> None:
        """Certify the scores, export `final/`, and write a summary with status `finished`."""
        self._certify()
        if self.config.only_keeps:
            self._kept(checkpoint.step)
            return
        self.directory.finish(checkpoint)
        best = self.directory.store.best()
        self._finished(
            "train",
            {
                "steps": checkpoint.step,
                "checkpoint": {"path": str(checkpoint.path), "seal": checkpoint.seal},
                "final": str(self.directory.final),
                **({} if best is None else {"best": asdict(best)}),
            },
        )
        self.console.print(
            f"finished {checkpoint.step} steps; the model is in {self.directory.final}"
        )
        if best is not None:
            path = self.directory.store.root / f"step-{best.step:06d}" / "model"
            self.console.print(f"best: step {best.step}, {best.metric} {best.value:.4g}, in {path}")

    def _certify(self) -> None:
        """Write certificate.json, and print its verdict, if models have scored the run's groups."""
        config = self.config
        if not isinstance(config, RolloutConfig) or config.train_from is not None:
            return
        if (found := certificate(config, read_scoring(self.directory.ledger))) is None:
            return
        self.directory.write_json("certificate.json", found)
        self.summary["certificate"] = found["verdict"]
        self.progress.note(f"certificate: {found['verdict']}")

    def _kept(self, steps: int) -> None:
        """Write a summary with status `finished` for a run that only kept groups."""
        self._finished("rollout", {"steps": steps, "kept": str(self.directory.groups)})
        self.console.print(
            f"kept the groups of {steps} steps in {self.directory.groups}; train on them with "
            f"train_from={self.directory.path}"
        )

    def _finished(self, whose: str, made: Mapping[str, Any]) -> None:
        steps = self.directory.read_steps()
        seconds = [step["time/step"] for step in steps]
        tokens = sum(step[f"{whose}/tokens"] for step in steps)
        pace = {
            f"{whose}_tokens": int(tokens),
            "tokens_per_s": tokens / sum(seconds),
            "time/step": fmean(seconds),
        }
        self.summary = {"status": "finished"} | self.summary | dict(made) | pace
        self.directory.write_json("summary.json", self.summary)
