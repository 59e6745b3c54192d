"""Checkpoints that stay: the newest, each N-th, and that of the best evaluation."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import chz
import pytest

from cluster.config.opd import OpdConfig
from cluster.config.recipes import make
from cluster.config.supervised import SupervisedConfig
from cluster.run_files.best_checkpoint import BestCheckpoint
from distill.envs.base import EnvConfig, EnvContext
from distill.envs.chat_config import ChatEnvConfig, MessageProblem
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.reading import Reading
from distill.envs.single_turn import SingleTurn
from distill.envs.tool_use import ToolUse
from distill.errors import CheckpointError, ConfigError
from distill.model_paths import trained_model
from learner.checkpoint import Best, CheckpointStore
from tests.full_disk import files_of_at_most
from tests.refusals import refuses


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=1, keep_every=4)


def save(store: CheckpointStore, step: int) -> None:
    store.save(step=step, write=lambda path: (path / "w").write_text("w"), delivery={})


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.complete()]


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("eval/accuracy", {2: 0.1, 3: 0.5, 5: 0.5, 6: 0.4}, 3),
        ("eval/reverse_kl", {2: 0.1, 3: 0.01, 5: 0.5, 6: 0.02}, 3),
        ("validation/nll/source=a", {2: 3.0, 3: 2.0, 5: 1.0, 6: 4.0}, 5),
        ("validation/loss", {2: 3.0, 6: 2.0, 7: 2.5}, 6),
        ("eval/reverse_kl", {2: math.nan, 3: 0.5, 6: math.nan}, 3),
    ],
)
def test_the_best_evaluation_s_checkpoint_is_requested_and_stays(
    store: CheckpointStore, metric: str, values: dict[int, float], best: int
) -> None:
    watch = BestCheckpoint(store, metric)
    watch.observe({"step": 0, "time/eval": 1.0, metric: 1e9})  # step 0 has no checkpoint
    asked = []
    for step in range(1, 10):
        found = {"time/eval": 1.0, metric: values[step]} if step in values else {}
        watch.observe({"step": step, "train/loss": 1.0, **found})
        if watch.due:
            asked.append(step)
            save(store, step)
            watch.saved({step})
        assert not watch.due
        watch = BestCheckpoint(CheckpointStore(store.root, keep=1), metric)  # another attempt
    save(store, 10)
    assert asked[-1] == best and best in steps(store)
    assert json.loads((store.root / "best.json").read_text()) == {
        "step": best, "metric": metric, "value": values[best],
    }  # fmt: skip


def test_a_kill_before_the_mark_does_not_lose_the_best(store: CheckpointStore) -> None:
    metrics = [
        {"step": step, "time/eval": 1.0, "eval/accuracy": value}
        for step, value in {1: 0.8, 2: 0.9, 3: 0.1}.items()
    ]
    watch = BestCheckpoint(store, "eval/accuracy")
    for line in metrics[:2]:
        watch.observe(line)
    save(store, 2)  # killed before the driver knew that it is complete
    watch = BestCheckpoint(store, "eval/accuracy")
    watch.recall(metrics[:2])
    watch.observe(metrics[2])
    assert not watch.due
    save(store, 3)
    assert steps(store) == [2, 3]
    assert store.best() == Best(step=2, metric="eval/accuracy", value=0.9)


def test_weights_that_were_not_saved_are_not_the_best(store: CheckpointStore) -> None:
    watch = BestCheckpoint(store, "eval/accuracy")
    watch.observe({"step": 2, "time/eval": 1.0, "eval/accuracy": 0.9})
    assert watch.due  # the disk is full, and the run goes on
    watch.observe({"step": 3})
    assert not watch.due
    save(store, 3)
    watch.saved({3})
    assert store.best() is None
    watch.observe({"step": 3, "time/eval": 1.0, "eval/accuracy": 0.2})  # after the last step
    assert store.best() == Best(step=3, metric="eval/accuracy", value=0.2) and not watch.due
    (store.root / "best.json").write_text("{")
    assert store.best() is None


def test_the_best_of_another_metric_does_not_count(store: CheckpointStore) -> None:
    save(store, 1)
    store.mark_best(Best(step=1, metric="eval/accuracy", value=0.9))
    watch = BestCheckpoint(store, "eval/pass@4")
    watch.observe({"step": 2, "time/eval": 1.0, "eval/pass@4": 0.3})
    assert watch.due


def test_a_metric_that_is_not_measured_is_refused(store: CheckpointStore) -> None:
    watch = BestCheckpoint(store, "eval/acuracy")
    watch.observe({"step": 0, "eval/teacher/accuracy": 1.0})  # the teacher's line
    with refuses(ConfigError, "checkpoint.keep_best", names="eval/accuracy"):
        watch.observe({"step": 0, "time/eval": 1.0, "eval/accuracy": 0.3})


def test_the_checkpoint_of_a_running_evaluation_stays_until_its_end(
    store: CheckpointStore,
) -> None:
    watch = BestCheckpoint(store, "eval/accuracy")
    for step, value in ((1, 0.5), (3, 0.7), (6, 0.6)):
        store.hold(step)
        for later in range(step, step + 3):
            save(store, later)
        assert step in steps(CheckpointStore(store.root, keep=1))
        watch.observe({"step": step, "time/eval": 1.0, "eval/accuracy": value})
        store.release()
        assert not watch.due
    save(store, 9)
    assert steps(store) == [3, 4, 8, 9]
    watch.observe({"step": 7, "time/eval": 1.0, "eval/accuracy": 0.9})
    assert watch.due, "its checkpoint is gone"
    watch.drop()
    assert not watch.due and store.best() == Best(step=3, metric="eval/accuracy", value=0.7)


def test_later_evaluations_are_compared_with_a_checkpoint_under_way(
    store: CheckpointStore,
) -> None:
    watch = BestCheckpoint(store, "eval/accuracy")

    def see(step: int, accuracy: float | None = None) -> None:
        evaluated = {} if accuracy is None else {"time/eval": 1.0, "eval/accuracy": accuracy}
        watch.observe({"step": step, **evaluated})

    see(1, 0.5)
    watch.saving(1)
    assert not watch.due
    see(2)
    see(3, 0.4)
    assert not watch.due and store.best() is None
    save(store, 1)
    watch.saved({1})
    assert store.best() == Best(step=1, metric="eval/accuracy", value=0.5)
    see(4, 0.6)
    watch.saving(4)
    see(5, 0.7)  # better than what is being written
    assert watch.due
    save(store, 4)
    watch.saved({4})
    watch.saving(5)
    save(store, 5)
    watch.saved({5})
    best = store.best()
    assert best is not None and best.step == 5
    see(6, 0.8)
    watch.saving(6)
    see(7)
    watch.unsaved()
    assert not watch.due, "its weights are gone"
    see(8, 0.75)
    assert watch.due, "a checkpoint that was never written counts as the best"


@pytest.mark.parametrize(
    ("recipe", "metric", "other"),
    [
        ("sft", "validation/nll", "validation/accuracy"),
        ("dpo", "validation/chosen_reward", "validation/nll"),
        ("reward_model", "validation/chosen_std", "validation/entropy"),
    ],
)
def test_a_supervised_recipe_accepts_the_metrics_that_it_measures(
    recipe: str, metric: str, other: str
) -> None:
    def check(keep_best: str) -> None:
        settings = make(
            recipe, model="m", data="a,b", out="o", eval_every=1, eval_size=2, keep_best=keep_best
        )
        assert isinstance(settings, SupervisedConfig)
        settings.check_keep_best()

    check(metric)
    check(f"{metric}/source=a")
    for unknown in (other, f"{metric}/source=c"):
        with refuses(ConfigError, "checkpoint.keep_best"):
            check(unknown)


@chz.chz
class Own(ChatEnvConfig):
    """A custom environment, whose metrics are known only in the run."""

    def problems(self, path: str | None, setting: EnvContext) -> Sequence[MessageProblem]:
        return []


@pytest.mark.parametrize(
    ("env", "good", "bad"),
    [
        (SingleTurn(), "reverse_kl_low", "format"),
        (SingleTurn(format="a"), "format", "NONSENSE"),
        (ToolUse(), "tool_errors", "condensed"),
        (ToolUse(format="a", condenser="keywords"), "format", "won"),
        (Reading(), "facts_kept", "tool_errors"),
        (Reading(by="keywords"), "cut_turns", "facts_kept"),
        (TicTacToeGames(), "won", "NONSENSE"),
        (Own(), "its_own", "accuracyy"),
        (SingleTurn(), "accuracy/source=b", "accuracy/source=c"),
        (SingleTurn(), "turns", "reverse_kl/source=b"),
    ],
    ids=str,
)
def test_an_environment_accepts_the_metrics_that_it_measures(
    env: EnvConfig, good: str, bad: str
) -> None:
    def check(keep_best: str) -> None:
        prompts = {"prompts": "a,b"} if env.reads_prompts else {}
        settings = make(
            "opd", student="s", teacher="t", out="o", temperature=1.0, steps=1, env=env,
            eval_every=1, keep_best=f"eval/{keep_best}", **prompts,
        )  # fmt: skip
        assert isinstance(settings, OpdConfig)
        settings.check_keep_best()

    check(good)
    with refuses(ConfigError, "checkpoint.keep_best"):
        check(bad)


def test_a_run_and_a_step_name_a_model(store: CheckpointStore) -> None:
    run = store.root.parent
    for step in (4, 8):
        store.save(step=step, write=lambda path: (path / "model").mkdir(), delivery={})
    with pytest.raises(CheckpointError):
        trained_model(f"{run}:best")
    store.mark_best(Best(step=4, metric="eval/accuracy", value=0.5))
    kept = f"{store.root}/step-000004/model"
    assert trained_model(f"{run}:best") == trained_model(f"{run}:4") == kept
    for other in ("Qwen/Qwen3-0.6B", str(run), "no-run:4"):
        assert trained_model(other) == other
    for step in ("6", "new"):
        with pytest.raises(CheckpointError):
            trained_model(f"{run}:{step}")


def test_a_mark_that_a_full_disk_refuses_is_written_later(store: CheckpointStore) -> None:
    watch = BestCheckpoint(store, "eval/accuracy")
    watch.observe({"step": 2, "time/eval": 1.0, "eval/accuracy": 0.5})
    save(store, 2)
    with files_of_at_most(0):
        watch.saved({2})
        watch.observe({"step": 3, "train/loss": 1.0})
    assert store.best() is None and not watch.due
    watch.observe({"step": 4, "time/eval": 1.0, "eval/accuracy": 0.4})
    best = store.best()
    assert best is not None and best.step == 2 and not watch.due
