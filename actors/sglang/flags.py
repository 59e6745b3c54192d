"""SGLang's command line for one engine: defaults for the device, overridden by the user's flags."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.sglang.config import SglangConfig
from distill.errors import ConfigError

if TYPE_CHECKING:  # settings must not import torch
    from distill.weights.adapter import AdapterForm

# Flags that users may not set: the engine depends on their values.
_OURS = {
    "--model-path": "set student= or teacher=",
    "--host": "the engine chooses it",
    "--port": "the engine chooses a free one",
    "--api-key": "a key is made for each run",
    "--admin-api-key": "a key is made for each run",
    "--dtype": "set dtype=",
    "--device": "set device=",
    "--weight-version": "the run numbers its weights",
    "--node-rank": "set --nnodes, and the run numbers the nodes",
    "--dist-init-addr": "set --nnodes, and the run chooses the address",
    "--nccl-init-addr": "set --nnodes, and the run chooses the address",
    "--custom-weight-loader": "weights are pushed through isotherm's loader",
    "--trust-remote-code": "isotherm never runs code from a checkpoint",
}

# Flag name -> values.
Flags = dict[str, list[str]]

# The server's loader of pushed weights. Named, not imported: its module imports torch.
LOADER = "actors.sglang.plugin.weight_loader.load"
# Adapter versions in one batch, each with a buffer on the device; requests of other versions wait.
_ADAPTERS_A_BATCH = 8
# Without a bound the scheduler allocates 16 GB of main memory for its KV cache on a CPU.
_CPU_KV_TOKENS = 16384


def server_flags(
    config: SglangConfig, positions: int, cache_tokens: int | None = None
) -> list[str]:
    """Flags of a server. A flag in `config.server_flags` replaces the default of the same name.

    Args:
        config: settings whose device is cpu or cuda.
        positions: maximum number of positions of a request.
        cache_tokens: tokens that the cache on a GPU holds; None: as many as SGLang finds room for.

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
        flags["--enable-return-routed-experts"] = []
        if not on_cpu:
            # Other kernels choose the experts internally, so SGLang cannot record them.
            flags["--moe-runner-backend"] = ["triton"]
    flags |= parse_flags(config.server_flags)
    return [part for name, values in flags.items() for part in (name, *values)]


def adapter_flags(form: AdapterForm, versions: int, device: str) -> str:
    """Flags of a server that holds up to `versions` versions of an adapter."""
    batch = min(versions, _ADAPTERS_A_BATCH)
    # The other backends are Triton kernels, which do not run on a CPU.
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
        # Otherwise an idle scheduler spins on a core.
        "--sleep-on-idle": [],
    }


def _cuda_defaults(cache_tokens: int | None, sleeps: bool) -> Flags:
    # bfloat16 has 8 bits of precision: a step of 0.1 at a logit of 20, noise in every log-prob.
    flags: Flags = {"--enable-fp32-lm-head": []}
    if cache_tokens is not None:
        flags["--max-total-tokens"] = [str(cache_tokens)]
        # SGLang's bound depends on the GPU memory that other processes use when the server starts.
        # Here --max-total-tokens is the bound.
        flags["--mem-fraction-static"] = ["0.99"]
    if sleeps:
        flags["--enable-memory-saver"] = []
        # SGLang can release the memory of decode graphs only. (The plugin works with captured
        # prefills, too: the logits that it divides are computed outside of the graph.)
        flags["--disable-prefill-cuda-graph"] = []
    return flags


def parse_flags(text: str, setting: str = "server_flags") -> Flags:
    """Parse `--a 1 --b --c=2 3` into {"--a": ["1"], "--b": [], "--c": ["2", "3"]}.

    Args:
        setting: name of the setting that holds the flags, for errors.

    Raises:
        ConfigError: a value has no flag, or a flag is one that the engine sets.
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
                f"{setting}={text!r}: {word!r} does not belong to a flag; write --name"
            )
        else:
            flags[name].append(word)
    return flags


def _split(text: str, setting: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{setting}={text!r} cannot be read: {error}") from error
