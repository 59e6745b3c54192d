"""HTTP server that takes weights as SGLang does, rank by rank, and counts their memory.

Each rank's model keeps rows `[rank/n, (rank + 1)/n)` of each matrix and whole vectors, on its own
device: tensors that a load brings there are counted until they are freed.
"""

import base64
import pickle
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from torch import Tensor

from actors.sglang.flags import LOADER
from actors.sglang.plugin.weight_loader import load
from distill.weights.digests import digest
from tests.actors.misbehaving_server import MisbehavingServer

_SESSION = ("/update_weights_from_tensor", "/update_weights_from_distributed", "/end_weight_update")


class Device:
    """Memory of a rank in addition to its model: the present and the largest amount."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def take(self, tensor: Tensor) -> Tensor:
        """Replacement of `tensor.to(device)`."""
        made, size = tensor.clone(), tensor.nbytes
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(made, self._release, size)
        return made

    def _release(self, size: int) -> None:
        self.live -= size


class RankModel:
    """A rank's part of a model, whose loader moves all its input to the device at once."""

    def __init__(self, weights: Mapping[str, Tensor], rank: int, ranks: int) -> None:
        self._rank, self._ranks, self.device = rank, ranks, Device()
        self.parameters = {name: self._part(tensor).clone() for name, tensor in weights.items()}
        self.ignores: set[str] = set()

    def _part(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self._ranks)[self._rank] if tensor.dim() > 1 else tensor

    def load_weights(self, named: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in [(name, self.device.take(tensor)) for name, tensor in named]:
            if name not in self.ignores:
                self.parameters[name].copy_(self._part(tensor))

    def checksums(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.parameters.items()}


class WeightsServer(MisbehavingServer):
    """Refuse what SGLang refuses: loads outside of a session, and a second session."""

    def __init__(self, weights: Mapping[str, Tensor], ranks: int = 1, **info: Any) -> None:
        super().__init__()
        self.ranks = [RankModel(weights, rank, ranks) for rank in range(ranks)]
        self.info: dict[str, Any] = {"tp_size": ranks, "model_path": "the model"} | info
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.version = "0"
        self._paused = self._session = False
        self.loads = self.refused = 0  # how many buckets came; which one of them is refused

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.orders.append((request.path, body))
        if request.path == "/server_info":
            return web.json_response(self.info)
        if request.path == "/weights_checker":
            assert body == {"action": "checksum", "selector": "target"}
            return web.json_response({"success": True, "ranks": self._report()})
        refusal = self._refusal(request.path)
        if refusal is not None:
            return web.json_response({"success": False, "message": refusal}, status=400)
        if request.path == "/update_weights_from_tensor":
            self.load_buckets(body)
        return web.json_response({"success": True, "message": "Success"})

    def _refusal(self, path: str) -> str | None:
        if path in _SESSION and not self._session:
            return f"{path} must run between begin_weight_update() and end_weight_update()"
        if path == "/begin_weight_update" and self._session:
            return "a weight-update session is already open"
        if path in ("/begin_weight_update", "/end_weight_update"):
            self._session = path == "/begin_weight_update"
        if path in ("/pause_generation", "/continue_generation"):
            self._paused = path == "/pause_generation"
        if self._session and not self._paused:
            return "weights would change under requests"
        return None

    def load_buckets(self, body: Mapping[str, Any]) -> None:
        self.loads += 1
        if self.loads == self.refused:
            raise RuntimeError("out of memory")
        for model, order in zip(self.ranks, body["serialized_named_tensors"], strict=True):
            given = pickle.loads(base64.b64decode(order))
            assert body["load_format"] == LOADER
            # As WeightUpdater.update_weights_from_tensor: to the device, then the loader.
            load(model, [(n, model.device.take(t)) for n, t in given])
        self.version = body.get("weight_version", self.version)

    def _report(self) -> list[dict[str, Any]]:
        return [
            {
                "checksums": model.checksums(),
                "per_gpu_checksum": "",
                "parallelism_info": {"tp_rank": rank, "tp_size": len(self.ranks)},
            }
            for rank, model in enumerate(self.ranks)
        ]

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """Bodies of all requests to the path, in order."""
        return [body for asked, body in self.orders if asked == path]
