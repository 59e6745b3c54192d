"""Weights in shared memory: another process reads the last written values."""

import gc
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

import distill.weights.shared_memory
from distill.errors import EngineError
from distill.weights.model_weights import HeldWeights, first_non_finite
from distill.weights.shared_memory import SharedBlock, SharedTensors
from tests.full_disk import files_of_at_most
from tests.leftovers import shared_memory_of


def tensors(fill: float) -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.full((3, 5), fill), "transposed": torch.full((3, 5), fill).T,
        "half": torch.full((7,), fill, dtype=torch.bfloat16), "nothing": torch.zeros(0, 4),
    }  # fmt: skip


def held(fill: float) -> HeldWeights:
    return HeldWeights(tensors(fill))


def read_elsewhere(shares: list[SharedTensors]) -> list[dict[str, torch.Tensor]]:
    """Tensors as read by a process that is not a child sharing memory with this one."""
    program = (
        "import pickle, sys, torch; shares = pickle.load(sys.stdin.buffer); "
        "read = [{name: t.clone() for name, t in shared.unpack().items()} for shared in shares]; "
        "torch.save(read, sys.stdout.buffer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(shares), capture_output=True, check=True
    )
    return torch.load(io.BytesIO(done.stdout))


def test_another_process_reads_the_last_written_values() -> None:
    block = SharedBlock()
    for fill in (1.0, 2.0):
        block.write(held(fill))
    shares = [block.share(), block.share()]
    for shared, read in zip(shares, read_elsewhere(shares), strict=True):
        for name, expected in tensors(2.0).items():
            assert torch.equal(read[name], expected) and read[name].dtype == expected.dtype
            assert shared.shapes[name] == tuple(expected.shape)


def test_a_block_grows_and_is_kept() -> None:
    block = SharedBlock()
    block.write(held(1.0))
    first = block.share()
    block.write(held(3.0))
    assert block.share() == first
    block.write(HeldWeights({"w": torch.ones(1000)}))
    assert block.share().identity != first.identity
    assert torch.equal(block.share().unpack()["w"], torch.ones(1000))


def test_a_reader_cannot_spoil_it_for_others() -> None:
    block = SharedBlock()
    block.write(held(1.0))
    spoilt = block.share().unpack()
    spoilt["matrix"].fill_(9.0)
    assert torch.equal(block.share().unpack()["matrix"], tensors(1.0)["matrix"])


# Shares a block, says so, and waits to be killed.
WRITER = """
import pickle, sys, torch
from distill.weights.shared_memory import SharedBlock
from distill.weights.model_weights import HeldWeights

block = SharedBlock()
block.write(HeldWeights({"w": torch.arange(5.0)}))
sys.stdout.buffer.write(pickle.dumps(block.share()))
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()


def test_a_killed_writer_leaves_nothing_and_takes_nothing(writer: subprocess.Popen[bytes]) -> None:
    """No name in /dev/shm, no helper process; processes with the memory keep it, others fail."""
    assert writer.stdout is not None
    shared: SharedTensors = pickle.load(writer.stdout)
    assert not shared_memory_of(writer.pid)
    assert not psutil.Process(writer.pid).children()
    read = shared.unpack()
    with shared.held() as own:
        writer.kill()
        writer.wait()
        assert torch.equal(read["w"], torch.arange(5.0))
        assert torch.equal(own.unpack()["w"], torch.arange(5.0))
        with pytest.raises(EngineError):
            shared.unpack()
    with pytest.raises(EngineError):
        own.unpack()


def test_a_path_that_means_another_file_by_now(tmp_path: Path) -> None:
    block = SharedBlock()
    block.write(held(1.0))
    other = tmp_path / "other"
    other.write_bytes(bytes(4096))
    with pytest.raises(EngineError):
        replace(block.share(), path=str(other)).unpack()


def open_blocks() -> int:
    """Descriptors of this process's blocks; its other threads open and close other files."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(os.readlink(descriptor))
    return sum("isotherm-weights" in link for link in links)


def test_blocks_that_are_dropped_are_closed() -> None:
    gc.collect()  # blocks of other tests
    before = open_blocks()
    for fill in (1.0, 2.0):
        block = SharedBlock()
        block.write(held(fill))
        assert open_blocks() > before
        block.share().unpack()
    del block
    assert open_blocks() == before


def test_no_room_is_an_error_and_not_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill.weights.shared_memory, "free_main_memory", lambda: 10)
    with pytest.raises(EngineError):
        SharedBlock().write(held(1.0))


def test_a_limit_on_the_size_of_a_file_is_named() -> None:
    with files_of_at_most(1), pytest.raises(EngineError, match="ulimit -f"):
        SharedBlock().write(held(1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_found(bad: float) -> None:
    good = tensors(2.0) | {"huge": torch.full((9,), 3e38)}  # its sum overflows
    assert first_non_finite(good) is None
    spoilt = good | {"w": torch.ones(50)}
    spoilt["w"][49] = bad
    assert first_non_finite(spoilt) == "w"


def test_portions_are_the_same_tensors_and_map_no_more_than_their_own() -> None:
    named = {f"{i}": torch.full((3, 700), float(i)) for i in range(9)}
    block = SharedBlock()
    block.write(HeldWeights(named))
    whole = block.share()
    portions = whole.portions(2 * named["0"].nbytes)
    assert [list(portion.shapes) for portion in portions] == [
        ["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"], ["8"],
    ]  # fmt: skip
    for portion in portions:
        read = portion.unpack()
        assert list(read) == list(portion.shapes)
        for name, tensor in read.items():
            assert torch.equal(tensor, named[name])
        mapped = next(iter(read.values())).untyped_storage().nbytes()
        assert mapped < 3 * named["0"].nbytes
    assert [p.layouts for p in portions[1].portions(1)] == [(p,) for p in portions[1].layouts]
    assert torch.equal(portions[1].portions(1)[1].unpack()["3"], named["3"])
    assert whole.portions(1 << 30) == [whole]
