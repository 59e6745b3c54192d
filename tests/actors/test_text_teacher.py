"""A teacher that answers in text, behind a real server: its requests and its samples."""

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.rollout.text_endpoint import (
    Answer,
    AnswerLimits,
    EndpointAddress,
    EndpointRefused,
    UnusableAnswer,
    in_a_line,
    text_endpoint,
)
from actors.rollout.text_teacher import TextTeacher
from distill.chat.template import render_text
from distill.data.example_encoder import ExampleEncoder
from distill.data.prompts import Prompt
from distill.engine import GenerateRequest, Sample
from distill.errors import ConfigError, DataError, EngineError
from distill.sampling import TrainSampling
from distill.tokenizer import load_tokenizer
from distill.types import StopReason
from tests.actors.text_server import API_KEY, MODEL, Says, TextServer, running_text_server
from tests.refusals import refuses
from tests.samples import ids
from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer

SAMPLING = TrainSampling(temperature=0.7, max_new_tokens=12)
PATIENCE = AnswerLimits(attempt_s=5.0, all_s=30.0)
CHAT = [{"role": "user", "content": "1 + 1?"}]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextServer]:
    monkeypatch.setenv("ISOTHERM_ENDPOINT_API_KEY", API_KEY)
    with running_text_server() as server:
        yield server


def address(url: str, name: str = MODEL) -> EndpointAddress:
    return EndpointAddress(
        url=url, name=name, url_setting="samples_url", name_setting="samples_name"
    )


def ask(
    where: EndpointAddress, shown: Any = "1 + 1 =", limits: AnswerLimits = PATIENCE, **more: Any
) -> Answer:
    async def answer() -> Answer:
        async with text_endpoint(where, limits=limits, max_concurrent=4) as endpoint:
            return await endpoint.answer(shown, SAMPLING, **more)

    return asyncio.run(answer())


def test_chats_and_texts_are_asked_at_the_run_s_temperature(server: TextServer) -> None:
    for url in (server.url, f"{server.url}/", f"{server.url}/chat/completions", server.url[:-3]):
        assert ask(address(url)) == Answer("yes", "stop")
        assert ask(address(url), CHAT) == Answer("yes", "stop")
    assert ask(address(f"{server.url}/completions")) == Answer("yes", "stop")
    given = {"model": MODEL, "temperature": 0.7, "top_p": 1.0, "max_tokens": 12}
    assert server.completions == [given | {"prompt": "1 + 1 ="}]
    plain = {"role": "user", "content": "1 + 1 ="}
    assert server.chats == [
        given | {"messages": each} for _ in range(4) for each in ([plain], CHAT)
    ]
    with pytest.raises(DataError):
        ask(address(f"{server.url}/completions"), CHAT)


def test_calls_of_a_chat_are_asked_in_openai_s_form(server: TextServer) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    call_message = {"role": "assistant", "content": None, "tool_calls": [call], "weight": 0}
    ask(address(server.url), [*CHAT, call_message])
    written = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    sent = {"role": "assistant", "content": "", "tool_calls": [written]}
    assert [chat["messages"] for chat in server.chats] == [[*CHAT, sent]]


@pytest.mark.parametrize("reason", ["stop", "length", None])
def test_only_an_answer_that_stopped_has_ended(server: TextServer, reason: str | None) -> None:
    server.script = lambda body: Says("a", reason)
    for url in (server.url, f"{server.url}/completions"):
        answer = ask(address(url))
        assert answer == Answer("a", reason) and answer.ended == (reason == "stop")


def test_temporary_failures_and_empty_answers_are_retried(server: TextServer) -> None:
    server.failures = [503, 429, Says(""), Says("b", "content_filter"), 500, Says(None), 408]
    assert ask(address(server.url)) == Answer("yes", "stop")
    assert len(server.chats) == 8 and not server.failures


@pytest.mark.parametrize(
    "answer",
    [Says(""), Says(" \n", "length"), Says(None, "tool_calls"), Says("I can", "content_filter")],
)
def test_repeated_useless_answers_are_an_error(server: TextServer, answer: Says) -> None:
    server.script = lambda body: answer
    with pytest.raises(UnusableAnswer):
        ask(address(server.url))
    assert len(server.chats) == 4


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_prompt_that_it_refuses_is_asked_once(server: TextServer, status: int) -> None:
    server.failures = [status]
    with pytest.raises(EndpointRefused) as caught:
        ask(address(server.url))
    assert API_KEY not in str(caught.value) and len(server.chats) == 1


def test_a_model_that_takes_the_newer_limit_gets_it(server: TextServer) -> None:
    server.limit = "max_completion_tokens"
    assert ask(address(server.url)) == Answer("yes", "stop")
    assert [("max_tokens" in b, b.get(server.limit)) for b in server.chats] == [
        (True, None), (False, 12),
    ]  # fmt: skip
    server.limit = "max_output"
    with pytest.raises(EndpointRefused):
        ask(address(server.url))


def test_errors_of_key_path_and_name_differ_and_hide_the_key(
    server: TextServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EndpointRefused) as path:
        ask(address(f"{server.url}/other"))
    with pytest.raises(EndpointRefused) as name:
        ask(address(server.url, "another"))
    monkeypatch.setenv("ISOTHERM_ENDPOINT_API_KEY", "my-own-secret")
    with pytest.raises(EndpointRefused) as key:
        ask(address(server.url))
    monkeypatch.delenv("ISOTHERM_ENDPOINT_API_KEY")
    with pytest.raises(EndpointRefused):
        ask(address(server.url))
    for caught in (path, name, key):
        error = f"{caught.value!r} {caught.value.__cause__!r}"
        assert "secret" not in error and API_KEY not in error and "samples_url=" in error
    monkeypatch.setenv("ISOTHERM_ENDPOINT_API_KEY", "two\nlines")
    with refuses(ConfigError, "ISOTHERM_ENDPOINT_API_KEY") as odd:
        ask(address(server.url))
    assert "lines" not in str(odd.value)


