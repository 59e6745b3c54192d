"""SGLang plugin: input log-probs at each request's own temperature.

Stock SGLang returns `output_token_logprobs` of softmax(z / T) but `input_token_logprobs` of
softmax(z), whatever T the request names. With this package installed, every SGLang server of the
environment loads `activate` (entry-point group `sglang.srt.plugins`) in each of its processes; in
those that ask for it by an environment variable (SWITCH, set in servers of our own)

    ForwardBatch.init_new              notes what each request asked for, on the CPU
    LogitsMetadata.from_forward_batch  carries the note along, for models that call it themselves
    LogitsProcessor.forward            T = 1 throughout: stock. Otherwise it works out whose row is
                                       whose, and gives the sampler its undivided logits back
    LogitsProcessor._get_logits        divides each chunk of logits, row by row, and reads listed
                                       tokens' log-probs off it
    SchedulerOutputStreamer.is_request_level_customized_info_key
                                       has the fields below sent once per request
    Scheduler._record_scheduler_state_for_paused_engine
                                       has a paused scheduler wait for a message, not spin

What requests ask for with sampled tokens is listed by the hooks of listed_steps.py.

In the response's `meta_info`, each a list (as SGLang has all such fields) whose element 0 counts:

    input_logprob_temperature   [T]. Only where input log-probs are returned: a server without the
                                plugin has no such field, so a client can tell. Elsewhere the field
                                is absent, [] or [None]. 1.0 for a greedy request (T = 0), which
                                SGLang turns into T = 1 with top_k = 1.
    input_logprobs_unscaled     [[...]], on request (`custom_params={"isotherm_unscaled": true}`)
                                and at T != 1: log softmax(z) of the prompt's scored tokens, in
                                however many chunks it was prefilled. It lines up with
                                `input_token_logprobs`, which begin with one that has none.
    input_logprobs_listed       [text], on request (`custom_params={"isotherm_listed": ...}`, what
                                `Listed.to_json` makes): the log-probs at T of tokens that are given
                                for each scored position, and of the likeliest others; float32 in
                                base64, as `read_listed` takes it. Not a list of tuples: these are
                                as many numbers as positions times tokens.
    input_hidden_states         [text], on request (`custom_params={"isotherm_states": true}`): what
                                the head is given for each scored position, in the served dtype:
                                its name, a colon, and the bytes in base64, as `read_states` takes
                                them. Ranks of a tensor-parallel server hold the same states; the
                                first one's are sent.

A request that was retracted after its prefill has a second element for the second prefill.

A pass that it does not understand raises, which ends the server; an SGLang that it does not
recognise ends at start. SGLang only logs an `Exception` of a plugin, hence `SystemExit`.
"""

# SGLang is an extra: types are checked without it, too.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from actors.sglang.plugin.cpu_host_cache import pin_nothing
from actors.sglang.plugin.internals import (
    BATCH,
    EXTEND,
    FORWARD,
    GET_LOGITS,
    METADATA,
    NATIVE_OPTION,
    ONCE,
    PAUSED,
    SAMPLE,
    SAMPLED,
    native_option_present,
    resolve,
    unrecognised_internals,
)
from actors.sglang.plugin.listed_steps import (
    compute_logprobs,
    note_wanted,
    sample,
    take_over,
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

# "1" in a server's environment asks for the plugin: our launcher sets it, and so does whoever
# starts a server of their own for a run. Other servers are none of its business.
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
    "Install a release that it knows (0.5.22 or 0.5.23), or switch it off with SGLANG_PLUGINS=none"
)

_NOT_IMPORTABLE = "SGLang cannot be imported here"
_INSTALL = (
    "Install the package that is missing, or all of them in the versions that go together: "
    "pip install -c constraints-cuda.txt '.[sglang]'"
)

_ONCE = (TEMPERATURE_KEY, UNSCALED_KEY, LISTED_KEY, STATES_KEY)

NOTE = "_isotherm_asked"
_PASS = "_isotherm_pass"
_PIECES = "_isotherm_pieces"
_LISTED = "_isotherm_listed"
_STATES = "_isotherm_states"


@dataclass(frozen=True, slots=True)
class Asked:
    """Log-prob options of one request of a prefill batch.

    Attributes:
        begin: position of the first row whose log-prob this pass returns.
        pieces: what earlier passes over its prompt have returned, unscaled.
        listed: tokens that it wants to know of at each row.
        listed_pieces: of those, what earlier passes have returned.
        states: it wants the hidden states of its rows; `state_pieces`: those of earlier passes.
    """

    temperature: float
    input_logprobs: bool
    unscaled: bool
    begin: int = 0
    pieces: Pieces = field(default_factory=Pieces, compare=False)
    listed: Listed | None = field(default=None, compare=False)
    listed_pieces: Pieces = field(default_factory=Pieces, compare=False)
    states: bool = False
    state_pieces: Pieces = field(default_factory=Pieces, compare=False)


@dataclass(frozen=True)
class Hook:
    target: str
    function: Callable[..., Any]
    kind: str


