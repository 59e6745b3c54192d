"""Checks of the sharded learner: a step through learner.sharding with one worker, and its parts.

One GPU forms a group of one: gathers and reductions run, but move nothing between GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler
from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.gpu.measure import free_memory, peak_bytes, seconds, wait
from benchmarks.gpu.setting import TEMPERATURE, Numbers, Setting, named, require, rows_of
from benchmarks.peak import peak_flops
from distill.engine import JOINING, CollectiveBroadcast
from distill.gpu import GIB
from distill.models.attention_probe import shares_prefixes
from distill.models.vocabulary_head import VocabularyHead
from distill.objective.batching import TrainingRow, collate
from distill.objective.losses import StepCounts
from distill.objective.settings import ObjectiveConfig
from distill.weights.model_weights import HeldWeights
from learner.flops import ModelFlops
from learner.forward import Forward
from learner.pass_memory import ModelSize, PassMemory
from learner.policy_loss import PolicyObjectiveLoss
from learner.process_group import LOOPBACK, WorkerGroup, open_store
from learner.sharding import compile_layers, shard
from tests.tiny import VOCAB_SIZE

_LOSS = PolicyObjectiveLoss(objective=ObjectiveConfig())
_TIMEOUT_S = 60.0
_COMPUTE = torch.bfloat16
# Share of its plan that a pass may take.
_MARGIN = 1.15
# Parts of a kernel's or an operator's name, by what it is for; the first that fits.
_KINDS = {
    "reduce_scatter": ("reducescatter", "reduce_scatter"),
    "all_gather": ("allgather", "all_gather"),
    "attention": ("flash", "fmha", "attention", "flex"),
    "products": ("gemm", "nvjet", "xmma", "cutlass", "matmul", "::mm", "addmm", "bmm"),
    "softmax": ("softmax", "logsumexp"),
    "copies": ("memcpy", "copy"),
    # norms, rotary embeddings, activations, residuals
    "pointwise": ("elementwise", "reduce_kernel", "::mul", "::add", "::mean", "rsqrt", "silu"),
}


@contextmanager
def group_of_one(setting: Setting) -> Iterator[WorkerGroup]:
    """A worker group of one with the process groups of a group of several."""
    group = WorkerGroup(None, setting.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if setting.cuda else "gloo",
        store=open_store(LOOPBACK, _TIMEOUT_S), rank=0, world_size=1,
    )  # fmt: skip
    try:
        collectives = dist.new_group(backend="gloo")
        assert isinstance(collectives, dist.ProcessGroup)
        group.collectives, group.mesh = collectives, init_device_mesh(setting.device, (1,))
        yield group
    finally:
        dist.destroy_process_group()


class _Steps:
    """A model, with forward and backward passes of the learner's loss, without an optimizer.

    Attributes:
        parameters: their number.
        flops: FLOPs of its passes.
    """

    def __init__(self, model: Any, group: WorkerGroup | None, *, compiled: bool = False) -> None:
        """`group`: the model is sharded over it; None: unsharded, as with one worker."""
        self._device = model.device
        self.parameters = sum(p.numel() for p in model.parameters())
        self.flops = ModelFlops.of(model)
        shares, root = None, None
        if group is not None:
            model = model.cpu()  # as the leader has it
            shares = shares_prefixes(model.eval())
            if compiled:  # not before the probe: the learner compiles for its GPU alone
                compile_layers(model)
            root = shard(model, group, _COMPUTE)
        self._forward = Forward(
            model, dtype=_COMPUTE, gradient_checkpointing=True, root=root, shares=shares
        )
        self._model = model

    def step(self, rows: list[TrainingRow]) -> None:
        """Forward and backward pass on the rows; gradients are kept."""
        counts = StepCounts(tokens=sum(row.num_trained for row in rows), sequences=len(rows))
        loss, _ = _LOSS(self._forward, collate(rows, str(self._device)), counts)
        loss.backward()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._model.parameters():
            parameter.grad = None

    def measured(self, setting: Setting, rows: list[TrainingRow]) -> dict[str, float]:
        """Seconds, model TFLOP/s, MFU, and GiB at the peak above weights and gradients."""

        def step() -> None:
            self.zero_grad()
            self.step(rows)

        assert self.flops is not None
        taken = seconds(setting, step)
        speed = self.flops.training(rows) / taken
        self.zero_grad()
        above = peak_bytes(setting, partial(self.step, rows)) - 4 * self.parameters
        peak = peak_flops(setting.device, _COMPUTE)
        return {
            "seconds": taken, "tflops_per_s": speed / 1e12, "mfu": speed / peak,
            "above_weights_gib": above / GIB,
        }  # fmt: skip


def sharded_step(setting: Setting) -> Numbers:
    """Seconds, MFU and memory of sharded steps by row length."""
    return sharded(setting, compiled=False)


def sharded(setting: Setting, *, compiled: bool) -> Numbers:
    """Numbers of `sharded_step`; each is also logged when it is measured."""
    config = setting.config("8B/3")
    lengths = setting.choose(64, 4096), setting.choose(128, 16384)
    made: Numbers = {}
    with group_of_one(setting) as group:
        steps = _Steps(setting.random(config, Qwen3ForCausalLM), group, compiled=compiled)
        size = ModelSize(config=config, parameters=steps.parameters, query_norm=True)
        plan = PassMemory.of(size, dtype="bfloat16", device=setting.device, workers=2)
        for length in lengths:
            rows = rows_of(config, count=1, length=length, seed=length)
            found = steps.measured(setting, rows)
            planned = plan.bytes(length, checkpointing=True) / GIB
            made |= named({**found, "planned_gib": planned}, str(length))
            print(made, flush=True)
            fits = found["above_weights_gib"] < _MARGIN * planned
            require(fits or length < lengths[-1] or not setting.cuda, f"too small a plan: {made}")
    return made


def profile(setting: Setting) -> Numbers:
    """Shares of a sharded step by kind of kernel; its attention kernel; the head's share."""
    config = setting.config("8B/3")
    rows = rows_of(config, count=1, length=setting.choose(64, 8192), seed=1)
    model = setting.random(config, Qwen3ForCausalLM)
    head_seconds = _head_seconds(setting, model, rows[0].num_trained)
    with group_of_one(setting) as group:
        steps = _Steps(model, group)
        step_seconds = seconds(setting, lambda: steps.step(rows))
        kinds = [ProfilerActivity.CUDA] if setting.cuda else [ProfilerActivity.CPU]
        with profiler(activities=kinds) as found:
            steps.step(rows)
            wait(setting)
    events = found.key_averages()
    clock = "self_device_time_total" if setting.cuda else "self_cpu_time_total"
    print(events.table(sort_by=clock, row_limit=30, max_name_column_width=90))
    by_name = {event.key: float(getattr(event, clock)) for event in events}
    total = sum(by_name.values())
    shares: dict[str, float] = dict.fromkeys([*_KINDS, "others"], 0.0)
    for name, spent in by_name.items():
        shares[_kind(name)] += spent / total
    attention = max(by_name, key=lambda name: by_name[name] * (_kind(name) == "attention"))
    require(_kind(attention) == "attention", "no kernel of attention was seen")
    return {
        **named(shares, "share"), "attention_kernel": attention[:80],
        "step_seconds": step_seconds, "head_seconds": head_seconds,
    }  # fmt: skip


