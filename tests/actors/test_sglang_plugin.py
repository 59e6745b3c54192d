"""The SGLang plugin: its maths against slow loops, its refusals, and real servers.

The reference is transformers in fp32: log softmax(z / T) of every token, at each request's T.
"""

import asyncio
import importlib
import importlib.util
import json
import pkgutil
import random
import re
import sys
import types
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.sglang.external import ExternalSglangEngine
from actors.sglang.installed import CPU_STANDINS, sglang_installed
from actors.sglang.launch import START_METHOD
from actors.sglang.plugin import hooks as plugin
from actors.sglang.plugin.internals import unrecognised_internals
from actors.sglang.plugin.listed_steps import (
    LISTED_OUTPUT_KEY,
    LISTED_OUTPUT_SWITCH,
    compute_logprobs,
    move_logprob_options,
    read_steps,
    sample,
    store_wanted,
)
from actors.sglang.plugin.row_temperatures import (
    Listed,
    Pieces,
    PromptValues,
    ScaledRows,
    UnknownPassError,
    read_listed,
    read_states,
    rows_of_requests,
)
from actors.sglang.server import SglangServer
from distill.engine import Score, ScoreRequest
from distill.models.loading import load_causal_lm
from distill.states import joined
from tests.states import expect_states, states_request
from tests.tiny import VOCAB_SIZE, save_tokenizer, tiny_model_dir
from tests.waiting import DEADLINE_S

needs_sglang = pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed here")

TEMPERATURES = (0.5, 0.7, 1.0, 1.5)
TOLERANCE = 1e-3
CONTEXT = 256
PREFILL_CHUNK = 64
UNSCALED = {"custom_params": {plugin.UNSCALED_SWITCH: []}}


# --- maths ---------------------------------------------------------------------------------------

lengths_G = st.lists(
    st.integers(1, 7).flatmap(lambda e: st.tuples(st.just(e), st.integers(0, e))),
    min_size=1,
    max_size=6,
)


@given(lengths_G)
def test_rows_are_those_that_sglang_keeps(lengths: list[tuple[int, int]]) -> None:
    extend_lens, start_lens = zip(*lengths, strict=True)
    kept: list[tuple[int, bool]] = []  # of every kept row: its request, whether it is scored
    sampled = []
    for g, (extend, start) in enumerate(lengths):
        for position in range(extend):
            if position >= start or position == extend - 1:
                kept.append((g, position >= start))
        sampled.append(len(kept) - 1)

    rows = rows_of_requests(extend_lens, start_lens)

    expected = [(g, n < r.scored) for g, r in enumerate(rows) for n in range(r.count)]
    assert expected == kept
    assert [r.sampled for r in rows] == sampled
    assert [r.first_scored for r in rows] == [
        sum(e - s for e, s in lengths[:g]) for g in range(len(rows))
    ]


@given(lengths_G, st.data())
def test_rows_equal_the_slow_loop(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    width = 11
    rows = rows_of_requests(*zip(*lengths, strict=True))
    temperatures = data.draw(
        st.lists(st.sampled_from(TEMPERATURES), min_size=len(rows), max_size=len(rows))
    )
    scored_G = [g for g, r in enumerate(rows) if r.scored]
    events = st.sampled_from([(), (2, 7, 9)])
    unscaled = data.draw(st.dictionaries(st.sampled_from(scored_G), events)) if scored_G else {}
    wanting = data.draw(st.lists(st.sampled_from(scored_G), unique=True)) if scored_G else []
    listed = {}
    for g in wanting:
        given, others = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
        ids_SK = torch.stack([torch.randperm(width)[:given] for _ in range(rows[g].scored)])
        listed[g] = (ids_SK.int(), others)
    shown = data.draw(st.lists(st.sampled_from(scored_G), unique=True)) if scored_G else []
    total = sum(r.count for r in rows)
    logits_NV = torch.randn(total, width) * 3
    hidden_NH = torch.randn(total, 3).bfloat16()
    tokens_S = torch.randint(width, (sum(r.scored for r in rows),))
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1)))) if total > 1 else []

    scaled_rows = ScaledRows(
        rows, temperatures, unscaled=unscaled, listed=listed, states=shown, vocab_size=width + 2,
        device=torch.device("cpu"),
    )  # fmt: skip
    chunks = zip([0, *cuts], [*cuts, total], strict=True)
    divided = [
        scaled_rows.take(logits_NV[lo:hi].clone(), tokens_S, hidden_NH[lo:hi]) for lo, hi in chunks
    ]
    divided_NV = torch.cat(divided)

    for g, (request, temperature) in enumerate(zip(rows, temperatures, strict=True)):
        for n in range(request.first, request.first + request.count):
            assert torch.equal(divided_NV[n], logits_NV[n] / temperature)
        assert torch.equal(scaled_rows.undivided_GV()[g], logits_NV[request.sampled])
        if g in unscaled:
            expected = []
            for n in range(request.scored):
                token = int(tokens_S[request.first_scored + n])
                outcome = unscaled[g] if token in unscaled[g] else [token]
                p_V = torch.softmax(logits_NV[request.first + n], 0)
                expected.append(p_V[list(outcome)].sum().log().item())
            assert scaled_rows.unscaled_of(g).tolist() == pytest.approx(expected, abs=1e-5)
        if g in shown:
            own_SH = hidden_NH[request.first : request.first + request.scored]
            text = PromptValues([scaled_rows.states_of(g)]).copy()
            assert isinstance(text, str)
            states = read_states(text, request.scored)
            assert torch.equal(joined([states], "cpu"), own_SH)
        if g in listed:
            ids_SK, others = listed[g]
            text = PromptValues([scaled_rows.listed_of(g)]).copy()
            assert isinstance(text, str)
            given_SK, others_SK, names_SK = read_listed(text, ids_SK.shape[1], others)
            for n in range(request.scored):
                log_p = torch.log_softmax(logits_NV[request.first + n] / temperature, 0).tolist()
                ids = ids_SK[n].tolist()
                assert given_SK[n].tolist() == pytest.approx([log_p[v] for v in ids], abs=1e-5)
                left = sorted((v for v in range(width) if v not in ids), key=lambda v: -log_p[v])
                assert names_SK[n].tolist() == left[:others]
                best = [log_p[v] for v in left[:others]]
                assert others_SK[n].tolist() == pytest.approx(best, abs=1e-5)


