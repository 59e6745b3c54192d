"""Data of a run's report, as JSON values: facts, evaluations, curves and kept rollouts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from cluster.config.files import at_path
from cluster.inspect.report.run_files import RunFiles, run_tokenizer, why_no_rollouts
from cluster.inspect.report.tokens import furthest_apart, largest_shares, nats
from cluster.run_files.metric_table import described
from cluster.run_files.redact import without_secrets
from cluster.store.kept_groups import KeptGroup
from distill.chat.token_text import decode, token_texts
from distill.errors import CheckpointError
from distill.types import (
    FloatArray,
    GroupFacts,
    Segment,
    Tokenizer,
    TrajectoryGroup,
    shared_fields,
)

Item = TypeVar("Item")

# Charts by title: metrics with their labels, or the prefix of a family of metrics.
_CHARTS: tuple[tuple[str, Mapping[str, str] | str], ...] = (
    (
        "Reverse KL per token, nats",
        {"opd/reverse_kl": "to q at T", "opd/reverse_kl_vs_q1": "to q at 1"},
    ),
    ("Forward KL per token of the teacher's samples, nats", {"teacher_samples/forward_kl": "mean"}),
    ("Share of groups that the teacher sampled", {"teacher_samples/share": "of the step"}),
    ("Reverse KL by turn", "opd/reverse_kl/turn="),
    ("Reverse KL by teacher", "opd/reverse_kl/teacher="),
    ("Reverse KL by tag", "opd/reverse_kl/tag="),
    ("Reverse KL by source", "opd/reverse_kl/source="),
    ("Reward", {"reward/mean": "mean"}),
    ("Reward by teacher", "reward/mean/teacher="),
    ("Reward by tag", "reward/mean/tag="),
    ("Reward by source", "reward/mean/source="),
    ("Share of groups by source", "rollout/share/source="),
    ("Eval accuracy", {"eval/accuracy": "mean"}),
    ("Eval accuracy by source", "eval/accuracy/source="),
    ("Eval pass@k", "eval/pass@"),
    ("Eval majority@k", "eval/majority@"),
    ("Eval reverse KL, nats", {"eval/reverse_kl": "to q at T"}),
    ("Eval response length", {"eval/response_length": "mean"}),
    ("Eval share that ends", {"eval/eos_share": "mean"}),
    ("Loss", {"train/loss": "mean", "validation/loss": "held out"}),
    (
        "Preferred response scored higher",
        {
            "dpo/accuracy": "dpo",
            "reward_model/accuracy": "reward model",
            "validation/accuracy": "held out",
        },
    ),
    ("Cross-entropy, nats", {"train/nll": "mean", "sft/nll": "supervised rows"}),
    ("Cross-entropy by source", "train/nll/source="),
    (
        "Log-prob gap, nats",
        {
            "train/logprob_gap": "server to learner",
            "train/logprob_gap_unreplayed": "by the learner's own routing",
        },
    ),
    ("Routings that the learner would change, share", {"train/routing_mismatch": "of a mixture"}),
    ("Entropy, nats", {"train/entropy": "mean"}),
    ("Gradient norm", {"train/grad_norm": "before clipping"}),
    ("Learning rate", {"train/lr": "AdamW's"}),
    (
        "Ratio to the sampler",
        {"train/ratio_max": "max", "train/ratio": "mean", "train/ratio_min": "min"},
    ),
    ("Effective sample size, share", {"train/ess": "of tokens"}),
    (
        "Share of tokens that a bound clips",
        {"train/clip_low_share": "ratio below", "train/clip_high_share": "ratio above"},
    ),
    ("Share of updates lost to rounding", {"push/lost_share": "in the engines"}),
    (
        "Staleness, weight versions",
        {
            "staleness/start_max": "of the oldest start",
            "staleness/max": "max",
            "staleness/mean": "mean",
        },
    ),
    ("Response length, tokens", {"rollout/response_length": "mean"}),
    ("Turns and segments", {"rollout/turns": "turns", "rollout/segments": "segments"}),
    ("Why episodes end", "rollout/stop/"),
    ("Trained tokens/s", {"tokens_per_s": "trained"}),
    (
        "Seconds of a step",
        {
            "time/step": "whole",
            "time/wait": "wait",
            "time/forward": "forward",
            "time/backward": "backward",
            "time/optimizer": "optimizer",
            "time/push": "push",
        },
    ),
)
# Prefix of an environment's own metrics: each has a chart, titled with the metric's name.
_OWN = "env/"
# Suffixes of interval ends, which are drawn if a run has them.
_LOW, _HIGH = "_low", "_high"
# Maximum number of points per line; longer runs are drawn as means over windows of steps.
_MAX_POINTS = 1000
# Maximum number of an evaluation's problems on the page.
_MAX_PROBLEMS = 64


def report_data(run: RunFiles, groups: int) -> dict[str, Any]:
    """Data of the whole page.

    Kept groups are limited to `groups`, spread evenly over the run, plus all groups that findings
    name as evidence.
    """
    tokenizer, problem = _tokenizer(run) if run.groups else (None, None)
    found = findings(run)
    evidence = {
        (each["evidence"]["step"], each["evidence"]["group"]) for each in found if each["evidence"]
    }
    chosen = {*spread(range(len(run.groups)), groups)}
    shown = [
        run.groups[i]
        for i, place in enumerate(run.groups.places)
        if i in chosen or place in evidence
    ]
    return {
        "title": f"{run.record.recipe} {run.out.resolve().name}",
        "facts": facts(run),
        "findings": found,
        "settings": settings(run),
        "evaluations": evaluations(run),
        "responses": responses(run),
        "charts": charts(run),
        "kept": len(run.groups),
        "note": problem if run.groups else why_no_rollouts(run),
        "groups": [group_data(group, tokenizer) for group in shown],
        "apart": furthest_apart(shown, tokenizer),
        "by_share": largest_shares(run.groups, tokenizer),
        "against": None,
    }


def facts(run: RunFiles) -> list[tuple[str, str]]:
    """Head of the page: main settings, status and results of the run, with labels."""
    settings, done = run.record.settings, int(run.metrics[-1]["step"]) if run.metrics else 0
    given = settings.get("teachers")
    teachers = given if isinstance(given, dict) else {}
    found = {
        "recipe": run.record.recipe,
        "status": run.summary.get("status", "running, or killed"),
        "reason": run.summary.get("reason"),
        "steps": f"{done} of {settings['steps']}" if "steps" in settings else str(done),
        "student": at_path(settings, "model.path"),
        "teacher": at_path(settings, "teacher.model")
        or ", ".join(
            f"{name}: {each.get('model') if isinstance(each, dict) else each}"
            for name, each in teachers.items()
        ),
        "temperature": at_path(settings, "sampling.temperature"),
        "prompts": at_path(settings, "data.source"),
        "a step": _step_size(settings),
        "learning rate": at_path(settings, "learner.lr"),
        "trained tokens": run.summary.get("train_tokens"),
        "best": _best_sentence(run),
        "forked from": _origin(run.record.forked_from or {}),
        "directory": str(run.out.resolve()),
    }
    return [(name, _shown(value)) for name, value in found.items() if value not in (None, "")]


def _best(run: RunFiles) -> Mapping[str, Any] | None:
    """Step, metric and value of the best evaluation, from the summary of a finished run."""
    best = run.summary.get("best")
    complete = isinstance(best, dict) and best.keys() >= {"step", "metric", "value"}
    return best if complete else None


def _best_sentence(run: RunFiles) -> str | None:
    best = _best(run)
    return f"step {best['step']}: {best['metric']} {best['value']}" if best else None


def _origin(fork: Mapping[str, Any]) -> str | None:
    """Checkpoint that a run was forked from, and whether it took the optimizer's moments."""
    if not fork.keys() >= {"run", "step", "moments"}:
        return None
    took = "with its optimizer's moments" if fork["moments"] else "its weights alone"
    return f"step {fork['step']} of {fork['run']}, {took}"


