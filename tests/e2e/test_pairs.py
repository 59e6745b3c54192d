"""A base model learns from its instruction-tuned model: other stop tokens and chat template."""

import asyncio
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from actors.embedded.engine import EmbeddedEngine
from cluster.train import main
from tests.chat_templates import chat_tokenizer, stop_of
from tests.e2e import harness
from tests.rows import write_rows
from tests.tiny import TinyPair, tiny_model_dir

BASE_END = "<|endoftext|>"


def checkpoint(
    root: Path, family: str, end: str, template: str, seed: int, sharpness: float = 4
) -> str:
    tokenizer = deepcopy(chat_tokenizer(family))
    tokenizer.eos_token = end
    tokenizer.chat_template = template
    size = len(tokenizer) + 64  # padded, as published models are
    eos: Any = tokenizer.convert_tokens_to_ids(end)
    model = tiny_model_dir(
        root, seed=seed, vocab_size=size, hidden_size=32, layers=1, eos_token_id=eos,
        sharpness=sharpness,
    )  # fmt: skip
    tokenizer.save_pretrained(model)
    return model


@pytest.fixture(params=["qwen3", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TinyPair, str]:
    """Base student without a chat template, its teacher, and the teacher's stop token."""
    family = request.param
    template = chat_tokenizer(family).chat_template
    assert isinstance(template, str)
    student = checkpoint(tmp_path, family, BASE_END, "{{ messages[0].content }}", seed=1)
    teacher = checkpoint(tmp_path, family, stop_of(family), template, seed=2)
    (tmp_path / "chat.jinja").write_text(template)
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "something"}]
    rows = [
        {"messages": [{"role": "user", "content": parts}],
         "teacher_messages": [{"role": "user", "content": f"Say {i}"}]}
        for i in range(24)
    ]  # fmt: skip
    prompts = write_rows(tmp_path / "prompts.jsonl", *rows)
    return TinyPair(student=student, teacher=teacher, prompts=prompts), stop_of(family)


def distil(models: TinyPair, out: Path, **settings: object) -> int:
    return main(["recipe=opd", *harness.opd_arguments(models, out, local=True, **settings)])


@pytest.mark.parametrize("estimator", ["sampled", "full", "top_k"])
def test_a_base_model_learns_its_teacher_s_stop_token(
    pair: tuple[TinyPair, str], estimator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, end = pair
    out = tmp_path / "out"
    more = {"teacher_top_k": 8} if estimator == "top_k" else {}
    template = tmp_path / "chat.jinja"
    settings = {"steps": 2, "estimator": estimator, "chat_template": template, **more}
    assert distil(models, out, max_new_tokens=48, group_size=4, max_staleness=0, **settings) == 0
    tokenizer = AutoTokenizer.from_pretrained(out / "final")
    ids = sorted(map(tokenizer.convert_tokens_to_ids, (BASE_END, end)))
    recorded = {"ids": ids, "one_event": True}
    assert json.loads((out / "config.json").read_text())["stop_tokens"] == recorded
    calibration = json.loads((out / "calibration.json").read_text())
    assert calibration["agrees"] and calibration["stop_tokens"] == recorded
    assert {tuple(party["stop_event"]) for party in calibration["parties"].values()} == {tuple(ids)}
    assert ", as one event" in capsys.readouterr().out
    assert GenerationConfig.from_pretrained(out / "final").eos_token_id == ids
    assert tokenizer.chat_template == (tmp_path / "chat.jinja").read_text()
    served = EmbeddedEngine(model_path=str(out / "final"), device="cpu", threads=1)
    assert asyncio.run(served.info()).eos_token_ids == tuple(ids)
    steps = harness.metrics(out)
    assert max(step["train/logprob_gap"] for step in steps) < 1e-4
    assert max(step["rollout/eos_share"] for step in steps) > 0


def test_the_run_uses_the_chosen_stop_tokens(pair: tuple[TinyPair, str], tmp_path: Path) -> None:
    models, end = pair
    out = tmp_path / "out"
    assert distil(models, out, steps=1, stop_tokens=end) == 0
    tokenizer = AutoTokenizer.from_pretrained(out / "final")
    only = [tokenizer.convert_tokens_to_ids(end)]
    assert json.loads((out / "config.json").read_text())["stop_tokens"] == {
        "ids": only, "one_event": False,
    }  # fmt: skip
    assert GenerationConfig.from_pretrained(out / "final").eos_token_id == only
    assert distil(models, tmp_path / "no", stop_tokens="<|im_ed|>") == 2


def padded(teacher: str, out: Path) -> str:
    """Teacher with more embedding rows (zeros) than its tokenizer has tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(teacher)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 32)
    with torch.no_grad():
        model.get_input_embeddings().weight[size:] = 0
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(out)
    return str(out)


@pytest.mark.parametrize(
    ("estimator", "sharpness"), [("full", 60.0), ("auto", 4.0), ("top_k", 4.0)]
)
def test_vocabularies_may_differ_by_padding(
    estimator: str, sharpness: float, tmp_path: Path
) -> None:
    student, teacher = (
        checkpoint(tmp_path, "qwen3", "<|im_end|>", "{{ messages[0].content }}", seed, sharpness)
        for seed in (1, 2)
    )
    prompts = write_rows(tmp_path / "prompts.jsonl", *({"prompt": f"Say {i}"} for i in range(24)))
    models = TinyPair(
        student=student, teacher=padded(teacher, tmp_path / "padded"), prompts=prompts
    )
    more = {"teacher_top_k": 200} if estimator == "top_k" else {}
    assert distil(models, tmp_path / "out", steps=1, estimator=estimator, **more) == 0
    chosen = json.loads((tmp_path / "out" / "config.json").read_text())["settings"]["objective"][
        "estimator"
    ]
    assert chosen == ("full" if estimator == "auto" else estimator)


def test_a_warning_about_chats_that_a_base_model_cannot_end(
    pair: tuple[TinyPair, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, end = pair
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So"}]
    data = write_rows(tmp_path / "chats.jsonl", {"messages": turns})
    arguments = [
        "recipe=sft", f"model={models.student}", f"data={data}", f"out={tmp_path / 'sft'}",
        f"chat_template={tmp_path / 'chat.jinja'}", "dry_run=True", "batch_size=1",
    ]  # fmt: skip
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 1 rows" in printed and f"give stop_tokens='{end}'" in printed
    assert main([*arguments, f"stop_tokens={end}"]) == 0
    assert "WARNING" not in capsys.readouterr().out
