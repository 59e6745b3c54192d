"""Weights between processes: same names, types, shapes and bits; views where no copy is needed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from distill.errors import DataError
from distill.weights.tensors import PackedTensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {str(d): (100 * torch.randn(3, 4, generator=generator)).to(d) for d in DTYPES}
    return drawn | {
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "transposed": drawn["torch.float32"].T,
        "special": torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_bit_for_bit_through_a_pickle(protocol: int) -> None:
    given = weights()
    came = pickle.loads(pickle.dumps(PackedTensors.pack(given), protocol))
    unpacked = list(came.unpack())
    assert [name for name, _ in unpacked] == list(given)
    for name, tensor in unpacked:
        assert (tensor.dtype, tensor.shape) == (given[name].dtype, given[name].shape)
        if tensor.numel():
            assert bits(tensor) == bits(given[name]), name
        assert not tensor.requires_grad


def test_nbytes_is_what_the_tensors_hold() -> None:
    given = weights()
    expected = 0
    for tensor in given.values():
        expected += tensor.numel() * tensor.element_size()
    assert PackedTensors.pack(given).nbytes == expected


def test_contiguous_cpu_tensors_are_viewed() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    [(_, came)] = PackedTensors.pack({"w": tensor}).unpack()
    assert came.data_ptr() == tensor.data_ptr()
    [(_, copied)] = PackedTensors.pack({"w": tensor.T}).unpack()
    assert copied.data_ptr() != tensor.data_ptr()
    assert copied.tolist() == tensor.T.tolist()


def test_buffers_leave_a_pickle_out_of_band() -> None:
    packed = PackedTensors.pack({"w": torch.arange(6.0)})
    buffers: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(packed, 5, buffer_callback=buffers.append)
    assert [np.frombuffer(buffer, np.float32).tolist() for buffer in buffers] == [
        [0, 1, 2, 3, 4, 5]
    ]
    assert len(frame) < 1000


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.complex64])
def test_an_unknown_type_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(DataError):
        PackedTensors.pack({"w": torch.zeros(2, dtype=dtype)})