def test_blocks_of_a_wide_vocabulary_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.sglang.plugin.row_temperatures.BLOCK_ELEMENTS", 100)
    rows = rows_of_requests([9], [0])
    logits_NV, tokens_S = torch.randn(9, 40), torch.randint(40, (9,))
    scaled_rows = ScaledRows(
        rows, [0.7], unscaled={0: ()}, vocab_size=40, device=torch.device("cpu")
    )
    scaled_rows.take(logits_NV.clone(), tokens_S, torch.zeros(9, 1))
    expected = torch.log_softmax(logits_NV, 1)[torch.arange(9), tokens_S]
    assert scaled_rows.unscaled_of(0).tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@given(data=st.data(), length=st.integers(1, 12))
def test_a_prompt_in_pieces_is_whole_in_any_prefill(data: st.DataObject, length: int) -> None:
    """A retracted request is prefilled again from any position: a prefix may be cached."""
    values_S, pieces, at = torch.arange(length, dtype=torch.float32), Pieces(), 0
    for _ in range(data.draw(st.integers(0, 6))):
        begin = data.draw(st.integers(0, min(at, length - 1)))
        at = data.draw(st.integers(begin + 1, length))
        found = pieces.up_to(100 + begin, values_S[begin:at])
        assert found.copy() == values_S[: at - 1].tolist()
    assert pieces.up_to(100 + at, values_S[at:]).copy() == values_S[: max(at, length - 1)].tolist()


def test_listed_tokens_arrive_as_they_were_sent() -> None:
    ids_NK = torch.arange(12, dtype=torch.int32).view(4, 3) * 1000
    arrived = Listed.read(json.loads(json.dumps(Listed(20, ids_NK, 5).to_json())))
    assert (arrived.first, arrived.others) == (20, 5)
    assert torch.equal(arrived.ids_NK, ids_NK)
    # The row that a token is sampled from is past the last one.
    assert torch.equal(arrived.at(22, 3), ids_NK[[2, 3, 3]])
    for begin, rows in ((19, 2), (22, 4)):
        with pytest.raises(UnknownPassError):
            arrived.at(begin, rows)


@pytest.mark.parametrize(
    ("chunks", "dtype"), [([3], torch.float32), ([5], torch.float32), ([4], torch.bfloat16)]
)
def test_other_rows_than_requests_are_refused(chunks: list[int], dtype: torch.dtype) -> None:
    rows = rows_of_requests([4], [0])
    scaled_rows = ScaledRows(rows, [0.7], unscaled={}, vocab_size=8, device=torch.device("cpu"))
    with pytest.raises(UnknownPassError):
        for count in chunks:
            logits_NV, tokens_S = torch.zeros(count, 8, dtype=dtype), torch.zeros(4).long()
            scaled_rows.take(logits_NV, tokens_S, torch.zeros(count, 1))
        scaled_rows.undivided_GV()


# --- hooks, around a stand-in for LogitsProcessor ------------------------------------------------


def _batch(
    asked: list[plugin.LogprobOptions] | None, lens: list[int], starts: list[int]
) -> SimpleNamespace:
    info = SimpleNamespace()
    if asked is not None:
        setattr(info, plugin.OPTIONS, asked)
    mode = SimpleNamespace(is_extend=lambda: True, is_target_verify=lambda: False)
    return SimpleNamespace(
        forward_mode=mode, return_logprob=True, sampling_info=info, extend_seq_lens_cpu=lens,
        extend_logprob_start_lens_cpu=starts,
    )  # fmt: skip


