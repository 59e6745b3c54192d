"""Settings: ranges, names, help and exit codes."""

import importlib.metadata
import re
import signal
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from actors.config import EngineConfig
from cluster.base.outcomes import Interrupted, error_text
from cluster.calibrate import CalibrateConfig
from cluster.command import parse, run_and_report
from cluster.config.arguments import key_values
from cluster.config.on_policy import RlConfig
from cluster.config.opd import OpdConfig
from cluster.config.output import CheckpointSettings
from cluster.config.recipes import SelfplayConfig, make
from cluster.config.supervised import DpoConfig, RewardModelConfig, SftConfig
from cluster.evaluate import EvaluateConfig
from cluster.inspect.forecast.command import ForecastConfig
from cluster.sample_to_sft import SampleToSftConfig
from cluster.train import main
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.single_turn import SingleTurn
from distill.envs.tool_use import ToolUse
from distill.errors import ConfigError
from distill.rules import get
from distill.settings import (
    ESSENTIAL,
    Section,
    by_names,
    changed,
    fields_of,
    flagged,
    path_of,
    section_of,
    setting_of,
)
from learner.config import LearnerConfig
from tests.refusals import refuses

NewOpd = Callable[..., OpdConfig]


@pytest.mark.parametrize(
    ("changes", "lr"),
    [
        ({}, 1e-5),
        ({"lora.rank": 8}, 1e-4),
        ({"lora.adapter": "directory"}, 1e-4),
        ({"lora.rank": 8, "lr": 2e-6}, 2e-6),
    ],
)
def test_an_adapter_has_its_own_default_learning_rate(
    opd: NewOpd, changes: dict, lr: float
) -> None:
    config = opd(**changes)
    assert config.learner.lr == config.learner_config().learner.lr == lr
    of_the_whole_model = changed(config, lora_rank=None, lora_adapter=None)
    assert of_the_whole_model.learner.lr == changes.get("lr", 1e-5)


@pytest.mark.parametrize(
    "settings, scored",
    [
        ({"prompts_per_step": 4}, 4),
        ({"prompts_per_step": 8}, 8),
        ({"prompts_per_step": 20}, 8),
        ({"prompts_per_step": 64}, 16),
        ({"prompts_per_step": 64, "kl_clip": 3.0}, 64),
        ({"prompts_per_step": 64, "estimator": "top_k"}, 64),
        ({"prompts_per_step": 64, "baseline": "here:mine", "reward_coef": 1.0}, 64),
        ({"prompts_per_step": 64, "loss": "here:mine"}, 64),
        ({"prompts_per_step": 64, "rollout_only": True}, 64),
    ],
    ids=str,
)
def test_the_teacher_scores_a_share_of_a_step(opd: NewOpd, settings: dict, scored: int) -> None:
    config = opd(**{"estimator": "full"} | settings)
    groups = config.scored_by_teacher()
    first = config.data.batch_size * 3
    assert sum(i in groups for i in range(first, first + config.data.batch_size)) == scored


def test_teachers_are_sorted_by_name(opd: NewOpd) -> None:
    config = opd(teacher=None, teachers={name: {"model": "m"} for name in "hgfedcba"})
    assert "".join(config.teachers) == "".join(changed(config, steps=3).teachers) == "abcdefgh"


def test_epochs_become_steps(sft: Callable[..., SftConfig]) -> None:
    assert sft().steps == 100 and sft(steps=7).trained_on(1000).steps == 7
    for epochs, batch_size, steps in (
        (2, 10, 6),
        (1, 32, 1),
        (0.1, 3, 1),
        (2.5, 30, 3),
        (0.01, 8, 1),
    ):
        config = sft(epochs=epochs, batch_size=batch_size).trained_on(30)
        assert (config.steps, config.epochs) == (steps, None)
    with refuses(ConfigError, "steps", names="epochs=2"):
        sft(steps=3, epochs=2)
    late = sft(epochs=2, batch_size=10, trace_step=7)
    with refuses(ConfigError, "learner.trace_step"):
        late.trained_on(30)


