"""Checks of single pieces of the project, each timed separately; they need no server."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from actors.sglang.lent_weights import cuda_payload
from actors.sglang.plugin.listed_steps import ListedStep, Wanted, read_steps
from actors.sglang.plugin.row_temperatures import RequestRows, ScaledRows
from benchmarks.gpu.measure import held_bytes, peak_bytes, seconds
from benchmarks.gpu.setting import TEMPERATURE, Numbers, Setting, require
from distill.gpu import GIB
from distill.weights.digests import sum_by_kernel, sum_by_torch, tensor_checksum, word_sum
from distill.weights.lending import BucketLender, CudaMemory
from distill.weights.model_weights import TensorLayout

_CHILD_S = 60.0
# A process that reads a bucket as a server's rank does, and prints the sum of its first tensor.
_READER = """
import pickle, sys, torch
sent = pickle.load(open(sys.argv[1], "rb"))
first, flat = sent["metadata"][0], sent["flattened_tensor"]
print(flat[first.start_idx:first.end_idx].view(torch.float32).double().sum().item())
torch.cuda.synchronize()
del flat, sent  # a process that exits does not release the handle
"""


def plugin_cost(setting: Setting) -> Numbers:
    """Milliseconds and GiB of the plugin for some rows, against one log-softmax of them."""
    rows, vocab = setting.choose(64, 2048), setting.choose(5000, 151936)
    logits_NV = torch.randn(rows, vocab, device=setting.device)
    tokens_N = torch.randint(0, vocab, (rows,), device=setting.device)
    listed_NK = torch.randint(0, vocab, (rows - 1, 32), dtype=torch.int32)
    hidden_NH = torch.randn(rows, setting.choose(16, 4096), device=setting.device)

    def take(unscaled: bool, top: bool) -> None:
        scaled = ScaledRows(
            [RequestRows(0, rows, rows - 1, 0)], [TEMPERATURE],
            unscaled={0: ()} if unscaled else {}, vocab_size=vocab,
            device=logits_NV.device, listed={0: (listed_NK, 1)} if top else None,
        )  # fmt: skip
        scaled.take(logits_NV, tokens_N[:-1], hidden_NH)

    made: Numbers = {"log_softmax_ms": 1e3 * seconds(setting, lambda: logits_NV.log_softmax(1))}
    cases = {"scaled": (False, False), "unscaled": (True, False), "listed": (True, True)}
    for name, (unscaled, top) in cases.items():
        logits_NV.normal_()  # it divides in place
        made[f"{name}_ms"] = 1e3 * seconds(setting, lambda u=unscaled, t=top: take(u, t))
        made[f"{name}_gib"] = peak_bytes(setting, lambda u=unscaled, t=top: take(u, t)) / GIB
    return made


def digest_cost(setting: Setting) -> Numbers:
    """Seconds per GiB of the proof's digest and of the checksum, and of SGLang's hash."""
    size = setting.choose(1 << 20, 1 << 30)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device=setting.device)
    gib = size / GIB
    made: Numbers = {
        "digest_s_a_gib": seconds(setting, lambda: word_sum(data)) / gib,
        "digest_by_torch_s_a_gib": seconds(setting, lambda: sum_by_torch(data)) / gib,
        "checksum_s_a_gib": seconds(setting, lambda: tensor_checksum(data)) / gib,
    }
    if setting.cuda:
        require(torch.equal(sum_by_kernel(data), sum_by_torch(data)), "the kernel's sum differs")
    if setting.cuda and find_spec("sglang") is not None:
        from sglang.kernels.ops.memory.gpu_tensor_hash import (  # pyright: ignore[reportMissingImports]
            gpu_tensor_hash,
        )

        made["sglang_s_a_gib"] = seconds(setting, lambda: gpu_tensor_hash(data)) / gib
        require(word_sum(data) == gpu_tensor_hash(data), "SGLang's hash of the same bytes differs")
    return made


def top_k_decode(setting: Setting) -> Numbers:
    """Milliseconds that likeliest tokens add to a decode step: per request, and as one tensor."""
    rows, top = setting.choose(8, 256), setting.choose(5, 33)
    vocab = setting.choose(5000, 151936)
    logp_NV = torch.randn(rows, vocab, device=setting.device).log_softmax(1)

    def one_by_one() -> list[tuple[list[float], list[int]]]:
        values_NK, ids_NK = logp_NV.topk(top, dim=1)
        copies = [
            (values_NK[row].to("cpu", non_blocking=True), ids_NK[row].to("cpu", non_blocking=True))
            for row in range(rows)
        ]
        if setting.cuda:
            torch.cuda.synchronize()
        return [(values.tolist(), ids.tolist()) for values, ids in copies]

    def at_once() -> list[str | None]:  # as the plugin does, with two given tokens
        step = ListedStep([Wanted(top, (0, 1))] * rows)
        step.take(logp_NV)
        return [step[row] for row in range(rows)]

    texts = [text for text in at_once() if text is not None]
    given_NE, ids_NK, values_NK = read_steps(texts, 2, top)
    best_NK, best_ids_NK = logp_NV.topk(top, dim=1)
    same = given_NE.tolist() == logp_NV[:, :2].tolist() and values_NK.tolist() == best_NK.tolist()
    require(same and ids_NK.tolist() == best_ids_NK.tolist(), "the plugin lists other numbers")
    return {
        "top_k_ms": 1e3 * seconds(setting, lambda: logp_NV.topk(top, dim=1)),
        "one_by_one_ms": 1e3 * seconds(setting, one_by_one),
        "at_once_ms": 1e3 * seconds(setting, at_once),
    }


def grouped_products(setting: Setting) -> Numbers:
    """Milliseconds of a layer's experts by precision, and the one that autocast chooses."""
    experts, hidden, inner = (4, 64, 32) if setting.size == "tiny" else (128, 2048, 768)
    tokens = setting.choose(64, 8192) * 8
    weights = torch.randn(experts, hidden, inner, device=setting.device)
    inputs = torch.randn(tokens, hidden, device=setting.device)
    each = tokens // experts
    ends = torch.arange(1, experts + 1, device=setting.device, dtype=torch.int32) * each

    def product(x: Tensor, w: Tensor) -> Tensor:
        grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
        return grouped(x, w, offs=ends)  # as transformers' experts choose

    made: Numbers = {}
    for dtype in (torch.bfloat16, torch.float32):
        x, w, name = inputs.to(dtype), weights.to(dtype), str(dtype).removeprefix("torch.")
        try:
            made[f"{name}_ms"] = 1e3 * seconds(setting, lambda a=x, b=w: product(a, b))
        except RuntimeError as error:
            made[name] = f"refused: {error}"[:80]
    with torch.autocast(setting.device, dtype=torch.bfloat16):
        try:
            made["autocast_gives"] = str(product(inputs, weights).dtype)
        except RuntimeError as error:
            made["autocast_gives"] = f"refused: {error}"[:80]
    return made


