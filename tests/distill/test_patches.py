"""Patches: what is made of the old values has the bits of the new ones, in the fewest bytes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.weights.patches import Patch

WIDTHS = (np.uint16, np.uint32)


def arrays(size: int, share: float, width: type, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Old values, and new ones of which about this share differ."""
    random = np.random.default_rng(seed)
    old = random.integers(0, np.iinfo(width).max, size).astype(width)
    new = np.where(random.random(size) < share, old + width(1), old)
    return old, new.astype(width)


def rebuilt(old: np.ndarray, patch: Patch) -> np.ndarray:
    made = old.copy()
    pickle.loads(pickle.dumps(patch)).apply(made)
    return made


def fewest_bytes(old: np.ndarray, new: np.ndarray) -> float:
    """Of all forms, one value after the other."""
    width = new.itemsize
    changed = [i for i in range(len(new)) if old[i] != new[i]]
    forms = [len(new) * width, -(-len(new) // 8) + len(changed) * width]
    for step in (1, 2):
        longest, at, steps = 256**step - 1, -1, 0
        for i in changed:
            while i - at > longest:
                at, steps = at + longest, steps + 1
            at, steps = i, steps + 1
        forms.append(steps * (step + width))
    return min(forms)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "share, form",
    [(0, "steps"), (1e-4, "steps"), (0.01, "steps"), (0.1, "steps"), (0.2, "mask"), (0.5, "mask"),
     (0.99, "all"), (1, "all")],
)  # fmt: skip
def test_the_form_that_is_smallest(share: float, form: str, width: type) -> None:
    old, new = arrays(70_000, share, width)
    patch = Patch.between(old, new)
    assert patch.form == form and patch.changed == (old != new).sum()
    assert patch.nbytes == fewest_bytes(old, new)
    np.testing.assert_array_equal(rebuilt(old, patch), new)


@given(
    size=st.integers(0, 900),
    share=st.sampled_from([0.0, 0.002, 0.05, 0.124, 0.2, 0.9, 1.0]),
    width=st.sampled_from(WIDTHS),
    seed=st.integers(0, 1000),
)
def test_every_patch_makes_the_new_values(size: int, share: float, width: type, seed: int) -> None:
    old, new = arrays(size, share, width, seed)
    np.testing.assert_array_equal(rebuilt(old, Patch.between(old, new)), new)
    np.testing.assert_array_equal(rebuilt(np.zeros_like(old), Patch.whole(new)), new)


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 510, 511, 65534, 65535, 65536, 200_000])
def test_distances_of_any_length(gap: int) -> None:
    old = np.zeros(2 * gap + 1, np.uint16)
    new = old.copy()
    new[[gap - 1, 2 * gap - 1]] = 7, 9
    patch = Patch.between(old, new)
    assert patch.nbytes == fewest_bytes(old, new) or gap == 1
    np.testing.assert_array_equal(rebuilt(old, patch), new)


def test_bits_are_compared_not_numbers() -> None:
    """A zero that changes its sign is a change, a NaN that stays is none."""
    old = np.array([0.0, np.nan] + [1.0] * 62, np.float32).view(np.uint32)
    new = np.array([-0.0, np.nan] + [1.0] * 62, np.float32).view(np.uint32)
    patch = Patch.between(old, new)
    assert patch.changed == 1 and patch.where.tolist() == [1]
    assert np.signbit(rebuilt(old, patch).view(np.float32)[0])
