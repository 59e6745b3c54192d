"""The handshake on real engines: a party that scores wrongly is named, with the cause."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from actors.config import EngineConfig
from actors.embedded.engine import EmbeddedEngine
from actors.rollout.teacher import States
from cluster import calibrate
from cluster.config.opd import OpdConfig
from cluster.handles.engine_pool import EnginePool
from cluster.handshake.handshake import LearnerLogprobs, handshake
from cluster.runtime.run_handshake import RunHandshake
from distill.engine import EngineInfo, GenerateRequest, Sample, Score, ScoreRequest, ScoringModel
from distill.errors import CalibrationError
from distill.handshake.comparison import CalibrationReport
from distill.models.loading import load_causal_lm
from distill.objective.batching import TrainingRow
from distill.stops import StopTokens
from distill.tokenizer import TokenizerProbe, load_tokenizer, probe_tokenizer
from distill.types import FloatArray
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.teachers import LocalTeachers
from tests.conftest import TinyPair
from tests.handles import Handle
from tests.tiny import EOS, tiny_model_dir
from tests.weights import shared

NewOpd = Callable[..., OpdConfig]
Scale = Callable[[float], float]
T = 0.6


def right(temperature: float) -> float:
    return temperature


def ignored(_: float) -> float:
    return 1.0


def twice(temperature: float) -> float:
    return temperature**2


@dataclass
class Spoilt:
    """A real engine that scores at another temperature than requested, or reports other facts.

    `prefill` and `decode` map the requested temperature to the one that is used; both map 1 to 1.
    """

    engine: ScoringModel
    prefill: Scale = right
    decode: Scale = right
    says: Mapping[str, Any] = field(default_factory=dict)

    async def info(self) -> EngineInfo:
        return replace(await self.engine.info(), **self.says)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self.engine.score([at(self.prefill, r) for r in requests])

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self.engine.decode_score([at(self.decode, r) for r in requests])

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        samples = await self.engine.generate(request)
        start, temperature = len(request.prompt_tokens_T), self.decode(request.sampling.temperature)
        chains = [np.concatenate([request.prompt_tokens_T, s.tokens_T]) for s in samples]
        scores = await self.engine.score(
            [ScoreRequest(tokens_T=c, start=start, temperatures=(temperature,)) for c in chains]
        )
        return [
            replace(sample, logprobs_T=score.logprobs_by_temperature[0])
            for sample, score in zip(samples, scores, strict=True)
        ]


def at(changed: Scale, request: ScoreRequest) -> ScoreRequest:
    return replace(request, temperatures=tuple(changed(t) for t in request.temperatures))


@dataclass
class Parties:
    policy: EmbeddedEngine
    stale_policy: EmbeddedEngine
    teacher: EmbeddedEngine
    learner: Learner
    tokenizer: TokenizerProbe

    async def learner_logprobs(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        return self.learner.logprobs(rows_D)

    def shake(self, temperature: Any = T, **changes: Any) -> CalibrationReport:
        arguments: dict[str, Any] = {
            "policies": {"policy": self.policy}, "teachers": {"teacher": self.teacher},
            "learner": self.learner_logprobs, "tokenizer": self.tokenizer,
            "temperature": temperature, "learner_dtype": "float32",
        }  # fmt: skip
        return asyncio.run(handshake(**arguments | changes))


def embedded(model: str, **settings: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model_path=model, device="cpu", threads=1, **settings)


def new_learner(model: str, scratch: Path) -> Learner:
    return Learner(LearnerConfig.of(model=model, total_steps=1, device="cpu"), str(scratch))


@pytest.fixture(scope="module")
def parties(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Parties:
    tokenizer = load_tokenizer(tiny_pair.student)
    stale = embedded(tiny_pair.student)
    model = load_causal_lm(tiny_pair.student, dtype=torch.float32, device="cpu")
    for parameter in model.parameters():
        parameter.data.mul_(1.01)  # a few optimizer steps away
    weights = shared(dict(model.named_parameters()))
    asyncio.run(stale.load_weights(weights, 0))
    return Parties(
        policy=embedded(tiny_pair.student), stale_policy=stale, teacher=embedded(tiny_pair.teacher),
        learner=new_learner(tiny_pair.student, tmp_path_factory.mktemp("scratch")),
        tokenizer=probe_tokenizer(tokenizer),
    )  # fmt: skip


def failed(report: CalibrationReport) -> set[tuple[str, str]]:
    return {(c.party, c.reference) for c in report.failures}


def complaint(report: CalibrationReport) -> str:
    with pytest.raises(CalibrationError) as error:
        report.require_agreement()
    assert error.value.exit_code == 3 and not report.agrees
    return str(error.value)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
def test_right_parties_agree(parties: Parties, temperature: float) -> None:
    report = parties.shake(temperature)
    report.require_agreement()
    assert report.agrees and report.largest_gap < 1e-4
    assert set(report.parties) == {"policy", "teacher"}
    pairs = {
        ("policy prefill", "itself at another T"),
        ("policy prefill", "the temperature law"),
        ("policy prefill", "policy decode reference"),
        ("policy decode", "learner"),
        ("policy prefill", "learner"),
        ("teacher prefill", "itself at another T"),
        ("teacher prefill", "the temperature law"),
        ("teacher prefill", "teacher decode reference"),
    }
    both = {round(temperature, 6), round(1.5 * temperature, 6)}
    for pair in pairs:
        found = [c for c in report.comparisons if (c.party, c.reference) == pair]
        asked = {round(c.temperature, 6) for c in found}
        assert asked == ({round(temperature, 6)} if found[0].must_differ else both), pair
        assert all(c.num_tokens >= 8 for c in found)
    assert {(c.party, c.reference) for c in report.comparisons} == pairs


SERVER = {"kind": "sglang (external)"}
ITSELF, LAW = "itself at another T", "the temperature law"
DECODE = "{} decode reference"
UNDIVIDED, AT_ONE, TWICE = "not divided by T", "T = 1", "divided by T twice"


@pytest.mark.parametrize(
    ("role", "prefill", "decode", "fails", "party", "cause"),
    [
        # An SGLang server without the plugin.
        ("teacher", ignored, right, {ITSELF, LAW, DECODE}, "teacher prefill", UNDIVIDED),
        # SGLANG_RETURN_ORIGINAL_LOGPROB=1, with the plugin.
        ("teacher", right, ignored, {DECODE}, "teacher prefill", AT_ONE),
        # A server that ignores T in both agrees with itself at every T.
        ("teacher", ignored, ignored, {ITSELF, LAW}, "teacher prefill", UNDIVIDED),
        ("teacher", twice, right, {LAW, DECODE}, "teacher prefill", TWICE),
        ("teacher", right, twice, {DECODE}, "teacher prefill", TWICE),
        ("teacher", twice, twice, {LAW}, "teacher prefill", TWICE),
        ("policy", ignored, right, {ITSELF, LAW, DECODE, "learner"}, "policy prefill", UNDIVIDED),
        ("policy", right, ignored, {DECODE, "decode learner"}, "policy ", AT_ONE),
        ("policy", right, twice, {DECODE, "decode learner"}, "policy ", TWICE),
        ("policy", twice, twice, {LAW, "learner", "decode learner"}, "policy prefill", TWICE),
    ],
)
def test_an_engine_that_applies_another_temperature_is_named_with_the_cause(
    parties: Parties, role: str, prefill: Scale, decode: Scale, fails: set[str], party: str,
    cause: str,
) -> None:  # fmt: skip
    engine = Spoilt(getattr(parties, role), prefill, decode, says=SERVER)
    pool = {"policy": "policies", "teacher": "teachers"}[role]
    report = parties.shake(**{pool: {role: engine}})
    pairs = {(f"{role} prefill", name.format(role)) for name in fails - {"decode learner"}}
    pairs |= {(f"{role} decode", "learner")} if "decode learner" in fails else set()
    assert failed(report) == pairs
    assert complaint(report).startswith(party) and cause in complaint(report)
    assert not any("weights" in comparison.diagnosis for comparison in report.failures)


@pytest.mark.parametrize(
    ("temperature", "mistaken"), [(1.0, ignored), (0.98, twice), (2 / 3, ignored)]
)
def test_a_mistake_is_found_at_a_temperature_that_hides_it(
    parties: Parties, temperature: float, mistaken: Scale
) -> None:
    teacher = Spoilt(parties.teacher, mistaken, mistaken)
    report = parties.shake(temperature, teachers={"teacher": teacher})
    assert {c.party for c in report.failures} == {"teacher prefill"}


def test_bfloat16_agrees_within_its_own_allowance(parties: Parties, tiny_pair: TinyPair) -> None:
    coarse = embedded(tiny_pair.student, dtype="bfloat16")
    report = parties.shake(policies={"policy": coarse})
    report.require_agreement()
    assert report.largest_gap > 1e-3, "not computed in bfloat16"
    unscaled = Spoilt(coarse, prefill=ignored, decode=ignored)
    report = parties.shake(policies={"policy": unscaled})
    assert ("policy decode", "learner") in failed(report)
    assert ("policy prefill", ITSELF) in failed(report)


def test_without_a_learner_the_first_policy_engine_is_the_reference(parties: Parties) -> None:
    pool = named_pool("policy", parties.policy, parties.stale_policy).each()
    first, second = pool
    report = parties.shake(policies={first: pool[first]}, learner=None)
    assert report.agrees and not any("learner" in c.reference for c in report.comparisons)
    assert (f"{first} decode", f"{first} prefill") in {
        (c.party, c.reference) for c in report.comparisons
    }
    report = parties.shake(policies=pool, learner=None)
    assert failed(report) == {(f"{second} prefill", f"{first} prefill")}
    for prefill, decode in ((ignored, right), (ignored, ignored), (twice, twice), (right, ignored)):
        spoilt = Spoilt(parties.policy, prefill, decode)
        assert not parties.shake(policies={"policy": spoilt}, learner=None).agrees
        teacher = Spoilt(parties.teacher, prefill, decode)
        found = complaint(parties.shake(teachers={"teacher": teacher}, learner=None))
        assert found.startswith("teacher ")


@pytest.mark.parametrize("temperature", [1.0, 1.01])
def test_stale_weights_are_named_as_the_cause_at_a_temperature_near_one(
    parties: Parties, temperature: float
) -> None:
    report = parties.shake(temperature, policies={"policy": parties.stale_policy})
    assert len(report.failures) == 4
    assert all("weights" in c.diagnosis for c in report.failures)


def test_a_learner_with_another_temperature_or_other_weights_is_found(
    parties: Parties, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    async def unscaled(rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        return parties.learner.logprobs([replace(row, temperature=1.0) for row in rows_D])

    other = new_learner(tiny_pair.teacher, tmp_path)

    async def other_logprobs(rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        return other.logprobs(rows_D)

    for learner in (unscaled, other_logprobs):
        report = parties.shake(learner=learner)
        assert failed(report) == {("policy decode", "learner"), ("policy prefill", "learner")}


def test_other_facts_end_the_handshake_before_any_token_is_scored(parties: Parties) -> None:
    other = TokenizerProbe(texts=((5, 6), (7,)), chat=None)
    report = parties.shake(teachers={"teacher": Spoilt(parties.teacher, says={"tokenizer": other})})
    assert report.comparisons == ()
    difference, *_ = report.to_json()["differences"]
    assert "tokenizer" in difference and "tokenizer" in complaint(report)


@pytest.mark.parametrize("context_length", [2, 5])
def test_every_probe_fits_a_short_context(
    parties: Parties, tmp_path: Path, context_length: int
) -> None:
    short = embedded(tiny_model_dir(tmp_path, seed=5, context_length=context_length))
    assert parties.shake(teachers={"teacher": short}).agrees


# runs and the command


def named_pool(role: str, *engines: Any) -> EnginePool:
    return EnginePool(role, {f"{role} engine {i}": Handle(e) for i, e in enumerate(engines)})


class RecordingDirectory:
    def __init__(self) -> None:
        self.written: dict[str, Any] = {}

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.written[name] = json.loads(json.dumps(value))


class Shaken:
    """The first handshake of a run over plain engines, and what it writes and prints."""

    def __init__(
        self, parties: Parties, teacher: ScoringModel, config: OpdConfig,
        copy: LearnerLogprobs | None = None, states: Mapping[str, States] | None = None,
    ) -> None:  # fmt: skip
        pools = {
            "policy": named_pool("policy", parties.policy),
            "teacher": named_pool("teacher", teacher),
            "evaluation": named_pool("evaluation"),
        }
        learner = SimpleNamespace(
            logprobs=parties.learner_logprobs,
            teacher_logprobs=lambda name, rows_D: copy and copy(rows_D),
        )

        async def answer(_what: str, call: Awaitable[Any], _worker: str) -> Any:
            return await call

        self._parties: Any = SimpleNamespace(
            driver=SimpleNamespace(
                run=lambda what, coroutine: asyncio.run(coroutine), answer=answer
            ),
            pool=pools.__getitem__, learner=Handle(learner),
        )  # fmt: skip
        self.printed = io.StringIO()
        self.directory: Any = RecordingDirectory()
        console = Console(file=self.printed, width=400)
        inputs: Any = SimpleNamespace(
            tokenizer=load_tokenizer(config.model.path), stops=StopTokens(ids=(EOS,)),
            states=states or {},
        )  # fmt: skip
        self._handshake = RunHandshake(config, inputs, self.directory, console, console.print)

    def __call__(self) -> dict[str, Any]:
        """Run the handshake; return calibration.json."""
        self._handshake.before_steps(self._parties, ["teacher"])
        return self.written

    @property
    def written(self) -> dict[str, Any]:
        return self.directory.written["calibration.json"]


def test_a_run_starts_on_disagreement_only_with_handshake_false(
    parties: Parties, opd: NewOpd
) -> None:
    mistaken = Spoilt(parties.teacher, prefill=ignored)
    refused = Shaken(parties, mistaken, opd(temperature=T))
    with pytest.raises(CalibrationError):
        refused()
    assert refused.written["agrees"] is False and "DISAGREES" in refused.printed.getvalue()
    allowed = Shaken(parties, mistaken, opd(temperature=T, handshake=False))
    assert allowed()["agrees"] is False
    assert "teacher engine 0 prefill" in allowed.printed.getvalue()


@pytest.mark.parametrize("scale", [right, ignored])
def test_the_learner_s_copy_of_a_teacher_is_a_party(
    parties: Parties, tiny_pair: TinyPair, opd: NewOpd, scale: Scale
) -> None:
    copies = LocalTeachers({"": tiny_pair.teacher}, dtype=torch.float32, device="cpu")

    async def copy(rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        rows_D = [replace(row, temperature=scale(row.temperature)) for row in rows_D]
        return copies.models[""].logprobs(rows_D, token_budget=4096)

    run = Shaken(parties, parties.teacher, opd(temperature=T, estimator="full"), copy)
    if scale is right:
        run()
    else:
        with pytest.raises(CalibrationError):
            run()
    compared = [(row["party"], row["reference"]) for row in run.written["comparisons"]]
    pair = ("the learner's copy of teacher engine 0", "teacher engine 0 prefill")
    assert compared.count(pair) == 2


@pytest.mark.parametrize(
    ("head", "prefill", "states", "agrees"),
    [
        ("teacher", right, "also", True),
        ("another", right, "also", False),
        ("another", right, "only", False),
        # As a stock SGLang server, which scores given tokens at T = 1.
        ("teacher", ignored, "only", True),
        ("teacher", ignored, "also", False),
    ],
)
def test_a_teacher_s_head_in_the_learner_is_compared_with_the_decode(
    parties: Parties, tiny_pair: TinyPair, opd: NewOpd, tmp_path: Path,
    head: str, prefill: Scale, states: States, agrees: bool,
) -> None:  # fmt: skip
    other = tiny_model_dir(tmp_path, seed=9)
    path = {"teacher": tiny_pair.teacher, "another": other}[head]
    heads = LocalTeachers({}, heads={"": path}, dtype=torch.float32, device="cpu")

    async def by_head(rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        return heads.models[""].logprobs(rows_D, token_budget=4096)

    settings: dict[str, Any] = {"temperature": T, "estimator": "full", "teacher.head": path}
    teacher = Spoilt(parties.teacher, prefill=prefill)
    run = Shaken(parties, teacher, opd(**settings), by_head, {"": states})
    if agrees:
        run()
    else:
        with pytest.raises(CalibrationError):
            run()
    rows = run.written["comparisons"]
    decode = [row for row in rows if row["reference"] == "teacher engine 0 decode reference"]
    assert {row["temperature"] for row in decode} == {T, 1.5 * T}
    assert all(row["agrees"] for row in decode) == (head == "teacher")
    assert any("without" in row["party"] for row in rows) == (states == "also")


def test_the_command_ends_with_code_3_on_disagreement(
    tiny_pair: TinyPair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = calibrate.running_engines

    @asynccontextmanager
    async def spoilt(*configs: EngineConfig) -> AsyncIterator[list[ScoringModel]]:
        async with running(*configs) as (policy, teacher):
            yield [policy, Spoilt(teacher, prefill=ignored)]

    monkeypatch.setattr(calibrate, "running_engines", spoilt)
    arguments = [
        f"student={tiny_pair.student}", f"teacher={tiny_pair.teacher}", f"temperature={T}",
        "device=cpu", "threads=1", "engine=embedded", f"out={tmp_path / 'report.json'}",
    ]  # fmt: skip
    assert calibrate.main(arguments) == 3
    printed = capsys.readouterr()
    assert "DISAGREES" in printed.out and "error: teacher prefill" in printed.err
    assert json.loads((tmp_path / "report.json").read_text())["agrees"] is False


STOPS = StopTokens(ids=(EOS, 20, 90), one_event=True)


@pytest.fixture(scope="module")
def stopping(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Parties for which three stop tokens are one event."""
    config = LearnerConfig.of(model=tiny_pair.student, total_steps=1, device="cpu", stops=STOPS)
    learner = Learner(config, str(tmp_path_factory.mktemp("stops")))

    async def logprobs(rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        return learner.logprobs(rows_D)

    return {
        "policies": {"policy": embedded(tiny_pair.student, stops=STOPS)},
        "teachers": {"teacher": embedded(tiny_pair.teacher, stops=STOPS)},
        "learner": logprobs,
    }


def test_parties_agree_on_stopping_as_one_event(parties: Parties, stopping: dict[str, Any]) -> None:
    report = parties.shake(**stopping)
    assert report.agrees, complaint(report)
    named = [c for c in report.comparisons if c.reference == "another stop token"]
    assert [c.party.split()[0] for c in named] == ["policy", "teacher"]
    assert max(c.max_gap for c in named) < 1e-5


def test_a_party_that_scores_stop_tokens_one_by_one_is_found(
    parties: Parties, stopping: dict[str, Any]
) -> None:
    apart = parties.shake(**stopping | {"learner": parties.learner_logprobs})
    assert "learner" in complaint(apart)
    says = {"eos_token_ids": STOPS.ids, "stop_event": STOPS.event}
    pretends = {"teacher": Spoilt(parties.teacher, says=says)}
    report = parties.shake(**stopping | {"teachers": pretends})
    assert [c.party for c in report.failures] == ["teacher prefill of a stop token"]
    honest = parties.shake(**stopping | {"teachers": {"teacher": parties.teacher}})
    assert any("[1]" in each and "[1, 20, 90]" in each for each in honest.differences)