def test_waiting_ends_with_the_last_trouble(server: TextServer) -> None:
    server.script = lambda body: 503
    with pytest.raises(EngineError) as trouble:
        ask(address(server.url), limits=AnswerLimits(attempt_s=1.0, all_s=1.2))
    assert API_KEY not in str(trouble.value)  # which the server repeats
    server.script = lambda body: 60.0
    with pytest.raises(EngineError):
        ask(address(server.url), limits=AnswerLimits(attempt_s=0.3, all_s=20.0, attempts=2))
    with pytest.raises(EngineError):
        ask(
            address("http://127.0.0.1:9/v1"),
            limits=AnswerLimits(attempt_s=9, all_s=9, attempts=1),
        )


def test_a_pause_that_is_no_number_is_not_taken(server: TextServer) -> None:
    server.failures = [503]
    server.retry_after_ms = "nan"
    assert ask(address(server.url)) == Answer("yes", "stop")


@pytest.mark.parametrize(
    "url",
    [
        *("http://me:secret@h:1/v1", "me:secret@h", "http://h:1/v1?key=secret", "http://h#secret"),
        *("h:8000", "ftp://h:1/v1", "http://", "http://h:none/v1", "http://h:0", "http://[::1"),
        "http://a b",
    ],
)
def test_an_invalid_address_is_refused_without_a_request(url: str) -> None:
    with refuses(ConfigError, "samples_url") as caught:
        address(url)
    assert "secret" not in str(caught.value)
    with refuses(ConfigError, "samples_name"):
        address("http://h:1/v1", " ")


def test_of_a_page_its_text_is_shown() -> None:
    page = "<html><head><title>Oh</title></head><body><p>No&nbsp;GET here, key</p></body></html>"
    line = in_a_line(ValueError(page), "key")
    assert "GET here, ***" in line and "Oh" not in line and "<" not in line


@pytest.mark.parametrize("mark", ["<", "<head>", "<script>a"])
def test_a_page_of_marks_is_read(mark: str) -> None:
    page = "<html>Oh " + mark * 300_000  # in quadratic time, it would be minutes
    assert in_a_line(ValueError(page), "key").startswith("Oh")


@pytest.fixture
def teacher(server: TextServer, tmp_path: Path) -> TextTeacher:
    save_tokenizer(tmp_path)
    encoder = ExampleEncoder(
        tokenizer=load_tokenizer(str(tmp_path)), vocab_size=VOCAB_SIZE, max_length=1 << 20,
        stop_ids=(EOS,),
    )  # fmt: skip
    return TextTeacher(address=address(server.url), encoder=encoder, deadline_s=60.0)


def generate(teacher: TextTeacher, samples: int, teacher_prompt: str = "") -> list[Sample]:
    """Samples of a teacher that was pickled, as in workers."""
    tokenizer = teacher.encoder.tokenizer
    prompt = Prompt(
        tokens_T=render_text(tokenizer, "1 + 1 ="),
        answer=None,
        line=1,
        text="1 + 1 =",
        teacher_prompt=teacher_prompt,
    )

    async def sampled() -> list[Sample]:
        async with pickle.loads(pickle.dumps(teacher)).opened() as opened:
            request = GenerateRequest(
                prompt_tokens_T=ids(3, 4), sampling=SAMPLING, num_samples=samples, seed=1
            )
            return await opened(prompt, lambda: None).generate(request)

    return asyncio.run(sampled())


def test_samples_are_as_long_as_they_come(server: TextServer, teacher: TextTeacher) -> None:
    """A long tail: some end at once, some are cut by the server, some exceed the limit."""
    texts = [Says("a"), Says("b" * 11), Says("c" * 12), Says("d" * 400), Says("e" * 9, "length")]
    server.failures = [503, *texts]
    samples = generate(teacher, 5)
    decode = teacher.encoder.tokenizer.decode
    by_text = {str(decode(s.tokens_T.tolist())): s.stop_reason for s in samples}
    assert by_text == {
        "a<eos>": StopReason.EOS, "b" * 11 + "<eos>": StopReason.EOS, "c" * 12: StopReason.LENGTH,
        "d" * 12: StopReason.LENGTH, "e" * 8: StopReason.LENGTH,
    }  # fmt: skip
    for each in samples:
        assert len(each.tokens_T) <= 12
        assert (EOS in each.tokens_T.tolist()) == (each.stop_reason is StopReason.EOS)


def test_the_teacher_sees_the_privileged_context(server: TextServer, teacher: TextTeacher) -> None:
    [sample] = generate(teacher, 1, teacher_prompt="1 + 1 = (it is 2)")
    assert [b["messages"][0]["content"] for b in server.chats] == ["1 + 1 = (it is 2)"]
    assert np.array_equal(sample.tokens_T[-1:], [EOS])


async def test_while_it_waits_it_is_known_to_be_alive(
    server: TextServer, teacher: TextTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.rollout.text_teacher.TICK_S", 0.01)
    server.script = lambda body: 0.3
    progress: list[None] = []
    prompt = Prompt(tokens_T=ids(3), answer=None, line=1, text="1")
    request = GenerateRequest(prompt_tokens_T=ids(3), sampling=SAMPLING, num_samples=1, seed=1)
    async with replace(teacher).opened() as opened:
        sampler = opened(prompt, lambda: progress.append(None))
        [sample] = await sampler.generate(request)
    assert len(progress) > 1 and sample.stop_reason is StopReason.EOS