@pytest.mark.parametrize(
    ("given", "field", "names"),
    [
        (["teacher=policy"], "teacher.model", "policy"),
        (["teacher=http://127.0.0.1:1", "teacher.server_flags=--tp-size 2"], "teacher.server_flags",
         "127.0.0.1"),
        (["teacher=b", "engine.server_flags=--tp-size 2"], "engine.server_flags",
         "'policy.server_flags'"),
        (["teacher=b", "server_flags=--tp-size 2"], "server_flags", "teacher.server_flags"),
    ],
)  # fmt: skip
def test_settings_that_a_calibration_lacks_are_refused(
    given: list[str], field: str, names: str
) -> None:
    with refuses(ConfigError, field, names=names):
        parse(CalibrateConfig, ["student=a", "temperature=0.7", *given])


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (EvaluateConfig, "limit", "eval.size"),
        (EvaluateConfig, "num_samples", "group_size"),
        (ForecastConfig, "num_prompts", "eval.size"),
        (SampleToSftConfig, "num_samples", "samples"),
    ],
)
def test_commands_suggest_the_names_of_recipes(kind: type, name: str, meant: str) -> None:
    with refuses(ConfigError, name, names=repr(meant)):
        parse(kind, [f"{name}=3"])


SETTINGS = [
    OpdConfig, RlConfig, SelfplayConfig, SftConfig, DpoConfig, RewardModelConfig, EvaluateConfig,
    CalibrateConfig, EngineConfig, LearnerConfig,
]  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_class_has_the_checks_of_all_its_bases(kind: type) -> None:
    """chz inherits only the checks of the first base if a class with several bases has none."""
    theirs = {check for base in kind.__mro__ for check in vars(base).get("__chz_validators__", [])}
    assert theirs == set(getattr(kind, "__chz_validators__", []))


# The command line


def of(config: OpdConfig, name: str) -> Any:
    return get(config, setting_of(OpdConfig, path_of(OpdConfig, name), ""))


def arguments(config: OpdConfig, *more: str) -> list[str]:
    names = ("student", "teacher", "prompts", "out", "temperature", "max_new_tokens")
    return ["recipe=opd", *(f"{name}={of(config, name)}" for name in names), *more]


def test_only_an_interrupt_after_the_first_step_names_a_checkpoint() -> None:
    early = Interrupted(signal.SIGINT)
    assert "checkpoint" in error_text(early)
    early.trained = False
    assert "checkpoint" not in error_text(early)


def test_an_interrupt_behind_an_import_error_is_an_interrupt() -> None:
    def imported(_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise ImportError("initialization failed") from interrupt

    assert run_and_report(imported) == 130

    def broken(_: object) -> None:
        raise ImportError("initialization failed")

    with pytest.raises(ImportError):
        run_and_report(broken)


def test_a_dry_run_warns_of_improbable_settings(opd: NewOpd, capsys) -> None:
    more = ["dry_run=True", "steps=3", "warmup_steps=9", "num_substeps=2", "prompts_per_step=1000"]
    more += ["lr=0.5"]
    assert main(arguments(opd(), *more)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "lr 0.5, 500 times" in shown
    assert "warmup_steps=9 of 6 updates" in shown
    assert "1000 prompts" in shown


def test_a_dry_run_needs_the_gpus_of_this_machine_alone(opd: NewOpd, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for more in ([], ["local=True"]):
        assert main(arguments(opd(), "dry_run=True", "device=cuda", *more)) == 2
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    assert main(arguments(opd(), "dry_run=True", "device=cuda")) == 0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("temperature=0", "temperature=0"),
        ("top_p=0.9", "top_p=0.9"),
        ("temperatur=1", "'temperature'"),
        ("recipe=oped", "'opd'"),
        ("student=/nowhere/at/all", "'/nowhere/at/all'"),
        ("out=/proc/nothing", "out=/proc/nothing"),
        ("teacher=http://127.0.0.1:9", "teacher=http://127.0.0.1:9"),
        ("epochs=2", "epochs=2"),
    ],
)
def test_bad_input_ends_with_code_2_and_names_the_setting(
    opd: NewOpd, capsys, given: str, named: str
) -> None:
    assert main(arguments(opd(), given)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and named in printed


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["opd"], ["recipe=opd"]),
        (["recipe=opd", "out=o"], ["model=", "temperature="]),
        (["recipe=sft", "out=o"], ["model=", "data="]),
    ],
)
def test_what_is_missing_is_named_by_its_short_name(
    capsys: pytest.CaptureFixture[str], given: list[str], named: list[str]
) -> None:
    assert main(given) == 2
    words = capsys.readouterr().err.split()
    assert all(name in words for name in named)


