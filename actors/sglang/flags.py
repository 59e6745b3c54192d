"""SGLang's command line for one engine: good defaults for the device, and yours on top."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

from distill.errors import ConfigError

# Flags that the engine itself depends on; another value would break it, not tune it.
_OURS = {
    "--model-path": "set student= or teacher=",
    "--host": "the engine chooses it",
    "--port": "the engine chooses a free one",
    "--api-key": "a key is made for each run",
    "--admin-api-key": "a key is made for each run",
    "--dtype": "set dtype=",
    "--device": "set device=",
    "--weight-version": "the run numbers its weights",
    "--max-running-requests": "set max_batch_rows=",
    "--custom-weight-loader": "weights are pushed through isotherm's own",
    "--trust-remote-code": "isotherm never runs code that a checkpoint brings along",
}

# What a weight push does to the samples under way (actors/sglang/weights.py).
InFlight = Literal["continue", "restart", "finish", "in_place"]
# Each flag with its values.
Flags = dict[str, list[str]]

# Without a bound the scheduler takes 16 GB of a CPU machine for its KV cache.
_CPU_KV_TOKENS = 16384


def server_flags(
    *,
    model: str,
    dtype: str,
    device: str,
    max_running_requests: int,
    context_length: int,
    gpu_share: float = 1,
    extra: str = "",
) -> list[str]:
    """The server's flags. A flag in `extra` replaces the default of the same name.

    Args:
        device: cpu or cuda.
        context_length: positions a request may take.
        gpu_share: the part of a GPU that this engine may fill, in (0, 1].
        extra: flags as you would write them on SGLang's own command line.

    Raises:
        ConfigError: `extra` sets a flag that the engine must set itself.
    """
    from actors.sglang.plugin.weight_loader import LOADER  # torch, which settings do without

    flags = {
        "--model-path": [model],
        "--dtype": [dtype],
        "--device": [device],
        "--weight-version": ["0"],
        "--custom-weight-loader": [LOADER],
        "--max-running-requests": [str(max_running_requests)],
        "--context-length": [str(context_length)],
        "--skip-server-warmup": [],
        "--log-level-http": ["warning"],
    }
    flags |= _cpu_defaults() if device == "cpu" else _cuda_defaults(gpu_share)
    flags |= parse_flags(extra)
    return [part for name, values in flags.items() for part in (name, *values)]


def _cpu_defaults() -> Flags:
    return {
        "--attention-backend": ["torch_native"],
        "--sampling-backend": ["pytorch"],
        "--grammar-backend": ["none"],
        "--max-total-tokens": [str(_CPU_KV_TOKENS)],
        # An idle scheduler would spin on a core.
        "--sleep-on-idle": [],
    }


def _cuda_defaults(gpu_share: float) -> Flags:
    # The plugin scales logits outside of captured graphs only; prefill graphs gain little where
    # most of the time is decode.
    flags: Flags = {"--disable-prefill-cuda-graph": []}
    if gpu_share < 1:
        flags["--mem-fraction-static"] = [f"{0.85 * gpu_share:.2f}"]
    return flags


def parse_flags(text: str) -> Flags:
    """`--a 1 --b --c=2 3` as {"--a": ["1"], "--b": [], "--c": ["2", "3"]}.

    Raises:
        ConfigError: a value without a flag, or a flag that the engine must set itself.
    """
    flags: Flags = {}
    name = None
    for word in _split(text):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            if name in _OURS:
                raise ConfigError(f"server flag {name} cannot be set here: {_OURS[name]}")
            flags[name] = [value] if value else []
        elif name is None:
            raise ConfigError(f"server flags {text!r}: {word!r} belongs to no flag; write --name")
        else:
            flags[name].append(word)
    return flags


def tensor_parallel_size(text: str) -> int:
    """Number of GPUs over which a server with these flags spreads one copy of the model.

    Raises:
        ConfigError: the flag's value is not a number above 0.
    """
    flags = parse_flags(text)
    for name in ("--tp-size", "--tp", "--tensor-parallel-size"):
        if name in flags:
            value = " ".join(flags[name])
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"server flag {name} {value!r} must be a number above 0")
            return int(value)
    return 1


def _split(text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"server flags {text!r} cannot be read: {error}") from error
