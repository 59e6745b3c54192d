"""Compatibility check of the SGLang internals that the plugin hooks or reads."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

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
_SCHEDULE = _SRT + "managers.schedule_batch."
EXTEND = _SCHEDULE + "ScheduleBatch.prepare_for_extend"
SAMPLE = _SRT + "layers.sampler.Sampler.forward"
SAMPLED = _SRT + "layers.logprob_processor.OutputLogprobProcessor.compute_logprobs"
_SCHEDULER = _SRT + "managers.scheduler.Scheduler."
PAUSED = _SCHEDULER + "_record_scheduler_state_for_paused_engine"

# Leading parameters of the functions that the hooks replace or call.
EXPECTED_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    FORWARD: ("self", "input_ids", "hidden_states", "lm_head", "logits_metadata"),
    GET_LOGITS: ("self", "hidden_states", "lm_head", "logits_metadata"),
    METADATA + ".from_forward_batch": ("forward_batch",),
    BATCH + ".init_new": ("batch", "model_runner"),
    ONCE: ("self", "key"),
    _COLLECT: ("self", "i", "req", "logits_output"),
    EXTEND: ("self",),
    SAMPLE: ("self", "logits_output", "sampling_info", "return_logprob"),
    SAMPLED: ("self", "logprobs"),
    PAUSED: ("self",),
    _SCHEDULER + "maybe_sleep_on_idle": ("self",),
}
# Fields that the hooks read or set.
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
    _SCHEDULE + "ScheduleBatch": (
        "reqs",
        "forward_mode",
        "return_logprob",
        "decoding_reqs",
        "prefix_lens",
        "extend_logprob_start_lens",
        "sampling_info",
        "spec_algorithm",
    ),
    _SCHEDULE + "ReqLogprob": ("top_logprobs_num", "token_ids_logprob"),
    _SRT + "sampling.sampling_params.SamplingParams": ("temperature", "custom_params"),
}


def unrecognised_internals(
    parameters: Mapping[str, Sequence[str]] = EXPECTED_PARAMETERS,
    fields: Mapping[str, Sequence[str]] = EXPECTED_FIELDS,
) -> list[str]:
    """Internals that the hooks rely on and this SGLang lacks, one line each.

    Raises:
        ImportError: SGLang lacks a package that it imports.
    """
    wrong = []
    for path, expected in parameters.items():
        found = _parameters(path)
        if found is None or found[: len(expected)] != tuple(expected):
            wrong.append(f"{path} takes {found}, not {tuple(expected)}" if found else f"no {path}")
    for path, expected in fields.items():
        try:
            missing = set(expected) - _field_names(resolve(path))
        except AttributeError:
            wrong.append(f"no {path}")
            continue
        wrong.extend(f"{path} has no {name}" for name in sorted(missing))
    return wrong


def resolve(path: str) -> Any:
    """Import the object at a dotted path.

    The module ends before the first capitalised part, or else before the last part. Without the
    explicit end, `pkgutil.resolve_name` would report a failed import as a missing attribute.

    Raises:
        AttributeError: there is no such module, or no such name in the module.
        ImportError: a module on the path imports a package that is not installed.
    """
    parts = path.split(".")
    end = next((i for i, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
    try:
        return pkgutil.resolve_name(f"{'.'.join(parts[:end])}:{'.'.join(parts[end:])}")
    except ModuleNotFoundError as error:
        if f"{path}.".startswith(f"{error.name}."):
            raise AttributeError(f"there is no module {error.name}") from error
        raise


def _parameters(path: str) -> tuple[str, ...] | None:
    try:
        return tuple(inspect.signature(resolve(path)).parameters)
    except (AttributeError, TypeError):
        return None


def _field_names(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
