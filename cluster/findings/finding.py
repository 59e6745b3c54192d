"""A detector's finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
