"""A detector's finding, and the run's settings that detectors read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.config.on_policy import OpdConfig, RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A kept trajectory: member `member` of group `group` of `step`, as the report links to it."""

    step: int
    group: int
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong with a run.

    Attributes:
        name: of the detector; one run has each once.
        text: what was seen, in numbers.
        settings: those that the remedy names.
    """

    name: str
    step: int
    text: str
    remedy: str
    settings: tuple[str, ...]
    evidence: Evidence | None = None

    def told(self) -> str:
        """For people: a line."""
        where = self.evidence
        shown = (
            f" (kept: step {where.step}, group {where.group}, trajectory {where.member})"
            if where
            else ""
        )
        return f"step {self.step}: {self.text}{shown}: {self.remedy}"

    def to_json(self) -> dict[str, Any]:
        where = self.evidence
        return {
            "name": self.name,
            "step": self.step,
            "text": self.text,
            "remedy": self.remedy,
            "evidence": where
            and {"step": where.step, "group": where.group, "member": where.member},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings that decide what is wrong and what is meant."""

    max_new_tokens: int
    max_staleness: int
    prompts_per_step: int
    teacher_engines: int
    rewarded: bool
    local: bool
    trains: bool = True
    # "" without a teacher.
    estimator: str = "sampled"
    # Whether some advantage can differ from 0, so that losses over ratios have something to weigh.
    has_advantages: bool = True

    @classmethod
    def of(cls, config: RolloutConfig) -> Setup:
        objective = config.objective
        return cls(
            max_new_tokens=config.sampling.max_new_tokens,
            max_staleness=config.queue.max_staleness,
            prompts_per_step=config.data.batch_size,
            teacher_engines=(config.teacher.size.smallest if isinstance(config, OpdConfig) else 0),
            rewarded=objective.reward_coef > 0,
            local=config.cluster.local,
            trains=not config.only_keeps,
            estimator=objective.estimator if objective.kl_coef else "",
            has_advantages=objective.has_advantages,
        )
