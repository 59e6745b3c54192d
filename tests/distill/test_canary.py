"""Canaries: noise raises no alarm; other or empty weights, another T and a slow drift do."""

from dataclasses import replace

import numpy as np
import pytest

from distill.engine import Score, ScoreRequest
from distill.handshake.canary import (
    FILLER_ROWS,
    NUM_ROWS,
    CanaryAnswers,
    CanaryRows,
    Gaps,
    outliers,
)
from distill.handshake.comparison import TOLERANCE
from distill.states import HiddenStates
from distill.types import TopLogprobs
from tests.samples import engine_info

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
def test_hidden_states_that_change_are_found_beside_log_probs_that_do_not(
    dtype: str, factor: float
) -> None:
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