def findings(run: RunFiles) -> list[dict[str, Any]]:
    """Findings of the run, each with the place of a kept trajectory as evidence, or None.

    Evidence is None if the trajectory is not kept any more, because the run returned to an earlier
    step.
    """
    kept = set(run.groups.places)
    found = []
    for row in run.events:
        if row["event"] == "finding":
            where = row.get("evidence")
            is_kept = isinstance(where, dict) and (where.get("step"), where.get("group")) in kept
            texts = {name: str(row.get(name, "")) for name in ("name", "step", "text", "remedy")}
            found.append({**texts, "evidence": where if is_kept else None})
    return found


def settings(run: RunFiles) -> list[tuple[str, str]]:
    """Every setting that is not None, and the software versions of the run."""
    public = without_secrets(run.record.settings)
    shown = {name: value for name, value in public.items() if value is not None}
    shown |= {f"version of {name}": version for name, version in run.record.versions.items()}
    return [
        (name, value if isinstance(value, str) else json.dumps(value))
        for name, value in shown.items()
    ]


def _step_size(settings: Mapping[str, Any]) -> str | None:
    size, group = (at_path(settings, name) for name in ("data.batch_size", "sampling.group_size"))
    if size is None:
        return None
    return f"{size} rows" if group is None else f"{size} prompts x {group} samples"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def evaluations(run: RunFiles) -> dict[str, Any] | None:
    """Table of the first, the last and the teachers' evaluations; None if there are none.

    A cell has the value, followed by the ends of its interval if it has one.
    """
    by_name = {
        name.removeprefix("eval "): values
        for name, values in run.summary.items()
        if name.startswith("eval ") and isinstance(values, dict)
    }
    columns = [name for name in ("before", "after") if name in by_name]
    columns += [name for name in by_name if not name.startswith("step ") and name not in columns]
    metrics = dict.fromkeys(
        metric
        for name in columns
        for metric in by_name[name]
        if metric.startswith("eval/") and not metric.endswith((_LOW, _HIGH))
    )
    if not metrics:
        return None
    rows = [
        [metric.removeprefix("eval/"), *(_cell(by_name[name], metric) for name in columns)]
        for metric in metrics
    ]
    return {"columns": columns, "rows": rows}