@pytest.mark.parametrize(
    ("written", "field", "names"),
    [
        (["--steps", "5"], None, "steps=5"),
        (["steps", "=", "5"], None, "steps=5"),
        (["steps", "lr=1"], None, "steps=VALUE"),
        (["-h"], None, "--help"),
        (["run.yaml"], None, "config=run.yaml"),
        (["config=/"], "config", "config.json"),
        (["temperature=", "0.7"], "temperature", "temperature=0.7"),
        (["temperature="], "sampling.temperature", ""),
        (["lr=abc"], "learner.lr", "auto"),
        (["steps=1e-3"], "steps", ""),
        (["dry_run=maybe"], "dry_run", "rehearse"),
        (["wandb=onlin"], "tracking.wandb", "'online'"),
        (["lr.x=3"], "learner.lr.x", ""),
        (["learning_rate=1"], "learning_rate", "'lr'"),
        (["grad_norm=1"], "grad_norm", "'max_grad_norm'"),
        (["train_batch_size=8"], "train_batch_size", "'prompts_per_step'"),
        (["actor_rollout_ref.rollout.n=8"], "actor_rollout_ref.rollout.n", "'group_size'"),
        (["rollout_temperature=1"], "rollout_temperature", "'temperature'"),
        (["env=ToolUze"], "env", "'ToolUse'"),
        (['env={"class": "ToolUse"}'], "env", "env=ToolUse env.tools="),
        (["env.tools=python"], "env.tools", "env=ToolUse"),
        (["env=json:loads"], "env", "docs/environments.md"),
        (["env=no.where.Env"], "env", "ModuleNotFoundError"),
        ([f"env={__name__}:Undecorated"], "env", "@chz.chz"),
        (["env=ToolUse", "env.max_turn=3"], "env.max_turn", "'env.max_turns'"),
        (["env.max_turns=3"], "env.max_turns", "format_reward"),
        (["teachers.a.modle=m"], "teachers.a.modle", "'model'"),
        (["teacher.a.model=m"], "teacher.a.model", "'teachers.a.model'"),
        (["teachers.a.weight=all"], "teachers.a.weight", ""),
        (["teachers.a=m"], "teachers.a", "teachers.NAME.model="),
        (["checkpoint.evry=3"], "checkpoint.evry", "'checkpoint.every'"),
        (["checkpoint=3"], "checkpoint", "'checkpoint.every'"),
        (["...lr=abc"], "...lr", "--help"),
        (["steps=1_0_"], "steps", "1_0_"),
        (["config="], "config", ".yaml"),
        (["teachers=3"], "teachers", "teachers.NAME.model="),
        (["teachers.model=m"], "teachers.model", "teachers.NAME.model="),
        (["teachers..model=3"], "teachers..model", ""),
        (["columns=3"], "data.columns", "data.columns.NAME="),
        (["columns.answer.x=3"], "data.columns.answer.x", ""),
        (["out=~/runs"], "out", "~/runs"),
        (["prompts=a.jsonl,$DATA/b.jsonl"], "data.source", "$DATA/b.jsonl"),
        (["out=" + "x" * 300], "out", "too long"),
        (["out=s3://bucket/run"], "out", "s3://bucket/run"),
        (["prompts=a.jsonl,file:///b.jsonl"], "data.source", "file:///b.jsonl"),
        (["student=gs://bucket/model"], "model.path", "gs://bucket/model"),
        (["env.format=" + "(" * 5000], "env.format", "((..."),
    ],
)
def test_a_typing_error_is_refused_in_one_line(
    opd: NewOpd, written: list[str], field: str | None, names: str
) -> None:
    with refuses(ConfigError, field, names=names) as refused:
        parse(OpdConfig, [*arguments(opd())[1:], *written])
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


class Undecorated(SingleTurn):
    """An environment without the decorator @chz.chz."""


def test_values_may_contain_equals_signs_and_dashes(opd: NewOpd) -> None:
    more = ["policy.server_flags=--tp-size 2", "teacher.server_flags=", "reward=a.b-c:d=e", "lr=1"]
    read = key_values(more)
    assert read["policy.server_flags"] == "--tp-size 2" and read["reward"] == "a.b-c:d=e"
    assert parse(OpdConfig, [*arguments(opd())[1:], *more[:2], "lr=1", "lr=2"]).learner.lr == 2.0


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("opd", OpdConfig),
        ("rl", RlConfig),
        ("sft", SftConfig),
        ("dpo", DpoConfig),
        ("reward_model", RewardModelConfig),
    ],
)
def test_help_explains_every_setting(capsys, recipe: str, config: type) -> None:
    assert main([f"recipe={recipe}", "--help", "all"]) == 0
    shown = "".join(capsys.readouterr().out.split())
    for name, field in fields_of(config).items():
        assert field._doc, f"{name} has no doc"
        assert name in shown and "".join(field._doc.split()) in shown, name
        assert section_of(config, name) is not None, name


