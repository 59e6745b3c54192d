"""Settings of an engine: kind, model, and share of the machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import chz

from actors.sglang.address import check_url, is_url
from actors.sglang.config import START_S, Dtype, OnWeightUpdate, SglangConfig
from actors.sglang.flags import parse_flags
from actors.sglang.installed import require_sglang, sglang_installed
from actors.sglang.parallelism import parallelism
from distill.errors import ConfigError
from distill.pace import loading_s
from distill.rules import at_least, not_with, setting
from distill.settings import ESSENTIAL, Section

if TYPE_CHECKING:
    from actors.embedded.engine import EmbeddedEngine
    from actors.sglang.external import ExternalSglangEngine
    from actors.sglang.hosted import HostedSglangEngine
    from actors.sglang.turns import TurnTakingEngine

EngineKind = Literal["sglang", "embedded"]
EngineChoice = Literal["auto", "sglang", "embedded"]
DtypeChoice = Literal["auto", "float32", "bfloat16"]
# An engine that is a plain object in this process.
LocalEngine: TypeAlias = (
    "EmbeddedEngine | HostedSglangEngine | TurnTakingEngine | ExternalSglangEngine"
)


def choose_dtype(choice: DtypeChoice, device: str) -> Dtype:
    """Resolve the dtype: `choice`, or for auto float32 on a CPU and bfloat16 on CUDA.

    SGLang's kernels are made for half precision, but on a CPU half precision is slower and less
    exact. `device` may be auto.
    """
    if choice != "auto":
        return choice
    return "bfloat16" if _is_cuda(device) else "float32"


def _is_cuda(device: str) -> bool:
    """True if the device is CUDA. Imports torch only if `device` is auto.

    Ray must be started before torch is imported.
    """
    if device == "auto":
        from distill.models.loading import resolve_device

        device = resolve_device(device)
    return device.startswith("cuda")


def engine_note(choice: EngineChoice, kind: EngineKind) -> str:
    """Message that explains why engine=auto skips an installed SGLang, or an empty string."""
    if choice != "auto" or kind == "sglang" or not sglang_installed():
        return ""
    return "engine=auto: embedded, faster without a GPU; engine=sglang selects SGLang"


def checkpoint_bytes(model: str) -> int:
    """Size of a checkpoint's weight files in bytes, or 0 if it is unknown.

    For files that are not on this machine the size comes from the hub's index.
    """
    from actors.hub import size_on_hub  # imports torch, which settings must not
    from distill.models.loading import weight_files

    if is_url(model):
        return 0
    return sum(file.stat().st_size for file in weight_files(model)) or size_on_hub(model)


@chz.chz
class EngineSettings:
    """Kind and precision of the engines."""

    section: ClassVar[Section] = Section.ENGINES
    within: ClassVar[str] = "engine."
    main: ClassVar[str] = "kind"

    kind: EngineChoice = chz.field(
        default="auto",
        doc="sglang: SGLang servers that the run starts; embedded: transformers in the engine's "
        "own process; auto: sglang if it is installed and there are GPUs, else embedded",
        metadata=ESSENTIAL,
    )
    dtype: DtypeChoice = chz.field(
        default="auto",
        doc="precision of the engines; auto: float32 on a CPU, bfloat16 on CUDA",
    )

    def kind_on(self, device: str) -> EngineKind:
        """Kind of the engines. `device` may be auto.

        For auto: SGLang if it is installed and the device is a GPU, else the embedded engine, which
        is faster on a CPU (docs/engines.md).

        Raises:
            ConfigError: `kind` is sglang, and SGLang is not installed.
        """
        if self.kind == "sglang":
            require_sglang()
        if self.kind != "auto":
            return self.kind
        return "sglang" if sglang_installed() and _is_cuda(device) else "embedded"

    def dtype_on(self, device: str) -> Dtype:
        """Precision of the engines (`choose_dtype`)."""
        return choose_dtype(self.dtype, device)

    def config(self, model: str, device: str, **facts: Any) -> EngineConfig:
        """Settings of an engine of `model`; `facts` are the other fields of an `EngineConfig`."""
        kind, dtype = self.kind_on(device), self.dtype_on(device)
        return EngineConfig(kind=kind, model=model, dtype=dtype, device=device, **facts)


@chz.chz
class PolicyEngineSettings(EngineSettings):
    """Engines that weights are pushed to."""

    on_weight_update: OnWeightUpdate = setting(
        not_with("engine.kind", "embedded", why="it applies to samples of an SGLang server"),
        default="continue",
        doc="samples in progress when weights are pushed to an SGLang server. continue: under the "
        "new weights (each token's version is recorded); restart: from their prompts; finish: "
        "before the push; in_place: under the new weights, with the cached context of the old "
        "ones (cheaper, but not exact)",
    )


def start_deadline(asked_s: float | None, model: str | None) -> float:
    """Deadline in seconds for the start of an actor that loads `model` (None: no model).

    Args:
        asked_s: deadline from the user's settings; None: computed from the size of the model.
    """
    if asked_s is not None:
        return asked_s
    return START_S + (0 if model is None else loading_s(checkpoint_bytes(model)))


@chz.chz
class EngineConfig(SglangConfig):
    """Settings of one engine. The temperature is not a setting, but a field of every request."""

    kind: EngineKind = chz.field(
        doc="sglang: a server that the run starts; embedded: transformers in the actor's own "
        "process",
    )
    model: str = chz.field(
        doc="Hugging Face checkpoint directory (or hub name), or http://host:port of a running "
        "SGLang server, whatever the kind"
    )
    score_token_budget: int = setting(
        at_least(1), default=16384, doc="embedded: padded tokens per scoring forward"
    )

    @chz.validate
    def _model_is_served(self) -> None:
        parse_flags(self.server_flags)
        if self.external:
            check_url(self.model)
        elif self.server_flags and self.kind == "embedded":
            raise ConfigError(
                f"SGLang's flags {self.server_flags} change nothing: the engine is embedded; use "
                "engine=sglang, or leave policy.server_flags or teacher.server_flags out",
                field="server_flags",
            )

    @property
    def external(self) -> bool:
        """True if the engine is a server that the run did not start."""
        return is_url(self.model)

    @property
    def hosted(self) -> bool:
        """True if the engine is an SGLang server that the run starts."""
        return self.kind == "sglang" and not self.external

    @property
    def engine_class(self) -> type[LocalEngine]:
        """Plain engine class to construct with `arguments()`, in this process or in an actor."""
        if self.external:
            from actors.sglang.external import ExternalSglangEngine

            return ExternalSglangEngine
        if self.hosted and self.turn is not None:
            from actors.sglang.turns import TurnTakingEngine

            return TurnTakingEngine
        if self.hosted:
            from actors.sglang.hosted import HostedSglangEngine

            return HostedSglangEngine
        from actors.embedded.engine import EmbeddedEngine

        return EmbeddedEngine

    @property
    def nodes(self) -> int:
        """Number of nodes that the engine's server spans."""
        return parallelism(self.server_flags).nodes if self.hosted else 1

    def build(self) -> LocalEngine:
        """Construct the engine in this process."""
        return self.engine_class(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        if self.external:
            return {
                "url": self.model,
                "request_deadline_s": self.request_deadline_s,
                "stops": self.stops,
            }
        if self.kind == "sglang":
            return {"config": self}
        return {
            "model_path": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "max_running_requests": self.max_running_requests,
            "score_token_budget": self.score_token_budget,
            "stops": self.stops,
            "routed_experts": self.routed_experts,
        }


@asynccontextmanager
async def running_engines(*configs: EngineConfig) -> AsyncIterator[list[LocalEngine]]:
    """Context manager for engines in this process: start them in parallel, close them on exit."""
    engines = [config.build() for config in configs]
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.close()
