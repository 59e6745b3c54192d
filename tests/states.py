"""Hidden states of engines, compared with those of a plain forward pass."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from distill.engine import Score, ScoreRequest
from distill.objective.batching import TrainingRow
from distill.states import HiddenStates, joined
from learner.teachers import teacher_row
from tests.tiny import VOCAB_SIZE


def states_request(
    length: int, start: int, temperatures: tuple[float, ...] = (0.7, 1.0), seed: int | None = None
) -> ScoreRequest:
    """Request for random tokens, with states of three of four scored positions."""
    rng = np.random.default_rng(length if seed is None else seed)
    tokens_T = rng.integers(2, VOCAB_SIZE, size=length).astype(np.int32)
    states_N = np.arange(start, length) % 4 != 1
    states_N[-1] = True
    return ScoreRequest(
        tokens_T=tokens_T, start=start, temperatures=temperatures, states_N=states_N
    )


@torch.no_grad()
def with_states(model: PreTrainedModel, row: TrainingRow) -> TrainingRow:
    """Row with the states of a teacher, which may see its own context."""
    seen = teacher_row(row)
    ids_1T = torch.from_numpy(seen.tokens_T.astype(np.int64))[None]
    hidden_TH = model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
    trained_T = torch.from_numpy(seen.loss_mask_T)
    return replace(row, teacher_states=HiddenStates.of(hidden_TH[:-1][trained_T[1:]]))


@torch.no_grad()
def expect_states(model: PreTrainedModel, request: ScoreRequest, score: Score) -> None:
    """Assert that the model's head maps the states to the model's own log-probs."""
    assert request.states_N is not None and score.states is not None
    assert len(score.states.values_NH) == request.states_N.sum()
    ids_1T = torch.from_numpy(request.tokens_T.astype(np.int64))[None]
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float()
    expected_NV = logits_TV[request.start - 1 : -1][torch.from_numpy(request.states_N)]
    head: Any = model.get_output_embeddings()
    made_NV = head(joined([score.states], "cpu").to(model.dtype)).float()
    for temperature in (0.5, 0.7, 1.0, 1.5):
        made, expected = (torch.log_softmax(z / temperature, 1) for z in (made_NV, expected_NV))
        torch.testing.assert_close(made, expected, atol=1e-4, rtol=0)