def named(shown: str) -> set[str]:
    """Paths of the settings that a help text explains."""
    return set(re.findall(r"^  (?:\w+, )*([\w.]+)(?: {2}|$)", shown, re.MULTILINE))


def test_help_explains_essential_settings_and_names_the_sections(capsys) -> None:
    assert main(["recipe=opd", "--help"]) == 0
    shown, _, more = capsys.readouterr().out.partition("settings, by section:")
    assert named(shown) == flagged(OpdConfig, ESSENTIAL)
    counts = dict(re.findall(r"^  (.+) \((\d+)\)$", more, re.MULTILINE))
    assert list(counts) == list(Section)
    assert sum(map(int, counts.values())) == len(fields_of(OpdConfig))


@pytest.mark.parametrize(
    ("word", "there", "not_there"),
    [
        ("checkpoint", {"checkpoint.every", "checkpoint.keep_best"}, {"model.path", "learner.lr"}),
        ("supervision", {"verify.every"}, {"model.path", "learner.lr"}),
        ("lora", {"lora.rank", "lora.targets"}, {"model.path", "steps"}),
        ("student", {"model.path"}, {"steps"}),
        ("teachers", {"teachers", "teachers.NAME.weight"}, {"model.path"}),
    ],
)
def test_help_explains_a_section_or_a_name(
    capsys, word: str, there: set[str], not_there: set[str]
) -> None:
    assert main(["recipe=opd", "--help", word]) == 0
    found = named(capsys.readouterr().out)
    assert there <= found and not not_there & found


def test_help_for_an_unknown_name_lists_the_sections_and_the_nearest_name(capsys) -> None:
    assert main(["recipe=opd", "--help", "chekpoint"]) == 0
    shown = capsys.readouterr().out
    assert "'checkpoint'" in shown and not named(shown) and all(title in shown for title in Section)


@pytest.mark.parametrize(
    "given",
    [
        {"checkpoint": {"every": 3, "keep_last": 5}},
        {"checkpoint_every": 3, "keep_last": 5},
        {"checkpoint.every": 3, "checkpoint": {"keep_last": 5}},
    ],
    ids=["section", "short names", "path"],
)
def test_a_setting_of_a_section_has_several_names(opd: NewOpd, given: dict[str, Any]) -> None:
    assert opd(**given).checkpoint == CheckpointSettings(every=3, keep_last=5)


def test_a_setting_given_twice_is_refused(opd: NewOpd) -> None:
    with refuses(ConfigError, "checkpoint.every"):
        opd(checkpoint_every=3, checkpoint={"every": 4})
    with refuses(ConfigError, "checkpoint"):
        opd(checkpoint=3)
    with refuses(ConfigError, "checkpoint"):
        opd(checkpoint=3, keep_last=2)


@pytest.mark.parametrize(
    ("settings", "runs"),
    [
        ({}, False),
        ({"reward": "math_equal"}, False),
        ({"reward": "model:some/directory"}, False),
        ({"reward": "math:pow"}, True),
        ({"env": ToolUse(tools="a:b")}, True),
        ({"env": TicTacToeGames(), "prompts": None}, True),
    ],
)
def test_rewards_tools_and_games_may_run_user_code(settings: dict, runs: bool) -> None:
    config = by_names(EvaluateConfig, **({"model": "m", "prompts": "p"} | settings))
    assert config.runs_user_code is runs


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="Liger is installed")
def test_missing_kernels_are_named() -> None:
    with refuses(ConfigError, "learner.liger", names="pip install liger-kernel"):
        make("sft", model="m", data="d", out="o", liger=True)


@pytest.mark.parametrize("written", ["1000", "1e3", "1E+3", "1_000", "1000.0"])
def test_whole_numbers_have_several_notations(written: str) -> None:
    assert parse(SftConfig, ["model=m", "data=d", "out=o", f"steps={written}"]).steps == 1000


def test_only_the_usage_and_the_version_need_no_recipe(capsys) -> None:
    assert main(["recipe=opd", "student=a", "teacher=b", "prompts=c", "out=d"]) == 2
    assert "temperature" in capsys.readouterr().err
    assert main(["steps=3"]) == 2
    assert main([]) == 0 and "recipe=NAME" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert importlib.metadata.version("isotherm") in capsys.readouterr().out
