"""Size and least duration of a push at real model sizes: `python -m benchmarks.push_model`.

Computed from names and shapes by the code's own plan, without weights; nothing is measured. Seconds
are bytes over the network's nominal rate: a lower bound. docs/benchmarks/weights.md has the table,
and tests/cluster/test_push_model.py compares it with this module.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.sglang.lent_weights import cuda_payload
from actors.sglang.plugin.weight_loader import serialized_order
from distill.engine import CollectiveBroadcast, GroupMember
from distill.weights.lending import CudaMemory
from distill.weights.model_weights import (
    BUCKET_BYTES,
    TensorLayout,
    by_dtype,
    plan_buckets,
)
from distill.weights.shared_memory import SharedTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder, as in its config; `experts` of this width each, or one dense MLP."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    vocab: int
    experts: int = 0
    head_norms: bool = True
    head_dim: int = 128


MODELS = (
    Shape(name="Qwen3-8B", hidden=4096, layers=36, heads=32, kv_heads=8, width=12288, vocab=151936),
    Shape(
        name="Llama-3-70B", hidden=8192, layers=80, heads=64, kv_heads=8, width=28672,
        vocab=128256, head_norms=False,
    ),
    Shape(
        name="Qwen3-30B-A3B", hidden=2048, layers=48, heads=32, kv_heads=4, width=768,
        vocab=151936, experts=128,
    ),
    Shape(
        name="Qwen3-235B-A22B", hidden=4096, layers=94, heads=64, kv_heads=4, width=1536,
        vocab=151936, experts=128,
    ),
)  # fmt: skip


def layouts(shape: Shape) -> list[TensorLayout]:
    """Tensors of the checkpoint in bfloat16 by name, in the order of a push.

    Routers stay in float32 (`distill.models.checkpoint_names.exact_names`).
    """
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for i in range(shape.layers):
        made |= {f"model.layers.{i}.{n}.weight": s for n, s in _layer(shape).items()}
    made["model.norm.weight"] = (shape.hidden,)
    made["lm_head.weight"] = (shape.vocab, shape.hidden)
    return by_dtype(
        TensorLayout(name=n, dtype="float32" if ".mlp.gate." in n else "bfloat16", shape=s)
        for n, s in made.items()
    )


def _layer(shape: Shape) -> dict[str, tuple[int, ...]]:
    inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    made: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (inner, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, inner),
    }
    if shape.head_norms:
        made |= {f"self_attn.{n}_norm": (shape.head_dim,) for n in "qk"}
    mlps = [f"mlp.experts.{e}" for e in range(shape.experts)] or ["mlp"]
    if shape.experts:
        made["mlp.gate"] = (shape.experts, shape.hidden)
    for mlp in mlps:
        made |= {f"{mlp}.{n}_proj": (shape.width, shape.hidden) for n in ("gate", "up")}
        made[f"{mlp}.down_proj"] = (shape.hidden, shape.width)
    norms = ("input_layernorm", "post_attention_layernorm")
    return made | dict.fromkeys(norms, (shape.hidden,))


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """One push of these tensors to one server.

    Attributes:
        calls: number of requests that carry weights. A session has five more (pause, begin, end,
            continue, and joining a group once).
        extra_bytes: bytes that a rank holds beside its model while it loads: the largest bucket.
        told_group: bytes of the requests of a push by a group.
        told_memory: bytes of the requests of a push by shared memory, for one rank.
        told_ipc: bytes with which one rank opens the buckets of a push by CUDA IPC.
    """

    tensors: int
    nbytes: int
    calls: int
    extra_bytes: int
    told_group: int
    told_memory: int
    told_ipc: int

    def seconds(self, gbps: float) -> float:
        """Seconds to send the bytes at this rate, in Gb/s."""
        return 8 * self.nbytes / gbps / 1e9


def push_plan(tensors: Sequence[TensorLayout], bucket_bytes: int = BUCKET_BYTES) -> PushPlan:
    buckets = plan_buckets(tensors, bucket_bytes)
    member = GroupMember(
        address="10.0.0.1", port=12345, name="isotherm-0123456789abcdef", backend="nccl",
        world_size=9, rank=1, join_deadline_s=120.0, timeout_s=1800.0,
    )  # fmt: skip
    order = CollectiveBroadcast(member=member, number=1, buckets=buckets)
    shared = SharedTensors(layouts=(), path="/proc/12345/fd/67", identity=(1, 123456), offset=0)
    portions = [replace(shared, layouts=tuple(bucket)) for bucket in buckets]
    return PushPlan(
        tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        calls=len(buckets),
        extra_bytes=max(sum(tensor.nbytes for tensor in bucket) for bucket in buckets),
        told_group=len(pickle.dumps(order)),
        told_memory=sum(len(serialized_order(portion)) for portion in portions),
        told_ipc=sum(len(_payload(bucket)) for bucket in buckets),
    )


def _payload(bucket: Sequence[TensorLayout]) -> bytes:
    """Request with handles of the lengths that CUDA and torch create."""
    memory = CudaMemory(
        layouts=tuple(bucket), device=f"GPU-{'0' * 36}", handle=bytes(66), size=1 << 30, offset=0,
        counter=b"/torch_12345_1234567890_12", counter_offset=100, event=bytes(64),
        synchronises=True,
    )  # fmt: skip
    return cuda_payload(memory)


def rows() -> list[str]:
    """Table of docs/benchmarks/weights.md, one line per model."""
    made = []
    for shape in MODELS:
        plan = push_plan(layouts(shape))
        made.append(
            f"| {shape.name} | {plan.tensors:,} | {plan.nbytes / 1e9:.1f} GB | {plan.calls} | "
            f"{plan.extra_bytes / 2**30:.2f} GiB | {_size(plan.told_group)} | "
            f"{_size(plan.told_memory)} | {_size(plan.told_ipc)} | {plan.seconds(25):.1f} s | "
            f"{plan.seconds(400):.1f} s |"
        )
    return made


def _size(nbytes: int) -> str:
    """Two significant figures, since a pickle's size depends on shared strings."""
    unit, name = (1e3, "kB") if nbytes < 1e6 else (1e6, "MB")
    return f"{float(f'{nbytes / unit:.2g}'):g} {name}"


if __name__ == "__main__":
    print("\n".join(rows()))
