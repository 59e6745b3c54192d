"""Certificate of a run, `out/certificate.json`: proven and unproven facts about its scores.

The certificate is derived from the ledger's journal (cluster/queue/scoring.py), so it agrees with
`cluster.audit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.on_policy import RolloutConfig
from cluster.queue.scoring import Replica, Scoring

_NOT_WATCHED = "not proven: verify.every=0, so no canaries were scored"

_MOVES = (
    "teacher=policy changes as it trains, so canaries cannot check it; checks after pushes "
    "(verify.every) verify that its engines hold the pushed weights, and each score records "
    "their version"
)


def certificate(config: RolloutConfig, scoring: Scoring | None) -> dict[str, Any] | None:
    """Certificate of a run; None if the run has no scorers."""
    by_frozen = (
        config.scored_by_reference or config.base_is_reference or config.reward_model is not None
    )
    if not (by_frozen or (config.teacher_models() and not config.teacher.moves)):
        if not config.teacher.moves:
            return None
        verdict = f"not proven by canaries: {_MOVES}"
        return {"proven": False, "verdict": verdict, "limits": [_MOVES]}
    if scoring is None or not config.verify.canary_every:
        return {"proven": False, "verdict": _NOT_WATCHED, "limits": limits(config, scoring)}
    return {
        "proven": scoring.holds,
        "verdict": scoring.verdict(),
        "canary_every": config.verify.canary_every,
        "groups": {**counted(scoring), "scored_again": scoring.rescored},
        "gaps": scoring.gaps,
        "moved": scoring.bad,
        "replicas": [_replica(each) for each in scoring.replicas],
        "limits": limits(config, scoring),
    }


def counted(scoring: Scoring) -> dict[str, int]:
    """Numbers of groups, which a certificate contains and an audit compares with the ledger."""
    return {
        "trained": scoring.trained,
        "proven": scoring.proven,
        "unwatched": scoring.unwatched,
    }


def _replica(replica: Replica) -> dict[str, Any]:
    start_event, moved = replica.start_event, replica.moved
    return {
        "who": replica.who,
        "model": start_event["model"],
        "kind": start_event["kind"],
        "dtype": start_event["dtype"],
        "temperature": start_event["scaling"],
        "first_answers": start_event["answers"],
        "repeats_differ_by": _rounded(start_event["measured"]),
        "may_move_by": _rounded(start_event["allowed"]),
        "moved_by_at_most": _rounded(replica.largest),
        "canaries": replica.canaries,
        "beside_real_rows": replica.batched,
        "groups": replica.trained,
        "groups_in_gaps": replica.gaps,
        "quarantine": moved and {"step": moved["step"], "why": moved["why"]},
    }


def _rounded(value: float) -> float:
    """Round to three significant digits, which is enough for the size of an error."""
    return float(f"{value:.3g}")


def limits(config: RolloutConfig, scoring: Scoring | None) -> list[str]:
    """Descriptions of what canaries cannot prove in this run."""
    found: dict[str, None] = {}
    for replica in scoring.replicas if scoring else []:
        found |= dict.fromkeys(_limits_of(replica.who, replica.start_event))
    if config.teacher.moves:
        found[_MOVES] = None
    if config.teacher.sft_steps or config.teacher.sample_share:
        found["groups that the teacher sampled have no scores: their log-probs are those of its "
              "decode, and canaries are prefills of the same weights"] = None  # fmt: skip
    for address in config.text_endpoints().values():
        found[(
            f"texts of {address} have no log-probs, no canaries and no scorer: the name of the "
            "model that wrote them is not verified"
        )] = None  # fmt: skip
    return list(found)


def _limits_of(who: str, start_event: Mapping[str, Any]) -> list[str]:
    found = []
    if start_event["kind"].endswith("(external)"):
        found.append(
            f"{who} is a server of others: how many replicas answer behind {start_event['model']} "
            "is not known, and a canary proves the one that it reached"
        )
    if start_event["scaling"].startswith("not announced"):
        found.append(
            f"{who} does not echo T: only its canaries, at T and 1.5 T, show that it scores at "
            "T, not each answer"
        )
    return found
