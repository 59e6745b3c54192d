"""One model over several workers: each holds a share of every weight, gradient and moment (FSDP2).

A decoder layer is the unit: its weights are made whole right before it runs, forward and backward,
and let go afterwards; its gradients are summed over the workers as soon as they are there. What is
in no layer (embedding, last norm, vocabulary projection) is made whole for a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from distill.errors import CheckpointError
from distill.models.attention import keep_attention_eager
from distill.weights.tensors import TensorLayout
from learner.process_group import WorkerGroup


class PendingValues(Protocol):
    """Values that are given to a model after it is sharded (`learner.initial_weights`)."""

    def parameters(self) -> Collection[nn.Parameter]:
        """Parameters of the model that have no values yet."""
        ...

    def fill(self, group: WorkerGroup) -> None:
        """Give each worker its shard of those. All workers call it."""
        ...


class Root(nn.Module):
    """Whatever uses the model runs inside this module's forward, where FSDP's hooks are."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def shard(
    model: PreTrainedModel,
    group: WorkerGroup,
    compute_dtype: torch.dtype,
    pending: PendingValues | None = None,
) -> Root:
    """Split a model over the group, a layer at a time; its values are the leader's.

    Without `pending` the leader holds the whole model until then, and the other workers a layer
    beside their shards. Gradients are sums over the workers, not means: losses are normalised by
    global counts.

    Args:
        pending: values that the leader does not hold yet.
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
    """Raise CheckpointError on every worker if their tensors differ, which would never be sent.

    Workers other than the leader make the model from its config.
    """
    ours = [
        (name, tuple(tensor.shape))
        for tensors in (model.named_buffers(), model.named_parameters())
        for name, tensor in tensors
    ]
    leaders: list[tuple[str, tuple[int, ...]]] = group.agree(ours)
    if group.total(float(leaders != ours)):
        difference = sorted(set(leaders).symmetric_difference(ours))
        raise CheckpointError(
            "the leader's model has other tensors than a worker makes from its config: "
            f"{difference[:3]}. Does config.json agree with the weights?"
        )


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles each decoder layer by torch.compile when it first runs, for rows of any length.

    Before `shard`. Attention stays as it is: a pass that holds keys and values of every layer would
    be compiled anew for each of them.
    """
    keep_attention_eager()
    for layer in layers_of(model):
        layer.compile(dynamic=True)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Units of sharding: the decoder's layers, which Hugging Face marks as not to be split."""
    kinds = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    assert found, f"{type(model).__name__} names no layers to shard"
    return found


def _spread(parameters: Iterable[nn.Parameter], group: WorkerGroup) -> None:
    for parameter in parameters:
        dist.broadcast(parameter.data, src=0, group=group.collectives)


@torch.no_grad()
def hand_out(
    whole: Tensor | None, dtype: torch.dtype, parameter: Tensor, group: WorkerGroup
) -> None:
    """Copy the leader's whole tensor into a sharded parameter; each worker gets its shard alone.

    Args:
        whole: in main memory; None on other workers.
        dtype: its precision.
    """
    own = local(parameter)
    if whole is None:
        if own.numel():
            part = torch.empty(own.shape, dtype=dtype)
            dist.recv(part, src=0, group=group.collectives)
            own.copy_(part)
        return
    mine, *others = whole.chunk(group.size)  # as FSDP2 cuts it; the last workers may get nothing
    sent = [
        dist.isend(part.contiguous(), dst=rank, group=group.collectives)
        for rank, part in enumerate(others, 1)
        if part.numel()
    ]
    own.copy_(mine)
    for work in sent:
        assert work is not None
        work.wait()


def reshard(root: Root) -> None:
    """Keeps the shares alone: the weights that optimizer and checkpoints know."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Every worker must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_in(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`whole`, in another precision: rounded first, so that as much less passes the network."""
    return whole(tensor if dtype is None else tensor.to(dtype))


def local(tensor: Tensor) -> Tensor:
    """This worker's shard of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyTensor:
    """A tensor that is yet to be made, and of which `make(dtype)` allocates no more than it must.

    It reads the weights as they are when it is called. Where they are sharded it is a collective:
    every rank calls it, for the same tensors in the same order. `exact`: it is never rounded.
    """

    layout: TensorLayout
    make: Callable[[torch.dtype | None], Tensor]
    exact: bool = False

    def layout_in(self, dtype: torch.dtype | None) -> TensorLayout:
        """Layout of what `in_precision(dtype)` gives."""
        return self.layout if dtype is None or self.exact else self.layout.rounded_to(dtype)

    def in_precision(self, dtype: torch.dtype | None) -> Tensor:
        """The tensor, rounded to `dtype` unless that is None or it is exact."""
        return self.make(None if self.exact else dtype)


def stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model once, by its name; a tied lm_head is left to its embedding."""
    seen: set[int] = set()
    # The parameters themselves, which are the same object where they are tied: empty shards of
    # different parameters would have one address.
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            seen.add(id(weight))
            yield name, weight


def plain_weights(model: PreTrainedModel) -> dict[str, LazyTensor]:
    """Every stored tensor, by name."""
    return {
        name: LazyTensor(
            layout=TensorLayout.of(name, weight), make=partial(whole_in, weight.detach())
        )
        for name, weight in stored(model)
    }
