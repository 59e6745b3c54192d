"""Checks of models, rows and settings before a run starts: bad input is named by place."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Lfm2Config, Lfm2ForCausalLM, OlmoeConfig, OlmoeForCausalLM

from cluster.config.estimator import with_estimator
from cluster.config.opd import OpdConfig
from cluster.config.recipes import make
from cluster.config.rollout_checks import check_rollout
from cluster.config.supervised import DpoConfig, SftConfig
from cluster.config.supervised_checks import check_dpo, check_reward_model, check_sft
from distill.data.prompts import Prompt
from distill.data.row_conversion import TooLong
from distill.envs.base import EnvDataset, Mixture
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.single_turn import SingleTurnGroupBuilder
from distill.errors import CheckpointError, ConfigError, DataError, IsothermError
from tests.actors.text_server import API_KEY, MODEL, Says, running_text_server
from tests.conftest import TinyPair
from tests.refusals import refuses
from tests.rows import write_rows
from tests.tiny import EOS, PAD, save_tokenizer, tiny_model_dir

NewOpd = Callable[..., OpdConfig]
NewSft = Callable[..., SftConfig]


@pytest.fixture
def broken(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A copy of the teacher that a test may damage."""
    return Path(shutil.copytree(tiny_pair.teacher, tmp_path / "broken"))


@pytest.fixture
def short(tmp_path: Path) -> str:
    """A model with a context of 32 tokens."""
    made = tiny_model_dir(tmp_path, seed=3, hidden_size=32, layers=1, context_length=32)
    save_tokenizer(made)
    return made


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., str]:
    """prompts(*rows): a file with these rows or lines."""

    def write(*rows: dict | str) -> str:
        path = tmp_path / "prompts.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines))
        return str(path)

    return write


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    """A checkpoint whose experts transformers fuses as it loads them."""
    config = OlmoeConfig(
        vocab_size=160, hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_experts=2, num_experts_per_tok=1, pad_token_id=0,
    )  # fmt: skip
    OlmoeForCausalLM(config).save_pretrained(tmp_path / "mixture")
    return str(tmp_path / "mixture")


def test_a_model_with_tensors_of_other_names_is_refused(
    opd: NewOpd, sft: NewSft, mixture: str, tmp_path: Path
) -> None:
    file = Path(mixture) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.5.up_proj"] = tensors.pop(
        "model.layers.0.mlp.experts.1.up_proj.weight"
    )
    save_file(tensors, file, metadata={"format": "pt"})
    named = "experts.1.up_proj"
    for lora in ({}, {"lora.rank": 2}):
        with refuses(CheckpointError, None, names=named):
            check_rollout(opd(student=mixture, **lora))
        with refuses(CheckpointError, None, names=named):
            check_sft(sft(model=mixture, **lora))
    pairs = make("dpo", model=mixture, data=str(tmp_path / "pairs"), out=str(tmp_path / "out"))
    with refuses(CheckpointError, None, names=named):
        check_dpo(pairs)


def test_a_dense_model_has_no_routers_to_balance(opd: NewOpd) -> None:
    with refuses(ConfigError, "learner.router_aux_coef"):
        check_rollout(opd(router_aux_coef=0.1))


