"""Pushes of a teacher that follows the policy, to engines of its own.

It goes whole, over transports of its own, and no slot is freed. Engines that do not take it are
ended; their owner restarts them. Each call is made in a turn of the publisher's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.handles import calls
from cluster.supervision.failures import dead_among
from cluster.weights.attempt import Attempt
from cluster.weights.checks import Answers
from cluster.weights.push_settings import PushSettings
from cluster.weights.transport import Transport
from cluster.weights.transports import choose_transports
from distill.errors import EngineError
from distill.pace import Progress
from distill.weights.model_weights import Weights

logger = logging.getLogger(__name__)


class TeacherPushes:
    """The teacher's engines, the ways to them, and the proof of what they hold."""

    def __init__(
        self,
        engines: Mapping[str, Any],
        settings: PushSettings,
        answers: Answers,
        progress: Progress,
    ) -> None:
        self._engines, self._settings = dict(engines), settings.for_teachers()
        self._answers, self._progress = answers, progress
        self._ways: list[Transport] | None = None
        self._proof = answers.proof(self._engines)

    def settle(self) -> float | None:
        """The share of parameters that are proven of the last push; raises as `PushProof`."""
        return self._proof.settle()

    def push(self, weights: Weights, version: int) -> dict[str, float]:
        """Hands the teacher to its engines, once what was pushed last is settled.

        Returns `push/teacher_seconds`.
        """
        started = time.perf_counter()
        if self._ways is None:
            self._end(dead_among(self._engines), version)
            self._ways = choose_transports(self._settings, self._engines)
        attempt = Attempt.begin(self._ways, weights, version, self._progress.mark)
        answers = attempt.answers(self._settings.timeout_s)
        if answers.failures:
            logger.warning("teacher version %d: %s", version, answers.complaint())
            self._end(list(answers.failures), version)
        if self._settings.is_proven(version) and self._engines:
            self._answers.begin()
            self._proof.ask(version, weights)
        return {"push/teacher_seconds": time.perf_counter() - started}

    def admit(self, engines: Mapping[str, Any], weights: Weights, version: int) -> None:
        """Hands the teacher to engines that join; they are part of every later push.

        Raises:
            EngineError: one of them did not take the weights; none of them joins.
        """
        ways = choose_transports(self._settings, engines)
        attempt = Attempt.begin(ways, weights, version, self._progress.mark)
        answers = attempt.answers(self._settings.timeout_s)
        if answers.failures:
            raise EngineError(f"teacher version {version} failed: {answers.complaint()}")
        self._engines |= engines
        self._ways = None

    def dismiss(self, names: Sequence[str]) -> None:
        """Drops engines: they get no more weights."""
        for name in names:
            self._engines.pop(name, None)
        self._ways = None

    def _end(self, names: Sequence[str], version: int) -> None:
        for name in names:
            logger.warning("%s did not take the teacher's version %d: it is ended", name, version)
            calls.kill(self._engines.pop(name))
            self._ways = None
