"""Weights as changes: a receiver has the sender's bits, or refuses."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distill.errors import EngineError
from distill.weights.delta import ReceivedWeights, SentWeights, WeightDelta
from distill.weights.model_weights import HeldWeights
from distill.weights.patches import Patch

SHAPES = {"matrix": (60, 70), "odd": (7, 3), "nothing": (0, 4), "vector": (900,)}


@pytest.fixture(autouse=True)
def _small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.weights.shared_memory.COPY_BYTES", 4000)
    monkeypatch.setattr("distill.weights.shared_memory.PIECE_BYTES", 800)


def model(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }
    return made | {"router": torch.randn(9, generator=generator)}  # never rounded


def train(weights: dict[str, Tensor], seed: int, share: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        moved = torch.rand(tensor.shape, generator=generator) < share
        tensor[moved] += 1


def expect(
    received: ReceivedWeights, delta: WeightDelta | None, weights: dict[str, Tensor]
) -> None:
    assert delta is not None
    made = received.take(pickle.loads(pickle.dumps(delta, protocol=5))).unpack()
    assert made.keys() == weights.keys()
    for name, tensor in weights.items():
        assert made[name].dtype == tensor.dtype and torch.equal(made[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_changes_upon_changes_all_bits_are_there(dtype: torch.dtype) -> None:
    weights, sent, received = model(dtype), SentWeights(), ReceivedWeights()
    sent.advance(HeldWeights(weights), 0)
    assert sent.delta() is None and sent.changed_share is None
    expect(received, sent.whole(), weights)
    whole = sent.whole().nbytes
    for version in range(1, 6):
        before = {name: tensor.clone() for name, tensor in weights.items()}
        train(weights, version)
        sent.advance(HeldWeights(weights), version)
        delta = sent.delta()
        expect(received, delta, weights)
        assert delta is not None and delta.nbytes < whole / 4
        changed = sum(int((weights[n] != before[n]).sum()) for n in weights)
        values = sum(tensor.numel() for tensor in weights.values())
        assert sent.changed_share == changed / values
    expect(ReceivedWeights(), sent.whole(), weights)


def test_pieces_that_changed_altogether_among_others() -> None:
    """Of these all values are sent, of those some."""
    weights, sent, received = model(torch.bfloat16), SentWeights(), ReceivedWeights()
    sent.advance(HeldWeights(weights), 0)
    expect(received, sent.whole(), weights)
    for version in (1, 2):
        train(weights, version)
        weights["vector"] += 1
        weights["router"] += 1
        sent.advance(HeldWeights(weights), version)
        delta = sent.delta()
        assert delta is not None and {patch.form for patch in delta.patches} >= {"all", "steps"}
        expect(received, delta, weights)


def test_weights_that_did_not_change_are_nothing() -> None:
    weights, sent, received = model(torch.bfloat16), SentWeights(), ReceivedWeights()
    sent.advance(HeldWeights(weights), 0)
    expect(received, sent.whole(), weights)
    sent.advance(HeldWeights(weights), 1)
    delta = sent.delta()
    expect(received, delta, weights)
    assert delta is not None and delta.nbytes == 0 and sent.changed_share == 0


def test_where_all_changed_there_is_no_change_to_send() -> None:
    weights, sent = model(torch.float32), SentWeights()
    sent.advance(HeldWeights(weights), 0)
    train(weights, 1, share=1.0)
    sent.advance(HeldWeights(weights), 1)
    assert sent.delta() is None and sent.changed_share is not None and sent.changed_share > 0.9
    expect(ReceivedWeights(), sent.whole(), weights)


def test_other_tensors_are_sent_whole() -> None:
    weights, sent, received = model(torch.bfloat16), SentWeights(), ReceivedWeights()
    sent.advance(HeldWeights(weights), 0)
    expect(received, sent.whole(), weights)
    del weights["odd"]
    sent.advance(HeldWeights(weights), 1)
    assert sent.delta() is None
    expect(received, sent.whole(), weights)


def sent_twice() -> tuple[dict[str, Tensor], SentWeights, WeightDelta, WeightDelta]:
    """Weights, who sent them, version 1 whole and version 2 as a change of it."""
    weights, sent = model(torch.bfloat16), SentWeights()
    sent.advance(HeldWeights(weights), 1)
    whole = pickle.loads(pickle.dumps(sent.whole()))
    train(weights, 2)
    sent.advance(HeldWeights(weights), 2)
    delta = sent.delta()
    assert delta is not None
    return weights, sent, whole, delta


def test_a_change_of_weights_that_are_not_held_is_refused() -> None:
    weights, sent, whole, delta = sent_twice()
    received = ReceivedWeights()
    with pytest.raises(EngineError, match=r"version 2 came as a change of version 1, which this"):
        received.take(delta)
    received.take(whole)
    expect(received, delta, weights)
    with pytest.raises(EngineError, match="no copy of"):  # it is of version 1, and 2 is held
        received.take(delta)
    train(weights, 3)
    sent.advance(HeldWeights(weights), 3)
    expect(received, sent.delta(), weights)  # and what is held was left alone


def test_what_is_not_what_was_sent_is_refused() -> None:
    """One bit of the copy, of a patch's values, or of its positions."""
    weights, sent, whole, delta = sent_twice()
    first, *others = delta.patches
    values, where = first.values.copy(), first.where.copy()
    values[0] ^= 1
    where[3] += 1
    for wrong in (replace(first, values=values), replace(first, where=where)):
        received = ReceivedWeights()
        received.take(whole)
        with pytest.raises(EngineError, match="version 2 is not what was sent, by checksum"):
            received.take(replace(delta, patches=(wrong, *others)))
        with pytest.raises(EngineError, match="no copy of"):  # of what is left nothing is made
            received.take(delta)
        expect(received, sent.whole(), weights)
    received = ReceivedWeights()
    received.take(whole)
    next(received._block.pieces())[5] ^= 1
    with pytest.raises(EngineError, match="by checksum"):
        received.take(delta)


def test_a_sender_that_fails_midway_sends_whole_weights_next() -> None:
    weights, sent = model(torch.bfloat16), SentWeights()
    sent.advance(HeldWeights(weights), 0)

    class Breaks(HeldWeights):
        def gather(self, names):
            if "vector" in names:
                raise RuntimeError("a worker is gone")
            return super().gather(names)

    train(weights, 1)
    with pytest.raises(RuntimeError):
        sent.advance(Breaks(weights), 1)
    sent.advance(HeldWeights(weights), 1)
    assert sent.delta() is None
    expect(ReceivedWeights(), sent.whole(), weights)


def test_a_whole_patch_is_a_view() -> None:
    sent = SentWeights()
    sent.advance(HeldWeights(model(torch.float32)), 0)
    whole = sent.whole()
    assert all(isinstance(patch, Patch) and patch.form == "all" for patch in whole.patches)
    assert not any(patch.values.flags.owndata for patch in whole.patches)
