"""Which engine, on what model, with how much of the machine."""

from __future__ import annotations

from typing import Any, Literal

import chz

from actors.embedded_engine import EmbeddedEngine
from distill.errors import ConfigError


@chz.chz
class EngineConfig:
    """Settings of one engine. There is no temperature here: every request brings its own."""

    kind: Literal["embedded"] = chz.field(
        default="embedded", doc="embedded: transformers in the actor's own process"
    )
    model: str = chz.field(doc="Hugging Face checkpoint directory (or hub name)")
    dtype: Literal["float32", "bfloat16"] = chz.field(default="float32", doc="compute precision")
    device: str = chz.field(default="auto", doc="auto, cpu or cuda")
    threads: int = chz.field(default=1, doc="torch threads of the engine on CPU")
    max_batch_rows: int = chz.field(default=256, doc="sequences decoded at the same time, at most")
    score_token_budget: int = chz.field(default=16384, doc="padded tokens per scoring forward")

    @chz.validate
    def _in_range(self) -> None:
        for name in ("threads", "max_batch_rows", "score_token_budget"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def engine_class(self) -> type[EmbeddedEngine]:
        """The plain class to build, here or inside an actor, with `arguments()`."""
        return EmbeddedEngine

    def arguments(self) -> dict[str, Any]:
        return {
            "model_path": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "max_batch_rows": self.max_batch_rows,
            "score_token_budget": self.score_token_budget,
        }
