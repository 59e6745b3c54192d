"""Judge: a language model that rates answers through OpenAI's chat completions.

    score     one answer by a rubric, and by a reference answer if there is one   0 .. 1
    prefer    two answers against each other, in both orders                      0 .. 1

An unreadable verdict is requested once more; if the second one is unreadable, the call fails. The
prompts and the parser of verdicts are in `actors.envs.verdicts`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from actors.envs import verdicts
from actors.envs.verdicts import BEST, COMPARING, PREFERENCES, SCORING, WORST, Messages, Task
from actors.rollout.text_endpoint import (
    Answer,
    AnswerLimits,
    EndpointAddress,
    EndpointRefused,
    TextEndpoint,
    UnusableAnswer,
)
from actors.together import together
from distill.errors import ConfigError, DataError, EngineError
from distill.lookup import known_names
from distill.sampling import EvalSampling

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "ISOTHERM_JUDGE_API_KEY"

_CHECK_S, _CHECKS = 30.0, 4  # before a run
_REFUSED_SETTINGS = (401, 403, 404)  # the key; the path or the model
_REFUSED_QUESTION = (400, 413, 422)
_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Model behind an OpenAI-compatible endpoint. Pickled without its connections.

    The key is read from the environment variable ISOTHERM_JUDGE_API_KEY of the calling process.

    Args:
        url: http(s)://host[:port], with the path of the API if it is not /v1.
        model: name of the model at the endpoint.
        timeout_s: time limit of one attempt in seconds.
        max_concurrent: maximum number of concurrent requests of a process.
        wait_s: time limit in seconds of all attempts, which follow transient failures: busy
            server, lost connection, timeout.
        attempts: maximum number of attempts; None: limited by `wait_s` only.
        max_tokens: maximum number of tokens of a verdict, its reasons included.
        max_chars: maximum number of characters of an answer that the judge sees.

    Raises:
        ConfigError: the address is invalid. `actors.envs.judge_env.Judged` checks the other
            settings.
    """

    url: str
    model: str
    timeout_s: float = 120.0
    max_concurrent: int = 16
    wait_s: float = 600.0
    attempts: int | None = None
    max_tokens: int = 1024
    max_chars: int = 20_000

    def __post_init__(self) -> None:
        _ = self._address

    async def check(self) -> None:
        """Check the endpoint by listing its models (`GET .../models`), which costs nothing.

        Raises:
            ConfigError: the library is missing, or there is no OpenAI-compatible endpoint at `url`.
        """
        quick = replace(self, timeout_s=min(self.timeout_s, _CHECK_S))._endpoint()
        try:
            async with quick.client:
                listed = await quick.models()
        except EngineError as error:
            raise ConfigError(
                f"env.judge_url={self.url} cannot be used: GET .../models: {error}",
                field="env.judge_url",
            ) from None
        if not isinstance(listed, dict) or not isinstance(listed.get("data"), list):
            raise ConfigError(
                f"env.judge_url={self.url} is not an OpenAI-compatible endpoint; its API may be "
                "at another path, such as /v1",
                field="env.judge_url",
            )
        names = [str(each.get("id")) for each in listed["data"] if isinstance(each, dict)]
        if self.model not in names:  # no error: some endpoints do not list all models
            logger.warning(
                "the judge at %s does not list env.judge_model=%s; %s",
                self.url,
                self.model,
                known_names(self.model, names[:_SHOWN]),
            )

    async def try_verdict(self, rubric: str, *, pairs: bool) -> None:
        """Check before a run, with made-up answers, that the judge returns readable verdicts.

        Raises:
            ConfigError: the judge did not answer, or its answer has no verdict line.
        """
        answers = {"answer A": "4", "answer B": "5"} if pairs else {"answer": "4"}
        task = COMPARING if pairs else SCORING
        try:
            await replace(self, attempts=_CHECKS)._verdict(
                task, rubric, "What is 2 + 2?", None, answers
            )
        except (DataError, EngineError) as error:
            raise ConfigError(
                f"env.judge_url={self.url} env.judge_model={self.model} cannot be used: {error}",
                field="env.judge_url",
            ) from None
        finally:
            for endpoint in _CONNECTED.pop(asyncio.get_running_loop(), {}).values():
                await endpoint.client.close()

    async def score(
        self, question: str, answer: str, rubric: str, reference: str | None = None
    ) -> float:
        """Score an answer from 0 to 1. A blank answer gets 0 without a request.

        Raises:
            DataError: the judge refused the question, or returned no verdict twice.
            EngineError: the judge did not answer.
            ConfigError: the endpoint rejects the key, or has no such model.
        """
        if not answer.strip():
            return 0.0
        reply = await self._verdict(SCORING, rubric, question, reference, {"answer": answer})
        return (int(reply) - WORST) / (BEST - WORST)

    async def prefer(
        self, question: str, first: str, second: str, rubric: str, reference: str | None = None
    ) -> float:
        """Compare two answers: 1 if the first is better, 0 if the second is better.

        The result is the mean of the verdicts in both orders. If the answers are equal, or one is
        blank, no request is sent.

        Raises:
            DataError, EngineError, ConfigError: as for `score`.
        """
        if first.strip() == second.strip():
            return 0.5
        if not first.strip() or not second.strip():
            return float(bool(first.strip()))
        forth, back = await together(
            self._preference(question, first, second, rubric, reference),
            self._preference(question, second, first, rubric, reference),
        )
        return (forth + 1 - back) / 2

    async def _preference(
        self, question: str, a: str, b: str, rubric: str, reference: str | None
    ) -> float:
        answers = {"answer A": a, "answer B": b}
        reply = await self._verdict(COMPARING, rubric, question, reference, answers)
        return PREFERENCES[reply]

    async def _verdict(
        self,
        task: Task,
        rubric: str,
        question: str,
        reference: str | None,
        answers: Mapping[str, str],
    ) -> str:
        """Request a verdict, and a second time if the last line of the answer is not one."""
        order = verdicts.order(task, rubric, question, reference, answers, self.max_chars)
        messages: Messages = [{"role": "user", "content": order}]
        reply, cut = "", False
        for _ in range(2):
            answer = await self._ask(messages)
            reply, cut = answer.text, answer.reason == "length"
            found = verdicts.verdict(task, reply)
            if found is not None and not cut:
                return found
            messages = [*messages[:1], *verdicts.reminder(reply[-self.max_chars :])]
        ended = f"was cut off at env.judge_max_tokens={self.max_tokens}" if cut else "ended"
        raise DataError(
            f"the judge {self.model} gave no verdict, asked twice: its last line must be "
            f"{task.form}, and it {ended} with {verdicts.last_line(reply)[-_SHOWN:]!r}. "
            + ("Raise env.judge_max_tokens" if cut else "Use another env.judge_model")
        )

    async def _ask(self, messages: Messages) -> Answer:
        sampling = EvalSampling(temperature=0, max_new_tokens=self.max_tokens)
        try:
            return await self._connected().answer(messages, sampling)
        except UnusableAnswer as error:
            raise DataError(str(error), field="env.judge_url") from None
        except EndpointRefused as error:
            if error.status in _REFUSED_SETTINGS:
                raise ConfigError(str(error), field="env.judge_url") from None
            if error.status in _REFUSED_QUESTION:
                raise DataError(str(error), field="env.judge_url") from None
            raise

    def _connected(self) -> TextEndpoint:
        """Endpoint of the running event loop, opened by its first request."""
        for loop in list(_CONNECTED):
            if loop.is_closed():
                _CONNECTED.pop(loop, None)
        connected = _CONNECTED.setdefault(asyncio.get_running_loop(), {})
        if self not in connected:
            connected[self] = self._endpoint()
        return connected[self]

    def _endpoint(self) -> TextEndpoint:
        """Open the endpoint. Raises ConfigError if the library is missing or the key invalid."""
        return TextEndpoint.open(
            self._address,
            limits=AnswerLimits(
                attempt_s=self.timeout_s,
                all_s=self.wait_s,
                attempts=self.attempts,
                max_unusable=2,
            ),
            max_concurrent=self.max_concurrent,
        )

    @property
    def _address(self) -> EndpointAddress:
        return EndpointAddress(
            url=self.url,
            name=self.model,
            url_setting="env.judge_url",
            name_setting="env.judge_model",
            key_variable=API_KEY_VARIABLE,
        )


# A client's connections belong to the event loop that opened them. Clients of closed loops are
# dropped.
_CONNECTED: dict[asyncio.AbstractEventLoop, dict[Judge, TextEndpoint]] = {}
