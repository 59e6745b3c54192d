"""OpenAI's responses API: items instead of messages, and typed events instead of chunks.

    input items                                     message
    reasoning, message, function_call ...           one assistant message with tool calls
    function_call_output                            tool message
    message of another role                         message of the same role

Answers are kept until the episode ends, unless `store` is false. Requests refer to them by
`previous_response_id` and `item_reference`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actors.envs.agent_requests import (
    AgentAnswer,
    AgentRequest,
    Body,
    ChatPrompt,
    RefusedRequest,
    refuse_fields,
    with_content,
)
from distill.chat.template import check_messages
from distill.errors import DataError
from distill.types import StopReason

Item = Mapping[str, Any]

_NOT_THERE = {
    "background": "leave it out: a request is answered when its sample is complete",
    "conversation": "give `previous_response_id`, or all items",
    "prompt": "give `instructions` and `input`",
    "top_logprobs": 'leave it out; `include` "message.output_text.logprobs" for the sampled tokens',
    "n": "a response is one sample; send several requests",
}
_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = {
    "input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text",
    "summary_text": "text", "refusal": "refusal",
}  # fmt: skip


class ResponsesApi:
    """/v1/responses of one episode."""

    path = "/v1/responses"

    def __init__(self) -> None:
        self._responses: dict[str, Sequence[Item]] = {}
        self._items: dict[str, Item] = {}

    def read(self, body: Body) -> AgentRequest:
        refuse_fields(body, _NOT_THERE)
        messages = _messages(self._history(body))
        if instructions := body.get("instructions"):
            messages = [{"role": "system", "content": instructions}, *messages]
        tools = () if body.get("tool_choice") == "none" else _tools(_listed(body, "tools"))
        return AgentRequest.of(
            body,
            [ChatPrompt(messages=check_messages(with_content(messages), "input"), tools=tools)],
            max_tokens=("max_output_tokens",),
            logprobs=_LOGPROBS in _listed(body, "include"),
        )

    def body(self, answer: AgentAnswer) -> dict[str, Any]:
        asked, output = answer.request.body, _output(answer)
        if asked.get("store") is not False:
            self._responses[_name(answer)] = [*self._history(asked), *output]
            self._items.update({item["id"]: item for item in output})
        return _response(answer, output)

    def events(self, answer: AgentAnswer) -> Iterator[str]:
        whole = self.body(answer)
        for number, event in enumerate(_events(whole)):
            event["sequence_number"] = number
            yield f"event: {event['type']}\ndata: {json.dumps(event)}"

    def _history(self, body: Body) -> list[Item]:
        """Items of the previous response and its history, then the items of the request."""
        previous = body.get("previous_response_id")
        if previous is not None and str(previous) not in self._responses:
            raise RefusedRequest(
                f"the previous response {str(previous)[:80]!r} is not stored: it belongs to "
                "another episode, or was requested with store=false; send all items",
                field="previous_response_id",
                code="previous_response_not_found",
            )
        return [*self._responses.get(str(previous), ()), *self._given(body.get("input"))]

    def _given(self, value: object) -> Iterator[Item]:
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise DataError(
                f"`input` must be a text or a list of items, got {str(value)[:80]}", field="input"
            )
        for number, item in enumerate(value):
            if item.get("type") != "item_reference":
                yield item
            elif (known := self._items.get(str(item.get("id")))) is not None:
                yield known
            else:
                raise RefusedRequest(
                    f"`input[{number}]`: the item {str(item.get('id'))[:80]!r} is not stored; "
                    "send the item itself",
                    field=f"input[{number}]",
                    code="item_not_found",
                )


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Convert items to chat messages. Items of one assistant turn are merged into one message."""
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match item.get("type") or "message":
            case "message" if item.get("role") == "assistant":
                if last is None or last.keys() & {"content", "tool_calls"}:
                    messages.append(last := {"role": "assistant"})
                last["content"] = _text(item.get("content"), where)
            case "message":
                content = _text(item.get("content"), where)
                messages.append({"role": item.get("role"), "content": content})
            case "reasoning":
                text = _text(item.get("content") or item.get("summary") or [], where)
                messages.append({"role": "assistant", "reasoning_content": text})
            case "function_call":
                if last is None:
                    messages.append(last := {"role": "assistant"})
                last.setdefault("tool_calls", []).append(
                    {
                        "id": item.get("call_id"),
                        "type": "function",
                        "function": {name: item.get(name) for name in ("name", "arguments")},
                    }
                )
            case "function_call_output":
                content = _text(item.get("output"), where)
                call_id = item.get("call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case kind:
                raise DataError(
                    f"`{where}` has the type {kind!r}; supported are messages, reasoning, "
                    "function_call and function_call_output",
                    field=where,
                )
    return messages


def _text(content: object, where: str) -> str:
    """Text of an item's content, which is a string or a list of text parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get(_TEXT_PARTS.get(str(kind), "")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise DataError(
                f"`{where}` has a part of type {kind!r}: only text is supported", field=where
            )
        texts.append(text)
    return "".join(texts)


def _listed(body: Body, name: str) -> list[Any]:
    """List in a field of the body; empty if the field is missing."""
    value = body.get(name) or []
    if not isinstance(value, list):
        raise DataError(f"`{name}` must be a list, got {str(value)[:80]}", field=name)
    return value


def _tools(tools: Sequence[object]) -> tuple[Mapping[str, Any], ...]:
    """Convert flat tool schemas to the form of chat completions.

    Raises:
        DataError: a tool is not a function. The endpoint does not run tools.
    """
    nested = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise DataError(
                f"`tools[{number}]` must be a function, got {str(tool)[:80]}: the endpoint does "
                "not run tools",
                field=f"tools[{number}]",
            )
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        nested.append({"type": "function", "function": function})
    return tuple(nested)


def _output(answer: AgentAnswer) -> list[dict[str, Any]]:
    """Items of an answer: reasoning, text, and calls."""
    [choice] = answer.choices
    message, status = choice.message, _status(answer)
    calls, content = message.get("tool_calls") or (), message.get("content") or ""
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": thought}
        items.append(
            {"id": f"rs_{answer.name}", "type": "reasoning", "summary": [], "content": [text]}
        )
    if content or not calls:
        text = {"type": "output_text", "text": content, "annotations": []}
        text["logprobs"] = choice.logprobs()
        items.append(
            {
                "id": f"msg_{answer.name}", "type": "message", "role": "assistant",
                "status": status, "content": [text],
            }
        )  # fmt: skip
    for number, call in enumerate(calls):
        items.append(
            {
                "id": f"fc_{answer.name}_{number}", "type": "function_call", "status": status,
                "call_id": call["id"], **call["function"],
            }
        )  # fmt: skip
    return items


def _name(answer: AgentAnswer) -> str:
    return f"resp_{answer.name}"


def _status(answer: AgentAnswer) -> str:
    is_cut = answer.choices[0].sample.stop_reason is StopReason.LENGTH
    return "incomplete" if is_cut else "completed"


def _response(answer: AgentAnswer, output: Sequence[Item]) -> dict[str, Any]:
    asked, status = answer.request.body, _status(answer)
    return {
        "id": _name(answer),
        "object": "response",
        "created_at": answer.created,
        "model": answer.request.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
        "tools": asked.get("tools") or [],
        "tool_choice": asked.get("tool_choice") or "auto",
        "parallel_tool_calls": True,
        "instructions": asked.get("instructions"),
        "previous_response_id": asked.get("previous_response_id"),
        "max_output_tokens": answer.request.max_tokens,
        "metadata": asked.get("metadata") or {},
        "store": asked.get("store") is not False,
    }


def _events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of a response. Each item is sent in one piece, because it is already complete."""
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index}
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        added = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", **at, "item": added}
        yield from _item_events(item, {"item_id": item["id"], **at})
        yield {"type": "response.output_item.done", **at, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _item_events(item: Item, at: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if item["type"] == "function_call":
        kind, words = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{kind}.delta", **at, "delta": words}
        yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": words}
        return
    [part] = item["content"]
    place = {**at, "content_index": 0}
    kind = f"response.{part['type']}"
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = part | {"text": ""} | ({"logprobs": []} if logprobs else {})
    yield {"type": "response.content_part.added", **place, "part": empty}
    yield {"type": f"{kind}.delta", **place, "delta": part["text"], **logprobs}
    yield {"type": f"{kind}.done", **place, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}
