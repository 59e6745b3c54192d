"""The learner's log-probs are the model's own in any batch."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.objective.batching import TrainingRow, collate
from learner.forward import Forward
from tests.conftest import TinyPair
from tests.learner.conftest import naive_distribution
from tests.samples import after_context, training_row

ROWS = [
    training_row(2, 5, seed=1, temperature=0.5),
    training_row(9, 12, seed=2, temperature=1.0),
    training_row(1, 1, seed=3, temperature=2.0),
    training_row(4, 3, seed=4, temperature=0.1),
]


@pytest.fixture(scope="module")
def model(tiny_pair: TinyPair) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_pair.student, dtype=torch.float32).eval()


def naive(model: PreTrainedModel, row: TrainingRow) -> list[tuple[float, float]]:
    """(log-prob, entropy) of each trained token."""
    with torch.no_grad():
        log_p_NV = naive_distribution(model, row).double()
    tokens_N = row.tokens_T[row.loss_mask_T]
    return [
        (log_p_V[token].item(), float(-sum(p.exp() * p for p in log_p_V)))
        for log_p_V, token in zip(log_p_NV, tokens_N, strict=True)
    ]


@pytest.mark.parametrize("order", [[0], [0, 1, 2, 3], [3, 1, 0, 2], [2, 2]])
def test_every_row_as_if_it_were_alone_at_its_own_temperature(
    model: PreTrainedModel, order: list[int]
) -> None:
    rows = [ROWS[i] for i in order]
    with torch.no_grad():
        stats = Forward(deepcopy(model))(collate(rows))
    expected = [pair for row in rows for pair in naive(model, row)]
    assert stats.logprobs_N.tolist() == pytest.approx([p for p, _ in expected], abs=2e-4)
    assert stats.entropy_N.tolist() == pytest.approx([h for _, h in expected], abs=2e-4)
    assert stats.logprobs_N.dtype == torch.float32


GROUPED = [
    row
    for context_T in (np.arange(40, 75, dtype=np.int32), np.arange(90, 130, dtype=np.int32))
    for row in after_context(context_T, (3, 9, 1, 5))
]


def test_rows_that_share_a_context_run_it_once_and_agree(model: PreTrainedModel) -> None:
    """Values and gradients of a shared run equal those of rows one at a time."""
    alone, together = deepcopy(model), deepcopy(model)
    rows = [GROUPED[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]
    positions: list[int] = []
    together.get_input_embeddings().register_forward_hook(
        lambda _module, inputs, _output: positions.append(inputs[0].numel())
    )
    forward, singly = Forward(together), Forward(alone)
    positions.clear()
    shared_N = forward(collate(rows)).logprobs_N
    assert sum(positions) < sum(map(len, rows)) / 2, "the contexts were run row by row"
    single_N = torch.cat([singly(collate([row])).logprobs_N for row in rows])
    torch.testing.assert_close(shared_N, single_N, atol=1e-5, rtol=0)
    weights_N = torch.linspace(-1, 1, len(shared_N))
    (shared_N * weights_N).sum().backward()
    (single_N * weights_N).sum().backward()
    for mine, reference in zip(together.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None and reference.grad is not None
        scale = float(reference.grad.abs().max())
        torch.testing.assert_close(mine.grad, reference.grad, atol=1e-5 * max(scale, 1), rtol=0)
