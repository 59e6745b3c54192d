"""One model over several workers: each holds a shard of every weight, gradient and moment (FSDP2).

The unit is a decoder layer. Its weights are gathered right before it runs, forward and backward,
and released afterwards. Its gradients are summed over the workers as soon as they are computed, or
only in the last micro-batch of a step if each worker has room for whole gradients
(`PassPlan.reduces_once`). Weights outside of layers (embedding, last norm, vocabulary projection)
are gathered for a micro-batch.

With several replicas (HSDP) each replica is sharded over its own workers, and gathers and sums
within them. Before an update, gradients are summed once over the replicas (`sum_over_replicas`), so
the update is the same on all replicas.

Fingerprints of tensors do not depend on the sharding. The sum of a tensor's bits, and of its
squares, is the total of the sums of its shards. The sum of bits is exactly equal for any number of
workers that hold equal tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from distill.errors import CheckpointError
from distill.models.attention import keep_attention_eager
from distill.weights.model_weights import TensorLayout
from learner.process_group import WorkerGroup

# (sum of the bits as 32-bit integers, norm) of a tensor; for a shard, (sum, sum of squares).
Fingerprint = tuple[int, float]
# Keys: `gradient` and `weights`, then names of trained tensors, in the model's order.
Fingerprints = Mapping[str, Mapping[str, Fingerprint]]


class PendingValues(Protocol):
    """Values that are set in a model after it is sharded (`learner.initial_weights`)."""

    def parameters(self) -> Collection[nn.Parameter]:
        """Parameters of the model that have no values yet."""
        ...

    def fill(self, group: WorkerGroup) -> None:
        """Set each worker's shard of those parameters. Collective: all workers call it."""
        ...


class Root(nn.Module):
    """FSDP root module. All uses of the model run inside its forward, so that FSDP's hooks run."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()

    def sum_gradients(self, now: bool) -> None:
        """Sum gradients within a replica in the next backward passes, or accumulate whole ones.

        Whole gradients are float32, like the sums. The next sum includes them. Vision layers are
        left out: a pass over text never gathers their weights, and FSDP cannot accumulate the
        gradients of such a unit.
        """
        for module in (self, *self.model.get_decoder().modules()):
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(now, recurse=False)


def shard(
    model: PreTrainedModel,
    group: WorkerGroup,
    compute_dtype: torch.dtype,
    pending: PendingValues | None = None,
) -> Root:
    """Shard a model over the group, one layer at a time, with the leader's values.

    Without `pending` the leader holds the whole model until it is sharded, and the other workers
    one layer in addition to their shards. Gradients are sums over a replica's workers, not means,
    because losses are normalised by global counts.

    Args:
        pending: values that the leader has not read yet.
    """
    assert group.mesh is not None, "a learner alone is not sharded"
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
    )
    _agree_on_tensors(model, group)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0, group=group.collectives)
    later = {id(parameter) for parameter in pending.parameters()} if pending else set()
    for layer in layers_of(model):
        _spread((p for p in layer.parameters() if id(p) not in later), group)
        fully_shard(layer, mesh=group.mesh, mp_policy=policy)
    rest = (p for p in model.parameters() if not isinstance(p, DTensor) and id(p) not in later)
    _spread(rest, group)
    root = Root(model)
    fully_shard(root, mesh=group.mesh, mp_policy=policy)
    if pending:
        pending.fill(group)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _agree_on_tensors(model: PreTrainedModel, group: WorkerGroup) -> None:
    """Raise CheckpointError on every worker if their tensors differ from the leader's.

    Broadcasts of different tensors would hang. Workers other than the leader construct the model
    from its config.
    """
    ours = [
        (name, tuple(tensor.shape))
        for tensors in (model.named_buffers(), model.named_parameters())
        for name, tensor in tensors
    ]
    leaders: list[tuple[str, tuple[int, ...]]] = group.broadcast(ours)
    if group.sum_over_workers(float(leaders != ours)):
        difference = sorted(set(leaders).symmetric_difference(ours))
        raise CheckpointError(
            f"the leader's model has other tensors than its config describes: {difference[:3]}. "
            "Check that config.json matches the weights"
        )


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer with torch.compile when it first runs, for rows of any length.

    Call this before `shard`. Attention stays eager: a pass with the keys and values of every layer
    would be recompiled for each layer.
    """
    keep_attention_eager()
    for layer in layers_of(model):
        layer.compile(dynamic=True)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Units of sharding: the decoder's layers, which transformers lists in `_no_split_modules`."""
    kinds = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    assert found, f"{type(model).__name__} names no layers to shard"
    return found


def _spread(parameters: Iterable[nn.Parameter], group: WorkerGroup) -> None:
    for parameter in parameters:
        dist.broadcast(parameter.data, src=0, group=group.collectives)


