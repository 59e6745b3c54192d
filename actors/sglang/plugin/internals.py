"""Compatibility check: the SGLang internals that the plugin hooks or reads are still there."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping, Sequence

# sglang#36213, in no release yet. It names the field of a request as we name that of the response.
NATIVE_OPTION = "input_logprob_temperature"

_SRT = "sglang.srt."
_LOGITS = _SRT + "layers.logits_processor."
FORWARD = _LOGITS + "LogitsProcessor.forward"
GET_LOGITS = _LOGITS + "LogitsProcessor._get_logits"
METADATA = _LOGITS + "LogitsMetadata"
BATCH = _SRT + "model_executor.forward_batch_info.ForwardBatch"
_COMPONENTS = _SRT + "managers.scheduler_components."
ONCE = _COMPONENTS + "output_streamer.SchedulerOutputStreamer.is_request_level_customized_info_key"
_COLLECT = (
    _COMPONENTS
    + "batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_customized_info"
)

# What the hooks call or are called with: the leading parameters of functions ...
EXPECTED_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    FORWARD: ("self", "input_ids", "hidden_states", "lm_head", "logits_metadata"),
    GET_LOGITS: ("self", "hidden_states", "lm_head", "logits_metadata"),
    METADATA + ".from_forward_batch": ("forward_batch",),
    BATCH + ".init_new": ("batch", "model_runner"),
    ONCE: ("self", "key"),
    _COLLECT: ("self", "i", "req", "logits_output"),
}
# ... and the fields of data.
EXPECTED_FIELDS: Mapping[str, tuple[str, ...]] = {
    BATCH: (
        "forward_mode",
        "return_logprob",
        "sampling_info",
        "is_prefill_only",
        "extend_seq_lens_cpu",
        "extend_logprob_start_lens_cpu",
        "extend_input_logprob_token_ids_gpu",
    ),
    METADATA: (
        "forward_mode",
        "extend_return_logprob",
        "extend_seq_lens_cpu",
        "extend_logprob_start_lens_cpu",
        "extend_input_logprob_token_ids_gpu",
        "sample_indices_cpu",
        "input_logprob_indices_cpu",
    ),
    _LOGITS + "LogitsProcessorOutput": ("next_token_logits", "customized_info"),
    _SRT + "managers.schedule_batch.ScheduleBatch": (
        "reqs",
        "forward_mode",
        "return_logprob",
        "decoding_reqs",
        "prefix_lens",
        "extend_logprob_start_lens",
        "sampling_info",
    ),
    _SRT + "sampling.sampling_params.SamplingParams": ("temperature", "custom_params"),
}


def native_option_present() -> bool:
    """True if a request of this SGLang can name the temperature of its input log-probs."""
    paths = ("managers.io_struct.GenerateReqInput", "sampling.sampling_params.SamplingParams")
    return any(NATIVE_OPTION in _field_names(pkgutil.resolve_name(_SRT + path)) for path in paths)


def unrecognised_internals(
    parameters: Mapping[str, Sequence[str]] = EXPECTED_PARAMETERS,
    fields: Mapping[str, Sequence[str]] = EXPECTED_FIELDS,
) -> list[str]:
    """Internals that the hooks rely on and this SGLang lacks, one line each."""
    wrong = []
    for path, expected in parameters.items():
        found = _parameters(path)
        if found is None or found[: len(expected)] != tuple(expected):
            wrong.append(f"{path} takes {found}, not {tuple(expected)}" if found else f"no {path}")
    for path, expected in fields.items():
        try:
            missing = set(expected) - _field_names(pkgutil.resolve_name(path))
        except (ImportError, AttributeError):
            wrong.append(f"no {path}")
            continue
        wrong.extend(f"{path} has no {name}" for name in sorted(missing))
    return wrong


def _parameters(path: str) -> tuple[str, ...] | None:
    try:
        return tuple(inspect.signature(pkgutil.resolve_name(path)).parameters)
    except (ImportError, AttributeError, TypeError):
        return None


def _field_names(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
