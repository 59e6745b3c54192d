"""Loaded checkpoint for an engine: model, head, stop tokens, and in-place weight updates."""

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
    """Raised for weights that do not match the model, which keeps its old weights."""


class LoadedModel:
    """A causal LM for inference.

    Attributes:
        forward: tokens -> hidden states, with or without shared prefixes.
        head: hidden states (N, H) -> logits (N, V).
        device: device of the weights.
        stops: tokens that end samples: the argument, or those of the generation config, or those
            of the model's config.
        tokenizer: token ids of known texts from the checkpoint's tokenizer; None if the checkpoint
            has no tokenizer.
        recorder: recorder of routed experts; None if they are not recorded.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: the dtype is unknown, or the model's logits cannot be reproduced or its routing
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
                f"dtype={dtype!r} is not a dtype to compute in; use float32 or bfloat16",
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
        """Create a decoder that runs at most `token_budget` known tokens in one pass."""
        if isinstance(self.forward, SharedPrefixModel):
            return CachedDecoder(self.forward, token_budget, self.recorder)
        return RecomputingDecoder(self.forward, token_budget, self.recorder)

    def digests(self) -> dict[str, str]:
        """Digest of each parameter, by name. A tied head has no separate digest."""
        return {name: digest(parameter) for name, parameter in self._lm.named_parameters()}

    def copy_weights(self, new: Mapping[str, Tensor]) -> None:
        """Copy tensors with a checkpoint's names into the model, either all or none.

        A name may be absent if its tensor is tied to one that is present (usually lm_head).

        Raises:
            WeightMisfit: a tensor is unknown, missing, or has another shape. The message names the
                first one.
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
        """Build and check the conversion of a checkpoint's tensors to the model's, by shapes only.

        Raises:
            WeightMisfit: a tensor is unknown, missing, or has another shape.
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
        """Names and shapes that the tensors will have in the model.

        Raises:
            WeightMisfit: the tensors cannot be converted.
        """
        try:
            for name, tensor in converted(lambda name: new[name].to("meta")):
                yield name, tensor.shape
        except RuntimeError as error:  # from torch: the shapes cannot be concatenated or stacked
            raise WeightMisfit(f"the bundle is not this model's: {error}") from error


def _tokenizer_probe(path: str) -> TokenizerProbe | None:
    try:
        return probe_tokenizer(load_tokenizer(path))
    except CheckpointError:
        return None  # a model without a tokenizer can still be used by token ids


@torch.inference_mode()
def decode_gap(
    ours: SharedPrefixModel, rows: Sequence[TokenArray], expected: Sequence[Tensor]
) -> float:
    """Largest relative gap of `CachedDecoder`'s hidden states from the expected ones.

    The rows are prefilled, decoded for four tokens, and replayed.
    """
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
