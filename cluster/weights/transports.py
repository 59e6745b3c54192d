"""Transports from the learner to policy engines; cluster/weights/ways.py chooses among them.

shared_memory  same node: one copy into a block of memory, which engines and SGLang's processes
               read in place (distill/weights/shared_memory.py)
disk           any node that shares out/: a checkpoint directory, which late joiners can read
group          other nodes, other GPUs: a torch.distributed group with the engines' ranks
               (cluster/weights/collective.py)
ipc            the same GPUs, or the same machine: buckets that SGLang's ranks open by handles
               (cluster/weights/ipc.py)
adapter        SGLang servers anywhere: a LoRA adapter's tensors, as an argument of the call
               (actors/sglang/adapters.py)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from cluster.config.pools import check_served
from cluster.handles import calls
from cluster.handles.node import actor_gpus, is_connected, node_id
from cluster.weights.collective import CollectiveTransport, own_address
from cluster.weights.ipc import IpcTransport
from cluster.weights.transport import PushSettings, Transport, collect
from cluster.weights.ways import Place, lenders_of, plan_ways
from distill.durable_files import disk_remedy, whole_write
from distill.engine import CheckpointDirectory
from distill.errors import CheckpointError
from distill.gpu import visible_gpus
from distill.models.loading import load_config
from distill.process_groups import nccl_settings
from distill.weights.adapter import AdapterWeights
from distill.weights.lending import LenderPlace
from distill.weights.model_weights import Weights, save_weights
from distill.weights.shared_memory import SharedBlock


class SharedMemoryTransport(Transport):
    """One copy into a block of shared memory, which engines of this node read."""

    copies = True

    def __init__(self, engines: Mapping[str, Any]) -> None:
        super().__init__(engines)
        self._block, self._is_read = SharedBlock(), False

    def describe(self) -> str:
        return "shared memory"

    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        if self._is_read:
            self._block, self._is_read = SharedBlock(), False
        self._block.write(weights)
        return self.share(self._block.share(), version)

    def abort(self) -> None:
        self._is_read = True  # a late engine may still be reading: the block is not written again


class DiskTransport(Transport):
    """One directory of safetensors per version, on a shared disk; only the newest is kept."""

    copies = True

    def __init__(self, engines: Mapping[str, Any], directory: str, model: str) -> None:
        """`model` is the checkpoint whose config is written to the directories."""
        super().__init__(engines)
        self._root, self._model = Path(directory), model
        self._newest: Path | None = None

    def describe(self) -> str:
        return f"shared disk ({self._root})"

    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        path = self._write(weights, version)
        source = CheckpointDirectory(path=str(path.resolve()))
        self._newest = path
        return self.share(source, version)

    def _write(self, weights: Weights, version: int) -> Path:
        """Write a directory atomically. It is not synced, because it need not survive this run."""
        final = self._root / f"version-{version:06d}"
        try:
            with whole_write(final) as partial:
                partial.mkdir(parents=True)
                load_config(self._model).save_pretrained(partial)
                save_weights(partial, weights)
        except (OSError, SafetensorError) as error:  # others are errors of the learner's own
            raise CheckpointError(
                f"cannot write weights version {version} to {final}: {error}. "
                f"{disk_remedy(error)}, or use weights=auto"
            ) from error
        return final

    def finish(self) -> None:  # not at abort(): an engine may still be reading
        for old in self._root.glob("version-*"):
            if old != self._newest:
                shutil.rmtree(old, ignore_errors=True)


class AdapterTransport(Transport):
    """A LoRA adapter's tensors, passed by value to SGLang servers that hold its base."""

    copies = True

    def describe(self) -> str:
        return "the adapter alone"

    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        assert isinstance(weights, AdapterWeights), "merged weights go another way"
        copied = calls.shared(weights.copied(), list(self.engines.values()))
        return self.share(copied, version)


def choose_transports(
    settings: PushSettings, engines: Mapping[str, Any], lenders: Sequence[LenderPlace] = ()
) -> list[Transport]:
    """Choose transports that reach all engines; with auto, by the engines' places (`plan_ways`).

    Args:
        lenders: locations of the learner's workers, by rank; if empty, nothing is lent.

    Raises:
        ConfigError: the chosen transport cannot reach these engines.
        EngineError: an engine does not report its place.
    """
    if not engines:
        return []
    if settings.choice == "disk":
        return [DiskTransport(engines, settings.directory, settings.model)]
    check_served(settings.choice, settings.served)
    if settings.choice == "adapter":
        return [AdapterTransport(engines)]
    places = _places(settings, engines)
    on_cuda = settings.device.startswith("cuda")
    ranks, learner = settings.parallel.tensor, _place(None)
    learner = replace(learner, gpus=learner.gpus[:1] if on_cuda else ())
    ways = plan_ways(settings.choice, learner, places, served=settings.served, lenders=lenders)
    transports: list[Transport] = []
    for way, names in ways.items():
        chosen = {name: engines[name] for name in names}
        if way == "shared_memory":
            transports.append(SharedMemoryTransport(chosen))
        elif way == "ipc":
            transports.append(
                IpcTransport(
                    chosen, {n: lenders_of(n, places[n], ranks, lenders) for n in names}, lenders,
                    timeout_s=settings.timeout_s, bucket_bytes=settings.bucket_bytes,
                )
            )  # fmt: skip
        else:
            everyone_is_here = all(places[name].same_node(learner) for name in names)
            transports.append(
                CollectiveTransport(
                    chosen, ranks=ranks, address=own_address(everyone_is_here),
                    backend="nccl" if on_cuda else "gloo", timeout_s=settings.timeout_s,
                    bucket_bytes=settings.bucket_bytes,
                )
            )  # fmt: skip
    return transports


def _places(settings: PushSettings, engines: Mapping[str, Any]) -> dict[str, Place]:
    asked = {name: engine.__ray_call__.remote(_place) for name, engine in engines.items()}
    found = collect(asked, settings.timeout_s).require("asking the engines for their places")
    return {
        name: replace(
            place, nodes=settings.parallel.nodes, gpus=place.gpus[: settings.parallel.gpus_a_node]
        )
        for name, place in found.items()
    }


def _place(_actor: object) -> Place:
    """Place of the calling process."""
    # Without Ray, engines and learner see the same GPUs, and may share them all. With Ray, an actor
    # that has GPUs may see more GPUs than Ray gave it (cluster/hosts/actors.py).
    gpus: list[str] = []
    if not is_connected():
        gpus = visible_gpus()[: torch.cuda.device_count()]
    elif actor_gpus():
        gpus = visible_gpus()
    host = os.uname().nodename
    return Place(node=node_id(), host=host, gpus=tuple(gpus), nccl=nccl_settings())
