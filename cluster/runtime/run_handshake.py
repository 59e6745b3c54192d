"""Handshakes of a run: of all parties before its first step, and of engines that join later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from actors.config import choose_dtype
from cluster.config.on_policy import RolloutConfig
from cluster.config.rollout_checks import RolloutInputs
from cluster.config.teachers import teacher_setting
from cluster.handles.engine_pool import EnginePool
from cluster.handshake.handshake import (
    ENGINE_DEADLINE_S,
    PARTS,
    Copy,
    HeadedTeacher,
    handshake,
    naming_heads,
    scored_by,
)
from cluster.placement.roles import EVALUATION, LEARNER, POLICY, served_teachers
from cluster.run_files.run_directory import RunDirectory
from cluster.run_files.tracking import agreement_table
from cluster.runtime.learner_alone import LearnerAlone
from distill.handshake.comparison import CalibrationReport
from distill.tokenizer import fingerprint, probe_tokenizer


class RunHandshake:
    """Compares the parties of a run on the same tokens."""

    def __init__(
        self,
        config: RolloutConfig,
        inputs: RolloutInputs,
        directory: RunDirectory,
        console: Console,
        print_line: Callable[[str], None],
    ) -> None:
        self._config, self._stops, self._states = config, inputs.stops, inputs.states
        self._directory, self._console, self._print_line = directory, console, print_line
        self._fingerprint = fingerprint(inputs.tokenizer)
        self._probe = probe_tokenizer(inputs.tokenizer)

    def before_steps(self, actors: LearnerAlone, scorers: Sequence[str]) -> None:
        """Compare the learner, all policy engines and those of `scorers`; write calibration.json.

        Raises:
            CalibrationError: parties disagree, unless `handshake=False`.
        """
        policies = actors.pool(POLICY).each() | actors.pool(EVALUATION).each()
        by_scorer = {
            name: pool for role in scorers for name, pool in actors.pool(role).each().items()
        }
        report = actors.driver.run("the handshake", self.examine(actors, policies, by_scorer))
        self._directory.write_json(
            "calibration.json",
            report.to_json()
            | {"tokenizer": asdict(self._fingerprint), "stop_tokens": self._stops.to_json()}
            | ({"learner": "none: rollout_only=True"} if self._config.only_keeps else {}),
        )
        if report.agrees:
            without = ", without a learner" if self._config.only_keeps else ""
            self._print_line(
                f"handshake: all parties agree to {report.largest_gap:.1e} nats "
                f"at T={self._config.sampling.temperature:g}{without}"
            )
            return
        self._console.print(agreement_table(report))
        if self._config.verify.handshake:
            report.require_agreement()
        doing = "keeping groups" if self._config.only_keeps else "training"
        self._console.print(
            Text(
                f"WARNING: {doing} although the handshake failed (handshake=False); the objective "
                "is not KL(p_T || q_T)",
                "bold red",
            ),
            f". {report.message()}",
            sep="",
        )

    async def examine(
        self,
        actors: LearnerAlone,
        policies: Mapping[str, EnginePool],
        scorers: Mapping[str, EnginePool],
        reference: EnginePool | None = None,
    ) -> CalibrationReport:
        """Handshake of some engines with the learner, and with its teachers and their heads.

        Args:
            reference: a policy engine that scores in place of the learner.
        """
        learner, answer = actors.learner, actors.driver.answer

        async def logprobs(rows_D: Any) -> Any:
            asked = learner.logprobs.remote(rows_D)
            return await answer("scoring by the learner", asked, LEARNER)

        learner_logprobs = None if self._config.only_keeps else logprobs
        if self._config.only_keeps and reference is None:  # a proven engine replaces it
            proven = actors.pool(POLICY).each()
            reference = next((proven[name] for name in proven if name not in policies), None)

        async def copied_logprobs(teacher: str, rows_D: Any) -> Any:
            asked = learner.teacher_logprobs.remote(teacher, rows_D)
            return await answer("scoring by the learner's teacher", asked, LEARNER)

        copies: dict[str, Copy] = {}
        teachers: dict[str, Any] = dict(scorers)
        heads: dict[str, str] = {}
        follows = self._config.teacher_rule is not None
        for name, role in served_teachers(self._config).items():
            engines = [engine for engine in scorers if engine.startswith(f"{role} engine ")]
            by_learner = partial(copied_logprobs, name)
            if name in self._config.copied_teachers or follows:
                for engine in engines if follows else engines[:1]:
                    copies[engine] = Copy(f"the learner's copy of {engine}", by_learner)
            if path := self._config.teacher_heads.get(name):
                heads |= dict.fromkeys(engines, f"{teacher_setting(name)}.head={path}")
                for engine in engines:
                    teachers[engine] = HeadedTeacher(scorers[engine], by_learner)
                    if self._states[name] == "also":
                        own = Copy(
                            f"{engine} without the learner's head", scored_by(scorers[engine])
                        )
                        copies[engine] = own
        report = await handshake(
            policies=policies,
            teachers=teachers,
            learner=learner_logprobs if reference is None else scored_by(reference),
            tokenizer=self._probe,
            temperature=self._config.sampling.temperature,
            learner_dtype=choose_dtype(self._config.learner.dtype, self._config.cluster.device),
            copies=copies,
            deadline_s=min(ENGINE_DEADLINE_S, self._config.cluster.no_progress_s / PARTS),
        )
        return naming_heads(report, heads)