def activate() -> None:
    """SGLang calls this in each process of a server before it does anything else.

    Raises:
        SystemExit: this SGLang's internals are not the ones the hooks were written for, or it lacks
            a package that it imports.
    """
    if os.environ.get(SWITCH) != "1":
        return
    pin_nothing()
    try:
        _activate()
    except ImportError as error:
        raise SystemExit(f"{_NOT_IMPORTABLE}: {error!r}. {_INSTALL}") from error
    except Exception as error:
        raise SystemExit(f"{_REFUSAL}: {error!r}. {_REMEDY}") from error


def _activate() -> None:
    if native_option_present():
        # A warning, because SGLang sets up its logging only after its plugins.
        logger.warning("isotherm: SGLang has %s itself; the plugin steps aside", NATIVE_OPTION)
        return
    unknown = unrecognised_internals()
    if unknown:
        raise SystemExit(f"{_REFUSAL}: {'; '.join(unknown)}. {_REMEDY}")
    from sglang.srt.plugins import hook_registry

    install(hook_registry)


def install(registry_module: Any) -> None:
    registry, kinds = registry_module.HookRegistry, registry_module.HookType
    originals = {hook.target: resolve(hook.target) for hook in HOOKS}
    for hook in HOOKS:
        registry.register(hook.target, hook.function, kinds[hook.kind])
    apply_hooks = registry.apply_hooks

    @functools.wraps(apply_hooks)
    def apply_then_verify() -> None:
        # It runs last of all in load_plugins(), and only logs a hook that it could not apply.
        apply_hooks()
        require_replaced(originals)

    registry.apply_hooks = staticmethod(apply_then_verify)


def require_replaced(originals: Mapping[str, Any]) -> None:
    """Raises SystemExit unless every target is something else by now."""
    left = [path for path, original in originals.items() if resolve(path) == original]
    if left:
        raise SystemExit(
            f"isotherm's SGLang plugin could not hook {', '.join(left)} (see the log above), and "
            "without it input log-probs would silently be at T = 1"
        )
    logger.info("isotherm: input log-probs are at each request's own temperature")


