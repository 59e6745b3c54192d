"""Administrative requests to an SGLang server, and the server properties that loads depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.sglang.client import SglangClient
from distill.errors import DataError, EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Properties of a server that determine how weights are loaded.

    Attributes:
        ranks: degree of tensor parallelism.
        drafts: True if the server uses speculative decoding.
        own_draft: True if the draft model is part of the served model's checkpoint.
        adapters: maximum number of LoRA adapters that the server holds; 0: LoRA is disabled.
    """

    ranks: int
    drafts: bool
    own_draft: bool
    adapters: int = 0

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ServerFacts:
        draft = info.get("speculative_draft_model_path")
        return cls(
            ranks=int(info.get("tp_size") or 1),
            drafts=info.get("speculative_algorithm") is not None,
            own_draft=draft is None or draft == info.get("model_path"),
            adapters=int(info.get("max_loaded_loras") or 0) if info.get("enable_lora") else 0,
        )

    @property
    def has_other_draft(self) -> bool:
        return self.drafts and not self.own_draft

    @property
    def selector(self) -> dict[str, str]:
        """Selector of the server's models that a load updates; a separate draft is excluded.

        A separate draft has tensors with the same names (`layers.0...`), so it would load the
        policy's weights.
        """
        return {"selector": "all" if self.drafts and self.own_draft else "target"}


class ServerAdmin:
    """Client for the administrative requests of one server."""

    def __init__(self, client: SglangClient) -> None:
        self._client = client
        self._facts: ServerFacts | None = None

    async def order(self, path: str, body: Mapping[str, Any], *, allowance_s: float = 0) -> Any:
        """Send an administrative request and return the answer.

        Args:
            allowance_s: seconds added to the deadline, for the bytes of a load.

        Raises:
            EngineError: the request failed, or the server refused it.
        """
        try:
            answer = await self._client.admin(path, body, allowance_s=allowance_s)
        except DataError as error:  # status 400: a refusal with its reason
            raise EngineError(str(error)) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{path} was refused: {answer.get('message', answer)}")
        return answer

    async def facts(self) -> ServerFacts:
        if self._facts is None:
            self._facts = ServerFacts.of(await self._client.get("/server_info"))
        return self._facts
