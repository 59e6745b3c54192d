"""A loaded checkpoint: its facts for an engine, and in-place updates of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from actors.embedded.decoding import Decoder, RecomputingDecoder, Row
from actors.embedded.kv_cache import CachedDecoder
from actors.embedded.routing_recorder import RoutingRecorder
from distill.errors import CheckpointError, ConfigError, EngineError
from distill.models.attention_probe import choose_model, relative_gap
from distill.models.checkpoint_names import Conversion
from distill.models.loading import (
    context_length,
    load_causal_lm,
    resolve_device,
    stop_token_ids,
    vocab_size,
)
from distill.models.shared_prefix import SharedPrefixModel
from distill.models.vocabulary_head import VocabularyHead
from distill.sampling import EvalSampling
from distill.stops import StopTokens
from distill.tokenizer import TokenizerProbe, load_tokenizer, probe_tokenizer
from distill.types import TokenArray
from distill.weights.digests import digest
from distill.weights.model_weights import TensorLayout


class WeightMisfit(EngineError):
    """A weight bundle that is not this model's. The old weights are still in place."""


class LoadedModel:
    """A causal LM for inference.

    Attributes:
        forward: tokens -> hidden states, with or without shared prefixes.
        head: hidden states (N, H) -> logits (N, V).
        device: device of the weights.
        stops: where samples end: those given, else the generation config's, else the model's.
        tokenizer: what the checkpoint's tokenizer makes of known texts; None if it has none.
        recorder: of the experts that tokens are routed to; None: nobody asks for them.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: an unknown dtype, a model whose logits cannot be reproduced, or whose routing
            cannot be recorded.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        device: str,
        stops: StopTokens | None = None,
        routed_experts: bool = False,
    ) -> None:
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
            raise ConfigError(
                f"dtype={dtype!r} is not one to compute in; use float32 or bfloat16", field="dtype"
            )
        self.device = torch.device(resolve_device(device))
        self._lm = load_causal_lm(path, dtype=torch_dtype, device=resolve_device(device)).eval()
        self.stops = StopTokens.of([stop_token_ids(path)]) if stops is None else stops
        self.head = VocabularyHead.of(self._lm, self.stops.event)
        self.vocab_size = vocab_size(self._lm.config)
        self.context_length = context_length(self._lm.config)
        self.tokenizer = _tokenizer_probe(path)
        self.forward = choose_model(self._lm, decode_gap)
        self.recorder = RoutingRecorder(self._lm) if routed_experts else None

    def decoder(self, token_budget: int) -> Decoder:
        """A decoder of its own, running at most `token_budget` known tokens in one pass."""
        if isinstance(self.forward, SharedPrefixModel):
            return CachedDecoder(self.forward, token_budget, self.recorder)
        return RecomputingDecoder(self.forward, token_budget, self.recorder)

    def digests(self) -> dict[str, str]:
        """Digest of each parameter, by name; a tied head's is its embedding's."""
        return {name: digest(parameter) for name, parameter in self._lm.named_parameters()}

    def copy_weights(self, new: Mapping[str, Tensor]) -> None:
        """Copies a bundle into the model, all of it or nothing. Its names are a checkpoint's.

        A name may be absent if its tensor is tied to one that is there (lm_head, usually).

        Raises:
            WeightMisfit: the first name that is unknown, missing, or of another shape.
        """
        converted = self._conversion(new)
        own = self._lm.state_dict()
        for name, tensor in converted(new.__getitem__):
            own[name].copy_(tensor)

    def check_layout(self, layouts: Sequence[TensorLayout]) -> None:
        """Raise WeightMisfit if `copy_weights` would refuse tensors of these layouts."""
        self._conversion(
            {
                layout.name: torch.empty(layout.shape, dtype=layout.torch_dtype, device="meta")
                for layout in layouts
            }
        )

    def _conversion(self, new: Mapping[str, Tensor]) -> Conversion:
        """Conversion of a checkpoint's tensors, whose shapes alone matter, to the model's.

        Raises:
            WeightMisfit: the first name that is unknown, missing, or of another shape.
        """
        own = self._lm.state_dict()
        converted = Conversion(self._lm, new)
        given = set()
        for name, shape in self._shapes(converted, new):
            if name not in own:
                raise WeightMisfit(f"the bundle holds {name!r}, which the model does not have")
            if shape != own[name].shape:
                raise WeightMisfit(
                    f"{name!r} has shape {tuple(shape)} in the bundle and "
                    f"{tuple(own[name].shape)} in the model"
                )
            given.add(own[name].data_ptr())
        for name, tensor in own.items():
            if tensor.data_ptr() not in given:
                raise WeightMisfit(f"the bundle lacks {name!r}")
        return converted

    def _shapes(
        self, converted: Conversion, new: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, torch.Size]]:
        """Names and shapes that a bundle will have in the model. Raises WeightMisfit."""
        try:
            for name, tensor in converted(lambda name: new[name].to("meta")):
                yield name, tensor.shape
        except RuntimeError as error:  # of torch: they cannot be put together
            raise WeightMisfit(f"the bundle is not this model's: {error}") from error


def _tokenizer_probe(path: str) -> TokenizerProbe | None:
    try:
        return probe_tokenizer(load_tokenizer(path))
    except CheckpointError:
        return None  # a model without one is scored and sampled by token ids all the same


@torch.inference_mode()
def decode_gap(
    ours: SharedPrefixModel, rows: Sequence[TokenArray], expected: Sequence[Tensor]
) -> float:
    """Largest relative gap of two ragged rows prefilled, decoded four tokens, and replayed."""
    prompts = [row[: len(row) - 4] for row in rows]
    sampling = EvalSampling(temperature=0, max_new_tokens=5)  # nothing is sampled here
    live = [Row(None, prompt, sampling, 5, np.zeros(5)) for prompt in prompts]
    decoder = CachedDecoder(ours, 1024)
    seen = [decoder.admit(live)]
    for step in range(4):
        tokens_N = np.array([row[len(row) - 4 + step] for row in rows], dtype=np.int64)
        for row, token in zip(live, tokens_N.tolist(), strict=True):
            row.tokens.append(token)
        seen.append(decoder.feed(tokens_N))
    decoder.reset()
    seen.append(decoder.admit(live))
    return max(
        relative_gap(hidden_NH[index], expected[index][len(row) - 5 + min(step, 4)])
        for step, hidden_NH in enumerate(seen)
        for index, row in enumerate(rows)
    )
