"""Notices a run whose reverse KL rises, from the start or after a fall: its steps are too large."""

from __future__ import annotations

from collections.abc import Mapping

# Steps that are averaged, about; how many are its beginning; and before which nothing is said.
_SPAN, _BEGINNING, _FIRST = 8, 3, 24
# It fell to less than this share of its start, and has risen by this factor.
_FALLEN, _RISEN = 0.7, 1.6
# What goes with it when it is no chance, unless it is that much above its start: gradients that
# have grown by this factor, or an entropy that has moved by so many nats.
_GROWN, _MOVED = 3.0, 0.5
_WATCHED = _KL, _GRADIENT, _ENTROPY = "opd/reverse_kl", "train/grad_norm", "train/entropy"


class KlTurn:
    """Watches the steps' metrics; speaks once."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._steps = 0
        self._first = self._least = float("inf")
        self._then: dict[str, float] = {}
        self._least_step = 0
        self._said = False

    def see(self, metrics: Mapping[str, float]) -> str | None:
        """What to say of the step, if its KL has turned."""
        if self._said or not metrics.keys() >= set(_WATCHED):
            return None
        self._steps += 1
        weight = max(1 / self._steps, 1 / _SPAN)  # a plain mean, until there are enough of them
        for name in _WATCHED:
            mean = self._means.get(name, metrics[name])
            self._means[name] = mean + weight * (metrics[name] - mean)
        kl, step = self._means[_KL], int(metrics["step"])
        if self._steps == _BEGINNING:
            self._first = kl
        if self._steps >= _SPAN and kl < self._least:
            self._least, self._least_step, self._then = kl, step, dict(self._means)
        if self._steps < _FIRST or not self._has_turned(kl):
            return None
        self._said = True
        grown = self._means[_GRADIENT] / max(self._then[_GRADIENT], 1e-12)
        moved = self._means[_ENTROPY] - self._then[_ENTROPY]
        return (
            f"step {step}: the reverse KL has risen to {kl:.3g}, from {self._first:.3g} at the "
            f"start and {self._least:.3g} at step {self._least_step} (means of {_SPAN} steps; "
            f"since then gradient norm x {grown:.1f}, entropy {moved:+.2f} nats): the updates are "
            "too large. Begin another out= with a third of the lr, with larger steps "
            "(prompts_per_step), or with estimator=full or top_k, whose gradients have less noise"
        )

    def _has_turned(self, kl: float) -> bool:
        if kl <= _RISEN * self._least:
            return False
        if kl > _RISEN * self._first:
            return True
        grown = self._means[_GRADIENT] > _GROWN * self._then[_GRADIENT]
        moved = abs(self._means[_ENTROPY] - self._then[_ENTROPY]) > _MOVED
        return self._least < _FALLEN * self._first and (grown or moved)
