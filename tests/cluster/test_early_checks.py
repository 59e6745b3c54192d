"""Checks of paths in settings before a model or a library of tensors is loaded."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.numpy import save_file

from actors.envs.judge_env import Judged
from cluster.command import parse
from cluster.config.checkpoint_facts import check_weights
from cluster.config.early_checks import check_early
from cluster.config.opd import OpdConfig
from cluster.config.supervised import DpoConfig, SftConfig
from cluster.evaluate import EvaluateConfig
from cluster.run_files.out_directory import wait_for_other_job
from cluster.run_files.run_lock import RunLock
from distill.errors import CheckpointError, ConfigError, DataError, IsothermError
from distill.rewards.model_reward import ModelReward
from distill.settings import fields_of, path_of, setting_of
from tests.cluster.test_rules import COMMANDS, GIVEN, KINDS, build
from tests.conftest import TinyPair
from tests.refusals import refuses

OTHERS = ["prompts=a/rows", "temperature=0.7", "out=OUT"]

pytestmark = pytest.mark.usefixtures("hub_cache")


def write_checkpoint(directory: Path) -> None:
    """Files that a checkpoint has, without contents."""
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_text("{}")
    save_file({}, directory / "model.safetensors")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "run" / "final")
    return tmp_path / "run"


def test_a_run_names_its_trained_model_in_every_setting(run: Path) -> None:
    final = str(run / "final")
    opd = parse(
        OpdConfig,
        [
            f"student={run}", f"teachers.a.model={run}", f"reference={run}",
            "reference_kl_coef=0.1", *OTHERS,
        ],
    )  # fmt: skip
    assert (opd.model.path, opd.model.reference, opd.teachers["a"].model) == (final, final, final)
    assert parse(OpdConfig, ["student=a/b", f"teacher={run}", *OTHERS]).teacher.model == final
    evaluated = parse(EvaluateConfig, [f"model={run}", *OTHERS[:1], f"reward=model:{run}"])
    assert (evaluated.model.path, evaluated.reward_model) == (final, final)
    assert evaluated.reward.load() == ModelReward(path=final)
    judged = ["env=actors.envs.judge_env:Judged", f"env.reward_model={run}"]
    problems = parse(EvaluateConfig, [f"model={run}", *OTHERS[:1], *judged]).env
    assert isinstance(problems, Judged) and problems.reward_model == final
    dpo = parse(DpoConfig, [f"model={run}", f"reference={run}", "data=a/rows", "out=OUT"])
    assert (dpo.model.path, dpo.model.reference) == (final, final)


def test_the_moving_teacher_is_never_a_directory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.rename(tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    given = ["student=a/b", "teacher=policy", "teacher_feedback={prompt} {response}"]
    assert parse(OpdConfig, [*given, *OTHERS]).teacher.model == "policy"


# A large file that Git has not fetched.
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
# Values that lead nowhere, by the flag of the settings that take them.
NOWHERE = {
    "model": ("/no/where", "nowhere", "bad.jsonl", ""),
    "head": ("/no/where", "nowhere", "bad.jsonl", ""),
    "rows": ("no.jsonl", "no-*.jsonl", "bad.jsonl", "empty"),
    "written": ("no/where.json", "."),
    "run": ("nowhere", "nowhere:3"), "adapter": ("nowhere",), "function": ("no_such:function",),
}  # fmt: skip
# Settings that these settings need.
BESIDE: dict[str, dict[str, Any]] = {
    "objective.baseline": {"objective.reward_coef": 1.0},
    "objective.divergence": {"objective.estimator": "full"},
    "model.reference": {"objective.reference_kl_coef": 0.1},
    "sft.data": {"sft.coef": 0.1},
    "teacher.model": {"sampling.temperature": 0.7},
    "teacher.head": {"objective.estimator": "full"},
}


def named() -> Iterator[tuple[str, str, str]]:
    """Settings with paths, and values that lead nowhere."""
    for owner in ("opd", "rl", "sft", "dpo", "reward_model", *(kind.__name__ for kind in COMMANDS)):
        for name, field in fields_of(KINDS[owner]).items():
            for value in NOWHERE.get((field.metadata or {}).get("path", ""), ()):
                is_rows = (field.metadata or {}).get("path") == "rows"
                if value != "bad.jsonl" or not is_rows or hasattr(KINDS[owner], "row_readers"):
                    yield owner, name, value


@pytest.mark.parametrize(("owner", "name", "value"), list(named()))
def test_a_path_that_leads_nowhere_is_refused_by_its_setting(
    owner: str, name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for model in ("m", "s", "t"):
        write_checkpoint(Path(model))
    row = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}
    fields = {"sft": ("prompt", "completion"), "dpo": ("prompt", "chosen", "rejected")}
    fields["reward_model"] = fields["dpo"]
    good = json.dumps({field: row[field] for field in fields.get(owner, ("prompt",))})
    for file in ("p", "d"):
        Path(file).write_text(good)
    Path("empty").mkdir()
    Path("bad.jsonl").write_text('{"problem": "1 + 1", "solution": "2"}')
    known = fields_of(KINDS[owner])
    beside = {each: given for each, given in BESIDE.get(name, {}).items() if each in known}
    check_early(build(owner, GIVEN[owner]))
    given = {
        setting_of(KINDS[owner], path_of(KINDS[owner], each), value): value
        for each, value in GIVEN[owner].items()
    }
    with pytest.raises(IsothermError) as refused:
        check_early(build(owner, given | beside | {name: value}))
    assert str(refused.value).startswith((name, value))


def test_a_resumed_run_needs_neither_fork_from_nor_its_first_adapter(tmp_path: Path) -> None:
    begun = [*OTHERS[:-1], f"out={tmp_path}", "fork_from=nowhere", "lora.adapter=nowhere"]
    config = parse(OpdConfig, ["student=a/b", "teacher=a/c", *begun])
    (tmp_path / "config.json").write_text("{}")
    with refuses(ConfigError, "fork_from"):  # an attempt that saved nothing starts over
        check_early(config)
    (tmp_path / "checkpoints" / "step-000000").mkdir(parents=True)
    check_early(config)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("teachers.x.model=/no/where", "teachers.x.model"),
        ("teacher=a/c chat_template=no.jinja", "chat_template"),
        ("teacher=RUN/..", "teacher.model"),
        ("teacher=a/c env=ToolUse env.tools=calc", "env.tools"),
        ("teacher=a/c env=ToolUse env.tools=retrieval:/no/where", "env.tools"),
        ("teacher=a/c eval.source=no_such_module:rows", "eval.source"),
        ("teacher=a/c env=Agent env.command=no", "env.command"),
        ("teacher=a/c eval.every=1 keep_best=eval/acc", "checkpoint.keep_best"),
    ],
)
def test_other_wrong_names_are_refused_by_their_setting(given: str, field: str, run: Path) -> None:
    config = parse(OpdConfig, ["student=a/b", *given.replace("RUN", str(run)).split(), *OTHERS])
    with pytest.raises(IsothermError) as refused:
        check_early(config)
    assert str(refused.value).startswith(field)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("max_new_tokens=128", "sampling.max_new_tokens"),
        ("stop_tokens=<eos>,<|im_end|>", "model.stop_tokens"),
        ("stop_tokens=160", "model.stop_tokens"),
        ("stop_tokens=<eos>,63 lora.rank=4 lora.targets=all-linear", None),
    ],
)
def test_settings_that_do_not_fit_the_model_s_files_are_refused(
    given: str, field: str | None, tiny_pair: TinyPair
) -> None:
    if "max_new_tokens" not in given:
        given += " max_new_tokens=127"
    config = parse(
        OpdConfig, [f"student={tiny_pair.student}", "teacher=a/c", *given.split(), *OTHERS]
    )
    if field is None:
        return check_early(config)
    with refuses(ConfigError, field):
        check_early(config)


@pytest.mark.parametrize("setting", ["model.path", "teacher.model", "model.reference"])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b'{"model_type": "llama",'),
        ("config.json", b"[]"),
        ("tokenizer.json", None),
        ("tokenizer.json", LFS_POINTER),
        ("model.safetensors", None),
        ("model.safetensors", LFS_POINTER),
        ("model.safetensors", b"cut"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "model-00001-of-2.safetensors"}}'),
    ],
)
def test_an_incomplete_checkpoint_is_refused_by_its_setting(
    setting: str, file: str, content: bytes | None, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    if content is None:
        (tmp_path / "broken" / file).unlink()
    else:
        (tmp_path / "broken" / file).write_bytes(content)
    models = {"model.path": "a/b", "teacher.model": "a/c", "model.reference": "a/b"}

    def checked(directory: Path) -> None:
        given = [f"{name}={path}" for name, path in (models | {setting: directory}).items()]
        check_early(parse(OpdConfig, [*given, "reference_kl_coef=0.1", *OTHERS]))

    checked(tmp_path / "whole")
    with pytest.raises(CheckpointError) as refused:
        checked(tmp_path / "broken")
    assert str(refused.value).startswith(setting)


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_weights_of_torch_are_refused(zipped: bool, tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model-00001-of-00002.bin"
    torch.save({"a": torch.zeros(9)}, file, _use_new_zipfile_serialization=zipped)
    check_weights(tmp_path)
    whole = file.read_bytes()
    for broken in (b"cut", LFS_POINTER, whole[:-9] if zipped else whole[9:]):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError):
            check_weights(tmp_path)
    file.write_bytes(whole)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"b": "pytorch_model-00002-of-00002.bin"}}')
    with pytest.raises(CheckpointError):
        check_weights(tmp_path)
    save_file({}, tmp_path / "model.safetensors")  # preferred to the files of torch
    check_weights(tmp_path)


def test_a_head_needs_no_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "head")
    (tmp_path / "head" / "tokenizer.json").unlink()
    given = ["student=a/b", "teacher=a/c", f"teacher.head={tmp_path / 'head'}", "estimator=full"]
    check_early(parse(OpdConfig, [*given, *OTHERS]))


def test_servers_and_cached_names_are_not_checked_early() -> None:
    given = ["student=Qwen/Qwen3-0.6B", "teacher=http://localhost:1", "prompts=openai/gsm8k:main"]
    check_early(parse(OpdConfig, [*given, *OTHERS[1:]]))


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("student=some/model", CheckpointError),
        ("teacher=some/model", CheckpointError),
        ("prompts=some/RowsOfText:main", DataError),
    ],
)
def test_a_name_in_neither_the_cache_nor_the_hub_is_refused(
    given: str,
    error: type[Exception],
    offline: bool,
    hub_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    settings = {"student": "a/b", "teacher": "a/c", "prompts": "a/rows"}
    name, _, value = given.partition("=")
    others = [f"{each}={kept}" for each, kept in settings.items() if each != name]
    config = parse(OpdConfig, [*others, *OTHERS[1:], given])
    with pytest.raises(error) as refused:
        check_early(config)
    assert repr(value) in str(refused.value)
    # The cache of `datasets`.
    (hub_cache / "some___rows_of_text/main").mkdir(parents=True)
    if name == "prompts":
        check_early(config)


def test_the_directory_of_an_unfinished_run_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("metrics.jsonl", "config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError):
        check_early(parse(SftConfig, [f"model={tmp_path}", "data=a/rows", "out=OUT"]))


def test_a_busy_directory_is_waited_for_before_anything_else(tmp_path: Path) -> None:
    lines: list[str] = []

    def print_line(line: str) -> None:
        lines.append(line)
        held.__exit__()

    held = RunLock.acquire(tmp_path / ".lock", print_line, 0.0)
    wait_for_other_job(tmp_path, print_line)
    assert len(lines) == 1 and str(tmp_path) in lines[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_read_only_directory_is_refused_by_out(tmp_path: Path) -> None:
    for name in (".lock", "config.json"):
        (tmp_path / name).write_text("{}")
    mount = ["unshare", "--mount", "sh", "-c", 'mount --bind $0 $0 && mount -o remount,ro,bind $0'
        ' && exec "$@"', str(tmp_path), sys.executable, "-c", WAITS, str(tmp_path)]  # fmt: skip
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(done.stderr)
    assert done.stdout == "out\n", done.stderr


WAITS = """
import sys
from pathlib import Path
from cluster.run_files.out_directory import wait_for_other_job
from distill.errors import ConfigError
try:
    wait_for_other_job(Path(sys.argv[1]), print)
except ConfigError as refused:
    print(refused.field)
"""
