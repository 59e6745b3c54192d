"""Detectors of waiting: learner, engines and teachers that are idle, and changes of GPU turns."""

from __future__ import annotations

from cluster.config.on_policy import RolloutConfig
from cluster.findings.finding import Diagnosis, Finding
from cluster.findings.history import SPAN, History
from cluster.findings.training import PATIENCE

# Shares of a step in which the learner waits: if it starves, and if it waits for due groups.
_STARVED, _WAITS = 0.8, 0.3
# Share of a step that engines on shared GPUs spend on changes of turns.
_CHANGES = 0.3
# Work of a teacher, as a number of engines that would always be busy.
_IDLE = 0.5


def staleness_at_its_bound(history: History, config: RolloutConfig) -> Diagnosis | None:
    """Steps wait for groups that would become too old: the staleness bound limits the speed."""
    oldest = history.of("staleness/max", PATIENCE)
    waits, most = _wait_share(history), config.queue.max_staleness
    if oldest is None or waits is None or most < 2:
        return None
    at_bound = all(value >= most for value in oldest.values[-2 * SPAN :])
    if not at_bound or waits < _WAITS:
        return None
    return Diagnosis(
        text=f"in each of {2 * SPAN} steps some tokens were {most} versions old, "
        f"which is max_staleness, and the learner waits {waits:.0%} of the time",
        remedy="the learner waits for the oldest groups. Raise max_staleness, lower "
        "max_new_tokens, or lower groups_in_flight, so that each group is complete sooner",
    )


def learner_starves(history: History, config: RolloutConfig) -> Diagnosis | None:
    """The learner mostly waits for groups, although sampling overlaps training."""
    waits = _wait_share(history)
    alone = config.cluster.local or config.queue.max_staleness == 0 or config.only_keeps
    if waits is None or waits < _STARVED or alone:
        return None
    return Diagnosis(
        text=f"the learner waits for groups {waits:.0%} of the time (time/wait)",
        remedy="raise policy.engines and rollout.workers (a range such as 2..8 adds them as "
        "needed), or groups_in_flight",
    )


def teachers_idle(history: History, config: RolloutConfig) -> Diagnosis | None:
    """Several engines of a teacher do work that one engine could do.

    Overlapping scorings are each counted with their whole time, so the actual work is less than the
    reported number.
    """
    scoring, step = history.of("time/teacher", PATIENCE), history.of("time/step", PATIENCE)
    engines = config.teacher.size.smallest
    if scoring is None or step is None or engines < 2:
        return None
    passed_over = history.of("groups/replaced")
    groups = config.data.batch_size + (passed_over.now if passed_over else 0.0)
    work = groups * scoring.now / max(step.now, 1e-9)
    if work >= _IDLE:
        return None
    return Diagnosis(
        text=f"{engines} engines of the teacher share work that keeps one engine busy for at most "
        f"{work:.0%} of the time",
        remedy="set teacher.engines=1, and use the freed resources for policy.engines",
    )


def turns_take_long(history: History, _config: RolloutConfig) -> Diagnosis | None:
    """GPUs that engines share by turns spend much of the time on changes of turns."""
    spent, step = history.of("turns/seconds", PATIENCE), history.of("time/step", PATIENCE)
    changes = history.of("turns/changes")
    if spent is None or step is None or changes is None:
        return None
    share = spent.now / max(step.now, 1e-9)
    if share < _CHANGES:
        return None
    return Diagnosis(
        text=f"engines that share GPUs change turns {changes.now:.1f} times per step, which takes "
        f"{share:.0%} of the time (turns/seconds)",
        remedy="longer turns need fewer changes: raise groups_in_flight or "
        "prompts_per_step; or give the teachers separate GPUs (teacher.gpus=own)",
    )


def _wait_share(history: History) -> float | None:
    waits, step = history.of("time/wait", PATIENCE), history.of("time/step", PATIENCE)
    return waits.now / max(step.now, 1e-9) if waits and step else None


def groups_not_kept(reason: str, step: int) -> Finding:
    """Groups are not written to `out/groups`. Reported by the queue, not by a metric."""
    return Finding(
        name="groups_not_kept",
        step=step,
        text=f"groups that have arrived are not kept on disk: {reason}",
        remedy="the run continues; after a death of the queue or a resume these groups are sampled "
        "again",
    )
