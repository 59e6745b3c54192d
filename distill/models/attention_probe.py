"""Choice of attention: shared-prefix if a numerical probe shows that it reproduces the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from distill.errors import CheckpointError, ConfigError
from distill.models.attention import AttentionRule, CausalPass
from distill.models.shared_prefix import PlainModel, SharedPrefixModel
from distill.types import TokenArray

logger = logging.getLogger(__name__)

# (shared-prefix model, probe rows, true hidden states of the rows) -> largest `relative_gap`
DecodeProbe = Callable[[SharedPrefixModel, Sequence[TokenArray], Sequence[Tensor]], float]


class _WindowRecorder(CausalPass):
    """Causal pass that records each layer's sliding window."""

    def __init__(self, length: int) -> None:
        super().__init__(length, keep=False)
        self.windows: dict[int, int | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        self.windows[layer] = rule.window
        return super().attend(layer, query, key, value, rule)


def choose_model(
    model: PreTrainedModel, decode_probe: DecodeProbe | None = None
) -> SharedPrefixModel | PlainModel:
    """`SharedPrefixModel` if it reproduces the model, else `PlainModel` and a warning."""
    shares = shares_prefixes(model, decode_probe)
    return SharedPrefixModel(model) if shares else PlainModel(model)


@torch.no_grad()
def shares_prefixes(model: PreTrainedModel, decode_probe: DecodeProbe | None = None) -> bool:
    """True if `SharedPrefixModel` reproduces the model; otherwise a warning is logged.

    The model itself keeps its own attention.

    Two probe rows of different lengths, each split into a prefix and a suffix, are compared with
    the model's own forward pass; `decode_probe` may compare more. Sliding windows may be longer
    than the probe, so each layer's window is compared with the config.

    Raises:
        CheckpointError: hidden states (in float32) depend on later tokens, or on padding.
        torch.OutOfMemoryError, MemoryError, RuntimeError: there is no memory for the few tokens of
            the probe, which does not mean that the architecture is unsupported.
    """
    native = model.config._attn_implementation or "sdpa"
    why_not = "its attention cannot be replaced"
    if model._can_set_attn_implementation():
        rows = _probe_rows(model.config.get_text_config().vocab_size)
        try:
            expected = [PlainModel(model).hidden([row])[0] for row in rows]
            ours = SharedPrefixModel(model)
            why_not = compare_passes(ours, model.config.get_text_config(), rows, expected)
            if not why_not and decode_probe:
                why_not = _too_large(decode_probe(ours, rows, expected), expected[0].dtype)
            if not why_not:
                return True
        except Exception as error:  # a model's code may fail in any way on this attention
            if _out_of_memory(error):
                raise
            why_not = f"{type(error).__name__}: {error}"
        finally:
            model.set_attn_implementation(native)
    _require_causal(model)
    logger.warning(
        "%s keeps its own attention and recomputes the full context for each response (slow): %s",
        type(model).__name__,
        why_not,
    )
    return False


def _require_causal(model: PreTrainedModel) -> None:
    """Raise CheckpointError if the result of a row depends on a longer row of the same batch.

    Only float32 models are checked: in other dtypes rounding may route a token to another expert.
    """
    if model.dtype != torch.float32:
        return
    rows, plain = _probe_rows(model.config.get_text_config().vocab_size), PlainModel(model)
    alone, together = plain.hidden(rows[1:])[0], plain.hidden(rows)[1]
    if gap := _too_large(relative_gap(together[: len(alone)], alone), alone.dtype):
        raise CheckpointError(
            f"{type(model).__name__} is not a causal language model: its hidden states depend on "
            f"later tokens or on padding ({gap}). Check whether its config.json lacks a field, "
            "such as is_decoder"
        )


def check_packs(model: PreTrainedModel) -> None:
    """Raise ConfigError if the model's layers show that packed rows would influence one another.

    `model` may be on the meta device. `shares_prefixes` detects other such models once loaded.
    """
    config = model.config.get_text_config()
    known = {"full_attention", "sliding_attention"}
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        layers = f"layers of kind {', '.join(others)}"
    elif model._is_stateful:
        layers = "recurrent layers"
    elif any(getattr(module, "sinks", None) is not None for module in model.modules()):
        layers = "layers with attention sinks"
    elif not model._can_set_attn_implementation():
        layers = "layers with attention code of their own"
    else:
        return
    raise ConfigError(
        f"packing=True: {config.model_type} has {layers}, which keep a state along a sequence or "
        "use unsupported attention, so packed rows would affect one another. Use packing=False",
        field="learner.packing",
    )


def _out_of_memory(error: Exception) -> bool:
    """True for an out-of-memory error of a GPU's allocator or of main memory."""
    # torch's allocator of main memory raises a RuntimeError that contains its name.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _probe_rows(vocab_size: int) -> list[TokenArray]:
    generator = np.random.default_rng(0)
    return [generator.integers(vocab_size, size=n).astype(np.int32) for n in (9, 6)]


def compare_passes(
    ours: SharedPrefixModel, config: Any, rows: list[TokenArray], expected: list[Tensor]
) -> str:
    recorder = _WindowRecorder(len(rows[0]))
    tokens_1T = torch.from_numpy(rows[0].astype(np.int64))[None].to(ours.device)
    ours.run(tokens_1T, torch.arange(len(rows[0]), device=ours.device)[None], recorder)
    declared = declared_windows(config)
    if declared is None or recorder.windows != declared:
        return f"not all kinds of layers are supported: {getattr(config, 'layer_types', None)}"
    prefixes, suffixes = [row[:-4] for row in rows], [row[-4:] for row in rows]
    after_NSH = ours.hidden_after(prefixes, [0, 1], suffixes)
    gaps = [relative_gap(after_NSH[i], expected[i][-4:]) for i in range(len(rows))]
    return _too_large(max(gaps), expected[0].dtype)


def _too_large(gap: float, dtype: torch.dtype) -> str:
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    return "" if gap <= tolerance else f"hidden states of a probe differ by {gap:.2g} (relative)"


def relative_gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference as a share of the largest value."""
    difference = (ours.float() - theirs.float()).abs().max()
    return float(difference / theirs.float().abs().max())


def declared_windows(config: Any) -> dict[int, int | None] | None:
    """Sliding window of each layer by the config; None if a kind of layer is not supported."""
    layers = range(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return dict.fromkeys(layers, window)
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    return {layer: window if kinds[layer] == "sliding_attention" else None for layer in layers}
