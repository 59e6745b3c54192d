"""Stop tokens of the run: a union or chosen ones, one event; and temperatures of sampling."""

import math
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from distill.errors import ConfigError
from distill.models.logprobs import as_outcomes, log_distribution, selected_logprobs
from distill.objective.divergences import generalised_jsd, kl
from distill.sampling import EvalSampling, TrainSampling, check_temperature
from distill.stops import StopTokens, hits, parse_stop_tokens
from tests.chat_templates import chat_tokenizer
from tests.refusals import refuses
from tests.tiny import token_id


@pytest.mark.parametrize(
    ("ends", "chosen", "ids", "one_event"),
    [
        ([{1}, {1}], (), (1,), False),
        ([{2, 1}, {1, 2}], (), (1, 2), False),  # two outcomes to both: tokens like any other
        ([{1}, {2}], (), (1, 2), True),
        ([{1}, {1, 2}], (), (1, 2), True),
        ([{1}, None], (), (1,), False),
        ([{1, 2}, {1, 2}], (2,), (2,), False),
        ([{1}, {1}], (1, 2), (1, 2), True),
        ([{1, 2}, None], (1, 2), (1, 2), True),
        ([set()], (), (), False),
    ],
)
def test_stops_of_several_models(
    ends: Sequence[Collection[int] | None],
    chosen: Collection[int],
    ids: tuple[int, ...],
    one_event: bool,
) -> None:
    stops = StopTokens.of(ends, chosen)
    assert (stops.ids, stops.one_event) == (ids, one_event)
    assert stops.event == (ids if one_event else ())


def test_an_end_beyond_the_vocabulary_of_the_sampler_is_left_out() -> None:
    """A teacher whose vocabulary is padded further may end at ids that the student lacks."""
    assert StopTokens.of([{1}, {1, 99}], vocab_size=99) == StopTokens.of([{1}, {1}])
    assert StopTokens.of([{1}, {98}, None], vocab_size=99).ids == (1, 98)


def test_tokens_by_text_or_id() -> None:
    tokenizer = deepcopy(chat_tokenizer("qwen3"))
    end = token_id(tokenizer, "<|im_end|>")
    assert parse_stop_tokens("<|im_end|>, 7", tokenizer) == {end, 7}
    assert parse_stop_tokens("", tokenizer) == set()
    for bad in ("<|im_ed|>", str(len(tokenizer)), ","):
        with refuses(ConfigError, "model.stop_tokens"):
            parse_stop_tokens(bad, tokenizer)


def test_an_event_is_one_outcome_of_the_distribution() -> None:
    torch.manual_seed(0)
    logits_NV, temperature_N = torch.randn(6, 9) * 3, torch.linspace(0.5, 2, 6)
    event = (2, 5, 8)
    log_p_NV = log_distribution(logits_NV, temperature_N, event)
    apart_NV = torch.log_softmax(logits_NV / temperature_N[:, None], dim=1)
    others = [v for v in range(9) if v not in event]
    together_N = apart_NV[:, event].exp().sum(1).log()
    torch.testing.assert_close(log_p_NV[:, 2], together_N)
    torch.testing.assert_close(log_p_NV[:, others], apart_NV[:, others])
    assert log_p_NV.exp().sum(1).tolist() == pytest.approx([1] * 6)
    tokens_N = torch.tensor([2, 5, 8, 0, 1, 5])
    selected_N = selected_logprobs(logits_NV, tokens_N, temperature_N, event)
    torch.testing.assert_close(selected_N[[0, 1, 2, 5]], together_N[[0, 1, 2, 5]])
    assert as_outcomes(tokens_N, event).tolist() == [2, 2, 2, 0, 1, 2]
    assert hits(np.array([1, 8]), event).tolist() == [False, True]


@pytest.mark.parametrize("name", ["reverse", "forward", "jsd"])
def test_absent_tokens_do_not_count_in_a_divergence(name: str) -> None:
    torch.manual_seed(1)
    ones_N, event = torch.ones(4), (0, 3)
    z_NV = (torch.randn(4, 6) * 4).requires_grad_()
    w_NV = torch.randn(4, 6) * 4

    def made(merge: bool) -> torch.Tensor:
        found = []
        for logits_NV in (z_NV, w_NV):
            if merge:
                found.append(log_distribution(logits_NV, ones_N, event))
                continue
            apart_NV = torch.log_softmax(logits_NV, dim=1)
            stopping_N1 = torch.logaddexp(apart_NV[:, 0], apart_NV[:, 3])[:, None]
            found.append(torch.cat([stopping_N1, apart_NV[:, [1, 2, 4, 5]]], dim=1))
        log_p, log_q = found
        pairs = {"reverse": lambda: kl(log_p, log_q), "forward": lambda: kl(log_q, log_p)}
        return pairs.get(name, lambda: generalised_jsd(log_p, log_q, 0.3))().sum()

    torch.testing.assert_close(made(True), made(False))
    ours, truth = (torch.autograd.grad(made(merge), z_NV)[0] for merge in (True, False))
    torch.testing.assert_close(ours, truth)


@given(st.floats())
@example(0.0)
def test_training_takes_every_finite_temperature_above_zero_and_no_other(value: float) -> None:
    if math.isfinite(value) and value > 0:
        assert TrainSampling(temperature=value, max_new_tokens=1).temperature == value
    else:
        with refuses(ConfigError, "temperature"):
            TrainSampling(temperature=value, max_new_tokens=1)


@pytest.mark.parametrize("value", ["1.0", None, [1.0]])
def test_a_temperature_is_a_number(value: object) -> None:
    with refuses(ConfigError, "my.field"):
        check_temperature(value, "my.field")  # pyright: ignore[reportArgumentType]


def test_training_has_no_truncation_to_set() -> None:
    assert {field.name for field in fields(TrainSampling)} == {"temperature", "max_new_tokens"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("max_new_tokens", 0),
    ],
)
def test_evaluation_ranges(name: str, value: float) -> None:
    with refuses(ConfigError, name):
        EvalSampling(**{"temperature": 1.0, "max_new_tokens": 3, name: value})
