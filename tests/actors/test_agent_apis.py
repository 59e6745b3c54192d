"""The endpoint's other APIs, responses and completions, used by the real `openai` library."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.envs.agent_endpoint import AgentEndpoint
from distill.chat.template import render_text
from distill.engine import GenerateRequest, Sample
from distill.tools.calculator import Calculator
from distill.types import StopReason, Trajectory
from tests.agents import TALKS, Client, Said, assert_trained_as_sampled, sdk, served
from tests.samples import TEMPERATURE
from tests.scripted import Script, Scripted, call, chat_tokenizer

TOKENIZER = chat_tokenizer()

QUESTION = "What is 6*7?"
CALL = call("calculator", {"expression": "6*7"})
SCHEMA: Any = Calculator().schema
FLAT: Any = [{"type": "function", **SCHEMA["function"]}]
UNTOUCHED = {"rewritten": 0, "unmatched": 0, "breaks": 0}
ITEM = "input[0]"


def played(client: Client, script: Script | Sequence[str]) -> Trajectory:
    [trajectory] = served(client, Scripted(TOKENIZER, script), TOKENIZER).trajectories_G
    return trajectory


async def respond(endpoint: AgentEndpoint, given: Any, **options: Any) -> Any:
    async with sdk(endpoint) as client:
        return await client.responses.create(model="m", input=given, **options)


async def complete(endpoint: AgentEndpoint, prompt: Any, **options: Any) -> Any:
    async with sdk(endpoint) as client:
        return await client.completions.create(model="m", prompt=prompt, **options)


def test_responses_give_the_same_segment_as_chat_completions() -> None:
    """With a tool, an instruction, and the items sent back unchanged."""

    async def by_responses(endpoint: AgentEndpoint) -> None:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        settings = {"instructions": "Be brief.", "tools": FLAT}
        turn = await respond(endpoint, items, **settings)
        assert turn.status == "completed" and turn.usage.output_tokens > 0
        [asked] = turn.output
        assert (asked.type, asked.name) == ("function_call", "calculator")
        assert json.loads(asked.arguments) == {"expression": "6*7"}
        items += [each.model_dump() for each in turn.output]
        items += [{"type": "function_call_output", "call_id": asked.call_id, "output": "42"}]
        turn = await respond(endpoint, items, **settings)
        assert turn.output_text == "42"

    async def by_chat(endpoint: AgentEndpoint) -> None:
        messages: list[Any] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": QUESTION},
        ]
        async with sdk(endpoint) as client:
            for result in ("42", None):
                turn: Any = await client.chat.completions.create(
                    model="m", messages=messages, tools=[SCHEMA]
                )
                message = turn.choices[0].message
                messages.append(message.model_dump())
                if result:
                    [asked] = message.tool_calls
                    messages.append({"role": "tool", "tool_call_id": asked.id, "content": result})

    one, other = (played(each, [CALL, "42"]) for each in (by_responses, by_chat))
    assert one.metrics == other.metrics == UNTOUCHED
    [segment], [expected] = one.segments, other.segments
    assert segment.tokens_T.tolist() == expected.tokens_T.tolist()
    assert segment.action_mask_T.tolist() == expected.action_mask_T.tolist()


def test_a_response_is_kept_for_the_next_unless_it_is_not_stored() -> None:
    async def client(endpoint: AgentEndpoint) -> None:
        first = await respond(endpoint, QUESTION)
        second = await respond(endpoint, "Again.", previous_response_id=first.id, store=False)
        reference = {"type": "item_reference", "id": first.output[0].id}
        more = {"role": "user", "content": "Again."}
        third = await respond(endpoint, [{"role": "user", "content": QUESTION}, reference, more])
        assert [turn.output_text for turn in (first, second, third)] == ["a", "b", "c"]
        for given in ({"previous_response_id": second.id}, {"previous_response_id": "other"}):
            with pytest.raises(openai.BadRequestError) as caught:
                await respond(endpoint, "Again.", **given)
            assert caught.value.code == "previous_response_not_found"
            assert caught.value.param == "previous_response_id"

    trajectory = played(client, ["a", "b", "c"])
    assert trajectory.metrics == UNTOUCHED
    one, other = trajectory.segments  # the third continues the second's prompt: a branch
    assert str(TOKENIZER.decode(one.tokens_T.tolist())).count(str(TOKENIZER.eos_token)) >= 2
    assert other.action_mask_T.sum() == 2


@pytest.mark.parametrize("reply", [CALL, "forty-two", f"<think>\nso\n</think>\n\n{CALL}"])
def test_a_stream_of_events_is_the_response(reply: str) -> None:
    """The library rebuilds the whole response from the events."""

    async def client(endpoint: AgentEndpoint) -> None:
        asked: Any = {"model": "m", "input": QUESTION, "tools": FLAT}
        async with sdk(endpoint) as own, own.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            rebuilt = await stream.get_final_response()
        whole = await respond(endpoint, QUESTION, tools=FLAT)
        assert [event.sequence_number for event in events] == [*range(len(events))]
        assert [item.type for item in rebuilt.output] == [item.type for item in whole.output]
        assert rebuilt.output_text == whole.output_text
        for one, other in zip(rebuilt.output, whole.output, strict=True):
            if one.type == "function_call" and other.type == "function_call":
                assert one.arguments == other.arguments
        assert events[-1].type == "response.completed"

    assert len(played(client, [reply, reply]).segments) == 2


def test_options_of_responses() -> None:
    async def client(endpoint: AgentEndpoint) -> None:
        short = await respond(endpoint, QUESTION, max_output_tokens=2)
        assert short.status == "incomplete"
        assert short.incomplete_details.reason == "max_output_tokens"
        [item] = (
            await respond(endpoint, QUESTION, include=["message.output_text.logprobs"])
        ).output
        [part] = item.content
        assert "".join(each.token for each in part.logprobs).startswith(part.text)
        assert {each.logprob for each in part.logprobs} == {-0.5}
        plain = await respond(endpoint, QUESTION, tools=FLAT, tool_choice="none")
        assert plain.output_text == CALL, "it has no tools"

    policy = Scripted(TOKENIZER, ["many words", "so", CALL])
    served(client, policy, TOKENIZER)
    assert "calculator" not in policy.seen[2]


def test_a_continued_text_keeps_its_tokens() -> None:
    """A loop that stops at a word and continues is one segment; another prompt is another."""

    async def client(endpoint: AgentEndpoint) -> None:
        prompt = "Q: 6*7?\nA:"
        turn = await complete(endpoint, prompt, stop="Look:")
        [choice] = turn.choices
        assert (choice.text, choice.finish_reason) == (" hm ", "stop")
        again = await complete(endpoint, f"{prompt}{choice.text}Look: 42\nA:")
        assert again.choices[0].text == " 42"
        ended = f"{prompt}{choice.text}Look: 42\nA: 42{TOKENIZER.eos_token}\nQ: and?\nA:"
        await complete(endpoint, ended)
        await complete(endpoint, "Q: other\nA:")

    trajectory = played(client, [" hm Look: 43", " 42", " so", " no"])
    one, other = trajectory.segments
    words = str(TOKENIZER.decode(one.tokens_T.tolist()))
    stop = str(TOKENIZER.eos_token)
    assert words == f"Q: 6*7?\nA: hm Look: 42\nA: 42{stop}\nQ: and?\nA: so{stop}"
    assert str(TOKENIZER.decode(other.tokens_T.tolist())) == f"Q: other\nA: no{stop}"


def test_options_of_completions() -> None:
    async def client(endpoint: AgentEndpoint) -> None:
        ids = render_text(TOKENIZER, QUESTION).tolist()
        several = await complete(endpoint, [ids, ids], n=2, logprobs=0)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in several.choices] == ["a", "b", "c", "d"]
        for choice in several.choices:
            assert choice.logprobs.token_logprobs == [-0.5, -0.5]
            assert choice.logprobs.tokens[0] == choice.text
            assert choice.logprobs.text_offset == [0, 1]
        assert several.usage.prompt_tokens == 2 * len(ids)
        [short] = (await complete(endpoint, QUESTION, max_tokens=2)).choices
        assert short.finish_reason == "length"
        stream = await complete(
            endpoint, QUESTION, stream=True, stream_options={"include_usage": True}
        )
        parts = [part async for part in stream]
        assert "".join(choice.text for part in parts for choice in part.choices) == "words"
        assert parts[-1].usage.completion_tokens > 0

    trajectory = played(client, ["a", "b", "c", "d", "many words", "words"])
    assert len(trajectory.segments) == 6


# Path and a valid request by API.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
    "responses": ("/responses", {"input": QUESTION}),
    "completions": ("/completions", {"prompt": QUESTION}),
}


@pytest.mark.parametrize(
    ("api", "options", "field"),
    [
        ("chat", {"n": 0}, "n"),
        ("chat", {"max_tokens": -1}, "max_tokens"),
        ("chat", {"stop": [""]}, "stop"),
        ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ("chat", {"functions": []}, "functions"),
        ("responses", {"input": 3}, "input"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, ITEM),
        ("responses", {"input": [{"type": "computer_call"}]}, ITEM),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, ITEM),
        ("responses", {"input": [{"type": "reasoning", "content": 3}]}, ITEM),
        ("responses", {"input": [{"type": "reasoning", "summary": ["a"]}]}, ITEM),
        ("responses", {"previous_response_id": []}, "previous_response_id"),
        ("responses", {"include": True}, "include"),
        ("responses", {"tools": {}, "include": 5}, "include"),
        ("responses", {"tools": 5}, "tools"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0]"),
        ("responses", {"conversation": "c"}, "conversation"),
        ("responses", {"background": True}, "background"),
        ("responses", {"top_logprobs": 2}, "top_logprobs"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("completions", {"echo": True}, "echo"),
        ("completions", {"suffix": "s"}, "suffix"),
        ("completions", {"logprobs": 2}, "logprobs"),
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1 << 30]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": ["a", 1]}, "prompt"),
        ("completions", {"n": 0}, "n"),
    ],
    ids=str,
)
def test_bad_requests_are_refused(api: str, options: dict[str, Any], field: str | None) -> None:
    path, good = REQUESTS[api]

    async def client(endpoint: AgentEndpoint) -> None:
        async with sdk(endpoint) as own:
            with pytest.raises(openai.BadRequestError) as caught:
                await own.post(path, body=good | options, cast_to=object)
            assert field is None or caught.value.param == field
            await own.post(path, body=good, cast_to=object)

    played(client, ["a"])


@pytest.mark.parametrize("api", REQUESTS)
def test_limits_are_the_api_s_own_errors(api: str) -> None:
    path, good = REQUESTS[api]
    [name] = good
    long = [{"role": "user", "content": "1" * 300}] if name == "messages" else "1" * 300

    async def client(endpoint: AgentEndpoint) -> None:
        async with sdk(endpoint) as own:

            async def refused(code: str, **options: Any) -> None:
                with pytest.raises(openai.BadRequestError) as caught:
                    await own.post(path, body=good | options, cast_to=object)
                assert caught.value.code == code

            await refused("context_length_exceeded", **{name: long})
            assert endpoint.limit is StopReason.LENGTH
            if api != "responses":  # more than the remaining turns, which stay available
                await refused("turn_limit_exceeded", n=2)
            await own.post(path, body=good, cast_to=object)
            assert endpoint.limit is None
            await refused("turn_limit_exceeded")

    policy = Scripted(TOKENIZER, ["a"])
    [trajectory] = served(client, policy, TOKENIZER, max_tokens=200, max_turns=1).trajectories_G
    assert trajectory.stop_reason is StopReason.TURNS


@pytest.mark.parametrize("api", REQUESTS)
def test_client_sampling_is_refused_with_client_sampling_refuse(api: str) -> None:
    """The run's own values, and neutral values, are no conflict."""
    path, given = REQUESTS[api]
    conflicts = {
        "temperature": TEMPERATURE + 0.1, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1,
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
        "logit_bias": {"1": 5},
    }  # fmt: skip
    harmless = {
        "temperature": TEMPERATURE, "top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0,
        "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {},
    }  # fmt: skip
    policy = Scripted(TOKENIZER, ["a"])

    async def client(endpoint: AgentEndpoint) -> None:
        async with sdk(endpoint) as own:
            for name, value in conflicts.items():
                with pytest.raises(openai.BadRequestError) as caught:
                    await own.post(path, body=given | {name: value}, cast_to=object)
                assert caught.value.param == name
                assert caught.value.code == "unsupported_value"
                assert str(value) in str(caught.value).replace('"', "'")
            assert not policy.requests
            await own.post(path, body=given | harmless, cast_to=object)

    served(client, policy, TOKENIZER, client_sampling="refuse")


