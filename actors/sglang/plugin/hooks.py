"""SGLang plugin: input log-probs at each request's own temperature.

Stock SGLang returns `output_token_logprobs` of softmax(z / T) but `input_token_logprobs` of
softmax(z), at any T. If this package is installed, every SGLang server in the environment loads
`activate` (entry-point group `sglang.srt.plugins`) in each of its processes. If the environment
variable SWITCH is set, as in servers that isotherm starts, `activate` installs these hooks:

    ForwardBatch.init_new              records the log-prob options of each request, on the CPU
    LogitsMetadata.from_forward_batch  copies the record, for models that call it themselves
    LogitsProcessor.forward            if all T are 1: unchanged. Otherwise assigns rows to
                                       requests, and restores undivided logits for the sampler
    LogitsProcessor._get_logits        divides each chunk of logits row by row, and reads the
                                       log-probs of listed tokens
    SchedulerOutputStreamer.is_request_level_customized_info_key
                                       makes SGLang send the fields below once per request
    Scheduler._record_scheduler_state_for_paused_engine
                                       makes a paused scheduler wait for a message, not spin

The hooks in listed_steps.py list tokens at decode steps.

Fields in the response's `meta_info`. Each is a list (as all such fields of SGLang), whose element 0
is the value:

    input_logprob_temperature   [T], if input log-probs are returned; otherwise the field is
                                absent, [] or [None]. A client recognises the plugin by this field.
                                1.0 for a greedy request (T = 0), which SGLang converts to T = 1
                                with top_k = 1.
    input_logprobs_unscaled     [[...]], on request (`custom_params={"isotherm_unscaled": event}`,
                                the ids of the stop event, or [] without one) and if T != 1: log
                                softmax(z) of the prompt's scored tokens, for any number of prefill
                                chunks; a token of the event has the event's log-prob.
                                `input_token_logprobs` has one more entry, without a log-prob, at
                                its beginning.
    input_logprobs_listed       [text], on request (`custom_params={"isotherm_listed": ...}`, the
                                dict of `Listed.to_json`): log-probs at T of the tokens given for
                                each scored position, and of the likeliest others, read by
                                `read_listed`. Not a list of tuples, because there are positions
                                times tokens numbers.
    input_hidden_states         [text], on request (`custom_params={"isotherm_states": true}`): the
                                input of the head at each scored position, in the served dtype, read
                                by `read_states`. All ranks of a tensor-parallel server hold the
                                same states; the first rank's are sent.

A text is the name of a dtype, a colon, and the values in base64 (`PromptValues`).

A request that was retracted after its prefill has a second element for the second prefill.

A pass with an unknown shape raises, which ends the server; so does an unknown SGLang at the start.
SGLang only logs an `Exception` of a plugin, so `activate` raises `SystemExit`.
"""

# SGLang is an extra: types are checked without it, too.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from actors.sglang.plugin.cpu_host_cache import pin_nothing
from actors.sglang.plugin.internals import (
    BATCH,
    EXTEND,
    FORWARD,
    GET_LOGITS,
    METADATA,
    ONCE,
    PAUSED,
    SAMPLE,
    SAMPLED,
    resolve,
    unrecognised_internals,
)
from actors.sglang.plugin.listed_steps import (
    compute_logprobs,
    move_logprob_options,
    sample,
    store_wanted,
)
from actors.sglang.plugin.row_temperatures import (
    Listed,
    Pieces,
    RequestRows,
    ScaledRows,
    UnknownPassError,
    rows_of_requests,
)

logger = logging.getLogger(__name__)

Kept = TypeVar("Kept")

# "1" in a server's environment activates the plugin. The launcher sets it; users set it for an
# external server that a run uses. Other servers of the environment stay unchanged.
SWITCH = "ISOTHERM_SGLANG_PLUGIN"

TEMPERATURE_KEY = "input_logprob_temperature"
UNSCALED_KEY = "input_logprobs_unscaled"
UNSCALED_SWITCH = "isotherm_unscaled"
LISTED_KEY = "input_logprobs_listed"
LISTED_SWITCH = "isotherm_listed"
STATES_KEY = "input_hidden_states"
STATES_SWITCH = "isotherm_states"

