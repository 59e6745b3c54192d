"""Weights in shared memory: what another process reads is what was written last."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import distill.shared_memory
from distill.errors import EngineError
from distill.shared_memory import SharedBlock, SharedTensors
from distill.tensors import first_non_finite
from distill.weights import HeldWeights


def tensors(fill: float) -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.full((3, 5), fill),
        "transposed": torch.full((3, 5), fill).T,
        "half": torch.full((7,), fill, dtype=torch.bfloat16),
        "nothing": torch.zeros(0, 4),
    }


def held(fill: float) -> HeldWeights:
    return HeldWeights(tensors(fill))


def read_elsewhere(shared: SharedTensors) -> dict[str, torch.Tensor]:
    """What a process that is no child of this one's sharing reads."""
    program = (
        "import pickle, sys, torch; shared = pickle.load(sys.stdin.buffer); "
        "read = {name: tensor.clone() for name, tensor in shared.unpack().items()}; "
        "torch.save(read, sys.stdout.buffer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(shared), capture_output=True, check=True
    )
    return torch.load(io.BytesIO(done.stdout))


def test_another_process_reads_what_was_written_last() -> None:
    block = SharedBlock()
    for fill in (1.0, 2.0, 3.0):
        block.write(held(fill))
        readers = [block.share(), block.share()]
        for shared in readers:
            read = read_elsewhere(shared)
            for name, expected in tensors(fill).items():
                assert torch.equal(read[name], expected) and read[name].dtype == expected.dtype
                assert shared.shapes[name] == tuple(expected.shape)


def test_a_block_grows_and_is_kept() -> None:
    block = SharedBlock()
    block.write(held(1.0))
    first = block._block
    block.write(held(3.0))
    assert block._block is first
    block.write(HeldWeights({"w": torch.ones(1000)}))
    assert block._block is not first
    assert torch.equal(block.share().unpack()["w"], torch.ones(1000))


def test_no_room_is_an_error_and_not_a_bus_error(monkeypatch: pytest.MonkeyPatch) -> None:
    full: Callable[..., object] = lambda _: type("Usage", (), {"free": 10})  # noqa: E731
    monkeypatch.setattr(distill.shared_memory.shutil, "disk_usage", full)
    with pytest.raises(EngineError, match="do not fit into /dev/shm"):
        SharedBlock().write(held(1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found(bad: float) -> None:
    good = tensors(2.0) | {"huge": torch.full((9,), 3e38)}  # its sum overflows
    assert first_non_finite(good) is None
    spoilt = good | {"w": torch.ones(50)}
    spoilt["w"][49] = bad
    assert first_non_finite(spoilt) == "w"