def responses(run: RunFiles) -> list[dict[str, Any]]:
    """Held-out problems, with the kept response of each evaluation."""
    by_problem: dict[tuple[str, int], dict[str, Any]] = {}
    for row in run.evaluations:
        for each in row["responses"]:
            key = str(each.get("source", "")), int(each["line"])
            known = {name: each.get(name) for name in ("prompt", "answer")}
            problem = by_problem.setdefault(
                key, {"source": key[0], "line": key[1], **known, "answers": []}
            )
            problem["answers"].append(
                {
                    "who": str(row["who"]),
                    "text": str(each["text"]),
                    "reward": _number(each, "correct"),
                    "stop": str(each["stop_reason"]),
                    "tokens": int(each["num_tokens"]),
                }
            )
    return list(by_problem.values())[:_MAX_PROBLEMS]


def _cell(values: Mapping[str, Any], metric: str) -> list[float] | None:
    if _number(values, metric) is None:
        return None
    names = (metric, metric + _LOW, metric + _HIGH)
    return [value for name in names if (value := _number(values, name)) is not None]


def _number(values: Mapping[str, Any], name: str) -> float | None:
    """Value rounded to five significant digits; None if it is absent or not finite."""
    value = values.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")


def charts(run: RunFiles) -> list[dict[str, Any]]:
    """Charts with their lines. Lines and charts without values are left out."""
    rows = list(_with_evaluations(run))
    if not any(row.get("reward/mean") for row in rows) and not at_path(
        run.record.settings, "objective.reward_coef"
    ):
        rows = [{n: v for n, v in row.items() if not n.startswith("reward/")} for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    found, best = [], _best(run) or {}
    own = ((name, {name: "mean"}) for name in names if name.startswith(_OWN))
    for title, shown in (*_CHARTS, *own):
        if isinstance(shown, str):
            family = [name for name in names if name.startswith(shown)]
            shown = {name: name.removeprefix(shown) for name in sorted(family, key=_natural)}
        drawn = {name: each for name, label in shown.items() if (each := line(rows, name, label))}
        lines = [
            {**each, "best": best["step"]} if name == best.get("metric") else each
            for name, each in drawn.items()
        ]
        if lines:
            found.append({"title": title, "about": _meanings(drawn), "lines": lines})
    return found


def _meanings(names: Iterable[str]) -> str:
    """Meanings of the metrics or families that the table of metrics has, one line each."""
    known = dict.fromkeys(filter(None, map(described, names)))
    return "\n".join(f"{metric.name}: {metric.meaning}" for metric in known)


def _with_evaluations(run: RunFiles) -> Iterator[Mapping[str, Any]]:
    """Metrics of every step, and of the evaluations before the first and after the last."""
    before, after = run.summary.get("eval before"), run.summary.get("eval after")
    if isinstance(before, dict) and not any(
        row["step"] == 0 and "time/eval" in row for row in run.metrics
    ):
        yield {**before, "step": 0}
    yield from run.metrics
    for last in run.metrics[-1:]:
        if isinstance(after, dict) and not after.keys() & last.keys():
            yield {**after, "step": last["step"]}


def _natural(name: str) -> tuple[str, float]:
    head, _, tail = name.rpartition("=" if "=" in name else "@")
    return (head, float(tail)) if tail.isdecimal() else (name, 0.0)


def line(
    rows: Sequence[Mapping[str, Any]], name: str, label: str, along: str = "step"
) -> dict[str, Any] | None:
    """Values of `name` over `along`, with the ends of their intervals; None without values."""
    found = [row for row in rows if _number(row, name) is not None]
    if not found:
        return None
    ends = {
        end: _thinned([_number(row, name + suffix) for row in found])
        for end, suffix in (("low", _LOW), ("high", _HIGH))
        if all(_number(row, name + suffix) is not None for row in found)
    }
    return {
        "label": label,
        "at": _thinned([_number(row, along) for row in found]),
        "values": _thinned([_number(row, name) for row in found]),
        **ends,
    }


def _thinned(values: Sequence[float | None]) -> list[float]:
    known = [value for value in values if value is not None]
    each = math.ceil(len(known) / _MAX_POINTS)
    if each < 2:
        return known
    chunks = [known[i : i + each] for i in range(0, len(known), each)]
    return [float(f"{sum(chunk) / len(chunk):.5g}") for chunk in chunks]


def spread(groups: Sequence[Item], number: int) -> list[Item]:
    """At most `number` of the groups, evenly spaced, including the first and the last."""
    if len(groups) <= number:
        return list(groups)
    if number == 1:
        return [groups[-1]]
    return [groups[round(i * (len(groups) - 1) / (number - 1))] for i in range(number)]


def group_data(kept: KeptGroup, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Data of a group, with the texts of its tokens.

    The tokens that all members share before their first turn are the group's `prompt`. They are
    omitted from the members' first segments, but are counted in positions in these segments.
    """
    special = set() if tokenizer is None else _special_ids(tokenizer)
    group, advantages_S = kept.group, iter(kept.advantages_S)
    prompt = _prompt_tokens(group)
    shared = group.trajectories_G[0].segments[0].tokens_T.tolist() if prompt else []
    facts = shared_fields(GroupFacts, group)
    facts["group"] = facts.pop("group_id")
    return {
        **facts,
        "step": kept.step,
        "version": kept.version,
        "temperature": group.temperature,
        "metrics": _finite(group.metrics),
        "prompt": {
            "ids": shared[:prompt],
            "texts": None if tokenizer is None else token_texts(tokenizer, shared)[:prompt],
        },
        "alternatives": _texts_of_alternatives(group, tokenizer),
        "members": [
            {
                "reward": _number({"reward": member.reward}, "reward"),
                "stop": member.stop_reason.value,
                "metrics": _finite(member.metrics),
                "segments": [
                    _segment(segment, next(advantages_S), tokenizer, special, 0 if s else prompt)
                    for s, segment in enumerate(member.segments)
                ],
            }
            for member in group.trajectories_G
        ],
    }


def _prompt_tokens(group: TrajectoryGroup) -> int:
    """Number of tokens that all members share before their first turns; 0 for one member."""
    firsts = [member.segments[0] for member in group.trajectories_G]
    prompts = {first.tokens_T[: first.first_action].tobytes() for first in firsts}
    return firsts[0].first_action if len(firsts) > 1 and len(prompts) == 1 else 0


def _texts_of_alternatives(
    group: TrajectoryGroup, tokenizer: Tokenizer | None
) -> dict[int, str] | None:
    """Texts of the teacher's likeliest tokens, by id; None without such tokens or a tokenizer."""
    tops = [each.teacher_top.ids_NK.ravel() for each in group.segments() if each.teacher_top]
    if tokenizer is None or not tops:
        return None
    return {id_: decode(tokenizer, [id_]) for id_ in np.unique(np.concatenate(tops)).tolist()}


def _segment(
    segment: Segment,
    advantages_T: FloatArray,
    tokenizer: Tokenizer | None,
    special: set[int],
    prompt: int,
) -> dict[str, Any]:
    """Data of a segment, without the ids and texts of its first `prompt` tokens."""
    ids, mask_T = segment.tokens_T.tolist(), segment.action_mask_T
    teacher_T, bonuses_T, top = (
        segment.teacher_logprobs_T, segment.bonuses_T, segment.teacher_top,
    )  # fmt: skip
    return {
        "prompt": prompt,
        "ids": ids[prompt:],
        "texts": None if tokenizer is None else token_texts(tokenizer, ids)[prompt:],
        "special": [t for t, token in enumerate(ids) if token in special],
        "actions": segment.action_spans,
        "student": nats(segment.behaviour_logprobs_T[mask_T]),
        "teacher": None if teacher_T is None else nats(teacher_T[mask_T]),
        "versions": segment.versions_T[mask_T].tolist(),
        "advantages": _significant(advantages_T[mask_T]),
        "bonuses": None if bonuses_T is None else _significant(bonuses_T[mask_T]),
        "top": None
        if top is None
        else [
            list(zip(ids_K, logprobs_K, strict=True))
            for ids_K, logprobs_K in zip(top.ids_NK.tolist(), nats(top.logprobs_NK), strict=True)
        ],
    }


def _significant(values_N: np.ndarray) -> list[float]:
    """Values of four significant digits, because an advantage may be small."""
    return [float(f"{value:.4g}") for value in values_N]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name in metrics if (value := _number(metrics, name)) is not None}


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


def _tokenizer(run: RunFiles) -> tuple[Tokenizer | None, str | None]:
    """The run's tokenizer, or an explanation why the page shows token ids."""
    try:
        return run_tokenizer(run), None
    except CheckpointError as error:
        return None, f"Tokens are shown by their ids: {error}."
