"""SGLang's command line for one engine: good defaults for the device, and yours on top."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.sglang.config import SglangConfig
from actors.sglang.installed import knows_flag
from distill.errors import ConfigError

if TYPE_CHECKING:  # settings must not import torch
    from distill.weights.adapter import AdapterForm

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
    "--node-rank": "give --nnodes, and the run numbers the nodes",
    "--dist-init-addr": "give --nnodes, and the run says where the nodes meet",
    "--nccl-init-addr": "give --nnodes, and the run says where the nodes meet",
    "--custom-weight-loader": "weights are pushed through isotherm's own",
    "--trust-remote-code": "isotherm never runs code that a checkpoint brings along",
}

# Each flag with its values.
Flags = dict[str, list[str]]

# The loader of pushed weights, in the server: a module that imports torch.
LOADER = "actors.sglang.plugin.weight_loader.load"
_FLOAT32_HEAD = "--enable-fp32-lm-head"
ROUTED_EXPERTS = "--enable-return-routed-experts"
# Versions of an adapter in one batch; requests of others wait. Each has a buffer on the device.
_ADAPTERS_A_BATCH = 8
# Without a bound the scheduler takes 16 GB of a CPU machine for its KV cache.
_CPU_KV_TOKENS = 16384


def server_flags(
    config: SglangConfig, positions: int, cache_tokens: int | None = None
) -> list[str]:
    """The server's flags. A flag of `config.server_flags` replaces the default of the same name.

    Args:
        config: its device is cpu or cuda.
        positions: that a request may take.
        cache_tokens: that its cache holds on a GPU; None: as many as SGLang finds room for.

    Raises:
        ConfigError: `config.server_flags` sets a flag that the engine must set itself.
    """
    on_cpu = config.device == "cpu"
    flags = {
        "--model-path": [config.model],
        "--dtype": [config.dtype],
        "--device": [config.device],
        "--weight-version": ["0"],
        "--custom-weight-loader": [LOADER],
        "--max-running-requests": [str(config.max_running_requests)],
        "--context-length": [str(positions)],
        "--skip-server-warmup": [],
        "--log-level-http": ["warning"],
    }
    flags |= _cpu_defaults() if on_cpu else _cuda_defaults(cache_tokens, config.sleeps)
    if config.turn is not None and not on_cpu:
        flags["--enable-weights-cpu-backup"] = []
    if config.routed_experts:
        flags[ROUTED_EXPERTS] = []
    if config.routed_experts and not on_cpu:
        # Kernels that choose the experts themselves tell nobody.
        flags["--moe-runner-backend"] = ["triton"]
    flags |= parse_flags(config.server_flags)
    return [part for name, values in flags.items() for part in (name, *values)]


def adapter_flags(form: AdapterForm, versions: int, device: str) -> str:
    """Flags of a server that holds so many versions of an adapter."""
    batch = min(versions, _ADAPTERS_A_BATCH)
    # The other backends are Triton kernels.
    backend = " --lora-backend torch_native" if device == "cpu" else ""
    return (
        f"--enable-lora --max-lora-rank {form.rank} --lora-target-modules "
        f"{' '.join(form.targets)} --max-loaded-loras {versions} --max-loras-per-batch {batch}"
        f"{backend}"
    )


def _cpu_defaults() -> Flags:
    return {
        "--attention-backend": ["torch_native"],
        "--sampling-backend": ["pytorch"],
        "--grammar-backend": ["none"],
        "--max-total-tokens": [str(_CPU_KV_TOKENS)],
        # An idle scheduler would spin on a core.
        "--sleep-on-idle": [],
    }


def _cuda_defaults(cache_tokens: int | None, sleeps: bool) -> Flags:
    flags: Flags = {}
    if knows_flag(_FLOAT32_HEAD):
        # bfloat16 keeps 8 bits of a logit: 0.1 at 20, which would be noise in every log-prob.
        flags[_FLOAT32_HEAD] = []
    if cache_tokens is not None:
        flags["--max-total-tokens"] = [str(cache_tokens)]
        # A bound on what is free when it starts, others included; the tokens are the bound here.
        flags["--mem-fraction-static"] = ["0.99"]
    if sleeps:
        flags["--enable-memory-saver"] = []
        # Graphs whose memory comes and goes: those of decode alone. (Where prefill is captured, the
        # logits, which the plugin divides, are made outside.)
        flags["--disable-prefill-cuda-graph"] = []
    return flags


def parse_flags(text: str, setting: str = "server_flags") -> Flags:
    """`--a 1 --b --c=2 3` as {"--a": ["1"], "--b": [], "--c": ["2", "3"]}.

    Args:
        setting: name of the setting that holds them, for errors.

    Raises:
        ConfigError: a value without a flag, or a flag that the engine must set itself.
    """
    flags: Flags = {}
    name = None
    for word in _split(text, setting):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            if name in _OURS:
                raise ConfigError(
                    f"{setting}: {name} cannot be set here: {_OURS[name]}", field=setting
                )
            flags[name] = [value] if value else []
        elif name is None:
            raise ConfigError(
                f"{setting}={text!r}: {word!r} belongs to no flag; write --name", field=setting
            )
        else:
            flags[name].append(word)
    return flags


def _split(text: str, setting: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{setting}={text!r} cannot be read: {error}", field=setting) from error
