"""The diagnosis of a detector, the finding that it becomes, and its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A kept trajectory, to which the report links: its step, its group, its index in the group."""

    step: int
    group: int
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A fault of a run that a detector has recognised. `text`: the observation, in numbers."""

    text: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Diagnosis):
    """A diagnosis with its place in the run.

    Attributes:
        name: name of the detector; a run has at most one finding of each.
    """

    name: str
    step: int
    evidence: Evidence | None = None

    def describe(self) -> str:
        """One line for people."""
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
