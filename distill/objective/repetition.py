"""Repetition within a response: the share of token runs that occurred earlier in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Length, in tokens, of a run. A run that occurs a second time is a repetition.
RUN = 8
# Base of the polynomial hash of a run, modulo 2^64.
_BASE = np.uint64(0x9E3779B97F4A7C15)


def repeated_share(parts: Sequence[npt.NDArray[np.integer]]) -> float:
    """Number of runs of `RUN` tokens that occurred earlier in the response, per token.

    The share is near 0 for prose and near 1 for a response in a loop. Each part is the tokens that
    were sampled in one segment; runs do not cross from one part into the next.
    """
    hashes = [_hashes(part_N) for part_N in parts if len(part_N) >= RUN]
    tokens = sum(len(part_N) for part_N in parts)
    if not hashes or not tokens:
        return 0.0
    runs_M = np.sort(np.concatenate(hashes))
    return np.count_nonzero(runs_M[1:] == runs_M[:-1]) / tokens


def _hashes(tokens_N: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Hash of each run: equal runs have equal hashes, and collisions are practically impossible."""
    tokens_N = tokens_N.astype(np.uint64)
    runs = len(tokens_N) - RUN + 1
    total_M = np.zeros(runs, np.uint64)
    for i in range(RUN):
        total_M = total_M * _BASE + tokens_N[i : i + runs] + np.uint64(1)
    return total_M
