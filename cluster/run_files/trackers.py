"""Trackers of a run's metrics: Weights & Biases, TensorBoard, MLflow, Ray's Prometheus exporter.

Ray's exporter is always used if the run is on Ray. Each tracker uses its library's own writer and
receives the same data: metrics of steps and evaluations with pool sizes and the numbers of restarts
and findings, kept rollouts as text, deaths as alerts, and the run's end. A resumed run continues
the same run of the tracker. Each tracker is created and called in a separate thread, because a
library may wait for its server for minutes. A tracker that fails or is late is reported once and
dropped; `out/` contains all of its data.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from cluster.run_files.background import WorkThread
from cluster.run_files.metric_table import HEADLINES
from cluster.run_files.prometheus import RayExporter
from cluster.run_files.redact import redacted, without_secrets
from cluster.store.kept_groups import KeptGroup, KeptGroups, kept_steps
from distill.chat.token_text import decode
from distill.errors import DataError, first_line
from distill.libraries import require_library
from distill.types import Tokenizer

if TYPE_CHECKING:
    from cluster.config.output import TrackingSettings
    from cluster.run_files.run_directory import RunDirectory

# A tracker is late if this many messages wait for it, or if it takes this many seconds for one
# message, or for all remaining messages at the run's end.
_WAITING, _CALL_S, _END_S = 1000, 300.0, 60.0
_EXPORTER = "prometheus"
# Maximum number of kept rollouts that are shown at a time.
_SHOWN = 64
# Events that are sent as alerts, with the text of the alert.
_ALERTS = {
    "death": "{who} died: {why}",
    "rewind": "the learner continues from step {step}",
    "finding": "{text}: {remedy}",
    "unsaved": "a checkpoint could not be written: {why}",
}


@dataclass(frozen=True, slots=True)
class RolloutText:
    """A kept trajectory as text."""

    step: int
    group: int
    prompt: str
    response: str
    reward: float
    stop_reason: str


class Tracker(Protocol):
    """Protocol of a tracker's writer for one run."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def show(self, rollouts: Sequence[RolloutText], step: int) -> None: ...
    def alert(self, text: str, step: int) -> None: ...
    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None: ...


class Trackers:
    """All trackers of a run; may be empty.

    Args:
        run: directory of a started run, whose config.json exists.
        first_step: number of completed steps.
        print_line: prints a warning when a tracker fails or is late.
        end_s: longest wait for the trackers at the run's end.
        on_ray: True if this process is connected to Ray.
    """

    def __init__(
        self,
        chosen: TrackingSettings,
        run: RunDirectory,
        settings: Mapping[str, Any],
        first_step: int,
        print_line: Callable[[str], None],
        end_s: float = _END_S,
        *,
        on_ray: bool = False,
    ) -> None:
        self._print_line, self._step, self._end_s = print_line, first_step, end_s
        self._counters: dict[str, float] = {"restarts": 0.0, "findings": 0.0}
        self._shown_step = 0
        self._groups = run.groups
        shown = without_secrets(settings)
        started = _Started(run, run.run_id, shown, first_step, chosen.wandb_mode)
        self._shows = bool(chosen.trackers)
        self._trackers = [
            _Threaded(name, partial(KINDS[name], started), print_line)
            for name in [*chosen.trackers, *([_EXPORTER] if on_ray else [])]
        ]
        run.on_event = self.event

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step or of an evaluation; `step` is among them."""
        step = int(metrics["step"])
        late = step < self._step and "eval/version" in metrics  # evaluates an earlier step
        values = {name: value for name, value in metrics.items() if name != "step"}
        if not late:
            self._step = step
            values |= self._counters
        self._each(lambda tracker: tracker.log(values, step))

    def event(self, event: str, given: Mapping[str, Any]) -> None:
        """Process an event of the run, as written to events.jsonl."""
        if event == "size":
            self._counters[f"pool/{given['pool']}"] = float(given["ready"])
        self._counters["restarts"] += event == "restart"
        self._counters["findings"] += event == "finding"
        if event in _ALERTS:
            text, step = redacted(_ALERTS[event].format_map(given)), self._step
            self._each(lambda tracker: tracker.alert(text, step))

    def show_rollouts(self, tokenizer: Tokenizer) -> None:
        """Show the rollouts that were kept since the last call."""
        if not self._shows:
            return
        try:
            kept = KeptGroups(self._groups, after=self._shown_step)
            texts = [text for each in kept for text in _texts(each, tokenizer)][-_SHOWN:]
        except DataError as error:
            self._print_line(f"WARNING: kept rollouts are not sent to trackers: {error}")
            return
        if texts:
            self._shown_step, step = kept.steps[-1], self._step
            self._each(lambda tracker: tracker.show(texts, step))

    def skip_kept(self) -> None:
        """Skip the rollouts that are kept now; rollouts of repeated steps were deleted."""
        self._shown_step = max(kept_steps(self._groups), default=0)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Send the summary of the run, and wait at most `end_s` for all queued messages."""
        final = dict(summary)
        if "reason" in final:
            final["reason"] = redacted(str(final["reason"]))
        self._each(lambda tracker: tracker.finish(final, exit_code))
        deadline = time.monotonic() + self._end_s
        for tracker in self._trackers:
            tracker.close(max(deadline - time.monotonic(), 0.0))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            tracker.submit(call)


