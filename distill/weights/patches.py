"""Difference of two arrays of equal length: the changed positions, and the new values.

A patch takes the smallest of four forms. Of changed values it has the positions as the distance of
each from the one before, in a byte or in two; where a distance is larger than that, a value that
did not change comes between. Where many changed, a bit a value says which; where most did, all
values are there and no positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# Values as unsigned integers of their width: bits are compared, not numbers.
Bits = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patch:
    """New values of an array, and where they go.

    Attributes:
        form: what `where` holds: `steps` from one value to the next (uint8 or uint16, the first
            from -1), the bits of a `mask`, or nothing for `all` values.
        changed: number of values that differ.
    """

    form: Literal["steps", "mask", "all"]
    where: npt.NDArray[Any]
    values: Bits
    changed: int

    @property
    def nbytes(self) -> int:
        return self.where.nbytes + self.values.nbytes

    @classmethod
    def whole(cls, new: Bits) -> Patch:
        """One that needs no old values."""
        return cls(form="all", where=np.empty(0, np.uint8), values=new, changed=len(new))

    @classmethod
    def between(cls, old: Bits, new: Bits) -> Patch:
        """The smallest that makes `new` of `old`; one of all values is a view of `new`."""
        differs_N = old != new
        changed = int(np.count_nonzero(differs_N))
        if len(new) / 8 + changed * new.itemsize >= new.nbytes:
            return cls(form="all", where=np.empty(0, np.uint8), values=new, changed=changed)
        if 8 * changed >= len(new):  # a bit a value is less than a byte a change
            mask = np.packbits(differs_N)
            return cls(form="mask", where=mask, values=new[differs_N], changed=changed)
        gaps = np.diff(np.flatnonzero(differs_N), prepend=-1)
        where = min((_steps(gaps, width) for width in (np.uint8, np.uint16)),
                    key=lambda steps: len(steps) * (steps.itemsize + new.itemsize))  # fmt: skip
        return cls(form="steps", where=where, values=new[_positions(where)], changed=changed)

    def apply(self, array: Bits) -> None:
        """Makes the new values of the old ones, in place."""
        if self.form == "all":
            array[:] = self.values
        elif self.form == "mask":
            array[np.unpackbits(self.where, count=len(array)).view(np.bool_)] = self.values
        else:
            array[_positions(self.where)] = self.values


def _steps(gaps: npt.NDArray[np.int64], width: type[np.uint8 | np.uint16]) -> npt.NDArray[Any]:
    """The same distances in steps of which none is larger than fits."""
    longest = np.iinfo(width).max
    before = (gaps - 1) // longest  # steps of full length, to values that did not change
    steps = np.full(len(gaps) + int(before.sum()), longest, width)
    steps[np.cumsum(before + 1) - 1] = gaps - before * longest
    return steps


def _positions(steps: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.cumsum(steps, dtype=np.int64) - 1
