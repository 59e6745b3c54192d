"""GPU memory of servers against hand calculations; flags that spread a server over GPUs."""

from pathlib import Path
from typing import Any

import chz
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from actors.sglang import start
from actors.sglang.config import SglangConfig
from actors.sglang.flags import server_flags
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.memory import ASLEEP_BYTES, ServerMemory, cache_bytes_per_token, served_bytes
from actors.sglang.parallelism import Parallelism, check_hosted, check_pushed, parallelism
from distill.errors import ConfigError
from distill.gpu import GIB, part_bytes
from tests.refusals import refuses
from tests.tiny import tiny_model_dir

QWEN3_8B = Qwen3Config(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128,
)  # fmt: skip
PARAMETERS = 8_190_735_360


@pytest.mark.parametrize(
    "config, spread, number, expected",
    [
        (QWEN3_8B, Parallelism(), 2, 36 * 2 * 8 * 128 * 2),  # 147456
        (QWEN3_8B, Parallelism(), 1, 73728),
        (QWEN3_8B, Parallelism(tensor=4), 2, 36864),
        (QWEN3_8B, Parallelism(tensor=16), 2, 18432),  # a head a rank at least
        (QWEN3_8B, Parallelism(tensor=2, pipeline=2), 2, 36864),
        (QWEN3_8B, Parallelism(tensor=8, data=8, data_attention=True), 2, 147456),
        (DeepseekV3Config(), Parallelism(tensor=8), 2, 61 * (512 + 64) * 2),
        (
            Gemma3TextConfig(num_hidden_layers=6, num_key_value_heads=2, head_dim=64),
            Parallelism(), 2, 6 * 2 * 2 * 64 * 2,
        ),
        (Qwen3NextConfig(num_hidden_layers=4), Parallelism(), 2, None),
    ],
)  # fmt: skip
def test_bytes_of_a_token(
    config: PreTrainedConfig, spread: Parallelism, number: int, expected: int | None
) -> None:
    assert cache_bytes_per_token(config, number, spread) == expected


def memory(flags: str = "", config: PreTrainedConfig = QWEN3_8B) -> ServerMemory:
    weights = 2 * PARAMETERS
    return ServerMemory.of(config, weights, dtype="bfloat16", max_running=256, flags=flags)


def test_the_cache_takes_the_remaining_memory() -> None:
    found = memory()
    assert found.weights == 2 * PARAMETERS and found.token == 147456
    # Context and workspaces; 8192 tokens of 8 hidden and 3 MLP widths; 2048 rows of logits, thrice;
    # 256 graphs.
    activations = 8192 * 2 * (8 * 4096 + 3 * 12288)
    fixed = GIB + (512 << 20)
    assert found.working == fixed + activations + 2048 * 151936 * 4 * 3 + 256 * (2 << 20)
    fewer = memory("--max-running-requests 64")
    assert found.working - fewer.working == (256 - 64) * (2 << 20)
    tokens = found.tokens_in(40 * GIB, "policy", least=40960)
    assert found.bytes(tokens) <= 40 * GIB < found.bytes(tokens + 1)
    assert tokens == (40 * GIB - found.weights - found.working) // 147456


def test_a_server_alone_has_the_cache_that_sglang_leaves_it() -> None:
    total = int(78.06 * GIB)
    found = memory().alone(total)
    # MiB: constant, 1.5 a token of prefill, a rank's, 2 a decode graph's row, 58 prefill graphs.
    reserved = 512 + 8192 * 1.5 + 128 + 2 * 256 + 58 * 8
    assert found.working == GIB + int(reserved * (1 << 20))
    assert found.tokens_in(total, "policy", least=40960) == pytest.approx(350_000, rel=0.01)
    small = memory("--chunked-prefill-size 2048").alone(total)
    assert small.working == 11 * GIB, "SGLang leaves ten at least on GPUs of more than 60"
    half = memory("--mem-fraction-static 0.5").alone(total)
    assert half.working == GIB + total // 2


def test_shares_of_a_gpu_leave_some_memory_free() -> None:
    assert part_bytes(80 * GIB, 1.0, 10 * GIB) == 66 * GIB
    assert part_bytes(24 * GIB, 0.5, 0) == 11.25 * GIB
    assert 2 * GIB < ASLEEP_BYTES < 5 * GIB, "context, workspaces, communicators"


def test_quantised_weights_are_counted_as_they_are_stored(tmp_path: Path) -> None:
    stored = {
        "plain": torch.zeros(8, 4),  # float32, served in bfloat16
        "fp8": torch.zeros(8, 4).to(torch.float8_e4m3fn),
        "packed": torch.zeros(8, 4, dtype=torch.int32),  # of eight numbers of 4 bits
        "mxfp4": torch.zeros(8, 4, dtype=torch.uint8),
    }
    save_file(stored, tmp_path / "model.safetensors")
    assert served_bytes(str(tmp_path), "bfloat16") == 32 * (2 + 1 + 4 + 1)
    assert served_bytes(str(tmp_path), "float32") == 32 * (4 + 1 + 4 + 1)