def _forward(batch: SimpleNamespace, logits_NV: Tensor, **metadata: Any) -> Any:
    """SGLang's forward pass in one chunk, with the hooks around it."""
    processor = SimpleNamespace(vocab_size=logits_NV.shape[1])
    lens = zip(batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu, strict=True)
    rows = rows_of_requests(*zip(*lens, strict=True))
    scored = sum(r.scored for r in rows)
    found = SimpleNamespace(
        extend_input_logprob_token_ids_gpu=torch.zeros(scored, dtype=torch.long),
        sample_indices_cpu=[r.sampled for r in rows],
        input_logprob_indices_cpu=list(range(scored)),
    )
    vars(found).update(metadata)

    def original(*_: Any) -> Any:
        hidden_NH = torch.zeros(len(logits_NV), 1)
        logits = plugin.get_logits(lambda *_: logits_NV, processor, hidden_NH, None, found)
        return SimpleNamespace(
            next_token_logits=logits[found.sample_indices_cpu], customized_info=None
        )

    return plugin.forward(original, processor, None, torch.zeros(1), None, batch)


@pytest.mark.parametrize(
    ("asked", "metadata"),
    [
        (None, {}),
        ([], {}),
        ([plugin.LogprobOptions(0.5, True, None)] * 2, {}),
        ([plugin.LogprobOptions(0.5, True, None)], {"sample_indices_cpu": [1]}),
        ([plugin.LogprobOptions(0.5, True, None)], {"input_logprob_indices_cpu": [0]}),
        (
            [plugin.LogprobOptions(0.5, True, None)],
            {"extend_input_logprob_token_ids_gpu": torch.zeros(1)},
        ),
    ],
)
def test_a_pass_it_does_not_understand_raises(
    asked: list[plugin.LogprobOptions] | None, metadata: dict[str, Any]
) -> None:
    with pytest.raises(UnknownPassError):
        _forward(_batch(asked, [3], [0]), torch.randn(3, 10), **metadata)


def test_options_of_requests_are_recorded_from_the_batch() -> None:
    def request(temperature: float, *, logprobs: bool, custom: Any) -> SimpleNamespace:
        sampling = SimpleNamespace(temperature=temperature, custom_params=custom)
        return SimpleNamespace(sampling_params=sampling, return_logprob=logprobs)

    reqs = [
        request(0.7, logprobs=True, custom={plugin.UNSCALED_SWITCH: [3]}),
        request(1.5, logprobs=False, custom=None),
        request(0.5, logprobs=True, custom={}),
    ]
    batch = SimpleNamespace(
        return_logprob=True, forward_mode=SimpleNamespace(is_decode_or_idle=lambda: False),
        decoding_reqs=[reqs[2]], reqs=reqs, prefix_lens=[48, 0, 7],
        extend_logprob_start_lens=[2, 5, 0], sampling_info=SimpleNamespace(),
    )  # fmt: skip
    plugin.record_requests(None, None, batch, None)
    metadata = SimpleNamespace()
    plugin.carry_options(metadata, None, SimpleNamespace(sampling_info=batch.sampling_info))
    noted = getattr(metadata, plugin.OPTIONS)
    assert noted == [
        plugin.LogprobOptions(0.7, True, [3], begin=50),
        plugin.LogprobOptions(1.5, False, None, begin=5),
        plugin.LogprobOptions(0.5, False, None, begin=7),
    ]
    batch.prefix_lens = None  # unknown positions: results of earlier passes are not joined
    plugin.record_requests(None, None, batch, None)
    again = getattr(batch.sampling_info, plugin.OPTIONS)
    assert [asked.begin for asked in again] == [0, 0, 0]
    assert [a.pieces is b.pieces for a, b in zip(noted, again, strict=True)] == [True] * 3


# --- an SGLang that is not the one we know -------------------------------------------------------


@pytest.fixture
def importable_sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make SGLang importable in this process, as in a server's own."""
    standins = importlib.util.find_spec("sgl_kernel") is None
    if standins:
        monkeypatch.syspath_prepend(str(CPU_STANDINS))
    yield
    if standins:
        for name in [n for n in sys.modules if n.split(".")[0] in ("sgl_kernel", "torchvision")]:
            del sys.modules[name]


