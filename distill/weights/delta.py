"""Weights as changes against the version sent before, for slow networks.

    sender      sent.advance(weights, version)   keeps the weights sent, and computes the change
                sent.delta(), sent.whole()       for receivers with the previous version, for others
    receiver    received.take(delta)             patches its own copy, which any process can read

In bfloat16 an update at a small learning rate leaves most values unchanged. Both sides keep a whole
copy in main memory; each patch changes one piece of its tensors. The receiver's result must have
the sender's digest: a result on another base, or with a byte lost, is rejected.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distill.errors import EngineError
from distill.weights.digests import checksum
from distill.weights.model_weights import Weights
from distill.weights.patches import Patch
from distill.weights.shared_memory import SharedBlock, SharedTensors
from distill.weights.tensors import TensorLayout, layout_digest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightDelta:
    """Weights as patches of another version, or whole.

    Attributes:
        version: version of the resulting weights; `result` is their digest.
        base: digest of the weights that the patches apply to; None: the weights are whole.
        base_version: version under which the base was sent.
        layouts: layouts of whole weights; a change has its base's layouts.
        patches: one for each piece of the tensors, in order.
    """

    version: int
    result: str
    base: str | None
    base_version: int | None
    layouts: tuple[TensorLayout, ...]
    patches: tuple[Patch, ...]

    @property
    def nbytes(self) -> int:
        return sum(patch.nbytes for patch in self.patches)


class SentWeights:
    """Copy of the weights that were sent last."""

    def __init__(self) -> None:
        self._block = SharedBlock()
        self._checksums: list[str] = []
        self.version = 0  # of the copy
        self._delta: WeightDelta | None = None
        self.digest: str | None = None  # of the copy; None: there is none
        self.changed_share: float | None = None  # of values, by the last `advance`

    def advance(self, weights: Weights, version: int) -> None:
        """Replace the copy with these weights, which must be finite, and record the change.

        Raises:
            EngineError: there is no room for the copy in memory.
        """
        before, of = self.digest, self.version
        self.digest = self._delta = self.changed_share = None  # if this fails, the copy is mixed
        layouts = tuple(weights.layouts)
        if before is None or layouts != self._block.layouts:
            self._block.write(weights)
            self._checksums = [checksum(piece) for piece in self._block.pieces()]
            self.version, self.digest = version, _digest(layouts, self._checksums)
            return
        patches = []
        for i, (old, new) in enumerate(self._block.rewrite(weights)):
            patch = Patch.between(old, new)
            if patch.changed:
                self._checksums[i] = checksum(new)
            if patch.form == "all":  # old's memory holds the new values from the next piece on
                patch = replace(patch, values=old)
            patches.append(patch)
        self.version, self.digest = version, _digest(layouts, self._checksums)
        values = sum(len(piece) for piece in self._block.pieces())
        self.changed_share = sum(patch.changed for patch in patches) / max(1, values)
        self._delta = WeightDelta(
            version=version,
            result=self.digest,
            base=before,
            base_version=of,
            layouts=(),
            patches=tuple(patches),
        )

    def delta(self) -> WeightDelta | None:
        """Change made by the last `advance`, valid until the next one.

        None if there were no earlier weights, or if the change is not smaller than the whole.
        """
        if self._delta is None or self._delta.nbytes >= sum(t.nbytes for t in self._block.layouts):
            return None
        return self._delta

    def whole(self) -> WeightDelta:
        """The whole copy, as views that are valid until the next `advance`."""
        assert self.digest is not None, "nothing was sent yet"
        return WeightDelta(
            version=self.version,
            result=self.digest,
            base=None,
            base_version=None,
            layouts=self._block.layouts,
            patches=tuple(map(Patch.whole, self._block.pieces())),
        )


class ReceivedWeights:
    """Copy of the weights received last, in memory that processes of this machine share."""

    def __init__(self) -> None:
        self._block = SharedBlock()
        self._digest: str | None = None  # None: no weights that a change could apply to
        self._lock = threading.Lock()

    def take(self, delta: WeightDelta) -> SharedTensors:
        """Apply the delta, and return the resulting weights; readable until the next call.

        Raises:
            EngineError: the base is not the copy held here, or the result differs from what was
                sent. Sending whole weights is the remedy.
        """
        with self._lock:
            if delta.base is not None and delta.base != self._digest:
                raise EngineError(
                    f"weights version {delta.version} came as a change of version "
                    f"{delta.base_version}, which this engine has no copy of; the engine goes on "
                    "with the weights it had"
                )
            self._digest = None
            if delta.base is None:
                self._block.reserve(delta.layouts)
            checksums = []
            for piece, patch in zip(self._block.pieces(), delta.patches, strict=True):
                patch.apply(piece)
                checksums.append(checksum(piece))
            found = _digest(self._block.layouts, checksums)
            if found != delta.result:
                raise EngineError(
                    f"what was made of weights version {delta.version} is not what was sent, by "
                    "checksum; the engine goes on with the weights it had"
                )
            self._digest = found
            return self._block.share()


def _digest(layouts: Sequence[TensorLayout], checksums: Sequence[str]) -> str:
    told = f"{layout_digest(layouts)} {checksums}"
    return hashlib.sha256(told.encode()).hexdigest()
