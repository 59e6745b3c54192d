"""The endpoint of an agent's episode, used by the real `openai` library."""

import asyncio
import json
import logging
import socket
from collections.abc import Sequence
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.envs.agent_endpoint import AgentEndpoint
from distill.engine import GenerateRequest, Sample
from distill.errors import EngineError
from distill.tools.calculator import Calculator
from tests.agents import TALKS, Noise, Said, assert_trained_as_sampled, sdk, served
from tests.scripted import Scripted, call, chat_tokenizer

TOKENIZER = chat_tokenizer()

CALL = call("calculator", {"expression": "6*7"})
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is 6*7?"}]
TOOLS: Any = [Calculator().schema]


async def complete(endpoint: AgentEndpoint, messages: list[Any], **options: Any) -> Any:
    async with sdk(endpoint) as client:
        return await client.chat.completions.create(model="m", messages=messages, **options)


def test_a_conversation_with_tools_is_one_segment() -> None:
    """The client drops nothing and reformats the arguments; the tokens stay as sampled."""

    async def client(endpoint: AgentEndpoint) -> None:
        messages = list(ASKED)
        turn = await complete(endpoint, messages, tools=TOOLS)
        [choice] = turn.choices
        assert choice.finish_reason == "tool_calls"
        [asked] = choice.message.tool_calls
        assert json.loads(asked.function.arguments) == {"expression": "6*7"}
        dumped = choice.message.model_dump()
        arguments = json.dumps(json.loads(asked.function.arguments), indent=2)
        dumped["tool_calls"][0]["function"]["arguments"] = arguments
        messages += [dumped, {"role": "tool", "tool_call_id": asked.id, "content": "42"}]
        turn = await complete(endpoint, messages, tools=TOOLS)
        assert turn.choices[0].message.content == "42"
        assert turn.choices[0].finish_reason == "stop"
        assert turn.usage.completion_tokens > 0

    [trajectory] = served(client, Scripted(TOKENIZER, [CALL, "42"]), TOKENIZER).trajectories_G
    [segment] = trajectory.segments
    text = TOKENIZER.decode(segment.tokens_T[segment.action_mask_T].tolist())
    assert CALL in text and text.count(str(TOKENIZER.eos_token)) == 2
    assert trajectory.metrics == {"rewritten": 0, "unmatched": 0, "breaks": 0}


def test_a_rewritten_history_begins_a_segment() -> None:
    async def client(endpoint: AgentEndpoint) -> None:
        await complete(endpoint, ASKED)
        answered = {"role": "assistant", "content": "one"}
        again = {"role": "user", "content": "Again."}
        await complete(endpoint, [*ASKED, answered, again])
        await complete(endpoint, [*ASKED, answered, again, {"role": "assistant", "content": "two"}])
        await complete(endpoint, [answered, again])
        await complete(endpoint, [*ASKED, {"role": "assistant", "content": "other"}, again])

    policy = Scripted(TOKENIZER, ["one", "two", "three", "four", "five"])
    [trajectory] = served(client, policy, TOKENIZER).trajectories_G
    assert len(trajectory.segments) == 3
    assert trajectory.metrics == {"rewritten": 1, "unmatched": 1, "breaks": 0}