class _Threaded:
    """Tracker that is created and called in a separate thread."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], print_line: Callable[[str], None]
    ) -> None:
        self._name, self._make, self._print_line = name, make, print_line
        self._tracker: Tracker | None = None
        self._disabled = threading.Event()
        self._thread = WorkThread(f"tracker {name}", self._fail, _WAITING)
        self.submit(lambda _tracker: None)  # creates the tracker

    def submit(self, call: Callable[[Tracker], None]) -> None:
        """Queue a call of the tracker; drop the tracker if it is late."""
        if self._disabled.is_set():
            return
        if (seconds := self._thread.busy_s) > _CALL_S:
            self._disable(f"has not answered for {seconds:.0f} s")
        elif not self._thread.add(partial(self._call, call)):
            self._disable(f"is late by {_WAITING} messages")

    def close(self, wait_s: float) -> None:
        """Wait until the tracker has processed all calls; drop it if that takes too long."""
        if not self._disabled.is_set() and not self._thread.finish(wait_s):
            self._disable(f"has not answered within {wait_s:.0f} s of the run's end")

    def _call(self, call: Callable[[Tracker], None]) -> None:
        if self._disabled.is_set():
            return
        if self._tracker is None:
            self._tracker = self._make()
        call(self._tracker)

    def _fail(self, error: BaseException) -> None:
        # Errors of a tracker's network, disk or library (which may even exit) must not end the run.
        self._disable(f"failed ({type(error).__name__}: {first_line(error)})")

    def _disable(self, why: str) -> None:
        if not self._disabled.is_set():
            self._disabled.set()
            self._print_line(
                f"WARNING: {self._name} {redacted(why)} and receives no more metrics of this "
                "run; out/metrics.jsonl has all of them"
            )


def _texts(kept: KeptGroup, tokenizer: Tokenizer) -> Iterator[RolloutText]:
    for member in kept.group.trajectories_G:
        first = member.segments[0]
        start = first.first_action
        parts = [decode(tokenizer, first.tokens_T[start:])]
        parts += [decode(tokenizer, segment.tokens_T) for segment in member.segments[1:]]
        yield RolloutText(
            step=kept.step,
            group=kept.group.group_id,
            prompt=decode(tokenizer, first.tokens_T[:start]),
            response="\n[a new segment]\n".join(parts),
            reward=member.reward,
            stop_reason=member.stop_reason.value,
        )


@dataclass(frozen=True, slots=True)
class _Started:
    """Facts about the run that a tracker is created with."""

    run: RunDirectory
    run_id: str
    settings: Mapping[str, Any]
    first_step: int
    wandb_mode: str

    @property
    def name(self) -> str:
        return self.run.path.name


class _Wandb:
    """Weights & Biases. WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY and others take precedence."""

    def __init__(self, started: _Started) -> None:
        import wandb  # optional, and slow to import

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "isotherm"),
            name=os.environ.get("WANDB_NAME", started.name),
            id=started.run_id,
            resume="allow",
            dir=str(started.run.path),
            mode=started.wandb_mode,  # type: ignore[arg-type]  # checked in the settings
            config=dict(started.settings),
        )
        self._newest = started.first_step
        # By default the summary has all metrics, and shows the alphabetically first ones on top.
        self._run.define_metric("*", summary="none")
        for name in HEADLINES:
            self._run.define_metric(name, summary="last")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "eval/version" not in metrics:
            self._newest = step
            self._run.log(dict(metrics), step=step)
            return
        # Weights & Biases drops data of steps before its newest, so it is logged with the newest.
        self._newest = max(step, self._newest)
        self._run.log({**metrics, "eval/step": step}, step=self._newest)

    def show(self, rollouts: Sequence[RolloutText], step: int) -> None:
        table = self._wandb.Table(
            columns=[field.name for field in fields(RolloutText)],
            data=[list(astuple(rollout)) for rollout in rollouts],
        )
        self._run.log({"rollouts": table}, step=step)

    def alert(self, text: str, step: int) -> None:
        self._run.alert(title=f"{self._run.name}, step {step}", text=text)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        if exit_code:
            self.alert(f"{summary.get('status')}: {summary.get('reason')}", 0)
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=exit_code)


class _TensorBoard:
    """TensorBoard's event files in out/tensorboard."""

    def __init__(self, started: _Started) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = started.run.path / "tensorboard"
        self._writer = SummaryWriter(str(directory), purge_step=started.first_step + 1)
        self._writer.add_text("settings", _as_code(started.settings), started.first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, rollouts: Sequence[RolloutText], step: int) -> None:
        for rollout in rollouts:
            title = f"group {rollout.group}, reward {rollout.reward:g}, {rollout.stop_reason}"
            text = f"{title}\n\n{_quoted(rollout.prompt)}\n\n{_quoted(rollout.response)}"
            self._writer.add_text("rollouts", text, rollout.step)

    def alert(self, text: str, step: int) -> None:
        self._writer.add_text("alerts", text, step)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._writer.add_text("summary", _as_code(summary))
        self._writer.close()