def _head_seconds(setting: Setting, model: Any, positions: int) -> float:
    """Seconds of the vocabulary projection's statistics and their gradient, measured alone."""
    head, width = VocabularyHead.of(model.eval()), model.config.hidden_size
    tokens_N = torch.randint(0, model.config.vocab_size, (positions,), device=setting.device)
    hidden_NH = torch.randn(positions, width, device=setting.device, requires_grad=True)
    temperature_N = torch.full((positions,), TEMPERATURE, device=setting.device)

    def both() -> None:
        with torch.autocast(setting.device, dtype=_COMPUTE):
            stats = head.token_stats(hidden_NH, tokens_N, temperature_N)
        stats.logprobs_N.mean().backward()

    taken = seconds(setting, both)
    model.zero_grad()
    return taken


def _kind(name: str) -> str:
    lower = name.lower()
    fits = (kind for kind, parts in _KINDS.items() if any(part in lower for part in parts))
    return next(fits, "others")


def mixture_step(setting: Setting) -> Numbers:
    """Steps of a mixture of experts: unsharded under autocast, and sharded in bfloat16."""
    tiny = setting.size == "tiny"
    width: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "num_hidden_layers": 1, "vocab_size": VOCAB_SIZE,
    } if tiny else {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 4, "vocab_size": 151936,
    }  # fmt: skip
    config = Qwen3MoeConfig(**width, max_position_embeddings=40960)
    rows = rows_of(config, count=2, length=setting.choose(64, 4096), seed=2)
    made: Numbers = {}
    with group_of_one(setting) as group:
        for name, over in (("alone", None), ("sharded", group)):
            steps = _Steps(setting.random(config, Qwen3MoeForCausalLM), over)
            made |= named(steps.measured(setting, rows), name)
            del steps
            free_memory(setting)
    return made


class _NoRanks:
    """Engine without ranks in a weight group: rank 0 broadcasts to itself alone."""

    def load_weights(self, weights: CollectiveBroadcast, version: int) -> float:
        """Wait for the sender's message, as a server does."""
        from distill.weight_group import announce

        if weights.number == 1:
            announce(weights.member, JOINING)
        announce(weights.member, weights.number)
        return 0.0


def weight_group(setting: Setting) -> Numbers:
    """Seconds of pushes by a weight group of one: forming the group, and its broadcasts."""
    from cluster.handles.local_actor import LocalActor
    from cluster.weights.collective import CollectiveTransport
    from cluster.weights.publisher import Attempt

    size = setting.choose(1 << 16, 1 << 28)
    tensors = {f"part_{i}": torch.randn(size // 8, device=setting.device) for i in range(8)}
    transport = CollectiveTransport(
        {"nobody": LocalActor(_NoRanks)}, ranks=0, address=LOOPBACK,
        backend="nccl" if setting.cuda else "gloo", timeout_s=_TIMEOUT_S, bucket_bytes=size,
    )  # fmt: skip
    versions = count(1)

    def push() -> None:
        weights = HeldWeights(tensors)
        answers = Attempt.begin([transport], weights, next(versions), _TIMEOUT_S).answers()
        require(not answers.failures, f"the push failed: {answers.failures}")

    started = time.perf_counter()
    push()
    first = time.perf_counter() - started
    again = seconds(setting, push)
    sent = 0 if transport.sending is None else transport.sending.sent
    require(sent == 4, f"{sent} buckets were sent of 4")
    return {"gib": 4 * size / GIB, "first_seconds": first, "seconds": again}
