"""Proof of a push: the engines' checksums of their weights, compared with what was sent.

    publisher    push version v -> acknowledged -> proof.ask(v, weights) ... next push: settle()
    engine                                         digests of all it holds, rank by rank

The weight probe (weight_probe.py) sees what moves log-probs; a step in bfloat16 at a small learning
rate moves them by less than its tolerance. A digest sees one bit. Each engine is compared with the
learner's weights, parameter by parameter, wherever it is known how the server makes it of them
(distill/weights/served_parameters.py), and with the other engines in everything. Knows neither Ray
nor the transport; see the two callables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from distill.errors import CalibrationError
from distill.weights.model_weights import Weights
from distill.weights.served_parameters import Digests, Recipe, expected_digests, find_recipes

logger = logging.getLogger(__name__)

Engine = TypeVar("Engine")
Pending = TypeVar("Pending")


@dataclass(frozen=True, slots=True, eq=False)
class _Asked(Generic[Pending]):
    version: int
    expected: Digests
    answers: dict[str, Pending]


class PushProof(Generic[Engine, Pending]):
    """Compares what every policy engine holds with what was sent, version by version."""

    def __init__(
        self,
        *,
        engines: Mapping[str, Engine],
        submit: Callable[[Engine], Pending],
        collect: Callable[[Pending], Digests | None],
    ) -> None:
        """
        Args:
            engines: the policy engines, by the name to call them, in whatever form `submit` takes.
            submit: asks an engine for its digests, without waiting.
            collect: waits for what `submit` returned; None if the engine is gone, or has none.
        """
        self._engines, self._submit, self._collect = engines, submit, collect
        self._recipes: dict[str, Recipe] | None = None
        self._ranks = 0
        self._asked: _Asked[Pending] | None = None

    def ask(self, version: int, weights: Weights) -> None:
        """Call when every engine has acknowledged `version`, before the learner's next step."""
        answers = self._answers()
        if self._recipes is None:
            self._learn(answers, weights)
        self._asked = _Asked(version, self.expected(weights), answers)

    def ask_for(self, version: int, expected: Digests) -> None:
        """`ask`, of weights of which it is known what the engines should say."""
        self._asked = _Asked(version, expected, self._answers())

    @property
    def knows_recipes(self) -> bool:
        """`expected` can be asked: the engines' parameters are known."""
        return self._recipes is not None

    def expected(self, weights: Weights) -> Digests:
        """Digests that the engines should have of these weights."""
        return expected_digests(self._recipes or {}, weights, self._ranks)

    def _answers(self) -> dict[str, Pending]:
        assert self._asked is None, "settle() comes first: an engine would answer for newer weights"
        return {name: self._submit(engine) for name, engine in self._engines.items()}

    def _learn(self, answers: Mapping[str, Pending], weights: Weights) -> None:
        """Finds out how the engines' parameters are made, of the first that answers."""
        served = next((d for a in answers.values() if (d := self._collect(a))), None)
        if served is None:
            return
        self._ranks, self._recipes = len(served), find_recipes(served, weights)
        unproven = served[0].keys() - self._recipes.keys()
        if unproven:
            logger.warning(
                "%d of %d parameters of the policy engines are not made of pushed weights in a way "
                "that is known here (%s, for one): engines are compared with one another in them",
                len(unproven),
                len(served[0]),
                min(unproven),
            )

    def settle(self) -> float | None:
        """Call before the next push and at the end. The share of parameters that are proven, of
        the engine with the fewest; None if nobody answered.

        Raises:
            CalibrationError: an engine does not hold the weights that it acknowledged.
        """
        if self._asked is None:
            return None
        asked, self._asked = self._asked, None
        answers = {
            name: served
            for name, answer in asked.answers.items()
            if (served := self._collect(answer))
        }
        shares = [self._share(asked, name, served) for name, served in answers.items()]
        self._compare(asked.version, answers)
        return min(shares, default=None)

    def _share(self, asked: _Asked[Pending], name: str, served: Digests) -> float:
        if len(served) != len(asked.expected):
            return 0.0
        for rank, (held, expected) in enumerate(zip(served, asked.expected, strict=True)):
            wrong = [n for n, value in expected.items() if held.get(n) != value]
            if wrong:
                raise CalibrationError(
                    f"{name} does not hold weights version {asked.version}: "
                    f"{_some(wrong)} of rank {rank} {'is' if len(wrong) == 1 else 'are'} not what "
                    "was sent, by checksum. The push did not arrive whole: a tensor was skipped, "
                    "or an older one kept"
                )
        return len(asked.expected[0]) / len(served[0])

    def _compare(self, version: int, answers: Mapping[str, Digests]) -> None:
        firsts: dict[int, str] = {}  # by the number of ranks: engines that are cut alike
        for name, served in answers.items():
            other = firsts.setdefault(len(served), name)
            for rank, (mine, others) in enumerate(zip(served, answers[other], strict=True)):
                wrong = sorted(
                    n for n in mine.keys() | others.keys() if mine.get(n) != others.get(n)
                )
                if wrong:
                    raise CalibrationError(
                        f"{name} and {other} hold different weights as version {version}: "
                        f"{_some(wrong)} of rank {rank} differ by checksum. The push did not "
                        "arrive whole at one of them"
                    )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
