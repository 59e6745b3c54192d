"""The reward model's actor returns transformers' own scores, also for concurrent calls."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from actors.embedded.reward_model import EmbeddedRewardModel
from distill.data.prompts import Prompt
from distill.data.row_conversion import LongRows, TooLong
from distill.errors import DataError, EngineError
from distill.models.reward import start_reward_model
from distill.rewards.conversations import ConversationEncoder, accepted_prompts
from distill.rewards.model_reward import RewardInput
from tests.conftest import TinyPair
from tests.refusals import refuses
from tests.samples import ids
from tests.tiny import EOS, PAD, save_tokenizer

CHAT = ({"role": "user", "content": "Hi"},)
ASKED = [
    RewardInput(prompt="1+1=", response="2"),
    RewardInput(prompt="1+1=", response="a long answer, of many more characters than that"),
    RewardInput(messages=CHAT, response="Hello."),
    RewardInput(messages=CHAT, response=""),
]


@pytest.fixture(scope="module")
def checkpoint(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("reward-model")
    torch.manual_seed(0)
    start_reward_model(tiny_pair.student, padding=PAD, device="cpu").save_pretrained(path)
    save_tokenizer(path)
    return str(path)


def padded_with(checkpoint: str, path: Path, padding: int | None) -> str:
    """The same weights with another padding in the config."""
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    model.config.pad_token_id = padding
    model.save_pretrained(path)
    save_tokenizer(path)
    return str(path)


def naive(path: str) -> list[float]:
    """Each conversation's score alone, by transformers' own class."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    encode = ConversationEncoder(path)
    with torch.no_grad():
        rows = [torch.tensor([encode(asked).tolist()]) for asked in ASKED]
        return [model(input_ids=row).logits[0, 0].item() for row in rows]


def run(path: str, *calls: Sequence[RewardInput], **settings: Any) -> list[list[float]]:
    """Results of several concurrent calls."""

    async def ask() -> list[list[float]]:
        model = EmbeddedRewardModel(model_path=path, device="cpu", **settings)
        try:
            return list(await asyncio.gather(*(model.rewards(asked) for asked in calls)))
        finally:
            await model.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("token_budget", [1, 40, 16384])
def test_scores_depend_on_no_neighbour(checkpoint: str, token_budget: int) -> None:
    expected = naive(checkpoint)
    assert len({round(score, 4) for score in expected}) == len(ASKED)
    one, other = run(checkpoint, ASKED, ASKED[::-1], token_budget=token_budget)
    assert one == pytest.approx(expected, abs=1e-5)
    assert other == pytest.approx(expected[::-1], abs=1e-5)


def test_scores_are_not_rounded_to_half_precision(checkpoint: str) -> None:
    [scores] = run(checkpoint, ASKED, dtype="bfloat16")
    assert scores == pytest.approx(naive(checkpoint), abs=0.05)
    assert all(torch.tensor(score).bfloat16().item() != score for score in scores)


@pytest.mark.parametrize("padding", [None, EOS])
def test_a_foreign_model_s_score_is_read_where_its_class_reads_it(
    checkpoint: str, tmp_path: Path, padding: int | None
) -> None:
    """Without padding, and with a padding that ends rows; batches of one row hide mistakes."""
    path = padded_with(checkpoint, tmp_path, padding)
    expected = naive(path)
    if padding == EOS:  # the class skips the EOS behind plain text
        assert expected[0] != pytest.approx(naive(checkpoint)[0], abs=1e-4)
    [scores] = run(path, ASKED)
    assert scores == pytest.approx(expected, abs=1e-5)


def test_concurrent_requests_share_a_pass(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    score = EmbeddedRewardModel.score_rows

    def counted(model: EmbeddedRewardModel, rows: Sequence[Any]) -> list[float]:
        passes.append(len(rows))
        return score(model, rows)

    monkeypatch.setattr(EmbeddedRewardModel, "score_rows", counted)
    run(checkpoint, *([asked] for asked in ASKED))
    assert sum(passes) == len(ASKED) and len(passes) < len(ASKED)


async def test_a_bad_row_fails_only_its_own_caller(checkpoint: str) -> None:
    model = EmbeddedRewardModel(model_path=checkpoint, device="cpu")
    long = RewardInput(prompt="a", response="b" * 200)
    calls = [model.rewards([long]), model.rewards(ASKED[:1])]
    refused, scores = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(refused, DataError)
    assert scores == pytest.approx(naive(checkpoint)[:1], abs=1e-5)


def test_a_score_that_is_no_number_is_an_error(checkpoint: str, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    model.score.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(EngineError):
        run(str(tmp_path), ASKED)


async def test_its_heartbeat_counts_rows(checkpoint: str) -> None:
    model = EmbeddedRewardModel(model_path=checkpoint, device="cpu")
    before = await model.health()
    await model.rewards(ASKED)
    assert [before, await model.health(), await model.queue_length()] == [0, len(ASKED), 0]


def test_prompts_are_checked_before_a_run(checkpoint: str, tmp_path: Path) -> None:
    def check(*prompts: Prompt, path: str = checkpoint, max_new_tokens: int = 8) -> None:
        accepted_prompts(path, "prompts.jsonl", prompts, max_new_tokens, long=LongRows())

    plain = Prompt(tokens_T=ids(3), answer=None, line=1, text="a" * 100)
    check(plain)
    with refuses(TooLong, "sampling.max_new_tokens", names="prompts.jsonl:1:"):
        check(plain, max_new_tokens=27)
    templateless = padded_with(checkpoint, tmp_path, PAD)
    (tmp_path / "chat_template.jinja").unlink()
    chat = Prompt(tokens_T=ids(3), answer=None, line=2, messages=CHAT)
    check(chat)
    with refuses(DataError, None, names="prompts.jsonl:2:"):
        check(chat, path=templateless)