class _Mlflow:
    """MLflow: the server of MLFLOW_TRACKING_URI, or files in out/mlflow."""

    _TAG = "isotherm.run_id"

    def __init__(self, started: _Started) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric = Metric
        self._headlines: dict[str, float] = {}
        self._out = started.run.path
        local = f"sqlite:///{self._out / 'mlflow.db'}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", local))
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "isotherm"))
        known = self._client.search_runs(
            [experiment], f"tags.`{self._TAG}` = '{started.run_id}'", max_results=1
        )
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_RUN_NAME", started.name)
        run = self._client.create_run(experiment, tags={self._TAG: started.run_id}, run_name=name)
        self._id = run.info.run_id
        for key, value in started.settings.items():
            self._client.log_param(self._id, key, str(value)[:500])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        return self._client.create_experiment(name, f"file://{self._out / 'mlflow'}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._headlines |= {
            f"summary/{name}": metrics[name] for name in HEADLINES if name in metrics
        }
        self._log(metrics, step)

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id,
            metrics=[
                self._metric(re.sub(r"[^\w\-./ ]", "_", name), value, now, step)
                for name, value in metrics.items()
            ],
        )

    def show(self, rollouts: Sequence[RolloutText], step: int) -> None:
        lines = [
            json.dumps(dict(zip((f.name for f in fields(RolloutText)), astuple(each), strict=True)))
            for each in rollouts
        ]
        self._client.log_text(self._id, "\n".join(lines) + "\n", f"rollouts/step_{step}.jsonl")

    def alert(self, text: str, step: int) -> None:
        self._client.set_tag(self._id, f"alert.step_{step}", text[:5000])

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._log(self._headlines, 0)
        self._client.log_dict(self._id, dict(summary), "summary.json")
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


def _as_code(values: Mapping[str, Any]) -> str:
    """Format values as a Markdown code block."""
    return _quoted(json.dumps(values, indent=1, default=str))


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


KINDS: Mapping[str, Callable[[_Started], Tracker]] = {
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
    "mlflow": _Mlflow,
    _EXPORTER: lambda started: RayExporter(started.name, started.run_id),
}


def check_trackers(chosen: TrackingSettings) -> None:
    """Raise ConfigError if a chosen tracker is not installed. Called before anything starts."""
    for name in chosen.trackers:
        require_library(name, f"track={name}", f"isotherm[{name}]", "tracking.track")
