"""Evidence in other files: config, metrics, certificate, summary and the checkpoints.

The ledger's process does not write these files. They contradict a ledger that belongs to another
run, lacks its end, or was edited. A missing file contradicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.run_record import SAVED_IN, RunRecord
from cluster.jsonl_log import read_lines, read_object
from cluster.queue.scoring import Scoring
from cluster.run_files.certificate import counted
from distill.errors import DataError
from distill.records import TrainedGroups
from learner.checkpoint import CheckpointStore, trained_in


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """Evidence of a run's steps from its other files.

    Attributes:
        run_id: id of the run in config.json; "" if missing.
        ends: watermark after each step, from metrics.jsonl.
        starts: versions since the first lease of each step's oldest group, from metrics.jsonl.
        saved: groups that the weights of each checkpoint account for, by step.
        certified: contents of certificate.json; empty if missing.
        status: status in summary.json, which a job writes at its end; "" if missing.
    """

    run_id: str
    ends: Mapping[int, int]
    starts: Mapping[int, int]
    saved: Mapping[int, TrainedGroups]
    certified: Mapping[str, Any]
    status: str

    @classmethod
    def read(cls, journal: Path) -> RunEvidence:
        """Read the files in the journal's directory.

        Raises:
            DataError, CheckpointError: a file is unreadable.
        """
        out = journal.parent
        path = out / "metrics.jsonl"
        metrics = read_lines(path, {"step"})
        try:
            ends, starts = (
                {line["step"]: int(line[name]) for line in metrics if name in line}
                for name in ("groups/watermark", "staleness/start_max")
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"{path} has a line with a value that is not a number ({error}); remove it"
            ) from error
        checkpoints = [
            each for name in SAVED_IN for each in CheckpointStore(out / name, keep=1).complete()
        ]
        return cls(
            run_id="" if (record := RunRecord.of_run(out)) is None else record.run_id,
            ends=ends,
            starts=starts,
            # The checkpoint of step 0 is the start of a forked run, and contains no group.
            saved={c.step: trained_in(c) for c in checkpoints if c.step},
            certified=read_object(out / "certificate.json") or {},
            status=str((read_object(out / "summary.json") or {}).get("status", "")),
        )

    def contradictions(
        self,
        run_id: str,
        accounts: Mapping[int, TrainedGroups],
        starts: Mapping[int, int | None],
        scoring: Scoring | None,
    ) -> Iterator[str]:
        """Contradictions between these files and a ledger.

        Args:
            run_id: id of the run in the ledger; "" if missing.
            accounts: groups that the weights account for after each step, from the ledger.
            starts: versions since the first lease of each step's oldest group, from the ledger.
            scoring: record of the scores in the ledger; None if it has no scorer.
        """
        if run_id and self.run_id and run_id != self.run_id:
            yield f"the ledger belongs to run {run_id}, but config.json to run {self.run_id}"
        ends = {step: account.watermark for step, account in accounts.items()}
        for step, end in self.ends.items():
            if ends.get(step) != end:
                yield _otherwise(f"metrics.jsonl: step {step} ends", end, ends.get(step))
        for step, age in self.starts.items():
            if (known := starts.get(step)) not in (None, age):
                yield (
                    f"metrics.jsonl: step {step} trains a group {age} versions after its first "
                    f"lease, but by the ledger the oldest was leased {known} versions before"
                )
        for step, trained in self.saved.items():
            end = ends.get(step)
            if end != trained.watermark:
                yield _otherwise(
                    f"the checkpoint of step {step} accounts for groups", trained.watermark, end
                )
            elif trained != accounts[step]:
                yield f"the checkpoint of step {step} skips other groups than the ledger's steps"
        if scoring is not None and isinstance(counts := self.certified.get("groups"), dict):
            known = counted(scoring)
            ledgers = {"proven": scoring.holds, "groups": known}
            groups = {name: counts.get(name) for name in known}
            certified = {"proven": self.certified.get("proven"), "groups": groups}
            if certified != ledgers:
                yield f"certificate.json records {certified}, but the ledger {ledgers}"


def _otherwise(what: str, end: int, ledgers: int | None) -> str:
    other = "does not contain that step" if ledgers is None else f"records below {ledgers}"
    return f"{what} below {end}, but the ledger {other}"