def note_requests(forward_batch: Any, _cls: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER ForwardBatch.init_new: keeps, on the CPU, what the batch's requests asked for.

    The note hangs on the sampling info, which SGLang's prefill graphs hand to their own batch.
    """
    if not batch.return_logprob:
        return
    note_wanted(batch)
    if batch.forward_mode.is_decode_or_idle():
        return
    # Requests in the midst of decoding, extended by one token in a prefill batch.
    decoding = {id(req) for req in batch.decoding_reqs or ()}
    asked = [
        Asked(
            temperature=req.sampling_params.temperature,
            input_logprobs=req.return_logprob and id(req) not in decoding,
            unscaled=bool((req.sampling_params.custom_params or {}).get(UNSCALED_SWITCH)),
            begin=begin,
            pieces=_kept_on(req, _PIECES, Pieces),
            listed=_kept_on(req, _LISTED, partial(_listed_by, req)),
            listed_pieces=_kept_on(req, _LISTED + _PIECES, Pieces),
            states=bool((req.sampling_params.custom_params or {}).get(STATES_SWITCH)),
            state_pieces=_kept_on(req, _STATES + _PIECES, Pieces),
        )
        for req, begin in zip(batch.reqs, _begins_of(batch), strict=True)
    ]
    setattr(batch.sampling_info, NOTE, asked)


def _begins_of(batch: Any) -> list[int]:
    """Position of each request's first scored row in this pass.

    Passes of speculative decoding keep no such account, and return no input log-probs.
    """
    prefixes, starts = batch.prefix_lens or (), batch.extend_logprob_start_lens or ()
    if not len(prefixes) == len(starts) == len(batch.reqs):
        return [0] * len(batch.reqs)
    return [prefix + start for prefix, start in zip(prefixes, starts, strict=True)]


def _kept_on(req: Any, name: str, make: Callable[[], Kept]) -> Kept:
    """Kept on the request, from one chunk of its prompt to the next."""
    if not hasattr(req, name):
        setattr(req, name, make())
    return getattr(req, name)


def _listed_by(req: Any) -> Listed | None:
    sent = (req.sampling_params.custom_params or {}).get(LISTED_SWITCH)
    return None if sent is None else Listed.read(sent)


def carry_note(metadata: Any, _cls: Any, forward_batch: Any) -> None:
    """AFTER LogitsMetadata.from_forward_batch."""
    setattr(metadata, NOTE, _note_of(forward_batch))


def _note_of(batch: Any) -> list[Asked] | None:
    own = getattr(batch, NOTE, None)
    return own or getattr(getattr(batch, "sampling_info", None), NOTE, None)


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
    """AROUND LogitsProcessor.forward: T where T is asked for, and the echo of what was done."""
    run = functools.partial(
        original, processor, input_ids, hidden_states, lm_head, logits_metadata, *args, **kwargs
    )
    if not _returns_input_logprobs(logits_metadata):
        return run()
    requests = _requests_of(logits_metadata)
    echo = [a.temperature if a.input_logprobs and rows.scored else None for rows, a in requests]
    info: dict[str, list[Any]] = {TEMPERATURE_KEY: echo}
    if not any(
        rows.scored and (a.temperature != 1 or _lists(rows, a) or _wants_states(rows, a))
        for rows, a in requests
    ):
        output = run()
    else:
        scaled_rows = ScaledRows(
            [rows for rows, _ in requests],
            [a.temperature for _, a in requests],
            unscaled=[g for g, (rows, a) in enumerate(requests) if _wants_unscaled(rows, a)],
            listed={
                g: (a.listed.at(a.begin, rows.scored), a.listed.others)
                for g, (rows, a) in enumerate(requests)
                if _lists(rows, a) and a.listed is not None
            },
            states=[g for g, (rows, a) in enumerate(requests) if _wants_states(rows, a)],
            vocab_size=processor.vocab_size,
            device=hidden_states.device,
        )
        output = _run_scaled(run, processor, scaled_rows)
        for key, wants, pieces_of, values_of in (
            (UNSCALED_KEY, _wants_unscaled, attrgetter("pieces"), scaled_rows.unscaled_of),
            (LISTED_KEY, _lists, attrgetter("listed_pieces"), scaled_rows.listed_of),
            (STATES_KEY, _wants_states, attrgetter("state_pieces"), scaled_rows.states_of),
        ):
            if any(wants(rows, a) for rows, a in requests):
                info[key] = [
                    pieces_of(a).up_to(a.begin, values_of(g), as_they_are=key == STATES_KEY)
                    if wants(rows, a)
                    else None
                    for g, (rows, a) in enumerate(requests)
                ]
    if any(a.input_logprobs for _, a in requests):
        output.customized_info = {**(output.customized_info or {}), **info}
    return output


def _requests_of(batch: Any) -> list[tuple[RequestRows, Asked]]:
    rows = rows_of_requests(batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu)
    asked = _note_of(batch)
    if asked is None or len(asked) != len(rows):
        raise UnknownPassError(
            f"a prefill of {len(rows)} requests, and the temperatures of "
            f"{'none' if asked is None else len(asked)} are known"
        )
    return list(zip(rows, asked, strict=True))


def _wants_unscaled(rows: RequestRows, asked: Asked) -> bool:
    return asked.unscaled and asked.input_logprobs and rows.scored > 0 and asked.temperature != 1


def _lists(rows: RequestRows, asked: Asked) -> bool:
    return asked.listed is not None and asked.input_logprobs and rows.scored > 0


def _wants_states(rows: RequestRows, asked: Asked) -> bool:
    return asked.states and asked.input_logprobs and rows.scored > 0


def _returns_input_logprobs(batch: Any) -> bool:
    """True if a ForwardBatch, or LogitsMetadata, returns input log-probs. Host data only."""
    if hasattr(batch, "extend_return_logprob"):
        return bool(batch.extend_return_logprob)
    mode = batch.forward_mode
    if not (batch.return_logprob and mode.is_extend()) or mode.is_target_verify():
        return False
    lens = zip(batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu, strict=True)
    return any(start < extend for extend, start in lens)


def _run_scaled(run: Callable[[], Any], processor: Any, scaled_rows: ScaledRows) -> Any:
    setattr(processor, _PASS, scaled_rows)
    try:
        output = run()
    finally:
        delattr(processor, _PASS)
    if output.next_token_logits is None:
        raise UnknownPassError("input log-probs without logits to sample from (item scoring?)")
    output.next_token_logits = scaled_rows.undivided_GV()
    return output


def get_logits(
    original: Callable[..., Any],
    processor: Any,
    hidden_states: Any,
    lm_head: Any,
    logits_metadata: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND LogitsProcessor._get_logits: divides where `forward` has said so."""
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
    """AFTER is_request_level_customized_info_key.

    Otherwise SGLang cuts the values to the output tokens, of which max_new_tokens=0 has none.
    """
    return True if key in _ONCE else None


def rest_while_paused(_result: None, scheduler: Any) -> None:
    """AFTER _record_scheduler_state_for_paused_engine, which each turn of a paused loop calls.

    The loop of a paused scheduler, and so of a server that sleeps, takes a whole core otherwise.
    With --sleep-on-idle it waits for a message, a second at the longest.
    """
    scheduler.maybe_sleep_on_idle()


HOOKS = (
    Hook(BATCH + ".init_new", note_requests, "AFTER"),
    Hook(METADATA + ".from_forward_batch", carry_note, "AFTER"),
    Hook(FORWARD, forward, "AROUND"),
    Hook(GET_LOGITS, get_logits, "AROUND"),
    Hook(ONCE, once_per_request, "AFTER"),
    Hook(EXTEND, take_over, "BEFORE"),
    Hook(SAMPLE, sample, "AROUND"),
    Hook(SAMPLED, compute_logprobs, "AFTER"),
    Hook(PAUSED, rest_while_paused, "AFTER"),
)