def test_layers_with_a_state_are_not_packed(opd: NewOpd, sft: NewSft, tmp_path: Path) -> None:
    config = Lfm2Config(
        vocab_size=160, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    Lfm2ForCausalLM(config).save_pretrained(tmp_path / "lfm2")
    with refuses(ConfigError, "learner.packing", names="conv"):
        check_sft(sft(model=str(tmp_path / "lfm2"), packing=True))
    with refuses(ConfigError, "learner.packing", names="conv"):
        check_rollout(opd(student=str(tmp_path / "lfm2"), packing=True))
    for config in (opd(packing=True), sft(packing=True)):
        assert config.learner_config().learner.packing


def prompts_of(problems: EnvDataset) -> list[Prompt]:
    builders = [problems.builder(p, 1) for p in range(len(problems))]
    return [each.prompt for each in builders if isinstance(each, SingleTurnGroupBuilder)]


def test_good_inputs_are_read_whole(opd: NewOpd, tiny_pair: TinyPair) -> None:
    inputs = check_rollout(opd())
    train_P, held_out_P = prompts_of(inputs.train), prompts_of(inputs.held_out)
    assert sorted(prompt.line for prompt in train_P + held_out_P) == list(range(1, 21))
    assert len(held_out_P) == 2  # at most a tenth
    first = next(prompt for prompt in train_P if prompt.line == 2)
    assert inputs.tokenizer.decode(first.tokens_T.tolist()) == "0 + 1 ="
    assert first.answer == "1"


def test_the_held_out_prompts_follow_the_seed(opd: NewOpd) -> None:
    def held_out(**settings: float) -> list[int]:
        held_out = check_rollout(opd(**settings)).held_out
        return [held_out.line(p) for p in range(len(held_out))]

    assert held_out(seed=1) == held_out(seed=1)
    assert len({tuple(held_out(seed=seed)) for seed in range(5)}) > 1
    assert len(held_out(eval_size=1)) == 1
    assert len(held_out(eval_size=0.25)) == 5
    assert len(held_out(eval_size=0.01)) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("eval.engines", 1), ("checkpoint.keep_best", "eval/eos_share")]
)
def test_settings_of_evaluations_need_held_out_problems(
    opd: NewOpd, prompts, name: str, value: object
) -> None:
    few = prompts({"prompt": "a"}, {"prompt": "b"})
    with refuses(ConfigError, name, names=f"{name}={value}"):
        check_rollout(opd(**{"prompts": few, "eval_every": 2, name: value}))


def test_corrupt_and_missing_weights_are_refused(opd: NewOpd, sft: NewSft, broken: Path) -> None:
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for role in ("student", "teacher"):
        with refuses(CheckpointError, None, names=str(weights)):
            check_rollout(opd(**{role: str(broken)}))
    with refuses(CheckpointError, None, names=str(weights)):
        check_sft(sft(model=str(broken)))
    weights.unlink()
    with refuses(CheckpointError, None, names=str(broken)):
        check_rollout(opd(student=str(broken)))


def test_a_teacher_with_another_tokenizer_is_refused(opd: NewOpd, broken: Path) -> None:
    save_tokenizer(broken, alphabet="0123456798")
    with refuses(ConfigError, "teacher.model", names="id 11"):
        check_rollout(opd(teacher=str(broken)))


@pytest.mark.parametrize(("setting", "coef"), [("teacher", 0.0), ("reference", 0.1)])
def test_a_model_with_fewer_tokens_than_its_tokenizer_is_refused(
    opd: NewOpd, tmp_path: Path, setting: str, coef: float
) -> None:
    small = tiny_model_dir(tmp_path, seed=3, hidden_size=32, layers=1, vocab_size=50)
    save_tokenizer(small)
    with refuses(ConfigError, setting, names=f"{setting}={small}"):
        check_rollout(opd(**{setting: small, "reference_kl_coef": coef}))


@pytest.mark.parametrize(
    ("line", "field"),
    [('{"prompt": "a"', None), ('"a"', None), ({"prompt": "x" * 121}, "sampling.max_new_tokens")],
    ids=["bad", "text", "long"],
)
@pytest.mark.parametrize("setting", ["prompts", "eval.source"])
def test_a_bad_prompt_is_named_by_file_and_line(
    opd: NewOpd, prompts, setting: str, line: str | dict[str, str], field: str | None
) -> None:
    """Other faults of lines are in tests/distill/test_prompts.py."""
    path = prompts({"prompt": "good"}, "", line)
    with refuses(DataError, field, names=f"{path}:3: "):
        check_rollout(opd(**{setting: path}))


