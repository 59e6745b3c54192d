"""The handshake: the wrong party and its gap, and canaries that tell changes from noise."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distill.engine import EngineInfo, Score, ScoreRequest
from distill.errors import CalibrationError
from distill.handshake.canary import (
    FILLER_ROWS,
    NUM_ROWS,
    CanaryAnswers,
    CanaryRows,
    Gaps,
    outliers,
)
from distill.handshake.comparison import (
    MEAN_SHARE,
    NUM_PROBES,
    TOLERANCE,
    CalibrationReport,
    Comparison,
    Suspicion,
    compare,
    compare_with_law,
    probe_pairs,
    probe_prompts,
)
from distill.handshake.identity import fact_differences
from distill.states import HiddenStates
from distill.tokenizer import TokenizerProbe
from distill.types import FloatArray, TopLogprobs
from tests.samples import engine_info


def compared(
    *gaps: float,
    party: str = "teacher prefill",
    dtype: str = "float32",
    temperature: float = 1.2,
    must_differ: bool = False,
    suspicions: Sequence[Suspicion] = (),
) -> Comparison:
    """`party` against a reference of -2 everywhere, with these gaps."""
    reference = np.full(len(gaps), -2, np.float32)
    return compare(
        party, reference + np.array(gaps, np.float32), "teacher decode", reference,
        temperature=temperature, dtype=dtype, must_differ=must_differ, suspicions=suspicions,
    )  # fmt: skip


def compared_with(logprobs_N: FloatArray, reference_N: FloatArray) -> Comparison:
    return compare("a", logprobs_N, "b", reference_N, temperature=1.2, dtype="float32")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("temperature", "times"), [(0.5, 2), (1.0, 1), (2.0, 1)])
def test_the_tolerance_is_of_precision_over_t(dtype: str, temperature: float, times: float) -> None:
    allowed, others = times * TOLERANCE[dtype], [0.0] * 19
    assert compared(0.9 * allowed, *others, dtype=dtype, temperature=temperature).agrees
    assert not compared(1.1 * allowed, *others, dtype=dtype, temperature=temperature).agrees


def test_a_small_gap_everywhere_is_worse_than_an_outlier() -> None:
    outlier = compared(0.9, *[0.0] * 19, dtype="bfloat16")
    everywhere = compared(*[0.2] * 20, dtype="bfloat16")
    assert outlier.agrees and not everywhere.agrees
    assert outlier.tolerance == everywhere.tolerance == TOLERANCE["bfloat16"]
    assert everywhere.mean_tolerance == pytest.approx(MEAN_SHARE * TOLERANCE["bfloat16"])


@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf])
def test_non_finite_values_never_agree(gap: float) -> None:
    assert not compared(0.0, gap, dtype="bfloat16").agrees


def test_log_probs_too_small_for_a_float32_softmax_are_all_alike() -> None:
    reference = np.full(2, -200, np.float32)
    assert compared_with(np.array([-np.inf, -95], np.float32), reference).agrees
    assert not compared_with(np.array([-np.inf, -30], np.float32), reference).agrees


def test_json_has_no_constants_that_json_lacks() -> None:
    report = CalibrationReport(comparisons=(compared(math.nan), compared(math.inf)))
    rows = json.loads(json.dumps(report.to_json(), allow_nan=False))["comparisons"]
    assert [row["max_gap"] for row in rows] == ["nan", "inf"]


def test_a_matching_explanation_comes_first() -> None:
    reference = np.array([-2, -3], np.float32)
    mistaken = np.array([-5, -1], np.float32)

    def judged(found_N: FloatArray) -> Comparison:
        return compare(
            "a", found_N, "b", reference, temperature=0.5, dtype="float32",
            suspicions=[
                Suspicion("b", "it is upside down", found_N, -mistaken),
                Suspicion("c", "it was mistaken", found_N, mistaken),
            ],
        )  # fmt: skip

    explained, unexplained = judged(mistaken), judged(reference - 9)
    assert explained.diagnosis == "it was mistaken" and not explained.agrees
    assert explained.culprit == "c"
    assert explained.message().endswith("It was mistaken")
    assert unexplained.diagnosis == ""
    assert judged(reference).agrees and judged(reference).diagnosis == ""
    report = CalibrationReport(comparisons=(unexplained, explained))
    assert "2 of 2" in report.verdict() and "; c " in report.verdict()
    with pytest.raises(CalibrationError):
        report.require_agreement()


Z = np.array([[3.0, 1.0, -2.0], [0.5, -4.0, 9.0]], np.float32)


def pair_differences(temperature: float) -> FloatArray:
    """log p(a) - log p(b) of the softmax itself, with its normaliser."""
    p_NV = np.exp(Z / temperature)
    log_p_NV = np.log(p_NV / p_NV.sum(axis=1, keepdims=True))
    return log_p_NV[:, 0] - log_p_NV[:, 2]


@pytest.mark.parametrize(
    ("temperature", "used", "diagnosis"),
    [
        *((temperature, temperature, "") for temperature in (0.5, 0.9, 1.0, 1.7)),
        (0.5, 1.0, "not divided by T"),
        (0.5, 0.25, "divided by T twice"),
        (0.5, 0.7, ""),
        (1.0, 0.2, ""),  # at T = 1 neither mistake shows
    ],
)
def test_the_law_holds_of_a_softmax_at_the_temperature_that_was_asked(
    temperature: float, used: float, diagnosis: str
) -> None:
    law = compare_with_law(
        "a", pair_differences(used), pair_differences(1.0),
        temperature=temperature, dtype="float32", server=True,
    )  # fmt: skip
    assert law.num_tokens == 2 and law.agrees == (used == temperature)
    assert law.max_gap < 1e-5 or not law.agrees
    assert diagnosis in law.diagnosis and bool(diagnosis) == bool(law.diagnosis)


def info(**changes: Any) -> EngineInfo:
    return engine_info(**{"vocab_size": 10, "tokenizer": OURS} | changes)


OURS = TokenizerProbe(texts=((1, 2), (3,)), chat=(4, 5))


@pytest.mark.parametrize(
    ("policy", "teacher", "difference"),
    [
        ({}, {}, None),
        ({}, {"vocab_size": 11}, None),
        ({}, {"vocab_size": 9}, "teacher 0 has a vocabulary of 9, smaller than policy 0's 10"),
        ({"vocab_size": 11}, {"vocab_size": 11}, "policy 1 has a vocabulary of 11 and policy 0"),
        ({}, {"eos_token_ids": (1, 2)}, "teacher 0 ends at token ids [1, 2] and policy 0 at [1]"),
        ({"eos_token_ids": ()}, {}, "policy 1 ends at token ids [] and policy 0 at [1]"),
        ({}, {"eos_token_ids": None}, None),
        ({"tokenizer": None}, {"tokenizer": None}, None),
        ({}, {"tokenizer": replace(OURS, chat=None)}, None),
        ({}, {"tokenizer": replace(OURS, chat=(4,))}, None),
        ({"tokenizer": replace(OURS, texts=((1, 2), (9,)))}, {}, "as [9], the run's tokenizer as"),
    ],
)
def test_facts_that_differ(
    policy: dict[str, Any], teacher: dict[str, Any], difference: str | None
) -> None:
    policies = {"policy 0": info(), "policy 1": info(**policy)}
    found = fact_differences(policies, {"teacher 0": info(**teacher)}, OURS)
    assert len(found) == (difference is not None)
    assert difference is None or difference in found[0]


def test_a_party_that_ignores_the_temperature_is_detected() -> None:
    def heeds(gap: float) -> CalibrationReport:
        return CalibrationReport(comparisons=(compared(gap, must_differ=True),))

    heeds(0.5).require_agreement()
    with pytest.raises(CalibrationError):
        heeds(0.0).require_agreement()
    with pytest.raises(CalibrationError):
        heeds(math.nan).require_agreement()


def test_probes_are_seeded_and_inside_the_vocabulary() -> None:
    probes = probe_prompts(11, 64, seed=3)
    assert all(4 <= len(tokens) <= 24 for tokens in probes)
    assert set(np.concatenate(probes).tolist()) == set(range(11))
    assert [p.tolist() for p in probes] == [p.tolist() for p in probe_prompts(11, 64, seed=3)]
    assert [p.tolist() for p in probes] != [p.tolist() for p in probe_prompts(11, 64, seed=4)]


def test_a_pair_is_of_two_tokens_of_the_vocabulary() -> None:
    for vocab_size in (2, 3, 500):
        a_P, b_P = probe_pairs(vocab_size)
        assert len(a_P) == len(b_P) == NUM_PROBES and (a_P != b_P).all()
        assert {*a_P.tolist(), *b_P.tolist()} <= set(range(vocab_size))


T = 0.7
VOCAB_SIZE = 64
HIDDEN = 24
# Of a matrix multiplication, relative: what other batches make of the same sum.
INFO = engine_info(vocab_size=VOCAB_SIZE)
NOISE = {"float32": 3e-7, "bfloat16": 2**-9}


class Model:
    """Bags of embeddings, as a model with weights, precision and noise."""

    def __init__(self, seed: int, dtype: str = "float32") -> None:
        rng = np.random.default_rng(seed)
        self.embedding_VH = rng.normal(size=(VOCAB_SIZE, HIDDEN))
        self.head_HV = rng.normal(size=(HIDDEN, VOCAB_SIZE)) * 0.6
        self.noise, self.rng = NOISE[dtype], rng

    def states_TH(self, tokens_T: np.ndarray) -> np.ndarray:
        """States after each token."""
        age_TT = np.arange(len(tokens_T))[:, None] - np.arange(len(tokens_T))
        return np.where(age_TT >= 0, 0.7 ** np.abs(age_TT), 0) @ self.embedding_VH[tokens_T]

    def given_states(self, request: ScoreRequest) -> HiddenStates:
        states_NH = self.states_TH(request.tokens_T)[request.start - 1 : -1]
        noise_NH = self.rng.normal(size=states_NH.shape) * self.noise
        return HiddenStates((states_NH * (1 + noise_NH)).astype(np.float32), "float32")

    def logits_TV(self, tokens_T: np.ndarray) -> np.ndarray:
        """Logits after each token."""
        state_TH = self.states_TH(tokens_T)
        scale_TV = np.abs(state_TH) @ np.abs(self.head_HV)
        noise_TV = self.rng.normal(size=scale_TV.shape) * self.noise
        return state_TH @ self.head_HV + scale_TV * noise_TV

    def score(self, requests: list[ScoreRequest], temperature: float | None = None) -> list[Score]:
        """`temperature` replaces the T of each request, if it is not None."""
        scores = []
        for request in requests:
            logits_NV = self.logits_TV(request.tokens_T)[request.start - 1 : -1]
            columns = []
            for asked in request.temperatures:
                scaled_NV = logits_NV / (temperature or asked)
                log_p_NV = scaled_NV - np.logaddexp.reduce(scaled_NV, axis=1, keepdims=True)
                columns.append(log_p_NV)
            targets_N = request.tokens_T[request.start :]
            rows = np.arange(len(targets_N))
            top = None
            if request.given_NK is not None:
                top = TopLogprobs(
                    ids_NK=request.given_NK,
                    logprobs_NK=np.take_along_axis(columns[0], request.given_NK, 1).astype("f4"),
                )
            scores.append(
                Score(
                    logprobs_by_temperature=tuple(
                        log_p_NV[rows, targets_N].astype(np.float32) for log_p_NV in columns
                    ),
                    top=top,
                    states=None if request.states_N is None else self.given_states(request),
                )
            )
        return scores


def introduced(model: Model, rows: CanaryRows, dtype: str) -> CanaryAnswers:
    repeats = [rows.answer(model.score(rows.with_filler(number))) for number in FILLER_ROWS]
    return CanaryAnswers(replace(INFO, dtype=dtype), rows, repeats)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_noise_raises_no_alarm_and_other_weights_always_do(dtype: str) -> None:
    rows = CanaryRows.of(INFO, T, given=5, states=True)
    for seed in range(10):
        model = Model(seed, dtype)
        first = introduced(model, rows, dtype)
        for _ in range(8):
            assert not first.judge(rows.answer(model.score(list(rows.requests)))).why
        other = Model(seed + 100, dtype)
        assert "other weights" in first.judge(rows.answer(other.score(list(rows.requests)))).why


def test_the_tolerance_is_that_of_the_first_answers_within_bounds() -> None:
    rows = CanaryRows.of(INFO, 1.0)
    model = Model(0)
    model.noise = 2**-13
    repeats = [rows.answer(model.score(list(rows.requests))) for _ in range(4)]
    gaps = [np.abs(each.logprobs_N.astype(float) - repeats[0].logprobs_N) for each in repeats]
    info = replace(INFO, dtype="float16")
    first = CanaryAnswers(info, rows, repeats)
    measured, allowed = first.measured, first.allowed
    assert 0.00625 < measured.largest < 0.05, "between the bounds that are tried below"
    assert measured.largest == pytest.approx(max(gap_N.max() for gap_N in gaps))
    assert allowed.largest == pytest.approx(4 * measured.largest)
    assert allowed.mean == pytest.approx(4 * max(gap_N.mean() for gap_N in gaps))
    # A quiet one has an eighth of what the handshake allows, and a wild one no more than that.
    quiet = CanaryAnswers(info, rows, repeats[:1])
    assert quiet.allowed.largest == TOLERANCE["float16"] / 8
    wild = CanaryAnswers(replace(INFO, dtype="float32"), CanaryRows.of(INFO, 0.5), repeats)
    assert wild.allowed.largest == 2 * TOLERANCE["float32"]


def test_a_slow_drift_adds_up() -> None:
    """Each step is far below the tolerance; answers are compared with the first ones."""
    rows = CanaryRows.of(INFO, T)
    model = Model(3, "bfloat16")
    first = introduced(model, rows, "bfloat16")
    direction_HV = np.random.default_rng(9).normal(size=model.head_HV.shape) * 0.004
    before, good = first.answers[0], 0
    while True:
        model.head_HV += direction_HV
        answer = rows.answer(model.score(list(rows.requests)))
        assert Gaps.of(answer, before).within(first.allowed), "one step of it is seen by nobody"
        if first.judge(answer).why:
            break
        before, good = answer, good + 1
        assert good < 100
    assert good >= 2


def test_known_mistakes_are_named() -> None:
    rows = CanaryRows.of(INFO, T)
    model = Model(4)
    first = introduced(model, rows, "float32")
    zeros = Model(4)
    zeros.head_HV[:] = 0
    empty = first.judge(rows.answer(zeros.score(list(rows.requests))))
    assert empty.why.endswith("is -ln 64, so its weights are empty")
    undivided = first.judge(rows.answer(model.score(list(rows.requests), 1.0)))
    assert "divided by T" in undivided.why
    broken = Model(4)
    broken.head_HV[0, 0] = np.nan
    with np.errstate(invalid="ignore"):
        drift = first.judge(rows.answer(broken.score(list(rows.requests))))
    assert drift.why


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [1.5, -1.0, 0.0], ids=["longer", "elsewhere", "empty"])
def test_changed_hidden_states_are_found_beside_equal_log_probs(dtype: str, factor: float) -> None:
    """The learner's head is applied to the states; the server's log-probs use its own head."""
    rows = CanaryRows.of(INFO, T, states=True)
    model = Model(5, dtype)
    first = introduced(model, rows, dtype)
    changed = [
        score
        if score.states is None
        else replace(score, states=replace(score.states, values_NH=score.states.values_NH * factor))
        for score in model.score(list(rows.requests))
    ]
    assert "its hidden states moved" in first.judge(rows.answer(changed)).why


def test_the_odd_one_of_several_replicas_is_known_and_of_two_both_are() -> None:
    rows, between = CanaryRows.of(INFO, T), Gaps.between_kernels("float32", T)
    answers = {
        name: rows.answer(Model(seed).score(list(rows.requests)))
        for name, seed in {"a": 1, "b": 2, "c": 1}.items()
    }
    assert outliers(answers, between, rows).keys() == {"b"}
    assert outliers({n: answers[n] for n in "ab"}, between, rows).keys() == {"a", "b"}
    assert outliers({n: answers[n] for n in "ac"}, between, rows) == {}
    assert outliers({"a": answers["a"]}, between, rows) == {}


def test_rows_take_the_paths_of_real_requests() -> None:
    event = (1, 2, 3)
    rows = CanaryRows.of(replace(INFO, stop_event=event), T, given=8, top_k=2)
    at_T, at_other = rows.requests[0::2], rows.requests[1::2]
    assert len(at_T) == len(at_other) == NUM_ROWS
    for request in at_T:
        assert request.start == 1 and request.temperatures == (T, 1.0) and request.listed == 10
        assert request.given_NK is not None and not np.isin(request.given_NK, event[1:]).any()
        assert request.tokens_T.max() < VOCAB_SIZE
    assert {request.temperatures for request in at_other} == {(T * 1.5,)}
    assert not any(request.listed for request in at_other)
    # Given tokens are left out where the server does not know them, and company comes behind.
    assert CanaryRows.of(replace(INFO, scores_given=False), T, given=8).requests[0].listed == 0
    assert rows.with_filler(6)[: len(rows.requests)] == list(rows.requests)
    assert len(rows.with_filler(6)) == len(rows.requests) + 6
