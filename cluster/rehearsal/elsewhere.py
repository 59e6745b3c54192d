"""Teachers that run elsewhere, in a rehearsal: each is asked one canary, a twin does the rest."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from actors.sglang.external import ExternalSglangEngine
from distill.engine import EngineInfo
from distill.errors import EngineError, IsothermError
from distill.handshake.canary import Answer, CanaryRows, first_fault

# Of the whole conversation: a server that is this busy with others would hold up every step.
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What a server answered, or what is wrong with it and the remedy."""

    works: bool
    told: str
    seconds: float


def ask_once(
    url: str, temperature: float, *, given: int, top_k: int, deadline_s: float = _DEADLINE_S
) -> Elsewhere:
    """Has a server score one canary row at T and 1.5 T, as training will ask it.

    Args:
        given, top_k: tokens at each position, as `CanaryRows.of` takes them.
    """
    began = time.monotonic()
    works = False
    try:
        asked = _asked(url, temperature, given, top_k)
        info, rows, answer = asyncio.run(asyncio.wait_for(asked, deadline_s))
        fault = first_fault(answer, rows)
        works, told = not fault, f"{url} answers, and {fault}"
        if works:
            told = (
                f"{url} scores {len(answer.at_T_N)} tokens at T={temperature:g}, log q "
                f"{float(answer.at_T_N.mean()):.3g} in the mean; {info.temperature_scaling}, "
                f"{info.dtype}, vocabulary {info.vocab_size}, context {info.context_length}"
            )
    except TimeoutError:
        told = (
            f"{url} did not answer within {deadline_s:g} s: it is overloaded, or hangs; each step "
            "would wait for it"
        )
    except (EngineError, IsothermError) as error:
        told = f"{url} does not score: {error}"
    return Elsewhere(works=works, told=told, seconds=time.monotonic() - began)


async def _asked(
    url: str, temperature: float, given: int, top_k: int
) -> tuple[EngineInfo, CanaryRows, Answer]:
    engine = ExternalSglangEngine(url=url, request_deadline_s=_DEADLINE_S)
    try:
        info = await engine.info()
        rows = CanaryRows.of(info, temperature, given=given, top_k=top_k, number=1)
        return info, rows, rows.answer(await engine.score(rows.requests))
    finally:
        await engine.close()