@torch.no_grad()
def scatter_tensor(
    whole: Tensor | None, dtype: torch.dtype, parameter: Tensor, group: WorkerGroup
) -> None:
    """Copy the leader's whole tensor into a sharded parameter; each worker receives only its shard.

    Args:
        whole: the tensor in main memory; None on other workers.
        dtype: dtype of `whole`.
    """
    own = local(parameter)
    if whole is None:
        if own.numel():
            part = torch.empty(own.shape, dtype=dtype)
            dist.recv(part, src=0, group=group.collectives)
            own.copy_(part)
        return
    parts = whole.chunk(group.shards)  # like FSDP2; the last workers may get empty shards
    sent = [
        dist.isend(part.contiguous(), dst=rank, group=group.collectives)
        for shard, part in enumerate(parts)
        for rank in range(shard, group.size, group.shards)
        if rank and part.numel()
    ]
    own.copy_(parts[0])
    for work in sent:
        assert work is not None
        work.wait()


def sum_over_replicas(model: nn.Module, group: WorkerGroup) -> None:
    """Sum the gradients, which are summed within each replica, over the replicas. Collective.

    Each worker sends only its shards. `fully_shard` with a mesh of two dimensions would sum over
    the replicas in every micro-batch, unless each worker has room for whole gradients.
    """
    if group.same_shard is None:
        return
    pending = [
        dist.all_reduce(shard, group=group.same_shard, async_op=True)
        for parameter in model.parameters()
        if parameter.grad is not None and (shard := local(parameter.grad)).numel()
    ]
    for work in pending:
        assert work is not None
        work.wait()


def reshard(root: Root | None) -> None:
    """Release gathered weights and keep the shards, which the optimizer and checkpoints use.

    Call it after a pass without gradients, which leaves weights gathered. No-op without a root.
    """
    for module in () if root is None else root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of one that may be sharded. Collective: every worker must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_in(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`whole` in another dtype. The shards are rounded first, to reduce network traffic."""
    return whole(tensor if dtype is None else tensor.to(dtype))


def local(tensor: Tensor) -> Tensor:
    """Shard of the tensor on this worker."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors, or of this worker's shards, in main memory."""
    return {name: _in_memory(tensor) for name, tensor in tensors.items()}


def _in_memory(tensor: Tensor) -> Tensor:
    copy = local(tensor.detach()).to("cpu", copy=True)
    # Not from_local, which moves the shard to the devices of the mesh.
    return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy  # pyright: ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTensor:
    """A tensor that is computed on demand by `make(dtype)`, with minimal allocation.

    `make` reads the current weights. If they are sharded, `make` is a collective: every rank calls
    it for the same tensors in the same order. `exact`: the tensor is never rounded.
    """

    layout: TensorLayout
    make: Callable[[torch.dtype | None], Tensor]
    exact: bool = False

    def layout_in(self, dtype: torch.dtype | None) -> TensorLayout:
        """Layout of the tensor that `in_precision(dtype)` returns."""
        return self.layout if dtype is None or self.exact else self.layout.rounded_to(dtype)

    def in_precision(self, dtype: torch.dtype | None) -> Tensor:
        """The tensor, rounded to `dtype` unless that is None or it is exact."""
        return self.make(None if self.exact else dtype)


def stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the model's tensors by name, each once: a tied lm_head is omitted."""
    seen: set[int] = set()
    # Compares objects, which are identical for tied parameters. Addresses of data do not work:
    # empty shards of different parameters have the same address.
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            seen.add(id(weight))
            yield name, weight


def shard_fingerprints(model: nn.Module, group: WorkerGroup) -> Fingerprints:
    """Fingerprints of this worker's shards; empty on workers outside of the first replica.

    A tensor that is not sharded, which every worker holds whole, is counted only on rank 0.
    """
    found: dict[str, dict[str, Fingerprint]] = {"gradient": {}, "weights": {}}
    for name, parameter in model.named_parameters():
        counted = group.rank < (group.shards if isinstance(parameter, DTensor) else 1)
        if not parameter.requires_grad or not counted:
            continue
        for what, tensor in (("gradient", parameter.grad), ("weights", parameter)):
            if tensor is not None:
                found[what][name] = _fingerprint(local(tensor.detach()))
    return found


def _fingerprint(tensor: Tensor) -> Fingerprint:
    bits = tensor.contiguous().view(torch.int32).sum(dtype=torch.int64)
    return int(bits), float(tensor.double().square().sum())


def whole_fingerprints(of_workers: Sequence[Fingerprints]) -> dict[str, dict[str, Fingerprint]]:
    """Combine the shard fingerprints of all workers into fingerprints of the whole tensors."""
    found: dict[str, dict[str, Fingerprint]] = {}
    for what in ("gradient", "weights"):
        names = dict.fromkeys(name for one in of_workers for name in one[what])
        found[what] = {}
        for name in names:
            parts = [one[what][name] for one in of_workers if name in one[what]]
            bits, squares = (sum(values) for values in zip(*parts, strict=True))
            found[what][name] = (int(bits), math.sqrt(squares))
    return found
