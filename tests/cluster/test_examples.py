"""The example configs pass every check, with small models and data."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config.files import read_settings
from cluster.config.opd import OpdConfig
from cluster.config.supervised import SftConfig
from cluster.train import main
from tests.chat_templates import chat_tokenizer
from tests.rows import write_rows
from tests.tiny import tiny_model_dir

CONFIGS = Path(__file__).parents[2] / "examples/configs"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.iterdir()))
def test_an_example_is_checked_and_planned(
    name: str,
    opd: Callable[..., OpdConfig],
    sft: Callable[..., SftConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = CONFIGS / f"{name}.yaml"
    given, pair = set(read_settings(str(file))), opd()
    student, teacher = (
        chats(tmp_path) if name in ("agent", "tools") else (pair.model.path, pair.teacher.model)
    )
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(30) for b in range(30)]
    if name == "opd-benchmark":
        rows = [row | {"teacher": ("math", "code")[i % 2]} for i, row in enumerate(rows)]
    problems = write_rows(tmp_path / "problems.jsonl", *rows)
    if name == "opd-benchmark":  # its `teacher` is a section
        given -= {"teacher"}
        given |= {"teachers.math.model", "teachers.code.model", "learner.offload_optimizer"}
    ours = {
        "student": student, "teacher": teacher, "model": student, "prompts": problems,
        "data": sft().data.source, "out": tmp_path / "out", "max_new_tokens": 8, "max_length": 64,
        "eval.size": 0.5, "teachers.math.model": teacher, "teachers.code.model": teacher,
        "learner.offload_optimizer": False,
    }  # fmt: skip
    replaced = [f"{setting}={value}" for setting, value in ours.items() if setting in given]
    assert main([f"config={file}", *replaced, "dry_run=True", "device=cpu"]) == 0
    assert str(ours["out"]) in "".join(capsys.readouterr().out.split())


def chats(directory: Path) -> list[str]:
    """Paths of a student and a teacher with a chat template for tools."""
    models = [
        tiny_model_dir(directory, seed=seed, vocab_size=512, context_length=2048) for seed in (1, 2)
    ]
    for model in models:
        chat_tokenizer("qwen3").save_pretrained(model)
    return models