def test_options_of_requests() -> None:
    """Options n, max_tokens, stop, logprobs and streams of the API."""

    async def client(endpoint: AgentEndpoint) -> None:
        several = await complete(endpoint, ASKED, n=3)
        assert [choice.index for choice in several.choices] == [0, 1, 2]
        [short] = (await complete(endpoint, ASKED, max_completion_tokens=2)).choices
        assert short.finish_reason == "length"
        [stopped] = (await complete(endpoint, ASKED, stop=["STOP"], logprobs=True)).choices
        assert stopped.message.content == "on and "
        assert "".join(each.token for each in stopped.logprobs.content).startswith("on and STOP")
        assert {each.logprob for each in stopped.logprobs.content} == {-0.5}
        stream = await complete(
            endpoint, ASKED, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        parts = [part async for part in stream]
        [asked] = parts[0].choices[0].delta.tool_calls
        assert asked.function.name == "calculator"
        assert parts[-2].choices[0].finish_reason == "tool_calls"
        assert parts[-1].usage.completion_tokens > 0

    policy = Scripted(TOKENIZER, ["a", "b", "c", "many words", "on and STOP and on", CALL])
    [trajectory] = served(client, policy, TOKENIZER).trajectories_G
    assert [request.sampling.max_new_tokens for request in policy.requests] == [
        48, 48, 48, 2, 48, 48,
    ]  # fmt: skip
    assert len(trajectory.segments) == 6
    words = str(TOKENIZER.decode(trajectory.segments[4].tokens_T.tolist()))
    assert words.endswith("STOP"), "what followed was not asked for, and is not trained"


def test_the_client_s_sampling_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    async def client(endpoint: AgentEndpoint) -> None:
        for _ in range(2):
            await complete(endpoint, ASKED, temperature=0.123, top_p=0.5, presence_penalty=0)

    policy = Scripted(TOKENIZER, ["a", "b"])
    with caplog.at_level(logging.WARNING, "actors.envs.agent_requests"):
        served(client, policy, TOKENIZER)
    [line] = [record.getMessage() for record in caplog.records]
    assert "temperature=0.123" in line and "top_p=0.5" in line and "presence" not in line
    assert len({request.sampling for request in policy.requests}) == 1


def test_a_retry_gets_the_first_answer_and_a_repeat_a_new_one() -> None:
    async def client(endpoint: AgentEndpoint) -> None:
        keyed = {"extra_headers": {"Idempotency-Key": "k"}}
        counted = {"extra_headers": {"x-stainless-retry-count": "1"}}
        answers = [
            await complete(endpoint, ASKED, **options)
            for options in ({}, {}, counted, keyed, keyed)
        ]
        texts = [answer.choices[0].message.content for answer in answers]
        assert texts == ["a", "b", "b", "c", "c"]

    policy = Scripted(TOKENIZER, ["a", "b", "c"])
    assert len(served(client, policy, TOKENIZER).trajectories_G[0].segments) == 3


def test_a_client_that_leaves_in_its_request_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def client(endpoint: AgentEndpoint) -> None:
        port = int(endpoint.base_url.split(":")[2].partition("/")[0])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n"
        writer.write(f"{head}Authorization: Bearer {endpoint.key}\r\n\r\n{{".encode())
        await writer.drain()
        await asyncio.sleep(0.1)  # its handler waits for the rest
        writer.transport.abort()
        await complete(endpoint, ASKED)

    served(client, Scripted(TOKENIZER, ["a"]), TOKENIZER)
    assert not [line for line in caplog.records if line.name.startswith(("actors", "aiohttp"))]


def test_a_client_that_never_reads_its_answer_does_not_block_its_episode() -> None:
    """The request is trained, and the episode ends while its handler still writes."""
    words = "words " * 20

    async def client(endpoint: AgentEndpoint) -> None:
        port = int(endpoint.base_url.split(":")[2].partition("/")[0])
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.connect(("127.0.0.1", port))
        body = json.dumps({"messages": ASKED, "n": 128, "logprobs": True, "stream": True})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}"
        deaf.sendall(f"{head}\r\nAuthorization: Bearer {endpoint.key}\r\n\r\n{body}".encode())
        clients.append(deaf)
        while len(endpoint.turns) < 128:
            await asyncio.sleep(0.02)

    clients: list[socket.socket] = []
    policy = Scripted(TOKENIZER, [words] * 128)
    [trajectory] = served(client, policy, TOKENIZER, max_turns=128).trajectories_G
    assert len(trajectory.segments) == 128
    clients[0].close()


def test_the_key_is_the_episode_s_and_ends_with_it() -> None:
    ended: list[AgentEndpoint] = []

    async def client(endpoint: AgentEndpoint) -> None:
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        for key in ("other", ended[0].key if ended else ""):
            with pytest.raises(openai.AuthenticationError):
                async with sdk(endpoint, api_key=key) as stranger:
                    await stranger.models.list()
        async with (
            aiohttp.ClientSession(headers={"Authorization": "Bearer \udcff"}) as stranger,
            stranger.get(f"{endpoint.base_url}/models") as answer,
        ):
            assert answer.status == 401  # bytes that are no UTF-8 are no key
        if ended:
            with pytest.raises(openai.APIConnectionError):
                await complete(ended[0], ASKED)
        async with sdk(endpoint) as own:
            assert [model.id async for model in own.models.list()] == ["policy"]
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {endpoint.key}"}
        ) as web:
            for path, body, status in [
                ("chat/completions", b"{", 400), ("chat/completions", b"[]", 400),
                ("chat/completions", bytes(65 << 20), 413), ("embeddings", b"{}", 404),
            ]:  # fmt: skip
                async with web.post(f"{endpoint.base_url}/{path}", data=body) as answer:
                    assert answer.status == status
                    assert (await answer.json())["error"]["message"]
        await complete(endpoint, ASKED)
        ended.append(endpoint)

    for _ in range(2):
        served(client, Scripted(TOKENIZER, ["a"]), TOKENIZER)


