"""Settings of an engine that starts its own SGLang server."""

from __future__ import annotations

from typing import Literal

import chz

from distill.rules import above, at_least, setting
from distill.stops import StopTokens

Dtype = Literal["float32", "bfloat16"]
# Effect of a weight push on samples in progress (actors/sglang/weights.py).
OnWeightUpdate = Literal["continue", "restart", "finish", "in_place"]
# Upper limit of an actor's start in seconds, excluding the time to load the weights.
START_S = 600.0


@chz.chz
class SglangConfig:
    """Settings of an engine and its SGLang server. All nodes of a server use equal settings."""

    model: str = chz.field(doc="Hugging Face checkpoint directory or hub name")
    dtype: Dtype = chz.field(default="float32", doc="compute precision")
    device: str = chz.field(default="auto", doc="auto, cpu or cuda")
    threads: int = setting(at_least(1), default=1, doc="torch threads on a CPU")
    server_flags: str = chz.field(
        default="", doc="further flags of SGLang; they override those that the engine sets"
    )
    on_weight_update: OnWeightUpdate = chz.field(
        default="continue", doc="samples in progress when weights are pushed, as in EngineSettings"
    )
    max_running_requests: int = setting(
        at_least(1),
        default=256,
        doc="maximum number of sequences that are decoded concurrently; further ones wait",
    )
    gpu_share: float = chz.field(default=1.0, doc="part of a GPU that a server may fill")
    gpu_reserved: int = chz.field(
        default=0, doc="bytes of that share that another process uses, such as a colocated learner"
    )
    sleeps: bool = chz.field(
        default=False, doc="release GPU memory on request, until weights arrive"
    )
    turn: str | None = chz.field(
        default=None, doc="file of the turn on GPUs that several servers share; the others sleep"
    )
    routed_experts: bool = chz.field(
        default=False, doc="record the experts to which tokens are routed"
    )
    log_path: str | None = chz.field(
        default=None, doc="file for the server's output; None: an unnamed temporary file"
    )
    start_deadline_s: float = setting(
        above(0),
        default=START_S,
        doc="time limit of the start in seconds, and of the first request of each kind",
    )
    request_deadline_s: float = chz.field(default=1800.0, doc="longest request, seconds")
    stops: StopTokens | None = chz.field(
        default=None,
        doc="tokens that end samples, and whether they count as one event; None: from the "
        "checkpoint. A server also stops at the EOS tokens of its checkpoint and tokenizer",
    )
    context_length: int | None = chz.field(
        default=None,
        doc="context length of the model: with a device other than auto, the server is then "
        "started without importing torch in this process; None: read from the checkpoint",
    )

    @property
    def shares_gpu(self) -> bool:
        """True if other processes use a part of the server's GPU."""
        return self.gpu_share < 1 or self.gpu_reserved > 0