def handles(setting: Setting) -> Numbers:
    """Lend a bucket three times to a process that receives only its handle."""
    tensors = {
        "large": torch.randn(setting.choose(1 << 10, 1 << 26), device=setting.device),
        "odd": torch.randn(3, 5, device=setting.device).bfloat16(),
    }
    layouts = [TensorLayout.of(name, tensor) for name, tensor in tensors.items()]
    truth = tensors["large"].double().sum().item()
    lender, held = BucketLender(setting.device), held_bytes(setting)
    for _ in range(3):
        [handle] = lender.lend(layouts, tensors.items(), 1)
        assert isinstance(handle, CudaMemory)
        # SGLang makes an index of the UUID; the plain reader takes an index.
        read = _sum_in_a_child(replace(handle, device=0))  # pyright: ignore[reportArgumentType]
        require(abs(read - truth) < 1e-3, f"the reader has {read}, and the lender {truth}")
    lender.take_back()
    left = held_bytes(setting) - held
    require(left == 0, f"{left >> 20} MiB are held after take_back")
    return {"gib": sum(layout.nbytes for layout in layouts) / GIB}


def _sum_in_a_child(handle: CudaMemory) -> float:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(cuda_payload(handle))
        done = subprocess.run(
            [sys.executable, "-c", _READER, file.name],
            capture_output=True, text=True, timeout=_CHILD_S, check=False,
        )  # fmt: skip
    require(done.returncode == 0, f"the reader failed: {done.stderr.strip()[-200:]}")
    return float(done.stdout)