def test_an_engine_s_failure_ends_the_client() -> None:
    class Broken:
        async def generate(self, request: GenerateRequest) -> list[Sample]:
            raise EngineError("gone")

    async def client(endpoint: AgentEndpoint) -> None:
        while True:  # as an agent that retries forever
            with pytest.raises(openai.InternalServerError):
                await complete(endpoint, ASKED)

    with pytest.raises(EngineError, match="gone"):
        served(client, Broken(), TOKENIZER)


# Next action of a client, the number of its conversation, and the API.
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["new", "go on", "repeat", "edit", "forget", "both", "cancel"]),
        st.integers(0, 5),
        st.sampled_from(sorted(TALKS)),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(acts=ACTS, seed=st.integers(0, 1000))
def test_sampled_tokens_are_trained_as_sampled_after_any_requests(
    acts: Sequence[tuple[str, int, str]], seed: int
) -> None:
    """Every sampled token is trained once, after the exact tokens that the engine was given.

    Conversations continue by any of the APIs, and answers may have special tokens in them.
    """
    policy = Noise(TOKENIZER, seed, special=0.1)

    async def client(endpoint: AgentEndpoint) -> None:
        chats: list[list[Said]] = []
        own = sdk(endpoint)

        async def ask(chat: Sequence[Said], api: str) -> None:
            chats.append([*chat, Said("assistant", await TALKS[api](own, chat))])

        async def abandoned(chat: Sequence[Said], api: str) -> None:
            task = asyncio.create_task(ask(chat, api))
            await asyncio.sleep(0.002 * (seed % 5))
            task.cancel()
            await asyncio.wait({task})

        more = Said("user", "Go on.")
        await ask([Said("user", "What?")], "chat")
        for act, number, api in acts:
            chat = chats[number % len(chats)]
            edited = [*chat[:-1], Said("assistant", "never said"), more]
            await {
                "new": lambda n=number, a=api: ask([Said("user", str(n))], a),
                "go on": lambda c=chat, a=api: ask([*c, more], a),
                "repeat": lambda c=chat, a=api: ask(c[:-1], a),
                "edit": lambda e=edited, a=api: ask(e, a),
                "forget": lambda c=chat, a=api: ask([*c[2:], more], a),
                "both": lambda c=chat, a=api: asyncio.gather(
                    ask([*c, more], a), ask([*c, more], a)
                ),
                "cancel": lambda c=chat, a=api: abandoned([*c, more], a),
            }[act]()
        await own.close()

    assert_trained_as_sampled(served(client, policy, TOKENIZER), policy.sampled)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), turns=st.integers(1, 5))
def test_an_unchanged_history_extends_the_segment(seed: int, turns: int) -> None:
    """Two concurrent conversations are one segment each.

    Exceptions are sampled tokens that are not the tokens of any text.
    """

    async def client(endpoint: AgentEndpoint) -> None:
        async def converse(name: str) -> None:
            messages: list[Any] = [{"role": "user", "content": name}]
            for _ in range(turns):
                turn = await own.chat.completions.create(model="m", messages=messages)
                message = {"role": "assistant", "content": turn.choices[0].message.content}
                messages += [message, {"role": "user", "content": "Go on."}]

        async with sdk(endpoint) as own:
            await asyncio.gather(converse("1"), converse("2"))

    [trajectory] = served(client, Noise(TOKENIZER, seed), TOKENIZER).trajectories_G
    assert len(trajectory.segments) == 2 + trajectory.metrics["breaks"]
    assert trajectory.metrics["rewritten"] == trajectory.metrics["unmatched"] == 0