def test_flags_change_the_estimate() -> None:
    assert memory("--tp-size 2").weights == PARAMETERS
    assert memory("--kv-cache-dtype fp8_e4m3").token == 73728
    assert memory("--disable-cuda-graph").working == memory().working - (512 << 20)
    assert memory("--chunked-prefill-size 16384").working > memory().working
    assert memory("--max-total-tokens 5000").tokens_in(0, "policy", least=99999) == 5000


def test_servers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError):
        memory().tokens_in(20 * GIB, "policy", least=1)
    with pytest.raises(ConfigError):
        memory().tokens_in(40 * GIB, "policy", least=99_999_999)
    with pytest.raises(ConfigError):
        memory(config=Qwen3NextConfig(num_hidden_layers=4)).tokens_in(40 * GIB, "policy", least=1)


def test_parallelism_is_read_off_the_flags() -> None:
    assert parallelism("") == Parallelism() and Parallelism().gpus == 1
    assert parallelism("--tp-size 2") == parallelism("--tp=2") == Parallelism(tensor=2)
    everything = parallelism("--tensor-parallel-size 4 --pp-size 2 --dp 3 --nnodes 2")
    assert everything == Parallelism(tensor=4, pipeline=2, data=3, nodes=2)
    assert everything.gpus == 24 and everything.split == 8 and everything.gpus_a_node == 12
    assert parallelism("--tp 8 --dp 8 --enable-dp-attention").gpus == 8
    with refuses(ConfigError, "server_flags"):
        parallelism("--tp-size two")


@pytest.mark.parametrize(
    ("check", "flags"),
    [
        (check_hosted, "--nnodes 2 --tp 3"),
        (check_hosted, "--nnodes 2 --dp 2"),
        (check_pushed, "--pp-size 2"),
        (check_pushed, "--dp-size 2"),
    ],
)
def test_unsupported_parallelism_is_refused(check, flags: str) -> None:
    with refuses(ConfigError, "policy.server_flags"):
        check("policy.server_flags", flags)
    check("policy.server_flags", "--tp-size 4 --dp-size 4 --enable-dp-attention")
    check("policy.server_flags", "--nnodes 2 --tp-size 4 --dp-size 4 --enable-dp-attention")


def test_cache_tokens_and_sleep_are_flags_of_a_server_on_a_gpu() -> None:
    def flags(tokens: int | None = None, device: str = "cuda", **changes: Any) -> list[str]:
        config = SglangConfig(model="m", dtype="bfloat16", device=device, **changes)
        return server_flags(config, 64, tokens)

    plain = flags()
    assert "--disable-prefill-cuda-graph" not in plain
    assert "--max-total-tokens" not in plain and "--enable-memory-saver" not in plain
    assert "--attention-backend" not in plain, "SGLang knows best on a GPU"
    shared = flags(1234, sleeps=True)
    assert shared[shared.index("--max-total-tokens") + 1] == "1234"
    assert "--enable-memory-saver" in shared and "--disable-prefill-cuda-graph" in shared
    assert "--enable-memory-saver" not in flags(device="cpu", sleeps=True)
    backup = "--enable-weights-cpu-backup"
    assert backup not in shared and backup in flags(sleeps=True, turn="t")
    assert backup not in flags(device="cpu", sleeps=True, turn="t")


def test_a_server_on_a_shared_gpu_has_a_token_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    graphs_sleep: list[str | None] = []
    ready_paths: list[str] = []

    class Server:
        url, api_key, admin_api_key, exit_report = "", "", "", str

        def __init__(
            self, flags: list[str], environment: dict[str, str], ready_path: str, **_: object
        ) -> None:
            started.append(flags)
            ready_paths.append(ready_path)
            graphs_sleep.append(environment.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH"))

    monkeypatch.setattr(start, "require_sglang", lambda: None)
    monkeypatch.setattr(start, "SglangServer", Server)
    monkeypatch.setattr(start, "gpu_bytes", lambda: 80 * GIB)
    model = tiny_model_dir(tmp_path, seed=1)
    whole = SglangConfig(model=model, device="cuda", dtype="bfloat16", max_running_requests=8)
    shares = chz.replace(whole, gpu_share=0.5)
    for config in (whole, shares, chz.replace(whole, gpu_reserved=50 * GIB, sleeps=True)):
        HostedSglangEngine(config)
    alone, half, beside = started
    assert graphs_sleep == [None, None, "true"]
    assert ready_paths == ["/health"] * 3, "a first token is sampled within the start's deadline"
    assert "--max-total-tokens" not in alone, "a GPU of its own is SGLang's to fill"
    tokens = [int(flags[flags.index("--max-total-tokens") + 1]) for flags in (half, beside)]
    # Two layers of one head of 64, twice, in bfloat16; (80 - 4) / 2 and 80 - 4 - 50 GiB.
    assert tokens[0] - tokens[1] == pytest.approx(12 * GIB / (2 * 2 * 64 * 2), abs=1)
    monkeypatch.setattr(start, "gpu_bytes", lambda: None)
    with refuses(ConfigError, "cluster.gpus_per_actor"):
        HostedSglangEngine(shares)


def test_logits_are_float32_on_a_gpu() -> None:
    for device in ("cpu", "cuda"):
        made = server_flags(SglangConfig(model="m", dtype="bfloat16", device=device), 64)
        assert ("--enable-fp32-lm-head" in made) == (device == "cuda")