_REFUSAL = (
    "isotherm's SGLang plugin does not recognise this SGLang, and without it input log-probs would "
    "silently be at T = 1"
)
_REMEDY = (
    "Install a supported release (0.5.22 or 0.5.23), or disable the plugin with SGLANG_PLUGINS=none"
)

_NOT_IMPORTABLE = "SGLang cannot be imported here"
_INSTALL = (
    "Install the missing package, or all packages in compatible versions: "
    "pip install -c constraints-cuda.txt '.[sglang]'"
)

_ONCE = (TEMPERATURE_KEY, UNSCALED_KEY, LISTED_KEY, STATES_KEY)

OPTIONS = "_isotherm_options"
_PASS = "_isotherm_pass"
_PIECES = "_isotherm_pieces"
_LISTED = "_isotherm_listed"


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Log-prob options of one request of a prefill batch.

    Attributes:
        temperature: temperature of the request.
        input_logprobs: True if the request returns input log-probs.
        unscaled: ids of the stop event if the request also returns log-probs at T = 1, else None.
        begin: position of the first row whose log-prob this pass returns.
        listed: tokens whose log-probs are returned at each row; None if there are none.
        states: True if the request returns the hidden states of its rows.
        pieces: values of earlier passes over the prompt, by the name of their field.
    """

    temperature: float
    input_logprobs: bool
    unscaled: Sequence[int] | None
    begin: int = 0
    listed: Listed | None = field(default=None, compare=False)
    states: bool = False
    pieces: defaultdict[str, Pieces] = field(
        default_factory=partial(defaultdict, Pieces), compare=False
    )


@dataclass(frozen=True)
class Hook:
    target: str
    function: Callable[..., Any]
    kind: str


def activate() -> None:
    """Install the hooks. SGLang calls this function first in each process of a server.

    Raises:
        SystemExit: this SGLang's internals are not the ones the hooks were written for, or it lacks
            a package that it imports.
    """
    if os.environ.get(SWITCH) != "1":
        return
    try:
        pin_nothing()
        unknown = unrecognised_internals()
        if unknown:
            raise SystemExit(f"{_REFUSAL}: {'; '.join(unknown)}. {_REMEDY}")
        from sglang.srt.plugins import hook_registry

        install(hook_registry)
    except ImportError as error:
        raise SystemExit(f"{_NOT_IMPORTABLE}: {error!r}. {_INSTALL}") from error
    except Exception as error:
        raise SystemExit(f"{_REFUSAL}: {error!r}. {_REMEDY}") from error


def install(registry_module: Any) -> None:
    registry, kinds = registry_module.HookRegistry, registry_module.HookType
    originals = {hook.target: resolve(hook.target) for hook in HOOKS}
    for hook in HOOKS:
        registry.register(hook.target, hook.function, kinds[hook.kind])
    apply_hooks = registry.apply_hooks

    @functools.wraps(apply_hooks)
    def apply_then_verify() -> None:
        # apply_hooks() runs last in load_plugins(), and only logs hooks that it cannot apply.
        apply_hooks()
        require_replaced(originals)

    registry.apply_hooks = staticmethod(apply_then_verify)


def require_replaced(originals: Mapping[str, Any]) -> None:
    """Raise SystemExit unless every target has been replaced."""
    left = [path for path, original in originals.items() if resolve(path) == original]
    if left:
        raise SystemExit(
            f"isotherm's SGLang plugin could not hook {', '.join(left)} (see the log above), and "
            "without it input log-probs would silently be at T = 1"
        )
    logger.info("isotherm: input log-probs are at each request's own temperature")


def record_requests(forward_batch: Any, _cls: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER ForwardBatch.init_new: record the log-prob options of the batch's requests on the CPU.

    The record is an attribute of the sampling info, which SGLang's prefill graphs pass to their own
    batch.
    """
    if not batch.return_logprob:
        return
    store_wanted(batch)
    if batch.forward_mode.is_decode_or_idle():
        return
    # Decoding requests, which a mixed prefill batch extends by one token.
    decoding = {id(req) for req in batch.decoding_reqs or ()}
    options = [
        LogprobOptions(
            temperature=req.sampling_params.temperature,
            input_logprobs=req.return_logprob and id(req) not in decoding,
            unscaled=(req.sampling_params.custom_params or {}).get(UNSCALED_SWITCH),
            begin=begin,
            listed=_kept_on(req, _LISTED, partial(_listed_by, req)),
            states=bool((req.sampling_params.custom_params or {}).get(STATES_SWITCH)),
            pieces=_kept_on(req, _PIECES, partial(defaultdict, Pieces)),
        )
        for req, begin in zip(batch.reqs, _begins_of(batch), strict=True)
    ]
    setattr(batch.sampling_info, OPTIONS, options)


