"""`python -m benchmarks.adapter_push DIR`: pushes of a LoRA adapter, merged and unmerged.

Two SGLang servers have the same model. One receives merged weights through shared memory, the other
the adapter alone. Prints medians of push seconds and of decoding seconds, measured alternately.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from statistics import median

import chz
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from actors.sglang.config import SglangConfig
from actors.sglang.flags import adapter_flags
from actors.sglang.hosted import HostedSglangEngine
from distill.engine import GenerateRequest
from distill.models.loading import new_qwen3
from distill.sampling import TrainSampling
from distill.weights.model_weights import total_bytes
from distill.weights.shared_memory import SharedBlock
from learner.config import LearnerConfig, LoraSettings
from learner.learner import Learner
from tests.tiny import save_tokenizer

PUSHES, RANK = 20, 16
# 1.9 M, and 44.6 M parameters.
SHAPES = (
    {"vocab_size": 2048, "hidden_size": 128, "layers": 4, "heads": 2},
    {"vocab_size": 8192, "hidden_size": 640, "layers": 8, "heads": 10},
)


async def seconds(work: Awaitable[object]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def measure(model: str, learner: Learner) -> list[tuple[str, ...]]:
    form = learner.adapter(torch.float32).form
    config = SglangConfig(model=model, device="cpu")
    merged = HostedSglangEngine(config)
    flags = adapter_flags(form, 3, "cpu")
    alone = HostedSglangEngine(chz.replace(config, server_flags=flags))
    block = SharedBlock()
    ask = GenerateRequest(
        prompt_tokens_T=np.arange(2, 50, dtype=np.int32),
        sampling=TrainSampling(temperature=0.7, max_new_tokens=64),
        num_samples=16,
        seed=0,
    )

    async def push_merged(version: int) -> None:
        weights = learner.weights(torch.float32)
        weights.first_non_finite()
        block.write(weights)
        await merged.load_weights(block.share(), version)

    async def push_alone(version: int) -> None:
        weights = learner.adapter(torch.float32)
        weights.first_non_finite()
        await alone.load_weights(weights.copied(), version)

    try:
        await asyncio.gather(merged.info(), alone.info())
        pushes: dict[str, list[float]] = {"merged": [], "alone": []}
        decoding: dict[str, list[float]] = {"merged": [], "alone": []}
        for version in range(PUSHES + 2):
            pushes["merged"].append(await seconds(push_merged(version)))
            pushes["alone"].append(await seconds(push_alone(version)))
            if version % 5 == 4:
                decoding["merged"].append(await seconds(merged.generate(ask)))
                decoding["alone"].append(await seconds(alone.generate(ask)))
    finally:
        await merged.close()
        await alone.close()
    sizes = {
        "merged": total_bytes(learner.weights(torch.float32)),
        "alone": total_bytes(learner.adapter(torch.float32)),
    }
    parameters = f"{sizes['merged'] / 4e6:.1f} M"
    return [
        (
            parameters,
            way,
            f"{sizes[way] / 1e6:.2f}",
            f"{median(pushes[way][2:]):.4f}",
            f"{median(decoding[way]):.2f}",
        )
        for way in pushes
    ]


def main(directory: str) -> None:
    table = Table("parameters", "pushed", "MB", "push, s", "decoding 16 x 64 tokens, s")
    for i, shape in enumerate(SHAPES):
        model = str(Path(directory) / f"model-{i}")
        made = new_qwen3(**shape, context_length=512, eos_token_id=1, pad_token_id=0, seed=0)
        made.save_pretrained(model)
        save_tokenizer(model)
        lora = LoraSettings(rank=RANK)
        config = LearnerConfig.of(model=model, lora=lora, total_steps=1, device="cpu", threads=2)
        learner = Learner(config, model + "-failed")
        for row in asyncio.run(measure(model, learner)):
            table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1])