def test_prompts_fit_the_shortest_context_with_the_longest_response(
    opd: NewOpd, prompts, short: str
) -> None:
    path = prompts({"prompt": "x" * 100})
    assert prompts_of(check_rollout(opd(prompts=path)).train)[0].tokens_T.shape == (100,)
    with refuses(TooLong, "sampling.max_new_tokens", names=f"{path}:1: "):
        check_rollout(opd(prompts=path, eval_max_new_tokens=29))
    with refuses(TooLong, "sampling.max_new_tokens", names="context of 32"):
        check_rollout(opd(teacher=short, prompts=prompts({"prompt": "x" * 25})))


def test_a_reward_needs_answers(opd: NewOpd, prompts) -> None:
    path = prompts({"prompt": "a", "answer": "b"}, {"prompt": "c"})
    with refuses(ConfigError, "objective.reward_coef", names=f"{path}:2 "):
        check_rollout(opd(prompts=path, reward_coef=1.0))
    assert len(prompts_of(check_rollout(opd(prompts=path)).train)) == 2


def test_a_bad_supervised_row_is_named_by_file_and_line(sft: NewSft, prompts) -> None:
    assert len(check_sft(sft()).rows_D) == 6
    path = prompts({"prompt": "a", "completion": "b"}, {"prompt": "a"})
    with refuses(DataError, "completion", names=f"{path}:2: "):
        check_sft(sft(data=path))
    path = prompts({"prompt": "a", "completion": "b" * 127})
    for settings in ({"data": path}, {"data": path, "max_length": 16}, {"eval_source": path}):
        with refuses(TooLong, "data.max_length", names=f"{path}:1: 129 tokens"):
            check_sft(sft(**settings))
    for max_length in (1, 129):
        with refuses(ConfigError, "data.max_length"):
            check_sft(sft(max_length=max_length))


def test_rows_that_are_too_long_are_dropped_from_every_source(
    opd: NewOpd, sft: NewSft, tmp_path: Path
) -> None:
    short, long = ({"prompt": "a", "completion": answer} for answer in ("b", "x" * 200))
    data, apart = (
        write_rows(tmp_path / name, short, long, *more)
        for name, more in (("data.jsonl", []), ("apart.jsonl", [short]))
    )
    inputs = check_sft(sft(data=data, eval_source=apart, drop_too_long=True))
    assert [row.source for row in inputs.rows_D] == [f"{data}:1"]
    assert [len(source.rows_D) for source in inputs.held_out] == [2]
    for setting, path in (("data.source", data), ("eval.source", apart)):
        sha256 = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        assert inputs.digests[setting].startswith(f"{sha256}, without 1 rows")

    asked = write_rows(
        tmp_path / "asked.jsonl", *({"prompt": "x" * size} for size in (100, 1, 200))
    )
    for settings, lines in (({}, [1, 2]), ({"eval_max_new_tokens": 29}, [2])):
        kept = check_rollout(opd(prompts=asked, sft_data=data, drop_too_long=True, **settings))
        assert [prompt.line for prompt in prompts_of(kept.train)] == lines
        assert len(kept.sft_rows_D) == 1


# Objectives without a gradient, or with another than they name


def test_a_teacher_equal_to_the_student_is_refused(opd: NewOpd, tiny_pair, prompts) -> None:
    with refuses(ConfigError, "teacher.model", names=f"teacher={tiny_pair.student}"):
        check_rollout(opd(teacher=tiny_pair.student))
    assert len(check_rollout(opd(teacher=tiny_pair.student, reward_coef=1.0)).train)
    hinted = prompts({"prompt": "2+2=", "teacher_prompt": "2+2=4, so 2+2="})
    [prompt] = prompts_of(check_rollout(opd(teacher=tiny_pair.student, prompts=hinted)).train)
    assert prompt.teacher_tokens_T is not None and len(prompt.teacher_tokens_T) == 14