def _begins_of(batch: Any) -> list[int]:
    """Position of each request's first scored row in this pass.

    0 for passes of speculative decoding, which have no such positions and return no input
    log-probs.
    """
    prefixes, starts = batch.prefix_lens or (), batch.extend_logprob_start_lens or ()
    if not len(prefixes) == len(starts) == len(batch.reqs):
        return [0] * len(batch.reqs)
    return [prefix + start for prefix, start in zip(prefixes, starts, strict=True)]


def _kept_on(req: Any, name: str, make: Callable[[], Kept]) -> Kept:
    """Attribute of the request, created once and kept for all chunks of its prompt."""
    if not hasattr(req, name):
        setattr(req, name, make())
    return getattr(req, name)


def _listed_by(req: Any) -> Listed | None:
    sent = (req.sampling_params.custom_params or {}).get(LISTED_SWITCH)
    return None if sent is None else Listed.read(sent)


def carry_options(metadata: Any, _cls: Any, forward_batch: Any) -> None:
    """AFTER LogitsMetadata.from_forward_batch: copy the record of the batch to the metadata."""
    setattr(metadata, OPTIONS, _options_of(forward_batch))


def _options_of(batch: Any) -> list[LogprobOptions] | None:
    own = getattr(batch, OPTIONS, None)
    return own or getattr(getattr(batch, "sampling_info", None), OPTIONS, None)


