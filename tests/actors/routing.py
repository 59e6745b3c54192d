"""Requests that return the experts of a mixture, and the expected experts."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from distill.engine import GenerateRequest, Sample
from distill.models.loading import load_causal_lm
from distill.models.routers import routers_of
from distill.routing import ExpertArray, MixtureShape
from distill.sampling import TrainSampling
from tests.tiny import VOCAB_SIZE


def ask(
    prompt_T: np.ndarray, *, samples: int = 1, known: int = 0, seed: int = 0, new: int = 9
) -> GenerateRequest:
    return GenerateRequest(
        prompt_tokens_T=prompt_T, sampling=TrainSampling(temperature=1.0, max_new_tokens=new),
        num_samples=samples, seed=seed, experts=True, known=known,
    )  # fmt: skip


def prompt(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(2, VOCAB_SIZE, length).astype(np.int32)


def chosen_by(path: str, tokens_T: np.ndarray) -> ExpertArray:
    """Experts of a sequence by one forward pass of the model."""
    model = load_causal_lm(path, dtype=torch.float32, device="cpu").eval()
    shape = MixtureShape.of(model.config)
    assert shape is not None
    made = np.zeros((len(tokens_T), shape.layers, shape.top_k), shape.dtype)

    def note(layer: int, _module: object, _inputs: object, outputs: Sequence[torch.Tensor]) -> None:
        made[:, layer] = outputs[2].numpy()

    for layer, router in routers_of(model).items():
        router.register_forward_hook(partial(note, layer))
    with torch.no_grad():
        model(torch.from_numpy(tokens_T.astype(np.int64))[None], use_cache=False)
    return made


def check_experts(path: str, request: GenerateRequest, samples: Sequence[Sample]) -> None:
    for sample in samples:
        chain_T = np.concatenate([request.prompt_tokens_T, sample.tokens_T])
        expected = chosen_by(path, chain_T)[request.known : -1]
        assert sample.experts_NLK is not None and sample.experts_NLK.dtype == expected.dtype
        # Of two equal scores either may come first.
        np.testing.assert_array_equal(np.sort(sample.experts_NLK), np.sort(expected))