@pytest.fixture
def doctored(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("doctored_sglang")
    exec(
        "class Processor:\n    size: int\n    def forward(self, hidden_states, input_ids): ...\n",
        vars(module),
    )
    monkeypatch.setitem(sys.modules, "doctored_sglang", module)
    return module


@pytest.mark.usefixtures("doctored")
def test_each_unrecognised_internal_is_named() -> None:
    wrong = unrecognised_internals(
        parameters={
            "doctored_sglang.Processor.forward": ("self", "input_ids"),
            "doctored_sglang.Processor._get_logits": ("self",),
            "doctored_sglang.gone.f": ("self",),
        },
        fields={"doctored_sglang.Processor": ("size", "shape"), "doctored_sglang.Gone": ("a",)},
    )
    assert wrong == [
        "doctored_sglang.Processor.forward takes ('self', 'hidden_states', 'input_ids'), "
        "not ('self', 'input_ids')",
        "no doctored_sglang.Processor._get_logits",
        "no doctored_sglang.gone.f",
        "doctored_sglang.Processor has no shape",
        "no doctored_sglang.Gone",
    ]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lacking_sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "core.py").write_text("import package_of_nobody\ndef f(self): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = {"lacking_sglang.core.f": ("self",)}
    with pytest.raises(ModuleNotFoundError) as error:
        unrecognised_internals(parameters=expected, fields={})
    assert error.value.name == "package_of_nobody"
    monkeypatch.setattr(plugin, "unrecognised_internals", partial(unrecognised_internals, expected))
    monkeypatch.setenv(plugin.SWITCH, "1")
    with pytest.raises(SystemExit):
        plugin.activate()


@needs_sglang
@pytest.mark.usefixtures("importable_sglang")
def test_an_unrecognised_sglang_ends_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_processor = importlib.import_module("sglang.srt.layers.logits_processor")
    monkeypatch.setattr(logits_processor.LogitsProcessor, "_get_logits", lambda self, states: None)
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    plugin.activate()  # another user's server stays unchanged
    monkeypatch.setenv(plugin.SWITCH, "1")
    with pytest.raises(SystemExit):
        plugin.activate()


@needs_sglang
@pytest.mark.usefixtures("importable_sglang")
@pytest.mark.parametrize("works", [True, False])
def test_a_hook_that_is_not_applied_ends_the_process(works: bool) -> None:
    applied: list[str] = []

    class Registry:
        @classmethod
        def register(cls, target: str, _function: Any, _kind: Any) -> None:
            applied.append(target)

        @classmethod
        def apply_hooks(cls) -> None:
            applied.append("applied")

    kinds = {"BEFORE": 1, "AFTER": 2, "AROUND": 3}
    with pytest.MonkeyPatch.context() as patch:
        plugin.install(SimpleNamespace(HookRegistry=Registry, HookType=kinds))
        if works:
            for hook in plugin.HOOKS:
                owner, name = hook.target.rsplit(".", 1)
                patch.setattr(pkgutil.resolve_name(owner), name, lambda: None)
            Registry.apply_hooks()
        else:
            with pytest.raises(SystemExit):
                Registry.apply_hooks()
    assert applied == [hook.target for hook in plugin.HOOKS] + ["applied"]


# --- real servers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One request of a batch."""

    prompt: list[int]
    temperature: float
    start: int = 0
    new_tokens: int = 1
    return_logprob: bool = True
    top: int = 0
    token_ids: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    """The model in fp32."""

    directory: str

    def logits_TV(self, tokens: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return self.model()(torch.tensor([tokens])).logits[0].float()

    def model(self) -> Any:
        return _models.setdefault(
            self.directory, load_causal_lm(self.directory, dtype=torch.float32, device="cpu")
        )


_models: dict[str, Any] = {}


class Served:
    """Server of the tiny model that takes whole batches."""

    def __init__(self, truth: Truth, log: Path, *flags: str, **environment: str) -> None:
        self.truth = truth
        common = (
            f"--model-path {truth.directory} --device cpu --dtype float32 --attention-backend "
            "torch_native --sampling-backend pytorch --grammar-backend none --max-total-tokens "
            f"16384 --max-running-requests 64 --context-length {CONTEXT} --sleep-on-idle "
            "--skip-server-warmup"
        )
        environment = {"SGLANG_USE_CPU_ENGINE": "1", **environment}
        self.log = log
        self.server = SglangServer(
            [*common.split(), *flags],
            environment=environment,
            log_path=log,
            start_deadline_s=DEADLINE_S,
        )
        asyncio.run(self.server.ready())

    def generate(self, asks: Sequence[Ask]) -> list[dict[str, Any]]:
        """`meta_info` of each request, with the sampled tokens under `output_ids`."""
        body = {
            "input_ids": [a.prompt for a in asks],
            "sampling_params": [
                {
                    "temperature": a.temperature, "max_new_tokens": a.new_tokens,
                    "ignore_eos": True, **a.sampling,
                }
                for a in asks
            ],
            "return_logprob": [a.return_logprob for a in asks],
            "logprob_start_len": [a.start for a in asks],
            "top_logprobs_num": [a.top for a in asks],
        }  # fmt: skip
        if asks[0].token_ids:  # a batch has them for all its requests or for none
            body["token_ids_logprob"] = [a.token_ids for a in asks]
        request = urllib.request.Request(
            f"{self.server.url}/generate",
            data=json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                "Authorization": f"Bearer {self.server.api_key}",
            },
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            answers = json.load(response)
        return [{**a["meta_info"], "output_ids": a["output_ids"]} for a in answers]

    def gaps(self, ask: Ask, meta: dict[str, Any]) -> tuple[float, float]:
        """Largest difference of the input and of the output log-probs from the reference."""
        tokens, n = [*ask.prompt, *meta["output_ids"]], len(ask.prompt)
        truth_TV = torch.log_softmax(self.truth.logits_TV(tokens) / (ask.temperature or 1.0), 1)

        def gap(position: int, token: int, logprob: float) -> float:
            return abs(logprob - truth_TV[position - 1, token].item())

        first, *scored = meta["input_token_logprobs"]
        assert first[0] is None and len(scored) == n - ask.start - 1
        positions = range(ask.start + 1, n)
        # The answer's token id is not used: SGLang reports the vocabulary's last id as 0.
        inputs = [gap(t, tokens[t], s[0]) for t, s in zip(positions, scored, strict=True)]
        for key in ("input_top_logprobs", "input_token_ids_logprobs"):
            for t, rows in zip(positions, (meta.get(key) or [])[1:], strict=False):
                inputs += [gap(t, token, logprob) for logprob, token, _ in rows or []]
        # A request for no new token may return one output log-prob nevertheless.
        sampled = meta["output_token_logprobs"][: len(meta["output_ids"])]
        outputs = [gap(n + i, token, logprob) for i, (logprob, token, _) in enumerate(sampled)]
        return max(inputs, default=0.0), max(outputs, default=0.0)

    def unscaled_gap(self, ask: Ask, meta: dict[str, Any]) -> float:
        (values,) = meta[plugin.UNSCALED_KEY]
        truth_TV = torch.log_softmax(self.truth.logits_TV(ask.prompt), 1)
        last = range(len(ask.prompt) - len(values), len(ask.prompt))
        return max(
            abs(v - truth_TV[t - 1, ask.prompt[t]].item())
            for t, v in zip(last, values, strict=True)
        )

    def largest_prefill_batch(self) -> int:
        counts = re.findall(r"Prefill batch.*?#new-seq: (\d+)", self.log.read_text())
        return max(map(int, counts), default=0)

    def prefilled(self) -> list[int]:
        """Tokens of each prefill pass so far."""
        counts = re.findall(r"Prefill batch.*?#new-token: (\d+)", self.log.read_text())
        return [int(count) for count in counts]

    def requests_served(self) -> int:
        """The server's own count of requests; a list of sequences counts each of them."""
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        counts = [line for line in lines if line.startswith("sglang:num_requests_total{")]
        return int(sum(float(line.split()[-1]) for line in counts))

    def score(
        self, requests: Sequence[ScoreRequest], count: Callable[[], int] = lambda: 0
    ) -> tuple[list[Score], int]:
        """Scores of a run's teacher, and the increase of the server's `count` by this call."""

        async def ask() -> tuple[list[Score], int]:
            engine = ExternalSglangEngine(url=self.server.url, api_key=self.server.api_key)
            try:
                await engine.info()  # finds out the vocabulary's size
                before = await asyncio.to_thread(count)
                scores = await engine.score(requests)
                return scores, await asyncio.to_thread(count) - before
            finally:
                await engine.close()

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    root = tmp_path_factory.mktemp("sglang-plugin")
    directory = tiny_model_dir(root, seed=3, hidden_size=64, layers=2, context_length=CONTEXT)
    save_tokenizer(directory)
    return Truth(directory)


def _served(truth: Truth, tmp: Path, *flags: str, **environment: str) -> Iterator[Served]:
    served = Served(truth, tmp / "server.log", *flags, **environment)
    try:
        yield served
    finally:
        served.server.stop()


@pytest.fixture(scope="module")
def served(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _served(truth, tmp_path_factory.mktemp("served"), "--enable-mixed-chunk")


@pytest.fixture
def served_spawned(truth: Truth, tmp_path: Path) -> Iterator[Served]:
    """Server whose spawned processes load the plugin by themselves, as all do on CUDA."""
    yield from _served(truth, tmp_path, "--enable-mixed-chunk", **{START_METHOD: "spawn"})


@pytest.fixture(scope="module")
def served_in_pieces(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _served(
        truth, tmp_path_factory.mktemp("in-pieces"),
        *("--chunked-prefill-size", str(PREFILL_CHUNK), "--enable-metrics"),
        SGLANG_ENABLE_LOGPROB_CHUNK="1", SGLANG_LOGPROB_CHUNK_SIZE="16",
        SGLANG_ENABLE_FAST_INPUT_LOGPROBS="0",
    )  # fmt: skip


@pytest.fixture
def served_stock(truth: Truth, tmp_path: Path) -> Iterator[Served]:
    yield from _served(truth, tmp_path, SGLANG_PLUGINS="none")


@pytest.fixture
def served_stock_states(truth: Truth, tmp_path: Path) -> Iterator[Served]:
    """Server without the plugin that returns hidden states, with its prefix cache."""
    flag = "--enable-return-hidden-states"
    yield from _served(truth, tmp_path, flag, SGLANG_PLUGINS="none")


def _prompt(rng: random.Random, least: int = 2, most: int = 200) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(least, most))]


def _mixed_asks(seed: int) -> list[Ask]:
    """Every temperature with every kind of request, in one batch."""
    rng = random.Random(seed)
    asks = []
    for temperature in TEMPERATURES:
        asks += [
            Ask(_prompt(rng), temperature, new_tokens=0),
            Ask(_prompt(rng), temperature, new_tokens=6),
            Ask(prompt := _prompt(rng), temperature, start=rng.randrange(len(prompt))),
            Ask(prompt := _prompt(rng), temperature, start=len(prompt) - 1, new_tokens=3),
            Ask(_prompt(rng), temperature, top=3, new_tokens=2),
            Ask(_prompt(rng), temperature, return_logprob=False, start=-1, new_tokens=4),
            Ask(_prompt(rng), temperature, start=-1, new_tokens=4),
        ]
    asks.append(Ask(_prompt(rng), 0.0, new_tokens=3))
    rng.shuffle(asks)
    return asks


def _check_mixed(served: Served, asks: Sequence[Ask]) -> None:
    gaps = []
    for ask, meta in zip(asks, served.generate(asks), strict=True):
        echo = meta.get(plugin.TEMPERATURE_KEY)
        if not ask.return_logprob or ask.start == -1:
            assert echo in (None, [], [None]), f"{ask} was not scored, and the echo says {echo}"
            continue
        assert echo == [ask.temperature or 1.0], f"the echo of {ask} is {echo}"
        gaps.append(served.gaps(ask, meta))
    assert served.largest_prefill_batch() > 1, "the requests never met in one batch"
    inputs, outputs = map(max, zip(*gaps, strict=True))
    print(f"{len(gaps)} scored requests: inputs within {inputs:.1e}, outputs within {outputs:.1e}")
    assert inputs <= TOLERANCE and outputs <= TOLERANCE


@needs_sglang
def test_a_mixed_batch_is_at_each_requests_own_temperature(served: Served) -> None:
    asks = _mixed_asks(0)
    _check_mixed(served, asks)
    _check_mixed(served, [replace(ask, token_ids=[5, 9, 150]) for ask in asks])


@needs_sglang
@pytest.mark.slow
def test_processes_that_are_spawned_load_the_plugin(served_spawned: Served) -> None:
    _check_mixed(served_spawned, _mixed_asks(0))


@pytest.mark.slow
@needs_sglang
def test_a_mixed_batch_in_pieces(served_in_pieces: Served) -> None:
    """Prompts prefilled in several passes, each with logits in several chunks."""
    asks = _mixed_asks(1)
    _check_mixed(served_in_pieces, asks)
    _check_mixed(served_in_pieces, [replace(ask, token_ids=[5, 9, 150]) for ask in asks])

    # The unscaled log-probs of all pieces come with the last.
    rng = random.Random(5)
    asks = [Ask(_prompt(rng, 100, 200), 0.7, sampling=UNSCALED) for _ in range(4)]
    for ask, meta in zip(asks, served_in_pieces.generate(asks), strict=True):
        assert len(meta[plugin.UNSCALED_KEY][0]) == len(ask.prompt) - 1
        assert served_in_pieces.unscaled_gap(ask, meta) <= TOLERANCE

    # And so do the log-probs of listed tokens.
    for t in (0.7, 1.0):
        prompt, start = _prompt(rng, 150, 200), 20
        ids_NK = torch.stack([torch.randperm(VOCAB_SIZE)[:4] for _ in prompt[start + 1 :]]).int()
        sent = {"custom_params": {plugin.LISTED_SWITCH: Listed(start, ids_NK, 2).to_json()}}
        [meta] = served_in_pieces.generate([Ask(prompt, t, start=start, sampling=sent)])
        [text] = meta[plugin.LISTED_KEY]
        given_NK, others_NK, names_NK = (torch.tensor(v) for v in read_listed(text, 4, 2))
        truth_NV = torch.log_softmax(served_in_pieces.truth.logits_TV(prompt)[start:-1] / t, 1)
        assert (given_NK - truth_NV.gather(1, ids_NK.long())).abs().max() <= TOLERANCE
        assert (others_NK - truth_NV.gather(1, names_NK.long())).abs().max() <= TOLERANCE


@pytest.mark.slow
@needs_sglang
def test_a_teacher_scores_rows_in_chunks_once(served: Served, served_in_pieces: Served) -> None:
    """q_1, q_T and top k of rows of one to four chunks, starting in any chunk.

    Compared with a server that prefills each row at once.
    """
    lengths_and_starts = [(40, 1), (65, 64), (128, 20), (200, 1), (240, 70), (240, 200)]
    requests = []
    for seed, (length, start) in enumerate(lengths_and_starts):
        rng = np.random.default_rng(seed)
        tokens_T = rng.integers(3, VOCAB_SIZE, size=length).astype(np.int32)
        given_NK = rng.permuted(np.tile(np.arange(VOCAB_SIZE), (length - start, 1)), axis=1)[:, :5]
        for asked_NK in (None, given_NK.astype(np.int32)):
            requests.append(
                ScoreRequest(
                    tokens_T=np.roll(tokens_T, 1 if asked_NK is None else 0),  # no prefix in common
                    start=start,
                    temperatures=(0.7, 1.0),
                    given_NK=asked_NK,
                    top_k=16,
                )
            )
    passes_before = len(served_in_pieces.prefilled())
    scores, served_for_it = served_in_pieces.score(requests, served_in_pieces.requests_served)
    at_once, _ = served.score(requests)

    assert served_for_it == len(requests)
    passes = served_in_pieces.prefilled()[passes_before:]
    assert max(passes) <= PREFILL_CHUNK, "no row was prefilled in chunks: nothing was tested"
    rows = sum(len(request.tokens_T) for request in requests)
    # The rest are requests of one token, by which the engine finds out the vocabulary's size.
    assert sum(passes) - rows <= 32, f"{sum(passes)} rows were computed for {rows}"
    for request, score, expected in zip(requests, scores, at_once, strict=True):
        truth_TV = served.truth.logits_TV(request.tokens_T.tolist())[request.start - 1 : -1]
        own_N = torch.from_numpy(request.tokens_T[request.start :].astype(np.int64))
        for t, logprobs_N, expected_N in zip(
            request.temperatures,
            score.logprobs_by_temperature,
            expected.logprobs_by_temperature,
            strict=True,
        ):
            np.testing.assert_allclose(logprobs_N, expected_N, atol=1e-4)
            log_p_NV = torch.log_softmax(truth_TV / t, 1)
            np.testing.assert_allclose(
                logprobs_N, log_p_NV.gather(1, own_N[:, None])[:, 0], atol=1e-4
            )
        assert score.top is not None and expected.top is not None
        np.testing.assert_allclose(score.top.logprobs_NK, expected.top.logprobs_NK, atol=1e-4)
        assert score.top.ids_NK.shape[1] == request.listed
        listed_NK = torch.log_softmax(truth_TV / 0.7, 1).gather(
            1, torch.from_numpy(score.top.ids_NK.astype(np.int64))
        )
        np.testing.assert_allclose(score.top.logprobs_NK, listed_NK, atol=1e-4)


@pytest.mark.slow
@needs_sglang
def test_hidden_states_of_prompts_in_chunks(served_in_pieces: Served) -> None:
    """Prompts of one to four chunks, twice: the second time the prefix cache has them."""
    model = served_in_pieces.truth.model()
    requests = [states_request(length, start) for length, start in [(40, 1), (200, 1), (240, 200)]]
    for _ in range(2):
        for request, score in zip(requests, served_in_pieces.score(requests)[0], strict=True):
            expect_states(model, request, score)


@pytest.mark.slow
@needs_sglang
def test_a_stock_server_returns_hidden_states_by_its_own_flag(served_stock_states: Served) -> None:
    model = served_stock_states.truth.model()
    requests = [states_request(length, start) for length, start in [(40, 1), (90, 70), (200, 150)]]
    for _ in range(2):
        for request, score in zip(requests, served_stock_states.score(requests)[0], strict=True):
            expect_states(model, request, score)


@needs_sglang
def test_scoring_beside_decoding(served: Served) -> None:
    """Scored prompts arrive while others decode, in the next batch and in mixed ones."""
    rng = random.Random(2)
    slow = [Ask(_prompt(rng, most=20), t, new_tokens=100, start=-1) for t in TEMPERATURES]
    quick = [Ask(_prompt(rng), t, new_tokens=n) for t in TEMPERATURES for n in (0, 1, 20)]
    asks = [*slow, *quick]
    for ask, meta in zip(asks, served.generate(asks), strict=True):
        if ask.start == 0:
            inputs, outputs = served.gaps(ask, meta)
            assert inputs <= TOLERANCE and outputs <= TOLERANCE


# Sampling takes the likeliest token, but the reported distribution is the whole one at T.
# (Requests with top_k=1 are reported at T = 1 where there are no others.)
LIKELIEST = {"top_p": 1e-6}


def _check_listed_steps(served: Served) -> None:
    """Compare each request with and without the switch, with others between them."""
    rng = random.Random(8)
    asks = []
    for i, (t, top) in enumerate(zip((*TEMPERATURES, 0.6), (5, 33, 3, 0, 1), strict=True)):
        ask = Ask(
            _prompt(rng, most=130), t, start=-1, new_tokens=(60, 120, 1, 30, 50)[i], top=top,
            token_ids=rng.sample(range(VOCAB_SIZE), 1 + i), sampling=LIKELIEST,
        )  # fmt: skip
        ours = LIKELIEST | {"custom_params": {LISTED_OUTPUT_SWITCH: True}}
        asks += [ask, replace(ask, sampling=ours)]
    others = [Ask(_prompt(rng), t, new_tokens=n) for t in TEMPERATURES for n in (0, 9)]
    without_ids = [replace(ask, token_ids=None) for ask in asks if ask.top]
    with ThreadPoolExecutor() as pool:
        found, more, plain = pool.map(served.generate, (asks, without_ids, others))
    assert not any(any(meta.get(LISTED_OUTPUT_KEY) or ()) for meta in plain)
    pairs = [*zip(asks, found, strict=True), *zip(without_ids, more, strict=True)]
    for (ask, by_sglang), (_, by_us) in zip(pairs[::2], pairs[1::2], strict=True):
        assert by_us["output_ids"] == by_sglang["output_ids"]
        assert not any(by_us.get("output_top_logprobs") or ()), "SGLang listed them as well"
        assert not any(by_us.get("output_token_ids_logprobs") or ())
        given = ask.token_ids or []
        given_TE, ids_TK, logprobs_TK = read_steps(by_us[LISTED_OUTPUT_KEY], len(given), ask.top)
        assert len(given_TE) == ask.new_tokens
        # Twins are other rows of a product or in other chunks: their logits differ in last bits.
        if ask.top:
            tops = np.asarray(by_sglang["output_top_logprobs"], np.float64)[:, :, :2]
            assert ids_TK.tolist() == tops[..., 1].tolist()
            np.testing.assert_allclose(logprobs_TK, tops[..., 0], atol=1e-5)
            sampled = [value for value, *_ in by_us["output_token_logprobs"]]
            assert logprobs_TK[:, 0].tolist() == sampled, "not the log-probs of the same pass"
        if given:
            rows = [[v for v, *_ in row] for row in by_sglang["output_token_ids_logprobs"]]
            np.testing.assert_allclose(given_TE, rows, atol=1e-5)


@needs_sglang
def test_listed_steps_are_what_sglang_lists(served: Served) -> None:
    _check_listed_steps(served)


@pytest.mark.slow
@needs_sglang
def test_listed_steps_of_prompts_in_pieces(served_in_pieces: Served) -> None:
    _check_listed_steps(served_in_pieces)


@pytest.mark.slow
@needs_sglang
def test_stock_sglang_scores_at_one(served: Served, served_stock: Served) -> None:
    """If this fails, SGLang has changed, and the plugin may be unnecessary."""
    rng = random.Random(6)
    asks = [Ask(_prompt(rng, 50, 100), t, new_tokens=4) for t in TEMPERATURES]
    for ask, meta in zip(asks, served_stock.generate(asks), strict=True):
        assert plugin.TEMPERATURE_KEY not in meta
        inputs, outputs = served_stock.gaps(ask, meta)
        assert outputs <= TOLERANCE
        assert (inputs <= TOLERANCE) if ask.temperature == 1 else (inputs > 0.1)

    # At T = 1 the plugin changes no bit.
    ask = Ask(_prompt(rng, 50, 100), 1.0, sampling={"top_k": 1})
    ours, stock = served.generate([ask])[0], served_stock.generate([ask])[0]
    for key in ("input_token_logprobs", "output_token_logprobs"):
        assert ours[key] == stock[key]


VOCAB = 11


def request(top: int, ids: list[int] | None, custom: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        logprob=SimpleNamespace(top_logprobs_num=top, token_ids_logprob=ids),
        sampling_params=SimpleNamespace(custom_params=custom),
    )


def opted(top: int, ids: list[int] | None) -> SimpleNamespace:
    return request(top, ids, {LISTED_OUTPUT_SWITCH: True})


def step(reqs: Sequence[SimpleNamespace], logprobs_GV: Tensor, *, spec: bool = False) -> Any:
    """`customized_info` of a step, with the hooks around a stand-in for the sampler."""
    batch = SimpleNamespace(
        reqs=reqs,
        spec_algorithm=SimpleNamespace(is_none=lambda: not spec),
        sampling_info=SimpleNamespace(),
    )
    move_logprob_options(batch)
    move_logprob_options(batch)  # as for the next chunk of a prompt
    store_wanted(batch)
    processor, output = SimpleNamespace(), SimpleNamespace(customized_info={"other": []})

    def original(*_args: Any) -> str:
        compute_logprobs(None, processor, logprobs_GV)
        return "sampled"

    sampler = SimpleNamespace(output_logprob_processor=processor)
    assert sample(original, sampler, output, batch.sampling_info, True, None) == "sampled"
    assert output.customized_info["other"] == []
    return output.customized_info


requests_G = st.lists(
    st.none()
    | st.tuples(
        st.integers(0, 5), st.none() | st.lists(st.integers(0, VOCAB - 1), max_size=3)
    ).filter(lambda wanted: wanted != (0, None)),
    min_size=1,
    max_size=6,
).filter(any)


@given(requests_G)
def test_a_step_lists_tokens_by_request(asked_G: list[tuple[int, list[int] | None] | None]) -> None:
    logprobs_GV = torch.randn(len(asked_G), VOCAB).log_softmax(1)
    reqs = [request(0, None) if asked is None else opted(*asked) for asked in asked_G]
    listed = step(reqs, logprobs_GV)[LISTED_OUTPUT_KEY]
    for g, asked in enumerate(asked_G):
        if asked is None:
            assert listed[g] is None
            continue
        top, ids = asked
        given_TE, ids_TK, logprobs_TK = read_steps([listed[g]], len(ids or ()), top)
        best_K, best_ids_K = logprobs_GV[g].topk(top)
        assert given_TE.tolist() == [logprobs_GV[g, ids or []].tolist()]
        assert ids_TK.tolist() == [best_ids_K.tolist()]
        assert logprobs_TK.tolist() == [best_K.tolist()]
        left = reqs[g].logprob
        assert (left.top_logprobs_num, left.token_ids_logprob) == (0, None), "SGLang does it again"


def test_requests_of_others_and_speculative_decoding_are_left_to_sglang() -> None:
    logprobs_GV = torch.randn(2, VOCAB).log_softmax(1)
    for reqs, spec in [
        ([request(3, [1]), request(0, None, {LISTED_OUTPUT_SWITCH: True})], False),
        ([opted(3, [1]), opted(0, [1])], True),
    ]:
        before = [(r.logprob.top_logprobs_num, r.logprob.token_ids_logprob) for r in reqs]
        assert LISTED_OUTPUT_KEY not in step(reqs, logprobs_GV, spec=spec)
        after = [(r.logprob.top_logprobs_num, r.logprob.token_ids_logprob) for r in reqs]
        assert after == before


def test_rows_that_are_not_the_requests_are_refused() -> None:
    with pytest.raises(UnknownPassError):
        step([opted(3, [1])], torch.randn(2, VOCAB).log_softmax(1))


@pytest.mark.parametrize("texts", [["!"], ["AAAA"], [None], ["AAAAAAAAAAA=", "AAAA"]])
def test_texts_that_are_no_steps_are_refused(texts: list[Any]) -> None:
    assert read_steps(["AAAAAAAAAAA="], 0, 1)[1].tolist() == [[0]]
    with pytest.raises((ValueError, TypeError)):
        read_steps(texts, 0, 1)