@pytest.mark.parametrize(
    ("settings", "rows", "names"),
    [
        ({}, [{"prompt": "2+2="}], "teacher=policy"),
        ({"teacher.feedback": "{answer}{prompt}"}, [{"prompt": "2+2="}], ":1: "),
        ({"teacher.feedback": "{outcome}{prompt}"}, [{"prompt": "2+2="}], ":1 "),
        (
            {"teacher.feedback": "{feedback}{prompt}"},
            [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3="}],
            "{feedback}",
        ),
        ({"hint_bonus_coef": 0.1}, [{"prompt": "2+2=", "teacher_prompt": "4"}], ":1 "),
        (
            {"hint_bonus_coef": 0.1, "teacher.ema": 0.9, "reward_coef": 1.0},
            [{"prompt": "2+2=", "answer": "4"}],
            "hint_bonus_coef=0.1",
        ),
        ({"teacher.feedback": "{prompt}!"}, [{"prompt": "2", "teacher_prompt": "3"}], ":1: "),
        ({"teacher.feedback": "{prompt}" + "!" * 600}, [{"prompt": "2"}], ":1: "),
    ],
)
def test_a_moving_teacher_needs_hints_or_feedback(
    opd: NewOpd, prompts, settings: dict, rows: list[dict], names: str
) -> None:
    with pytest.raises(IsothermError) as refused:
        check_rollout(opd(teacher="policy", prompts=prompts(*rows), **settings))
    assert names in str(refused.value)
    hinted = {"teacher_feedback": "{prompt}!", "prompts": prompts({"prompt": "2+2="})}
    assert check_rollout(opd(teacher="policy", **hinted)).train.builder(0, 2).hinted


@pytest.mark.parametrize(
    ("path", "estimator"),
    [
        ("/v1", "auto"),
        ("/v1/chat/completions", "sampled"),
        ("/api/v1", "top_k"),
        ("/my/completions", "auto"),
    ],
)
def test_an_endpoint_of_text_cannot_be_the_teacher(opd: NewOpd, path: str, estimator: str) -> None:
    config = opd(teacher=f"http://127.0.0.1:9{path}", estimator=estimator, sft_steps=2)
    with refuses(ConfigError, "teacher.model"):
        check_rollout(with_estimator(config)[0])


def test_an_endpoint_of_text_is_tried_before_the_run(
    opd: NewOpd, prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOTHERM_ENDPOINT_API_KEY", API_KEY)
    with running_text_server() as server:
        endpoint = {"teacher.samples_from": f"{MODEL}@{server.url}", "teacher.sft_steps": 1}
        [teacher] = check_rollout(opd(**endpoint)).text_teachers.values()
        assert teacher.encoder.stop_ids == (EOS,) and len(server.chats) == 1
        server.failures = [Says("", "length")]
        assert check_rollout(opd(**endpoint)).text_teachers  # a model that thinks first
        server.failures = [404]
        with refuses(ConfigError, "teacher.samples_from", names="HTTP 404"):
            check_rollout(opd(**endpoint))
        asked = len(server.chats)
        chat = {"messages": [{"role": "user", "content": "2"}]}
        wide = tiny_model_dir(tmp_path, seed=3, hidden_size=32, layers=1, context_length=1024)
        save_tokenizer(wide)
        games = {"env": TicTacToeGames(), "prompts": None, "student": wide, "teacher": wide}
        games |= {"reward_coef": 1.0}
        with refuses(ConfigError, "teacher.samples_from", names="env=TicTacToeGames"):
            check_rollout(opd(**endpoint | games))
        shows_tools = tmp_path / "tools.jinja"
        shows_tools.write_text("{{ tools if tools else '' }}{{ messages[0].content }}")
        with_tools = {
            "chat_template": str(shows_tools),
            "prompts": prompts(chat | {"tools": [{"name": "f"}]}),
        }
        with refuses(ConfigError, "teacher.samples_from", names=":1 has `tools`"):
            check_rollout(opd(**endpoint, **with_tools))
        texts = endpoint | {"teacher.samples_from": f"{MODEL}@{server.url}/completions"}
        with refuses(ConfigError, "teacher.samples_from", names=":1 is a chat"):
            check_rollout(opd(**texts, prompts=prompts(chat)))
        assert len(server.chats) == asked and not server.completions


@pytest.mark.parametrize("other", [{"hidden_size": 32}, {"vocab_size": 192}], ids=str)
def test_a_head_must_fit_the_teacher(
    opd: NewOpd, tiny_pair: TinyPair, tmp_path: Path, other: dict[str, int]
) -> None:
    config = opd(**{"estimator": "full", "teacher.head": tiny_pair.teacher})
    assert check_rollout(config).states == {"": "also"}
    assert config.teacher_heads and not config.copied_teachers
    head = tiny_model_dir(tmp_path, seed=3, **other)
    with refuses(ConfigError, "teacher.head", names=head):
        check_rollout(opd(**{"estimator": "full", "teacher.head": head}))
    with refuses(CheckpointError, None):
        check_rollout(opd(**{"estimator": "full", "teacher.head": str(tmp_path / "none")}))


def test_top_k_is_below_the_vocabulary(opd: NewOpd) -> None:
    assert len(check_rollout(opd(estimator="top_k", teacher_top_k=159)).train)
    with refuses(ConfigError, "objective.teacher_top_k", names="teacher_top_k=160"):
        check_rollout(opd(estimator="top_k", teacher_top_k=160))


def test_every_teacher_has_prompts_and_every_prompt_a_teacher(
    opd: NewOpd, tiny_pair: TinyPair, prompts
) -> None:
    def two(*rows: dict) -> OpdConfig:
        teachers = {name: {"model": tiny_pair.teacher} for name in ("math", "code")}
        return opd(teacher=None, teachers=teachers, prompts=prompts(*rows))

    good = {"prompt": "a", "teacher": "math"}, {"prompt": "b", "teacher": "code"}
    assert [p.teacher for p in prompts_of(check_rollout(two(*good)).train)] == ["math", "code"]
    with refuses(DataError, "teacher", names=":2: "):
        check_rollout(two(good[0], {"prompt": "b"}))
    with refuses(DataError, "teacher", names="'code'"):
        check_rollout(two(good[0], {"prompt": "b", "teacher": "cod"}))
    with refuses(ConfigError, "teachers.code", names="teachers.code="):
        check_rollout(two(good[0]))


def test_bonuses_count_as_rewards(opd: NewOpd, prompts) -> None:
    paid, unpaid = prompts({"prompt": "a", "bonuses": {"x": 1}}), opd()
    [prompt, *_] = prompts_of(check_rollout(opd(prompts=paid)).train)
    assert prompt.bonuses == {"x": 1}
    check_rollout(opd(prompts=paid, estimator="full", loss="ppo"))
    with refuses(ConfigError, "objective.loss"):
        check_rollout(opd(estimator="full", loss="ppo"))

    given: dict[str, Any] = {
        "student": unpaid.model.path, "out": "out", "temperature": 0.7, "reward_coef": 0.0,
        "max_new_tokens": 8,
    }  # fmt: skip
    check_rollout(make("rl", prompts=paid, **given))
    with refuses(ConfigError, "objective.reward_coef"):
        check_rollout(make("rl", prompts=unpaid.data.source, **given))


def test_supervised_rows_of_a_rollout_recipe(opd: NewOpd) -> None:
    assert check_rollout(opd()).sft_rows_D == []
    with refuses(DataError, None, names="/nowhere.jsonl"):
        check_rollout(opd(sft_data="/nowhere.jsonl"))


@pytest.fixture
def dpo(tiny_pair: TinyPair, prompts) -> Callable[..., DpoConfig]:
    def settings(*rows: dict, **changes: object) -> DpoConfig:
        rows = rows or ({"prompt": "1+1=", "chosen": "2", "rejected": "3"},)
        return make("dpo", model=tiny_pair.student, data=prompts(*rows), out="out", **changes)

    return settings


# Held-out rows


def test_a_share_of_each_source_is_held_out(sft: NewSft, tmp_path: Path) -> None:
    """The choice follows the seed, and rows of one prompt stay together."""
    twice = [{"prompt": f"{a}-1=", "completion": f"{b}"} for a in range(10) for b in "xy"]
    more = write_rows(tmp_path / "more.jsonl", *twice)
    both = f"{sft().data.source},{more}:3"
    inputs = check_sft(sft(data=both, eval_size=0.25))
    first, second = inputs.held_out
    assert [(each.name, len(each.rows_D)) for each in (first, second)] == [("data", 2), ("more", 4)]
    assert [(part.size, part.weight) for part in inputs.parts] == [(4, 1), (16, 3)]
    assert len(inputs.rows_D) == 20
    apart = {row.tokens_T[: row.first_trained].tobytes() for row in (*first.rows_D, *second.rows_D)}
    assert len(apart) == 4  # two of them in the second source, with both rows each
    assert apart.isdisjoint(row.tokens_T[: row.first_trained].tobytes() for row in inputs.rows_D)

    def chosen(**changes: object) -> list[str]:
        made = check_sft(sft(data=both, eval_size=0.25, **changes)).held_out
        return [row.source for each in made for row in each.rows_D]

    assert chosen() == chosen(steps=3) != chosen(seed=1)


def test_held_out_rows_are_some_and_not_those_of_training(sft: NewSft, prompts) -> None:
    same = prompts(*({"prompt": "a", "completion": f"{b}"} for b in range(4)))
    with refuses(ConfigError, "eval.size", names="eval.size=0.5"):
        check_sft(sft(data=same, eval_size=0.5))
    with refuses(ConfigError, "eval.source", names="eval.source="):
        check_sft(sft(eval_source=sft().data.source))
    inputs = check_sft(sft(eval_source=prompts({"prompt": "a", "completion": "b"})))
    assert len(inputs.rows_D) == 6 and [len(each.rows_D) for each in inputs.held_out] == [1]
    assert inputs.digests.keys() == {"data.source", "eval.source"}


# Reward models


def test_a_model_without_a_reward_head_is_no_reward(opd: NewOpd, tiny_pair: TinyPair) -> None:
    graded = {"reward_coef": 1.0, "group_size": 2}
    with refuses(CheckpointError, None, names="Qwen3ForCausalLM"):
        check_rollout(opd(reward=f"model:{tiny_pair.student}", **graded))
    with refuses(CheckpointError, None, names="/nowhere"):
        check_rollout(opd(reward="model:/nowhere", **graded))


def test_rows_of_a_reward_model_end_in_padding(dpo: Callable[..., DpoConfig]) -> None:
    config = dpo()
    given = {"model": config.model.path, "data": config.data.source, "out": "out"}
    inputs = check_reward_model(make("reward_model", **given))
    plain = check_dpo(config)
    assert inputs.padding == PAD == inputs.tokenizer.pad_token_id
    for row, expected in zip(inputs.rows_D, plain.rows_D, strict=True):
        assert row.tokens_T.tolist() == [*expected.tokens_T.tolist(), PAD]
        assert row.num_trained == expected.num_trained + 1
    full = dpo({"prompt": "a", "chosen": "b" * 126, "rejected": "c"})
    assert len(check_dpo(full).rows_D) == 2
    with refuses(TooLong, "data.max_length", names="128 tokens"):
        check_reward_model(make("reward_model", **given))


def test_padding_equal_to_eos_is_replaced(tiny_pair: TinyPair, broken: Path, prompts) -> None:
    path = prompts({"prompt": "a", "chosen": "b", "rejected": "c"})
    tokenizer = AutoTokenizer.from_pretrained(broken)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(broken)
    inputs = check_reward_model(make("reward_model", model=str(broken), data=path, out="out"))
    assert inputs.padding == inputs.tokenizer.pad_token_id != tokenizer.eos_token_id
    assert inputs.rows_D[0].tokens_T[-2] == tokenizer.eos_token_id


def test_a_mixture_cannot_become_a_reward_model(mixture: str) -> None:
    with refuses(CheckpointError, None, names="olmoe"):
        check_reward_model(make("reward_model", model=mixture, data="d", out="o"))


def test_a_dpo_reference_must_fit_the_rows(dpo: Callable[..., DpoConfig], short: str) -> None:
    with refuses(ConfigError, "data.max_length", names=f"reference={short}"):
        check_dpo(dpo(reference=short))
    with refuses(CheckpointError, None, names="/nowhere/at/all"):
        check_dpo(dpo(reference="/nowhere/at/all"))


@pytest.fixture
def sums(tmp_path: Path) -> Callable[..., str]:
    """sums(name, count): a file of so many prompts that start with the name."""

    def write(name: str, count: int, **more: object) -> str:
        rows = [{"prompt": f"{name}{i}=", "answer": str(i)} | more for i in range(count)]
        return write_rows(tmp_path / f"{name}.jsonl", *rows)

    return write


def test_prompts_are_held_out_of_each_source_in_proportion(opd: NewOpd, sums) -> None:
    a, b = sums("a", 40), sums("b", 20)
    inputs = check_rollout(opd(prompts=f"{a}:3,{b}"))
    train, held_out = inputs.train, inputs.held_out
    assert isinstance(train, Mixture) and isinstance(held_out, Mixture)
    parts = [(part.name, part.size, part.weight) for part in train.parts]
    assert parts == [("a", 36, 3), ("b", 18, 1)]
    assert [(part.name, part.size) for part in held_out.parts] == [("a", 4), ("b", 2)]
    seen = [(train.source(p), train.line(p)) for p in range(len(train))]
    seen += [(held_out.source(p), held_out.line(p)) for p in range(len(held_out))]
    assert sorted(seen) == [("a", n) for n in range(1, 41)] + [("b", n) for n in range(1, 21)]
    assert train.label(36) == f"{b}:{train.line(36)}"
    alone = check_rollout(opd(prompts=a)).held_out
    assert len(alone) == 4 and not isinstance(alone, Mixture)


def test_evaluation_prompts_are_taken_from_each_source_in_proportion(opd: NewOpd, sums) -> None:
    both = f"{sums('c', 30)},{sums('d', 10)}"
    held_out = check_rollout(opd(eval_source=both, eval_size=8)).held_out
    assert isinstance(held_out, Mixture)
    assert [(part.name, part.size) for part in held_out.parts] == [("c", 6), ("d", 2)]
    with refuses(ConfigError, "eval.source", names="eval.source="):
        opd(eval_source=f"{sums('c', 3)}:2,{sums('d', 2)}")


def test_columns_rename_known_fields(opd: NewOpd, sft: NewSft) -> None:
    columns = {"promt": "question"}
    with refuses(ConfigError, "columns.promt"):
        check_rollout(opd(columns=columns))
    with refuses(ConfigError, "columns.promt"):
        check_sft(sft(columns=columns))


def test_supervised_sources_are_weighted(sft: NewSft, opd: NewOpd, tmp_path: Path) -> None:
    more = tmp_path / "more.csv"
    more.write_text("prompt,completion\n2+2=,4\n")
    both = f"{sft().data.source}:1,{more}:3"
    inputs = check_sft(sft(data=both))
    parts = [(part.name, part.size, part.weight) for part in inputs.parts]
    assert parts == [("data", 6, 1), ("more", 1, 3)] and len(inputs.rows_D) == 7
    assert inputs.rows_D[6].source == f"{more}:2"
    beside = check_rollout(opd(sft_data=both))
    assert beside.sft_parts == inputs.parts and len(beside.sft_rows_D) == 7
    assert beside.digests["sft.data"] == inputs.digests["data.source"]


def test_pairs_are_read_from_renamed_columns(tiny_pair: TinyPair, tmp_path: Path) -> None:
    data = tmp_path / "pairs.json"
    data.write_text(json.dumps([{"q": "1+1=", "good": "2", "bad": "3"}] * 2))
    keys = {"columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}}
    out = str(tmp_path / "out")
    inputs = check_dpo(make("dpo", model=tiny_pair.student, data=str(data), out=out, **keys))
    assert [(part.name, part.size) for part in inputs.parts] == [("pairs", 2)]
    assert len(inputs.rows_D) == 4