def forward(
    original: Callable[..., Any],
    processor: Any,
    input_ids: Any,
    hidden_states: Any,
    lm_head: Any,
    logits_metadata: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND LogitsProcessor.forward: apply each request's T, and return the plugin's fields."""
    run = functools.partial(
        original, processor, input_ids, hidden_states, lm_head, logits_metadata, *args, **kwargs
    )
    if not _returns_input_logprobs(logits_metadata):
        return run()
    requests = _requests_of(logits_metadata)
    echo = [a.temperature if a.input_logprobs and rows.scored else None for rows, a in requests]
    info: dict[str, list[Any]] = {TEMPERATURE_KEY: echo}
    if any(rows.scored and (a.temperature != 1 or _returns_more(a)) for rows, a in requests):
        output, values = _run_scaled(run, processor, requests, hidden_states.device)
        info |= values
    else:
        output = run()
    if any(a.input_logprobs for _, a in requests):
        output.customized_info = {**(output.customized_info or {}), **info}
    return output


def _requests_of(batch: Any) -> list[tuple[RequestRows, LogprobOptions]]:
    rows = rows_of_requests(batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu)
    options = _options_of(batch)
    if options is None or len(options) != len(rows):
        raise UnknownPassError(
            f"a prefill of {len(rows)} requests, and the temperatures of "
            f"{'none' if options is None else len(options)} are known"
        )
    return list(zip(rows, options, strict=True))


def _returns_input_logprobs(batch: Any) -> bool:
    """True if a ForwardBatch or LogitsMetadata returns input log-probs. Reads only host memory."""
    if hasattr(batch, "extend_return_logprob"):
        return bool(batch.extend_return_logprob)
    mode = batch.forward_mode
    if not (batch.return_logprob and mode.is_extend()) or mode.is_target_verify():
        return False
    lens = zip(batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu, strict=True)
    return any(start < extend for extend, start in lens)


def _returns_more(options: LogprobOptions) -> bool:
    return options.input_logprobs and (options.listed is not None or options.states)


def _run_scaled(
    run: Callable[[], Any],
    processor: Any,
    requests: Sequence[tuple[RequestRows, LogprobOptions]],
    device: torch.device,
) -> tuple[Any, dict[str, list[Any]]]:
    """Run the pass at the requests' temperatures; return its output, and the plugin's fields."""
    asked = {g: a for g, (rows, a) in enumerate(requests) if a.input_logprobs and rows.scored}
    unscaled = {
        g: a.unscaled for g, a in asked.items() if a.unscaled is not None and a.temperature != 1
    }
    listed = {
        g: (a.listed.at(a.begin, requests[g][0].scored), a.listed.others)
        for g, a in asked.items()
        if a.listed is not None
    }
    states = [g for g, a in asked.items() if a.states]
    scaled_rows = ScaledRows(
        [rows for rows, _ in requests],
        [a.temperature for _, a in requests],
        unscaled=unscaled,
        listed=listed,
        states=states,
        vocab_size=processor.vocab_size,
        device=device,
    )
    setattr(processor, _PASS, scaled_rows)
    try:
        output = run()
    finally:
        delattr(processor, _PASS)
    if output.next_token_logits is None:
        raise UnknownPassError("input log-probs without logits to sample from (item scoring?)")
    output.next_token_logits = scaled_rows.undivided_GV()
    info = {}
    for key, wanted, values_of in (
        (UNSCALED_KEY, unscaled, scaled_rows.unscaled_of),
        (LISTED_KEY, listed, scaled_rows.listed_of),
        (STATES_KEY, states, scaled_rows.states_of),
    ):
        if wanted:
            info[key] = [
                a.pieces[key].up_to(a.begin, values_of(g)) if g in wanted else None
                for g, (_, a) in enumerate(requests)
            ]
    return output, info


def get_logits(
    original: Callable[..., Any],
    processor: Any,
    hidden_states: Any,
    lm_head: Any,
    logits_metadata: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND LogitsProcessor._get_logits: divide the logits if `forward` has set a pass."""
    logits = original(processor, hidden_states, lm_head, logits_metadata, *args, **kwargs)
    scaled_rows: ScaledRows | None = getattr(processor, _PASS, None)
    if scaled_rows is None:
        return logits
    tokens_S = logits_metadata.extend_input_logprob_token_ids_gpu
    known = (scaled_rows.sampled_rows_G, scaled_rows.scored, scaled_rows.scored)
    found = (
        logits_metadata.sample_indices_cpu,
        len(logits_metadata.input_logprob_indices_cpu or ()),
        len(tokens_S),
    )
    if known != found:
        raise UnknownPassError(f"sampled rows, scored rows and tokens {found}, expected {known}")
    return scaled_rows.take(logits, tokens_S, hidden_states)


def once_per_request(_result: bool, _streamer: Any, key: str) -> bool | None:
    """AFTER is_request_level_customized_info_key: True for the plugin's fields.

    Otherwise SGLang truncates the values to the number of output tokens, 0 for max_new_tokens=0.
    """
    return True if key in _ONCE else None


def sleep_while_paused(_result: None, scheduler: Any) -> None:
    """AFTER _record_scheduler_state_for_paused_engine, which each iteration of a paused loop calls.

    Otherwise the loop of a paused scheduler, such as that of a sleeping server, occupies a core.
    With --sleep-on-idle, wait for a message for at most a second.
    """
    scheduler.maybe_sleep_on_idle()


HOOKS = (
    Hook(BATCH + ".init_new", record_requests, "AFTER"),
    Hook(METADATA + ".from_forward_batch", carry_options, "AFTER"),
    Hook(FORWARD, forward, "AROUND"),
    Hook(GET_LOGITS, get_logits, "AROUND"),
    Hook(ONCE, once_per_request, "AFTER"),
    Hook(EXTEND, move_logprob_options, "BEFORE"),
    Hook(SAMPLE, sample, "AROUND"),
    Hook(SAMPLED, compute_logprobs, "AFTER"),
    Hook(PAUSED, sleep_while_paused, "AFTER"),
)
