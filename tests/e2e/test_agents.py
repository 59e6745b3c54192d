"""Distillation through an agent with its own loop: the example, on real engines, on Ray."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.inspect.audit import audit
from examples.agents.calculator import TOOLS
from examples.show.chat_worlds import (
    DIGITS_APART,
    product_prompts,
    product_rows,
    products,
    write_untrained,
)
from tests.e2e.harness import REPOSITORY, metrics, run, taught, trained_groups
from tests.e2e.test_environments import ENGINES
from tests.rows import write_rows
from tests.verifiers_environments import MULTIPLY, verifiers_python

pytestmark = pytest.mark.e2e


def test_the_page_shows_the_example() -> None:
    page = (REPOSITORY / "docs/recipes/agents.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert code in (REPOSITORY / "examples/agents/calculator.py").read_text()


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained tiny model."""
    folder = tmp_path_factory.mktemp("untrained")
    write_untrained(str(folder), book(0.0), DIGITS_APART, context_length=160, seed=1)
    return folder


@pytest.fixture(scope="module")
def caller(untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Model with a little training in calls of the example's calculator."""
    return taught(untrained, book(0.0), tmp_path_factory.mktemp("caller"))


def book(guesses: float) -> Sequence[dict[str, Any]]:
    """Conversations with the example's calculator; a share of them guesses without a call."""
    return [{**row, "tools": TOOLS} for row in product_rows(products(300, 0), guesses=guesses)]


@pytest.mark.slow
def test_a_student_learns_tool_calls_from_a_teacher(
    untrained: Path, caller: str, tmp_path: Path
) -> None:
    student = taught(untrained, book(0.95), tmp_path)
    prompts = write_rows(tmp_path / "prompts.jsonl", *product_prompts(products(80, 1)))
    out = tmp_path / "run"
    run(
        "cluster.train", "recipe=opd", f"student={student}", f"teacher={caller}",
        f"prompts={prompts}", f"out={out}", "temperature=0.7", "steps=10",
        "prompts_per_step=4", "group_size=4", "max_new_tokens=32", "engine=embedded", "lr=2e-3",
        "max_staleness=0", "eval_size=0", "checkpoint_every=100", "reward=last_number",
        "local=True", "env=Agent", "env.command=examples.agents.calculator:solve",
        "env.max_turns=6",
    )  # fmt: skip
    first, *_, last = metrics(out)
    assert first["rollout/turns"] < 1.5 < last["rollout/turns"]
    assert last["opd/reverse_kl"] < first["opd/reverse_kl"] / 2


def distilled(model: str, out: Path, trained: int, *settings: str) -> list[dict[str, float]]:
    """Metrics of a run in which a copy of the model learns from another.

    Checks that calls and answers are trained as sampled, and that histories come back unchanged.
    """
    copies = [shutil.copytree(model, out.parent / name) for name in ("student", "teacher")]
    run(
        "cluster.train", "recipe=opd", f"student={copies[0]}", f"teacher={copies[1]}",
        f"out={out}", "temperature=0.7", "steps=2", "group_size=2", "max_staleness=0",
        "checkpoint_every=100", *settings,
    )  # fmt: skip
    assert trained_groups(out) == list(range(trained))
    assert audit(out / "ledger.jsonl").problems == []
    for step in metrics(out):
        assert step["rollout/segments"] == 1 + step["env/prefix_breaks"]
        assert step["env/agent/rewritten"] == step["env/agent/unmatched"] == 0
        assert step["rollout/failed_episodes"] == 0
        assert step["train/logprob_gap"] < 1e-3, "the learner scores another chain"
    return metrics(out)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("python examples/agents/calculator.py", marks=pytest.mark.slow),
        "examples.agents.calculator:solve",
    ],
)
def test_a_student_is_distilled_through_the_example(
    caller: str, tmp_path: Path, engine: str, command: str
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", *product_prompts(products(40, 1)))
    out = tmp_path / "run"
    steps = distilled(
        caller, out, 2 * 4, f"prompts={prompts}", "prompts_per_step=4", "max_new_tokens=32",
        f"engine={engine}", "eval_size=4", "reward=last_number", "env=Agent",
        f"env.command={command}", "env.max_turns=6",
    )  # fmt: skip
    assert all(step["rollout/turns"] > 1.5 for step in steps), "the model calls no tool"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["eval after"]["eval/turns"] > 1.5


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return verifiers_python(tmp_path_factory.mktemp("verifiers"))


@pytest.fixture(scope="module")
def multiplier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Model with a little training in calls of the tool of `with-tools`."""
    folder = tmp_path_factory.mktemp("multiplier")
    rows = [_product_by_tool(number) for number in range(60)]
    write_untrained(str(folder), rows, DIGITS_APART, context_length=320, seed=1)
    return taught(folder, rows, folder)


def _product_by_tool(number: int) -> dict[str, Any]:
    function = {"name": "tools_multiply", "arguments": json.dumps({"a": number, "b": 7})}
    product = str(number * 7)
    messages = [
        {"role": "user", "content": f"What is {number}*7?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": product},
        {"role": "assistant", "content": product},
    ]
    return {"messages": messages, "tools": [MULTIPLY]}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["products", "with-tools"])
def test_a_student_is_distilled_through_verifiers(
    multiplier: str, python: str, tmp_path: Path, name: str, engine: str
) -> None:
    steps = distilled(
        multiplier, tmp_path / "run", 2, "prompts_per_step=1", "max_new_tokens=48",
        f"engine={engine}", "eval_size=0", "env=Verifiers", f"env.name={name}",
        f"env.python={python}", "env.problems=5", "env.max_turns=4",
    )  # fmt: skip
    assert all((step["rollout/turns"] > 1) is (name == "with-tools") for step in steps)
    if name == "products":
        assert all(step["env/letters"] > 0 for step in steps)