def _spaces_in_words() -> PreTrainedTokenizerBase:
    """Tokenizer that, like Llama 2's, decodes without the space that it puts before a text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    marks = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*marks, *every_byte], show_progress=False
    )
    backend.train_from_iterator(["user assistant system hi more words\n: Go on."] * 9, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        unk_token="<unk>", additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return made


@pytest.mark.parametrize("api", sorted(TALKS))
@pytest.mark.parametrize("make_tokenizer", [chat_tokenizer, _spaces_in_words])
def test_special_tokens_and_broken_bytes_within_answers(
    make_tokenizer: Callable[[], PreTrainedTokenizerBase], api: str
) -> None:
    """The tokens are trained as sampled, and the client's next request continues after them.

    Bytes that form no character come back as the replacement character. In a chat the model is then
    shown that character, which starts a new segment; raw prompts keep the tokens.
    """
    tokenizer = make_tokenizer()
    vocabulary = tokenizer.get_vocab()
    start, pad = vocabulary["<|im_start|>"], vocabulary[str(tokenizer.pad_token)]
    bos = vocabulary.get("<s>", pad)
    a, e = vocabulary["a"], vocabulary["e"]
    letters = [vocabulary[each] for each in "hi"]  # not as the tokenizer writes the word
    [broken] = [vocabulary[each] for each in ("<0xE6>", "\u00e6") if each in vocabulary][:1]
    answers = [
        [a, start, e], [pad, a], [a, bos, pad, pad], [start], letters, [*letters, broken, a],
        [broken], [a, broken], letters,
    ]  # fmt: skip
    stop = vocabulary[str(tokenizer.eos_token)]
    sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    class Says:
        async def generate(self, request: GenerateRequest) -> list[Sample]:
            tokens = [*answers[len(sampled)], stop]
            sampled.append((tuple(request.prompt_tokens_T.tolist()), tuple(tokens)))
            return [
                Sample(
                    tokens_T=np.array(tokens, np.int32),
                    logprobs_T=np.full(len(tokens), -0.5, np.float32),
                    versions_T=np.zeros(len(tokens), np.int32),
                    stop_reason=StopReason.EOS,
                )
            ]

    async def client(endpoint: AgentEndpoint) -> None:
        chat = [Said("user", "hi")]
        async with sdk(endpoint) as own:
            for _ in answers:
                text = await TALKS[api](own, chat)
                ended = text + str(tokenizer.eos_token) if api == "completions" else text
                chat += [Said("assistant", ended), Said("user", "Go on.")]

    group = served(client, Says(), tokenizer)
    assert_trained_as_sampled(group, sampled)
    [trajectory] = group.trajectories_G
    broken_answers = 0 if api == "completions" else 3
    assert trajectory.metrics == UNTOUCHED | {"breaks": broken_answers}
    assert len(trajectory.segments) == 1 + broken_answers
